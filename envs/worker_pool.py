"""Games in worker processes that may hang or die without harm.

Games are deterministic, so a game that was lost with its worker is built again from its task and its commands.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from envs.base import EnvError, Obs, Task
from envs.slots import check_distinct, check_open, lost_episode
from envs.worker import Factory, Request, serve, without_main_module

START_TIMEOUT_S = 120.0  # for a new worker to import what it needs
STOP_TIMEOUT_S = 2.0  # for an idle worker to end by itself

_log = logging.getLogger(__name__)


@dataclass
class _Running:
    """What the driver knows of a game in a worker: enough to build it again."""

    task: Task
    commands: list[str] = field(default_factory=list)  # answered commands
    asked: tuple[str, ...] = ()  # the command that waits for its answer
    waiting: bool = True  # for an answer that the caller wants
    losses: int = 0  # workers lost while they ran this game
    error: EnvError | None = None  # lost while it was replayed; the caller learns of it at its next step


@dataclass(eq=False)
class _Worker:
    process: Any
    connection: Connection
    deadline: float
    ready: bool = False
    failed_starts: int = 0
    built: int = 0  # games
    requests: list[Request] = field(default_factory=list)  # to send when it is ready and has answered all others
    pending: list[Request] = field(default_factory=list)  # sent and not answered, in order

    @property
    def busy(self) -> bool:
        return bool(self.pending or self.requests)


class WorkerPool:
    """Slot s runs in worker s modulo the number of workers. One answer a slot.

    Beside `open` and `step`, which wait for all answers: `begin` and `send` ask, `poll` returns what has been answered.
    """

    def __init__(
        self, factory: Factory | str, workers: int, step_timeout_s: float, max_restarts: int, recycle_after: int
    ):
        self._factory = factory
        self._step_timeout_s = step_timeout_s
        self._max_restarts = max_restarts
        self._recycle_after = recycle_after
        self._running: dict[int, _Running] = {}
        self._owed: set[int] = set()  # slots whose answer the caller has not got yet
        self._stats = {"restarts": 0, "timeouts": 0, "recycled": 0, "errors": 0}
        self._workers = [self._spawn() for _ in range(workers)]

    def open(self, slots: Sequence[int], tasks: Sequence[Task]) -> list[Obs | EnvError]:
        self.begin(slots, tasks)
        return self._answers(slots)

    def step(self, slots: Sequence[int], commands: Sequence[str]) -> list[Obs | EnvError]:
        self.send(slots, commands)
        return self._answers(slots)

    def begin(self, slots: Sequence[int], tasks: Sequence[Task]) -> None:
        """As `open`, without waiting. Answers that are still owed, from an interrupted round of games, are given up."""
        check_distinct(slots)
        for slot, task in zip(slots, tasks, strict=True):
            self._running[slot] = _Running(task)
        self._owed = set(slots)
        requests = [Request(slot, True, task.source, ()) for slot, task in zip(slots, tasks, strict=True)]
        for worker, mine in self._by_worker(requests):
            if worker.busy:
                self._restart(worker, "has answers that nobody waits for", blamed=None)
            elif worker.built >= self._recycle_after and worker.process.is_alive():
                self._recycle(worker)
            else:
                self._ask(worker, mine)

    def send(self, slots: Sequence[int], commands: Sequence[str]) -> None:
        """As `step`, without waiting: each slot's answer comes from `poll`."""
        check_distinct(slots)
        check_open(slots, self._running)
        again = self._owed.intersection(slots)  # a call was interrupted: the answer to its command may still come
        requests = []
        for slot, command in zip(slots, commands, strict=True):
            game = self._running[slot]
            if game.error is None:
                game.asked, game.waiting = (command,), True
                requests.append(Request(slot, False, None, game.asked))
        self._owed |= set(slots)
        for worker, mine in self._by_worker(requests):
            if again.intersection(request.slot for request in mine):
                self._restart(worker, "was asked again before it had answered", blamed=None)
            else:
                self._ask(worker, mine)

    def prefetch(self, slots: Sequence[int], tasks: Sequence[Task]) -> None:
        check_distinct(slots)
        requests = [Request(s, True, task.source, (), ahead=True) for s, task in zip(slots, tasks, strict=True)]
        for worker, mine in self._by_worker(requests):
            if worker.ready and not worker.busy:
                worker.built += len(mine)
                with contextlib.suppress(OSError):  # it has died: the next call finds that out
                    worker.connection.send(mine)

    def poll(self, wait_for_one: bool = True) -> list[tuple[int, Obs | EnvError]]:
        """What has been answered since the last call, at least one answer if one is owed and `wait_for_one`."""
        results: dict[int, Obs] = {}
        while True:
            lost = [slot for slot in self._owed if self._running[slot].error is not None]
            waits = wait_for_one and bool(self._owed) and not (results or lost)
            if not self._receive_all(results, waits) and not waits:
                break
        lost = sorted(slot for slot in self._owed if self._running[slot].error is not None)
        answers = [*results.items(), *((slot, self._forget(slot)) for slot in lost)]
        self._owed -= {slot for slot, _ in answers}
        return answers

    def stats(self) -> dict[str, int]:
        return dict(self._stats)

    def close(self) -> None:
        """Ends all workers and waits for them. May be called again."""
        for worker in self._workers:
            if not worker.busy and worker.process.is_alive():
                try:
                    worker.connection.send(None)
                except OSError:
                    continue  # it has just died
        for worker in self._workers:
            worker.process.join(0 if worker.busy else STOP_TIMEOUT_S)
            _end(worker)
        self._workers, self._running = [], {}

    def _answers(self, slots: Sequence[int]) -> list[Obs | EnvError]:
        """Of all `slots`, in their order. Others' answers are not expected here."""
        answers: dict[int, Obs | EnvError] = {}
        while any(slot not in answers for slot in slots):
            answers.update(self.poll())
        return [answers[slot] for slot in slots]

    def _receive_all(self, results: dict[int, Obs], waits: bool) -> bool:
        """One look at the busy workers, until one speaks or its time is up if `waits`. Returns whether any had."""
        busy = [worker for worker in self._workers if worker.busy]
        timeout_s = max(0.0, min(worker.deadline for worker in busy) - time.monotonic()) if waits and busy else 0.0
        readable = wait([worker.connection for worker in busy], timeout_s)
        for worker in busy:
            if worker.connection in readable:
                self._receive(worker, results)
            elif time.monotonic() > worker.deadline and not worker.connection.poll():
                self._stats["timeouts"] += 1
                self._restart(worker, "timed out", blamed=worker.pending[0].slot if worker.pending else None)
        return bool(readable)

    def _by_worker(self, requests: list[Request]) -> list[tuple[_Worker, list[Request]]]:
        mine: dict[int, list[Request]] = {}
        for request in requests:
            mine.setdefault(request.slot % len(self._workers), []).append(request)
        return [(self._workers[index], group) for index, group in sorted(mine.items())]

    def _forget(self, slot: int) -> EnvError:
        error = self._running.pop(slot).error
        assert error is not None  # a slot without an answer is a lost one
        return error

    def _ask(self, worker: _Worker, requests: list[Request]) -> None:
        if requests and not worker.busy and not worker.process.is_alive():
            self._restart(worker, "died between two calls", blamed=None)  # which also asks what was asked now
            return
        worker.requests += requests
        self._send(worker)

    def _send(self, worker: _Worker) -> None:
        """One message at a time: a worker that writes answers does not read, and pipes have an end."""
        if not worker.ready or worker.pending or not worker.requests:
            return
        requests, worker.requests = worker.requests, []
        worker.pending = list(requests)
        worker.deadline = time.monotonic() + self._step_timeout_s
        worker.built += sum(request.build for request in requests)
        try:
            worker.connection.send(requests)
        except OSError:
            self._restart(worker, "died", blamed=None)

    def _receive(self, worker: _Worker, results: dict[int, Obs]) -> None:
        try:
            kind, content = worker.connection.recv()
        except (EOFError, OSError):
            self._restart(worker, "died", blamed=worker.pending[0].slot if worker.pending else None)
            return
        worker.deadline = time.monotonic() + self._step_timeout_s
        if kind == "ready":
            worker.ready, worker.failed_starts = True, 0
        elif kind in ("obs", "error"):
            request = worker.pending.pop(0)
            slot, game = request.slot, self._running[request.slot]
            if kind == "error":
                self._lose(game, content)
            elif request.wanted:
                game.commands += game.asked
                game.asked, game.waiting = (), False
                results[slot] = content
        self._send(worker)

    def _lose(self, game: _Running, reason: str) -> None:
        self._stats["errors"] += 1
        game.error = lost_episode(game.task, reason)

    def _restart(self, worker: _Worker, reason: str, blamed: int | None) -> None:
        """Replaces a worker that has died or hangs. blamed: the slot whose game it was playing then."""
        self._stats["restarts"] += 1
        reason = f"its worker {reason} (exit code {_end(worker)})"
        if worker.ready and blamed is not None:
            game = self._running[blamed]
            game.losses += 1
            if game.losses > self._max_restarts:
                self._lose(game, f"{reason}, {game.losses} times in this episode")
        _log.warning("an environment worker is restarted: %s", reason)
        failed_starts = 0 if worker.ready else worker.failed_starts + 1
        self._replace(worker, blamed, failed_starts)
        if failed_starts > self._max_restarts:
            raise RuntimeError(f"environment workers cannot start: {reason}; see their messages on stderr")

    def _recycle(self, worker: _Worker) -> None:
        """Replaces an idle worker that has built many games; those that still run move to the new one."""
        self._stats["recycled"] += 1
        with contextlib.suppress(OSError):
            worker.connection.send(None)
            worker.process.join(STOP_TIMEOUT_S)
        _end(worker)
        self._replace(worker, None)

    def _replace(self, worker: _Worker, blamed: int | None, failed_starts: int = 0) -> None:
        """A new worker in place of one that has ended, with everything that one knew or was asked."""
        index = self._workers.index(worker)
        self._workers[index] = replacement = self._spawn()
        replacement.failed_starts = failed_starts
        requests = [
            Request(slot, True, game.task.source, (*game.commands, *game.asked), wanted=game.waiting)
            for slot, game in self._running.items()
            if slot % len(self._workers) == index and game.error is None
        ]
        # The suspect comes first: if it kills this worker too, the others have not been replayed in vain.
        requests.sort(key=lambda request: request.slot != blamed)
        self._ask(replacement, requests)

    def _spawn(self) -> _Worker:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(there, self._factory), daemon=True, name="env-worker")
        with without_main_module():
            process.start()
        there.close()  # so that the death of the worker is the end of the pipe
        return _Worker(process, here, time.monotonic() + max(START_TIMEOUT_S, self._step_timeout_s))


def _end(worker: _Worker) -> int:
    """Makes sure that nothing is left of a worker, and returns its exit code (-9: it was killed)."""
    worker.process.kill()
    worker.process.join()
    exit_code = worker.process.exitcode
    worker.process.close()
    worker.connection.close()
    return exit_code
