"""From the policy's response text to a WebShop command and a format verdict."""

from __future__ import annotations

import re

from envs.alfworld.actions import Action, parse

__all__ = ["SEARCH", "Action", "Offered", "arguments", "parse"]  # the reply has the form of ALFWorld's

SEARCH = "search[<your query>]"  # how a search is offered
_COMMAND = re.compile(r"(.+)\[(.+)\]")


class Offered(tuple):
    """The commands that a page offers, as the prompt lists them. Where it offers a search, it offers any query."""

    def __contains__(self, command: object) -> bool:
        if tuple.__contains__(self, command):
            return command != SEARCH
        called = arguments(command) if isinstance(command, str) else None
        return called is not None and called[0] == "search" and tuple.__contains__(self, SEARCH)


def arguments(command: str) -> tuple[str, str] | None:
    """`name[argument]` at the start of a command -> (name, argument in lower case); None for anything else. The
    match is greedy, as published: an argument with an opening bracket in it cannot be named."""
    match = _COMMAND.match(command)
    return (match.group(1), match.group(2).lower()) if match else None
