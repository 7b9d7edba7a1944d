"""From the analyst's answer to a skill, or to the reason why there is none.

The answer is untrusted model output: it is decoded as JSON and nothing else is ever evaluated. Two habits of language
models are repaired first, both outside of strings only: commas before a closing bracket, and Python spelling (single
quotes, True / False / None). What cannot be used is rejected with a reason, because a skill that is really the text
"None" or the echoed template would still be inserted in the teacher prompt and distilled from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from seed_jax.types import Skill

SKILL_KEY = "episode_skill"
SUMMARY_KEY = "episode_summary"
STEPS_KEY = "step_skills"
REASONS = ("no_json", "unfinished", "no_skill", "not_text", "template", "too_short")

_FENCE = re.compile(r"```(?:json)?\s*(.*?)```", re.DOTALL | re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z]+")
_DECODER = json.JSONDecoder(strict=False)  # models put raw line breaks inside strings
_CLOSING = {"{": "}", "[": "]"}
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
# What the requested JSON shape shows in place of a value, and the usual words for "no value".
_TEMPLATE_WORDS = frozenset({"string", "str", "text", "none", "null", "n/a", "na", "skill", SKILL_KEY, "episode skill"})
# An answer is a few hundred tokens; hostile ones with thousands of braces must not cost quadratic time.
_MAX_STARTS = 64


def parse_skill(text: str, min_words: int = 1) -> Skill | None:
    """The skill in the analyst's answer, None when it has no usable one (`explain` says why)."""
    return explain(text, min_words)[0]


def explain(text: str, min_words: int = 1) -> tuple[Skill | None, str]:
    """The skill and "", or None and one of REASONS.

    Entries of a list `step_skills`, {"step": number from 1, "skill": text}, come along where they are usable.
    The first JSON object with the key `episode_skill` counts: fenced blocks before the rest, outer objects before the
    ones nested in them. A missing or non-text summary becomes "".

    - no_json: no JSON object at all
    - unfinished: no skill, and an object was still open when the answer ended
    - no_skill: JSON objects, none with the key
    - not_text: the value is null, a list, a number
    - template: the value is a word that stands for a value ("string", "None", "...", "<...>")
    - too_short: fewer than `min_words` words; blank is too short whatever the minimum

    Args:
        text: the decoded answer.
        min_words: fewest whitespace-separated words of a usable skill.
    """
    found_any = False
    for record in _records(text):
        found_any = True
        if SKILL_KEY in record:
            return _check(record, min_words)
    if _is_unfinished(text):
        return None, "unfinished"
    return None, "no_skill" if found_any else "no_json"


def _check(record: dict[str, Any], min_words: int) -> tuple[Skill | None, str]:
    value, summary = record[SKILL_KEY], record.get(SUMMARY_KEY)
    if not isinstance(value, str):
        return None, "not_text"
    skill = _encodable(value).strip()
    if _is_template(skill):
        return None, "template"
    if len(skill.split()) < max(1, min_words):
        return None, "too_short"
    summary = _encodable(summary).strip() if isinstance(summary, str) else ""
    return Skill(summary, skill, _steps(record.get(STEPS_KEY), min_words)), ""


def _steps(value: Any, min_words: int) -> tuple[tuple[int, str], ...]:
    """Usable skills of single steps, (turn from 0, text); the answer counts steps from 1. Each step has one."""
    found: dict[int, str] = {}
    for record in value if isinstance(value, list) else ():
        step, text = (record.get("step"), record.get("skill")) if isinstance(record, dict) else (None, None)
        if isinstance(step, int) and not isinstance(step, bool) and step >= 1 and isinstance(text, str):
            text = _encodable(text).strip()
            if not _is_template(text) and len(text.split()) >= max(1, min_words):
                found.setdefault(step - 1, text)
    return tuple(found.items())


def _is_template(skill: str) -> bool:
    if not skill:
        return False
    bare = skill.strip(" \t\n\"'`.…,;:!?-_*()[]{}<>").lower()
    return not bare or bare in _TEMPLATE_WORDS or bool(re.fullmatch(r"<[^<>]*>|\{[^{}]*\}", skill))


def _records(text: str) -> Iterator[dict[str, Any]]:
    for candidate in (*_FENCE.findall(text), text):
        position = candidate.find("{")
        for _ in range(_MAX_STARTS):
            if position < 0:
                break
            value, end = _decode_at(candidate, position)
            yield from _objects(value)
            position = candidate.find("{", end)


def _decode_at(text: str, start: int) -> tuple[Any, int]:
    """The JSON value at `start` and where it ends; (None, start + 1) when there is none, so that the search goes on."""
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):  # model output: broken, nested without bound, numbers of any size
        pass
    repaired, end = _repair(text, start)
    if repaired:
        try:
            return _DECODER.decode(repaired), end
        except (ValueError, RecursionError):
            pass
    return None, start + 1


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """The dicts in a decoded value, outer before inner, in document order."""
    waiting = [value]
    while waiting:
        current = waiting.pop()
        if isinstance(current, dict):
            yield current
            waiting.extend(reversed(current.values()))
        elif isinstance(current, list):
            waiting.extend(reversed(current))


def _repair(text: str, start: int) -> tuple[str, int]:
    """Rewrites the bracketed value at `start` as JSON; ("", start + 1) when its brackets never close.

    Python strings become JSON strings, Python words JSON words, and a comma before a closing bracket goes. Strings
    themselves are never altered.
    """
    pieces: list[str] = []
    expected: list[str] = []
    position = start
    while position < len(text):
        char = text[position]
        if char in "\"'":
            string, position = _read_string(text, position)
            pieces.append(string)
            continue
        word = _WORD.match(text, position)
        if word:
            pieces.append(_PYTHON_WORDS.get(word.group(), word.group()))
            position = word.end()
            continue
        position += 1
        if char in _CLOSING:
            expected.append(_CLOSING[char])
        elif char in "}]":
            if not expected or expected.pop() != char:
                break
            while pieces and pieces[-1].isspace():
                pieces.pop()
            if pieces and pieces[-1] == ",":
                pieces.pop()
        pieces.append(char)
        if not expected:
            return "".join(pieces), position
    return "", start + 1


def _read_string(text: str, start: int) -> tuple[str, int]:
    """The quoted string at `start` as a JSON string and the position behind it; an open string runs to the end."""
    quote, position, pieces = text[start], start + 1, []
    while position < len(text) and text[position] != quote:
        char = text[position]
        if char == "\\" and position + 1 < len(text):
            escaped = text[position + 1]
            pieces.append("'" if escaped == "'" else char + escaped)  # \' exists in Python, not in JSON
            position += 2
            continue
        pieces.append('\\"' if char == '"' else char)
        position += 1
    return '"' + "".join(pieces) + '"', position + 1


def _is_unfinished(text: str) -> bool:
    """Whether an object is still open at the end; quotes count inside objects only (prose has apostrophes)."""
    depth, position = 0, 0
    while position < len(text):
        char = text[position]
        if char == '"' and depth:
            position = _read_string(text, position)[1]
            continue
        depth = max(0, depth + (char == "{") - (char == "}"))
        position += 1
    return depth > 0


def _encodable(text: str) -> str:
    """Replaces lone surrogates (JSON can spell them, UTF-8 and tokenizers cannot)."""
    return text.encode("utf-8", "replace").decode("utf-8")
