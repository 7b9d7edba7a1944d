"""One objective for every method: the factors of a config, and the loss that they compose.

    rl * Agg[policy(ratio, A~)] - entropy * Agg[H] + kl * Agg[K(policy, reference)] + distill * mean over M of g d

A~ is the advantage, possibly shaped by the teacher; Agg one of `policy_loss.aggregation_weight`; d(policy, teacher) a
divergence and g a gate of objectives/distill.py; M the tokens of turns with a skill that `distill.rows` and
`distill.span` select.

What decides the shape of the program are `Choices`; everything that is only a number is in `numbers`, a run-time
argument of the update. Shapes: R rows, S turns a row, N scored tokens a row; inside a micro-batch r rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.ops import segment_sum

from seed_jax.objectives import advantages, distill, policy_loss, schedules
from seed_jax.train.packing import PackedBatch

POLICY_METRICS = ("clip_fraction", "dual_clip_fraction", "approx_kl")
DISTILL_METRICS = ("gate_mean", "gate_square", "gate_high", "gate_saturated")

GROUP_FILTERS = ("off", "mask", "dynamic")
TEACHERS = ("old", "current", "ema", "periodic", "frozen_init")
GAPS = ("current", "old")
ROWS = ("with_skill", "failed_only", "success_only")
DENOMINATORS = ("masked", "all")


class Choices(NamedTuple):
    """The structure of the objective, named as the config's fields: a change compiles the update again."""

    advantage: str
    stat: str
    normalize: str
    invalid_penalty: str
    overlong: bool
    group_filter: bool
    shape: str
    policy: str
    aggregation: str
    importance: bool
    kl: str  # "none" if its coefficient is 0
    distill: str
    gate: str
    gap: str
    teacher: str
    rows: str
    denominator: str
    support: str
    top_k: int

    @property
    def needs_teacher(self) -> bool:
        return self.distill != "none" or self.shape != "none"

    @property
    def needs_reference(self) -> bool:
        return self.kl != "none" or (self.needs_teacher and self.teacher == "frozen_init")

    @property
    def keeps_teacher(self) -> bool:
        """Whether the teacher's weights are a tree of their own in the state."""
        return self.needs_teacher and self.teacher in ("ema", "periodic")

    def teacher_support(self, vocab_size: int) -> int:
        """How many tokens of the teacher's distribution the distillation compares; 0: the sampled one only."""
        if self.distill not in distill.VOCABULARY:
            return 0
        return vocab_size if self.distill.startswith("full") else min(self.top_k, vocab_size)

    def reference_support(self, vocab_size: int) -> int:
        return vocab_size if self.kl == "full" else 0

    @property
    def needs_turns(self) -> bool:
        return self.aggregation != "token_mean" or self.policy in ("gspo", "gspo_token")


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


def choices(config) -> Choices:
    adv, loss, distillation = config.adv, config.loss, config.distill
    return Choices(
        advantage=adv.kind,
        stat=adv.stat,
        normalize=adv.normalize,
        invalid_penalty=adv.invalid_penalty,
        overlong=adv.overlong_buffer > 0,
        group_filter=config.rollout.group_filter != "off",
        shape=adv.shape,
        policy=loss.kind,
        aggregation=loss.aggregation,
        importance=loss.importance_cap > 0,
        kl=loss.kl_type if loss.kl_coef > 0 else "none",
        distill=distillation.kind,
        gate=distillation.gate,
        gap=distillation.gap,
        teacher=distillation.teacher,
        rows=distillation.rows,
        denominator=distillation.denominator,
        support=distillation.support,
        top_k=distillation.top_k,
    )


def numbers(config, update: int = 1, handoff: Mapping[str, float] | None = None) -> dict[str, jax.Array]:
    """The run-time numbers of update `update` (counted from 1), float32 scalars. `handoff`: see schedules.watch_gap."""
    loss, optim, adv, teach = config.loss, config.optim, config.adv, config.distill
    span = dict(start=teach.schedule_start, stop=teach.schedule_stop, end=teach.schedule_end)
    strength = schedules.strength(teach.schedule, update, **span, handoff=handoff)
    norms_every = config.log.grad_norms_every
    values = {
        "lr": optim.lr,
        "warmup_steps": optim.warmup_steps,
        "rl": loss.rl_coef,
        "kl": loss.kl_coef,
        "entropy": loss.entropy_coef,
        "clip_low": loss.clip_low,
        "clip_high": loss.clip_high,
        "dual_clip": loss.dual_clip,
        "importance_cap": loss.importance_cap,
        "max_tokens": config.rollout.max_response_tokens,
        "distill": teach.coef * strength,
        "distill_clip": teach.clip or float("inf"),
        "beta": teach.beta,
        "mix": teach.mix,
        "threshold": teach.threshold,
        "ema_rate": teach.ema_rate,
        "refresh_teacher": update % teach.refresh_every == 0,
        "eps": adv.eps,
        "std_floor": adv.std_floor,
        "penalty": adv.penalty,
        "step_weight": adv.step_weight,
        "shape": adv.shape_weight * strength,
        "shape_clip": adv.shape_clip,
        "overlong_buffer": adv.overlong_buffer,
        "overlong_penalty": adv.overlong_penalty,
        "measure_norms": bool(norms_every) and (update - 1) % norms_every == 0,
    }
    return {name: jnp.float32(value) for name, value in values.items()}


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
        anchor_ids=batch.anchor.ravel(),
        step_weight=hyper["step_weight"],
    ).reshape(batch.real.shape)


def _lengths(batch: PackedBatch) -> jax.Array:
    """Response tokens of every turn, [R, S]."""
    slots = batch.real.shape[1]
    return jax.vmap(lambda mask, turn: segment_sum(mask, turn, slots))(batch.mask.astype(jnp.float32), batch.turn)


def token_arrays(static: Choices, batch: PackedBatch, row_advantages: jax.Array) -> dict[str, jax.Array]:
    """What the loss needs to know about every scored token, each [R, N]."""
    per_token = lambda turns: jnp.take_along_axis(turns, batch.turn, axis=1)  # noqa: E731  [R, S] -> [R, N]
    mask, won = batch.mask, per_token(batch.reward > 0)
    if static.group_filter:
        kept = advantages.mixed_rows(batch.reward.ravel(), batch.group.ravel(), batch.real.ravel())
        mask &= per_token(kept.reshape(batch.real.shape))
    distilled = mask & per_token(batch.has_skill)
    if batch.span is not None:
        distilled &= batch.span
    if static.rows != "with_skill":
        distilled &= won if static.rows == "success_only" else ~won
    tokens = {
        "mask": mask,
        "distilled": distilled,
        "advantage": per_token(row_advantages),
        "won": won,
        "sampled": batch.sampled,
    }
    if static.needs_turns:
        tokens |= {"turn": batch.turn, "length": policy_loss.turn_lengths(mask, batch.turn)}
    return tokens


def mini_totals(static: Choices, fixed: Fixed, tokens: dict, hyper: dict) -> dict[str, jax.Array]:
    """What all micro-batches of a mini-batch share: denominators, and the gate's constants. Arrays are [m, r, N]."""
    mask, distilled = tokens["mask"], tokens["distilled"]
    totals = {"tokens": jnp.maximum(mask.sum(), 1), "distilled": jnp.maximum(distilled.sum(), 1)}
    if static.needs_turns:
        totals["turns"] = jnp.maximum(policy_loss.count_turns(tokens["length"], mask), 1)
    if static.distill != "none" and static.gate in distill.NEED_STATISTICS:
        totals |= distill.gate_statistics(fixed.teacher - fixed.old, distilled, beta=hyper["beta"])
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
    return loss, metrics


def _policy(static: Choices, logp, gap, fixed: Fixed, tokens: dict, count, weight, hyper: dict):
    """Policy loss and its metrics."""
    mask, advantage = tokens["mask"], tokens["advantage"]
    if static.shape != "none":
        advantage = advantages.shape_by_teacher(
            advantage,
            gap,
            tokens["distilled"],
            static.shape,
            weight=hyper["shape"],
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
    )
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
    )
