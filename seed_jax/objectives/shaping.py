"""Advantages that the teacher has a say in: what it says about a token (the signal), and how that changes an advantage.

Pure functions, float32, constant with respect to the parameters. Shapes: R rows, S turns a row, N scored tokens a row;
`turn` holds the slot of each token's turn in its row, [R, N]; `mask` the tokens that have a teacher, [R, N]. A turn is
taught if it has such a token. Everything but "token" looks at the whole batch, so it is computed once, before any step.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, nn, vmap
from jax.lax import associative_scan, stop_gradient
from jax.ops import segment_sum
from jax.typing import ArrayLike

from seed_jax.objectives.advantages import check_choice, dense_ids, gigpo_steps
from seed_jax.objectives.policy_loss import keep_masked

SHAPES = ("none", "add_gap", "mult_clip", "add_gate")
SIGNALS = ("token", "turn", "running", "teacher")
VALUES = ("none", "agreement")

_MAX_EXPONENT = 20.0  # far outside every clip range; it keeps exp finite
_MIN_SPREAD = 1e-3  # nats; a smaller spread is rounding


def shape_by_teacher(
    advantages: Array,
    gap: Array,
    mask: Array,
    kind: str,
    *,
    weight: ArrayLike,
    clip: ArrayLike = 0.2,
    beta: ArrayLike = 5.0,
) -> Array:
    """Advantages that the teacher has a say in, [R, N].

    - none: A
    - add_gap: A + weight * gap, OPID (arXiv 2606.26790)
    - mult_clip: A * ((1 - weight) + weight * clip(exp(sign(A) gap), 1 - clip, 1 + clip)), RLSD (arXiv 2604.03128)
    - add_gate: A + weight * sigmoid(beta * gap): inside the policy loss, what `distill.gap_nll` is beside it

    Args:
        advantages: [R, N].
        gap: the signal: teacher minus student log-probability of the sampled token, or what `batch_signal` makes of it.
        mask: tokens that have a teacher; the others keep their advantage.
        weight, clip, beta: numbers of the formulas; weight may be [R, N].

    Raises:
        ValueError: unknown kind.
    """
    check_choice("shape", kind, SHAPES)
    advantages, mask = stop_gradient(jnp.asarray(advantages, jnp.float32)), jnp.asarray(mask).astype(bool)
    gap = stop_gradient(keep_masked(gap, mask))
    if kind == "none":
        return advantages
    if kind == "add_gap":
        shaped = advantages + weight * gap
    elif kind == "add_gate":
        shaped = advantages + weight * nn.sigmoid(beta * gap)
    else:
        trust = jnp.exp(jnp.clip(jnp.sign(advantages) * gap, -_MAX_EXPONENT, _MAX_EXPONENT))
        shaped = advantages * ((1.0 - weight) + weight * jnp.clip(trust, 1.0 - clip, 1.0 + clip))
    return jnp.where(mask, shaped, advantages)


def batch_signal(
    kind: str,
    teacher: Array,
    old: Array,
    mask: Array,
    turn: Array,
    group: Array,
    episode: Array,
    step: Array,
    *,
    floor: ArrayLike = 0.1,
) -> Array:
    """What the teacher says about every token, [R, N]; 0 outside the mask. gap = teacher - old.

    - token: the gap
    - turn: the mean gap of the token's turn, relative to the taught turns of its group: (mean - group's mean) /
        max(group's standard deviation, floor), 0 if it is the group's only one. GRSD (arXiv 2607.28076)
    - running: the sum of the mean gaps of all turns of the episode up to the token's own, the log-odds that the teacher
        has gathered by then. AgentOPSD (arXiv 2608.05987)
    - teacher: the teacher's log-prob minus its mean over the turn, over the root mean square of that over the episode.
        ADRS (arXiv 2608.03223)

    Args:
        teacher, old: log-probabilities of the sampled tokens, [R, N].
        group, episode, step: of every turn, [R, S], integer; an episode is a (group, episode) pair.

    Raises:
        ValueError: unknown kind.
    """
    check_choice("signal", kind, SIGNALS)
    gap = keep_masked(teacher, mask) - keep_masked(old, mask)
    if kind == "token":
        return gap
    per_token = lambda turns: jnp.where(mask, jnp.take_along_axis(turns, turn, axis=1), 0.0)  # noqa: E731
    episodes = _episodes(group, episode)
    if kind == "teacher":
        said = keep_masked(teacher, mask)
        centred = jnp.where(mask, said - per_token(turn_means(said, mask, turn, group.shape[1])[0]), 0.0)
        sums = lambda values: turn_sums(values, mask, turn, group.shape[1]).ravel()  # noqa: E731
        squares, counts = sums(centred**2), sums(jnp.ones(mask.shape))
        total = lambda values: segment_sum(values, episodes, episodes.size)[episodes]  # noqa: E731
        spread = jnp.sqrt(total(squares) / jnp.maximum(total(counts), 1)).reshape(group.shape)
        return centred / jnp.maximum(per_token(spread), _MIN_SPREAD)
    means, taught = turn_means(gap, mask, turn, group.shape[1])
    if kind == "turn":
        everyone = jnp.zeros(group.size, jnp.int32)
        relative = gigpo_steps(
            means.ravel(),
            group.ravel(),
            everyone,
            eps=0.0,
            std_floor=jnp.maximum(floor, _MIN_SPREAD),
            mask=taught.ravel(),
        )
        return per_token(relative.reshape(group.shape))
    return per_token(_sum_so_far(means.ravel(), episodes, step.ravel()).reshape(group.shape))


def agreement_value(teacher: Array, old: Array, mask: Array, turn: Array, group: Array, won: Array) -> Array:
    """What following the teacher is worth in each group, on its tokens, [R, N], from -1 to 1.

    A taught turn agrees with the teacher if its mean gap is above 0. The value is the share of won episodes (`won`,
    [R, S]) over the turns that agree minus that over those that do not; 0 where one of them is empty. ADRS
    (arXiv 2608.03223).
    """
    gap = keep_masked(teacher, mask) - keep_masked(old, mask)
    means, taught = turn_means(gap, mask, turn, group.shape[1])
    groups, won, rates = dense_ids(group.ravel()), won.ravel(), []
    total = lambda values: segment_sum(values.astype(jnp.float32), groups, groups.size)[groups]  # noqa: E731
    sides = [(taught & side).ravel() for side in (means > 0, means <= 0)]
    rates = [total(side & won) / jnp.maximum(total(side), 1) for side in sides]
    known = (total(sides[0]) > 0) & (total(sides[1]) > 0)
    value = jnp.where(known, rates[0] - rates[1], 0.0).reshape(group.shape)
    return jnp.take_along_axis(value, turn, axis=1)


def losing_margin(won: Array, given: Array, group: Array, episode: Array, real: Array) -> Array:
    """By how much the other view wins more often than the turn's own, [R, S], 0 if it does not.

    A group's episodes were played in two views: with a skill in the prompt (`given`) and without. Each episode counts
    once; where a group has one view only, there is no margin. UCOB (arXiv 2606.29502): the winner teaches the loser.
    """
    episodes, groups = _episodes(group, episode), dense_ids(group.ravel())
    rows = episodes.size
    of_episode = lambda x: segment_sum((x & real).astype(jnp.float32).ravel(), episodes, rows) > 0  # noqa: E731
    exists, wins, reads = of_episode(jnp.ones_like(real)), of_episode(won), of_episode(given)
    home = segment_sum(jnp.where(real.ravel(), groups, 0), episodes, rows) // jnp.maximum(
        segment_sum(real.ravel().astype(jnp.int32), episodes, rows), 1
    )
    total = lambda x: segment_sum(x.astype(jnp.float32), home, rows)  # noqa: E731
    views = [exists & reads, exists & ~reads]
    rates = [total(view & wins) / jnp.maximum(total(view), 1) for view in views]
    both = (total(views[0]) > 0) & (total(views[1]) > 0)
    lead = jnp.where(both, rates[0] - rates[1], 0.0)[groups].reshape(group.shape)  # of the view with skills
    return jnp.where(real, jnp.maximum(jnp.where(given, -lead, lead), 0.0), 0.0)


def _sum_so_far(values: Array, episodes: Array, step: Array) -> Array:
    """At every turn the sum of the values of its episode up to its step, [turns]."""
    order = jnp.lexsort((step, episodes))
    first = jnp.concatenate([jnp.ones(1, bool), jnp.diff(episodes[order]) != 0])

    def join(left, right):
        return left[0] | right[0], jnp.where(right[0], right[1], left[1] + right[1])

    return jnp.zeros_like(values).at[order].set(associative_scan(join, (first, values[order]))[1])


def turn_means(values: Array, mask: Array, turn: Array, slots: int) -> tuple[Array, Array]:
    """(mean over the masked tokens of every turn, whether it has any), both [R, S]."""
    count = turn_sums(jnp.ones(mask.shape), mask, turn, slots)
    return turn_sums(values, mask, turn, slots) / jnp.maximum(count, 1), count > 0


def turn_sums(values: Array, mask: Array, turn: Array, slots: int) -> Array:
    """Sum over the masked tokens of every turn, [R, S]."""
    return vmap(lambda x, t: segment_sum(x, t, slots))(jnp.where(mask, values, 0.0), turn)


def _episodes(group: Array, episode: Array) -> Array:
    """Numbers of the (group, episode) pairs, [R S]."""
    return dense_ids(jnp.stack([group.ravel(), episode.ravel()], axis=1))
