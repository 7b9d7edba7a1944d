"""Exact match and its variants, as the published question-answering results use them.

The normalisation is that of SQuAD: lower case, no ASCII punctuation, no articles, single spaces. Dashes and quotes
outside of ASCII stay, so that scores are comparable.
"""

from __future__ import annotations

import re
import string
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(a|an|the)\b")


class GoldError(ValueError):
    """A row without usable gold answers."""


def normalise(text: str) -> str:
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def gold_answers(golds: Any) -> list[str]:
    """Gold answers as a list of texts, from a text, bytes, a sequence or NumPy array of them, or {"target": any of
    these}. Raises GoldError."""
    if isinstance(golds, Mapping):
        if "target" not in golds:
            raise GoldError(f"golds {dict(golds)!r} have no key 'target'")
        golds = golds["target"]
    if isinstance(golds, str | bytes):
        golds = [golds]
    elif hasattr(golds, "tolist"):  # a NumPy array, of any shape
        golds = golds.tolist()
        golds = golds if isinstance(golds, list) else [golds]
    if not isinstance(golds, list | tuple | set) or not golds:
        raise GoldError(f"golds are {golds!r}; they must be a text or a non-empty list of texts")
    texts = [gold.decode() if isinstance(gold, bytes) else gold for gold in golds]
    if not all(isinstance(text, str) for text in texts):
        raise GoldError(f"golds {texts!r} must all be texts")
    return texts


def exact_match(prediction: str | None, golds: Any) -> bool:
    """Whether the normalised prediction equals a normalised gold. None (no answer was given) matches nothing."""
    golds = gold_answers(golds)
    return prediction is not None and normalise(prediction) in {normalise(gold) for gold in golds}


def sub_exact_match(prediction: str | None, golds: Any) -> bool:
    """Whether a normalised gold lies inside the normalised prediction. A gold of punctuation alone lies in nothing."""
    golds = [normalise(gold) for gold in gold_answers(golds)]
    return prediction is not None and any(gold and gold in normalise(prediction) for gold in golds)


def regex_match(prediction: str | None, patterns: Any) -> bool:
    """For data sets whose golds are regular expressions (CuratedTREC): one is found in the prediction."""
    patterns = gold_answers(patterns)
    return prediction is not None and any(re.search(p, prediction, re.IGNORECASE) for p in patterns)


def summarize(rows: Iterable[tuple[str, str | None, Any]]) -> dict[str, Any]:
    """(data set, prediction, golds) of every question -> EM and SubEM: micro, macro (mean over data sets), per set."""
    per_set: dict[str, list[tuple[bool, bool]]] = defaultdict(list)
    for name, prediction, golds in rows:
        per_set[name].append((exact_match(prediction, golds), sub_exact_match(prediction, golds)))
    result: dict[str, Any] = {"questions": sum(map(len, per_set.values())), "sets": {}}
    for place, measure in enumerate(("em", "sub_em")):
        means = {name: _mean([row[place] for row in rows]) for name, rows in sorted(per_set.items())}
        for name, mean in means.items():
            result["sets"].setdefault(name, {"questions": len(per_set[name])})[measure] = mean
        result[f"micro_{measure}"] = _mean([row[place] for rows in per_set.values() for row in rows])
        result[f"macro_{measure}"] = _mean(list(means.values()))
    return result


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))
