"""Distillation from the skill-conditioned teacher branch: estimators and gates. Pure functions, float32.

Teacher and student score the *same sampled tokens*; only the prompt differs. Shapes, masks and denominators follow
policy_loss.py; the mask here holds only response tokens of rows that have a usable skill.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax import stop_gradient
from jax.typing import ArrayLike

from seed_jax.objectives.policy_loss import keep_masked, token_mean

GATES = ("none", "const", "sig_gap")


def gate_weights(gap: Array, gate: str, *, beta: ArrayLike = 5.0, const: ArrayLike = 0.5) -> Array:
    """Weight of each token, [B, N], constant with respect to the parameters.

    - none: 1
    - const: `const`
    - sig_gap: sigmoid(beta * gap), SEED (arXiv 2607.14777) and SDAR; gap 0 gives .5, +.5 gives .92, -.5 gives .08

    Args:
        gap: teacher minus student log-probability of the sampled token, [B, N].

    Raises:
        ValueError: unknown gate.
    """
    if gate == "none":
        return jnp.ones_like(gap)
    if gate == "const":
        return jnp.broadcast_to(jnp.asarray(const, gap.dtype), gap.shape)
    if gate == "sig_gap":
        return jax.nn.sigmoid(beta * stop_gradient(gap))
    raise ValueError(f"distillation gate is {gate!r}; choose one of {', '.join(GATES)}")


def gap_nll(
    logp: Array,
    teacher_logp: Array,
    mask: Array,
    *,
    gate: str = "sig_gap",
    beta: ArrayLike = 5.0,
    const: ArrayLike = 0.5,
    denominator: ArrayLike | None = None,
) -> tuple[Array, dict[str, Array]]:
    """SEED's gated distillation term: mean of g * (sg(teacher_logp) - logp), whose gradient is -g / tokens.

    It raises the log-probability of every sampled token, most where the skill makes the token more likely; it never
    lowers one, and its value may be negative. With a constant gate the gradient does not depend on the teacher at all.

    Args:
        logp: student log-probabilities of the sampled tokens, [B, N]; differentiated.
        teacher_logp: the same under the prompt with the skill, [B, N]; constant.
        mask: response tokens of rows with a usable skill, [B, N]. Empty: the loss is exactly 0.
        gate, beta, const: see `gate_weights`.
        denominator: global count of masked tokens; the mask's own size when None.

    Returns:
        Scalar loss and metrics over the mask: gate_mean, gate_square (mean of g^2), gate_high (share above .5) and
        gap_mean use the same denominator, so those of micro-batches add up. gate_std is of this call's tokens alone;
        over a split batch it is sqrt(gate_square - gate_mean^2).

    Raises:
        ValueError: unknown gate, or shapes that differ.
    """
    shapes = {"logp": jnp.shape(logp), "teacher_logp": jnp.shape(teacher_logp), "mask": jnp.shape(mask)}
    if len(set(shapes.values())) > 1 or jnp.ndim(mask) != 2:
        raise ValueError(f"logp, teacher_logp and mask must all be [rows, tokens]; got {shapes}")
    gap = stop_gradient(keep_masked(teacher_logp, mask)) - keep_masked(logp, mask)
    weights = gate_weights(gap, gate, beta=beta, const=const)

    deviation = jnp.square(weights - token_mean(weights, mask))
    metrics = {
        "gate_mean": token_mean(weights, mask, denominator),
        "gate_square": token_mean(jnp.square(weights), mask, denominator),
        "gate_std": jnp.sqrt(token_mean(deviation, mask)),
        "gate_high": token_mean(weights > 0.5, mask, denominator),
        "gap_mean": token_mean(gap, mask, denominator),
    }
    loss = token_mean(stop_gradient(weights) * gap, mask, denominator)
    return loss, {name: stop_gradient(value) for name, value in metrics.items()}
