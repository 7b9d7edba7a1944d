"""ALFWorld as the trainer sees it: tasks of a split, prompts, and the parsing of replies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from envs.alfworld import actions, prompt
from envs.alfworld.engine import make
from envs.alfworld.games import load_json
from envs.alfworld.planner import PROCESS, annotate, kind, skill_parts
from envs.base import Task

FACTORY = "envs.alfworld.engine:make"


class AlfworldDomain:
    """Prompt style, parsing rules and engine of one run (`style`: see prompt.STYLES, `engine`: see engine.ENGINES)."""

    def __init__(self, style: str, require_think: bool = True, engine: str = "native"):
        self.style, self.require_think, self.engine = style, require_think, engine

    def goal(self, first_observation: str) -> str:
        return prompt.task_goal(first_observation)

    def prompt(
        self, goal: str, history: list[tuple[str, str, str]], observation: str, admissible: Sequence[str], window: int
    ) -> str:
        """The user message of one turn; history holds (observation, command, result) of every earlier turn."""
        return prompt.build(
            self.style,
            goal=goal,
            history=history,
            observation=observation,
            admissible=admissible,
            history_length=window,
            first_observation=history[0][0] if history else "",
        )

    def parse(self, reply: str) -> actions.Action:
        return actions.parse(reply, require_think=self.require_think)

    def solution(self, task: Task) -> list[str]:
        """The commands that solve the task."""
        return list(make(task.source).walkthrough or ())

    def true_skill(self, task: Task) -> str:
        """The skill that the rule-based annotator writes for the task's own walkthrough."""
        game = make(task.source, self.engine)
        game.reset()
        steps = [(command, game.step(command).text) for command in game.walkthrough]
        return self.write_skill(task, steps, won=True)[1]

    def skill_parts(self, skill: str) -> tuple[str, str]:
        """(workflow, places): what a skill says of any room, and of this one alone; see planner.skill_parts."""
        return skill_parts(skill)

    def write_skill(self, task: Task, steps: list[tuple[str, str]], won: bool) -> tuple[str, str]:
        """(summary, skill) of a finished episode by rules that know what the task wants; steps: (command, result).

        Places come from the episode alone: a policy that learns to write such skills reads nothing else.
        """
        return annotate(_described(task), steps, won)

    def row_class(self, task: Task, episode: Any, index: int) -> str | None:
        """What kind of decision turn `index` of an episode is, for the skill table; None for turns that decide
        little."""
        turn = episode.turns[index]
        outcome = "success" if episode.won else "failure"
        if not turn.admissible:
            return f"{outcome}: invalid action"
        verb, appliance = PROCESS.get(task.family, (None, None))
        if verb and turn.command.startswith(f"{verb} "):
            return f"{outcome}: {'/'.join(sorted(v for v, _ in PROCESS.values()))}"
        if not turn.command.startswith("go to "):
            return None
        place = turn.command[len("go to ") :]
        if not any(
            (earlier.command or "").startswith("take ") and earlier.admissible for earlier in episode.turns[:index]
        ):
            return f"{outcome}: search, {'right' if place == _start(task) else 'other'} place"
        if verb and not any((earlier.command or "").startswith(f"{verb} ") for earlier in episode.turns[:index]):
            return f"{outcome}: holds it, {'to the appliance' if kind(place) == appliance else 'elsewhere'}"
        return None


def _described(task: Task) -> dict[str, str]:
    """What the annotator needs to know of a task: family, and the class names of object and receptacle.

    A game file says so in the name of its task's directory, `<family>-<Object>-None-<Receptacle>-<scene>`.
    """
    if isinstance(task.source, dict):
        return task.source
    family, wanted, _, receptacle, _ = Path(task.source).parent.parent.name.split("-")
    return {"family": family, "object": wanted.lower(), "receptacle": receptacle.lower()}


def _start(task: Task) -> str:
    """The first place of the task's walkthrough: where the object is."""
    data = task.source if isinstance(task.source, dict) else load_json(task.source)
    return next(c for c in data["walkthrough"] if c.startswith("go to "))[len("go to ") :]
