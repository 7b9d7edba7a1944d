"""The compile check without its command line: a config on a slice, its programs' reports, and how they are told."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from seed_jax import aot, compile_check
from seed_jax import config as config_lib
from seed_jax.models import hf, published
from seed_jax.models.spec import ModelSpec
from seed_jax.models.tensor_files import CheckpointError

DEFAULT_MODEL = "qwen2.5-3b"
BAD_INPUT = (config_lib.ConfigError, aot.TopologyError, CheckpointError, OSError, ValueError)


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
    unknown = [name for name in only if name not in compile_check.ALL]
    if unknown:
        raise ValueError(f"--programs={','.join(unknown)}: use some of {', '.join(compile_check.ALL)}")
    reports = []
    for program in compile_check.programs(plan):
        if program.name not in (only or compile_check.NAMES):
            continue
        if not quiet:
            print(f"compiling {program.name} ...", file=sys.stderr, flush=True)
        reports.append(compile_check.check(program, aot.chip(plan.topology)))
    return reports


def as_json(plan: compile_check.Plan, reports: list[compile_check.Report]) -> dict[str, Any]:
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
    lines = [f"{'program':<24}" + "".join(f"{head:>11}" for head in heads)]
    for r in reports:
        memory = [r.args_bytes, r.output_bytes, r.temp_bytes, r.beside_bytes, r.total_bytes, r.hbm_bytes]
        cells = [f"{size / 1e9:.2f}" for size in memory]
        cells += [f"{r.flops / 1e12:.4g}", f"{r.bytes / 1e9:.4g}", f"{sum(r.collectives.values()) / 1e9:.4g}"]
        cells += [f"{r.roofline_s:.3g} s", r.bound, f"{r.compile_s:.0f} s"]
        lines.append(f"{r.name:<24}" + "".join(f"{cell:>11}" for cell in cells) + ("" if r.fits else "  does not fit"))
    return lines
