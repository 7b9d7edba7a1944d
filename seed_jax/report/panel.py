"""The result of a panel as a table, and the outcome of every episode as records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from seed_jax.types import Episode


def outcomes(episodes: Sequence[Episode], games: int) -> list[dict]:
    """One record an episode; `games` are played in turn, repeat by repeat."""
    return [
        {
            "task": episode.task_id,
            "family": episode.family,
            "repeat": place // games,
            "won": episode.won,
            "steps": len(episode.turns),
            "valid": sum(turn.valid for turn in episode.turns),
            "admissible": sum(turn.admissible for turn in episode.turns),
            **episode.measures,
        }
        for place, episode in enumerate(episodes)
    ]


def format_panel(result: Mapping[str, Any]) -> str:
    """A table with a column for each condition."""
    panel, results = result["panel"], result["results"]
    columns = [f"t {r['temperature']:g}{' + skills' if r['with_skills'] else ''}" for r in results]
    what = (
        f"{panel['draws']} draws of {panel['games']} games" if panel["reference_style"] else f"{panel['games']} games"
    )
    repeats = f", {result['repeats']} episodes each" if result["repeats"] > 1 else ""
    rows = [("success", [_pm(r["success_rate"], r["standard_error"]) for r in results])]
    rows.append(("mean over families", [_pm(r["macro_success_rate"], r["macro_standard_error"]) for r in results]))
    for family in results[0]["family"]:
        name = f"  {family} ({results[0]['family_episodes'][family]})"
        rows.append((name, [_pm(r["family"][family], r["family_standard_error"][family]) for r in results]))
    for name in results[0].get("measures", {}):
        rows.append((name, [f"{r['measures'][name]['mean']:.3f}" for r in results]))
    for label, name, digits in (
        ("steps", "steps", 1),
        ("format is valid", "valid_rate", 3),
        ("command is admissible", "admissible_rate", 3),
    ):
        rows.append((label, [f"{r[name]:.{digits}f}" for r in results]))
    first = max(len(name) for name, _ in rows)
    width = max(16, *(len(column) for column in columns))
    lines = [f"{panel['split']}: {what}{repeats} (± one standard error)"]
    lines.append(" " * first + "".join(f"  {column:>{width}}" for column in columns))
    lines += [f"{name:<{first}}" + "".join(f"  {cell:>{width}}" for cell in cells) for name, cells in rows]
    return "\n".join(lines)


def _pm(value: float, error: float) -> str:
    return f"{value:.3f} ± {error:.3f}"
