"""Which tokens of a reply are its thought and which its action, found in the text they decode to."""

from __future__ import annotations

import bisect
import re
from collections.abc import Collection, Sequence

import numpy as np

from seed_jax import tokenizer as tok

SPANS = ("all", "action", "thought")
_TAGS = {"action": "action", "thought": "think"}


def tag_span(tokenizer, response_ids: Sequence[int], tag: str) -> slice:
    """The response tokens between <tag> and </tag>; empty if there is no such block. Case does not matter.

    The token that completes the first tag is outside, as is the one that completes the second.
    """
    opening, closing = f"<{tag}>", f"</{tag}>"

    def prefix(length: int) -> str:
        return tok.decode(tokenizer, response_ids[:length]).lower()

    def shortest(holds) -> int:
        """The least number of tokens whose text satisfies `holds`, which stays true from there on; -1 if none does."""
        lengths = range(len(response_ids) + 1)
        found = bisect.bisect_left(lengths, True, key=lambda length: holds(prefix(length)))
        return found if found < len(lengths) else -1

    start = shortest(lambda text: opening in text)
    end = shortest(lambda text: opening in text and closing in text[text.index(opening) :])
    return slice(start, end - 1) if end >= 0 else slice(0, 0)


def span_mask(tokenizer, response_ids: Sequence[int], span: str) -> np.ndarray | None:
    """True at the tokens of the span ("action" or "thought"), [n]; None for "all".

    Raises:
        ValueError: unknown span.
    """
    if span not in SPANS:
        raise ValueError(f"span is {span!r}; choose one of {', '.join(SPANS)}")
    if span == "all":
        return None
    mask = np.zeros(len(response_ids), bool)
    mask[tag_span(tokenizer, response_ids, _TAGS[span])] = True
    return mask


_NUMBERED = re.compile(r"\b[a-z]+ \d+\b", re.IGNORECASE)


def numbered_names(text: str) -> set[str]:
    """The names with a number in a text, such as "shelf 2", in lower case."""
    return {name.lower() for name in _NUMBERED.findall(text)}


def name_mask(tokenizer, response_ids: Sequence[int], names: Collection[str]) -> np.ndarray:
    """True at the tokens that spell one of the numbered names (in lower case), [n]."""
    mask = np.zeros(len(response_ids), bool)
    texts = tok.token_texts(tokenizer, response_ids) if names else []
    ends = np.cumsum([len(text) for text in texts])
    for match in _NUMBERED.finditer("".join(texts)):
        if match.group().lower() in names:
            first, last = np.searchsorted(ends, (match.start(), match.end() - 1), side="right")
            mask[first : last + 1] = True
    return mask
