"""Two real processes with two virtual devices each do what one process with four does; what happens to one of them is
told to the other."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

from launch.replay import examine_dump
from seed_jax.evaluate import summarize
from seed_jax.runtime import multihost
from seed_jax.runtime.alive import EXIT_LOST_HOST
from seed_jax.runtime.logging import PANEL_TRAJECTORIES_FILE, read_jsonl
from seed_jax.train.metrics import rollout_metrics
from seed_jax.types import Episode, Skill, Turn
from tests import tiny, xla
from tests.runtime.test_alive import free_address

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 15  # mesh.host_timeout_s
LIMIT_S = 240
CONFIG = (
    f"--config={ROOT / 'tests/runtime/toy_config.py'}",
    f"--config.mesh.host_timeout_s={TIMEOUT_S}",
    "--config.mesh.decode_tensor=2",  # both devices of a process hold one copy of the model
    "--config.log.diagnostics_episodes=6",
)
BROKEN = 2  # the iteration whose gradient is not finite


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("hosts")
    tiny.save_model(home / "model", steps=60)
    return home


class Host(subprocess.Popen):
    """Its output goes to a file: a pipe that nobody reads would stop it when it is full."""

    def __init__(self, command: list[str], log: Path, **settings):
        self._log = log
        with log.open("w") as output:
            super().__init__(command, stdout=output, stderr=subprocess.STDOUT, **settings)

    def said(self) -> str:
        return self._log.read_text()


def start(home: Path, workdir: Path, devices: int, host: int = 0, *flags: str, slow_s: float = 0.0) -> Host:
    environment = os.environ | {
        "HOME": str(home / f"disk{host}"),  # where the compilation cache is
        "TOY_MODEL": str(home / "model"),
        "SLOW_S": str(slow_s),
        "BROKEN": str(BROKEN),
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla.flags(devices),
    }
    command = [sys.executable, "-m", "launch.train", *CONFIG, f"--workdir={workdir}", *flags]
    return Host(command, home / f"host{host}.log", cwd=ROOT, env=environment)


@contextlib.contextmanager
def two_hosts(home: Path, workdir: Path, slow_s: float = 0.0):
    """Both processes, the environments of the second one slow; what is left of them is killed."""
    shared = [f"--coordinator={free_address()}", "--processes=2"]
    hosts = [start(home, workdir, 2, p, *shared, f"--process={p}", slow_s=p * slow_s) for p in range(2)]
    try:
        yield hosts
    finally:
        for host in hosts:
            host.kill()
            host.wait()


def finish(host: Host, code: int = 0, limit_s: float = LIMIT_S) -> str:
    host.wait(timeout=limit_s)
    assert host.returncode == code, host.said()
    return host.said()


def wait_for(what, host: Host) -> None:
    for _ in range(10 * LIMIT_S):
        if what():
            return
        assert host.poll() is None, host.said()
        time.sleep(0.1)
    raise TimeoutError(host.said())


def lines(path: Path) -> int:
    return len(read_jsonl(path)) if path.exists() else 0


@pytest.fixture(scope="module")
def one_process(home, tmp_path_factory) -> Path:
    workdir = tmp_path_factory.mktemp("one")
    finish(start(home, workdir, 4))
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
            if name != "pack/fill":  # None stands for a number that is none
                expected = None if left[name] is None else pytest.approx(left[name], abs=1e-6, rel=1e-6)
                assert right[name] == expected, name
    assert [record["update/skipped_steps"] for record in one["metrics"]] == [0, 1, 0]
    assert one["metrics"][2]["update/grad_norm"] > 1e-3 and one["metrics"][2]["opd/coverage"] > 0
    left, right = (load_file(workdir / "export" / "model.safetensors") for workdir in (one_process, two_processes))
    for name in left:
        np.testing.assert_allclose(right[name], left[name], atol=1e-6, rtol=1e-6, err_msg=name)
    tables = [json.loads((w / "summary.json").read_text())["skill_table"] for w in (one_process, two_processes)]
    cells, others = ([(k, s, c) for k, v in table.items() for s, c in v.items() if c["rows"]] for table in tables)
    assert {source for _, source, _ in cells} == {"true", "self", "wrong"}
    for (*place, cell), (*other_place, other) in zip(cells, others, strict=True):
        assert other_place == place and other == pytest.approx(cell, abs=1e-4)  # gaps are sums over replies


@pytest.mark.slow
def test_the_first_of_two_records_panel_games(one_process, two_processes):
    """Those that it plays itself, with all that one process records of them. Log-probs have three digits there."""
    one, two = (
        {(record["iteration"], record["task"]): record for record in read_jsonl(workdir / PANEL_TRAJECTORIES_FILE)}
        for workdir in (one_process, two_processes)
    )
    assert len(two) == len(one) and {iteration for iteration, _ in one.keys() & two.keys()} == {0, 3}
    seen: set[str] = set()
    for key in one.keys() & two.keys():
        left, right = one[key], two[key]
        turns = left.pop("turns"), right.pop("turns")
        assert left == right
        for turn, other in zip(*turns, strict=True):
            assert turn.keys() == other.keys()
            seen |= turn.keys()
            for name, value in turn.items():
                is_view = name in ("student", "teacher", "wrong")
                assert other[name] == (pytest.approx(value, abs=2e-3) if is_view else value), name
    assert {"student", "teacher", "wrong"} <= seen


@pytest.mark.slow
def test_a_batch_of_two_processes_is_replayed(two_processes):
    """Each of them has written the rows that it had packed; one process with other devices puts them together."""
    dump = two_processes / "dumps" / f"iteration_{BROKEN:06d}"
    assert sorted(path.name for path in dump.iterdir()) == ["dump.json", "rows_000.npz", "rows_001.npz"]
    report = examine_dump(dump)
    assert report["weights_after_iteration"] == BROKEN - 1 and report["update"]["update/skipped_steps"] == 1
    (turn,) = report["batch"]["sampled"]
    assert (turn["episode"], turn["step"]) == (0, 0) and report["scores"]["old"] == [turn]


@pytest.mark.slow
def test_killed_then_damaged_then_stopped(home, two_processes, tmp_path):
    """SIGKILL of one host ends the other in time. Of the newest checkpoint the second host's part is damaged then: both
    go back to the one before. SIGTERM to one host saves and ends both. In the end nothing is lost."""
    metrics, newest = tmp_path / "metrics.jsonl", tmp_path / "checkpoints" / "2"
    with two_hosts(home, tmp_path, slow_s=0.5) as hosts:
        wait_for(newest.is_dir, hosts[0])
        hosts[1].kill()
        killed = time.monotonic()
        message = finish(hosts[0], EXIT_LOST_HOST, 60)
        assert time.monotonic() - killed < TIMEOUT_S + 15
    assert "process 1" in message.strip().splitlines()[-1] and "it resumes after the last one" in message

    parts = [path for path in newest.rglob("*") if path.is_file() and "ocdbt.process_1" in str(path)]
    largest = max(parts, key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    with two_hosts(home, tmp_path, slow_s=0.5) as hosts:
        wait_for(lambda: lines(metrics) == 1, hosts[0])  # those of the damaged one are gone
        wait_for(lambda: lines(metrics) >= 2, hosts[0])
        hosts[1].send_signal(signal.SIGTERM)
        asked = time.monotonic()
        outputs = [finish(host, 130, 60) for host in hosts]
        assert time.monotonic() - asked < 30
    assert "resuming after iteration 1" in outputs[0] and "saved. The same command resumes." in outputs[0]
    for output in outputs:
        assert f"checkpoint {newest} cannot be read" in output and "the run goes on from step 1" in output
        assert "Traceback" not in output, "reads that were abandoned do not report"

    with two_hosts(home, tmp_path) as hosts:
        outputs += [finish(host) for host in hosts]
    assert "resuming after iteration" in outputs[2]
    assert not [output for output in outputs if "was killed or has crashed" in output], "they ended in good order"
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
