"""Wires an environment of `envs` to the trainer: tasks of the splits, the pool that runs them, prompts and limits."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from envs.alfworld import engine, manifest
from envs.alfworld.domain import AlfworldDomain
from envs.alfworld.games import fraction_of, load_tasks
from envs.alfworld.generate import make_tasks
from envs.pool import make_pool
from launch import worlds
from seed_jax.rollout import World
from seed_jax.runtime import multihost
from seed_jax.runtime.host import usable_cores
from seed_jax.runtime.logging import GAMES_FILE, write_whole
from seed_jax.train.run import Setup

GENERATED, OFFICIAL = "generated", "official"  # choices of env.data besides a directory
GENERATED_PANEL = 192  # games of a panel where the config asks for all and there is no end of them
# What unusable games raise: told in one line.
_GAME_ERRORS = (ValueError, FileNotFoundError)


class DataError(ValueError):
    """The games that a config names cannot be used; the message names the file or the field."""


@contextlib.contextmanager
def open_environment(config) -> Iterator[Setup]:
    """The environment of a config, its worker processes ended on the way out. Raises DataError."""
    _check_name(config)
    try:
        train_tasks, panel = tasks_of(config)
    except _GAME_ERRORS as error:
        raise DataError(str(error)) from error
    with open_world(config, [train_tasks[0], panel[0]]) as world:
        yield Setup(world, train_tasks, panel)


@contextlib.contextmanager
def open_world(config, samples: Sequence[Any]) -> Iterator[World]:
    """Prompts, limits and the pool for games such as `samples` (which decide whether worker processes are needed)."""
    if config.env.name in worlds.NAMES:
        with contextlib.ExitStack() as stack:
            try:
                world = stack.enter_context(worlds.open_world(config, samples[0]))
            except _GAME_ERRORS as error:
                raise DataError(str(error)) from error
            yield world
        return
    factory = functools.partial(engine.make, engine=config.env.engine)
    pool = make_pool(factory, workers=_workers(config, samples), step_timeout_s=config.env.step_timeout_s)
    try:
        domain = AlfworldDomain(config.env.prompt, config.rollout.require_think, config.env.engine)
        yield World(domain, pool, config.env.max_steps, config.env.history)
    finally:
        pool.close()


def _check_name(config) -> None:
    supported = ("alfworld", *worlds.NAMES)
    if config.env.name not in supported:
        raise DataError(f"env.name = {config.env.name!r} is unknown; supported: {', '.join(map(repr, supported))}")


def _workers(config, samples: Sequence[Any]) -> int:
    """Our engine is cheaper than a message to a worker; TextWorld's may hang or die, and takes a core for itself."""
    if config.env.workers:
        return config.env.workers
    chosen = {config.env.engine}
    if config.env.engine == "auto":
        try:
            chosen = {engine.engine_for(task.source) for task in samples}
        except _GAME_ERRORS as error:
            raise DataError(str(error)) from error
    return 0 if chosen == {"native"} else usable_cores()


def tasks_of(config) -> tuple[list, list]:
    """(training tasks, evaluation panel). Raises ValueError or FileNotFoundError for what cannot be used."""
    return (alfworld_tasks if config.env.name == "alfworld" else other_tasks)(config)


def alfworld_tasks(config) -> tuple[list, list]:
    """(training tasks, evaluation panel). Damaged training games are skipped and counted; a damaged panel game is
    an error."""
    env = config.env
    if env.data == GENERATED:
        train = make_tasks("train", env.train_tasks, env.size)
    else:
        train, skipped = load_tasks(_root(config), "train", strict=False)
        for corrupt in skipped:
            print(f"skipped: {corrupt}", file=sys.stderr)
        total = len(train) + len(skipped)
        if skipped:
            print(f"{len(skipped)} of {total} training games in {env.data} are damaged and left out", file=sys.stderr)
        _check_count("env.train_tasks", env.train_tasks, total, env.data)
        train = train[: env.train_tasks]
    return _fraction(config, train), panel_tasks(config)


def other_tasks(config) -> tuple[list, list]:
    """(training tasks, evaluation panel) of the other environments, where env.train_tasks is an upper bound."""
    return _fraction(config, worlds.split_tasks(config, "train", config.env.train_tasks)), panel_tasks(config)


def _fraction(config, train: list) -> list:
    train = fraction_of(train, config.env.data_fraction, config.seed)
    if len(train) < config.rollout.tasks:
        raise ValueError(
            f"env.data_fraction = {config.env.data_fraction:g} leaves {len(train)} training tasks, but an iteration "
            f"plays rollout.tasks = {config.rollout.tasks}; raise the one or lower the other"
        )
    return train


def panel_tasks(config, split: str | None = None, games: int | None = None) -> list:
    """The frozen panel of a split (default: the config's): the first games in the order of their names; a damaged one
    is an error. games: how many, 0 = all."""
    _check_name(config)
    split = config.eval.split if split is None else split
    games = config.eval.games if games is None else games
    if config.env.name in worlds.NAMES:
        panel = worlds.split_tasks(config, split, games)
        _check_count("eval.games", games, len(panel), config.env.data)
        return panel[: games or None]
    if config.env.data == GENERATED:
        return make_tasks(split, games or GENERATED_PANEL, config.env.size)
    panel, _ = load_tasks(_root(config), split, strict=True)
    _check_count("eval.games", games, len(panel), config.env.data)
    return panel[: games or None]


def _root(config) -> str | None:
    """None: the directory that $ALFWORLD_DATA names."""
    return None if config.env.data == OFFICIAL else config.env.data


def _check_count(field: str, want: int, have: int, data: str) -> None:
    if have < want:
        raise ValueError(f"{field} = {want}, but {data} has {have} playable games of that split; lower it")


def record_games(config, setup: Setup, workdir: Path) -> None:
    """Writes which games the run is made of, or, if it is resumed, checks that they are still the same."""
    now = {
        "format": manifest.FORMAT,
        "train": manifest.of_games(setup.train_tasks),
        "panel": {"split": config.eval.split, **manifest.of_games(setup.panel)},
    }
    multihost.require_same("the set of games", {part: now[part]["sha256"] for part in ("train", "panel")})
    multihost.from_first(lambda: _write_or_compare(config, now, workdir))


def _write_or_compare(config, now: dict, workdir: Path) -> None:
    recorded = recorded_games(workdir)
    if recorded is None:
        write_whole(workdir / GAMES_FILE, json.dumps(now, indent=1) + "\n")
        return
    for part in ("train", "panel"):
        if recorded[part]["sha256"] != now[part]["sha256"]:
            raise DataError(
                f"the {part} games are not those that the run in {workdir} began with ({recorded[part]['count']} "
                f"games, now {now[part]['count']}): what is in {config.env.data} has changed; choose another --workdir"
            )


def recorded_games(workdir: Path) -> dict | None:
    """What `record_games` wrote; None if there is nothing."""
    path = workdir / GAMES_FILE
    if not path.is_file():
        return None
    try:
        recorded = json.loads(path.read_text())
        return {part: {**recorded[part], "games": dict(recorded[part]["games"])} for part in ("train", "panel")}
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error}); remove it to do without the check of the games") from error
