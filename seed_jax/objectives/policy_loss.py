"""Policy-gradient, KL and entropy terms on token log-probabilities. Pure functions, float32, usable inside jit.

Shapes: B rows, N response tokens. `mask` [B, N] marks the tokens that count; what stands at masked positions, NaN
included, influences neither values nor gradients. Every mean divides by the number of masked tokens, or by
`denominator` when given: with the token count of the whole mini-batch there, the losses (and metrics) of micro-batches
simply add up, so splitting and packing cannot change the gradient. An empty mask gives exactly 0. Clip ranges and
denominators may be traced arrays.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.lax import stop_gradient
from jax.typing import ArrayLike

# exp(20) is far outside every clip range, so the bound changes no clipped value; it keeps exp and its gradient finite.
_MAX_LOG_RATIO = 20.0
# The k3 estimate is clamped to +-10 as in the reference.
_MAX_KL = 10.0


def token_mean(values: Array, mask: Array, denominator: ArrayLike | None = None) -> Array:
    """Sum of `values` over the mask divided by the mask's size, or by `denominator`. Scalar, float32."""
    mask = jnp.asarray(mask).astype(bool)
    total = jnp.sum(jnp.where(mask, jnp.asarray(values, jnp.float32), 0.0))
    count = jnp.sum(mask, dtype=jnp.float32) if denominator is None else jnp.asarray(denominator, jnp.float32)
    return total / jnp.maximum(count, 1.0)


def keep_masked(values: Array, mask: Array) -> Array:
    """float32 `values` with 0 at masked-out positions, so that garbage there cannot reach a gradient."""
    return jnp.where(jnp.asarray(mask).astype(bool), jnp.asarray(values, jnp.float32), 0.0)


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
    return token_mean(losses, mask, denominator), {name: stop_gradient(value) for name, value in metrics.items()}


def kl_k3(logp: Array, ref_logp: Array, mask: Array, *, denominator: ArrayLike | None = None) -> Array:
    """Mean k3 estimate of KL(policy || reference): exp(d) - d - 1 with d = ref_logp - logp, clamped to +-10 per token.

    Source: J. Schulman, "Approximating KL divergence" (2020); the clamp is the reference's. Clamped tokens have no
    gradient. Shapes and `denominator` as in `ppo_clip`; `ref_logp` is constant.
    """
    _check_tokens(mask, logp=logp, ref_logp=ref_logp)
    difference = stop_gradient(keep_masked(ref_logp, mask)) - keep_masked(logp, mask)
    # Beyond +-20 the estimate exceeds the clamp on both sides, so bounding d first changes nothing but stays finite.
    difference = jnp.clip(difference, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    estimate = jnp.exp(difference) - difference - 1.0
    return token_mean(jnp.clip(estimate, -_MAX_KL, _MAX_KL), mask, denominator)


def entropy(token_entropy: Array, mask: Array, *, denominator: ArrayLike | None = None) -> Array:
    """Mean entropy in nats; subtract it times its coefficient from the loss.

    Args:
        token_entropy: entropy of the policy's distribution at each response token, [B, N]; differentiated.
        mask, denominator: as in `ppo_clip`.
    """
    _check_tokens(mask, token_entropy=token_entropy)
    return token_mean(token_entropy, mask, denominator)


def _token_advantages(advantages: Array, shape: tuple[int, int]) -> Array:
    given = jnp.shape(advantages)
    if given not in (shape, shape[:1]):
        raise ValueError(f"advantages {given} must be [rows] or [rows, tokens] for mask {shape}")
    return advantages if given == shape else jnp.broadcast_to(jnp.asarray(advantages)[:, None], shape)


def _check_tokens(mask: Array, **arrays: Array) -> None:
    for name, array in arrays.items():
        if jnp.shape(array) != jnp.shape(mask) or jnp.ndim(array) != 2:
            raise ValueError(f"{name} {jnp.shape(array)} and mask {jnp.shape(mask)} must both be [rows, tokens]")
