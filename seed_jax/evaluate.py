"""Frozen-panel evaluation: every game once, fixed seeds, success from nothing but the environment's own `won`."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from seed_jax.rollout import World, play
from seed_jax.types import Episode, SamplingParams

# Streams of evaluation keys, apart from training (small numbers) and analysis.
EVAL_STREAM = 1 << 29


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
    on_turn: Callable[[int, int], None] = lambda step, live: None,
) -> tuple[dict, list[Episode]]:
    """Plays the panel once at one temperature -> (summary, episodes). An environment error is raised: a panel has
    no gaps.

    skills: the `Skills` that every episode is played with; None = without. The keys depend on `seed`, the game's place
    in the panel and the turn only: the same weights always give the same result.
    """
    counts: Counter = Counter()
    episodes = play(
        sampler,
        tokenizer,
        world,
        tasks,
        group=1,
        params=SamplingParams(max_tokens, temperature),
        stream=EVAL_STREAM,
        max_prompt_tokens=max_prompt_tokens,
        seed=seed,
        counts=counts,
        skills=skills,
        share=0.0 if skills is None else 1.0,
        on_turn=on_turn,
    )
    lost = [episode for episode in episodes if episode.error]
    if lost:
        raise RuntimeError(
            f"{len(lost)} of {len(episodes)} panel games failed, first {lost[0].task_id}: {lost[0].error}"
        )
    result = {"temperature": temperature, "with_skills": skills is not None, **summarize(episodes)}
    if skills is not None:
        result["skill_coverage"] = sum(episode.given is not None for episode in episodes) / max(1, len(episodes))
        result["given_overflow"] = counts["given_overflow"]
    return result, episodes


def evaluate_all(run) -> list[dict]:
    """The panel of a training run at each of its temperatures, without and with skills as its config says.

    The first result is the headline: at the first temperature, without skills where both are asked for.
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
        )[0]
        for with_skills in run.skills.at_eval
        for temperature in config.eval.temperatures
    ]


def summarize(episodes: Sequence[Episode]) -> dict:
    """success_rate (micro), its standard error, macro average over families, rates per family, steps, format and
    admissibility."""
    families = defaultdict(list)
    for episode in episodes:
        families[episode.family].append(episode.won)
    turns = [turn for episode in episodes for turn in episode.turns]
    rate = sum(episode.won for episode in episodes) / max(1, len(episodes))
    per_family = {family: sum(won) / len(won) for family, won in sorted(families.items())}
    return {
        "games": len(episodes),
        "success_rate": rate,
        "standard_error": math.sqrt(rate * (1 - rate) / max(1, len(episodes))),
        "macro_success_rate": sum(per_family.values()) / max(1, len(per_family)),
        "family": per_family,
        "steps": len(turns) / max(1, len(episodes)),
        "valid_rate": sum(turn.valid for turn in turns) / max(1, len(turns)),
        "admissible_rate": sum(turn.admissible for turn in turns) / max(1, len(turns)),
    }
