"""Runs the quickstart for several methods and seeds and compares them on the held-out panel.

    python -m benchmarks.quickstart_curves --out=runs/curves --methods=grpo,seed --seeds=0,1,2 --iterations=15

Finished runs are kept, unfinished ones resume. Prints a table (mean and standard deviation over seeds) and writes
curves.svg (needs matplotlib). Extra arguments after `--` go to every run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from absl import app, flags

from seed_jax.runtime.logging import EVALUATIONS_FILE, SUMMARY_FILE, read_jsonl

OUT = flags.DEFINE_string("out", "runs/curves", "directory of all runs")
METHODS = flags.DEFINE_list("methods", ["grpo", "seed"], "variants of configs/quickstart.py")
SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "seeds")
ITERATIONS = flags.DEFINE_integer("iterations", None, "iterations of each run; default: the config's")
PLOT_ONLY = flags.DEFINE_bool("plot_only", False, "run nothing, compare what is there")

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # colour-blind safe (Okabe and Ito)


def workdir(method: str, seed: str) -> Path:
    return Path(OUT.value) / f"{method}-{seed}"


def run(method: str, seed: str, extra: list[str]) -> None:
    """One training run in a process of its own; skipped if it has its summary."""
    directory = workdir(method, seed)
    if (directory / SUMMARY_FILE).exists():
        print(f"{directory}: finished", flush=True)
        return
    command = [
        sys.executable,
        "-m",
        "launch.train",
        f"--config=configs/quickstart.py:{method}",
        f"--workdir={directory}",
    ]
    command += [
        f"--config.seed={seed}",
        *([f"--config.iterations={ITERATIONS.value}"] if ITERATIONS.value else []),
        *extra,
    ]
    print(" ".join(command), flush=True)
    subprocess.run(command, check=True)


def curve(method: str, seed: str) -> dict[float, dict[int, float]]:
    """{temperature: {iteration: held-out success}}."""
    points: dict[float, dict[int, float]] = {}
    for record in read_jsonl(workdir(method, seed) / EVALUATIONS_FILE):
        points.setdefault(record["temperature"], {})[record["iteration"]] = record["success_rate"]
    return points


def table(curves: dict[str, list[dict]]) -> str:
    lines = [f"{'method':<12}{'T':>5}{'before':>9}{'after (mean +- sd over seeds)':>32}   each seed"]
    for method, runs in curves.items():
        for temperature in runs[0]:
            first = [run[temperature][min(run[temperature])] for run in runs]
            last = [run[temperature][max(run[temperature])] for run in runs]
            spread = np.std(last, ddof=1) if len(last) > 1 else float("nan")
            each = " ".join(f"{value:.3f}" for value in last)
            after = f"{np.mean(last):.3f} +- {spread:.3f}"
            lines.append(f"{method:<12}{temperature:>5g}{np.mean(first):>9.3f}{after:>32}   {each}")
    return "\n".join(lines)


def plot(curves: dict[str, list[dict]], out: Path) -> None:
    """Mean and range over seeds, one panel a temperature."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    temperatures = list(next(iter(curves.values()))[0])
    figure, axes = pyplot.subplots(
        1, len(temperatures), figsize=(4.2 * len(temperatures), 3.2), sharey=True, squeeze=False
    )
    for axis, temperature in zip(axes[0], temperatures, strict=True):
        for color, (method, runs) in zip(COLORS, curves.items(), strict=False):
            steps = sorted(set.intersection(*(set(run[temperature]) for run in runs)))
            values = np.array([[run[temperature][step] for step in steps] for run in runs])
            axis.plot(
                steps, values.mean(0), color=color, marker="o", label=f"{method.upper()} (mean of {len(runs)} seeds)"
            )
            axis.fill_between(steps, values.min(0), values.max(0), color=color, alpha=0.2, linewidth=0)
        axis.set_title("greedy" if temperature == 0 else f"temperature {temperature:g}")
        axis.set_xlabel("iteration (128 episodes each)")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("success on held-out games")
    axes[0][0].legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


def main(argv: list[str]) -> None:
    for seed in SEEDS.value:
        for method in METHODS.value:
            if not PLOT_ONLY.value:
                run(method, seed, argv[1:])
    curves = {method: [curve(method, seed) for seed in SEEDS.value] for method in METHODS.value}
    print(table(curves))
    minutes = {
        m: [json.loads((workdir(m, s) / SUMMARY_FILE).read_text())["minutes"] for s in SEEDS.value]
        for m in METHODS.value
    }
    print("minutes a run:", {method: [round(value, 1) for value in values] for method, values in minutes.items()})
    plot(curves, Path(OUT.value) / "curves.svg")
    print(f"written: {Path(OUT.value) / 'curves.svg'}")


if __name__ == "__main__":
    app.run(main)
