"""The command line: bad input ends with one clear message, Ctrl-C costs nothing, a damaged data set is named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from seed_jax.runtime.logging import prepare_workdir, read_jsonl
from tests import tiny

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A model, a config file for it, and the compilation cache that the launches share."""
    home = tmp_path_factory.mktemp("home")
    tiny.save_model(home / "model")
    (home / "toy.py").write_text(
        "from pathlib import Path\n"
        "from tests import tiny\n"
        "def get_config(method='seed'):\n"
        f"    config = tiny.config(Path({str(home / 'model')!r}), method)\n"
        "    config.iterations = 3\n"
        "    config.checkpoint.every = 2\n"
        "    config.log.diagnostics_episodes = 0\n"
        "    config.log.tensorboard = False\n"
        "    return config\n"
    )
    return home


def command(home: Path, workdir: Path, *flags: str, method: str = "") -> list[str]:
    config = f"{home / 'toy.py'}{method}"
    return [sys.executable, "-m", "launch.train", f"--config={config}", f"--workdir={workdir}", *flags]


def environment(home: Path) -> dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return variables | {"HOME": str(home), "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def launch(home: Path, workdir: Path, *flags: str, method: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(home, workdir, *flags, method=method),
        capture_output=True, text=True, env=environment(home), cwd=ROOT, timeout=300,
    )  # fmt: skip


def toy_config(home: Path):
    config = tiny.config(home / "model")
    config.iterations, config.checkpoint.every = 3, 2
    config.log.diagnostics_episodes, config.log.tensorboard = 0, False
    return config


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_unknown_field_and_impossible_value(home, tmp_path):
    unknown = launch(home, tmp_path / "a", "--config.optim.lrr=1")
    assert unknown.returncode == 2
    assert unknown.stderr.splitlines()[-1] == "FATAL unknown field optim.lrr; did you mean optim.lr?"
    assert not (tmp_path / "a").exists()

    impossible = launch(home, tmp_path / "b", "--config.optim.lr=-1.0", "--config.rollout.group=1")
    assert impossible.returncode == 2 and "Traceback" not in impossible.stderr
    assert "optim.lr = -1.0: must be a number greater than 0" in impossible.stderr
    assert "adv.kind = 'grpo', rollout.group = 1: " in impossible.stderr
    assert not (tmp_path / "b").exists()


def test_prompts_that_may_not_be_long_enough_for_any_game(home, tmp_path):
    result = launch(home, tmp_path, "--config.rollout.max_prompt_tokens=20")
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "even without history; raise rollout.max_prompt_tokens=20 to " in result.stderr.splitlines()[-1]


def test_workdir_that_cannot_be_written(home, tmp_path):
    (tmp_path / "file").write_text("")
    result = launch(home, tmp_path / "file" / "run")
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert f"error: cannot write to workdir {tmp_path / 'file' / 'run'}: Not a directory" in result.stderr


def test_workdir_of_another_config(home, tmp_path):
    other = toy_config(home)
    other.optim.lr = 0.5
    prepare_workdir(tmp_path, other)
    stored = (tmp_path / "config.json").read_text()
    result = launch(home, tmp_path)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "  - optim.lr: 0.5 -> 0.0001\n" in result.stderr and "--overwrite" in result.stderr
    assert (tmp_path / "config.json").read_text() == stored


def test_damaged_panel_game(home, tmp_path):
    tiny.write_games(tmp_path / "games", "train", 12)
    panel = tiny.write_games(tmp_path / "games", "seen", 6)
    panel[3].write_text(panel[3].read_text()[:-40])
    result = launch(home, tmp_path / "run", f"--config.env.data={tmp_path / 'games'}")
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert f"error: {panel[3]}: is not valid JSON" in result.stderr


def test_data_directory_without_games(home, tmp_path):
    result = launch(home, tmp_path / "run", f"--config.env.data={tmp_path / 'nowhere'}")
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert f"{tmp_path / 'nowhere' / 'train'} is not a directory" in result.stderr


# -- whole runs --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uninterrupted(home, tmp_path_factory) -> Path:
    """A run that starts over in the workdir of another config, which holds what that run left and a user's file."""
    workdir = tmp_path_factory.mktemp("runs") / "whole"
    other = toy_config(home)
    other.optim.lr = 0.5
    prepare_workdir(workdir, other)
    (workdir / "metrics.jsonl").write_text('{"iteration": 1, "left": "over"}\n')
    (workdir / "checkpoints" / "1").mkdir(parents=True)
    (workdir / "notes.txt").write_text("mine")
    result = launch(home, workdir, "--overwrite")
    assert result.returncode == 0, result.stderr
    return workdir


def test_overwrite_starts_again_and_keeps_foreign_files(uninterrupted):
    assert (uninterrupted / "notes.txt").read_text() == "mine"
    assert [record["iteration"] for record in read_jsonl(uninterrupted / "metrics.jsonl")] == [1, 2, 3]
    assert json.loads((uninterrupted / "config.json").read_text())["optim"]["lr"] == 1e-4
    assert {"eval_before", "eval_after", "minutes"} <= set(json.loads((uninterrupted / "summary.json").read_text()))


@pytest.mark.parametrize("moment", ["held-out success after iteration 0", "[1/3]"])
def test_ctrl_c_saves_and_the_same_command_resumes(home, tmp_path, uninterrupted, moment):
    process = subprocess.Popen(
        command(home, tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(home),
        cwd=ROOT,
    )  # fmt: skip
    seen = []
    for line in process.stdout:
        seen.append(line)
        if moment in line:
            process.send_signal(signal.SIGINT)
            break
    rest, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "stopping: the weights are saved" in errors and "Traceback" not in errors
    assert "saved. The same command resumes." in rest
    assert not (tmp_path / "summary.json").exists()

    resumed = launch(home, tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming after iteration" in resumed.stdout
    whole, mine = tiny.outcome(uninterrupted, 3), tiny.outcome(tmp_path, 3)
    for part in whole:
        assert mine[part] == whole[part], part
