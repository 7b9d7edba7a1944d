"""Trains a policy, or resumes it: the same command with the same workdir goes on where it stopped.

python -m launch.train --config=configs/quickstart.py[:METHOD] --workdir=DIR [--config.FIELD=VALUE ...] [--overwrite]
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import jax
from absl import app, flags
from ml_collections import config_flags

from launch.environment import DataError, open_environment
from seed_jax import config as config_lib
from seed_jax.runtime.host import keep_freed_memory, use_every_core
from seed_jax.runtime.logging import WorkdirError, prepare_workdir
from seed_jax.train.loop import Interrupted, train

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "config file, with the method after a colon", lock_config=True
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "directory of the run (created; an earlier run of the same config in it is resumed)"
)
_OVERWRITE = flags.DEFINE_bool(
    "overwrite", False, "start again in a workdir that holds another run, removing that run's files"
)

EXIT_INTERRUPTED = 130


def main(_) -> int:
    config, workdir = _CONFIG.value, Path(_WORKDIR.value)
    try:
        config_lib.check(config)
        resuming = prepare_workdir(workdir, config, _OVERWRITE.value)
    except (config_lib.ConfigError, WorkdirError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for warning in config_lib.warnings(config):
        print(f"warning: {warning}", file=sys.stderr)
    keep_freed_memory()
    use_every_core(min(config.pack.rows_per_micro, config.rollout.batch // 4))
    logging.getLogger("absl").setLevel(logging.WARNING)
    jax.config.update("jax_compilation_cache_dir", str(Path.home() / ".cache" / "seed_jax" / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    try:
        with open_environment(config) as setup:
            train(config, setup, workdir, resuming=resuming)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Interrupted:
        return EXIT_INTERRUPTED
    return 0


def run() -> None:
    flags.mark_flags_as_required(["config", "workdir"])
    app.run(main, flags_parser=config_lib.parse_flags)


if __name__ == "__main__":
    run()
