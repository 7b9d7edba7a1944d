"""What SEED adds to GRPO, and whether it is what the skills say: runs of the quickstart with equal budgets of episodes.

    python -m benchmarks.what_seed_adds --out=runs/adds --seeds=5

A sweep over methods and seeds (see launch/sweep.py: finished runs are kept, unfinished ones resume), then
results.json, results.md and two pictures (matplotlib) in --out. A gain counts as one of hindsight only if the
right skills beat wrong ones and filler words. Second attempts count in the budget: a group has as many episodes with
them as without. Extra arguments `--config.FIELD=VALUE` go to every run.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from launch import common
from launch.settings import METHOD, SweepError, parse_overrides, plan
from launch.sweep import start
from seed_jax.report.comparison import read_summary
from seed_jax.report.paired import by_game
from seed_jax.runtime.logging import METRICS_FILE, OUTCOMES_FILE, TEACHER_FILE, read_jsonl, write_whole

CONFIG = "configs/quickstart.py"
BEST = "seed_plus"
VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {METHOD: "grpo"},
    "seed": {METHOD: "seed", "distill.coef": 0.01},
    BEST: {METHOD: BEST},
    f"{BEST}_wrong": {METHOD: BEST, "hindsight.control": "wrong_skill"},
    f"{BEST}_placebo": {METHOD: BEST, "hindsight.control": "placebo"},
    f"{BEST}_true": {METHOD: BEST, "hindsight.control": "true_skill"},
    f"{BEST}_library": {METHOD: BEST, "hindsight.source": "static_library"},
}
# Half the quickstart's episodes an iteration, half its panel at one temperature, and nothing but training and
# evaluations: 35 runs take long enough.
OVERRIDES = {
    "rollout.tasks": "8",
    "eval.games": "96",
    "log.tensorboard": "False",
    "log.trajectories_every": "0",
    "log.trajectories_panel": "0",
    "log.diagnostics_episodes": "0",
    "log.episodes_per_iteration": "0",
    "log.grad_norms_every": "2",
    "eval.temperatures": "(0.4,)",
    "eval.every": "2",
}
TARGET = 0.6  # success whose price in episodes is told
SAMPLES = 4000  # of the bootstrap
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito


def setting_of(name: str) -> dict[str, Any]:
    """The fields of a variant; any other name, and BEST in capitals, is a preset's."""
    return VARIANTS.get(name) or {METHOD: BEST if name == "BEST" else name}


def course(workdir: Path, episodes_per_iteration: int) -> dict[str, list[float]]:
    """Of one run, at each evaluation: iteration, success, and what it had cost: episodes, generated tokens, seconds.

    teacher: its success with its own skill on some games of the panel, where it was measured ([] if not); gradients:
    norm of the distillation's part over that of the rest, at the first update
    """
    summary, metrics = read_summary(workdir), read_jsonl(workdir / METRICS_FILE)
    spent = {"tokens": [0.0], "seconds": [0.0]}
    for record in metrics:
        seconds = sum(v or 0.0 for k, v in record.items() if k.startswith("time/") and k not in _NOT_TRAINING)
        spent["seconds"].append(spent["seconds"][-1] + seconds)
        spent["tokens"].append(spent["tokens"][-1] + (record.get("rollout/generated_tokens") or 0.0))
    points = {e["iteration"]: e["success_rate"] for e in summary["evaluations"]}
    steps = sorted(points)
    teacher = {r["iteration"]: r["self"] for r in read_jsonl(workdir / TEACHER_FILE)}
    norms = [metrics[0].get(f"update/{part}_grad_norm") for part in ("distill", "rl")]
    return {
        "teacher": [teacher[step]["teacher"]["success_rate"] for step in steps if step in teacher],
        "gradients": [norms[0] / norms[1]] if all(norms) else [],
        "iterations": steps,
        "success": [points[step] for step in steps],
        "episodes": [step * episodes_per_iteration for step in steps],
        **{name: [values[step] for step in steps] for name, values in spent.items()},
    }


_NOT_TRAINING = ("time/eval_s", "time/teacher_s", "time/trajectories_s", "time/save_s")


def area(run: Mapping[str, Sequence[float]]) -> float:
    """Mean success over the episodes of a run (trapezoids)."""
    x, y = np.array(run["episodes"], float), np.array(run["success"])
    return float(np.sum((x[1:] - x[:-1]) * (y[1:] + y[:-1]) / 2) / (x[-1] - x[0])) if len(x) > 1 else float(y[0])


def episodes_to(run: Mapping[str, Sequence[float]], target: float) -> float | None:
    """Episodes until the success first reaches the target, on a line between evaluations; None: it never does."""
    points = list(zip(run["episodes"], run["success"], strict=True))
    if points[0][1] >= target:
        return points[0][0]
    for (x, y), (later, higher) in itertools.pairwise(points):
        if higher >= target:
            return x + (later - x) * (target - y) / (higher - y)
    return None


def interval(differences: np.ndarray, rng: np.random.Generator) -> list[float]:
    """95 % bootstrap interval of the mean of [seeds, games], both drawn with replacement."""
    seeds, games = differences.shape
    means = [
        differences[rng.integers(0, seeds, seeds)][:, rng.integers(0, games, games)].mean() for _ in range(SAMPLES)
    ]
    return [float(value) for value in np.quantile(means, (0.025, 0.975))]


def game_curves(workdir: Path) -> tuple[np.ndarray, np.ndarray]:
    """(won at the last evaluation, mean over all evaluations after the first) of each game of the panel, by name."""
    records = read_jsonl(workdir / OUTCOMES_FILE)
    won = [np.array([rate for _, rate in sorted(by_game(record["outcomes"]).items())]) for record in records]
    return won[-1], np.mean(won[1:] or won, axis=0)


def compare(workdirs: Mapping[str, Sequence[Path]], baseline: str) -> dict[str, dict[str, Any]]:
    """{method: its difference to `baseline`, paired over seeds and games, in final success and in mean success}."""
    rng, result = np.random.default_rng(0), {}
    base = [game_curves(path) for path in workdirs[baseline]]
    for name, paths in workdirs.items():
        if name == baseline or len(paths) != len(base):
            continue
        mine = [game_curves(path) for path in paths]
        result[name] = {}
        for place, what in enumerate(("final", "mean")):
            difference = np.stack([a[place] - b[place] for a, b in zip(mine, base, strict=True)])
            result[name][what] = {"difference": float(difference.mean()), "interval": interval(difference, rng)}
    return result


def plot(courses: Mapping[str, Sequence[Mapping[str, Any]]], out: Path) -> None:
    """Mean and range over seeds against episodes, generated tokens and seconds."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    axes_of = (("episodes", "training episodes"), ("tokens", "generated tokens"), ("seconds", "seconds of training"))
    figure, axes = pyplot.subplots(1, len(axes_of), figsize=(13.5, 3.8), sharey=True)
    for axis, (field, label) in zip(axes, axes_of, strict=True):
        for color, (name, runs) in zip(COLORS, courses.items(), strict=False):
            x = np.mean([run[field] for run in runs], axis=0)
            y = np.array([run["success"] for run in runs])
            axis.plot(x, y.mean(0), color=color, marker="o", markersize=3, label=name)
            axis.fill_between(x, y.min(0), y.max(0), color=color, alpha=0.12, linewidth=0)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("success on held-out games")
    axes[0].legend(loc="lower right", fontsize=7)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


def front(courses: Mapping[str, Sequence[Mapping[str, Any]]], out: Path) -> None:
    """The student, its teacher and GRPO in one picture: mean over seeds, band of one standard error of that mean."""
    from matplotlib import pyplot

    shown = [
        (BEST, "success", "-", COLORS[0], "SEED+: the policy, without a skill"),
        (BEST, "teacher", "--", COLORS[0], "its teacher: the same policy with its own skill"),
        (f"{BEST}_wrong", "success", "-", COLORS[3], "SEED+ with skills of other tasks"),
        ("seed", "success", "-", COLORS[2], "SEED as published"),
        ("grpo", "success", "-", COLORS[1], "GRPO"),
    ]
    figure, axis = pyplot.subplots(figsize=(7.2, 4.0))
    for name, field, style, color, label in shown:
        runs = courses.get(name, ())
        values = np.array([run[field] for run in runs])
        if not values.size:
            continue
        x, mean = runs[0]["episodes"][: values.shape[1]], values.mean(0)
        error = values.std(0, ddof=1) / np.sqrt(len(runs)) if len(runs) > 1 else np.zeros_like(mean)
        axis.plot(x, mean, style, color=color, marker="o", markersize=3, label=label)
        axis.fill_between(x, mean - error, mean + error, color=color, alpha=0.15, linewidth=0)
    axis.set_xlabel("training episodes")
    axis.set_ylabel("success on held-out games")
    axis.set_ylim(0.0, 1.0)
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


def table(results: Mapping[str, Any]) -> str:
    """results.md: one line a method, then the paired differences."""
    lines = [
        f"| method | seeds | before | after | run mean | episodes to {TARGET:g} | tokens | seconds | gradients |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, m in results["methods"].items():
        reached = [e for e in m["episodes_to_target"] if e is not None]
        price = f"{np.mean(reached):.0f} ({len(reached)} of {m['seeds']})" if reached else "never"
        spread = f" ± {np.std(m['final']):.3f}" if m["seeds"] > 1 else ""
        gradients = f"{m['gradients']:.2g}" if m["gradients"] is not None else "\u2013"
        lines.append(
            f"| {name} | {m['seeds']} | {m['success'][0]:.3f} | {np.mean(m['final']):.3f}{spread} | "
            f"{np.mean(m['area']):.3f} | {price} | {m['tokens'][-1]:,.0f} | {m['seconds'][-1]:.0f} | {gradients} |"
        )
    for baseline, differences in results["differences"].items():
        lines += ["", f"| minus {baseline} | final success | mean over the evaluations |", "|---|---|---|"]
        for name, d in differences.items():
            cells = [
                f"{d[w]['difference']:+.3f} [{d[w]['interval'][0]:+.3f}, {d[w]['interval'][1]:+.3f}]"
                for w in ("final", "mean")
            ]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def evaluate(runs: Mapping[str, Sequence[tuple[Path, int]]]) -> dict[str, Any]:
    """Everything that is told of the finished runs; runs: {method: (workdir, episodes an iteration) of each seed}."""
    courses = {name: [course(*run) for run in found] for name, found in runs.items()}
    lengths = {len(run["iterations"]) for found in courses.values() for run in found}
    if len(lengths) > 1:
        raise SweepError("the runs have different numbers of evaluations; give them the same --iterations")
    workdirs = {name: [path for path, _ in found] for name, found in runs.items()}
    methods = {}
    for name, found in courses.items():
        mean = {f: np.mean([run[f] for run in found], axis=0).tolist() for f in ("success", "tokens", "seconds")}
        ratios = [ratio for run in found for ratio in run["gradients"]]
        methods[name] = {
            "seeds": len(found),
            "gradients": float(np.mean(ratios)) if ratios else None,
            "episodes": found[0]["episodes"],
            **mean,
            "by_seed": [run["success"] for run in found],
            "final": [run["success"][-1] for run in found],
            "area": [area(run) for run in found],
            "episodes_to_target": [episodes_to(run, TARGET) for run in found],
        }
    baselines = [name for name in ("grpo", f"{BEST}_wrong", f"{BEST}_placebo") if name in runs]
    return {
        "methods": methods,
        "courses": courses,
        "differences": {name: compare(workdirs, name) for name in baselines},
    }


def main(argv: list[str]) -> int:
    asked = flags.FLAGS
    out, names = Path(asked.out), asked.methods or list(VARIANTS)
    try:
        overrides = {**OVERRIDES, **parse_overrides(argv[1:])}
        if asked.iterations:
            overrides["iterations"] = str(asked.iterations)
        seeds = range(asked.first_seed, asked.first_seed + asked.seeds)
        wanted = [(name, {"seed": seed, **setting_of(name)}) for seed in seeds for name in names]
        planned = plan(CONFIG, [setting for _, setting in wanted], overrides, out)
        code = 0 if asked.plot_only else start("what_seed_adds", planned, out)
        found: dict[str, list[tuple[Path, int]]] = {}
        for (name, _), run in zip(wanted, planned, strict=True):
            if read_summary(out / run.name):
                rollout = run.config.rollout
                found.setdefault(name, []).append((out / run.name, rollout.tasks * rollout.group))
        if not found:
            print(f"no run in {out} is finished: nothing to compare", file=sys.stderr)
            return code or common.EXIT_FAILED
        results = evaluate(found)
    except (SweepError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return common.EXIT_BAD_INPUT
    write_whole(out / "results.json", json.dumps(results, indent=1) + "\n")
    write_whole(out / "results.md", table(results) + "\n")
    plot(results["courses"], out / "curves.svg")
    front(results["courses"], out / "front.svg")
    if asked.json:
        told = {name: {"episodes": m["episodes"], "success": m["success"]} for name, m in results["methods"].items()}
        print(json.dumps(told))
    else:
        print(f"\n{table(results)}\n\nwritten: {out / 'results.json'}, results.md, curves.svg, front.svg")
    return code


def run() -> None:
    flags.DEFINE_string("out", "runs/what_seed_adds", "directory of all runs")
    flags.DEFINE_list("methods", None, "names of VARIANTS, or of presets; default: all of VARIANTS")
    flags.DEFINE_integer("seeds", 5, "seeds of each method", lower_bound=1)
    flags.DEFINE_integer("first_seed", 0, "the first of them", lower_bound=0)
    flags.DEFINE_integer("iterations", None, "iterations of each run; default: the config's", lower_bound=1)
    flags.DEFINE_bool("json", False, "end with one JSON object: method -> episodes, success per evaluation")
    flags.DEFINE_bool("plot_only", False, "run nothing, compare what is there")
    app.run(main, flags_parser=lambda argv: flags.FLAGS(argv, known_only=True))


if __name__ == "__main__":
    run()
