"""Whatever happens to a worker, the driver sees what an undisturbed run would have shown, or an EnvError."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from envs.base import EnvError, Obs, Task
from envs.pool import Pool, make_pool

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))
import toy_game  # noqa: E402  (workers import it by this name)


def make_tasks(count: int) -> list[Task]:
    return [Task(f"task-{index}", "toy", "play", {"name": index}) for index in range(count)]


@contextmanager
def opened(**arguments: object) -> Iterator[Pool]:
    pool = make_pool("toy_game:make", **arguments)
    try:
        yield pool
    finally:
        pool.close()
        assert multiprocessing.active_children() == []


def play(pool: Pool, commands: list[list[str]], disturb: dict[int, object] | None = None) -> list[list[Obs | EnvError]]:
    """Plays commands[turn][slot]; lost slots are left out of the later turns. disturb: turn -> called before it."""
    alive = list(range(len(commands[0])))
    rows = [pool.open(alive, make_tasks(len(alive)))]
    for turn, row in enumerate(commands):
        if disturb and turn in disturb:
            disturb[turn]()
        results = pool.step(alive, [row[slot] for slot in alive])
        rows.append(results)
        alive = [slot for slot, result in zip(alive, results, strict=True) if isinstance(result, Obs)]
    return rows


def kill_first_worker() -> None:
    os.kill(min(child.pid for child in multiprocessing.active_children()), signal.SIGKILL)


def stats(restarts: int, timeouts: int, errors: int, recycled: int = 0) -> dict[str, int]:
    return {"restarts": restarts, "timeouts": timeouts, "recycled": recycled, "errors": errors}


COMMANDS = [[f"turn {turn} slot {slot}" for slot in range(5)] for turn in range(4)]


@pytest.fixture(scope="module")
def undisturbed() -> list[list[Obs | EnvError]]:
    with opened() as pool:
        return play(pool, COMMANDS)


@pytest.mark.parametrize("factory", ["toy_game:make", toy_game.make, functools.partial(toy_game.make)])
def test_workers_equal_in_process(undisturbed, factory):
    pool = make_pool(factory, workers=2)
    assert play(pool, COMMANDS) == undisturbed
    assert pool.stats() == stats(0, 0, 0)
    assert len(multiprocessing.active_children()) == 2
    pool.close()
    pool.close()
    assert multiprocessing.active_children() == []


def test_subsets_and_reopened_slots():
    results = []
    for workers in (0, 2):
        with opened(workers=workers) as pool:
            first = pool.open([7, 2, 4], make_tasks(3))
            stepped = pool.step([4, 7], ["a", "b"])
            again = pool.open([7], make_tasks(1))
            results.append((first, stepped, again, pool.step([2, 7], ["c", "b"])))
    assert results[0] == results[1]
    assert results[0][2][0] == results[0][0][0] and results[0][3][1] == results[0][1][1]


def test_killed_between_and_during_calls_changes_nothing(undisturbed):
    with opened(workers=2) as pool:
        assert play(pool, COMMANDS, {1: kill_first_worker, 3: kill_first_worker}) == undisturbed
        assert pool.stats() == stats(2, 0, 0)

    slow = [*COMMANDS[:2], ["look", "look", "sleep 0.6", "look", "sleep 0.6"], *COMMANDS[2:]]
    with opened() as pool:
        expected = play(pool, slow)
    timer = threading.Timer(0.3, kill_first_worker)  # slots 2 and 4 share the first worker with slot 0
    with opened(workers=2) as pool:
        assert play(pool, slow, {2: timer.start}) == expected
        assert pool.stats() == stats(1, 0, 0)


def test_game_that_kills_its_worker_once_is_replayed(tmp_path):
    commands = [["a", "b"], ["c", f"kill {tmp_path / 'once'}"], ["d", "e"]]
    with opened(workers=1) as pool:
        disturbed = play(pool, commands)
        assert pool.stats() == stats(1, 0, 0)
    with opened() as pool:  # now the file exists, so nothing is killed
        assert play(pool, commands) == disturbed


def test_crash_loop_costs_one_episode():
    commands = [["a", "b", "c"], ["d", "kill", "f"], ["g", "h", "i"]]
    with opened(workers=1, max_restarts=2) as pool:
        rows = play(pool, commands)
        assert pool.stats() == stats(3, 0, 1)
        with pytest.raises(ValueError, match=r"no game runs in slots \[1\]"):
            pool.step([0, 1], ["x", "y"])
        assert isinstance(pool.open([1], make_tasks(1))[0], Obs)
    lost = rows[2][1]
    assert isinstance(lost, EnvError)
    assert str(lost) == "task task-1: its worker died (exit code -9), 3 times in this episode"
    with opened() as pool:
        expected = play(pool, [[row[0], row[2]] for row in commands])
    # Slot 2 plays task 2 in one case and task 1 in the other, so only slot 0 can be compared by text.
    assert [row[0] for row in rows] == [row[0] for row in expected]
    assert all(isinstance(row[-1], Obs) for row in rows)


def test_hanging_game_times_out():
    with opened(workers=1, step_timeout_s=0.3, max_restarts=1) as pool:
        start = time.monotonic()
        rows = play(pool, [["a", "b"], ["c", "sleep 60"], ["d"]])
        assert time.monotonic() - start < 10
        assert pool.stats() == stats(2, 2, 1)
    assert "timed out" in str(rows[2][1])
    with opened() as pool:
        assert [row[0] for row in play(pool, [["a"], ["c"], ["d"]])] == [row[0] for row in rows]


def test_time_limit_is_for_one_command_not_for_a_batch_or_a_replay():
    commands = [["sleep 0.2"] * 4, ["sleep 0.2"] * 4]
    with opened() as pool:
        expected = play(pool, commands)
    with opened(workers=1, step_timeout_s=0.5) as pool:
        assert play(pool, commands, {1: kill_first_worker}) == expected
        assert pool.stats() == stats(1, 0, 0)


def test_games_built_ahead_are_used_and_change_nothing(tmp_path):
    """The sources write down when they are built; a broken one is only heard of when it is opened."""
    log = tmp_path / "built"
    tasks = [Task(f"task-{i}", "toy", "play", {"name": i, "log": str(log)}) for i in range(4)]
    broken = Task("task-bad", "toy", "play", {"broken": True})

    def built() -> list[str]:
        return log.read_text().split() if log.exists() else []

    with opened() as pool:
        pool.prefetch([0], tasks[:1])
        assert built() == []
        expected = pool.open([0, 1, 2, 3], tasks), pool.step([0, 1, 2, 3], list("abcd"))
    log.unlink()
    with opened(workers=2) as pool:
        pool.prefetch([0], tasks[:1])  # before the workers have started: nothing to gain
        pool.open([0, 1], tasks[2:])
        pool.prefetch([0, 1, 2, 4], [*tasks[:3], broken])
        deadline = time.monotonic() + 10
        while len(built()) < 5:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert pool.step([0], ["x"])[0].text != expected[1][0].text  # the running game is still another one
        other = Task("task-4", "toy", "play", {"name": 4, "log": str(log)})
        pool.open([2], [other])  # not what was announced: that stays for later
        assert len(built()) == 6
        assert (pool.open([0, 1, 2, 3], tasks), pool.step([0, 1, 2, 3], list("abcd"))) == expected
        assert len(built()) == 7 and built()[-1] == "3"
        assert str(pool.open([4], [broken])[0]) == "task task-bad: ValueError: no such game"
        assert pool.stats() == stats(0, 0, 1)


def test_a_long_time_ahead_is_not_a_time_out():
    tasks = [Task(f"task-{i}", "toy", "play", {"name": i, "seconds": 0.2}) for i in range(6)]
    with opened(workers=1, step_timeout_s=0.6) as pool:
        pool.open([0], make_tasks(1))
        pool.prefetch(list(range(1, 7)), tasks)
        assert isinstance(pool.step([0], ["a"])[0], Obs)  # waits for all that was begun before it: 1.2 seconds
        assert pool.stats() == stats(0, 0, 0)


def test_workers_are_replaced_after_many_games(undisturbed):
    with opened(workers=2, recycle_after=4) as pool:
        pids = {child.pid for child in multiprocessing.active_children()}
        for _ in range(2):
            assert play(pool, COMMANDS) == undisturbed
        pool.step([1], ["more"])
        row = pool.open([0, 2], make_tasks(2))  # slots 0, 2 and 4 share a worker; the game in slot 4 goes on
        assert pool.stats()["recycled"] >= 1 and pool.stats()["restarts"] == 0
        assert pids != {child.pid for child in multiprocessing.active_children()}
        after = pool.step([4, 1, 0], ["x", "y", "z"])
    with opened() as pool:
        play(pool, COMMANDS)
        pool.step([1], ["more"])
        assert pool.open([0, 2], make_tasks(2)) == row
        assert pool.step([4, 1, 0], ["x", "y", "z"]) == after


@pytest.mark.parametrize("workers", [0, 1])
def test_exception_in_a_game_costs_only_its_episode(workers):
    with opened(workers=workers) as pool:
        broken = Task("task-bad", "toy", "play", {"broken": True})
        first, bad, last = pool.open([0, 1, 2], [make_tasks(1)[0], broken, make_tasks(1)[0]])
        assert str(bad) == "task task-bad: ValueError: no such game" and isinstance(bad, EnvError)
        assert first == last
        lost, kept = pool.step([0, 2], ["raise here", "a"])
        assert str(lost) == "task task-0: KeyError: 'here'" and isinstance(kept, Obs)
        assert pool.stats() == stats(0, 0, 2)
        with pytest.raises(ValueError, match=r"no game runs in slots \[0, 1\]"):
            pool.step([0, 1], ["a", "a"])


@pytest.mark.parametrize("workers", [0, 1])
def test_misuse_is_refused(workers):
    with opened(workers=workers) as pool:
        with pytest.raises(ValueError, match="a slot is named twice"):
            pool.open([0, 0], make_tasks(2))
        with pytest.raises(ValueError):
            pool.open([0, 1], make_tasks(1))
        assert pool.open([], []) == [] and pool.step([], []) == []


def test_impossible_factories():
    with pytest.raises(ValueError, match="must look like 'module:function'"):
        make_pool("toy_game.make")
    with pytest.raises(ModuleNotFoundError):
        make_pool("no_such_module:make", workers=1)
    with pytest.raises(AttributeError, match="no_such_function"):
        make_pool("toy_game:no_such_function")
    with pytest.raises(ValueError, match="must be a top-level function"):
        make_pool(lambda source: toy_game.ToyGame(source), workers=1)
    assert multiprocessing.active_children() == []


def test_workers_that_cannot_start(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text(
        "import multiprocessing, toy_game\n"
        "make = toy_game.make\n"
        "if multiprocessing.parent_process():\n    raise ImportError('not in a worker')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    pool = make_pool("only_here:make", workers=1, max_restarts=1)
    with pytest.raises(RuntimeError, match=r"environment workers cannot start: .*exit code 1"):
        pool.open([0], make_tasks(1))
    pool.close()
    assert multiprocessing.active_children() == []


DRIVER = """
import jax  # what a training script imports; its workers must not, nor need a __main__ guard
import sys
from envs.base import Task
from envs.pool import make_pool
pool = make_pool("toy_game:make", workers=1)
pool.open([0], [Task("task", "toy", "play", {"name": 0})])
names = pool.step([0], ["modules"])[0].text.split()
print("jax" in names, "numpy" in names, pool._workers[0].process.pid, flush=True)
pool.step([0], ["sleep 60"])
"""


def test_worker_does_not_import_the_driver_and_dies_with_it(tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    driver = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        has_jax, has_numpy, pid = driver.stdout.readline().split()
        assert (has_jax, has_numpy) == ("False", "False")
        time.sleep(0.2)  # the worker is now busy
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()
    deadline = time.monotonic() + 10
    while is_running(int(pid)):
        assert time.monotonic() < deadline, "the worker outlived its driver"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # dead; whoever adopted it has not noticed yet


def test_who_answers_first_is_served_first():
    with opened() as pool:
        pool.open([0, 1], make_tasks(2))
        slow, first, second = *pool.step([0, 1], ["sleep 1.0", "a"]), *pool.step([1], ["b"])
    with opened(workers=2) as pool:
        pool.begin([0, 1], make_tasks(2))
        assert pool.poll(False) == [], "workers take longer than that to start"
        opening = {}
        while len(opening) < 2:
            opening |= dict(pool.poll())
        pool.send([0, 1], ["sleep 1.0", "a"])
        assert pool.poll() == [(1, first)]
        pool.send([1], ["b"])
        assert pool.poll() == [(1, second)]
        assert pool.poll(False) == []
        kill_first_worker()  # in the middle of its command
        assert pool.poll() == [(0, slow)] and pool.poll() == []
        assert pool.stats()["restarts"] == 1


def test_answers_that_nobody_waited_for_are_not_mistaken_for_others():
    with opened() as pool:
        pool.open([0, 2], make_tasks(2))
        expected = pool.step([0, 2], ["a", "b"])
    with opened(workers=2) as pool:  # slots 0 and 2 share a worker
        pool.open([0, 2], make_tasks(2))
        pool.send([0], ["sleep 0.3"])
        assert pool.open([0, 2], make_tasks(2)) and pool.step([0, 2], ["a", "b"]) == expected
