"""Build a playable ALFWorld game from a game file or a generated game, on our engine or on TextWorld's.

Our engine is written for one PDDL domain and one grammar, which all games since ALFWorld 0.4 share. `auto` looks at
both texts of a game file and takes TextWorld's engine for any other.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from envs.alfworld.games import TASK_MARKER, goal_sentence, has_known_texts, load_json, task_line
from envs.alfworld.native import NativeGame
from envs.alfworld.problem import CorruptGame, parse_problem
from envs.base import Game

# native: our own. textworld: the real one with cached translations. pip: the real one as the package has it (slow).
ENGINES = ("auto", "native", "textworld", "pip")
INSTALL_HINT = (
    "install it with: pip install alfworld  (or use engine='native', which needs neither alfworld nor textworld)"
)


def make(source: str | Path | dict[str, Any], engine: str = "native") -> Game:
    """A game from a `game.tw-pddl` path or from a dict of `generate.make_game`. Raises CorruptGame if it is damaged."""
    if engine not in ENGINES:
        raise ValueError(f"engine {engine!r} is unknown; choose one of {', '.join(ENGINES)}")
    data, where, line = _read(source)
    goal, walkthrough = goal_sentence(line), data.get("walkthrough")
    if engine == "auto":
        engine = "native" if _plays_natively(data) else "textworld"
    if engine == "native":
        return NativeGame(parse_problem(data["pddl_problem"], where), goal, line, walkthrough)
    try:
        import textworld  # noqa: F401

        from envs.alfworld.textworld_games import CachedGame, PipGame
    except ImportError as error:
        raise ImportError(f"engine={engine!r} needs the package alfworld: {INSTALL_HINT}") from error
    except OSError as error:  # importing alfworld makes a directory
        raise OSError(f"alfworld cannot make its directory ({error}); set ALFWORLD_DATA to another") from error
    if "grammar" not in data:
        data = {**data, **packaged_texts(goal)}
    return (CachedGame if engine == "textworld" else PipGame)(data, where, goal, walkthrough)


def engine_for(source: str | Path | dict[str, Any]) -> str:
    """The engine that `auto` means for a game: "native" or "textworld"."""
    return "native" if _plays_natively(_read(source)[0]) else "textworld"


def _read(source: str | Path | dict[str, Any]) -> tuple[dict[str, Any], str | Path, str]:
    """(content, where it comes from, `Your task is to: ...`)"""
    if not isinstance(source, dict):
        data = load_json(source)
        return data, source, task_line(data["grammar"], source)
    where = source.get("id", "generated game")
    for key in ("pddl_problem", "goal"):
        if not isinstance(source.get(key), str):
            raise CorruptGame(where, f"the game's {key!r} must be text")
    return source, where, f"{TASK_MARKER}{source['goal']}."


def _plays_natively(data: dict[str, Any]) -> bool:
    return "grammar" not in data or has_known_texts(data)  # a generated game holds no texts: they are the known ones


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
