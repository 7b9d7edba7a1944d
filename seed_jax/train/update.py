"""THE update: everything between rollouts in one jitted, donated call.

`update(state, batch, hyper) -> (state, metrics)`:
  1. group-relative advantages of all turns (segment operations on group and episode ids);
  2. old, teacher and reference log-probs of every sampled token under the iteration-start weights;
  3. a loop over mini-batches: gradients summed over micro-batches, one optimizer step each.

Loss of a mini-batch (SEED, arXiv 2607.14777; every mean is over the tokens of the whole mini-batch, never of a
micro-batch):
  rl * PPO-clip - entropy * H + kl * k3(policy, reference) + distill * gate(teacher - policy) * (teacher - policy)

`hyper` holds numbers only (run-time arguments: changing one compiles nothing); structure comes from the config.

Shapes: M mini-batches, m micro-batches a mini-batch, r rows a micro-batch, R = M m r; N scored tokens a row, S
    turns a row.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from seed_jax.models.attention import choose_backend
from seed_jax.models.logprobs import scored_logprobs
from seed_jax.models.spec import ModelSpec
from seed_jax.objectives import advantages, distill, policy_loss
from seed_jax.train.packing import PackedBatch, Rows
from seed_jax.train.state import TrainState, apply_gradients, make_optimizer

POLICY_METRICS = ("clip_fraction", "dual_clip_fraction", "approx_kl")
DISTILL_METRICS = ("gate_mean", "gate_square", "gate_high")


class Structure(NamedTuple):
    """What recompiles when it changes. rows_per_micro: packed rows a forward pass; micros_per_mini: passes an
    optimizer step; attention, model_mesh: `attention` and `mesh` of the model's functions."""

    spec: ModelSpec
    mesh: Mesh
    rows_per_micro: int
    micros_per_mini: int
    old_logprobs: str
    distill: str
    gate: str
    use_kl: bool
    stat: str
    normalize: str
    invalid_penalty: str
    dtype: str
    remat: str
    attention: str
    model_mesh: Mesh | None


class Fixed(NamedTuple):
    """Log-probs under the iteration-start weights, each [M, m, r, N] or None where the method does not use it."""

    old: jax.Array
    teacher: jax.Array | None
    reference: jax.Array | None


def model_placement(config, spec: ModelSpec, mesh: Mesh) -> tuple[str, Mesh | None]:
    """(attention backend, mesh for the model's functions) on the devices of `mesh`.

    CPU devices hold small models, whose weights the partitioner may gather as it likes: there the model gets no mesh.
    """
    platform = mesh.devices.flat[0].platform
    rows = [config.pack.row_tokens, *([config.pack.teacher_row_tokens] if config.distill.kind != "none" else [])]
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
        distill=config.distill.kind,
        gate=config.distill.gate,
        use_kl=config.loss.kl_coef > 0,
        stat=config.adv.stat,
        normalize=config.adv.normalize,
        invalid_penalty=config.adv.invalid_penalty,
        dtype=config.model.dtype,
        remat=config.model.remat,
        attention=attention,
        model_mesh=model_mesh,
    )


def hyper(config) -> dict[str, jax.Array]:
    """The run-time numbers of the objective and of the optimizer, float32 scalars."""
    loss, optim, adv = config.loss, config.optim, config.adv
    numbers = {
        "lr": optim.lr,
        "warmup_steps": optim.warmup_steps,
        "rl": loss.rl_coef,
        "kl": loss.kl_coef,
        "entropy": loss.entropy_coef,
        "clip_low": loss.clip_low,
        "clip_high": loss.clip_high,
        "dual_clip": loss.dual_clip,
        "distill": config.distill.coef,
        "beta": config.distill.beta,
        "eps": adv.eps,
        "std_floor": adv.std_floor,
        "penalty": adv.penalty,
    }
    return {name: jnp.float32(value) for name, value in numbers.items()}


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
    return jax.jit(
        functools.partial(_update, static, build_optimizer(config)), donate_argnums=0, out_shardings=(shardings, None)
    )


def _update(
    static: Structure, optimizer, state: TrainState, batch: PackedBatch, hyper: dict
) -> tuple[TrainState, dict]:
    row_advantages = advantages.row_advantages(
        batch.reward.ravel(),
        batch.invalid.ravel(),
        batch.group.ravel(),
        batch.episode.ravel(),
        batch.real.ravel(),
        stat=static.stat,
        normalize=static.normalize,
        eps=hyper["eps"],
        std_floor=hyper["std_floor"],
        invalid_penalty=static.invalid_penalty,
        penalty=hyper["penalty"],
    ).reshape(batch.real.shape)
    per_token = lambda turns: jnp.take_along_axis(turns, batch.turn, axis=1)  # noqa: E731  [R, S] -> [R, N]
    tokens = _fold(
        static,
        {
            "mask": batch.mask,
            "distilled": batch.mask & per_token(batch.has_skill),
            "advantage": per_token(row_advantages),
            "won": per_token(batch.reward > 0),
            "sampled": batch.sampled,
        },
    )
    rows = _fold(static, batch.student)
    fixed = _score_fixed(static, state, rows, _fold(static, batch.teacher), tokens["sampled"], batch.minis)

    def mini_step(index, carry):
        state, totals = carry
        mini = jax.tree.map(lambda x: x[index], (rows, fixed, tokens))
        grads, metrics = _accumulate(static, state.params, *mini, hyper)
        lr = hyper["lr"] * jnp.minimum(1.0, (state.step + 1) / jnp.maximum(hyper["warmup_steps"], 1.0))
        state, step_metrics = apply_gradients(state, grads, optimizer, lr)
        return state, jax.tree.map(jnp.add, totals, {**metrics, **step_metrics})

    # Only mini-batches that hold something are run: an empty optimizer step would still decay weights and moments.
    state, totals = jax.lax.fori_loop(0, batch.minis, mini_step, (state, _zeros(static)))
    mean = {name: total / jnp.maximum(batch.minis, 1) for name, total in totals.items()}
    metrics = {f"update/{name}": mean[name] for name in mean if name not in DISTILL_METRICS}
    metrics["update/skipped_steps"] = totals["skipped_steps"]
    if static.distill != "none":
        spread = jnp.sqrt(jnp.maximum(mean["gate_square"] - mean["gate_mean"] ** 2, 0.0))
        metrics |= {"opd/gate_mean": mean["gate_mean"], "opd/gate_std": spread, "opd/gate_high": mean["gate_high"]}
    return state, {**metrics, **_batch_metrics(static, batch, row_advantages, fixed, tokens)}


def _fold(static: Structure, tree):
    """[R, ...] -> [M, m, r, ...]: row r of the batch belongs to mini-batch r // (rows a mini-batch)."""
    shape = (-1, static.micros_per_mini, static.rows_per_micro)
    split_rows = NamedSharding(static.mesh, PartitionSpec(None, None, "fsdp"))
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x.reshape(*shape, *x.shape[1:]), split_rows), tree)


def _logprobs(static: Structure, params, rows: Rows, with_entropy: bool = False):
    return scored_logprobs(
        params,
        static.spec,
        rows.tokens,
        rows.segments,
        rows.positions,
        rows.targets,
        with_entropy=with_entropy,
        remat=static.remat,
        dtype=jnp.dtype(static.dtype),
        attention=static.attention,
        mesh=static.model_mesh,
    )


def _score_fixed(static: Structure, state: TrainState, rows: Rows, teacher: Rows | None, sampled, minis) -> Fixed:
    """Everything that is scored once, under weights that do not move during the update."""

    def score(params, rows: Rows):
        def one_mini(index, out):
            mini = jax.tree.map(lambda x: x[index], rows)
            return out.at[index].set(jax.lax.map(lambda micro: _logprobs(static, params, micro)[0], mini))

        return jax.lax.fori_loop(0, minis, one_mini, jnp.zeros(rows.targets.shape, jnp.float32))

    return Fixed(
        old=score(state.params, rows) if static.old_logprobs == "recompute" else sampled,
        teacher=score(state.params, teacher) if static.distill != "none" else None,
        reference=score(state.reference, rows) if static.use_kl else None,
    )


def _accumulate(static: Structure, params, rows: Rows, fixed: Fixed, tokens: dict, hyper: dict):
    """Gradient and metrics of one mini-batch, summed over its micro-batches (leading axis m)."""
    counts = jnp.maximum(tokens["mask"].sum(), 1), jnp.maximum(tokens["distilled"].sum(), 1)
    gradient = jax.grad(functools.partial(_micro_loss, static), has_aux=True)

    def micro_step(total, micro):
        grads, metrics = gradient(params, *micro, counts, hyper)
        return jax.tree.map(jnp.add, total, (grads, metrics)), None

    zeros = jax.tree.map(jnp.zeros_like, params), {n: jnp.float32(0) for n in _loss_metrics(static)}
    return jax.lax.scan(micro_step, zeros, (rows, fixed, tokens))[0]


def _micro_loss(static: Structure, params, rows: Rows, fixed: Fixed, tokens: dict, counts, hyper: dict):
    """This micro-batch's share of the mini-batch loss; all denominators are those of the mini-batch."""
    tokens_count, distilled_count = counts
    mask = tokens["mask"]
    logp, entropy = _logprobs(static, params, rows, with_entropy=True)
    pg_loss, pg = policy_loss.ppo_clip(
        logp,
        fixed.old,
        tokens["advantage"],
        mask,
        denominator=tokens_count,
        clip_low=hyper["clip_low"],
        clip_high=hyper["clip_high"],
        dual_clip=hyper["dual_clip"],
    )
    entropy = policy_loss.token_mean(entropy, mask, tokens_count)
    loss = hyper["rl"] * pg_loss - hyper["entropy"] * entropy
    metrics = {"pg_loss": pg_loss, "entropy": entropy, **{name: pg[name] for name in POLICY_METRICS}}
    if static.use_kl:
        metrics["kl"] = policy_loss.kl_k3(logp, fixed.reference, mask, denominator=tokens_count)
        loss += hyper["kl"] * metrics["kl"]
    if static.distill == "gap_nll":
        distilled = tokens["distilled"]
        distill_loss, gate = distill.gap_nll(
            logp, fixed.teacher, distilled, gate=static.gate, beta=hyper["beta"], denominator=distilled_count
        )
        loss += hyper["distill"] * distill_loss
        metrics |= {"distill_loss": distill_loss, **{name: gate[name] for name in DISTILL_METRICS}}
    return loss, metrics


def _loss_metrics(static: Structure) -> tuple[str, ...]:
    return (
        "pg_loss",
        "entropy",
        *POLICY_METRICS,
        *(("kl",) if static.use_kl else ()),
        *(("distill_loss", *DISTILL_METRICS) if static.distill != "none" else ()),
    )


def _zeros(static: Structure) -> dict[str, jax.Array]:
    return {name: jnp.float32(0) for name in (*_loss_metrics(static), "grad_norm", "skipped_steps")}


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
        invalid_penalty=static.invalid_penalty,
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
            "opd/gap_success": mean(gap, where & won),
            "opd/gap_failure": mean(gap, where & ~won),
            "opd/sign_agreement": mean(agree, where & (tokens["advantage"] != 0)),
            "opd/coverage": mean(batch.has_skill, real),
        }
    return metrics
