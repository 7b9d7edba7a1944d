"""What the records of the trajectory page cost: processor time of them over that of the iteration or evaluation.

    python -m benchmarks.trajectories --iterations=4

A run of configs/quickstart.py (or --config) with records in every iteration. The first iteration and the first
evaluation, which compile, do not count. Processor time of the process is not disturbed by others on the machine, as
time on the clock is. Further arguments --config.FIELD=VALUE go to the run.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from absl import app, flags

from launch import common
from launch.settings import build, parse_overrides
from seed_jax.train import loop, trajectories

WHOLE = {"_iteration": "record_rollout", "_evaluate": "record_panel"}  # of loop: that of trajectories which is in it


def timed(module: Any, name: str, seconds: dict[str, list[float]]) -> None:
    """Notes the processor time of every call. What they return is on the host already, so nothing is left running."""
    function = getattr(module, name)

    def measured(*arguments: Any) -> Any:
        start = time.process_time()
        result = function(*arguments)
        seconds[name].append(time.process_time() - start)
        return result

    setattr(module, name, measured)


def main(argv: list[str]) -> int:
    overrides = {"log.trajectories_every": "1", "iterations": str(flags.FLAGS.iterations), **parse_overrides(argv[1:])}
    config = build(flags.FLAGS.config, {}, overrides)
    common.check(config)
    common.prepare_process([config])
    seconds: dict[str, list[float]] = defaultdict(list)
    for whole, part in WHOLE.items():
        timed(trajectories, part, seconds)
        timed(loop, whole, seconds)
    with tempfile.TemporaryDirectory() as folder:
        common.run(config, Path(folder) / "run")
    episodes = config.rollout.tasks * config.rollout.group
    played = {
        "_iteration": f"{config.log.trajectories_per_iteration} of {episodes} episodes of an iteration",
        "_evaluate": f"{config.log.trajectories_panel} of {config.eval.games} games of an evaluation",
    }
    for whole, part in WHOLE.items():
        parts, wholes = (sum(seconds[name][1:]) for name in (part, whole))
        print(f"{played[whole]}: {parts:.2f} of {wholes:.2f} s of the processor, {parts / wholes:.1%}")
    return 0


if __name__ == "__main__":
    flags.DEFINE_string("config", "configs/quickstart.py", "config file, with the method after a colon")
    flags.DEFINE_integer("iterations", 4, "of the run", lower_bound=2)
    app.run(main, flags_parser=lambda argv: flags.FLAGS(argv, known_only=True))
