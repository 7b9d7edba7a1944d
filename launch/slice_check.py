"""The compile check without its command line: a config on a slice, its programs' reports, and how they are told."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from launch import worlds
from seed_jax import aot, compile_check
from seed_jax import config as config_lib
from seed_jax.models import hf, published
from seed_jax.models.spec import ModelSpec
from seed_jax.models.tensor_files import CheckpointError
from seed_jax.rollout import World
from seed_jax.sampler import decode

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
    return compile_check.plan(config, spec, topology, rows_per_chip, _image_size(config, spec))


def _image_size(config, spec: ModelSpec) -> tuple[int, int] | None:
    """As the model reads images; None for text."""
    if config.env.observation != "image":
        return None
    drawn = worlds.image_size(config.env)
    return World(None, None, 0, 0, drawn, config.env.min_pixels).read_size(spec.vision)


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
        if program.name not in (only or (*compile_check.NAMES, *compile_check.SEEING)):
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
            found[report.name]["advice"] = advice(plan, report)
    return {**found, "fits": all(report.fits for report in reports)}


def text(plan: compile_check.Plan, reports: list[compile_check.Report]) -> str:
    pack, fsdp = plan.config.pack, plan.mesh.shape["fsdp"]
    lines = [
        f"{plan.config.model.init} ({plan.spec.num_params / 1e9:.2f} B parameters) on {plan.topology}: "
        + kv_note(plan),
        f"update: micro-batches of {pack.rows_per_micro} rows ({pack.rows_per_micro / fsdp:g} a chip), "
        f"{pack.micros_per_mini} a mini-batch, about {plan.minis} mini-batches an iteration",
    ]
    if plan.settings:
        lines.append(f"note: {settings_note(plan)}")
    lines += ["", *table(reports), ""]
    for report in reports:
        if not report.fits:
            lines.append(f"{report.name} does not fit; change one of:")
            lines += [f"  - {remedy}" for remedy in advice(plan, report)]
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


def kv_note(plan: compile_check.Plan) -> str:
    """How decoding is laid out, in words."""
    tensor, hosts = plan.decode_mesh.shape["tensor"], {d.process_index for d in plan.mesh.devices.flat}
    copies = decode.kv_copies(plan.spec, plan.decode_mesh)
    return (
        f"{plan.mesh.size} chips on {len(hosts)} hosts; training mesh fsdp {plan.mesh.shape['fsdp']} x tensor "
        f"{plan.mesh.shape['tensor']}; decoding: {tensor} chip{'s' if tensor > 1 else ''} a copy of the model"
        + (f", every kv head {copies} times" if copies > 1 else "")
    )


def advice(plan: compile_check.Plan, report: compile_check.Report) -> list[str]:
    """What to change, most effective first, for a program that does not fit."""
    config, tensor = plan.config, plan.decode_mesh.shape["tensor"]
    host = sum(d.process_index == plan.mesh.devices.flat[0].process_index for d in plan.mesh.devices.flat)
    wider = f"--config.mesh.decode_tensor={2 * tensor} (a copy of the model on {2 * tensor} chips)"
    found = []
    if report.name in ("update", "sft"):
        rows = config.pack.rows_per_micro if report.name == "update" else compile_check.sft_rows(plan)
        if plan.state_bytes > 0.6 * report.hbm_bytes:
            found.append(f"more chips: the training state alone takes {plan.state_bytes / 1e9:.1f} GB of each")
        if config.model.remat != "full":
            found.append(f"--config.model.remat=full (now {config.model.remat})")
        if report.name == "update" and rows > plan.mesh.shape["fsdp"]:
            less, micros = rows // 2 // plan.mesh.shape["fsdp"] * plan.mesh.shape["fsdp"], config.pack.micros_per_mini
            less = max(less, plan.mesh.shape["fsdp"])
            found.append(
                f"--config.pack.rows_per_micro={less} --config.pack.micros_per_mini={rows * micros // less} (the same "
                "mini-batch in smaller steps)"
            )
        if plan.mesh.shape["tensor"] == 1 and plan.mesh.size > 1 and not found:
            found.append("--config.mesh.tensor=2 (heads and ffn of each layer on two chips)")
        field = "pack.row_tokens, pack.teacher_row_tokens" if report.name == "update" else "sft.row_tokens"
        found.append(f"shorter rows: {field}")
    else:
        if host % (2 * tensor) == 0:
            found.append(wider)
        if report.name != "reshard":
            found.append("fewer slots: rollout.batch or rollout.analysis_batch")
            found.append("shorter requests: rollout.max_prompt_tokens, hindsight.max_analysis_tokens")
    found.append("a slice with more chips" if report.name in ("update", "sft") else "a chip with more memory")
    return found
