"""Two real processes with four virtual devices each do what one process with eight does; what happens to one of them is
told to the other."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

from seed_jax.evaluate import summarize
from seed_jax.runtime import multihost
from seed_jax.runtime.logging import read_jsonl
from seed_jax.train.metrics import rollout_metrics
from seed_jax.types import Episode, Skill, Turn
from tests import tiny

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 15  # mesh.host_timeout_s
LIMIT_S = 240


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("hosts")
    tiny.save_model(home / "model", steps=60)
    return home


def start(home: Path, workdir: Path, devices: int, *flags: str, slow_s: float = 0.0) -> subprocess.Popen:
    environment = os.environ | {
        "HOME": str(home / flags[-1].lstrip("-") if flags else home),  # where the compilation cache is
        "TOY_MODEL": str(home / "model"),
        "SLOW_S": str(slow_s),
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0",
    }
    config = [f"--config={ROOT / 'tests/runtime/toy_config.py'}", f"--config.mesh.host_timeout_s={TIMEOUT_S}"]
    command = [sys.executable, "-m", "launch.train", *config, f"--workdir={workdir}", *flags]
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=-1, stderr=subprocess.STDOUT)


@contextlib.contextmanager
def two_hosts(home: Path, workdir: Path, slow_s: float = 0.0):
    """Both processes, the environments of the second one slow; what is left of them is killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = [f"--coordinator=127.0.0.1:{port}", "--processes=2"]
    hosts = [start(home, workdir, 4, *shared, f"--process={p}", slow_s=p * slow_s) for p in range(2)]
    try:
        yield hosts
    finally:
        for host in hosts:
            host.kill()
            host.communicate()


def finish(host: subprocess.Popen, code: int = 0, limit_s: float = LIMIT_S) -> str:
    output, _ = host.communicate(timeout=limit_s)
    assert host.returncode == code, output
    return output


def wait_for_lines(path: Path, count: int) -> None:
    for _ in range(10 * LIMIT_S):
        if path.exists() and len(read_jsonl(path)) >= count:
            return
        time.sleep(0.1)
    raise TimeoutError(f"{path} has not got {count} lines")


@pytest.fixture(scope="module")
def one_process(home, tmp_path_factory) -> Path:
    workdir = tmp_path_factory.mktemp("one")
    finish(start(home, workdir, 8))
    return workdir


@pytest.fixture(scope="module")
def two_processes(home, tmp_path_factory) -> Path:
    """The second host's environments take a fifth of a second a step: the first one waits and nothing else changes."""
    workdir = tmp_path_factory.mktemp("two")
    with two_hosts(home, workdir, slow_s=0.2) as hosts:
        first, second = (finish(host) for host in hosts)
    assert "[3/3]" in first and "[3/3]" not in second
    return workdir


@pytest.mark.slow
def test_two_processes_equal_one(one_process, two_processes):
    """The same episodes and evaluations. Losses and weights differ by rounding: each host packs its own rows, and sums
    over devices are taken in another order."""
    one, two = tiny.outcome(one_process, 3), tiny.outcome(two_processes, 3)
    assert two["episodes"] == one["episodes"] and len(one["episodes"]) == 3 * 8
    assert two["evaluations"] == one["evaluations"]
    for left, right in zip(one["metrics"], two["metrics"], strict=True):
        assert left.keys() == right.keys()
        for name in left:
            if name != "pack/fill":
                assert right[name] == pytest.approx(left[name], abs=1e-6, rel=1e-6), name
        assert left["update/grad_norm"] > 1e-3 and left["opd/coverage"] > 0
    left, right = (load_file(workdir / "export" / "model.safetensors") for workdir in (one_process, two_processes))
    for name in left:
        np.testing.assert_allclose(right[name], left[name], atol=1e-6, rtol=1e-6, err_msg=name)


@pytest.mark.slow
def test_one_host_is_stopped_then_one_is_killed(home, two_processes, tmp_path):
    """SIGTERM to one host saves and ends both; SIGKILL of one ends the other in time; in the end nothing is lost."""
    with two_hosts(home, tmp_path, slow_s=0.5) as hosts:
        wait_for_lines(tmp_path / "metrics.jsonl", 1)
        hosts[1].send_signal(signal.SIGTERM)
        asked = time.monotonic()
        outputs = [finish(host, 130, 60) for host in hosts]
        assert time.monotonic() - asked < 30
    assert "saved. The same command resumes." in outputs[0]
    with two_hosts(home, tmp_path, slow_s=0.5) as hosts:
        wait_for_lines(tmp_path / "metrics.jsonl", 2)
        hosts[1].kill()
        killed = time.monotonic()
        message = finish(hosts[0], multihost.EXIT_LOST_HOST, 60)
        assert time.monotonic() - killed < TIMEOUT_S + 15
    assert f"nothing was heard of process 1 for {TIMEOUT_S} s" in message and "resumes" in message
    with two_hosts(home, tmp_path) as hosts:
        outputs = [finish(host) for host in hosts]
    assert "resuming after iteration" in outputs[0]
    assert tiny.outcome(tmp_path, 3) == tiny.outcome(two_processes, 3)


# -- one process -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("host:1", 2, None), "process = None either all"),
        ((None, None, 1), "coordinator = None"),
        (("host:1", 2, 2), "process = 2 must be at least 0 and below processes = 2"),
    ],
)
def test_hosts_that_are_half_described(arguments, message):
    with pytest.raises(multihost.HostError, match=message):
        multihost.start(*arguments)


def test_variables_must_be_numbers(monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "two")
    with pytest.raises(multihost.HostError, match=r"\$JAX_NUM_PROCESSES = 'two'"):
        multihost.start("host:1", None, 0)


def test_one_process_does_nothing(monkeypatch):
    for name in ("JAX_COORDINATOR_ADDRESS", "TPU_WORKER_HOSTNAMES"):
        monkeypatch.delenv(name, raising=False)
    assert multihost.start() is False and not multihost.many() and multihost.leads()
    assert multihost.share(5) == slice(0, 5) and multihost.agree_max([3, True]) == [3, 1]
    assert multihost.gather_json({"a": 1}) == [{"a": 1}] and multihost.from_first(lambda: "x") == "x"


def test_rows_of_the_mesh_must_belong_to_hosts():
    def mesh(*rows):
        return SimpleNamespace(
            devices=[[SimpleNamespace(process_index=process) for process in row] for row in rows],
            shape={"fsdp": len(rows), "tensor": len(rows[0])},
        )

    multihost.check_rows(mesh((0, 0), (1, 1), (0, 0), (1, 1)))
    with pytest.raises(multihost.HostError, match=r"mesh\.tensor = 2 puts row 1 of the mesh on several hosts"):
        multihost.check_rows(mesh((0, 0), (0, 1), (1, 1)))
    with pytest.raises(multihost.HostError, match=r"rows of the mesh by process: \{0: 2, 1: 1\}"):
        multihost.check_rows(mesh((0,), (0,), (1,)))


def test_shares_of_many_hosts_are_whole(monkeypatch):
    monkeypatch.setattr(multihost.jax, "process_count", lambda: 3)
    parts = []
    for process in range(3):
        monkeypatch.setattr(multihost.jax, "process_index", lambda process=process: process)
        parts.append(list(range(10))[multihost.share(10)])
    assert [*itertools.chain(*parts)] == list(range(10)) and {len(part) for part in parts} == {3, 4}


# -- many hosts, made up -----------------------------------------------------------------------------------------------


@pytest.fixture
def two_made_up(monkeypatch):
    """`gather_json` finds what this host says, and what is put into the list as the other host's words."""
    other: list = []
    monkeypatch.setattr(multihost, "many", lambda: True)
    monkeypatch.setattr(multihost, "gather_json", lambda value: json.loads(json.dumps([value, *other])))
    return other


def episode(index: int, *, won: bool, turns: int, skill: bool = False, error: str | None = None) -> Episode:
    made = [Turn("p", [1], [2] * (n + 1), np.zeros(n + 1), "o", "r", "c", n % 2 == 0, n % 3 == 0) for n in range(turns)]
    told = Skill("s", "lesson") if skill else None
    return Episode(
        "task", "abc"[index % 3], "goal", index // 2, index, made, 10.0 * won, won, {"score": index / 3}, error, told
    )


def test_metrics_of_gathered_episodes_are_those_of_the_episodes(two_made_up):
    whole = [
        episode(i, won=i % 3 == 0, turns=1 + i % 4, skill=i % 2 == 0, error="lost" * (i == 5) or None) for i in range(9)
    ]
    two_made_up.append([multihost._outline(e) for e in whole[:4]])  # out of order
    gathered = multihost.gather_episodes(whole[4:])
    counts = Counter(prompt_truncated=2)
    assert rollout_metrics(gathered, counts) == rollout_metrics(whole, counts)
    assert summarize(gathered) == summarize(whole)
    assert [e.skill is not None for e in gathered] == [e.skill is not None for e in whole]


def test_counts_are_added_and_seconds_are_the_longest(two_made_up):
    two_made_up.append({"analyzed": 3, "play_s": 2.5, "rejected/too_short": 1})
    total = multihost.sum_counters(Counter(analyzed=2, play_s=4.0))
    assert total == Counter({"analyzed": 5, "play_s": 4.0, "rejected/too_short": 1})


def test_hosts_that_differ_are_named(two_made_up):
    two_made_up.append("0f")
    multihost.require_same("the config", "0f")
    with pytest.raises(multihost.HostError, match="the config of process 1 differs from that of process 0"):
        multihost.require_same("the config", "1a")
