"""Runs side by side: what their summaries say as one text table, one line a run, and as means over seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seed_jax.runtime.logging import SUMMARY_FILE
from seed_jax.train.metrics import conditions

SEED_FIELD = "seed"


def read_summary(workdir: Path) -> dict | None:
    """The summary of a finished run, None if there is none (or a damaged one: the run then writes it again)."""
    try:
        summary = json.loads((workdir / SUMMARY_FILE).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return summary if isinstance(summary, dict) else None


def curves(summary: Mapping[str, Any]) -> dict[str, dict[int, dict]]:
    """{conditions: {iteration: evaluation}} in the order in which the conditions are evaluated."""
    result: dict[str, dict[int, dict]] = {}
    for evaluation in summary["evaluations"]:
        result.setdefault(conditions(evaluation), {})[evaluation["iteration"]] = evaluation
    return result


def figures(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a run that a comparison shows."""
    return {
        "held_out": {
            name: {
                "before": points[min(points)]["success_rate"],
                "after": points[max(points)]["success_rate"],
                "standard_error": points[max(points)]["standard_error"],
                "macro": points[max(points)]["macro_success_rate"],
            }
            for name, points in curves(summary).items()
        },
        "games": summary["games"],
        "final_training_success": summary["final_training_success"],
        "iterations": summary["iterations"],
        "minutes": summary["minutes"],
    }


def run_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """One line a run: its setting, held-out success before and after under each condition, minutes, or its status.

    runs: records with "setting", "status", and for finished runs "figures".
    """
    fields = list(dict.fromkeys(field for run in runs for field in run["setting"]))
    names = _conditions(runs)
    lines = [[*fields, *(f"{name}: before -> after" for name in names), "training", "minutes", "status"]]
    for run in runs:
        numbers = run.get("figures")
        cells = [_value(run["setting"].get(field)) for field in fields]
        cells += [_change(numbers, name) for name in names]
        cells += [_number(numbers and numbers["final_training_success"]), _number(numbers and numbers["minutes"], 1)]
        lines.append([*cells, run["status"]])
    return _align(lines, len(fields))


def seed_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Finished runs that differ in the seed only, as mean +- standard deviation over seeds; "" if none do."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        rest = {field: value for field, value in run["setting"].items() if field != SEED_FIELD}
        if run.get("figures") and SEED_FIELD in run["setting"]:
            groups.setdefault(json.dumps(rest, sort_keys=True, default=str), []).append(run)
    if not any(len(group) > 1 for group in groups.values()):
        return ""
    fields = list(dict.fromkeys(f for run in runs for f in run["setting"] if f != SEED_FIELD))
    names = _conditions(runs)
    lines = [[*fields, "seeds", *(f"{name}: before, after (mean +- sd), each" for name in names)]]
    for group in groups.values():
        cells = [_value(group[0]["setting"].get(field)) for field in fields] + [str(len(group))]
        lines.append([*cells, *(_over_seeds(group, name) for name in names)])
    return _align(lines, len(fields))


def _conditions(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for run in runs if run.get("figures") for name in run["figures"]["held_out"]))


def _over_seeds(group: Sequence[Mapping[str, Any]], name: str) -> str:
    points = [run["figures"]["held_out"][name] for run in group if name in run["figures"]["held_out"]]
    if not points:
        return "-"
    after = [point["after"] for point in points]
    mean = sum(after) / len(after)
    spread = math.sqrt(sum((x - mean) ** 2 for x in after) / (len(after) - 1)) if len(after) > 1 else float("nan")
    before = sum(point["before"] for point in points) / len(points)
    return f"{before:.3f}, {mean:.3f} +- {spread:.3f}, {' '.join(f'{x:.3f}' for x in after)}"


def _change(numbers: Mapping[str, Any] | None, name: str) -> str:
    point = numbers["held_out"].get(name) if numbers else None
    if point is None:
        return "-"
    return f"{point['before']:.3f} -> {point['after']:.3f} +- {point['standard_error']:.3f}"


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _value(value: Any) -> str:
    return "" if value is None else str(value)


def _align(lines: Sequence[Sequence[str]], left: int) -> str:
    """Columns two spaces apart, the first `left` and the last one flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    last = len(widths) - 1
    padded = [
        [
            cell.ljust(width) if place < left or place == last else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in lines
    ]
    return "\n".join("  ".join(line).rstrip() for line in padded)
