"""What an iteration learns from: every turn that was played, and what the policy wrote as the analyzer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from seed_jax import images
from seed_jax.train import second
from seed_jax.train.credit import turn_credit
from seed_jax.train.packing import Sample
from seed_jax.train.writing import analysis_samples
from seed_jax.types import Episode


def batch_samples(
    run, episodes: Sequence[Episode], iteration: int, counts: Counter, read=(), seconds: Sequence[Episode] = ()
) -> list[Sample]:
    """One sample a turn, and one an analysis of `read` if the analyzer is trained, in an order drawn anew every time.
    Episodes lost to an environment error are left out. seconds: the second attempts, which are trained if the config
    says so, without a teacher."""
    config = run.config
    limit = config.rollout.max_prompt_tokens + config.hindsight.max_skill_tokens
    teachers = run.skills.teacher_prompts(episodes, limit, counts) if run.distills else {}
    rows = [*episodes, *(second.as_groups(seconds, config) if config.hindsight.train_second else ())]
    only_format, credit = config.adv.invalid == "format", turn_credit(config, run.tokenizer, rows)
    samples = [
        Sample(
            prompt=turn.prompt_ids,
            response=turn.response_ids,
            teacher_prompt=teachers.get((e, t)),
            logprobs=turn.logprobs,
            reward=episode.reward,
            invalid=not (turn.valid and (only_format or turn.admissible)),
            group=episode.group,
            episode=episode.index,
            step=t,
            given=episode.given is not None,
            images=images.shown([turn]),
            value=episode.value,
            **credit.get((e, t), {}),
        )
        for e, episode in enumerate(rows)
        if not episode.error
        for t, turn in enumerate(episode.turns)
    ]
    if config.loss.gen_coef:
        measured = config.loss.gen_reward == "second_attempts"
        samples += analysis_samples(read, second.skill_values(episodes, seconds) if measured else None)
    order = np.random.default_rng((config.seed, iteration)).permutation(len(samples))
    return [samples[i] for i in order]
