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

SAMPLED = ("gap_nll", "score", "k2", "k3", "k3_is")
VOCABULARY = ("full_rev", "full_fwd", "full_jsd", "topk_rev", "topk_fwd", "topk_jsd")
KINDS = ("none", *SAMPLED, *VOCABULARY)
GATES = ("none", "const", "sig_gap", "sig_entropy", "soft_or", "hard", "centered", "outcome", "standardised")
NEED_STATISTICS = ("centered", "standardised")
NEED_ENTROPY = ("sig_entropy", "soft_or")
SUPPORTS = ("tail", "renorm")

# Bounds of the reference releases on exponents: of the teacher gap and of the policy ratio.
_MAX_GAP = 20.0
_MAX_LOG_RATIO = 10.0
# The least probability of all tokens outside the support: below, rounding of the sum is all that is left.
_MIN_TAIL = 1e-6
# A spread of the gap below this many nats is rounding; dividing by it would amplify noise.
_MIN_SPREAD = 1e-3


def gate_weights(
    gap: Array,
    gate: str,
    *,
    beta: ArrayLike = 5.0,
    const: ArrayLike = 0.5,
    threshold: ArrayLike = 0.0,
    center: ArrayLike = 0.0,
    spread: ArrayLike = 1.0,
    advantages: Array | None = None,
    entropy: Array | None = None,
) -> Array:
    """Weight of each token, [B, N], constant with respect to the parameters.

    - none: 1
    - const: `const`
    - sig_gap: sigmoid(beta * gap), SEED (arXiv 2607.14777) and SDAR; gap 0 gives .5, +.5 gives .92, -.5 gives .08
    - sig_entropy: sigmoid(beta * entropy), SDAR's ablation: the less certain the student, the more
    - soft_or: sigmoid(beta * (1 - (1 - entropy) (1 - gap))), SDAR's ablation: uncertain student or certain teacher
    - hard: 1 where gap > threshold, else 0
    - centered: sigmoid(beta * gap) - center; signed. With the mean gate as center the constant push disappears
    - outcome: sigmoid(beta * sign(advantage) * gap); at advantage 0, as sig_gap. For "score", which pushes down
        where the gap is negative: in a lost episode it is what the teacher rejects that passes
    - standardised: sigmoid(beta * gap / spread), so that beta counts standard deviations instead of nats

    Args:
        gap: teacher minus student log-probability of the sampled token, [B, N].
        center, spread: of `gate_statistics`, over all tokens that one optimizer step sees.
        advantages: [B, N], for "outcome".
        entropy: of the student at each token, nats, [B, N], for "sig_entropy" and "soft_or".

    Raises:
        ValueError: unknown gate, or one without what it needs.
    """
    gap = stop_gradient(gap)
    if gate == "none":
        return jnp.ones_like(gap)
    if gate == "const":
        return jnp.broadcast_to(jnp.asarray(const, gap.dtype), gap.shape)
    if gate == "sig_gap":
        return jax.nn.sigmoid(beta * gap)
    if gate in NEED_ENTROPY:
        if entropy is None:
            raise ValueError(f"the gate {gate!r} needs the student's entropy")
        entropy = stop_gradient(jnp.asarray(entropy, gap.dtype))
        return jax.nn.sigmoid(beta * (entropy if gate == "sig_entropy" else 1.0 - (1.0 - entropy) * (1.0 - gap)))
    if gate == "hard":
        return (gap > threshold).astype(gap.dtype)
    if gate == "centered":
        return jax.nn.sigmoid(beta * gap) - center
    if gate == "standardised":
        return jax.nn.sigmoid(beta * gap / jnp.maximum(spread, _MIN_SPREAD))
    if gate == "outcome":
        if advantages is None:
            raise ValueError("the gate 'outcome' needs advantages")
        sign = jnp.sign(stop_gradient(jnp.broadcast_to(advantages, gap.shape)))
        return jax.nn.sigmoid(beta * jnp.where(sign == 0, 1.0, sign) * gap)
    raise ValueError(f"distillation gate is {gate!r}; choose one of {', '.join(GATES)}")


def gate_statistics(gap: Array, mask: Array, *, beta: ArrayLike = 5.0) -> dict[str, Array]:
    """{"center": mean of sigmoid(beta * gap), "spread": standard deviation of the gap (nats)} over the mask; scalars.

    Computed once from the gap before the first step, over all tokens of a mini-batch, they do not depend on how it is
    split. An empty mask gives 0 and 0.
    """
    gap = stop_gradient(keep_masked(gap, mask))
    mean = token_mean(gap, mask)
    return {
        "center": token_mean(jax.nn.sigmoid(beta * gap), mask),
        "spread": jnp.sqrt(token_mean(jnp.square(gap - mean), mask)),
    }


def sampled_divergence(
    kind: str,
    logp: Array,
    teacher_logp: Array,
    mask: Array,
    *,
    old_logp: Array | None = None,
    clip: ArrayLike = jnp.inf,
) -> Array:
    """Distillation term of each sampled token before gate and mean, [B, N]; 0 outside the mask.

    With l = logp, T = sg(teacher_logp) and D = T - l:

    - gap_nll: D; gradient -1, so all information is in the gate
    - score: -sg(D) l; gradient -D, on the policy's own samples that of KL(student || teacher)
    - k2: D^2 / 2; the same gradient
    - k3: exp(D) - 1 - D; gradient -(exp(D) - 1), that of KL(teacher || student), though its value estimates the other
    - k3_is: exp(l - old_logp) (exp(D) - 1 - D); gradient that of KL(student || teacher) also for stale samples

    Args:
        logp: student log-probabilities of the sampled tokens, [B, N]; differentiated.
        teacher_logp: the same under the prompt with the skill, [B, N]; constant.
        mask: tokens that are distilled, [B, N].
        old_logp: log-probabilities under the weights that sampled, [B, N]; for "k3_is".
        clip: largest |D| that counts in "score" (nats).

    Raises:
        ValueError: unknown kind, or "k3_is" without old_logp.
    """
    logp = keep_masked(logp, mask)
    gap = stop_gradient(keep_masked(teacher_logp, mask)) - logp
    if kind == "gap_nll":
        return gap
    if kind == "score":
        return -stop_gradient(jnp.clip(gap, -clip, clip)) * logp
    if kind == "k2":
        return 0.5 * jnp.square(gap)
    if kind not in SAMPLED:
        raise ValueError(f"distillation kind is {kind!r}; choose one of {', '.join(SAMPLED)}")
    bounded = jnp.clip(gap, -_MAX_GAP, _MAX_GAP)
    k3 = jnp.exp(bounded) - 1.0 - bounded
    if kind == "k3":
        return k3
    if old_logp is None:
        raise ValueError("the distillation kind 'k3_is' needs old_logp")
    log_ratio = logp - stop_gradient(keep_masked(old_logp, mask))
    return jnp.exp(jnp.clip(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)) * k3


def on_support(logp: Array, support: str) -> Array:
    """Log-probabilities of some tokens of the vocabulary [..., C] as a distribution over them.

    "tail" adds one entry for everything else, [..., C + 1]; "renorm" divides by their sum, [..., C].
    """
    if support == "renorm":
        return logp - jax.nn.logsumexp(logp, axis=-1, keepdims=True)
    if support == "tail":
        rest = 1.0 - jnp.sum(jnp.exp(logp), axis=-1, keepdims=True)
        return jnp.concatenate([logp, jnp.log(jnp.maximum(rest, _MIN_TAIL))], axis=-1)
    raise ValueError(f"support is {support!r}; choose one of {', '.join(SUPPORTS)}")


def vocabulary_divergence(
    kind: str, logp: Array, teacher_logp: Array, mask: Array, *, mix: ArrayLike = 0.5, clip: ArrayLike = jnp.inf
) -> Array:
    """Divergence of two distributions at each token, summed over their support, [B, N]; 0 outside the mask.

    - *_rev: KL(student || teacher)
    - *_fwd: KL(teacher || student)
    - *_jsd: mix KL(teacher || M) + (1 - mix) KL(student || M) with M = mix teacher + (1 - mix) student
        (arXiv 2306.13649 eq. 1); mix 0 means KL(teacher || student), mix 1 KL(student || teacher)

    Args:
        logp: the student's log-probabilities of the support, [B, N, C]; differentiated.
        teacher_logp: the teacher's, [B, N, C]; constant.
        mask: tokens that are distilled, [B, N].
        clip: largest contribution of one vocabulary entry that counts (OPSD, arXiv 2601.18734), in nats.

    Raises:
        ValueError: unknown kind.
    """
    if kind not in VOCABULARY:
        raise ValueError(f"distillation kind is {kind!r}; choose one of {', '.join(VOCABULARY)}")
    where = jnp.asarray(mask).astype(bool)[..., None]
    student = jnp.where(where, jnp.asarray(logp, jnp.float32), 0.0)
    teacher = stop_gradient(jnp.where(where, jnp.asarray(teacher_logp, jnp.float32), 0.0))
    divergence = lambda p, q: jnp.minimum(jnp.exp(p) * (p - q), clip)  # noqa: E731
    reverse, forward = divergence(student, teacher), divergence(teacher, student)
    if kind.endswith("_rev"):
        terms = reverse
    elif kind.endswith("_fwd"):
        terms = forward
    else:
        inner = jnp.clip(mix, 1e-3, 1.0 - 1e-3)
        mixture = jnp.logaddexp(jnp.log(inner) + teacher, jnp.log1p(-inner) + student)
        between = inner * divergence(teacher, mixture) + (1.0 - inner) * divergence(student, mixture)
        terms = jnp.where(mix <= 0.0, forward, jnp.where(mix >= 1.0, reverse, between))
    return jnp.where(where[..., 0], jnp.sum(terms, axis=-1), 0.0)


def gated_mean(
    divergence: Array, gap: Array, weights: Array, mask: Array, denominator: ArrayLike | None = None
) -> tuple[Array, dict[str, Array]]:
    """Mean of sg(weights) * divergence over the mask, and what the gate did. All [B, N]; results as in `gap_nll`."""
    deviation = jnp.square(weights - token_mean(weights, mask))
    metrics = {
        "gate_mean": token_mean(weights, mask, denominator),
        "gate_square": token_mean(jnp.square(weights), mask, denominator),
        "gate_std": jnp.sqrt(token_mean(deviation, mask)),
        "gate_high": token_mean(weights > 0.5, mask, denominator),
        "gate_saturated": token_mean((weights < 0.05) | (weights > 0.95), mask, denominator),
        "gap_mean": token_mean(gap, mask, denominator),
    }
    loss = token_mean(stop_gradient(weights) * divergence, mask, denominator)
    return loss, {name: stop_gradient(value) for name, value in metrics.items()}


def gap_nll(
    logp: Array,
    teacher_logp: Array,
    mask: Array,
    *,
    gate: str = "sig_gap",
    beta: ArrayLike = 5.0,
    const: ArrayLike = 0.5,
    threshold: ArrayLike = 0.0,
    advantages: Array | None = None,
    entropy: Array | None = None,
    denominator: ArrayLike | None = None,
) -> tuple[Array, dict[str, Array]]:
    """SEED's gated distillation term: mean of g * (sg(teacher_logp) - logp), whose gradient is -g / tokens.

    It raises the log-probability of every sampled token, most where the skill makes the token more likely; it never
    lowers one, and its value may be negative. With a constant gate the gradient does not depend on the teacher at all.

    Args:
        logp: student log-probabilities of the sampled tokens, [B, N]; differentiated.
        teacher_logp: the same under the prompt with the skill, [B, N]; constant.
        mask: response tokens of rows with a usable skill, [B, N]. Empty: the loss is exactly 0.
        gate, beta, const, threshold, advantages, entropy: see `gate_weights`; center and spread are those of this call.
        denominator: global count of masked tokens; the mask's own size when None.

    Returns:
        Scalar loss and metrics over the mask: gate_mean, gate_square (mean of g^2), gate_high (share above .5),
        gate_saturated (share below .05 or above .95) and gap_mean use the same denominator, so those of micro-batches
        add up. gate_std is of this call's tokens alone; over a split batch it is sqrt(gate_square - gate_mean^2).

    Raises:
        ValueError: unknown gate, or shapes that differ.
    """
    shapes = {"logp": jnp.shape(logp), "teacher_logp": jnp.shape(teacher_logp), "mask": jnp.shape(mask)}
    if len(set(shapes.values())) > 1 or jnp.ndim(mask) != 2:
        raise ValueError(f"logp, teacher_logp and mask must all be [rows, tokens]; got {shapes}")
    gap = sampled_divergence("gap_nll", logp, teacher_logp, mask)
    needed = gate_statistics(gap, mask, beta=beta) if gate in NEED_STATISTICS else {}
    settings = dict(beta=beta, const=const, threshold=threshold, advantages=advantages, entropy=entropy)
    return gated_mean(gap, gap, gate_weights(gap, gate, **settings, **needed), mask, denominator)
