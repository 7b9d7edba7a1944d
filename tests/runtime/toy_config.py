"""A config file for `launch.train` in tests that need real processes: a toy run with easy games ($SLOW_S seconds a
step), made-up skills and the model in $TOY_MODEL."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from launch import common
from seed_jax.train import loop
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


def get_config():
    loop.analyze, common.open_environment = tiny.write_skills, easy_environment
    config = tiny.config(Path(os.environ["TOY_MODEL"]), "seed")
    config.iterations = 3
    config.rollout.tasks = 4
    config.pack.rows_per_micro = 16
    config.optim.lr, config.optim.eps = 0.02, 1e-2  # a step that depends smoothly on the gradient
    config.eval.temperatures = (0.4,)
    config.log.diagnostics_episodes = 0
    config.log.tensorboard = False
    return config
