"""No interruption can be seen in the result of a run: stopped, killed, extended and damaged ones equal a whole one."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from seed_jax import evaluate
from seed_jax.runtime.logging import MetricsWriter, read_jsonl
from seed_jax.train import loop
from tests import tiny

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("planner_skills")]

ITERATIONS = 3


def long_config(model_dir: Path):
    """Three iterations, evaluated after 0, 2 and 3, saved after 2 and 3."""
    config = tiny.config(model_dir)
    config.iterations = ITERATIONS
    config.eval.every = 2
    config.checkpoint.every = 2
    config.log.diagnostics_episodes = 0
    config.log.tensorboard = False
    return config


@pytest.fixture(scope="module")
def uninterrupted(model_dir, tmp_path_factory, planner_skills) -> dict:
    workdir = tmp_path_factory.mktemp("uninterrupted")
    tiny.run(long_config(model_dir), workdir)
    return tiny.outcome(workdir, ITERATIONS)


def assert_same(workdir: Path, expected: dict) -> None:
    result = tiny.outcome(workdir, ITERATIONS)
    for part in ("metrics", "evaluations", "episodes", "outcomes", "trajectories", "checksums", "weights"):
        assert result[part] == expected[part], part


@contextlib.contextmanager
def stopping(stream: int, step: int, call: int = 1):
    """Asks the run to stop at turn `step` of the `call`-th game round with that stream of random keys."""
    rounds = Counter()

    def wrap(original):
        def play(*arguments, stream: int, on_turn, **options):
            rounds[stream] += 1
            due = stream == wanted and rounds[stream] == call

            def on_turn_or_signal(number, live):
                if due and number == step:
                    on_turn.__self__.stop.set()  # what the signal handler does
                on_turn(number, live)

            return original(*arguments, stream=stream, on_turn=on_turn_or_signal, **options)

        return play

    wanted = stream
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "play", wrap(loop.play))
        patch.setattr(evaluate, "play", wrap(evaluate.play))
        yield


def run_and_stop(config, workdir: Path, **where: int) -> None:
    with stopping(**where), pytest.raises(loop.Interrupted):
        tiny.run(config, workdir)


def test_the_tiny_model_wins_now_and_then(uninterrupted):
    """Otherwise the tests of this file would compare runs without rewards."""
    wins = [episode["won"] for episode in uninterrupted["episodes"]]
    assert 0 < sum(wins) < len(wins)
    assert max(record["adv/mixed_groups"] for record in uninterrupted["metrics"]) > 0
    assert uninterrupted["evaluations"][0]["valid_rate"] > 0.5


def test_stopped_in_mid_rollout(model_dir, tmp_path, uninterrupted):
    config = long_config(model_dir)
    run_and_stop(config, tmp_path, stream=1, step=1)
    assert [record["iteration"] for record in read_jsonl(tmp_path / "metrics.jsonl")] == [1]
    assert not (tmp_path / "summary.json").exists()
    tiny.run(config, tmp_path)
    assert_same(tmp_path, uninterrupted)


def test_stopped_before_training(model_dir, tmp_path, uninterrupted):
    config = long_config(model_dir)
    run_and_stop(config, tmp_path, stream=evaluate.EVAL_STREAM, step=0, call=2)
    assert read_jsonl(tmp_path / "evaluations.jsonl") == []
    run_and_stop(config, tmp_path, stream=0, step=0)
    tiny.run(config, tmp_path)
    assert_same(tmp_path, uninterrupted)


def test_stopped_in_an_evaluation_and_again_after_it(model_dir, tmp_path, uninterrupted):
    """Two iterations are done, the second one's metrics are not written yet; then the third is stopped as well."""
    config = long_config(model_dir)
    run_and_stop(config, tmp_path, stream=evaluate.EVAL_STREAM, step=0, call=4)
    assert [record["iteration"] for record in read_jsonl(tmp_path / "metrics.jsonl")] == [1]
    run_and_stop(config, tmp_path, stream=2, step=1)
    tiny.run(config, tmp_path)
    assert_same(tmp_path, uninterrupted)


def test_stopped_in_the_last_evaluation_and_called_once_more_when_done(model_dir, tmp_path, uninterrupted):
    config = long_config(model_dir)
    run_and_stop(config, tmp_path, stream=evaluate.EVAL_STREAM, step=0, call=5)
    first = tiny.run(config, tmp_path)
    assert_same(tmp_path, uninterrupted)
    again = tiny.run(config, tmp_path)
    assert_same(tmp_path, uninterrupted)
    assert (again["eval_before"], again["eval_after"]) == (first["eval_before"], first["eval_after"])


def test_killed_between_two_checkpoints(model_dir, tmp_path, uninterrupted, monkeypatch):
    """The third iteration was written to the logs, its weights were not."""
    config = long_config(model_dir)
    write = MetricsWriter.write

    def write_and_die(self, iteration, metrics):
        write(self, iteration, metrics)
        if iteration == 3:
            raise MemoryError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(MetricsWriter, "write", write_and_die)
        with pytest.raises(MemoryError):
            tiny.run(config, tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["2"]
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 3
    tiny.run(config, tmp_path)
    assert_same(tmp_path, uninterrupted)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # from reads that were given up
def test_corrupt_newest_checkpoint(model_dir, tmp_path, uninterrupted, caplog):
    config = long_config(model_dir)
    config.iterations = 2
    config.checkpoint.every = 1
    tiny.run(config, tmp_path)
    newest = max(
        (p for p in (tmp_path / "checkpoints" / "2").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size
    )
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    config.iterations = ITERATIONS
    with caplog.at_level(logging.WARNING, "seed_jax"):
        tiny.run(config, tmp_path)
    (warning,) = [r.getMessage() for r in caplog.records if r.name == "seed_jax.runtime.checkpoint"]
    assert "cannot be read" in warning and "goes on from step 1" in warning
    assert_same(tmp_path, uninterrupted)
    gc.collect()


def test_extended(model_dir, tmp_path, uninterrupted):
    config = long_config(model_dir)
    config.iterations = 2
    assert tiny.run(config, tmp_path)["iterations"] == 2
    config.iterations = ITERATIONS
    summary = tiny.run(config, tmp_path)
    assert summary["iterations"] == ITERATIONS
    assert_same(tmp_path, uninterrupted)


def test_shortened_to_what_is_done(model_dir, tmp_path, uninterrupted):
    """Stopped after the first iteration and asked for no more: what is exported is also what is evaluated."""
    config = long_config(model_dir)
    run_and_stop(config, tmp_path, stream=1, step=0)
    config.iterations = 1
    summary = tiny.run(config, tmp_path)
    evaluations = read_jsonl(tmp_path / "evaluations.jsonl")
    assert [e["iteration"] for e in evaluations] == [0, 0, 1, 1]
    assert summary["eval_after"] == evaluations[2]["success_rate"] and summary["iterations"] == 1
    assert tiny.outcome(tmp_path, 1)["metrics"] == uninterrupted["metrics"][:1]


def test_worker_killed_in_mid_rollout(model_dir, tmp_path, uninterrupted, monkeypatch, caplog):
    config = long_config(model_dir)
    config.env.workers = 1
    on_turn, killed = loop.Run.on_turn, []

    def kill_worker(self, step, live):
        on_turn(self, step, live)
        if step == 1 and self.timer.totals.get("update") and not killed:  # the second iteration
            (worker,) = multiprocessing.active_children()
            os.kill(worker.pid, signal.SIGKILL)
            killed.append(worker.pid)

    monkeypatch.setattr(loop.Run, "on_turn", kill_worker)
    with caplog.at_level(logging.WARNING, "envs.worker_pool"):
        tiny.run(config, tmp_path)
    assert killed and any("restarted" in record.getMessage() for record in caplog.records)
    assert multiprocessing.active_children() == []
    assert_same(tmp_path, uninterrupted)
