"""WebShop as the trainer sees it: prompts and the parsing of replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from envs.base import Task
from envs.webshop import actions
from envs.webshop.pages import SEPARATOR

MAX_CHARACTERS = 20_000  # a longer prompt is written without its history
_MARK = "Instruction:"
_RELEASED = """
You are an expert agent that shops in the WebShop web environment.
Your task is to: {task}.
{history}
Your current observation is: {observation}
Your admissible actions of the current situation are:
[
{actions}
].

Now it's your turn to take one action for the current step.
You should first reason step by step about the current page and the task. This reasoning MUST be enclosed within \
<think> </think> tags.
Then choose an admissible action and present it within <action> </action> tags.
"""
_HISTORY = """
You have taken {taken} step(s) so far. The most recent observations and what you did:
{entries}
You are now at step {step}.
"""
_NOTHING = "nothing"


class WebshopDomain:
    """Prompts (style: "released" or "compact") and parsing of one run."""

    def __init__(self, style: str, require_think: bool = True):
        if style not in ("released", "compact"):
            raise ValueError(f"env.prompt = {style!r}: WebShop has the prompt styles 'released' and 'compact'")
        self.style, self.require_think = style, require_think

    def goal(self, first_observation: str) -> str:
        lines = first_observation.split(SEPARATOR if SEPARATOR in first_observation else "\n")
        return lines[lines.index(_MARK) + 1]

    def prompt(
        self, goal: str, history: list[tuple[str, str, str]], observation: str, admissible: Sequence[str], window: int
    ) -> str:
        """The user message of one turn. One of over 20,000 characters is written again without history."""
        entries = _entries(goal, history, window)
        if self.style == "compact":
            recent = " ; ".join(command or _NOTHING for _, command, _ in history[len(history) - len(entries) :])
            page = " ".join(shown(goal, observation, quoted=False).split())
            return (
                f"your task is to: {goal}\nhistory: {recent or 'none'}\nnow: {page}\nactions: {' / '.join(admissible)}"
            )
        past = _HISTORY.format(taken=len(history), entries="\n".join(entries), step=len(history) + 1) if entries else ""
        filled = {
            "task": goal,
            "observation": shown(goal, observation),
            "actions": "\n".join(f"'{command}'," for command in admissible),
        }
        text = _RELEASED.format(history=past, **filled)
        return text if len(text) <= MAX_CHARACTERS else _RELEASED.format(history="", **filled)

    def parse(self, reply: str) -> actions.Action:
        return actions.parse(reply, require_think=self.require_think)

    def solution(self, task: Task) -> list[str]:
        """Commands that buy what the goal was made from, if its search finds it on the first page."""
        source = task.source
        clicks = [source["asin"].lower(), *_wanted(source), "buy now"]
        return [f"search[{source['name'].lower()}]", *(f"click[{text}]" for text in clicks)]

    def true_skill(self, task: Task) -> str:
        """What would solve this very task."""
        source, values = task.source, _wanted(task.source)
        chosen = f", select {' and '.join(values)}" if values else ""
        return f"Search for {source['name']}, open {source['asin'].lower()}{chosen}, then buy now."

    def row_class(self, task: Task, episode: Any, index: int) -> str | None:
        turn = episode.turns[index]
        outcome = "success" if episode.won else "failure"
        if not turn.admissible:
            return f"{outcome}: invalid action"
        name, argument = actions.arguments(turn.command) or ("", "")
        if name == "search":
            return f"{outcome}: search"
        if argument == task.source["asin"].lower():
            return f"{outcome}: right product"
        return f"{outcome}: buy" if argument == "buy now" else None


def _wanted(source: Mapping[str, Any]) -> list[str]:
    """The option values of a goal."""
    options = source["goal_options"]
    return list(options.values() if isinstance(options, Mapping) else options)


def shown(goal: str, observation: str, quoted: bool = True) -> str:
    """A page without its instruction, each segment in quotes; the page itself where the instruction is not on it.
    Rich pages keep their lines."""
    separator = SEPARATOR if SEPARATOR in observation else "\n"
    segments = observation.split(separator)
    if goal not in segments:
        return observation
    rest = segments[segments.index(goal) + 1 :]
    if not quoted or separator == "\n":
        return separator.join(rest)
    return separator.join(f"'{segment}'" for segment in rest)


def _entries(goal: str, history: Sequence[tuple[str, str, str]], window: int) -> list[str]:
    first = max(0, len(history) - window)
    return [
        f"[Observation {number}: '{shown(goal, before)}', Action {number}: '{command or _NOTHING}']"
        for number, (before, command, _) in enumerate(history[first:], first + 1)
    ]
