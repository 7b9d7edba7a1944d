"""THE update: everything between rollouts in one jitted, donated call.

`update(state, batch, hyper) -> (state, metrics)`:
  1. group-relative advantages of all turns (segment operations on group and episode ids);
  2. old, teacher and reference log-probs of every sampled token under the iteration-start weights;
  3. a loop over mini-batches: gradients summed over micro-batches, one optimizer step each.

The loss of a mini-batch is that of train/objective.py; every mean is over the tokens of the whole mini-batch, never of
a micro-batch.

`hyper` holds numbers only (run-time arguments: changing one compiles nothing); structure comes from the config.

Shapes: M mini-batches, m micro-batches a mini-batch, r rows a micro-batch, R = M m r; N scored tokens a row, S
    turns a row.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from seed_jax.models.attention import choose_backend
from seed_jax.models.logprobs import Scores, score_tokens
from seed_jax.models.spec import ModelSpec
from seed_jax.objectives import advantages
from seed_jax.train import factors, objective
from seed_jax.train.factors import Choices
from seed_jax.train.objective import DISTILL_METRICS, Fixed, Student, Support
from seed_jax.train.packing import PackedBatch, Rows
from seed_jax.train.state import TrainState, apply_gradients, make_optimizer

# A divergence over the whole vocabulary keeps tokens x vocabulary numbers, twice.
LARGEST_FULL_VOCABULARY = 8192

hyper = factors.numbers  # hyper(config, iteration) makes the last argument of the update


class Structure(NamedTuple):
    """What recompiles when it changes. rows_per_micro: packed rows a forward pass; micros_per_mini: passes an
    optimizer step; split_norms: whether the parts of the gradient may be measured; attention, model_mesh: `attention`
    and `mesh` of the model's functions; freeze_vision: the vision tower stays as it is."""

    spec: ModelSpec
    mesh: Mesh
    rows_per_micro: int
    micros_per_mini: int
    old_logprobs: str
    objective: Choices
    split_norms: bool
    dtype: str
    remat: str
    attention: str
    model_mesh: Mesh | None
    freeze_vision: bool = False


def model_placement(config, spec: ModelSpec, mesh: Mesh) -> tuple[str, Mesh | None]:
    """(attention backend, mesh for the model's functions) on the devices of `mesh`.

    CPU devices hold small models, whose weights the partitioner may gather as it likes: there the model gets no mesh.
    """
    platform = mesh.devices.flat[0].platform
    taught = factors.choices(config).needs_teacher
    rows = [config.pack.row_tokens, *([config.pack.teacher_row_tokens] if taught else [])]
    backend = choose_backend(platform, dtype=jnp.dtype(config.model.dtype), head_dim=spec.head_dim, row_tokens=rows)
    return backend, None if platform == "cpu" else mesh


def structure(config, spec: ModelSpec, mesh: Mesh) -> Structure:
    attention, model_mesh = model_placement(config, spec, mesh)
    return Structure(
        spec=spec,
        mesh=mesh,
        rows_per_micro=config.pack.rows_per_micro,
        micros_per_mini=config.pack.micros_per_mini,
        old_logprobs=config.old_logprobs,
        objective=factors.choices(config),
        split_norms=config.log.grad_norms_every > 0,
        dtype=config.model.dtype,
        remat=config.model.remat,
        attention=attention,
        model_mesh=model_mesh,
        freeze_vision=config.model.freeze_vision and spec.vision is not None,
    )


def build_optimizer(config):
    o = config.optim
    return make_optimizer(o.b1, o.b2, o.eps, o.weight_decay, o.grad_clip)


def build_update(config, spec: ModelSpec, mesh: Mesh, shardings: TrainState):
    """The jitted `update(state, batch, hyper)` of this config; rows are split over the mesh's fsdp axis.

    The state is donated and stays where `shardings` says; nothing inside waits for the host.
    """
    static = structure(config, spec, mesh)
    if static.rows_per_micro % mesh.shape["fsdp"]:
        raise ValueError(
            f"pack.rows_per_micro={static.rows_per_micro} must be a multiple of mesh.fsdp={mesh.shape['fsdp']}"
        )
    if spec.vocab_size > LARGEST_FULL_VOCABULARY:
        for field, chosen in (("distill.kind", static.objective.distill), ("loss.kl_type", static.objective.kl)):
            if chosen.startswith("full"):
                raise ValueError(
                    f"{field}={chosen!r} keeps the whole distribution of every token, which needs a vocabulary of at "
                    f"most {LARGEST_FULL_VOCABULARY}; this one has {spec.vocab_size}. Use 'topk_...' or an estimate"
                )
    return jax.jit(
        functools.partial(_update, static, build_optimizer(config)), donate_argnums=0, out_shardings=(shardings, None)
    )


def _update(
    static: Structure, optimizer, state: TrainState, batch: PackedBatch, hyper: dict
) -> tuple[TrainState, dict]:
    inputs, row_advantages = prepare(static, state, batch, hyper)
    *_, fixed, tokens = inputs
    norms = _part_norms(static, state.params, jax.tree.map(lambda x: x[0], inputs), hyper)

    def mini_step(index, carry):
        state, totals, skipped = carry
        mini = jax.tree.map(lambda x: x[index], inputs)
        grads, metrics = _accumulate(static, state.params, *mini, hyper)
        lr = hyper["lr"] * jnp.minimum(1.0, (state.step + 1) / jnp.maximum(hyper["warmup_steps"], 1.0))
        frozen = {"vision": state.params["vision"]} if static.freeze_vision else {}  # weight decay would move it too
        state, step_metrics = apply_gradients(state, grads, optimizer, lr)
        state = state.replace(params={**state.params, **frozen})
        skipped = jnp.where(step_metrics["skipped_steps"] > 0, skipped + 1, 0.0)
        return state, jax.tree.map(jnp.add, totals, {**metrics, **step_metrics}), skipped

    # Only mini-batches that hold something are run: an empty optimizer step would still decay weights and moments.
    start = (state, _zeros(static), hyper["skipped_before"])
    state, totals, skipped = jax.lax.fori_loop(0, batch.minis, mini_step, start)
    mean = {name: total / jnp.maximum(batch.minis, 1) for name, total in totals.items()}
    metrics = {f"update/{name}": mean[name] for name in mean if name not in DISTILL_METRICS}
    metrics |= {"update/skipped_steps": totals["skipped_steps"], "update/skipped_in_a_row": skipped}
    if static.objective.distill != "none":
        spread = jnp.sqrt(jnp.maximum(mean["gate_square"] - mean["gate_mean"] ** 2, 0.0))
        metrics |= {f"opd/{name}": mean[name] for name in ("gate_mean", "gate_high", "gate_saturated")}
        metrics["opd/gate_std"] = spread
    state = _move_teacher(static, state, hyper)
    return state, {**metrics, **norms, **_batch_metrics(static, batch, row_advantages, fixed, tokens)}


def prepare(static: Structure, state: TrainState, batch: PackedBatch, hyper: dict) -> tuple[tuple, jax.Array]:
    """What all mini-batches of an update start from -> (inputs, advantages of turns [R, S]).

    inputs: student rows, teacher rows if every step reads them again, `Fixed` scores and arrays over tokens; all
    [M, m, r, ...].
    """
    row_advantages = objective.row_advantages(static.objective, batch, hyper)
    tokens = _fold(static, objective.token_arrays(static.objective, batch, row_advantages, hyper))
    rows, teacher = _fold(static, batch.student), _fold(static, batch.teacher)
    fixed = _score_fixed(static, state, rows, teacher, tokens["sampled"], batch.minis)
    if static.objective.looks_at_batch:
        teacher_old = (x.reshape(batch.mask.shape) for x in (fixed.teacher, fixed.old, tokens["distilled"]))
        tokens |= _fold(static, objective.batch_signals(static.objective, batch, *teacher_old, hyper))
    # A teacher with the moving weights reads its rows again in every step.
    reread = teacher if static.objective.needs_teacher and static.objective.teacher == "current" else None
    return (rows, reread, fixed, tokens), row_advantages


def _move_teacher(static: Structure, state: TrainState, hyper: dict) -> TrainState:
    """The teacher's own weights after an update: an average of the policy's (ema), or now and then the policy's."""
    if not static.objective.keeps_teacher:
        return state
    ema = static.objective.teacher == "ema"
    rate = hyper["ema_rate"] if ema else hyper["refresh_teacher"]
    return state.replace(teacher=jax.tree.map(lambda t, p: (1.0 - rate) * t + rate * p, state.teacher, state.params))


def _part_norms(static: Structure, params, mini, hyper: dict) -> dict[str, jax.Array]:
    """Gradient norms of the distillation term and of everything else, on the first mini-batch before any step.

    Only where hyper["measure_norms"] asks for it, else NaN. Empty unless the structure allows it and there is a term.
    """
    if not static.split_norms or static.objective.distill == "none":
        return {}

    def norm(keep: dict) -> jax.Array:
        only = {**hyper, **{name: hyper[name] * share for name, share in keep.items()}}
        return optax.global_norm(_accumulate(static, params, *mini, only)[0])

    others = ("rl", "kl", "entropy", "generation")
    off, on = jnp.array([0.0, 1.0]), jnp.array([1.0, 0.0])  # distillation only, then all but it
    measure = lambda: jax.lax.map(norm, {**dict.fromkeys(others, off), "distill": on})  # noqa: E731
    norms = jax.lax.cond(hyper["measure_norms"] > 0, measure, lambda: jnp.full(2, jnp.nan))
    return {"update/distill_grad_norm": norms[0], "update/rl_grad_norm": norms[1]}


def _fold(static: Structure, tree):
    """[R, ...] -> [M, m, r, ...]: row r of the batch belongs to mini-batch r // (rows a mini-batch)."""
    shape = (-1, static.micros_per_mini, static.rows_per_micro)
    split_rows = NamedSharding(static.mesh, PartitionSpec(None, None, "fsdp"))
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x.reshape(*shape, *x.shape[1:]), split_rows), tree)


def _scores(static: Structure, params, rows: Rows, **wanted) -> Scores:
    return score_tokens(
        params,
        static.spec,
        rows.tokens,
        rows.segments,
        rows.positions,
        rows.targets,
        images=rows.images,
        **wanted,
        remat=static.remat,
        dtype=jnp.dtype(static.dtype),
        attention=static.attention,
        mesh=static.model_mesh,
    )


def _logp_and_support(static: Structure, params, rows: Rows, top_k: int) -> tuple[jax.Array, Support | None]:
    scores = _scores(static, params, rows, top_k=top_k)
    return scores.logp, Support(scores.topk_ids, scores.topk_logp) if top_k else None


def _score_fixed(static: Structure, state: TrainState, rows: Rows, teacher: Rows | None, sampled, minis) -> Fixed:
    """Everything that is scored once, under weights that do not move during the update."""

    def score(params, rows: Rows, top_k: int = 0):
        def one_mini(index, out):
            mini = jax.tree.map(lambda x: x[index], rows)
            found = jax.lax.map(lambda micro: _logp_and_support(static, params, micro, top_k), mini)
            return jax.tree.map(lambda x, new: x.at[index].set(new), out, found)

        shape = rows.targets.shape
        empty = Support(jnp.zeros((*shape, top_k), jnp.int32), jnp.zeros((*shape, top_k), jnp.float32))
        return jax.lax.fori_loop(0, minis, one_mini, (jnp.zeros(shape, jnp.float32), empty if top_k else None))

    choices = static.objective
    # The weights a "current" teacher has at the start are those of the policy.
    teacher_params = {"frozen_init": state.reference}.get(choices.teacher, state.params)
    teacher_params = state.teacher if choices.keeps_teacher else teacher_params
    vocab, nothing = static.spec.vocab_size, (None, None)
    by_teacher = score(teacher_params, teacher, choices.teacher_support(vocab)) if choices.needs_teacher else nothing
    by_reference = score(state.reference, rows, choices.reference_support(vocab)) if choices.kl != "none" else nothing
    return Fixed(
        old=score(state.params, rows)[0] if static.old_logprobs == "recompute" else sampled,
        teacher=by_teacher[0],
        reference=by_reference[0],
        teacher_support=by_teacher[1],
        reference_support=by_reference[1],
    )


def _accumulate(static: Structure, params, rows: Rows, teacher: Rows | None, fixed: Fixed, tokens: dict, hyper: dict):
    """Gradient and metrics of one mini-batch, summed over its micro-batches (leading axis m)."""
    totals = objective.mini_totals(static.objective, fixed, tokens, hyper)
    gradient = jax.grad(functools.partial(_micro_loss, static), has_aux=True)

    def micro_step(total, micro):
        grads, metrics = gradient(params, *micro, totals, hyper)
        return jax.tree.map(jnp.add, total, (grads, metrics)), None

    zeros = jax.tree.map(jnp.zeros_like, params), {n: jnp.float32(0) for n in objective.loss_metrics(static.objective)}
    return jax.lax.scan(micro_step, zeros, (rows, teacher, fixed, tokens))[0]


def _micro_loss(static: Structure, params, rows: Rows, teacher: Rows | None, fixed: Fixed, tokens, totals, hyper: dict):
    """This micro-batch's share of the mini-batch loss; all denominators are those of the mini-batch."""
    if static.freeze_vision:
        params = {**params, "vision": jax.lax.stop_gradient(params["vision"])}
    if teacher is not None:
        size = static.objective.teacher_support(static.spec.vocab_size)
        logp, support = jax.lax.stop_gradient(_logp_and_support(static, params, teacher, size))
        fixed = fixed._replace(teacher=logp, teacher_support=support)
    supports = [support for support in (fixed.teacher_support, fixed.reference_support) if support is not None]
    candidates = jnp.concatenate([support.ids for support in supports], axis=-1) if supports else None
    scores = _scores(static, params, rows, with_entropy=True, candidates=candidates)
    student = Student(scores.logp, scores.entropy)
    if fixed.teacher_support is not None:
        student = student._replace(on_teacher=scores.candidate_logp[..., : fixed.teacher_support.ids.shape[-1]])
    if fixed.reference_support is not None:
        student = student._replace(on_reference=scores.candidate_logp[..., -fixed.reference_support.ids.shape[-1] :])
    return objective.loss(static.objective, student, fixed, tokens, totals, hyper)


def _zeros(static: Structure) -> dict[str, jax.Array]:
    names = (*objective.loss_metrics(static.objective), "grad_norm", "skipped_steps")
    return {name: jnp.float32(0) for name in names}


def _batch_metrics(
    static: Structure, batch: PackedBatch, row_advantages, fixed: Fixed, tokens: dict
) -> dict[str, jax.Array]:
    """What the batch looked like before any step: advantages, the teacher gap by outcome, sampler against trainer."""
    mean = lambda x, m: jnp.where(m, x, 0.0).sum() / jnp.maximum(m.sum(), 1)  # noqa: E731
    real = batch.real
    groups = advantages.group_metrics(
        batch.reward.ravel(),
        batch.invalid.ravel(),
        batch.group.ravel(),
        real.ravel(),
        invalid_penalty=static.objective.invalid_penalty,
    )
    metrics = {
        "adv/abs_mean": mean(jnp.abs(row_advantages), real),
        **{f"adv/{name}": value for name, value in groups.items()},
        "update/sampler_gap": mean(jnp.abs(fixed.old - tokens["sampled"]), tokens["mask"]),
        "pack/tokens": (batch.student.segments > 0).sum(),
    }
    if fixed.teacher is not None:
        gap, where, won = fixed.teacher - fixed.old, tokens["distilled"], tokens["won"]
        agree = jnp.sign(gap) == jnp.sign(tokens["advantage"])
        metrics |= {
            "opd/gap_mean": mean(gap, where),
            "opd/gap_size": mean(jnp.abs(gap), where),
            "opd/gap_success": mean(gap, where & won),
            "opd/gap_failure": mean(gap, where & ~won),
            "opd/sign_agreement": mean(agree, where & (tokens["advantage"] != 0)),
            "opd/coverage": mean(batch.has_skill, real),
            "opd/token_fraction": mean(where, tokens["mask"]),
        }
    return metrics
