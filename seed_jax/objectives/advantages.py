"""Advantages of turn rows. Pure functions, float32, static shapes, usable inside jit.

Shapes: every array is [rows], one row per environment turn. `mask` marks real rows; padding rows contribute to nothing
and get 0. Group and episode ids are any integers; an episode is a distinct (group, episode) pair.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.ops import segment_max, segment_min, segment_sum
from jax.typing import ArrayLike

KINDS = ("grpo", "drgrpo", "rloo", "gigpo", "hgpo", "reinforce_pp", "zero")
# Estimators whose definition has no standard deviation.
MEAN_ONLY = ("drgrpo", "rloo")
# Estimators that compare single turns, from equal observations.
BY_STEP = ("gigpo", "hgpo")
STATS = ("rows", "episodes")
NORMALIZATIONS = ("std", "mean")
PENALTIES = ("in_score", "after_norm")


def grpo(
    scores: Array,
    group_ids: Array,
    episode_ids: Array,
    *,
    stat: str = "rows",
    normalize: str = "std",
    eps: ArrayLike = 1e-6,
    std_floor: ArrayLike = 0.0,
    mask: Array | None = None,
) -> Array:
    """Advantages relative to the group: A = (s - mean) / (max(std, std_floor) + eps), or s - mean.

    Mean and sample standard deviation (n - 1) are taken over the group's entries. With stat="rows" every row is an
    entry, so long episodes weigh more: this is what the published results used. With stat="episodes" (the formula of
    GRPO, arXiv 2402.03300 eq. 3) every episode is one entry whose score is that of its *first row in array order*, as
    in the reference; the rows of an episode may differ by penalties. A group of one entry has mean 0 and std 1.

    Statistics are those of the differences to the group's smallest entry, so equal scores give exactly 0 in float32
    whatever their value (the plain mean of 100 times -1.5000002 is off by one ulp, which 1 / eps turns into -0.1).

    Args:
        scores: score of each row, [rows].
        group_ids: rows with equal ids form a group (one task), [rows], integer.
        episode_ids: rows with equal ids inside a group form an episode, [rows], integer.
        stat: "rows" or "episodes".
        normalize: "std" divides by the standard deviation, "mean" does not.
        eps: added to the standard deviation.
        std_floor: smallest standard deviation that is believed, in score units; 0 switches the floor off. With
            stat="episodes" and penalties inside the score, entries may tie while rows differ: without a floor such a
            row is divided by eps alone.
        mask: real rows, [rows]; all rows when None.

    Returns:
        [rows], float32.

    Raises:
        ValueError: unknown stat or normalize, or arrays that are not all [rows].
    """
    check_choice("stat", stat, STATS)
    check_choice("normalize", normalize, NORMALIZATIONS)
    scores, real = _check_rows(scores, mask, group_ids, episode_ids)
    groups = dense_ids(group_ids)
    entries = real if stat == "rows" else real & _is_first_of_episode(group_ids, episode_ids, real)
    count = _sums(entries, groups)
    lowest = segment_min(jnp.where(entries, scores, jnp.inf), groups, scores.shape[0])
    lowest = jnp.where(count > 1, lowest, 0.0)[groups]

    above_lowest = jnp.where(entries, scores - lowest, 0.0)
    mean = jnp.where(count > 1, _sums(above_lowest, groups) / jnp.maximum(count, 1), 0.0)[groups]
    centered = jnp.where(real, scores - lowest - mean, 0.0)
    if normalize == "mean":
        return centered
    squares = _sums(jnp.where(entries, jnp.square(centered), 0.0), groups)
    std = jnp.where(count > 1, jnp.sqrt(squares / jnp.maximum(count - 1, 1)), 1.0)[groups]
    return centered / (jnp.maximum(std, std_floor) + eps)


def drgrpo(scores: Array, group_ids: Array, episode_ids: Array, *, stat: str = "rows", mask: Array | None = None):
    """Dr. GRPO (arXiv 2503.20783): A = s - mean of the group, without a standard deviation. As `grpo`, [rows]."""
    return grpo(scores, group_ids, episode_ids, stat=stat, normalize="mean", mask=mask)


def rloo(scores: Array, group_ids: Array, episode_ids: Array, *, stat: str = "rows", mask: Array | None = None):
    """Leave-one-out baseline (arXiv 2402.14740): A = n / (n - 1) (s - mean), the score minus the mean of the others.

    n counts the entries of the group: rows or episodes, see `grpo`. A group of one entry has no others: A = s.
    Returns [rows], float32.
    """
    centered = drgrpo(scores, group_ids, episode_ids, stat=stat, mask=mask)
    _, real = _check_rows(scores, mask)
    entries = real if stat == "rows" else real & _is_first_of_episode(group_ids, episode_ids, real)
    groups = dense_ids(group_ids)
    count = _sums(entries, groups)[groups]
    return centered * jnp.where(count > 1, count / jnp.maximum(count - 1, 1), 1.0)


def reinforce_pp(scores: Array, group_ids: Array, episode_ids: Array, **settings) -> Array:
    """REINFORCE++ (arXiv 2501.03262): scores whitened over the whole batch; groups only tell episodes apart.

    Arguments (settings too) and result as in `grpo`.
    """
    everyone = jnp.zeros(jnp.shape(group_ids), jnp.int32)
    episodes = dense_ids(jnp.stack([jnp.asarray(group_ids), jnp.asarray(episode_ids)], axis=1))
    return grpo(scores, everyone, episodes, **settings)


def gigpo_steps(
    step_returns: Array,
    group_ids: Array,
    anchor_ids: Array,
    *,
    normalize: str = "std",
    eps: ArrayLike = 1e-6,
    std_floor: ArrayLike = 0.0,
    mask: Array | None = None,
) -> Array:
    """Step advantages of GiGPO (arXiv 2505.10978 eq. 6-7): the return from a turn on, relative to all turns of the
    same task that started from the same observation.

    Args:
        step_returns: discounted return from each turn on, [rows].
        group_ids: task of each row, [rows], integer.
        anchor_ids: observation of each row, [rows], integer; compared only inside a task.
        Others as in `grpo`; an observation that only one row has seen gives 0.

    Returns:
        [rows], float32.
    """
    step_returns, real = _check_rows(step_returns, mask, group_ids, anchor_ids)
    anchors = dense_ids(jnp.stack([jnp.asarray(group_ids), jnp.asarray(anchor_ids)], axis=1))
    settings = dict(normalize=normalize, eps=eps, std_floor=std_floor, mask=real)
    relative = grpo(step_returns, anchors, anchors, stat="rows", **settings)
    return jnp.where(_sums(real, anchors)[anchors] > 1, relative, 0.0)


def gigpo(
    scores: Array,
    step_returns: Array,
    group_ids: Array,
    episode_ids: Array,
    anchor_ids: Array,
    *,
    step_weight: ArrayLike = 1.0,
    stat: str = "rows",
    **settings,
) -> Array:
    """GiGPO (arXiv 2505.10978 eq. 8): the episode's advantage (`grpo`) + step_weight * that of the step, [rows].

    anchor_ids: [rows]; settings: normalize, eps, std_floor and mask as in `grpo`.
    """
    of_episode = grpo(scores, group_ids, episode_ids, stat=stat, **settings)
    return of_episode + step_weight * gigpo_steps(step_returns, group_ids, anchor_ids, **settings)


def hgpo(
    scores: Array,
    step_returns: Array,
    group_ids: Array,
    episode_ids: Array,
    anchor_ids: Array,
    *,
    alpha: ArrayLike = 1.0,
    base_weight: ArrayLike = 0.0,
    stat: str = "rows",
    **settings,
) -> Array:
    """HGPO: step advantages at every length of shared history, averaged with weights (k + 1)^alpha, [rows].

    Level k = 1..K compares the turns of a task whose last k observations are equal (`gigpo_steps`; level 1 is GiGPO's).
    Level 0 is the episode's advantage, with weight `base_weight`. A level that gives a row 0 has no weight there.

    anchor_ids: [rows, K], one column a level; settings: normalize, eps, std_floor and mask as in `grpo`.
    """
    levels = [grpo(scores, group_ids, episode_ids, stat=stat, **settings)]
    levels += [gigpo_steps(step_returns, group_ids, anchors, **settings) for anchors in jnp.asarray(anchor_ids).T]
    values = jnp.stack(levels)
    weights = (jnp.arange(len(levels), dtype=jnp.float32) + 1.0) ** alpha
    weights = jnp.where(values != 0, weights.at[0].set(base_weight)[:, None], 0.0)
    return jnp.sum(weights * values, axis=0) / jnp.maximum(jnp.sum(weights, axis=0), 1e-6)


def overlong(lengths: Array, max_tokens: ArrayLike, buffer: ArrayLike, penalty: ArrayLike) -> Array:
    """Soft penalty of long replies (DAPO, arXiv 2503.14476 eq. 13), to be subtracted from the score; like `lengths`.

    0 up to max_tokens - buffer tokens, then rising linearly to `penalty` at max_tokens. All lengths in tokens.
    """
    excess = jnp.asarray(lengths, jnp.float32) - (max_tokens - buffer)
    return penalty * jnp.clip(excess / jnp.maximum(buffer, 1.0), 0.0, 1.0)


def mixed_rows(rewards: Array, group_ids: Array, mask: Array | None = None) -> Array:
    """Rows of groups whose rewards differ, [rows] bool: those that DAPO's dynamic filter keeps."""
    rewards, real = _check_rows(rewards, mask, group_ids)
    groups = dense_ids(group_ids)
    return real & _differs(rewards, groups, real)[groups]


def penalized(values: Array, invalid: Array, penalty: ArrayLike) -> Array:
    """values - penalty where the row's action was invalid, [rows]. `penalty` is in the units of `values`."""
    return jnp.asarray(values, jnp.float32) - penalty * jnp.asarray(invalid, jnp.float32)


def row_advantages(
    rewards: Array,
    invalid: Array,
    group_ids: Array,
    episode_ids: Array,
    mask: Array | None = None,
    *,
    kind: str = "grpo",
    stat: str = "rows",
    normalize: str = "std",
    eps: ArrayLike = 1e-6,
    std_floor: ArrayLike = 0.0,
    invalid_penalty: str = "in_score",
    penalty: ArrayLike = 0.1,
    step_returns: Array | None = None,
    anchor_ids: Array | None = None,
    step_weight: ArrayLike = 1.0,
    alpha: ArrayLike = 1.0,
    base_weight: ArrayLike = 0.0,
) -> Array:
    """Advantages of turn rows from episode rewards and invalid-action flags.

    invalid_penalty="in_score" subtracts the penalty from the row's score before normalisation (the reference). In a
    group that only failed the penalties are then the only variance, the standard deviation is tiny, and format alone
    earns full-size advantages. invalid_penalty="after_norm" subtracts it from the advantage, so that it keeps its size;
    `std_floor` is the other remedy.

    Args:
        rewards: the episode's reward on each of its rows, [rows].
        invalid: 1 where the row's response broke the format, [rows].
        kind: one of KINDS; "zero" is no advantage at all, penalty included.
        penalty: size of the penalty, in reward units (in_score) or in advantage units (after_norm).
        step_returns, anchor_ids: of `gigpo` and `hgpo`, which need them; the penalty counts in both of their parts.
            anchor_ids is [rows, K]; gigpo takes the first column.
        step_weight; alpha, base_weight: of `gigpo`; of `hgpo`.
        Others as in `grpo`; drgrpo and rloo know no normalize, eps and std_floor.

    Returns:
        [rows], float32.
    """
    check_choice("kind", kind, KINDS)
    check_choice("invalid_penalty", invalid_penalty, PENALTIES)
    if kind == "zero":
        return jnp.zeros(jnp.shape(rewards), jnp.float32)
    in_score = invalid_penalty == "in_score"
    score = lambda values: penalized(values, invalid, penalty) if in_score else values  # noqa: E731
    ids, settings = (group_ids, episode_ids), dict(stat=stat, mask=mask)
    if kind not in MEAN_ONLY:
        settings |= dict(normalize=normalize, eps=eps, std_floor=std_floor)
    if kind in BY_STEP:
        if step_returns is None or anchor_ids is None:
            raise ValueError(f"{kind} needs step_returns and anchor_ids")
        scores = (score(rewards), score(step_returns))
        if kind == "gigpo":
            advantages = gigpo(*scores, *ids, anchor_ids[:, 0], step_weight=step_weight, **settings)
        else:
            advantages = hgpo(*scores, *ids, anchor_ids, alpha=alpha, base_weight=base_weight, **settings)
    else:
        estimate = {"grpo": grpo, "drgrpo": drgrpo, "rloo": rloo, "reinforce_pp": reinforce_pp}[kind]
        advantages = estimate(score(rewards), *ids, **settings)
    if in_score:
        return advantages
    _, real = _check_rows(rewards, mask, invalid)
    return jnp.where(real, penalized(advantages, invalid, penalty), 0.0)


def group_metrics(
    rewards: Array,
    invalid: Array,
    group_ids: Array,
    mask: Array | None = None,
    *,
    invalid_penalty: str = "in_score",
    penalty: ArrayLike = 0.1,
) -> dict[str, Array]:
    """What the groups of a batch can teach. Shares of the groups that have a real row, 0 when there is none.

    - mixed_groups: rewards differ inside the group, so the outcome is a signal.
    - penalty_only_groups: rewards are equal and the only variance is the invalid-action penalty inside the score; see
      `row_advantages` for why a large share deserves a warning. Always 0 for invalid_penalty="after_norm".
    """
    check_choice("invalid_penalty", invalid_penalty, PENALTIES)
    rewards, real = _check_rows(rewards, mask, invalid, group_ids)
    groups = dense_ids(group_ids)
    exists = _sums(real, groups) > 0
    mixed = exists & _differs(rewards, groups, real)
    penalty_only = exists & ~mixed & _differs(jnp.asarray(invalid, jnp.float32), groups, real)
    penalty_only &= (invalid_penalty == "in_score") & (jnp.asarray(penalty) != 0)
    total = jnp.maximum(jnp.sum(exists), 1)
    return {
        "mixed_groups": jnp.sum(mixed) / total,
        "penalty_only_groups": jnp.sum(penalty_only) / total,
    }


def dense_ids(ids: Array) -> Array:
    """Numbers the distinct ids (or distinct id rows) 0..n-1, so that any integers can serve as segment ids."""
    ids = jnp.asarray(ids)
    return jnp.unique(ids, return_inverse=True, size=ids.shape[0], axis=0)[1].reshape(-1)


def _is_first_of_episode(group_ids: Array, episode_ids: Array, real: Array) -> Array:
    episodes = dense_ids(jnp.stack([jnp.asarray(group_ids), jnp.asarray(episode_ids)], axis=1))
    rows = real.shape[0]
    index = jnp.arange(rows)
    return segment_min(jnp.where(real, index, rows), episodes, rows)[episodes] == index


def _sums(values: Array, groups: Array) -> Array:
    return segment_sum(values.astype(jnp.float32), groups, groups.shape[0])


def _differs(values: Array, groups: Array, real: Array) -> Array:
    rows = groups.shape[0]
    highest = segment_max(jnp.where(real, values, -jnp.inf), groups, rows)
    lowest = segment_min(jnp.where(real, values, jnp.inf), groups, rows)
    return highest > lowest


def _check_rows(scores: Array, mask: Array | None, *others: Array) -> tuple[Array, Array]:
    """float32 scores with padding rows set to 0, and the boolean mask."""
    scores = jnp.asarray(scores, jnp.float32)
    real = jnp.ones(scores.shape, bool) if mask is None else jnp.asarray(mask).astype(bool)
    shapes = {jnp.shape(array) for array in (scores, real, *others)}
    if scores.ndim != 1 or len(shapes) > 1:
        raise ValueError(f"scores, mask and ids must all be [rows]; got shapes {sorted(shapes)}")
    return jnp.where(real, scores, 0.0), real


def check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{field} is {value!r}; choose one of {', '.join(choices)}")
