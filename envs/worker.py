"""The life of a worker process: it builds games, plays commands and answers until the driver lets it go."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from envs.base import Game, Obs

Factory = Callable[[Any], Game]


class Request(NamedTuple):
    """To a worker: build the game if asked to, play the commands, answer with the last observation.

    ahead: build it for a later request, and do not answer.
    wanted: the caller waits for the answer; False for a game that is only built again
    """

    slot: int
    build: bool
    source: Any
    commands: tuple[str, ...]
    ahead: bool = False
    wanted: bool = True


def serve(connection: Connection, factory: Factory | str) -> None:
    """The life of a worker: takes lists of requests until the driver closes the pipe or says None."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which then closes the pool
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    build = resolve(factory) if isinstance(factory, str) else factory
    games: dict[int, Game] = {}
    ahead: dict[int, _Ahead] = {}
    try:
        connection.send(("ready", None))
        while (requests := connection.recv()) is not None:
            for request in requests:
                if request.ahead:
                    _build_ahead(ahead, build, request)
                    connection.send(("alive", None))  # the driver may have started to wait for something else
                else:
                    connection.send(_play(games, ahead, build, request, connection))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the driver is gone


class _Ahead(NamedTuple):
    """A game that was built before it was asked for, with its first observation."""

    source: Any
    game: Game
    observation: Obs


def _build_ahead(ahead: dict[int, _Ahead], build: Factory, request: Request) -> None:
    ahead.pop(request.slot, None)
    with contextlib.suppress(Exception):  # it will be raised again when the game is asked for
        game = build(request.source)
        ahead[request.slot] = _Ahead(request.source, game, game.reset())


def _play(
    games: dict[int, Game], ahead: dict[int, _Ahead], build: Factory, request: Request, connection: Connection
) -> tuple[str, Any]:
    try:
        if request.build:
            games.pop(request.slot, None)
            if request.slot in ahead and ahead[request.slot].source == request.source:
                _, games[request.slot], observation = ahead.pop(request.slot)
            else:
                games[request.slot] = build(request.source)
                observation = games[request.slot].reset()
        for command in request.commands:
            if request.build:
                connection.send(("alive", None))  # the time limit is for one command, not for a whole replay
            observation = games[request.slot].step(command)
        return "obs", observation
    except (BrokenPipeError, ConnectionResetError):
        raise
    except Exception as error:  # whatever a game raises costs this episode only
        games.pop(request.slot, None)
        return "error", describe(error)


def _exit_with_parent() -> None:
    """The pipe does not tell a worker that is busy with a game; this does."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def resolve(name: str) -> Factory:
    module, _, function = name.partition(":")
    if not function:
        raise ValueError(f"factory {name!r} must look like 'module:function'")
    return getattr(importlib.import_module(module), function)


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def without_main_module() -> Iterator[None]:
    """A spawned process imports the main module of its parent, hence JAX with it: hide that module meanwhile."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
