"""From the policy's response text to a search or an answer, and a format verdict."""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_QUERY = 512  # characters of a query that reach the retriever

_FLAGS = re.IGNORECASE | re.DOTALL | re.ASCII
_BLOCKS = {kind: re.compile(f"<{kind}>(.*?)</{kind}>", _FLAGS) for kind in ("search", "answer")}
_OPENINGS = {kind: re.compile(f"<{kind}>", _FLAGS) for kind in ("search", "answer")}
_CLOSINGS = {kind: re.compile(f"</{kind}>", _FLAGS) for kind in ("search", "answer")}
_TAG = re.compile(r"</?[a-z]+\s*/?>", re.IGNORECASE)


class Action(NamedTuple):
    """`kind`: "search", "answer", or None for no usable block; `content`: what is inside, stripped; `valid`: the format
    verdict. An invalid action with a kind is executed all the same."""

    kind: str | None
    content: str | None
    valid: bool

    @property
    def command(self) -> str | None:
        """What the game is given: the block in lower-case tags."""
        return None if self.kind is None else f"<{self.kind}>{self.content}</{self.kind}>"


class Offered(tuple):
    """What a prompt may list, and a test for what the game takes: any block with something in it."""

    def __contains__(self, command: object) -> bool:
        return isinstance(command, str) and parse(command).kind is not None


def parse(text: str) -> Action:
    """Reads the first search block of a response, else its first answer block; tags in any case.

    What follows the first `</search>` (without one: the first `</answer>`) is ignored. Valid means: a block with
    something in it, one kind of block in the whole response, and no second one of it.
    """
    cut = _CLOSINGS["search"].search(text) or _CLOSINGS["answer"].search(text)
    head = text[: cut.end()] if cut else text
    for kind, block in _BLOCKS.items():
        if found := block.search(head):
            content = found.group(1).strip()
            if not content:
                break
            opened = {name: len(opening.findall(text)) for name, opening in _OPENINGS.items()}
            return Action(kind, content, all(n <= 1 for n in opened.values()) and not all(opened.values()))
    return Action(None, None, False)


def clean_query(text: str) -> str:
    """A query as the retriever gets it: no tags, single spaces, at most MAX_QUERY characters; "" if nothing is left."""
    return " ".join(_TAG.sub(" ", text).split())[:MAX_QUERY].strip()
