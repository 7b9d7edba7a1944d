"""From the policy's response text to an ALFWorld command and a format verdict.

Format validity and admissibility are different things: a well-formed response may name a command that the game does not
offer (the game then answers "Nothing happens."). Only the format is judged here.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# ASCII keeps IGNORECASE from matching look-alike letters such as the dotless i.
_ACTION = re.compile(r"<action>(.*?)</action>", re.IGNORECASE | re.DOTALL | re.ASCII)
_CJK = re.compile(r"[\u4e00-\u9fff]")


class Action(NamedTuple):
    """`command`: what the game executes, lower-case, None when the response holds none. `valid`: the format verdict."""

    command: str | None
    valid: bool


def parse(text: str, require_think: bool = True) -> Action:
    """Reads the first action block of a response.

    Valid means: an action block with something in it, `<think>` and `</think>` both present in lower case (unless
    `require_think` is False), and no CJK character (U+4E00-9FFF) anywhere. Action tags may have any case. A response
    without a usable action block has no command: nothing is guessed from its last characters.

    Args:
        text: the decoded response, end token removed.
        require_think: whether the thinking block is part of the format; False for models that think elsewhere.
    """
    block = _ACTION.search(text)
    command = block.group(1).strip().lower() if block else ""
    if not command:
        return Action(None, False)
    thinks = not require_think or ("<think>" in text and "</think>" in text)
    return Action(command, thinks and not _CJK.search(text))
