"""Runs many games at once: in the driver process, or in worker processes (worker_pool.py).

A slot is the place of one running game. The driver opens slots with tasks and steps any subset of them together.
Games run in processes, never in threads: the parser inside TextWorld is not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

from envs.base import EnvError, Game, Obs, Task
from envs.slots import check_distinct, check_open, lost_episode
from envs.worker import Factory, describe, resolve, without_main_module
from envs.worker_pool import WorkerPool

RECYCLE_AFTER = 1000  # games that a worker builds before a new one takes its place


class Pool(Protocol):
    """What a rollout driver sees. An EnvError in a result means that this episode is lost; the others go on."""

    def open(self, slots: Sequence[int], tasks: Sequence[Task]) -> list[Obs | EnvError]:
        """Starts a game in each slot (ending the one that was there) and returns the first observations."""
        ...

    def step(self, slots: Sequence[int], commands: Sequence[str]) -> list[Obs | EnvError]:
        """One command for each slot, which must have been opened and not lost. Order of results: as `slots`."""
        ...

    def prefetch(self, slots: Sequence[int], tasks: Sequence[Task]) -> None:
        """Says what the next `open` will ask for and returns at once: workers that are idle build these games now.

        It changes no result, only how long that `open` takes. Games that run go on.
        """
        ...

    def stats(self) -> dict[str, int]:
        """Counts since the start: worker "restarts", "timeouts" (some of the restarts), "recycled" (replaced after many
        games), "errors" (episodes lost)."""
        ...

    def close(self) -> None: ...


def make_pool(
    factory: Factory | str,
    *,
    workers: int = 0,
    step_timeout_s: float = 60,
    max_restarts: int = 3,
    recycle_after: int = RECYCLE_AFTER,
) -> Pool:
    """A pool of games that `factory(task.source)` builds.

    factory: a top-level function of an importable module (a functools.partial of one), or its name "module:function".
    workers: processes to run the games in; 0 = this process, right for engines that cost less than a message.
    step_timeout_s: seconds that one reset or command may take in a worker.
    max_restarts: how often an episode may lose its worker and be replayed; once more, and the episode is lost.
    recycle_after: games that a worker builds before it is replaced, so that what an engine leaks is bounded.
    """
    function = resolve(factory) if isinstance(factory, str) else factory
    if workers == 0:
        return LocalPool(function)
    with without_main_module():
        try:
            ForkingPickler.dumps(factory)
        except Exception as error:
            raise ValueError(f"factory {factory} must be a top-level function of an importable module") from error
    return WorkerPool(factory, workers, step_timeout_s, max_restarts, recycle_after)


class LocalPool:
    """All games in this process: nothing to restart, and no protection against a game that hangs."""

    def __init__(self, factory: Factory):
        self._factory = factory
        self._games: dict[int, tuple[Task, Game]] = {}
        self._errors = 0

    def open(self, slots: Sequence[int], tasks: Sequence[Task]) -> list[Obs | EnvError]:
        check_distinct(slots)

        def start(slot: int, task: Task) -> Obs:
            game = self._factory(task.source)
            self._games[slot] = (task, game)
            return game.reset()

        return [self._guarded(slot, task, start, slot, task) for slot, task in zip(slots, tasks, strict=True)]

    def step(self, slots: Sequence[int], commands: Sequence[str]) -> list[Obs | EnvError]:
        check_distinct(slots)
        check_open(slots, self._games)
        results = []
        for slot, command in zip(slots, commands, strict=True):
            task, game = self._games[slot]
            results.append(self._guarded(slot, task, game.step, command))
        return results

    def prefetch(self, slots: Sequence[int], tasks: Sequence[Task]) -> None:
        """Nothing: there is no other process to build games in."""

    def stats(self) -> dict[str, int]:
        return {"restarts": 0, "timeouts": 0, "recycled": 0, "errors": self._errors}

    def close(self) -> None:
        self._games.clear()

    def _guarded(self, slot: int, task: Task, call: Callable[..., Obs], *arguments: Any) -> Obs | EnvError:
        try:
            return call(*arguments)
        except Exception as error:  # whatever a game raises costs this episode only
            self._games.pop(slot, None)
            self._errors += 1
            return lost_episode(task, describe(error))
