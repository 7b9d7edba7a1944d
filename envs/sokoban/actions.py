"""From the policy's response text to a Sokoban action and a format verdict."""

from __future__ import annotations

import re
from typing import NamedTuple

from envs.sokoban.room import ACTIONS

STILL = "still"  # a valid reply that moves nothing
WORDS = (*ACTIONS, STILL)  # the order in which lenient reading looks for them
NUMBERS = dict(zip("12340", WORDS, strict=True))  # as the compact prompt writes them
_BLOCK = re.compile(r"<action>(.*?)</action>", re.DOTALL)


class Action(NamedTuple):
    """`command`: one of WORDS, None for none; `valid`: the format verdict."""

    command: str | None
    valid: bool


def parse(text: str, *, require_think: bool = True, compat: bool = False, numbers: bool = False) -> Action:
    """Reads the first action block of a response, in any case.

    The block must name exactly one of WORDS (`numbers`: or its number), whatever other words it has. compat: as
    published, the first of WORDS that occurs anywhere in it counts, even as a part of a word. Valid means: an action,
    and `<think>` and `</think>` both present (unless require_think is False).
    """
    text = text.lower()
    block = _BLOCK.search(text)
    command = _named(block.group(1), compat, numbers) if block else None
    thinks = not require_think or ("<think>" in text and "</think>" in text)
    return Action(command, command is not None and thinks)


def _named(content: str, compat: bool, numbers: bool) -> str | None:
    if compat:
        return next((word for word in WORDS if word in content), None)
    tokens = re.findall(r"[a-z]+|\d+", content)
    if numbers:
        tokens = [NUMBERS.get(token, token) for token in tokens]
    named = {token for token in tokens if token in WORDS}
    return named.pop() if len(named) == 1 else None
