"""Recomputes an update that went wrong, from what a run has dumped, and says which rows and terms are not finite.

python -m launch.replay --dump=WORKDIR/dumps/iteration_000012 [--checkpoint=STEP] [--json]

On one host, with any number of devices. The weights are those of the run's checkpoint before that iteration, if there
is one; else the nearest that there is, which is said. Nothing in the workdir is changed. Exit code 0: everything is
finite here; 1: something is not.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from ml_collections import ConfigDict

from launch import common
from seed_jax import sharding
from seed_jax.models import hf
from seed_jax.runtime.checkpoint import Checkpointer, CheckpointError
from seed_jax.runtime.logging import jsonable
from seed_jax.train import dumps, factors, replay
from seed_jax.train.state import as_tree, from_tree, init_state, state_shardings
from seed_jax.train.update import build_optimizer, build_update


def examine_dump(directory: Path, step: int | None = None) -> dict[str, Any]:
    """The report of `replay.examine`, with what the whole update does ("update") and the checkpoint it was done with.

    Raises DumpError, CheckpointError or OSError.
    """
    dump = dumps.load(directory)
    config = ConfigDict(dump.record["config"])
    # As many of the devices here as can share a micro-batch, whatever the run had.
    mesh = sharding.make_mesh(jax.devices()[: math.gcd(jax.device_count(), config.pack.rows_per_micro)])
    spec, initial = hf.load(hf.resolve(config.model.init), mesh)
    optimizer, choices = build_optimizer(config), factors.choices(config)
    keep = {"keep_reference": choices.needs_reference, "keep_teacher": choices.keeps_teacher}
    places = state_shardings(optimizer, initial, sharding.param_shardings(spec, mesh, "train"), mesh, **keep)
    state = init_state(initial, optimizer, **keep, reference_dtype=config.model.dtype)
    state = jax.device_put(state, places)
    workdir = directory.absolute().parent.parent
    step, state = _restore(workdir / "checkpoints", dump.record["iteration"] - 1, step, state)
    report = replay.examine(config, spec, mesh, state, dump.batch, dump.numbers)
    numbers = {name: jnp.float32(value) for name, value in dump.numbers.items()}
    _, metrics = build_update(config, spec, mesh, places)(state, dump.batch, numbers)  # the state is donated here
    report["update"] = {name: float(value) for name, value in metrics.items() if name.startswith("update/")}
    return {"iteration": dump.record["iteration"], "weights_after_iteration": step, **report}


def _restore(directory: Path, before: int, step: int | None, state) -> tuple[int, Any]:
    """(iteration, state): of the checkpoint `step`, or the nearest at or before `before`, or the first after it."""
    if not directory.is_dir():
        if before == 0 and step is None:
            return 0, state
        raise CheckpointError(f"there are no checkpoints in {directory}")
    with Checkpointer(directory, read_only=True) as checkpoints:
        steps = checkpoints.steps()
        earlier = [s for s in steps if s <= before]
        if step is None:
            if not earlier and before == 0:
                return 0, state  # the initial weights
            if not steps:
                raise CheckpointError(f"{directory} holds no finished checkpoint")
            step = earlier[-1] if earlier else steps[0]
        elif step not in steps:
            raise CheckpointError(f"{directory} has no step {step}; there are {', '.join(map(str, steps)) or 'none'}")
        return step, from_tree(checkpoints.restore_part(step, as_tree(state)).tree, state)


def main(_) -> int:
    given = flags.FLAGS
    try:
        report = examine_dump(Path(given.dump), given.checkpoint)
    except (dumps.DumpError, CheckpointError, OSError, *common.INPUT_ERRORS) as error:
        print(f"error: {error}", file=sys.stderr)
        return common.EXIT_BAD_INPUT
    if given.json:
        print(json.dumps(jsonable(report)))
    else:
        after, iteration = report["weights_after_iteration"], report["iteration"]
        exact = "" if after == iteration - 1 else f", the nearest that is left (the update began after {iteration - 1})"
        print(f"batch of iteration {iteration}, weights after iteration {after}{exact}")
        print(f"optimizer steps skipped: {report['update']['update/skipped_steps']:.0f}")
        print(replay.text(report))
    clean = not (report["weights"] or report["batch"] or report["scores"] or report["micro_batches"])
    return 0 if clean and not report["update"]["update/skipped_steps"] else common.EXIT_FAILED


def run() -> None:
    flags.DEFINE_string("dump", None, "directory that a run wrote: WORKDIR/dumps/iteration_NNNNNN")
    flags.DEFINE_integer("checkpoint", None, "iteration whose checkpoint to take")
    flags.DEFINE_bool("json", False, "print the report as one JSON object")
    flags.mark_flags_as_required(["dump"])
    app.run(main)


if __name__ == "__main__":
    run()
