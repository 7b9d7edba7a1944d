"""Several runs compared: groups of seeds, their numbers, paired bootstrap against a baseline, and what forbids it.

A difference whose interval includes zero gives no order: groups are never sorted by score.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from seed_jax import config as config_lib
from seed_jax.report.paired import LEVEL, SAMPLES, ComparisonError, by_game
from seed_jax.report.runs import Final, ReportError, Run, differing_fields

BASELINE, FULL = "grpo", "seed"  # groups that are looked for where none is named
FEW_SEEDS = 3  # with fewer, what one seed happens to give is most of a difference
# What must be alike for a budget of episodes to be alike, beside the number of iterations.
_BUDGET = ("rollout.tasks", "rollout.group", "env.max_steps", "rollout.max_response_tokens")
_PLAY = ("env.name", "env.data", "env.size", "env.prompt", "env.history", "eval.split", "eval.seed", "eval.games")


class Group(NamedTuple):
    """Runs that differ in the seed only."""

    label: str
    runs: list[Run]

    @property
    def config(self) -> dict[str, Any]:
        return self.runs[0].config

    def finals(self, name: str) -> list[Final]:
        return [run.finals()[name] for run in self.runs if name in run.finals()]


class Mean(NamedTuple):
    """Mean over seeds. games: standard error over the games of one run, mean over seeds; seeds: of the mean over seeds,
    None for one."""

    value: float
    games: float
    seeds: float | None


class Comparison(NamedTuple):
    """Everything that the card shows. differences: {panel and condition: {label: of it minus the baseline}};
    contributions: the same of the full method minus each other group; both hold a text where a comparison is
    impossible."""

    groups: list[Group]
    names: list[str]
    baseline: Group
    full: Group | None
    differences: dict[str, dict[str, dict | str]]
    contributions: dict[str, dict[str, dict | str]]
    warnings: list[str]


def grouped(runs: Sequence[Run]) -> list[Group]:
    """In the order of the runs. Labels: the method, and the fields that tell groups of one method apart."""
    found: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        shaping = {f: v for f, v in run.config.items() if f != "seed" and not f.startswith(config_lib.FREE_ON_RESUME)}
        found[json.dumps(shaping, sort_keys=True)].append(run)
    groups = list(found.values())
    labels = []
    for members in groups:
        same = [other[0].config for other in groups if other[0].method == members[0].method]
        fields = differing_fields(same)
        told = ", ".join(f"{field.rsplit('.', 1)[-1]}={members[0].config.get(field)}" for field in fields)
        labels.append(f"{members[0].method} {told}".strip())
    return [Group(label, members) for label, members in zip(labels, groups, strict=True)]


def compare_groups(groups: Sequence[Group], baseline: str | None = None, full: str | None = None) -> Comparison:
    """baseline, full: labels or methods; see BASELINE and FULL for their defaults. Raises ReportError."""
    groups = list(groups)
    base = _choose(groups, baseline, "--baseline") or _choose(groups, BASELINE) or groups[0]
    whole = _choose(groups, full, "--full") or _choose(groups, FULL)
    names = list(dict.fromkeys(name for group in groups for run in group.runs for name in run.finals()))
    others = lambda reference: [group for group in groups if group is not reference]  # noqa: E731
    differences = {name: {g.label: _difference(name, g, base) for g in others(base)} for name in names}
    contributions = (
        {name: {g.label: _difference(name, whole, g) for g in others(whole)} for name in names} if whole else {}
    )
    return Comparison(groups, names, base, whole, differences, contributions, warnings(groups))


def _choose(groups: Sequence[Group], name: str | None, flag: str = "") -> Group | None:
    if name is None:
        return None
    found = [g for g in groups if g.label == name] or [g for g in groups if g.config["method"] == name]
    if flag and len(found) != 1:
        known = ", ".join(repr(g.label) for g in groups)
        raise ReportError(
            f"{flag}={name}: {'several groups are' if found else 'no group is'} called so; there are {known}"
        )
    return found[0] if found else None


# -- numbers -----------------------------------------------------------------------------------------------------------


def mean(finals: Sequence[Final], key: str, error: str) -> Mean | None:
    """key, error: names in the result of the value and of its standard error over games."""
    values = [final.result[key] for final in finals]
    if not values:
        return None
    games = float(np.mean([final.result[error] for final in finals]))
    seeds = float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
    return Mean(float(np.mean(values)), games, seeds)


def _difference(name: str, mine: Group, other: Group) -> dict | str:
    """Bootstrap of `mine` minus `other`, or why there is none."""
    a, b = mine.finals(name), other.finals(name)
    if not a or not b:
        return "not evaluated"
    if not all(final.outcomes for final in (*a, *b)):
        return "outcomes of games not recorded"
    hashes = {final.sha256 for final in (*a, *b)}
    if len(hashes) > 1:
        return "different panels"
    try:
        return bootstrap([final.outcomes for final in a], [final.outcomes for final in b])
    except ComparisonError as error:
        return str(error)


def bootstrap(mine: Sequence[Sequence[Mapping]], other: Sequence[Sequence[Mapping]], seed: int = 0) -> dict[str, Any]:
    """Difference of success rates (mine minus other) with its interval, over all games and as a mean over families.

    mine, other: the outcomes of each seed. Games are drawn with replacement for both together (inside families for the
    mean over these), and seeds of each side where it has several: the interval then holds the spread between seeds too.
    Raises ComparisonError if the games are not the same.
    """
    rates_a, rates_b = ([by_game(outcomes) for outcomes in side] for side in (mine, other))
    games = sorted(rates_a[0])
    for rates in (*rates_a, *rates_b):
        if rates.keys() != rates_a[0].keys():
            raise ComparisonError(f"{len(rates.keys() ^ rates_a[0].keys())} games are in one evaluation only")
    family = {record["task"]: record["family"] for record in mine[0]}
    a, b = (np.array([[rates[game] for game in games] for rates in side]) for side in (rates_a, rates_b))
    rng = np.random.default_rng(seed)
    weights = [_draws(rng, len(side)) for side in (a, b)]
    games_drawn = weights[0] @ a - weights[1] @ b  # [draws, games]: of each game, the drawn seeds' difference
    micro = (games_drawn * _draws(rng, len(games))).sum(1)
    members: dict[str, list[int]] = defaultdict(list)
    for place, game in enumerate(games):
        members[family[game]].append(place)
    macro = np.mean([(games_drawn[:, p] * _draws(rng, len(p))).sum(1) for _, p in sorted(members.items())], axis=0)
    difference = a.mean(0) - b.mean(0)
    tail = (1 - LEVEL) / 2
    interval = lambda samples: [float(x) for x in np.quantile(samples, (tail, 1 - tail))]  # noqa: E731
    return {
        "games": len(games),
        "seeds": (len(a), len(b)),
        "difference": float(difference.mean()),
        "interval": interval(micro),
        "macro_difference": float(np.mean([difference[p].mean() for p in members.values()])),
        "macro_interval": interval(macro),
    }


def _draws(rng: np.random.Generator, count: int) -> np.ndarray:
    """[SAMPLES, count]: the share of each of `count` things in as many draws with replacement."""
    if count == 1:
        return np.ones((SAMPLES, 1))
    return rng.multinomial(count, np.full(count, 1 / count), size=SAMPLES) / count


def separated(found: Mapping[str, Any], prefix: str = "") -> int:
    """1: above zero, -1: below, 0: the interval includes zero, so there is no order."""
    low, high = found[f"{prefix}interval"]
    return 1 if low > 0 else -1 if high < 0 else 0


# -- what makes a comparison unfair ------------------------------------------------------------------------------------


def warnings(groups: Sequence[Group]) -> list[str]:
    found = []

    def told(what: str, values: Mapping[str, set]) -> None:
        """Warns if the groups' values are not all the same one."""
        if len({value for of_group in values.values() for value in of_group}) > 1:
            shown = "; ".join(f"{label}: {', '.join(map(str, sorted(v, key=str)))}" for label, v in values.items())
            found.append(f"{what} differ. {shown}")

    told("Budgets (iterations that are done)", {g.label: {run.iterations for run in g.runs} for g in groups})
    for field in (*_BUDGET, *_PLAY):
        told(f"Values of {field}", {g.label: {run.config.get(field) for run in g.runs} for g in groups})
    for part in ("panel", "train"):
        hashes = {
            g.label: {run.games[part]["sha256"][:12] if run.games else "not recorded" for run in g.runs} for g in groups
        }
        told(f"Hashes of the {'held-out' if part == 'panel' else 'training'} games", hashes)
    told("Seeds", {g.label: {tuple(sorted(run.seed for run in g.runs))} for g in groups})
    few = [g.label for g in groups if len({run.seed for run in g.runs}) < FEW_SEEDS]
    if few:
        found.append(f"Fewer than {FEW_SEEDS} seeds: {', '.join(few)}. Another seed may turn a difference around.")
    unfinished = [run.name for g in groups for run in g.runs if run.summary is None]
    if unfinished:
        found.append(f"Not finished: {', '.join(unfinished)}.")
    return found


def changes(full: Group, other: Group) -> list[str]:
    """What the other group's config has instead: "field: full's value -> its value"."""
    fields = differing_fields([full.config, other.config])
    return [f"{field}: {full.config.get(field)} \u2192 {other.config.get(field)}" for field in fields]
