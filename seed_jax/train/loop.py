"""One run, read top to bottom: act, analyze, re-score and update in one call, reshard, evaluate, save; then finish.

With many hosts (runtime/multihost.py) each plays its share of the tasks; what is logged, decided and learned from is
that of all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import jax

from seed_jax import evaluate, teacher
from seed_jax.hindsight.analyzer import Analysis, analyze, require_skills
from seed_jax.objectives.schedules import watch_margin
from seed_jax.rollout import play, prefetch
from seed_jax.runtime import alive, multihost, usage
from seed_jax.runtime.checkpoint import Checkpointer
from seed_jax.runtime.logging import (
    EVALUATIONS_FILE,
    OUTCOMES_FILE,
    PANEL_TRAJECTORIES_FILE,
    TEACHER_FILE,
    TRAJECTORIES_FILE,
    WorkdirError,
    append_jsonl,
    truncate_jsonl,
)
from seed_jax.runtime.signals import Interrupted, stop_on_signals
from seed_jax.tasks import schedule
from seed_jax.train import dumps, second, trajectories
from seed_jax.train.finish import finish
from seed_jax.train.groups import gather, round_number
from seed_jax.train.metrics import (
    conditions,
    episode_record,
    eval_metrics,
    memory_metrics,
    note_gap,
    outcome_record,
    report,
    rollout_metrics,
    update_metrics,
)
from seed_jax.train.packing import pack, row_use
from seed_jax.train.run import Run, Setup
from seed_jax.train.samples import batch_samples
from seed_jax.train.state import TrainState, as_tree, from_tree
from seed_jax.train.update import hyper
from seed_jax.types import Episode, SamplingParams


def train(config, setup: Setup, workdir: Path, *, resuming: bool = False) -> dict:
    """Runs (or resumes) training to `config.iterations` and returns the summary that is also written to summary.json.

    A signal (Ctrl-C, SIGTERM) stops it at the next turn, saves, and raises Interrupted. On many hosts a signal to one
    of them stops all.
    """
    run = Run(config, setup, workdir)
    kept = config.checkpoint
    with (
        alive.watching(run.stop, config.mesh.host_timeout_s),
        stop_on_signals(run.stop, kept.grace_s),
        Checkpointer(workdir / "checkpoints", keep=kept.keep, elsewhere=kept.dir) as checkpoints,
        run.compilations,
        run.view,
    ):
        state, done, memory = _restore(run, checkpoints, resuming)
        run.begin(done)
        run.load_sampler(state)
        metrics = memory.pop("unfinished", None)  # of an iteration that was stopped after its update
        try:
            if not run.evaluations():
                _evaluate(run, state, 0, memory)
            while metrics is not None or done < config.iterations:
                if metrics is None:
                    with usage.profiled(workdir / "profile", done + 1 == config.log.profile_iteration):
                        state, metrics = _iteration(run, state, done, memory)
                    done += 1
                last = done == config.iterations
                if last or (config.eval.every and done % config.eval.every == 0):
                    metrics |= _evaluate(run, state, done, memory)
                metrics |= run.timer.collect() | memory_metrics(run.timer.memory_by_phase)
                compiled, again = run.compilations.collect()
                run.metrics.write(done, metrics | compiled)
                report(run.progress, done, metrics, again)
                metrics, stuck = None, dumps.is_stuck(config, memory)
                if last or stuck or done % config.checkpoint.every == 0:
                    with run.timer("save"):
                        checkpoints.save(done, as_tree(state), {"memory": memory})
                if stuck:
                    raise dumps.NotFinite(dumps.stuck_text(config, memory, workdir))
                run.stop_if_asked()
            if run.evaluations()[-1]["iteration"] < done:  # fewer iterations are asked for now
                _evaluate(run, state, done, memory)
        except Interrupted:
            checkpoints.save(done, as_tree(state), {"memory": memory | ({"unfinished": metrics} if metrics else {})})
            run.progress.message(f"stopped after iteration {done}; saved. The same command resumes.")
            raise
        finally:
            run.metrics.close()
        return finish(run, state)


def _iteration(run: Run, state: TrainState, iteration: int, memory: dict) -> tuple[TrainState, dict]:
    config, counts = run.config, Counter()
    generated = run.sampler.stats["new_tokens"]  # so far: evaluations do not count
    mine = multihost.share(config.rollout.tasks)
    analysis = None  # with the dynamic filter only episodes that are kept are analyzed, when all are played
    if run.uses_skills and run.skills.source == "self_hindsight" and config.rollout.group_filter != "dynamic":
        analysis = Analysis(run.sampler, run.tokenizer, config.hindsight, config.env.prompt, iteration)

    def play_round(number: int) -> list[Episode]:
        with multihost.together():
            return play(
                run.sampler,
                run.tokenizer,
                run.setup.world,
                schedule(run.setup.train_tasks, config.seed, number, config.rollout.tasks)[mine],
                group=run.attempts[0],
                first=mine.start,
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
        prefetch(run.setup.world, tasks[mine], run.attempts[0])
    read = run.skills.to_analyze(episodes) if run.uses_skills else []
    if run.uses_skills:
        with run.timer("analysis"):
            if read:
                style = config.env.prompt
                counts += analyze(run.sampler, run.tokenizer, read, config.hindsight, style, iteration, analysis)
            counts += run.skills.assign(episodes, read)
    seconds: list[Episode] = []
    if run.attempts[1]:
        with run.timer("second_attempts"), multihost.together():
            tasks = schedule(run.setup.train_tasks, config.seed, iteration, config.rollout.tasks)
            seconds = second.play_seconds(run, episodes, tasks, iteration, counts)
        second.set_values(episodes, seconds)
    with run.timer("pack"):
        samples = batch_samples(run, episodes, iteration, counts, read, seconds)
        rows = config.pack.rows_per_micro, config.pack.micros_per_mini
        local = pack(samples, run.shape, math.prod(rows) // jax.process_count(), run.distills)
        batch = multihost.join_rows(local, run.mesh, *rows)
        counts.update(row_use(local, run.spec.vision))
        counts["generated_tokens"] = run.sampler.stats["new_tokens"] - generated
        counts = multihost.sum_counters(counts)
    own = [*episodes, *seconds]
    played, episodes, seconds = map(multihost.gather_episodes, (played, episodes, seconds))
    records = _records(own, [*episodes, *seconds][: config.log.episodes_per_iteration])
    run.stop_if_asked()  # the last moment to stop before memory and weights change
    if run.distills and episodes:
        require_skills(counts, memory, config.hindsight.min_coverage_iterations)
    run.sampler.release()  # its memory is the update's, and that of the same passes before it
    with run.timer("trajectories"):  # under the weights that the update starts from
        trajectories.record_rollout(run, state, iteration, own)
    with run.timer("update"):
        known = {name: memory.get(name) for name in ("handoff", "margin")}
        numbers = hyper(config, iteration + 1, skipped=memory.get("skipped", 0.0), **known)
        state, metrics = run.update(state, batch, numbers)
        metrics = {name: float(value) for name, value in jax.device_get(metrics).items()}
    metrics |= update_metrics(run, counts, run.timer.seconds("update"))
    memory["skipped"] = metrics["update/skipped_in_a_row"]
    if metrics["update/skipped_steps"]:
        dump = dumps.save(run.workdir, config, iteration + 1, local, numbers, metrics)
        run.progress.message(f"  the batch is kept: python -m launch.replay --dump={dump}")
    note_gap(config, memory, metrics, iteration + 1)
    with run.timer("reshard"):
        run.load_sampler(state)
    for record in records:
        run.episodes.write(iteration + 1, record)
    metrics |= run.skills.metrics(episodes, counts, run.distills) | second.metrics(episodes, seconds, counts)
    return state, {**rollout_metrics(played, counts), **metrics}


def _records(own: Sequence[Episode], chosen: Sequence[Episode]) -> list[dict]:
    """The `chosen` episodes of all hosts as they are logged; of its `own` each host knows all."""
    numbers = {episode.index for episode in chosen}
    records = [episode_record(episode) for episode in own if episode.index in numbers]
    everyone = [record for part in multihost.gather_json(records) for record in part]
    return sorted(everyone, key=lambda record: record["index"])


def _evaluate(run: Run, state: TrainState, iteration: int, memory: dict) -> dict:
    """The panel at every temperature; appended to evaluations.jsonl, each game's outcome to outcomes.jsonl. Some of its
    games by the teacher. Returns the metrics.

    Nothing is written before all is played: an evaluation in the file is a whole one when the run is resumed.
    """
    with run.timer("eval"):
        played = evaluate.evaluate_all(run)
    run.turns.close()
    results, measured = [evaluation.summary for evaluation in played], None
    if teacher.measures(run):
        with run.timer("teacher"):
            measured = teacher.measure(run, played[0].own, results[0]["temperature"])
        run.turns.close()
    for result, episodes, _ in played if run.leads else ():
        append_jsonl(run.workdir / EVALUATIONS_FILE, {"iteration": iteration, **result})
        append_jsonl(run.workdir / OUTCOMES_FILE, outcome_record(iteration, result, episodes))
    with run.timer("trajectories"):
        trajectories.record_panel(run, state, iteration, played[0].own)
    shown = ", ".join(f"{r['success_rate']:.3f} +- {r['standard_error']:.3f} ({conditions(r)})" for r in results)
    run.progress.message(f"held-out success after iteration {iteration}: {shown}, {results[0]['games']} games")
    metrics = eval_metrics(results)
    if measured:
        if run.config.eval.every and iteration % run.config.eval.every == 0:  # a whole run lacks that of an earlier end
            margin = measured["self"]["margin"]["success_rate"]
            memory["margin"] = watch_margin(memory.get("margin") or {}, margin)
        if run.leads:
            append_jsonl(run.workdir / TEACHER_FILE, {"iteration": iteration, **measured})
        run.progress.message(teacher.told(measured))
        metrics |= teacher.teacher_metrics(measured)
    return metrics


def _restore(run: Run, checkpoints: Checkpointer, resuming: bool) -> tuple[TrainState, int, dict]:
    """(state, iterations done, memory): from the newest good checkpoint, or from the initial weights."""
    state, done, memory = run.fresh_state(), 0, {}
    restored = checkpoints.restore_latest(as_tree(state)) if resuming else None
    if restored:
        state, done, memory = from_tree(restored.tree, state), restored.step, restored.meta["memory"]
        run.progress.message(f"resuming after iteration {done}")
    elif not resuming and checkpoints.steps():
        raise WorkdirError(
            f"checkpoint.dir = {run.config.checkpoint.dir!r} holds checkpoints of another run; choose an empty one"
        )
    elif resuming:
        run.progress.message("nothing was saved yet: starting from the beginning")
    if resuming and run.leads:
        # The metrics of an unfinished iteration are still to be written, even if an earlier resumption wrote them.
        recorded = done - ("unfinished" in memory) if restored else -1
        of_evaluations = (EVALUATIONS_FILE, OUTCOMES_FILE, PANEL_TRAJECTORIES_FILE, TEACHER_FILE)
        run.metrics.truncate_after(recorded, *(run.workdir / name for name in of_evaluations))
        for path in (run.episodes.path, run.workdir / TRAJECTORIES_FILE):
            truncate_jsonl(path, done if restored else -1)
    return state, done, memory
