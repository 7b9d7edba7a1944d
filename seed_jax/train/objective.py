"""One objective for every method: the loss that the factors of a config (factors.py) compose.

    rl * Agg[policy(ratio, A~)] - entropy * Agg[H] + kl * Agg[K(policy, reference)] + distill * mean over M of g d
        + generation * (that of train/writing.py)

A~ is the advantage, possibly shaped by the teacher; Agg one of `policy_loss.aggregation_weight`; d(policy, teacher) a
divergence and g a gate of objectives/distill.py, times a weight of the token or of its turn (`distill.span_weight`,
"losing_view", `distill.value`); M the tokens of turns with a skill that `distill.rows` and `distill.span` select.

Shapes: R rows, S turns a row, N scored tokens a row; inside a micro-batch r rows.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.ops import segment_sum

from seed_jax.objectives import advantages, distill, policy_loss, shaping
from seed_jax.train import writing
from seed_jax.train.factors import Choices
from seed_jax.train.packing import PackedBatch

POLICY_METRICS = ("clip_fraction", "dual_clip_fraction", "approx_kl")
DISTILL_METRICS = ("gate_mean", "gate_square", "gate_high", "gate_saturated")


class Support(NamedTuple):
    """Some tokens of the vocabulary at each scored token and their log-probs, both [..., N, C]."""

    ids: jax.Array
    logp: jax.Array


class Fixed(NamedTuple):
    """What weights that do not move during the update say: log-probs of the sampled tokens, each [..., N] or None where
    no method uses it, and the likeliest tokens of the teacher or the reference where a divergence sums over them."""

    old: jax.Array
    teacher: jax.Array | None = None
    reference: jax.Array | None = None
    teacher_support: Support | None = None
    reference_support: Support | None = None


class Student(NamedTuple):
    """What the moving weights say, differentiated: log-probs [r, N] and entropies [r, N] of the sampled tokens, and
    log-probs of the teacher's and of the reference's support, each [r, N, C] or None."""

    logp: jax.Array
    entropy: jax.Array
    on_teacher: jax.Array | None = None
    on_reference: jax.Array | None = None


def row_advantages(static: Choices, batch: PackedBatch, hyper: dict) -> jax.Array:
    """The advantage of every turn of a batch, [R, S]."""
    reward, step_return = batch.reward, batch.step_return
    if static.overlong:
        excess = advantages.overlong(
            _lengths(batch), hyper["max_tokens"], hyper["overlong_buffer"], hyper["overlong_penalty"]
        )
        reward, step_return = reward - excess, step_return - excess
    return advantages.row_advantages(
        reward.ravel(),
        batch.invalid.ravel(),
        batch.group.ravel(),
        batch.episode.ravel(),
        batch.real.ravel(),
        kind=static.advantage,
        stat=static.stat,
        normalize=static.normalize,
        eps=hyper["eps"],
        std_floor=hyper["std_floor"],
        invalid_penalty=static.invalid_penalty,
        penalty=hyper["penalty"],
        step_returns=step_return.ravel(),
        anchor_ids=batch.anchor.reshape(-1, batch.anchor.shape[-1]),
        step_weight=hyper["step_weight"],
        alpha=hyper["history_power"],
        base_weight=hyper["base_weight"],
    ).reshape(batch.real.shape)


def _lengths(batch: PackedBatch) -> jax.Array:
    """Response tokens of every turn, [R, S]."""
    slots = batch.real.shape[1]
    return jax.vmap(lambda mask, turn: segment_sum(mask, turn, slots))(batch.mask.astype(jnp.float32), batch.turn)


def token_arrays(static: Choices, batch: PackedBatch, row_advantages: jax.Array, hyper: dict) -> dict[str, jax.Array]:
    """What the loss needs to know about every scored token, each [R, N]."""
    per_token = lambda turns: jnp.take_along_axis(turns, batch.turn, axis=1)  # noqa: E731  [R, S] -> [R, N]
    mask, won = batch.mask, per_token(batch.reward > 0)
    if static.group_filter:
        kept = advantages.mixed_rows(batch.reward.ravel(), batch.group.ravel(), batch.real.ravel())
        mask &= per_token(kept.reshape(batch.real.shape))
    distilled, weights = mask & per_token(batch.has_skill), {}
    if batch.span is not None:
        if static.span_weighted:
            weights["span"] = jnp.where(batch.span, hyper["span_weight"], 1.0)
        else:
            distilled &= batch.span
    if static.rows == "losing_view":
        margin = shaping.losing_margin(batch.reward > 0, batch.given, batch.group, batch.episode, batch.real)
        weights["margin"] = per_token(margin)
        distilled &= weights["margin"] > 0
    elif static.rows != "with_skill":
        distilled &= won if static.rows == "success_only" else ~won
    if static.skill_value:
        weights["value"] = jnp.clip(per_token(batch.value), 0.0, 1.0)
    tokens = {
        "mask": mask,
        "distilled": distilled,
        "advantage": per_token(row_advantages),
        "won": won,
        "sampled": batch.sampled,
    }
    if weights:
        tokens["weight"] = functools.reduce(jnp.multiply, weights.values())
    if static.needs_turns:
        tokens |= {"turn": batch.turn, "length": policy_loss.turn_lengths(mask, batch.turn)}
    return tokens


def batch_signals(
    static: Choices, batch: PackedBatch, teacher: jax.Array, old: jax.Array, distilled: jax.Array, hyper: dict
) -> dict[str, jax.Array]:
    """What shapes and rewards of skills take from the whole batch: more arrays over tokens, [R, N] like the others."""
    found, where = {}, (teacher, old, distilled, batch.turn, batch.group)
    if static.generation != "none":
        found |= writing.generation_weights(
            static.generation, batch, teacher, old, distilled, measured=static.generation_measured
        )
    if static.signal != "token":
        found["signal"] = shaping.batch_signal(
            static.signal, *where, batch.episode, batch.step, floor=hyper["shape_floor"]
        )
    if static.value == "agreement":
        found["trust"] = jax.nn.sigmoid(hyper["beta"] * shaping.agreement_value(*where, batch.reward > 0))
    return found


def mini_totals(static: Choices, fixed: Fixed, tokens: dict, hyper: dict) -> dict[str, jax.Array]:
    """What all micro-batches of a mini-batch share: denominators, and the gate's constants. Arrays are [m, r, N]."""
    mask, distilled = tokens["mask"], tokens["distilled"]
    totals = {"tokens": jnp.maximum(mask.sum(), 1), "distilled": jnp.maximum(distilled.sum(), 1)}
    if static.needs_turns:
        totals["turns"] = jnp.maximum(policy_loss.count_turns(tokens["length"], mask), 1)
    if static.distill != "none" and static.gate in distill.NEED_STATISTICS:
        totals |= distill.gate_statistics(fixed.teacher - fixed.old, distilled, beta=hyper["beta"])
    if static.generation != "none":
        totals["skills"] = jnp.maximum(jnp.round(tokens["skill_share"].sum()), 1)
    return totals


def loss(
    static: Choices, student: Student, fixed: Fixed, tokens: dict, totals: dict, hyper: dict
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """A micro-batch's share of the mini-batch loss, and of its metrics (`loss_metrics`); arrays [r, N]."""
    logp = student.logp
    mask, count = tokens["mask"], totals["tokens"]
    weight = None
    if static.aggregation != "token_mean":
        weight = policy_loss.aggregation_weight(
            static.aggregation, tokens["length"], hyper["max_tokens"], count, totals["turns"]
        )
    gap = None
    if static.needs_teacher:
        gap = stop_gradient(fixed.teacher - (fixed.old if static.gap == "old" else logp))
    pg_loss, pg = _policy(static, logp, gap, fixed, tokens, count, weight, hyper)
    entropy = policy_loss.token_mean(student.entropy, mask, count, weight)
    loss = hyper["rl"] * pg_loss - hyper["entropy"] * entropy
    metrics = {"pg_loss": pg_loss, "entropy": entropy, **pg}
    if static.kl != "none":
        metrics["kl"] = _kl(static, student, fixed, mask, denominator=count, weight=weight)
        loss += hyper["kl"] * metrics["kl"]
    if static.distill != "none":
        distill_loss, gate = _distillation(static, student, gap, fixed, tokens, totals, hyper)
        loss += hyper["distill"] * distill_loss
        metrics |= {"distill_loss": distill_loss, **gate}
    if static.generation != "none":
        metrics["generation_loss"] = writing.generation_loss(logp, tokens, totals["skills"])
        loss += hyper["generation"] * metrics["generation_loss"]
    return loss, metrics


def _policy(static: Choices, logp, gap, fixed: Fixed, tokens: dict, count, weight, hyper: dict):
    """Policy loss and its metrics."""
    mask, advantage = tokens["mask"], tokens["advantage"]
    if static.shape != "none":
        advantage = shaping.shape_by_teacher(
            advantage,
            tokens.get("signal", gap),
            tokens["distilled"],
            static.shape,
            weight=hyper["shape"] * tokens.get("trust", 1.0),
            clip=hyper["shape_clip"],
            beta=hyper["beta"],
        )
    metrics = {}
    if static.importance:
        importance = policy_loss.importance_weight(fixed.old, tokens["sampled"], mask, hyper["importance_cap"])
        metrics["importance"] = policy_loss.token_mean(importance, mask, count)
        weight = importance if weight is None else weight * importance
    arguments, settings = (logp, fixed.old, advantage, mask), dict(denominator=count, weight=weight)
    clip = dict(clip_low=hyper["clip_low"], clip_high=hyper["clip_high"])
    if static.policy == "reinforce":
        loss, info = policy_loss.reinforce(*arguments, **settings)
    elif static.policy == "ppo_clip":
        loss, info = policy_loss.ppo_clip(*arguments, **settings, **clip, dual_clip=hyper["dual_clip"])
    else:
        by_token = static.policy == "gspo_token"
        loss, info = policy_loss.gspo(*arguments, **settings, **clip, turns=tokens["turn"], token_level=by_token)
    return loss, metrics | {name: info[name] for name in POLICY_METRICS}


def _kl(static: Choices, student: Student, fixed: Fixed, mask, **mean) -> jax.Array:
    if static.kl == "full":
        exact = distill.vocabulary_divergence("full_rev", student.on_reference, fixed.reference_support.logp, mask)
        return policy_loss.token_mean(exact, mask, **mean)
    estimate = {"k1": policy_loss.kl_k1, "k2": policy_loss.kl_k2, "k3": policy_loss.kl_k3}[static.kl]
    return estimate(student.logp, fixed.reference, mask, **mean)


def _divergence(static: Choices, student: Student, fixed: Fixed, mask, hyper: dict) -> jax.Array:
    """The distillation term of every token, [r, N]."""
    clip = hyper["distill_clip"]
    if static.distill in distill.SAMPLED:
        return distill.sampled_divergence(
            static.distill, student.logp, fixed.teacher, mask, old_logp=fixed.old, clip=clip
        )
    support = static.support if static.distill.startswith("topk") else "renorm"  # the whole vocabulary sums to 1
    on = lambda logp: distill.on_support(logp, support)  # noqa: E731
    return distill.vocabulary_divergence(
        static.distill, on(student.on_teacher), on(fixed.teacher_support.logp), mask, mix=hyper["mix"], clip=clip
    )


def _distillation(static: Choices, student: Student, gap, fixed: Fixed, tokens: dict, totals: dict, hyper: dict):
    """Distillation loss and its metrics."""
    mask = tokens["distilled"]
    divergence = _divergence(static, student, fixed, mask, hyper)
    gap = policy_loss.keep_masked(gap, mask)
    weights = distill.gate_weights(
        gap,
        static.gate,
        beta=hyper["beta"],
        threshold=hyper["threshold"],
        center=totals.get("center", 0.0),
        spread=totals.get("spread", 1.0),
        advantages=tokens["advantage"],
        entropy=policy_loss.keep_masked(student.entropy, mask),
    )
    divergence *= tokens.get("weight", 1.0)
    loss, gate = distill.gated_mean(divergence, gap, weights, mask, totals["distilled"])
    if static.denominator == "all":
        loss *= totals["distilled"] / totals["tokens"]
    return loss, {name: gate[name] for name in DISTILL_METRICS}


def loss_metrics(static: Choices) -> tuple[str, ...]:
    """The names of the metrics that `loss` returns."""
    return (
        "pg_loss",
        "entropy",
        *(("importance",) if static.importance else ()),
        *POLICY_METRICS,
        *(("kl",) if static.kl != "none" else ()),
        *(("distill_loss", *DISTILL_METRICS) if static.distill != "none" else ()),
        *(("generation_loss",) if static.generation != "none" else ()),
    )
