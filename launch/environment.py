"""Wires an environment of `envs` to the trainer: tasks of the splits, the pool that runs them, prompts and limits."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator

from envs.alfworld import engine
from envs.alfworld.domain import AlfworldDomain
from envs.alfworld.games import load_tasks
from envs.alfworld.generate import make_tasks
from envs.pool import make_pool
from seed_jax.rollout import World
from seed_jax.train.loop import Setup


class DataError(ValueError):
    """The games that a config names cannot be used; the message names the file or the field."""


@contextlib.contextmanager
def open_environment(config) -> Iterator[Setup]:
    """The environment of a config, its worker processes ended on the way out. Raises DataError."""
    if config.env.name != "alfworld":
        raise DataError(f"env.name = {config.env.name!r} is unknown; supported: 'alfworld'")
    try:
        train_tasks, panel = alfworld_tasks(config)
    except (ValueError, FileNotFoundError) as error:
        raise DataError(str(error)) from error
    factory = functools.partial(engine.make, engine=config.env.engine)
    pool = make_pool(factory, workers=config.env.workers, step_timeout_s=config.env.step_timeout_s)
    try:
        domain = AlfworldDomain(config.env.prompt, config.rollout.require_think)
        yield Setup(World(domain, pool, config.env.max_steps, config.env.history), train_tasks, panel)
    finally:
        pool.close()


def alfworld_tasks(config) -> tuple[list, list]:
    """(training tasks, evaluation panel). Damaged training games are skipped and counted; a damaged panel game is
    an error."""
    env, evaluation = config.env, config.eval
    if env.data == "generated":
        return make_tasks("train", env.train_tasks, env.size), make_tasks(evaluation.split, evaluation.games, env.size)
    train, skipped = load_tasks(env.data, "train", strict=False)
    for corrupt in skipped:
        print(f"skipped: {corrupt}", file=sys.stderr)
    if skipped:
        total = len(train) + len(skipped)
        print(f"{len(skipped)} of {total} training games in {env.data} are damaged and left out", file=sys.stderr)
    panel, _ = load_tasks(env.data, evaluation.split, strict=True)
    for name, have, want in (("env.train_tasks", train, env.train_tasks), ("eval.games", panel, evaluation.games)):
        if len(have) < want:
            raise ValueError(f"{name} = {want}, but {env.data} has {len(have)} playable games of that split; lower it")
    return train[: env.train_tasks], panel[: evaluation.games]
