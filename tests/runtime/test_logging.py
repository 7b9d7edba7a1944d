"""The files of a run stay readable, a resumed run leaves the same files, and a wrong workdir is refused."""

from __future__ import annotations

import io
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from configs import base
from seed_jax.runtime import logging as run_logging
from seed_jax.runtime.logging import (
    EpisodeWriter,
    MetricsWriter,
    PhaseTimer,
    Progress,
    TurnProgress,
    WorkdirError,
    prepare_workdir,
)


def make_config(lr: float = 1e-6, iterations: int = 150) -> ConfigDict:
    config = base.get_config()
    config.optim.lr = lr
    config.iterations = iterations
    return config


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_are_one_json_object_a_line(tmp_path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(0, {"a/int": np.int64(3), "a/float": jnp.float32(0.5), "a/nan": float("nan"), "a/inf": np.inf})
    assert lines(tmp_path / "metrics.jsonl") == [
        {"iteration": 0, "a/int": 3, "a/float": 0.5, "a/nan": None, "a/inf": None}
    ]
    writer.write(1, {"flag": True, "name": "x", "vector": np.arange(2)})
    assert lines(tmp_path / "metrics.jsonl")[1] == {"iteration": 1, "flag": True, "name": "x", "vector": [0, 1]}
    with pytest.raises(TypeError, match="cannot write a object as JSON"):
        writer.write(2, {"bad": object()})
    assert len(lines(tmp_path / "metrics.jsonl")) == 2


def test_tensorboard_gets_the_same_numbers(tmp_path, monkeypatch):
    scalars = []
    monkeypatch.setattr("tensorboardX.SummaryWriter.add_scalar", lambda _, *scalar: scalars.append(scalar))
    writer = MetricsWriter(tmp_path)
    writer.write(4, {"rollout/success_rate": 0.25, "bad": float("nan"), "text": "x"})
    writer.close()
    assert scalars == [("rollout/success_rate", 0.25, 4)]
    assert list((tmp_path / "tensorboard").iterdir())


def test_resumed_files_equal_uninterrupted_ones(tmp_path):
    def run(workdir: Path, iterations: range) -> None:
        metrics, episodes = MetricsWriter(workdir, tensorboard=False), EpisodeWriter(workdir / "episodes.jsonl")
        for iteration in iterations:
            metrics.write(iteration, {"loss": 0.1 * iteration, "nan": float("nan")})
            for index in range(2):
                episodes.write(iteration, {"index": index, "text": f"ünïcode\n{iteration}"})

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for workdir in (whole, broken):
        workdir.mkdir()
    run(whole, range(6))
    run(broken, range(5))
    with (broken / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 5, "lo')  # killed in the middle of a line
    MetricsWriter(broken).truncate_after(2, broken / "episodes.jsonl", broken / "absent.jsonl")
    run(broken, range(3, 6))
    for name in ("metrics.jsonl", "episodes.jsonl"):
        assert (whole / name).read_bytes() == (broken / name).read_bytes()
    assert sorted(path.name for path in broken.iterdir()) == ["episodes.jsonl", "metrics.jsonl"]


def test_read_jsonl(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert run_logging.read_jsonl(path) == []
    path.write_text('{"iteration": 1}\n{"iteration": 2}\n{"iter')
    assert run_logging.read_jsonl(path) == [{"iteration": 1}, {"iteration": 2}]
    path.write_text('{"iteration": 1}\n{"iter\n{"iteration": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 is not JSON .*; remove that line"):
        run_logging.read_jsonl(path)


def test_phase_timer_adds_up():
    times = iter([0.0, 1.0, 10.0, 12.5, 20.0, 24.0])
    timer = PhaseTimer(clock=lambda: next(times))
    with timer("rollout"):
        pass
    with timer("rollout"):
        pass
    assert timer.collect() == {"time/rollout_s": 3.5}
    with pytest.raises(ZeroDivisionError), timer("update"):
        _ = 1 / 0
    assert timer.collect() == {"time/update_s": 4.0}
    assert timer.totals == {"rollout": 3.5, "update": 4.0}


def test_progress_lines_show_time_left_without_the_compiling_iteration():
    times = iter([0.0, 100.0, 110.0, 120.0])
    stream = io.StringIO()
    progress = Progress(362, stream=stream, clock=lambda: next(times))
    for iteration in (1, 2, 3):
        progress.line(iteration, success=0.25, episodes=128, gap=None)
    assert stream.getvalue().splitlines() == [
        "[  1/362] success 0.250  episodes 128  100.0 s, 1:40 so far, about 10:01:40 left",
        "[  2/362] success 0.250  episodes 128  10.0 s, 1:50 so far, about 1:00:00 left",
        "[  3/362] success 0.250  episodes 128  10.0 s, 2:00 so far, about 59:50 left",
    ]
    silent = io.StringIO()
    Progress(3, enabled=False, stream=silent).line(1)
    assert silent.getvalue() == ""


def test_new_workdir_then_resume(tmp_path):
    workdir = tmp_path / "deep" / "run"
    assert prepare_workdir(workdir, make_config()) is False
    assert json.loads((workdir / "config.json").read_text())["optim"]["lr"] == 1e-6
    assert prepare_workdir(workdir, make_config(iterations=200)) is True  # longer is the same run
    assert json.loads((workdir / "config.json").read_text())["iterations"] == 200


def test_workdir_of_another_config(tmp_path):
    prepare_workdir(tmp_path, make_config())
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(WorkdirError) as error:
        prepare_workdir(tmp_path, make_config(lr=0.1, iterations=3))
    assert "optim.lr: 1e-06 -> 0.1" in str(error.value) and "--overwrite" in str(error.value)
    assert "iterations" not in str(error.value)
    assert (tmp_path / "checkpoints" / "5").exists()

    assert prepare_workdir(tmp_path, make_config(lr=0.1), overwrite=True) is False
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "notes.txt"]
    assert json.loads((tmp_path / "config.json").read_text())["optim"]["lr"] == 0.1


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("content", ["{", '["list"]', '{"model_type": "qwen2"}'])
def test_foreign_config_file_is_never_overwritten(tmp_path, content, overwrite):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(WorkdirError, match=r"config\.json.*move it away or choose another --workdir"):
        prepare_workdir(tmp_path, make_config(), overwrite)
    assert (tmp_path / "config.json").read_text() == content


def test_run_files_without_config(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(WorkdirError, match=r"has files of a run but no config\.json"):
        prepare_workdir(tmp_path, make_config(), overwrite=True)


def test_unwritable_workdir(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/run")):
        with pytest.raises(WorkdirError, match=f"cannot write to workdir {path}: .*choose another --workdir"):
            prepare_workdir(path, make_config())


def test_long_rollouts_say_how_far_they_are():
    now, stream = [0.0], io.StringIO()
    progress = TurnProgress(10, rollouts=2, every_s=20.0, stream=stream, clock=lambda: now[0])
    for step, live in ((0, 8), (1, 8), (2, 6), (3, 6)):
        progress(step, live)
        now[0] += 16.0  # 2 seconds for each of the first episodes' turns
    progress(0, 0)  # a look at the clock outside of rollouts
    # after 2 turns of 8 episodes: 6 * 8 turns are left at most, and as many as that again in the second rollout
    expected = ["rollout 1/2, turn 3/10, 6 of 8 episodes running, 0:32 so far, at most 3:12 left"]
    assert stream.getvalue().splitlines() == expected
    for step, live in ((0, 8), (0, 8)):  # the second one, and the first of those that come after
        now[0] += 100.0
        progress(step, live)
    expected.append("rollout 2/2, turn 1/10, 8 of 8 episodes running, 2:44 so far, at most 7:49 left")
    assert stream.getvalue().splitlines() == expected
    silent = io.StringIO()
    TurnProgress(2, every_s=0.0, enabled=False, stream=silent, clock=lambda: 1.0)(0, 3)
    assert silent.getvalue() == ""
