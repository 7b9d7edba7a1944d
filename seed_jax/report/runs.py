"""Workdirs -> what the pages show of them. Only files that a run has left are read; it may still be under way."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from seed_jax import config as config_lib
from seed_jax.report.comparison import read_summary
from seed_jax.runtime.logging import (
    CONFIG_FILE,
    EVALUATIONS_FILE,
    GAMES_FILE,
    METRICS_FILE,
    OUTCOMES_FILE,
    TEACHER_FILE,
    WorkdirError,
    read_config,
    read_jsonl,
)
from seed_jax.train.metrics import conditions

# Fields that the pages tell.
_NEEDED = (
    "method",
    "seed",
    "iterations",
    "env.name",
    "env.data",
    "env.max_steps",
    "model.init",
    "rollout.tasks",
    "rollout.group",
    "rollout.max_response_tokens",
    "hindsight.control",
    "distill.kind",
    "distill.gate",
    "distill.beta",
    "distill.threshold",
)


class ReportError(ValueError):
    """A workdir cannot be shown, or runs cannot be compared; the message says which and why."""


class Final(NamedTuple):
    """The last result on one panel under one condition: a summary of seed_jax.evaluate, every game's outcome ([] if not
    recorded), the iteration it is of, and the hash of the panel's games (None if not recorded)."""

    result: dict[str, Any]
    outcomes: list[dict[str, Any]]
    iteration: int
    sha256: str | None


class Run(NamedTuple):
    """name: unique among the runs shown; config: flat; summary, games: None while there is none."""

    name: str
    workdir: Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    outcomes: list[dict[str, Any]]
    summary: dict[str, Any] | None
    games: dict[str, Any] | None
    evaluated: list[dict[str, Any]]  # results of launch.evaluate beside the run
    teacher: list[dict[str, Any]]  # the teacher as a player, see seed_jax.teacher; [] if it was not measured

    @property
    def method(self) -> str:
        return self.config["method"]

    @property
    def seed(self) -> int:
        return self.config["seed"]

    @property
    def iterations(self) -> int:
        """Iterations that are done."""
        return self.metrics[-1]["iteration"] if self.metrics else 0

    @property
    def conditions(self) -> list[str]:
        """Of its evaluations; the first is the headline."""
        return list(dict.fromkeys(conditions(e) for e in self.evaluations))

    def curve(self, condition: str) -> list[dict[str, Any]]:
        """The evaluations under a condition, by iteration."""
        return sorted((e for e in self.evaluations if conditions(e) == condition), key=lambda e: e["iteration"])

    def finals(self) -> dict[str, Final]:
        """By name of panel and condition: the run's own panel, then those of launch.evaluate."""
        recorded = {(o["iteration"], conditions(o)): o["outcomes"] for o in self.outcomes}
        sha256 = self.games["panel"]["sha256"] if self.games else None
        found = {}
        for name in self.conditions:
            last = self.curve(name)[-1]
            found[name] = Final(last, recorded.get((last["iteration"], name), []), last["iteration"], sha256)
        for evaluation in self.evaluated:
            panel = evaluation["panel"]
            style = " (reference style)" if panel["reference_style"] else ""
            iteration = evaluation["policy"].get("iteration", self.iterations)
            for result in evaluation["results"]:
                name = f"{panel['split']}{style}, {conditions(result)}"
                found[name] = Final(result, result["outcomes"], iteration, panel["sha256"])
        return found

    def series(self, metric: str) -> tuple[list[int], list[float]]:
        """(iterations, values) where the metric has a value."""
        points = [(m["iteration"], m[metric]) for m in self.metrics if m.get(metric) is not None]
        return [x for x, _ in points], [y for _, y in points]


def load_runs(paths: Sequence[str | Path]) -> list[Run]:
    """The runs in `paths`: workdirs, or directories of workdirs such as those of a sweep. Raises ReportError."""
    workdirs = [workdir for path in paths for workdir in _workdirs(Path(path).expanduser())]
    if len(set(map(Path.resolve, workdirs))) < len(workdirs):
        raise ReportError("a workdir is named twice; leave one out")
    names = _names(workdirs)
    return [_load(workdir, name) for workdir, name in zip(workdirs, names, strict=True)]


def _workdirs(path: Path) -> list[Path]:
    if not path.is_dir():
        raise ReportError(f"--workdir={path}: there is no such directory")
    if (path / CONFIG_FILE).is_file():
        return [path]
    inside = sorted(child.parent for child in path.glob(f"*/{CONFIG_FILE}"))
    begun = [child for child in inside if (child / EVALUATIONS_FILE).is_file() or (child / METRICS_FILE).is_file()]
    if not begun:
        what = f"{len(inside)} runs have begun in it, none has a result yet" if inside else "it holds no run"
        raise ReportError(f"--workdir={path}: {what}; name the workdir of launch.train or launch.sweep")
    return begun


def _names(workdirs: Sequence[Path]) -> list[str]:
    """The last part of each path, or as many parts as tell them apart."""
    for parts in range(1, 12):
        names = ["/".join(workdir.resolve().parts[-parts:]) for workdir in workdirs]
        if len(set(names)) == len(names):
            return names
    return [str(workdir) for workdir in workdirs]


def _load(workdir: Path, name: str) -> Run:
    try:
        config = config_lib.flatten(read_config(workdir / CONFIG_FILE, "name the workdir of launch.train"))
        files = (METRICS_FILE, EVALUATIONS_FILE, OUTCOMES_FILE, TEACHER_FILE)
        metrics, evaluations, outcomes, teacher = (read_jsonl(workdir / file) for file in files)
        games = json.loads((workdir / GAMES_FILE).read_text()) if (workdir / GAMES_FILE).is_file() else None
        evaluated = [_evaluation(path) for path in sorted(workdir.glob("evaluation_*.json"))]
    except (WorkdirError, ValueError) as error:
        raise ReportError(f"--workdir={workdir}: {error}") from error
    missing = [field for field in _NEEDED if field not in config]
    if missing:
        raise ReportError(f"--workdir={workdir}: its config has no {missing[0]}; use the version that recorded the run")
    if not metrics and not evaluations:
        raise ReportError(f"--workdir={workdir}: nothing is recorded yet; wait for the first evaluation")
    summary = read_summary(workdir)
    return Run(name, workdir, config, metrics, evaluations, outcomes, summary, games, evaluated, teacher)


def _evaluation(path: Path) -> dict[str, Any]:
    result = json.loads(path.read_text())
    if not isinstance(result, dict) or not {"policy", "panel", "results"} <= result.keys():
        raise ValueError(f"{path.name} is not a result of launch.evaluate; move it away")
    return result


def differing_fields(configs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Fields in which flat configs differ, but for the seed and what a resumed run may change."""
    configs = list(configs)
    fields = sorted({field for config in configs for field in config})
    free = ("seed", "method", *config_lib.FREE_ON_RESUME)
    differs = lambda field: len({repr(config.get(field)) for config in configs}) > 1  # noqa: E731
    return [field for field in fields if differs(field) and not field.startswith(free)]
