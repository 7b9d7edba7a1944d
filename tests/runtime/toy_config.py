"""A config file for `launch.train` in tests that need real processes: a toy run with easy games ($SLOW_S seconds a
step), made-up skills and the model in $TOY_MODEL. In iteration $BROKEN one turn's log-probs are not numbers."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
from jax._src import compiler

from launch import common
from seed_jax.train import finish, loop, trajectories
from tests import tiny

_open = common.open_environment


class SlowPool(tiny.EasyPool):
    def step(self, slots, commands):
        time.sleep(float(os.environ.get("SLOW_S", "0")))
        return super().step(slots, commands)


@contextlib.contextmanager
def easy_environment(config):
    with _open(config) as setup:
        yield setup._replace(world=setup.world._replace(pool=SlowPool(setup.world.pool)))


_samples, _prepare = loop.batch_samples, common.prepare_process


def broken_samples(run, episodes, iteration, *rest):
    """The first turn of the iteration's first episode, on whichever host that is."""
    samples = _samples(run, episodes, iteration, *rest)
    if iteration + 1 != int(os.environ.get("BROKEN", "0")):
        return samples
    return [
        sample._replace(logprobs=np.full(len(sample.response), np.nan)) if (sample.episode, sample.step) == (0, 0) else
        sample for sample in samples
    ]  # fmt: skip


def prepare_process(configs):
    """Every program is compiled once for all tests. JAX lets only process 0 of many write down what it has compiled;
    here each has a disk of its own ($HOME)."""
    _prepare(configs)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    compiler.distributed = SimpleNamespace(global_state=SimpleNamespace(process_id=0, client=None))


def get_config():
    loop.analyze = finish.analyze = trajectories.analyze = tiny.write_skills
    common.open_environment = easy_environment
    loop.batch_samples, common.prepare_process = broken_samples, prepare_process
    config = tiny.config(Path(os.environ["TOY_MODEL"]), "seed")
    config.iterations = 3
    config.rollout.tasks = 4
    config.pack.rows_per_micro = 16
    config.optim.lr, config.optim.eps = 0.02, 1e-2  # a step that depends smoothly on the gradient
    config.eval.temperatures = (0.4,)
    config.log.diagnostics_episodes = 0
    config.log.tensorboard = False
    return config
