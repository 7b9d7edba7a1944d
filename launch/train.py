"""Trains a policy, or resumes it: the same command with the same workdir goes on where it stopped.

python -m launch.train --config=configs/quickstart.py[:METHOD] --workdir=DIR [--config.FIELD=VALUE ...] [--overwrite]

On many hosts the same command runs on each, with a workdir that all of them see. On a TPU pod they find each other;
elsewhere --distributed finds them through the cluster (Slurm, MPI, GKE), or each is told:

    ... --coordinator=HOST_OF_PROCESS_0:PORT --processes=N --process=I
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from absl import app, flags
from ml_collections import config_flags

from launch import common
from seed_jax import config as config_lib
from seed_jax.runtime import multihost
from seed_jax.runtime.signals import Interrupted

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "config file, with the method after a colon", lock_config=True
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "directory of the run (created; an earlier run of the same config in it is resumed)"
)
_OVERWRITE = flags.DEFINE_bool(
    "overwrite", False, "start again in a workdir that holds another run, removing that run's files"
)
_DISTRIBUTED = flags.DEFINE_bool("distributed", False, "many hosts, which the cluster's own variables describe")
_COORDINATOR = flags.DEFINE_string("coordinator", None, "many hosts: host:port of process 0")
_PROCESSES = flags.DEFINE_integer("processes", None, "many hosts: how many processes run this command")
_PROCESS = flags.DEFINE_integer("process", None, "many hosts: the number of this one, from 0")


def main(_) -> int:
    config = _CONFIG.value
    try:
        common.check(config)
        common.prepare_process([config])
        multihost.start(
            _COORDINATOR.value,
            _PROCESSES.value,
            _PROCESS.value,
            found=_DISTRIBUTED.value,
            timeout_s=config.mesh.host_timeout_s,
        )
        common.run(config, Path(_WORKDIR.value), overwrite=_OVERWRITE.value)
    except common.INPUT_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return multihost.leave(common.EXIT_BAD_INPUT)
    except common.RUN_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return multihost.leave(common.EXIT_FAILED)
    except Interrupted:
        return common.EXIT_INTERRUPTED
    except Exception:
        if not multihost.many():
            raise
        traceback.print_exc()
        return multihost.leave(common.EXIT_FAILED)
    return 0


def run() -> None:
    flags.mark_flags_as_required(["config", "workdir"])
    app.run(main, flags_parser=config_lib.parse_flags)


if __name__ == "__main__":
    run()
