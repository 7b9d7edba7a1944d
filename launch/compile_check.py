"""Does a run fit a TPU slice? Compiles its real programs for the slice on a host without a TPU; no weights are needed.

    python -m launch.compile_check --config=configs/alfworld.py:seed --topology=v5e:4x4 [--model=qwen2.5-7b] [--json]

With --config.env.observation=image the programs read images of the environment's size (--model=qwen2.5-vl-3b).

--topology is KIND:GRID for any slice: v5e:4x4, v5e:8x8, v5p:2x2x2, v6e:2x4. --model is a name (qwen2.5-3b, qwen2.5-7b,
qwen3-1.7b) or a directory with config.json; by default it is the config's model.init, or qwen2.5-3b where that is
empty. Needs the package of requirements-tpu-check.txt. Exit code: 0 it fits, 1 it does not, 2 the command cannot work.

    python -m launch.compile_check --shipped --out=docs    # the table of docs/compile_table.md, all anew (an hour)
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before jax is imported: it would look for a TPU

from absl import app, flags
from ml_collections import config_flags

from launch import shipped_table, slice_check
from seed_jax import aot, compile_check
from seed_jax import config as config_lib
from seed_jax.models import published

EXIT_FITS, EXIT_TOO_LARGE, EXIT_BAD_INPUT = 0, 1, 2

_CONFIG = config_flags.DEFINE_config_file(
    "config", "configs/alfworld.py:seed", "config file of the run, with the method after a colon", lock_config=True
)
_TOPOLOGY = flags.DEFINE_string("topology", None, "the slice, such as v5e:4x4")
_MODEL = flags.DEFINE_string("model", None, f"{', '.join(published.CONFIGS)}, or a directory with config.json")
_ROWS = flags.DEFINE_integer("rows_per_chip", 0, "rows of a micro-batch on each chip; 0 = as the config says")
_STRICT = flags.DEFINE_bool("strict", False, "an error where the config's rows cannot be split over the chips")
_PROGRAMS = flags.DEFINE_list("programs", [], f"only these of {', '.join(compile_check.ALL)}")
_JSON = flags.DEFINE_bool("json", False, "print one JSON object")
_SHIPPED = flags.DEFINE_bool("shipped", False, "compile the shipped table instead")
_OUT = flags.DEFINE_string("out", "docs", "with --shipped: the directory of compile_table.md and compile_table.json")


def main(_: list[str]) -> int:
    try:
        if _SHIPPED.value:
            shipped_table.write(Path(_OUT.value))
            return EXIT_FITS
        if not _TOPOLOGY.value:
            raise aot.TopologyError("--topology is missing, such as --topology=v5e:4x4")
        plan = slice_check.make_plan(_CONFIG.value, _TOPOLOGY.value, _MODEL.value, _ROWS.value)
        if plan.settings and _STRICT.value:
            raise ValueError(slice_check.settings_note(plan))
        reports = slice_check.run(plan, _PROGRAMS.value, quiet=_JSON.value)
    except slice_check.BAD_INPUT as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    print(json.dumps(slice_check.as_json(plan, reports)) if _JSON.value else slice_check.text(plan, reports))
    return EXIT_FITS if all(report.fits for report in reports) else EXIT_TOO_LARGE


if __name__ == "__main__":
    app.run(main, flags_parser=config_lib.parse_flags)
