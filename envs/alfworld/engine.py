"""Build a playable ALFWorld game from a game file or a generated game, on our engine or on TextWorld's."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from envs.alfworld.games import TASK_MARKER, goal_sentence, load_json, task_line
from envs.alfworld.native import NOTHING_HAPPENS, WIN_REWARD, NativeGame
from envs.alfworld.problem import CorruptGame, parse_problem
from envs.base import Obs

ENGINES = ("native", "textworld")
INSTALL_HINT = (
    "install it with: pip install alfworld  (or use engine='native', which needs neither alfworld nor textworld)"
)


def make(source: str | Path | dict[str, Any], engine: str = "native") -> NativeGame | TextWorldGame:
    """A game from a `game.tw-pddl` path or from a dict of `generate.make_game`. Raises CorruptGame if it is damaged."""
    if engine not in ENGINES:
        raise ValueError(f"engine {engine!r} is unknown; choose one of {', '.join(ENGINES)}")
    if isinstance(source, dict):
        where = source.get("id", "generated game")
        for key in ("pddl_problem", "goal"):
            if not isinstance(source.get(key), str):
                raise CorruptGame(where, f"the game's {key!r} must be text")
        line = f"{TASK_MARKER}{source['goal']}."
        data = source
    else:
        where = source
        data = load_json(source)
        line = task_line(data["grammar"], source)
    goal = goal_sentence(line)
    walkthrough = data.get("walkthrough")
    if engine == "native":
        return NativeGame(parse_problem(data["pddl_problem"], where), goal, line, walkthrough)
    if "grammar" not in data:
        data = {**data, **packaged_texts(goal)}
    return TextWorldGame(data, where, goal, walkthrough)


def packaged_texts(goal: str) -> dict[str, str]:
    """`pddl_domain` and `grammar` of the installed alfworld package, with `goal` as the task sentence."""
    try:
        folder = files("alfworld") / "data"
    except ImportError as error:
        raise ImportError(f"the domain and grammar texts come from the package alfworld: {INSTALL_HINT}") from error
    grammar = (folder / "alfred.twl2").read_text(encoding="utf-8")
    return {
        "pddl_domain": (folder / "alfred.pddl").read_text(encoding="utf-8"),
        "grammar": grammar.replace("UNKNOWN GOAL", goal),
    }


class TextWorldGame:
    """The same interface over TextWorld's PDDL engine: 40 ms a step, not thread-safe. For parity checks.

    TextWorld's planner code reads and rewrites `sys.argv` while a game loads or resets.
    """

    def __init__(self, data: dict[str, Any], where: str | Path, goal: str, walkthrough: list[str] | None):
        try:
            import textworld
            from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
            from textworld.envs.pddl import PddlEnv
        except ImportError as error:
            raise ImportError(f"engine='textworld' needs the package alfworld: {INSTALL_HINT}") from error
        self.goal = goal
        self.walkthrough = walkthrough
        self._where = where
        self._game = AlfredDemangler(PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)))
        try:
            self._game.load(data)
        except Exception as error:  # KeyError, IndexError, ParseError, FailedParse...: the libraries promise nothing
            raise CorruptGame(where, f"TextWorld cannot load it ({type(error).__name__}: {error})") from error

    def reset(self) -> Obs:
        self._won = False
        self._last = self._observe(self._game.reset())
        return self._last

    def step(self, command: str) -> Obs:
        if not isinstance(command, str):
            self._last = self._last._replace(text=NOTHING_HAPPENS, reward=0.0)
            return self._last
        state, _, _ = self._game.step(command)
        self._last = self._observe(state)
        return self._last

    def _observe(self, state: Any) -> Obs:
        won = bool(state["won"])
        reward = WIN_REWARD if won and not self._won else 0.0
        self._won = won
        return Obs(state.feedback, tuple(state["admissible_commands"]), won, won, reward)
