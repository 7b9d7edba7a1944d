"""Sokoban as the trainer sees it: prompts and the parsing of replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from envs.base import Task
from envs.sokoban import actions
from envs.sokoban.room import ACTIONS, read_level
from envs.sokoban.solve import solve

GOAL = "push every box onto a target"
OBSERVATIONS = ("text", "image")
STYLES = ("released", "compact")
_RULES = f"""\
You walk up, down, left and right. A box in your way is pushed one cell further if the cell behind it is free. You \
cannot pull a box, push two at once, or enter a wall.
A box in a corner without a target can never leave it, so look ahead before you push.
Each action costs 0.1, a box on a target earns 1, and the last box on its target earns 10 more.
Your admissible actions of the current situation are: {", ".join(ACTIONS)}.

Now it's your turn to take one action for the current step.
You should first reason step by step about where you, the boxes and the targets are. This reasoning MUST be enclosed \
within <think> </think> tags.
Then choose one admissible action and present it within <action> </action> tags.
"""
_TEXT = f"""
You are an expert agent that solves Sokoban puzzles.
Your task is to: {{goal}}.
The room is a grid with one symbol a cell: # is a wall, _ floor, O a target, X a box, √ a box on a target, P you, and \
S you on a target.
{{history}}The room now:
{{observation}}
{_RULES}"""
_IMAGE = f"""
You are an expert agent that solves Sokoban puzzles.
Your task is to: {{goal}}.
The picture shows the room now: <image>
You are the small green alien with two antennae and black eyes. A box is a yellow crate with an orange X. A target is \
a black tile with a red outline and a small red diamond; a box on a target is a crate with a dark red X inside the red \
outline. Bricks are walls.
{_RULES}"""
_HISTORY = """\
You have taken {taken} step(s) so far. The most recent observations and what you did:
{entries}
You are now at step {step}.
"""
_NOTHING = "nothing"


class SokobanDomain:
    """Prompts (style "released" or "compact", of "text" or "image" observations) and parsing of one run."""

    def __init__(self, style: str, observation: str = "text", require_think: bool = True, compat: bool = False):
        if style not in STYLES:
            raise ValueError(f"env.prompt = {style!r}: Sokoban has the prompt styles 'released' and 'compact'")
        if observation not in OBSERVATIONS:
            raise ValueError(f"env.observation = {observation!r}: Sokoban shows 'text' or an 'image'")
        if (style, observation) == ("compact", "image"):
            raise ValueError(
                "env.prompt = 'compact', env.observation = 'image': pictures have the style 'released' only"
            )
        self.style, self.observation = style, observation
        self.require_think, self.compat = require_think, compat

    def goal(self, first_observation: str) -> str:
        return GOAL

    def prompt(
        self, goal: str, history: list[tuple[str, str, str]], observation: str, admissible: Sequence[str], window: int
    ) -> str:
        """The user message of one turn. A picture stands alone: its prompt is the same at every step."""
        if self.observation == "image":
            return _IMAGE.format(goal=goal)
        first = max(0, len(history) - window)
        if self.style == "compact":
            number = {word: number for number, word in actions.NUMBERS.items()}
            recent = " ; ".join(number.get(command, _NOTHING) for _, command, _ in history[first:])
            offered = " / ".join(number[word] for word in ACTIONS)
            return f"your task is to: {goal}\nhistory: {recent or 'none'}\nnow: {observation}\nactions: {offered}"
        entries = "\n".join(
            f"[Observation {number}:\n{before}\nAction {number}: '{command or _NOTHING}']"
            for number, (before, command, _) in enumerate(history[first:], first + 1)
        )
        past = _HISTORY.format(taken=len(history), entries=entries, step=len(history) + 1) if entries else ""
        return _TEXT.format(goal=goal, history=past, observation=observation)

    def parse(self, reply: str) -> actions.Action:
        return actions.parse(
            reply, require_think=self.require_think, compat=self.compat, numbers=self.style == "compact"
        )

    def solution(self, task: Task) -> list[str]:
        """The shortest one."""
        return solve(read_level(task.source["level"])) or []

    def true_skill(self, task: Task) -> str:
        """What would solve this very task."""
        return f"The room is solved by these moves: {', then '.join(self.solution(task))}."

    def row_class(self, task: Task, episode: Any, index: int) -> str | None:
        turn = episode.turns[index]
        outcome = "success" if episode.won else "failure"
        if turn.command not in ACTIONS:
            return f"{outcome}: no move"
        return f"{outcome}: {'blocked' if turn.result == turn.observation else 'move'}"
