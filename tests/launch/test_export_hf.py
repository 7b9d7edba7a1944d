"""The export command: one line when it worked, one line when it could not, and nothing half-made when it dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from seed_jax.models import hf
from seed_jax.runtime.checkpoint import Checkpointer
from seed_jax.runtime.logging import prepare_workdir
from seed_jax.train.state import as_tree, init_state, make_optimizer
from tests import tiny

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
# The command in a process that gets a signal when it has written its second weight file.
DYING = """
import os, signal, sys
import safetensors.numpy
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background commands start without it
save_file, calls = safetensors.numpy.save_file, []

def save_and_die(*arguments):
    save_file(*arguments)
    calls.append(arguments)
    if len(calls) == 2:
        os.kill(os.getpid(), int(os.environ["SIGNAL"]))

safetensors.numpy.save_file = save_and_die
from launch import export_hf
export_hf.run()
"""


@pytest.fixture(scope="module")
def workdir(tmp_path_factory) -> Path:
    """A run after its first iteration."""
    home = tmp_path_factory.mktemp("home")
    model_dir = tiny.save_model(home / "tiny")
    prepare_workdir(home / "run", tiny.config(model_dir))
    state = init_state(hf.load(model_dir)[1], make_optimizer(0.9, 0.95, 1e-8, 0.0, 1.0), keep_reference=False)
    with Checkpointer(home / "run" / "checkpoints") as checkpoints:
        checkpoints.save(1, as_tree(state), {"memory": {}})
    return home / "run"


def export(*flags: str, script: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(["-c", script] if script else ["-m", "launch.export_hf"]), *flags]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)


def test_success(workdir, tmp_path):
    out = tmp_path / "out"
    done = export(f"--checkpoint={workdir}", f"--out={out}", "--dtype=bfloat16", "--max_shard_gb=0.00002")
    assert done.returncode == 0, done.stderr
    shards = list(out.glob("*.safetensors"))
    (line,) = done.stdout.splitlines()
    assert line.startswith("exported iteration 1 (") and f"in {len(shards)} files) to {out}" in line
    assert len(shards) > 1 and done.stderr == ""
    exported, trained = hf.load(out)[1], hf.load(workdir.parent / "tiny")[1]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype("bfloat16")), exported, trained)


def test_errors_are_one_line(workdir, tmp_path):
    for flags, message in (
        ((f"--checkpoint={tmp_path / 'nowhere'}", f"--out={tmp_path / 'out'}"), "nowhere does not exist; give the"),
        ((f"--checkpoint={workdir}", f"--out={workdir}"), "holds other files and no seed_jax.json"),
        ((f"--checkpoint={workdir}", f"--out={tmp_path / 'out'}", "--step=9"), "has no step 9; there are 1"),
    ):
        failed = export(*flags)
        assert failed.returncode == 2 and failed.stdout == ""
        (line,) = failed.stderr.splitlines()
        assert line.startswith("error: ") and message in line
    wrong = export(f"--checkpoint={workdir}", f"--out={tmp_path / 'out'}", "--dtype=int4")
    assert wrong.returncode != 0 and "float32|bfloat16" in wrong.stdout + wrong.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_dying_in_mid_export(workdir, tmp_path, name):
    out, number = tmp_path / "out", int(getattr(signal, name))
    flags = (f"--checkpoint={workdir}", f"--out={out}", "--max_shard_gb=0.00002")
    died = export(*flags, script=DYING, SIGNAL=str(number))
    assert died.returncode == {"SIGKILL": -9, "SIGTERM": 143}.get(name, died.returncode) != 0
    assert not out.exists()
    assert (name == "SIGKILL") == any(path.name.startswith(".out.partial-") for path in tmp_path.iterdir())
    assert export(*flags).returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "the next export clears up"

    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert export(*flags, "--dtype=bfloat16", script=DYING, SIGNAL=str(number)).returncode != 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before, "the old export is still whole"
