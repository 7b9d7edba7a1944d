"""Does a run fit a TPU slice? Compiles its real programs for the slice on a host without a TPU; no weights are needed.

    python -m launch.compile_check --config=configs/alfworld.py:seed --topology=v5e:4x4 [--model=qwen2.5-7b] [--json]

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

from seed_jax import aot, compile_check
from seed_jax import config as config_lib
from seed_jax.models import hf, published
from seed_jax.models.spec import ModelSpec
from seed_jax.models.tensor_files import CheckpointError

DEFAULT_MODEL = "qwen2.5-3b"
EXIT_FITS, EXIT_TOO_LARGE, EXIT_BAD_INPUT = 0, 1, 2
BAD_INPUT = (config_lib.ConfigError, aot.TopologyError, CheckpointError, OSError, ValueError)

_CONFIG = config_flags.DEFINE_config_file("config", "configs/alfworld.py:seed", "config file of the run")
_TOPOLOGY = flags.DEFINE_string("topology", None, "the slice, such as v5e:4x4")
_MODEL = flags.DEFINE_string("model", None, f"{', '.join(published.CONFIGS)}, or a directory with config.json")
_ROWS = flags.DEFINE_integer("rows_per_chip", 0, "rows of a micro-batch on each chip; 0 = as the config says")
_STRICT = flags.DEFINE_bool("strict", False, "an error where the config's rows cannot be split over the chips")
_PROGRAMS = flags.DEFINE_list("programs", [], f"only these of {', '.join(compile_check.NAMES)}")
_JSON = flags.DEFINE_bool("json", False, "print one JSON object")
_SHIPPED = flags.DEFINE_bool("shipped", False, "compile the shipped table instead")
_OUT = flags.DEFINE_string("out", "docs", "with --shipped: the directory of compile_table.md and compile_table.json")


def main(_: list[str]) -> int:
    try:
        if _SHIPPED.value:
            from launch import shipped_table  # which uses this module

            shipped_table.write(Path(_OUT.value))
            return EXIT_FITS
        if not _TOPOLOGY.value:
            raise aot.TopologyError("--topology is missing, such as --topology=v5e:4x4")
        plan = make_plan(_CONFIG.value, _TOPOLOGY.value, _MODEL.value, _ROWS.value)
        if plan.settings and _STRICT.value:
            raise ValueError(settings_note(plan))
        reports = run(plan, _PROGRAMS.value, quiet=_JSON.value)
    except BAD_INPUT as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    print(json.dumps(as_json(plan, reports)) if _JSON.value else text(plan, reports))
    return EXIT_FITS if all(report.fits for report in reports) else EXIT_TOO_LARGE


def make_plan(config, topology: str, model: str | None = None, rows_per_chip: int = 0) -> compile_check.Plan:
    """Raises one of BAD_INPUT."""
    aot.chip(topology)
    name = model or config.model.init or DEFAULT_MODEL
    spec = find_spec(name)
    with config.unlocked():
        config.model.init = name
    config_lib.check(config)
    if rows_per_chip < 0:
        raise ValueError(f"--rows_per_chip={rows_per_chip} must be 0 (as the config says) or more")
    return compile_check.plan(config, spec, topology, rows_per_chip)


def find_spec(name: str) -> ModelSpec:
    """Of a published name, or of a directory."""
    try:
        return published.spec(name)
    except KeyError:
        pass
    if not Path(name).exists():
        raise ValueError(
            f"model {name!r} is neither one of {', '.join(published.CONFIGS)} nor a directory with config.json; give "
            "one with --model"
        )
    return hf.load_spec(name)


def run(plan: compile_check.Plan, only: list[str], quiet: bool = False) -> list[compile_check.Report]:
    unknown = [name for name in only if name not in compile_check.NAMES]
    if unknown:
        raise ValueError(f"--programs={','.join(unknown)}: use some of {', '.join(compile_check.NAMES)}")
    reports = []
    for program in compile_check.programs(plan):
        if only and program.name not in only:
            continue
        if not quiet:
            print(f"compiling {program.name} ...", file=sys.stderr, flush=True)
        reports.append(compile_check.check(program, aot.chip(plan.topology)))
    return reports


def as_json(plan: compile_check.Plan, reports: list[compile_check.Report]) -> dict:
    """{program: its numbers, ..., "fits": whether all do}; the update also says which fields had to be set."""
    found = {report.name: report.as_json() for report in reports}
    if "update" in found:
        pack = plan.config.pack
        found["update"] |= {
            "settings": plan.settings,
            "rows_per_chip": pack.rows_per_micro / plan.mesh.shape["fsdp"],
            "mini_batches": plan.minis,
        }
    for report in reports:
        if not report.fits:
            found[report.name]["advice"] = compile_check.advice(plan, report)
    return {**found, "fits": all(report.fits for report in reports)}


def text(plan: compile_check.Plan, reports: list[compile_check.Report]) -> str:
    pack, fsdp = plan.config.pack, plan.mesh.shape["fsdp"]
    lines = [
        f"{plan.config.model.init} ({plan.spec.num_params / 1e9:.2f} B parameters) on {plan.topology}: "
        + compile_check.kv_note(plan),
        f"update: micro-batches of {pack.rows_per_micro} rows ({pack.rows_per_micro / fsdp:g} a chip), "
        f"{pack.micros_per_mini} a mini-batch, about {plan.minis} mini-batches an iteration",
    ]
    if plan.settings:
        lines.append(f"note: {settings_note(plan)}")
    lines += ["", *table(reports), ""]
    for report in reports:
        if not report.fits:
            lines.append(f"{report.name} does not fit; change one of:")
            lines += [f"  - {remedy}" for remedy in compile_check.advice(plan, report)]
    return "\n".join([*lines, "fits" if all(report.fits for report in reports) else "does not fit"])


def settings_note(plan: compile_check.Plan) -> str:
    changes = " ".join(f"--config.{field}={value}" for field, value in plan.settings.items())
    return f"these rows of a micro-batch are not the config's; the run needs {changes}"


def table(reports: list[compile_check.Report]) -> list[str]:
    """GB of 1e9 bytes on one chip; work and seconds of one run of the program."""
    heads = ("arguments", "output", "temp", "beside", "total", "of HBM", "TFLOP", "HBM GB", "network GB", "roofline",
             "bound", "compile")  # fmt: skip
    lines = [f"{'program':<18}" + "".join(f"{head:>11}" for head in heads)]
    for r in reports:
        memory = [r.args_bytes, r.output_bytes, r.temp_bytes, r.beside_bytes, r.total_bytes, r.hbm_bytes]
        cells = [f"{size / 1e9:.2f}" for size in memory]
        cells += [f"{r.flops / 1e12:.4g}", f"{r.bytes / 1e9:.4g}", f"{sum(r.collectives.values()) / 1e9:.4g}"]
        cells += [f"{r.roofline_s:.3g} s", r.bound, f"{r.compile_s:.0f} s"]
        lines.append(f"{r.name:<18}" + "".join(f"{cell:>11}" for cell in cells) + ("" if r.fits else "  does not fit"))
    return lines


if __name__ == "__main__":
    app.run(main, flags_parser=config_lib.parse_flags)
