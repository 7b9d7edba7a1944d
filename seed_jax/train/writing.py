"""Training the analyzer: the skills that the policy wrote are turns of their own in a batch, rewarded for what they do.

    generation * mean over the written skills of -R * (mean log-prob of the skill's tokens)

R by `loss.gen_reward`:
- "gap": the mean teacher gap that a skill makes on the replies of the won episodes it was given to (arXiv 2607.14777,
  "skill generation"), 0 where none was won or it could not be used, at most 2 in size
- "second_attempts": by how much the second attempts that read the skill won more often than its group did without;
  skills that no second attempt has read are not trained

Shapes as in train/objective.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.ops import segment_sum

from seed_jax.objectives import policy_loss, shaping
from seed_jax.objectives.advantages import dense_ids
from seed_jax.train.packing import PackedBatch, Sample
from seed_jax.types import Episode

UNITS = ("none", "episode", "group")
_MAX_REWARD = 2.0


def analysis_samples(episodes: Sequence[Episode], values: Mapping[int, float] | None = None) -> list[Sample]:
    """One sample for each analyzed episode: the prompt that showed it, and the answer.

    values: number of an episode -> measured value of its skill; then only these episodes count
    """
    return [
        Sample(
            prompt=episode.written.prompt,
            response=episode.written.tokens,
            logprobs=episode.written.logprobs,
            group=episode.group,
            episode=episode.index,
            generated=True,
            value=0.0 if values is None else values[episode.index],
            images=episode.written.images,
        )
        for episode in episodes
        if episode.written is not None and (values is None or episode.index in values)
    ]


def skill_rewards(unit: str, batch: PackedBatch, teacher, old, distilled) -> jax.Array:
    """R of the turn's skill, [R, S]. unit: whether a skill was given to its "episode" or to its whole "group"."""
    won = jnp.take_along_axis(batch.reward > 0, batch.turn, axis=1)
    where = distilled & won
    gap = policy_loss.keep_masked(teacher, where) - policy_loss.keep_masked(old, where)
    sums, counts = (shaping.turn_sums(x, where, batch.turn, batch.real.shape[1]) for x in (gap, jnp.ones(gap.shape)))
    group, episode = batch.group.ravel(), batch.episode.ravel()
    ids = dense_ids(group if unit == "group" else jnp.stack([group, episode], axis=1))
    total = lambda values: segment_sum(values.ravel(), ids, ids.size)[ids]  # noqa: E731
    mean = total(sums) / jnp.maximum(total(counts), 1)
    return jnp.clip(mean, -_MAX_REWARD, _MAX_REWARD).reshape(batch.real.shape)


def generation_weights(
    unit: str, batch: PackedBatch, teacher, old, distilled, *, measured: bool = False
) -> dict[str, jax.Array]:
    """Arrays over tokens, [R, N]: R over the length of the skill at its tokens, and 1 over the length.

    measured: R is the value that the batch carries, not the gap
    """
    lengths = jnp.maximum(policy_loss.turn_lengths(batch.generated, batch.turn), 1.0)
    share = jnp.where(batch.generated, 1.0 / lengths, 0.0)
    rewards = batch.value if measured else skill_rewards(unit, batch, teacher, old, distilled)
    return {"skill_share": share, "skill_reward": share * jnp.take_along_axis(rewards, batch.turn, axis=1)}


def generation_loss(logp: jax.Array, tokens: dict, skills) -> jax.Array:
    """A micro-batch's share of the loss above, before its coefficient; `skills` counts those of the mini-batch."""
    written = tokens["skill_share"] > 0
    return -jnp.sum(tokens["skill_reward"] * policy_loss.keep_masked(logp, written)) / skills
