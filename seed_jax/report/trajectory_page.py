"""The trajectory page: episodes token by token, coloured by what the skill endorsed.

Log-probs are rounded to a hundredth of a nat. Episodes lie in compressed chunks that the page unpacks when one of them
is opened, so that hundreds of them open at once and stay within `budget`.
"""

from __future__ import annotations

import base64
import json
import string
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from seed_jax.report import markup
from seed_jax.report.runs import ReportError, Run
from seed_jax.runtime.logging import PANEL_TRAJECTORIES_FILE, TRAJECTORIES_FILE, read_jsonl

SCRIPTS = ("episode.js", "trajectories.js")  # that the page runs
CHUNK = 20  # episodes in a chunk
BUDGET = 5_000_000  # bytes of a page
MAX_CHARS = 20_000  # of an observation; the rest is left out and the page says how much
_UNIT = 100  # numbers a nat
_SHOWN_GATES = ("sig_gap", "hard", "none", "const")  # those that follow from a token's gap alone
_AGAIN = (
    "A second attempt plays a game again with the skill of its first attempt in the prompt; side by side, the skill "
    "stands between them."
)
_TAUGHT = "Colour is the change of each sampled token's log-prob when the skill stands in the prompt."
_SAMPLE = 3 * CHUNK  # episodes by which the size of all is estimated
_ROOM, _SURE = 0.95, 0.8  # share of the budget that an estimate may fill; below the second it needs no check
_SHELL = 120_000  # bytes that the page takes without its episodes, with room to spare


def read_trajectories(run: Run) -> list[dict[str, Any]]:
    """Recorded episodes by the age of the weights, panel games marked: a training episode of iteration n and a panel
    game after n - 1 iterations are played by the same weights. Second attempts follow their first ones."""
    try:
        training, panel = (read_jsonl(run.workdir / file) for file in (TRAJECTORIES_FILE, PANEL_TRAJECTORIES_FILE))
    except ValueError as error:
        raise ReportError(str(error)) from error
    records = [{**r, "panel": False, "age": r["iteration"] - 1} for r in training]
    records += [{**r, "panel": True, "age": r["iteration"]} for r in panel]
    return sorted(records, key=lambda r: (r["age"], not r["panel"], _first_attempt(r), r["index"]))


def _first_attempt(record: Mapping[str, Any]) -> int:
    """The number of the first attempt: of a second one that which it follows, else its own."""
    of = record.get("attempt_of")  # runs of before have none
    return record["index"] if of is None else of


def _is_second(record: Mapping[str, Any]) -> bool:
    return record.get("attempt_of") is not None


def body(run: Run, records: Sequence[Mapping[str, Any]], limit: int, budget: int = BUDGET) -> str:
    """limit: episodes to show at most; more, or more bytes than `budget`, are thinned out evenly, and the page says
    so."""
    shown = fitting(run, thinned(records, limit), budget - _SHELL)
    index, chunks = encode(run, shown)
    notes = []
    if len(shown) < len(records):
        notes.append(
            markup.warning(f"{len(shown)} of {len(records)} recorded episodes are shown, to keep the page small.")
        )
    gate = run.config["distill.gate"]
    if run.config["distill.kind"] != "none" and gate not in _SHOWN_GATES:
        notes.append(
            markup.warning(
                f"The run's gate, {gate}, depends on more than the token's gap; the page shows sigmoid(beta * gap)."
            )
        )
    if any(map(_is_second, shown)):
        notes.append(f'<p class="note">{markup.text(_AGAIN)}</p>')
    data = "".join(f'<script type="text/plain" id="chunk{i}">{chunk}</script>' for i, chunk in enumerate(chunks))
    shell = string.Template((markup.ASSETS / "trajectories.html").read_text())
    taught = any("teacher" in turn for record in shown for turn in record["turns"])
    return shell.substitute(
        title="Which tokens the skill endorsed" if taught else "What the policy wrote",
        colour=_TAUGHT if taught else "Colour is the probability of each sampled token: this run has no teacher.",
        method=markup.text(run.method),
        seed=run.seed,
        notes="".join(notes),
        data=index + data,
    )


def fitting(run: Run, records: Sequence[Mapping[str, Any]], budget: int) -> Sequence[Mapping[str, Any]]:
    """As many of them as `budget` bytes hold by the size of a sample, and then fewer until they do."""

    def size(some: Sequence[Mapping[str, Any]]) -> int:
        index, chunks = encode(run, some)
        return len(index) + sum(map(len, chunks))

    sample = thinned(records, _SAMPLE)
    estimate = size(sample) / max(1, len(sample)) * len(records)
    if estimate > budget:
        records = thinned(records, max(1, int(len(records) * _ROOM * budget / estimate)))
    while len(records) > 1 and estimate > _SURE * budget and size(records) > budget:
        records = thinned(records, max(1, int(len(records) * _ROOM)))
    return records


def thinned(records: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of them, evenly spaced; a first attempt and the second ones behind it stay together."""
    if len(records) <= count:
        return list(records)
    tries: list[list[Any]] = []
    for record in records:
        if tries and _is_second(record) and _same_try(tries[-1][0], record):
            tries[-1].append(record)
        else:
            tries.append([record])
    kept = min(count, len(tries))
    while True:
        chosen = [record for i in range(kept) for record in tries[len(tries) * i // kept]]
        if len(chosen) <= count or kept == 1:
            return chosen[:count]
        kept = kept * count // len(chosen) or 1


def _same_try(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one[name] == other[name] for name in ("iteration", "panel")) and (
        _first_attempt(one) == _first_attempt(other)
    )


def encode(run: Run, records: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
    """(index element, chunks in base64)."""
    config = run.config
    places = {(r["iteration"], r["index"]): i for i, r in enumerate(records) if not r["panel"] and not _is_second(r)}
    index = {
        "chunk": CHUNK,
        "first": _first(records),
        "gate": config["distill.gate"],
        "beta": config["distill.beta"],
        "threshold": config["distill.threshold"],
        "skill_title": "Skill of the teacher"
        if config["hindsight.control"] == "none"
        else "What stands in for the skill",
        "episodes": [
            {
                **{name: record[name] for name in ("task", "family", "goal", "won", "iteration", "panel", "age")},
                "count": len(record["turns"]),
                **_attempt(record, places),
            }
            for record in records
        ],
    }
    return markup.embed("index", index), [_pack(part) for part in _parts(records)]


def _attempt(record: Mapping[str, Any], places: Mapping[tuple[int, int], int]) -> dict[str, Any]:
    """Of a second attempt: that it is one, and the place of the first among those shown, null if it is not."""
    if not _is_second(record):
        return {}
    return {"second": True, "first": places.get((record["iteration"], record["attempt_of"]))}


def _first(records: Sequence[Mapping[str, Any]]) -> int:
    """The episode that opens first: where the skill endorses and rejects the most tokens by half a nat."""

    def contrast(record: Mapping[str, Any]) -> int:
        turns = [turn for turn in record["turns"] if "teacher" in turn]
        gaps = [t - s for turn in turns for t, s in zip(turn["teacher"], turn["student"], strict=True)]
        return (1 + sum(gap > 0.5 for gap in gaps)) * (1 + sum(gap < -0.5 for gap in gaps))

    return max(range(len(records)), key=lambda i: contrast(records[i]), default=0)


def _parts(records: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[Mapping[str, Any]]]:
    for start in range(0, len(records), CHUNK):
        yield records[start : start + CHUNK]


def _pack(records: Sequence[Mapping[str, Any]]) -> str:
    words: dict[str, int] = {}
    content = {"episodes": [_episode(record, words) for record in records], "words": list(words)}
    # A lone half of a surrogate pair becomes its JSON escape.
    data = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")
    return base64.b64encode(zlib.compress(data, 6)).decode()


def _episode(record: Mapping[str, Any], words: dict[str, int]) -> dict[str, Any]:
    found = {
        "skill": record["skill"],
        "skill_error": record["skill_error"],
        "wrong": record["wrong_skill"],
        "given": record["given_skill"],
    }
    whole = record["given_skill"] if _is_second(record) else record["skill"]
    return {**found, "turns": [_turn(turn, whole, words) for turn in record["turns"]]}


def _turn(turn: Mapping[str, Any], skill: str | None, words: dict[str, int]) -> dict[str, Any]:
    """Short names, as the page's script reads them; o: observation, im: its picture, x: token texts as places in
    `words`, s: log-probs of the policy, t and w: gaps of teacher and wrong skill."""
    seen = turn["observation"]
    if len(seen) > MAX_CHARS:
        seen = f"{seen[:MAX_CHARS]} [... {len(seen) - MAX_CHARS} more characters are left out of this page]"
    packed = {
        "o": seen,
        "c": turn["command"],
        "v": int(turn["valid"]),
        "a": int(turn["admissible"]),
        "x": [words.setdefault(token, len(words)) for token in turn["tokens"]],
        "s": [round(x * _UNIT) for x in turn["student"]],
    }
    for key, view in (("t", "teacher"), ("w", "wrong")):
        if view in turn:
            packed[key] = [round((a - b) * _UNIT) for a, b in zip(turn[view], turn["student"], strict=True)]
    for key, name in (("im", "image"), ("th", "thought"), ("ac", "action"), ("k", "kind")):
        if turn.get(name):
            packed[key] = turn[name]
    if turn["skill"] and turn["skill"] != skill:
        packed["sk"] = turn["skill"]
    return packed
