"""From the policy's response text to an EZPoints action and a format verdict."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

NUMBERS = tuple(str(number) for number in range(1, 11))
OPERATORS = ("+", "*")
EQUALS = "="
ACTIONS = (*NUMBERS, *OPERATORS, EQUALS)
WORDS = {
    "and": "+",
    "with": "*",
    "is": EQUALS,
}  # how the compact prompt writes those that small models have no token for
_BLOCK = re.compile(r"<action>(.*?)</action>", re.IGNORECASE | re.DOTALL | re.ASCII)
_DECODER = json.JSONDecoder(strict=False)  # line breaks inside of texts are common


class Action(NamedTuple):
    """`command`: one of ACTIONS, None for none; `valid`: the format verdict, which here is whether there is one."""

    command: str | None
    valid: bool


def parse(text: str, *, compat: bool = False) -> Action:
    """Reads the "action" of the JSON object in a response (keys in any case), which must be one of ACTIONS. Several
    objects must agree.

    compat: as published. Behind `"action":` (without that: in the last character of the response) exactly one action
    must occur, in whatever else is written there.
    """
    if compat:
        return _verdict(_compat(text.lower()))
    return _verdict({answer for answer in _answers(text)})


def parse_block(text: str) -> Action:
    """For the compact prompt: the action, or its word, in an action block."""
    block = _BLOCK.search(text)
    word = block.group(1).strip().lower() if block else ""
    return _verdict({WORDS.get(word, word)})


def _verdict(named: set[str]) -> Action:
    command = next(iter(named)) if len(named) == 1 else None
    return Action(command, True) if command in ACTIONS else Action(None, False)


def _compat(text: str) -> set[str]:
    at = text.find('"action":')
    rest = text[at:] if at >= 0 else text[-1:]
    found = {"10"} if "10" in rest else set()
    rest = rest.replace("10", "")
    return found | {action for action in ACTIONS if action in rest}


def _answers(text: str) -> Iterator[str]:
    """The action of every JSON object that has one."""
    at = text.find("{")
    while at >= 0:
        try:
            answer, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):  # not JSON from here, or nested without end
            end = at + 1
        else:
            yield from (_written(held) for key, held in answer.items() if key.lower() == "action")
        at = text.find("{", end)


def _written(held: Any) -> str:
    """A number may stand without quotes."""
    return str(held).strip() if isinstance(held, str) or type(held) is int else ""
