"""One run, read top to bottom: act, analyze, re-score and update in one call, reshard, evaluate, save; then finish."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from seed_jax import evaluate, sharding
from seed_jax import tokenizer as tok
from seed_jax.hindsight.analyzer import Analysis, analyze, require_skills
from seed_jax.hindsight.evidence import solver
from seed_jax.hindsight.sources import Skills
from seed_jax.models import hf
from seed_jax.rollout import World, play, prefetch
from seed_jax.runtime.checkpoint import Checkpointer
from seed_jax.runtime.logging import (
    EPISODES_FILE,
    EVALUATIONS_FILE,
    EpisodeWriter,
    MetricsWriter,
    PhaseTimer,
    Progress,
    TurnProgress,
    append_jsonl,
    read_jsonl,
    truncate_jsonl,
)
from seed_jax.runtime.signals import stop_on_signals
from seed_jax.sampler.engine import sampler_of
from seed_jax.tasks import schedule
from seed_jax.train import factors
from seed_jax.train.compiled import shared_update
from seed_jax.train.finish import finish
from seed_jax.train.groups import gather, round_number
from seed_jax.train.metrics import conditions, episode_record, eval_metrics, note_gap, report, rollout_metrics
from seed_jax.train.packing import Shape, fill, pack
from seed_jax.train.samples import batch_samples
from seed_jax.train.state import TrainState, as_tree, from_tree, init_state, state_shardings
from seed_jax.train.update import build_optimizer, hyper
from seed_jax.types import Episode, SamplingParams


class Setup(NamedTuple):
    """What the launcher brings: the environment (prompts, pool, limits), the training tasks and the evaluation
    panel."""

    world: World
    train_tasks: Sequence[Any]
    panel: Sequence[Any]


class Interrupted(Exception):
    """A signal asked the run to stop; nothing of the current iteration has reached the weights yet."""


class Run:
    """The fixed parts of a run: config, model, sampler, compiled update, writers. Everything that changes is in
    TrainState."""

    def __init__(self, config, setup: Setup, workdir: Path):
        self.config, self.setup, self.workdir = config, setup, workdir
        self.model_dir = hf.resolve(config.model.init)
        self.tokenizer = tok.load_tokenizer(self.model_dir, config.rollout.thinking)
        self.mesh = sharding.make_mesh(fsdp=config.mesh.fsdp, tensor=config.mesh.tensor)
        self.spec, self.initial = hf.load(self.model_dir, self.mesh)
        self.optimizer, choices = build_optimizer(config), factors.choices(config)
        self.keep = {"keep_reference": choices.needs_reference, "keep_teacher": choices.keeps_teacher}
        self.shardings = state_shardings(
            self.optimizer,
            self.initial,
            sharding.param_shardings(self.spec, self.mesh, "train"),
            self.mesh,
            **self.keep,
        )
        self.update = shared_update(config, self.spec, self.mesh, self.shardings)
        self.sampler = sampler_of(config, self.spec, self.tokenizer, self.mesh)
        tasks = (*setup.train_tasks, *setup.panel)
        self.skills = Skills(config, self.tokenizer, {t.family for t in tasks}, solver(setup.world.domain, tasks))
        self.distills = choices.needs_teacher
        p = config.pack
        self.shape = Shape(p.row_tokens, p.scored_tokens_per_row, p.max_turns_per_row, p.teacher_row_tokens)
        self.metrics = MetricsWriter(workdir, tensorboard=config.log.tensorboard)
        self.episodes = EpisodeWriter(workdir / EPISODES_FILE)
        self.timer, self.progress = PhaseTimer(), Progress(config.iterations, enabled=jax.process_index() == 0)
        self.progress.message(self.sampler.plan())
        self.turns = TurnProgress(config.env.max_steps, every_s=60.0, enabled=jax.process_index() == 0)
        self.stop = threading.Event()

    def fresh_state(self) -> TrainState:
        initial, self.initial = self.initial, None  # four bytes a weight that nothing needs again
        state = init_state(initial, self.optimizer, **self.keep, reference_dtype=self.config.model.dtype)
        return jax.device_put(state, self.shardings)

    def load_sampler(self, state: TrainState) -> None:
        self.sampler.load(state.params)

    def on_turn(self, step: int, live: int) -> None:
        if self.stop.is_set():
            raise Interrupted
        self.turns(step, live)


def train(config, setup: Setup, workdir: Path, *, resuming: bool = False) -> dict:
    """Runs (or resumes) training to `config.iterations` and returns the summary that is also written to summary.json.

    A signal (Ctrl-C, SIGTERM) stops it at the next turn, saves, and raises Interrupted.
    """
    run = Run(config, setup, workdir)
    with Checkpointer(workdir / "checkpoints", keep=config.checkpoint.keep) as checkpoints, stop_on_signals(run.stop):
        state, done, memory = _restore(run, checkpoints, resuming)
        run.load_sampler(state)
        metrics = memory.pop("unfinished", None)  # of an iteration that was stopped after its update
        try:
            if not read_jsonl(workdir / EVALUATIONS_FILE):
                _evaluate(run, 0)
            while metrics is not None or done < config.iterations:
                if metrics is None:
                    state, metrics = _iteration(run, state, done, memory)
                    done += 1
                last = done == config.iterations
                if last or (config.eval.every and done % config.eval.every == 0):
                    metrics |= eval_metrics(_evaluate(run, done))
                metrics |= run.timer.collect()
                run.metrics.write(done, metrics)
                report(run.progress, done, metrics)
                metrics = None
                if last or done % config.checkpoint.every == 0:
                    checkpoints.save(done, as_tree(state), {"memory": memory})
                run.on_turn(0, 0)
            if read_jsonl(workdir / EVALUATIONS_FILE)[-1]["iteration"] < done:  # fewer iterations are asked for now
                _evaluate(run, done)
        except Interrupted:
            checkpoints.save(done, as_tree(state), {"memory": memory | ({"unfinished": metrics} if metrics else {})})
            run.progress.message(f"stopped after iteration {done}; saved. The same command resumes.")
            raise
        finally:
            run.metrics.close()
        return finish(run, state)


def _iteration(run: Run, state: TrainState, iteration: int, memory: dict) -> tuple[TrainState, dict]:
    config, counts = run.config, Counter()
    analysis = None  # with the dynamic filter only episodes that are kept are analyzed, when all are played
    if run.distills and run.skills.source == "self_hindsight" and config.rollout.group_filter != "dynamic":
        analysis = Analysis(run.sampler, run.tokenizer, config.hindsight, config.env.prompt, iteration)

    def play_round(number: int) -> list[Episode]:
        return play(
            run.sampler,
            run.tokenizer,
            run.setup.world,
            schedule(run.setup.train_tasks, config.seed, number, config.rollout.tasks),
            group=config.rollout.group,
            stream=number,
            counts=counts,
            params=SamplingParams(config.rollout.max_response_tokens, config.rollout.temperature),
            max_prompt_tokens=config.rollout.max_prompt_tokens,
            skills=run.skills,
            share=config.hindsight.at_rollout,
            analysis=analysis,
            on_turn=run.on_turn,
        )

    with run.timer("rollout"):
        played, episodes = gather(play_round, iteration, config.rollout, counts)
    run.turns.close()
    if iteration + 1 < config.iterations:  # while the weights are updated, workers build the next games
        following = round_number(iteration + 1, config.rollout)
        tasks = schedule(run.setup.train_tasks, config.seed, following, config.rollout.tasks)
        prefetch(run.setup.world, tasks, config.rollout.group)
    read = run.skills.to_analyze(episodes) if run.distills else []
    if run.distills:
        with run.timer("analysis"):
            if read:
                style = config.env.prompt
                counts += analyze(run.sampler, run.tokenizer, read, config.hindsight, style, iteration, analysis)
            counts += run.skills.assign(episodes, read)
    with run.timer("pack"):
        samples = batch_samples(run, episodes, iteration, counts, read)
        batch = pack(samples, run.shape, config.pack.rows_per_micro * config.pack.micros_per_mini, run.distills)
    run.on_turn(0, 0)  # the last moment to stop before memory and weights change
    if run.distills and episodes:
        require_skills(counts, memory, config.hindsight.min_coverage_iterations)
    run.sampler.release()  # its memory is the update's
    with run.timer("update"):
        state, metrics = run.update(state, batch, hyper(config, iteration + 1, memory.get("handoff")))
        metrics = {name: float(value) for name, value in jax.device_get(metrics).items()}
    note_gap(config, memory, metrics, iteration + 1)
    with run.timer("reshard"):
        run.load_sampler(state)
    for episode in episodes[: config.log.episodes_per_iteration]:
        run.episodes.write(iteration + 1, episode_record(episode))
    skill_metrics = run.skills.metrics(episodes, counts, run.distills)
    return state, {**rollout_metrics(played, counts), **skill_metrics, "pack/fill": fill(batch), **metrics}


def _evaluate(run: Run, iteration: int) -> list[dict]:
    """The panel at every temperature; appended to evaluations.jsonl."""
    with run.timer("eval"):
        results = evaluate.evaluate_all(run)
    run.turns.close()
    for result in results:
        append_jsonl(run.workdir / EVALUATIONS_FILE, {"iteration": iteration, **result})
    shown = ", ".join(f"{r['success_rate']:.3f} +- {r['standard_error']:.3f} ({conditions(r)})" for r in results)
    run.progress.message(f"held-out success after iteration {iteration}: {shown}, {results[0]['games']} games")
    return results


def _restore(run: Run, checkpoints: Checkpointer, resuming: bool) -> tuple[TrainState, int, dict]:
    """(state, iterations done, memory): from the newest good checkpoint, or from the initial weights."""
    state, done, memory = run.fresh_state(), 0, {}
    restored = checkpoints.restore_latest(as_tree(state)) if resuming else None
    if restored:
        state, done, memory = from_tree(restored.tree, state), restored.step, restored.meta["memory"]
        run.progress.message(f"resuming after iteration {done}")
    elif resuming:
        run.progress.message("nothing was saved yet: starting from the beginning")
    if resuming:
        # The metrics of an unfinished iteration are still to be written, even if an earlier resumption wrote them.
        recorded = done - ("unfinished" in memory) if restored else -1
        run.metrics.truncate_after(recorded, run.workdir / EVALUATIONS_FILE)
        truncate_jsonl(run.episodes.path, done if restored else -1)
    return state, done, memory
