"""Frozen-panel evaluation: every game once, fixed seeds, success from nothing but the environment's own `won`."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from seed_jax.rollout import World, play
from seed_jax.runtime import multihost
from seed_jax.types import Episode, SamplingParams

# Streams of evaluation keys, apart from training (small numbers) and analysis; repeats are a stride apart.
EVAL_STREAM = 1 << 29
REPEAT_STRIDE = 1 << 8
# The public reference validates on so many draws, each from a stream of its own that starts at this seed.
REFERENCE_DRAWS, REFERENCE_SEED = 128, 1000


class PanelError(RuntimeError):
    """A game of the panel was lost to an environment error."""


class Evaluation(NamedTuple):
    """summary: of all episodes; episodes: repeat by repeat, in the panel's order; own: those that this host has played.
    Of the others there is only what `multihost.gather_episodes` tells."""

    summary: dict
    episodes: list[Episode]
    own: list[Episode]


def evaluate(
    sampler,
    tokenizer,
    world: World,
    tasks: Sequence[Any],
    *,
    temperature: float,
    max_tokens: int,
    max_prompt_tokens: int,
    seed: int,
    skills: Any = None,
    repeats: int = 1,
    on_turn: Callable[[int, int], None] = lambda step, live: None,
) -> Evaluation:
    """Plays the panel `repeats` times at one temperature. An environment error is raised: a panel has no gaps.

    skills: the `Skills` that every episode is played with; None = without. The keys depend on `seed`, the repeat, the
    game's place in the panel and the turn only: the same weights always give the same result. Of many hosts each plays
    a part of the panel, and all get the whole summary.
    """
    counts: Counter = Counter()
    episodes: list[Episode] = []
    own: list[Episode] = []
    mine = multihost.share(len(tasks))
    for repeat in range(repeats):
        with multihost.together():
            played = play(
                sampler,
                tokenizer,
                world,
                tasks[mine],
                group=1,
                first=mine.start,
                params=SamplingParams(max_tokens, temperature),
                stream=EVAL_STREAM + repeat * REPEAT_STRIDE,
                max_prompt_tokens=max_prompt_tokens,
                seed=seed,
                counts=counts,
                skills=skills,
                share=0.0 if skills is None else 1.0,
                on_turn=on_turn,
            )
        own += played
        episodes += multihost.gather_episodes(played)
    counts = multihost.sum_counters(counts)
    lost = [episode for episode in episodes if episode.error]
    if lost:
        raise PanelError(f"{len(lost)} of {len(episodes)} panel games failed, first {lost[0].task_id}: {lost[0].error}")
    summary = summarize(episodes, [episode.task_id for episode in episodes])
    result = {"temperature": temperature, "with_skills": skills is not None, **summary}
    result["prompt_truncated"] = counts["prompt_truncated"]
    result["prompt_overflow"] = counts["prompt_overflow"]
    if skills is not None:
        result["skill_coverage"] = sum(episode.given is not None for episode in episodes) / max(1, len(episodes))
        result["given_overflow"] = counts["given_overflow"]
    return Evaluation(result, episodes, own)


def evaluate_all(run) -> list[Evaluation]:
    """The panel of a training run at each of its temperatures, without and with skills as its config says.

    The first is the headline: at the first temperature, without skills where both are asked for.
    """
    config = run.config
    return [
        evaluate(
            run.sampler,
            run.tokenizer,
            run.setup.world,
            run.setup.panel,
            temperature=float(temperature),
            max_tokens=config.rollout.max_response_tokens,
            max_prompt_tokens=config.rollout.max_prompt_tokens,
            seed=config.eval.seed,
            skills=run.skills if with_skills else None,
            on_turn=run.on_turn,
        )
        for with_skills in run.skills.at_eval
        for temperature in config.eval.temperatures
    ]


def summarize(episodes: Sequence[Episode], games: Sequence[Hashable] | None = None) -> dict:
    """success_rate (micro), its standard error, macro average over families, rates per family, steps, format and
    admissibility.

    games: which game each episode is of. Episodes of one game are alike, so the standard errors are those of a sample
    of games (clusters); None = each is a game of its own. `games` in the result counts games, `episodes` episodes.
    """
    games = list(range(len(episodes))) if games is None else list(games)
    families: dict[str, list[int]] = defaultdict(list)
    for place, episode in enumerate(episodes):
        families[episode.family].append(place)
    turns = [turn for episode in episodes for turn in episode.turns]
    won = np.array([episode.won for episode in episodes], float)
    success, error = rate(won, games)
    of_family = {
        family: rate(won[places], [games[place] for place in places]) for family, places in sorted(families.items())
    }
    count = max(1, len(of_family))
    return {
        **_measures(episodes, families),
        "games": len(set(games)),
        "episodes": len(episodes),
        "success_rate": success,
        "standard_error": error,
        "macro_success_rate": sum(value for value, _ in of_family.values()) / count,
        "macro_standard_error": math.sqrt(sum(e**2 for _, e in of_family.values())) / count,
        "family": {family: value for family, (value, _) in of_family.items()},
        "family_standard_error": {family: e for family, (_, e) in of_family.items()},
        "family_episodes": {family: len(families[family]) for family in of_family},
        "steps": len(turns) / max(1, len(episodes)),
        "valid_rate": sum(turn.valid for turn in turns) / max(1, len(turns)),
        "admissible_rate": sum(turn.admissible for turn in turns) / max(1, len(turns)),
    }


def _measures(episodes: Sequence[Episode], families: dict[str, list[int]]) -> dict:
    """Means of what the environment reports beside success: over episodes, over families, in each; {} for nothing."""
    names = sorted({name for episode in episodes for name in episode.measures})
    result: dict[str, dict] = {}
    for name in names:
        values = np.array([episode.measures.get(name, 0.0) for episode in episodes])
        of_family = {family: float(values[places].mean()) for family, places in sorted(families.items())}
        result[name] = {
            "mean": float(values.mean()),
            "macro_mean": sum(of_family.values()) / len(of_family),
            "family": of_family,
        }
    return {"measures": result} if result else {}


def rate(won: np.ndarray, games: Sequence[Hashable]) -> tuple[float, float]:
    """(mean, its standard error over games): sqrt(sum over games of (sum of deviations)^2) / n, sqrt(p (1 - p) / n) if
    no game comes twice."""
    if not len(won):
        return 0.0, 0.0
    mean = float(won.mean())
    deviations: dict[Hashable, float] = defaultdict(float)
    for value, game in zip(won - mean, games, strict=True):
        deviations[game] += float(value)
    return mean, math.sqrt(sum(value**2 for value in deviations.values())) / len(won)


def reference_draws(tasks: Sequence[Any], round_number: int = 0) -> list[Any]:
    """The panel of the public reference: 128 draws, of which about 84 are different games.

    Each of its 128 environments shuffles the split with its own seed and takes its next game at every evaluation. Its
    order before the shuffle is the file system's; here it is that of the names.
    """
    draws = []
    for environment in range(REFERENCE_DRAWS):
        order = list(range(len(tasks)))
        np.random.RandomState(REFERENCE_SEED + environment).shuffle(order)
        draws.append(tasks[order[round_number % len(tasks)]])
    return draws
