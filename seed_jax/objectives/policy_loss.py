"""Policy-gradient, KL and entropy terms on token log-probabilities. Pure functions, float32, usable inside jit.

Shapes: B rows, N response tokens. `mask` [B, N] marks the tokens that count; what stands at masked positions, NaN
included, influences neither values nor gradients. Every mean divides by the number of masked tokens, or by
`denominator` when given: with the token count of the whole mini-batch there, the losses (and metrics) of micro-batches
simply add up, so splitting and packing cannot change the gradient. An empty mask gives exactly 0. Clip ranges and
denominators may be traced arrays. Losses take a `weight` [B, N] of each token (constant; 1 when None), which makes
another mean of them: see `aggregation_weight`. Metrics are plain token means.

A row may hold several turns side by side: `turns` [B, N] numbers them from 0 in each row; None means one turn a row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax import stop_gradient
from jax.ops import segment_sum
from jax.typing import ArrayLike

POLICIES = ("ppo_clip", "gspo", "gspo_token", "reinforce")
KL_TYPES = ("k3", "k1", "k2", "full")
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")

# exp(20) is far outside every clip range, so the bound changes no clipped value; it keeps exp and its gradient finite.
_MAX_LOG_RATIO = 20.0
# The k3 estimate is clamped to +-10 as in the reference.
_MAX_KL = 10.0


def token_mean(values: Array, mask: Array, denominator: ArrayLike | None = None, weight: Array | None = None) -> Array:
    """Sum of `values` (times `weight`) over the mask divided by the mask's size, or by `denominator`. Scalar, float32.

    The four are all [B, N] but the denominator.
    """
    mask = jnp.asarray(mask).astype(bool)
    values = jnp.asarray(values, jnp.float32)
    if weight is not None:
        values = values * stop_gradient(jnp.where(mask, weight, 0.0))
    total = jnp.sum(jnp.where(mask, values, 0.0))
    count = jnp.sum(mask, dtype=jnp.float32) if denominator is None else jnp.asarray(denominator, jnp.float32)
    return total / jnp.maximum(count, 1.0)


def keep_masked(values: Array, mask: Array) -> Array:
    """float32 `values` with 0 at masked-out positions, so that garbage there cannot reach a gradient."""
    return jnp.where(jnp.asarray(mask).astype(bool), jnp.asarray(values, jnp.float32), 0.0)


def turn_sum(values: Array, mask: Array, turns: Array | None = None) -> Array:
    """At every token, the sum of `values` over the masked tokens of its turn. [B, N], float32."""
    values = keep_masked(values, mask)
    if turns is None:
        return jnp.broadcast_to(jnp.sum(values, axis=1, keepdims=True), values.shape)
    # A turn has a token or more, so a row of N tokens has at most N turns.
    sums = jax.vmap(lambda v, t: segment_sum(v, t, num_segments=v.shape[0]))(values, turns)
    return jnp.take_along_axis(sums, turns, axis=1)


def turn_lengths(mask: Array, turns: Array | None = None) -> Array:
    """At every token, the number of masked tokens of its turn. [B, N], float32."""
    return turn_sum(jnp.ones(jnp.shape(mask), jnp.float32), mask, turns)


def turn_mean(values: Array, mask: Array, turns: Array | None = None) -> Array:
    """At every token, the mean of `values` over the masked tokens of its turn (0 without any). [B, N], float32."""
    return turn_sum(values, mask, turns) / jnp.maximum(turn_lengths(mask, turns), 1.0)


def count_turns(lengths: Array, mask: Array) -> Array:
    """How many turns have masked tokens, from their `lengths` at every token. Scalar, float32, a whole number."""
    return jnp.round(jnp.sum(keep_masked(1.0 / jnp.maximum(lengths, 1.0), mask)))


def aggregation_weight(
    mode: str, lengths: Array, max_tokens: ArrayLike, token_count: ArrayLike, turn_count: ArrayLike
) -> Array | None:
    """The `weight` [B, N] with which a mean over `token_count` tokens becomes another mean; None for "token_mean".

    - token_mean: over all tokens
    - seq_mean_token_mean: over turns, of the mean over a turn's tokens (GRPO's formula, GSPO)
    - seq_mean_token_sum: over turns, of the sum over a turn's tokens
    - seq_mean_token_sum_norm: over turns, of the sum divided by the longest reply allowed (Dr. GRPO)

    Args:
        lengths: tokens of the turn of each token, [B, N].
        max_tokens: longest reply allowed, in tokens.
        token_count, turn_count: of the whole mini-batch.

    Raises:
        ValueError: unknown mode.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"aggregation is {mode!r}; choose one of {', '.join(AGGREGATIONS)}")
    if mode == "token_mean":
        return None
    each = jnp.full(jnp.shape(lengths), token_count / jnp.maximum(turn_count, 1.0), jnp.float32)
    if mode == "seq_mean_token_mean":
        return each / jnp.maximum(lengths, 1.0)
    return each if mode == "seq_mean_token_sum" else each / max_tokens


def importance_weight(old_logp: Array, sampled_logp: Array, mask: Array, cap: ArrayLike) -> Array:
    """min(exp(old_logp - sampled_logp), cap), constant: corrects for a sampler whose numbers differ from the trainer's.

    Truncated importance sampling, as in "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
    (F. Yao et al. 2025). [B, N], float32; multiply it into the weight of the policy loss.
    """
    _check_tokens(mask, old_logp=old_logp, sampled_logp=sampled_logp)
    log_ratio = keep_masked(old_logp, mask) - keep_masked(sampled_logp, mask)
    return stop_gradient(jnp.minimum(jnp.exp(jnp.clip(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)), cap))


def ppo_clip(
    logp: Array,
    old_logp: Array,
    advantages: Array,
    mask: Array,
    *,
    clip_low: ArrayLike = 0.2,
    clip_high: ArrayLike = 0.2,
    dual_clip: ArrayLike | None = 3.0,
    denominator: ArrayLike | None = None,
    weight: Array | None = None,
) -> tuple[Array, dict[str, Array]]:
    """The clipped surrogate of PPO (arXiv 1707.06347 eq. 7) with dual clip (arXiv 1912.09729 eq. 5).

    With r = exp(logp - old_logp): loss = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), and where A < 0 at most
    -A dual_clip, so that a token that became much more likely than it was cannot dominate the batch.

    Args:
        logp: current log-probabilities of the sampled tokens, [B, N]; differentiated.
        old_logp: the same under the weights that sampled, [B, N]; constant.
        advantages: [B] (broadcast over tokens) or [B, N]; constant.
        mask: tokens that count, [B, N].
        clip_low, clip_high: distance of the clip range from ratio 1.
        dual_clip: bound on -loss / A for A < 0, above 1 + clip_high; None switches it off.
        denominator: global token count; the mask's own size when None.
        weight: of each token, [B, N]; see the module.

    Returns:
        Scalar loss and metrics, which use the same denominator: clip_fraction (tokens whose clipped branch is active),
        dual_clip_fraction, approx_kl (mean of old_logp - logp); and ratio_max, a maximum (0 for an empty mask).

    Raises:
        ValueError: shapes that do not fit together.
    """
    _check_tokens(mask, logp=logp, old_logp=old_logp)
    advantages = stop_gradient(keep_masked(_token_advantages(advantages, jnp.shape(mask)), mask))

    log_ratio = keep_masked(logp, mask) - stop_gradient(keep_masked(old_logp, mask))
    ratio = jnp.exp(jnp.clip(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    plain = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    losses = jnp.maximum(plain, clipped)
    dual_active = jnp.zeros(losses.shape, bool)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        dual_active = (advantages < 0) & (losses > bound)
        losses = jnp.where(advantages < 0, jnp.minimum(losses, bound), losses)

    metrics = {
        "clip_fraction": token_mean(clipped > plain, mask, denominator),
        "dual_clip_fraction": token_mean(dual_active, mask, denominator),
        "approx_kl": token_mean(-log_ratio, mask, denominator),
        "ratio_max": jnp.max(keep_masked(ratio, mask), initial=0.0),
    }
    metrics = {name: stop_gradient(value) for name, value in metrics.items()}
    return token_mean(losses, mask, denominator, weight), metrics


def gspo(
    logp: Array,
    old_logp: Array,
    advantages: Array,
    mask: Array,
    *,
    clip_low: ArrayLike = 3e-4,
    clip_high: ArrayLike = 4e-4,
    denominator: ArrayLike | None = None,
    weight: Array | None = None,
    turns: Array | None = None,
    token_level: bool = False,
) -> tuple[Array, dict[str, Array]]:
    """GSPO (arXiv 2507.18071 eq. 5): PPO's clip on one ratio a turn, exp(mean over its tokens of logp - old_logp).

    With token_level (GSPO-token, eq. 13) the value of the ratio is the same, but its gradient at a token is that of the
    token's own log-probability, so advantages may differ between the tokens of a turn; where they do not, the gradient
    of the mean over turns of the mean over tokens is the same. Aggregate with "seq_mean_token_mean".

    Arguments and results as in `ppo_clip`, without dual clip.
    """
    _check_tokens(mask, logp=logp, old_logp=old_logp)
    advantages = stop_gradient(keep_masked(_token_advantages(advantages, jnp.shape(mask)), mask))
    log_ratio = keep_masked(logp, mask) - stop_gradient(keep_masked(old_logp, mask))
    log_turn_ratio = turn_mean(log_ratio, mask, turns)
    if token_level:
        own = keep_masked(logp, mask)
        log_turn_ratio = stop_gradient(log_turn_ratio) + own - stop_gradient(own)
    ratio = jnp.exp(jnp.clip(log_turn_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    plain = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    metrics = {
        "clip_fraction": token_mean(clipped > plain, mask, denominator),
        "dual_clip_fraction": jnp.zeros(()),
        "approx_kl": token_mean(-log_ratio, mask, denominator),
        "ratio_max": jnp.max(keep_masked(ratio, mask), initial=0.0),
    }
    metrics = {name: stop_gradient(value) for name, value in metrics.items()}
    return token_mean(jnp.maximum(plain, clipped), mask, denominator, weight), metrics


def reinforce(
    logp: Array,
    old_logp: Array,
    advantages: Array,
    mask: Array,
    *,
    denominator: ArrayLike | None = None,
    weight: Array | None = None,
) -> tuple[Array, dict[str, Array]]:
    """-A logp (Williams 1992), neither ratio nor clip: unbiased only while the policy is the one that sampled.

    Arguments and results as in `ppo_clip`; old_logp only serves the metrics.
    """
    _check_tokens(mask, logp=logp, old_logp=old_logp)
    advantages = stop_gradient(keep_masked(_token_advantages(advantages, jnp.shape(mask)), mask))
    kept = keep_masked(logp, mask)
    log_ratio = stop_gradient(kept - keep_masked(old_logp, mask))
    ratio = jnp.exp(jnp.clip(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    metrics = {
        "clip_fraction": jnp.zeros(()),
        "dual_clip_fraction": jnp.zeros(()),
        "approx_kl": token_mean(-log_ratio, mask, denominator),
        "ratio_max": jnp.max(keep_masked(ratio, mask), initial=0.0),
    }
    return token_mean(-advantages * kept, mask, denominator, weight), metrics


def kl_k1(
    logp: Array, ref_logp: Array, mask: Array, *, denominator: ArrayLike | None = None, weight: Array | None = None
) -> Array:
    """Mean of logp - ref_logp: the plain estimate of KL(policy || reference).

    As a loss its gradient is that of logp alone, whose expectation is 0 on the policy's own samples. As `kl_k3`.
    """
    _check_tokens(mask, logp=logp, ref_logp=ref_logp)
    difference = keep_masked(logp, mask) - stop_gradient(keep_masked(ref_logp, mask))
    return token_mean(difference, mask, denominator, weight)


def kl_k2(
    logp: Array, ref_logp: Array, mask: Array, *, denominator: ArrayLike | None = None, weight: Array | None = None
) -> Array:
    """Mean of (logp - ref_logp)^2 / 2, whose gradient on the policy's own samples is that of KL(policy || reference).

    Arguments as in `kl_k3`, without its clamp.
    """
    _check_tokens(mask, logp=logp, ref_logp=ref_logp)
    difference = keep_masked(logp, mask) - stop_gradient(keep_masked(ref_logp, mask))
    return token_mean(0.5 * jnp.square(difference), mask, denominator, weight)


def kl_k3(
    logp: Array, ref_logp: Array, mask: Array, *, denominator: ArrayLike | None = None, weight: Array | None = None
) -> Array:
    """Mean k3 estimate of KL(policy || reference): exp(d) - d - 1 with d = ref_logp - logp, clamped to +-10 per token.

    Source: J. Schulman, "Approximating KL divergence" (2020); the clamp is the reference's. Clamped tokens have no
    gradient. Shapes and `denominator` as in `ppo_clip`; `ref_logp` is constant.
    """
    _check_tokens(mask, logp=logp, ref_logp=ref_logp)
    difference = stop_gradient(keep_masked(ref_logp, mask)) - keep_masked(logp, mask)
    # Beyond +-20 the estimate exceeds the clamp on both sides, so bounding d first changes nothing but stays finite.
    difference = jnp.clip(difference, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    estimate = jnp.exp(difference) - difference - 1.0
    return token_mean(jnp.clip(estimate, -_MAX_KL, _MAX_KL), mask, denominator, weight)


def entropy(
    token_entropy: Array, mask: Array, *, denominator: ArrayLike | None = None, weight: Array | None = None
) -> Array:
    """Mean entropy in nats; subtract it times its coefficient from the loss.

    Args:
        token_entropy: entropy of the policy's distribution at each response token, [B, N]; differentiated.
        mask, denominator, weight: as in `ppo_clip`.
    """
    _check_tokens(mask, token_entropy=token_entropy)
    return token_mean(token_entropy, mask, denominator, weight)


def _token_advantages(advantages: Array, shape: tuple[int, int]) -> Array:
    given = jnp.shape(advantages)
    if given not in (shape, shape[:1]):
        raise ValueError(f"advantages {given} must be [rows] or [rows, tokens] for mask {shape}")
    return advantages if given == shape else jnp.broadcast_to(jnp.asarray(advantages)[:, None], shape)


def _check_tokens(mask: Array, **arrays: Array) -> None:
    for name, array in arrays.items():
        if jnp.shape(array) != jnp.shape(mask) or jnp.ndim(array) != 2:
            raise ValueError(f"{name} {jnp.shape(array)} and mask {jnp.shape(mask)} must both be [rows, tokens]")
