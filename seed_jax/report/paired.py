"""Two policies on the same games: the difference of their success rates and how sure it is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

SAMPLES = 10_000
LEVEL = 0.95


class ComparisonError(ValueError):
    """Two evaluations cannot be paired; the message says what differs."""


def compare(mine: Mapping[str, Any], other: Mapping[str, Any], seed: int = 0) -> list[dict]:
    """One comparison for every condition (temperature, skills) that both evaluations have.

    mine, other: results of launch.evaluate. Raises ComparisonError if they are not of the same games.
    """
    for key in ("sha256", "reference_style"):
        if mine["panel"][key] != other["panel"][key]:
            both = (mine["panel"], other["panel"])
            shown = " and ".join(f"{p['split']}, {p['games']} games, {p['sha256'][:12]}" for p in both)
            raise ComparisonError(
                f"the two evaluations are of different panels ({shown}); evaluate both on the same data, split, number "
                "of games and style"
            )
    theirs = {_condition(result): result for result in other["results"]}
    pairs = [(result, theirs[_condition(result)]) for result in mine["results"] if _condition(result) in theirs]
    if not pairs:
        raise ComparisonError("the two evaluations have no temperature in common")
    return [
        {"temperature": a["temperature"], "with_skills": a["with_skills"], **paired(a["outcomes"], b["outcomes"], seed)}
        for a, b in pairs
    ]


def _condition(result: Mapping[str, Any]) -> tuple[float, bool]:
    return result["temperature"], result["with_skills"]


def paired(mine: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]], seed: int = 0) -> dict:
    """Difference of the success rates (mine minus other) with its bootstrap interval, over all games and as the mean
    over families.

    mine, other: one record an episode, with `task`, `family` and `won`. A game's rate is the mean over its episodes.
    Games are drawn with replacement (inside their family for the mean over families), both policies together.
    """
    a, b = by_game(mine), by_game(other)
    if a.keys() != b.keys():
        raise ComparisonError(f"{len(a.keys() ^ b.keys())} games are in one evaluation only")
    family = {record["task"]: record["family"] for record in mine}
    games = sorted(a)
    difference = np.array([a[game] - b[game] for game in games])
    rng = np.random.default_rng(seed)
    means = _resampled(difference, rng)
    members: dict[str, list[int]] = defaultdict(list)
    for place, game in enumerate(games):
        members[family[game]].append(place)
    parts = [difference[places] for _, places in sorted(members.items())]
    macro = np.mean([_resampled(part, rng) for part in parts], axis=0)
    return {
        "games": len(games),
        "difference": float(difference.mean()),
        "interval": _interval(means),
        "p_value": _p_value(means),
        "macro_difference": float(np.mean([part.mean() for part in parts])),
        "macro_interval": _interval(macro),
        "better_on": int((difference > 0).sum()),
        "worse_on": int((difference < 0).sum()),
    }


def by_game(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """{task: share of its episodes that were won}."""
    won: dict[str, list[bool]] = defaultdict(list)
    for record in records:
        won[record["task"]].append(bool(record["won"]))
    return {game: float(np.mean(values)) for game, values in won.items()}


def _resampled(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """SAMPLES means of as many values, drawn with replacement."""
    return np.array([values[rng.integers(0, len(values), len(values))].mean() for _ in range(SAMPLES)])


def _interval(samples: np.ndarray) -> list[float]:
    tail = (1 - LEVEL) / 2
    return [float(value) for value in np.quantile(samples, (tail, 1 - tail))]


def _p_value(samples: np.ndarray) -> float:
    """Two-sided: twice the share of resampled differences on the other side of zero."""
    below, above = float((samples <= 0).mean()), float((samples >= 0).mean())
    return min(1.0, 2 * min(below, above))


def format_comparison(comparisons: Sequence[Mapping[str, Any]], mine: str, other: str) -> str:
    """Lines for the terminal."""
    lines = [f"{mine} minus {other}, paired over games ({LEVEL:.0%} bootstrap interval):"]
    for c in comparisons:
        name = f"t {c['temperature']:g}{' with skills' if c['with_skills'] else ''}"
        low, high = c["interval"]
        macro_low, macro_high = c["macro_interval"]
        lines.append(
            f"  {name:<20}{c['difference']:+.3f} [{low:+.3f}, {high:+.3f}]   "
            f"mean over families {c['macro_difference']:+.3f} [{macro_low:+.3f}, {macro_high:+.3f}]   "
            f"better on {c['better_on']}, worse on {c['worse_on']} of {c['games']} games, p {c['p_value']:.3f}"
        )
    return "\n".join(lines)
