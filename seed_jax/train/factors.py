"""The factors of a config: what decides the shape of the compiled update (`Choices`), and what is only a number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from seed_jax.objectives import distill, schedules

GROUP_FILTERS = ("off", "mask", "dynamic")
TEACHERS = ("old", "current", "ema", "periodic", "frozen_init")
GAPS = ("current", "old")
ROWS = ("with_skill", "failed_only", "success_only", "losing_view")
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
    signal: str
    value: str
    policy: str
    aggregation: str
    importance: bool
    kl: str  # "none" if its coefficient is 0
    distill: str
    gate: str
    gap: str
    teacher: str
    rows: str
    span_weighted: bool
    denominator: str
    support: str
    top_k: int
    skill_value: bool  # distillation is weighted by what second attempts measured
    generation: str
    generation_measured: bool

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
    def looks_at_batch(self) -> bool:
        """Whether what the teacher says about a token, or about a skill, depends on other turns."""
        shaped = self.shape != "none" and (self.signal != "token" or self.value != "none")
        return shaped or self.generation != "none"

    @property
    def needs_turns(self) -> bool:
        return self.aggregation != "token_mean" or self.policy in ("gspo", "gspo_token")


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
        signal=adv.shape_signal,
        value=adv.shape_value,
        policy=loss.kind,
        aggregation=loss.aggregation,
        importance=loss.importance_cap > 0,
        kl=loss.kl_type if loss.kl_coef > 0 else "none",
        distill=distillation.kind,
        gate=distillation.gate,
        gap=distillation.gap,
        teacher=distillation.teacher,
        rows=distillation.rows,
        span_weighted=distillation.span_weight > 0,
        denominator=distillation.denominator,
        support=distillation.support,
        top_k=distillation.top_k,
        skill_value=distillation.value == "second_attempts",
        generation=_generation(config),
        generation_measured=loss.gen_reward == "second_attempts",
    )


def _generation(config) -> str:
    """Whether the analyzer is trained: "none", or what a skill is given to (writing.UNITS)."""
    if config.loss.gen_coef == 0:
        return "none"
    return "group" if config.hindsight.source == "group_reflection" else "episode"


def numbers(
    config,
    update: int = 1,
    handoff: Mapping[str, float] | None = None,
    skipped: float = 0.0,
    margin: Mapping[str, float] | None = None,
) -> dict[str, jax.Array]:
    """The run-time numbers of update `update` (counted from 1), float32 scalars. handoff: see schedules.watch_gap;
    margin: see schedules.watch_margin; skipped: optimizer steps without a finite gradient, in a row, right before."""
    loss, optim, adv, teach = config.loss, config.optim, config.adv, config.distill
    span = dict(start=teach.schedule_start, stop=teach.schedule_stop, end=teach.schedule_end)
    strength = schedules.strength(teach.schedule, update, **span, handoff=handoff, margin=margin)
    norms_every = config.log.grad_norms_every
    values = {
        "lr": optim.lr,
        "warmup_steps": optim.warmup_steps,
        "skipped_before": skipped,
        "rl": loss.rl_coef,
        "kl": loss.kl_coef,
        "entropy": loss.entropy_coef,
        "generation": loss.gen_coef,
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
        "history_power": adv.history_power,
        "base_weight": adv.base_weight,
        "shape": adv.shape_weight * strength,
        "shape_clip": adv.shape_clip,
        "shape_floor": adv.shape_floor,
        "span_weight": teach.span_weight,
        "overlong_buffer": adv.overlong_buffer,
        "overlong_penalty": adv.overlong_penalty,
        "measure_norms": bool(norms_every) and (update - 1) % norms_every == 0,
    }
    return {name: jnp.float32(value) for name, value in values.items()}
