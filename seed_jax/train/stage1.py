"""Stage 1, the training: supervised fine-tuning on skills and turns, from a data set to an exported model.

A step's gradient is that of one loss over all of its examples, whatever the packing, the micro-batches and the devices.
Before training and after every epoch the validation tasks say what the model can do: loss, share of usable skills among
those it writes, and success when it acts. The best weights (lowest validation loss) and the last are kept. The steps
are a pure function of seed and number, so a resumed run goes on exactly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from seed_jax import sharding
from seed_jax import tokenizer as tok
from seed_jax.config import ConfigError
from seed_jax.evaluate import evaluate, rate
from seed_jax.hindsight import dataset
from seed_jax.hindsight.annotate import Rules, judge
from seed_jax.hindsight.client import Answer
from seed_jax.models import hf
from seed_jax.models.attention import choose_backend
from seed_jax.models.logprobs import score_tokens
from seed_jax.rollout import World
from seed_jax.runtime.checkpoint import Checkpointer
from seed_jax.runtime.logging import (
    EVALUATIONS_FILE,
    MetricsWriter,
    PhaseTimer,
    Progress,
    TurnProgress,
    append_jsonl,
    duration,
    read_jsonl,
)
from seed_jax.runtime.signals import Interrupted, stop_on_signals
from seed_jax.sampler.engine import sampler_of
from seed_jax.train.packing import Sample
from seed_jax.train.sft import warmup_cosine
from seed_jax.train.stage1_data import Batches, fold, packed, row_shape, samples_of, with_images
from seed_jax.train.stage1_export import export, write_summary
from seed_jax.train.state import (
    TrainState,
    apply_gradients,
    as_tree,
    from_tree,
    init_state,
    make_optimizer,
    state_shardings,
)
from seed_jax.types import SamplingParams

SKILL_STREAM = (1 << 30) + (1 << 28)  # of the skills written on validation prompts
LOG_EVERY = 10  # optimizer steps between lines of metrics.jsonl


class Data(NamedTuple):
    """Rows of the data set, the tasks of its validation side as the environment has them, and what reads the images
    that rows name."""

    train: Sequence[dict[str, Any]]
    val: Sequence[dict[str, Any]]
    val_tasks: Sequence[Any]
    read_image: Callable[[str], np.ndarray] | None = None


class Stage1:
    """The fixed parts of a run: model, sampler, compiled step, batches. What changes is in TrainState."""

    def __init__(self, config, data: Data, world: World, workdir: Path):
        self.config, self.data, self.world, self.workdir = config, data, world, workdir
        s = config.sft
        self.model_dir = hf.resolve(config.model.init)
        vision = hf.load_spec(self.model_dir).vision
        self.tokenizer = tok.load_tokenizer(self.model_dir, config.rollout.thinking, vision)
        shape = row_shape(s, vision, world)
        encode = lambda rows: samples_of(self.tokenizer, rows, shape, data.read_image)  # noqa: E731
        train = encode(data.train)  # before the model: these are the user's files
        self.val = {kind: encode([row for row in data.val if row["kind"] == kind]) for kind in dataset.KINDS}
        validated = [*self.val.values(), [sample for samples in self.val.values() for sample in samples]]
        self.shape = with_images(shape, [packed(samples, shape) for samples in validated])
        self.mesh = sharding.make_mesh(fsdp=config.mesh.fsdp, tensor=config.mesh.tensor)
        if s.rows_per_micro % self.mesh.shape["fsdp"]:
            raise ConfigError(
                f"sft.rows_per_micro = {s.rows_per_micro}: must be a multiple of mesh.fsdp, which is "
                f"{self.mesh.shape['fsdp']} here"
            )
        self.rows_per_micro = s.rows_per_micro or self.mesh.shape["fsdp"]
        self.batches = Batches(
            train, shape, batch=s.batch, epochs=s.epochs, rows_per_micro=self.rows_per_micro, seed=config.seed
        )
        self.spec, self.initial = hf.load(self.model_dir, self.mesh)
        self.optimizer = make_optimizer(s.b1, s.b2, s.eps, s.weight_decay, s.grad_clip)
        placed = sharding.param_shardings(self.spec, self.mesh, "train")
        self.shardings = state_shardings(self.optimizer, self.initial, placed, self.mesh, keep_reference=False)
        self.step, self.loss = build_programs(config, self.spec, self.mesh, self.optimizer, self.shardings)
        self.sampler = sampler_of(config, self.spec, self.tokenizer, self.mesh)
        self.metrics = MetricsWriter(workdir, tensorboard=config.log.tensorboard)
        self.timer, self.progress = PhaseTimer(), Progress(self.batches.steps, enabled=jax.process_index() == 0)
        self.turns = TurnProgress(config.env.max_steps, s.play_episodes, enabled=jax.process_index() == 0)
        self.stop = threading.Event()
        self.taken = 0  # steps of this process

    def fresh_state(self) -> TrainState:
        initial, self.initial = self.initial, None  # four bytes a weight that nothing needs again
        return jax.device_put(init_state(initial, self.optimizer, keep_reference=False), self.shardings)

    def on_turn(self, step: int = 0, live: int = 0) -> None:
        if self.stop.is_set():
            raise Interrupted
        self.turns(step, live)


def build_programs(config, spec, mesh, optimizer, shardings: TrainState):
    """(step, loss), both jitted.

    step(state, rows, weights, used, lr) -> (state, metrics): rows [M, r, ...] of which the first `used` micro-batches
    hold something, weights [M, r, N]; the state is donated.
    loss(params, rows, weights) -> minus the weighted sum of log-probs of one micro-batch, rows [r, ...].
    """
    dtype, platform = jnp.dtype(config.model.dtype), mesh.devices.flat[0].platform
    backend = choose_backend(platform, dtype=dtype, head_dim=spec.head_dim, row_tokens=[config.sft.row_tokens])
    placement = dict(attention=backend, mesh=None if platform == "cpu" else mesh)
    split = NamedSharding(mesh, PartitionSpec(None, "fsdp"))

    def loss(params, rows, weights):
        places = (rows.tokens, rows.segments, rows.positions, rows.targets)
        how = dict(images=rows.images, remat=config.model.remat, dtype=dtype, **placement)
        logp = score_tokens(params, spec, *places, **how).logp
        return -(logp * weights).sum()

    def step(state: TrainState, rows, weights, used, lr):
        rows, weights = jax.lax.with_sharding_constraint((rows, weights), split)

        def add(i, total):
            micro = jax.tree.map(lambda x: x[i], rows)
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(state.params, micro, weights[i]))

        zero = (jnp.float32(0), jax.tree.map(jnp.zeros_like, state.params))
        value, grads = jax.lax.fori_loop(0, used, add, zero)
        state, metrics = apply_gradients(state, grads, optimizer, lr)
        return state, {"loss": value, **metrics}

    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None)), jax.jit(loss)


def train_stage1(config, data: Data, world: World, workdir: Path) -> dict[str, Any]:
    """Trains, or goes on with what the workdir holds; returns the summary.

    A signal (Ctrl-C, SIGTERM) stops it at the next step, saves, and raises Interrupted.
    """
    run = Stage1(config, data, world, workdir)
    with (
        Checkpointer(workdir / "checkpoints", keep=config.checkpoint.keep) as checkpoints,
        stop_on_signals(run.stop),
    ):
        state, done, sums = _restore(run, checkpoints)
        try:
            while True:
                if _validates(run, done) and not _evaluated(run, done):
                    _evaluate(run, state, done)
                if done == run.batches.steps:
                    break
                state, metrics = _step(run, state, done)
                done += 1
                _log(run, done, metrics, sums)
                if done % config.sft.checkpoint_every == 0 or done % run.batches.per_epoch == 0:
                    checkpoints.save(done, as_tree(state), {"sums": sums})
                run.on_turn()
        except Interrupted:
            checkpoints.save(done, as_tree(state), {"sums": sums})
            run.progress.message(f"stopped after step {done}; saved. The same command resumes.")
            raise
        finally:
            run.metrics.close()
        export(run, state.params, done, "last")
        return write_summary(run)


def _restore(run: Stage1, checkpoints: Checkpointer) -> tuple[TrainState, int, dict[str, float]]:
    """(state, steps done, metrics since the last line)."""
    state = run.fresh_state()
    restored = checkpoints.restore_latest(as_tree(state))
    done, sums = (restored.step, restored.meta["sums"]) if restored else (0, {})
    run.metrics.truncate_after(done if restored else -1, run.workdir / EVALUATIONS_FILE)
    if restored:
        run.progress.message(f"resuming after step {done}")
        state = from_tree(restored.tree, state)
    return state, done, sums


def _step(run: Stage1, state: TrainState, number: int) -> tuple[TrainState, dict[str, float]]:
    s = run.config.sft
    with run.timer("train"):
        rows, weights, used = run.batches.at(number, s.loss)
        lr = warmup_cosine(number, run.batches.steps, s.lr, s.warmup)
        state, metrics = run.step(state, rows, weights, used, jnp.float32(lr))
        metrics = {name: float(value) for name, value in jax.device_get(metrics).items()}
    return state, {**metrics, "lr": lr}


def _log(run: Stage1, done: int, metrics: dict[str, float], sums: dict[str, float]) -> None:
    """Means over the steps since the last line; skipped steps are counted."""
    for name, value in metrics.items():
        sums[name] = sums.get(name, 0.0) + value
    sums["steps"] = sums.get("steps", 0) + 1
    if done % LOG_EVERY and done % run.batches.per_epoch:
        return
    steps = sums.pop("steps")
    means = {f"sft/{n}": total if n == "skipped_steps" else total / steps for n, total in sums.items()}
    sums.clear()
    run.metrics.write(done, {**means, "sft/epoch": done / run.batches.per_epoch, **run.timer.collect()})
    run.taken += int(steps)
    left = run.timer.totals["train"] / run.taken * (run.batches.steps - done)
    skipped = f", {means['sft/skipped_steps']:.0f} steps skipped" if means["sft/skipped_steps"] else ""
    run.progress.message(
        f"[{done}/{run.batches.steps}] loss {means['sft/loss']:.4f}{skipped}, about {duration(left)} of training left"
    )


# -- validation --------------------------------------------------------------------------------------------------------


def evaluations(run: Stage1) -> list[dict[str, Any]]:
    return read_jsonl(run.workdir / EVALUATIONS_FILE)


def _validates(run: Stage1, done: int) -> bool:
    return done % (run.batches.per_epoch * run.config.sft.eval_every) == 0 or done == run.batches.steps


def _evaluated(run: Stage1, done: int) -> bool:
    return any(record["iteration"] == done for record in evaluations(run))


def _evaluate(run: Stage1, state: TrainState, done: int) -> None:
    """Appends what validation says about the weights after `done` steps; exports them if they are the best so far."""
    with run.timer("validate"):
        run.sampler.load(state.params)
        record = {
            "iteration": done,
            "epoch": done // run.batches.per_epoch,
            **validation_loss(run, state.params),
            **written_skills(run),
            **acting(run),
        }
        run.sampler.release()  # its memory is the training's
    earlier = [e["val_loss"] for e in evaluations(run) if e["iteration"] > 0]  # the untrained model is no candidate
    record["best"] = done > 0 and record["val_loss"] < min(earlier, default=np.inf)
    if record["best"]:
        export(run, state.params, done, "best")
    append_jsonl(run.workdir / EVALUATIONS_FILE, record)
    run.progress.message(f"validation after epoch {record['epoch']}: {validation_text(record)}")


def validation_text(record: dict[str, Any]) -> str:
    parts = [f"loss {record['val_loss']:.4f}"]
    if record["skills_written"]:
        parts.append(f"usable skills {record['parse_rate']:.3f} +- {record['parse_rate_standard_error']:.3f}")
    if "success_rate" in record:
        parts.append(f"success {record['success_rate']:.3f} +- {record['standard_error']:.3f}")
    return ", ".join(parts)


def validation_loss(run: Stage1, params) -> dict[str, float]:
    """Mean loss over validation examples as sft.loss takes it: of each kind, and of all as they are mixed there."""
    values = {f"val_loss_{kind}": _mean_loss(run, params, samples) for kind, samples in run.val.items() if samples}
    mixed = _mean_loss(run, params, [sample for samples in run.val.values() for sample in samples])
    return {"val_loss": mixed, **values}


def _mean_loss(run: Stage1, params, samples: Sequence[Sample]) -> float:
    groups = packed(samples, run.shape)
    per_micro = run.rows_per_micro
    micros = -(-len(groups) // per_micro)
    rows, weights = fold(groups, run.shape, micros, per_micro, run.config.sft.loss)
    place = sharding.batch_sharding(run.mesh)
    total = 0.0
    for i in range(micros):
        run.on_turn()
        micro = jax.device_put((jax.tree.map(lambda x: x[i], rows), weights[i]), place)  # noqa: B023
        total += float(run.loss(params, *micro))
    return total


def written_skills(run: Stage1) -> dict[str, Any]:
    """How many of the skills that the model writes, greedy, on validation prompts are usable."""
    rows = [row for row in run.data.val if row["kind"] == dataset.SKILL]
    ids, images = ([getattr(sample, name) for sample in run.val[dataset.SKILL]] for name in ("prompt", "images"))
    params = SamplingParams(max_tokens=run.config.hindsight.max_skill_tokens, temperature=0.0)
    paths = [(SKILL_STREAM, place, 0) for place in range(len(ids))]
    completions = run.sampler.generate(ids, params, paths, images=images)
    reasons: dict[str, int] = {}
    usable = np.zeros(len(rows))
    for place, completion in enumerate(completions):
        answer = Answer(tok.decode(run.tokenizer, completion.tokens), completion.finish)
        skill, reason = judge(answer, None, Rules(run.config.hindsight.min_words))
        usable[place] = skill is not None
        if skill is None:
            reasons[reason] = reasons.get(reason, 0) + 1
    value, error = rate(usable, [row["task"] for row in rows])
    return {
        "skills_written": len(rows),
        "parse_rate": value,
        "parse_rate_standard_error": error,
        "rejected": dict(sorted(reasons.items())),
    }


def acting(run: Stage1) -> dict[str, Any]:
    """Success on the validation tasks; its standard error is that of a sample of tasks."""
    config = run.config
    if not (config.sft.play_episodes and run.data.val_tasks):
        return {}
    evaluation = evaluate(
        run.sampler,
        run.tokenizer,
        run.world,
        run.data.val_tasks,
        temperature=config.sft.play_temperature,
        max_tokens=config.rollout.max_response_tokens,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        seed=config.eval.seed,
        repeats=config.sft.play_episodes,
        on_turn=run.on_turn,
    )
    run.turns.close()
    return evaluation.summary
