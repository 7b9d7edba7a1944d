"""The table of docs/compile_table.md: the published models on the usual slices, each with the settings of its recipe.

Every program is compiled once and kept in compile_table.json, from which the page is written; what is there already is
not compiled again. Delete that file to compile everything anew.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from configs import alfworld
from launch import slice_check
from seed_jax import aot, compile_check

MODELS = ("qwen2.5-3b", "qwen2.5-7b", "qwen3-1.7b")
DATA_FILE, PAGE_FILE = "compile_table.json", "compile_table.md"


INTRODUCTION = """\
# What the compiler says

`python -m launch.compile_check --shipped --out=docs` writes this page; delete `compile_table.json` first for new
figures. The config is `configs/alfworld.py:seed` with `mesh.decode_tensor` as shown.

Memory is what XLA plans for one chip, in GB of 1e9 bytes; it is the same at every run. Inputs, output and temp are the
program's; beside is what lies on the chip with it. TFLOP, HBM and network bytes are of one chip, counted in the
compiled program with loops multiplied by their rounds (`seed_jax/hlo.py`); an update is a whole iteration of
mini-batches. Roofline is the largest of the three times at the chip's peak, a lower bound: nothing here ran on a TPU.
Compile seconds depend on the machine, and on what else it was doing."""
HEADS = (
    "program", "inputs", "output", "temp", "beside", "total of HBM", "fits", "TFLOP", "HBM GB", "network GB",
    "roofline", "bound", "compile",
)  # fmt: skip


class Slice(NamedTuple):
    """name: as Google Cloud calls it; decode_tensor: chips that share a copy of the model when decoding."""

    name: str
    topology: str
    decode_tensor: int


SLICES = (
    Slice("v5e-16", "v5e:4x4", 4),
    Slice("v5p-8", "v5p:2x2x1", 2),
    Slice("v6e-8", "v6e:2x4", 4),
    Slice("v5e-64", "v5e:8x8", 4),
)
# Beyond the table of all models on all slices: what the project promises to fit, and one size of weak scaling.
TARGETS = (
    ("qwen2.5-7b", Slice("v5e-32", "v5e:4x8", 4), 0),
    ("qwen2.5-7b", Slice("v5p-16", "v5p:2x2x2", 2), 0),
    ("qwen2.5-3b", Slice("v5e-64", "v5e:8x8", 4), 4),
    ("qwen2.5-3b", Slice("v5e-256", "v5e:16x16", 4), 4),
)


def cases() -> list[tuple[str, Slice, int]]:
    """(model, slice, rows on each chip or 0) of the table, targets first."""
    return [*TARGETS, *((model, place, 0) for model in MODELS for place in SLICES)]


def case_name(model: str, place: Slice, rows: int) -> str:
    return f"{model} {place.topology}" + (f" {rows} rows a chip" if rows else "")


def write(out: Path) -> None:
    """Compiles what is missing, and writes both files after every program: an interrupted run goes on where it was."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / DATA_FILE
    data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for model, place, rows in cases():
        case = data.setdefault(case_name(model, place, rows), {})
        config = alfworld.get_config("seed")
        config.mesh.decode_tensor = place.decode_tensor
        plan = slice_check.make_plan(config, place.topology, model, rows)
        only = ("update",) if (model, place, rows) in TARGETS and rows else compile_check.NAMES
        for program in compile_check.programs(plan):
            if program.name in case or program.name not in only:
                continue
            print(f"{case_name(model, place, rows)}: {program.name} ...", file=sys.stderr, flush=True)
            report = compile_check.check(program, aot.chip(place.topology))
            case |= slice_check.as_json(plan, [report])
            case.pop("fits")
            path.write_text(json.dumps(data, indent=1) + "\n")
            (out / PAGE_FILE).write_text(page(data))
    (out / PAGE_FILE).write_text(page(data))


def page(data: dict[str, Any]) -> str:
    lines = [INTRODUCTION]
    for model, place, rows in cases():
        case = data.get(case_name(model, place, rows))
        if case:
            lines += ["", *section(model, place, case)]
    return "\n".join(lines) + "\n"


def section(model: str, place: Slice, case: dict[str, Any]) -> list[str]:
    update = case.get("update", {})
    shown = f", {update['rows_per_chip']:g} rows a chip, {update['mini_batches']} mini-batches" if update else ""
    lines = [
        f"## {model} on {place.name} ({place.topology}){shown}, `mesh.decode_tensor={place.decode_tensor}`",
        "",
        f"| {' | '.join(HEADS)} |",
        "|---" * len(HEADS) + "|",
    ]
    return lines + [row(name, case[name]) for name in compile_check.NAMES if name in case]


def row(name: str, r: dict[str, Any]) -> str:
    cells = [name, *(f"{r[key]:.2f}" for key in ("args_gb", "output_gb", "temp_gb", "beside_gb"))]
    cells += [f"{r['total_gb']:.2f} of {r['hbm_gb']:.0f}", "yes" if r["fits"] else "**no**"]
    cells += [f"{r['flops'] / 1e12:.3g}", f"{r['bytes'] / 1e9:.3g}", f"{r['collective_bytes'] / 1e9:.3g}"]
    cells += [f"{r['roofline_s']:.3g} s", r["bound"], f"{r['compile_s']:.0f} s"]
    return f"| {' | '.join(cells)} |"
