"""Runs the quickstart for several methods and seeds and compares them on the held-out panel.

    python -m benchmarks.quickstart_curves --out=runs/curves --methods=grpo,seed --seeds=0,1,2 --iterations=15

A sweep over methods and seeds (see launch/sweep.py: finished runs are kept, unfinished ones resume), and curves.svg
(needs matplotlib). Extra arguments `--config.FIELD=VALUE` go to every run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from absl import app, flags

from configs import sweeps
from launch import common
from launch.settings import METHOD, SweepError, parse_overrides, plan
from launch.sweep import start
from seed_jax.report.comparison import curves, read_summary

OUT = flags.DEFINE_string("out", "runs/curves", "directory of all runs")
METHODS = flags.DEFINE_list("methods", ["grpo", "seed"], "variants of configs/quickstart.py")
SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "seeds")
ITERATIONS = flags.DEFINE_integer("iterations", None, "iterations of each run; default: the config's")
PLOT_ONLY = flags.DEFINE_bool("plot_only", False, "run nothing, draw what is there")

CONFIG = "configs/quickstart.py"
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # colour-blind safe (Okabe and Ito)


def success_curves(runs, out: Path) -> dict[str, list[dict[str, dict[int, float]]]]:
    """{method: one {conditions: {iteration: held-out success}} a seed}, of the runs that are finished."""
    result: dict[str, list] = {}
    for run in runs:
        summary = read_summary(out / run.name)
        if summary:
            points = {
                name: {step: evaluation["success_rate"] for step, evaluation in by_step.items()}
                for name, by_step in curves(summary).items()
            }
            result.setdefault(run.setting[METHOD], []).append(points)
    return result


def plot(methods: dict[str, list[dict]], out: Path) -> None:
    """Mean and range over seeds, one panel for each of the conditions."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    names = list(next(iter(methods.values()))[0])
    figure, axes = pyplot.subplots(1, len(names), figsize=(4.2 * len(names), 3.2), sharey=True, squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        for color, (method, runs) in zip(COLORS, methods.items(), strict=False):
            steps = sorted(set.intersection(*(set(run[name]) for run in runs)))
            values = np.array([[run[name][step] for step in steps] for run in runs])
            axis.plot(
                steps, values.mean(0), color=color, marker="o", label=f"{method.upper()} (mean of {len(runs)} seeds)"
            )
            axis.fill_between(steps, values.min(0), values.max(0), color=color, alpha=0.2, linewidth=0)
        axis.set_title(name)
        axis.set_xlabel("iteration (128 episodes each)")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("success on held-out games")
    axes[0][0].legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


def main(argv: list[str]) -> int:
    out = Path(OUT.value)
    try:
        overrides = parse_overrides(argv[1:])
        if ITERATIONS.value:
            overrides["iterations"] = str(ITERATIONS.value)
        settings = sweeps.product({"seed": [int(seed) for seed in SEEDS.value], METHOD: METHODS.value})
        runs = plan(CONFIG, settings, overrides, out)
    except (SweepError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return common.EXIT_BAD_INPUT
    code = 0 if PLOT_ONLY.value else start("quickstart_curves", runs, out)
    methods = success_curves(runs, out)
    if methods:
        plot(methods, out / "curves.svg")
        print(f"written: {out / 'curves.svg'}")
    else:
        print(f"no run in {out} is finished: nothing to draw", file=sys.stderr)
    return code


if __name__ == "__main__":
    app.run(main, flags_parser=lambda argv: flags.FLAGS(argv, known_only=True))
