"""Trains a policy, or resumes it: the same command with the same workdir goes on where it stopped.

python -m launch.train --config=configs/quickstart.py[:METHOD] --workdir=DIR [--config.FIELD=VALUE ...] [--overwrite]
"""

from __future__ import annotations

import sys
from pathlib import Path

from absl import app, flags
from ml_collections import config_flags

from launch import common
from seed_jax import config as config_lib
from seed_jax.train.loop import Interrupted

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "config file, with the method after a colon", lock_config=True
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "directory of the run (created; an earlier run of the same config in it is resumed)"
)
_OVERWRITE = flags.DEFINE_bool(
    "overwrite", False, "start again in a workdir that holds another run, removing that run's files"
)


def main(_) -> int:
    config = _CONFIG.value
    try:
        common.check(config)
        common.prepare_process([config])
        common.run(config, Path(_WORKDIR.value), overwrite=_OVERWRITE.value)
    except common.INPUT_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return common.EXIT_BAD_INPUT
    except common.RUN_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return common.EXIT_FAILED
    except Interrupted:
        return common.EXIT_INTERRUPTED
    return 0


def run() -> None:
    flags.mark_flags_as_required(["config", "workdir"])
    app.run(main, flags_parser=config_lib.parse_flags)


if __name__ == "__main__":
    run()
