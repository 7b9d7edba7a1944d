"""The end of a run: Hugging Face export, the skill table on held-out episodes, summary.json and what it prints."""

from __future__ import annotations

import functools
import json
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from seed_jax import config as config_lib
from seed_jax import teacher
from seed_jax.diagnostics import format_table, skill_table
from seed_jax.hindsight.analyzer import analyze
from seed_jax.rollout import play
from seed_jax.runtime import multihost
from seed_jax.runtime.logging import (
    EVALUATIONS_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
    TEACHER_FILE,
    jsonable,
    read_jsonl,
    write_whole,
)
from seed_jax.train.export import read_games, write_policy
from seed_jax.train.metrics import conditions
from seed_jax.train.state import TrainState
from seed_jax.train.trajectories import Scorer
from seed_jax.types import Episode, SamplingParams

DIAGNOSTICS_STREAM = (1 << 29) + 1


def finish(run, state: TrainState) -> dict:
    """Writes export/ and summary.json of a run that has reached its last iteration; returns the summary.

    Of many hosts the first one does it; the others only hand over their part of the weights.
    """
    with run.timer("export"):
        export(run, state)
    table = None
    if run.distills and run.config.log.diagnostics_episodes:
        with run.timer("diagnostics"):
            table = skill_diagnostics(run, state)

    def write() -> dict:
        summary = jsonable(summarize(run, table))
        write_whole(run.workdir / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")
        run.progress.message(closing_text(run, summary))
        return summary

    return multihost.from_first(write)


def export(run, state: TrainState) -> None:
    """The policy in Hugging Face form: float32 safetensors, config, tokenizer, generation config, model card."""
    params = multihost.on_first_host(state.params) if multihost.many() else state.params
    if not run.leads:
        return
    evaluations = read_jsonl(run.workdir / EVALUATIONS_FILE)
    write_policy(
        params,
        run.spec,
        run.workdir / "export",
        config=run.config,
        model_dir=run.model_dir,
        iteration=evaluations[-1]["iteration"],  # the last weights are always evaluated
        evaluations=evaluations,
        games=read_games(run.workdir),
    )


def skill_diagnostics(run, state: TrainState) -> dict:
    """The skill table of the final weights on panel games at temperature 1, as the policy plays them without skills.

    Its column "self" is about the skills of the run's own source, whatever that is. Of many hosts only the first one
    plays; all score what it has played, with their parts of the weights. {} elsewhere.
    """
    config, world = run.config, run.setup.world
    tasks = list(run.setup.panel)[: config.log.diagnostics_episodes]
    with multihost.together():
        episodes = _diagnosed(run, tasks) if run.leads else []
    run.sampler.release()  # its memory is the scoring's, as it is the update's
    return skill_table(
        functools.partial(Scorer(run, state), "student"),
        run.tokenizer,
        episodes,
        [world.domain.true_skill(task) for task in tasks],
        lambda episode, turn: world.domain.row_class(tasks[episode.index], episode, turn),
        config.env.prompt,
        config.pack.teacher_row_tokens,
        run.skills.encode,
    )


def _diagnosed(run, tasks: Sequence[Any]) -> list[Episode]:
    """Episodes of `tasks` with the skills that the run's source has for them."""
    config = run.config
    episodes = play(
        run.sampler,
        run.tokenizer,
        run.setup.world,
        tasks,
        group=1,
        params=SamplingParams(config.rollout.max_response_tokens, 1.0),
        stream=DIAGNOSTICS_STREAM,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        counts=Counter(),
        on_turn=run.on_turn,
    )
    if run.skills.source == "self_hindsight":
        analyze(run.sampler, run.tokenizer, episodes, config.hindsight, config.env.prompt, DIAGNOSTICS_STREAM)
    run.skills.assign(episodes)
    return episodes


def summarize(run, table: dict | None) -> dict:
    """eval_before and eval_after are held-out success rates at the first temperature of the config; details follow.

    They are without skills unless the config evaluates with them only. teacher: its last measurement, None without any.
    """
    evaluations = read_jsonl(run.workdir / EVALUATIONS_FILE)
    headline = [e for e in evaluations if conditions(e) == conditions(evaluations[0])]
    records, measured = (read_jsonl(run.workdir / file) for file in (METRICS_FILE, TEACHER_FILE))
    minutes = {name: sum(r.get(f"time/{name}_s") or 0.0 for r in records) / 60 for name in _phases(records)}
    for name in ("export", "diagnostics"):
        minutes[name] = run.timer.totals.get(name, 0.0) / 60
    first, last = headline[0], headline[-1]
    return {
        "method": run.config.method,
        "seed": run.config.seed,
        "iterations": records[-1]["iteration"] if records else 0,  # more than asked for if the run was shortened
        "eval_before": first["success_rate"],
        "eval_after": last["success_rate"],
        "minutes": sum(minutes.values()),
        "minutes_by_phase": minutes,
        "standard_error": {"before": first["standard_error"], "after": last["standard_error"]},
        "games": last["games"],
        "evaluations": evaluations,
        "final_training_success": float(np.mean([r["rollout/success_rate"] for r in records[-5:]]))
        if records
        else None,
        "teacher": measured[-1] if measured else None,
        "skill_table": table,
        "config_hash": config_lib.config_hash(run.config),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _phases(records: list[dict]) -> list[str]:
    names = {
        name.removeprefix("time/").removesuffix("_s")
        for record in records
        for name in record
        if name.startswith("time/")
    }
    return sorted(names)


def closing_text(run, summary: dict) -> str:
    """What a run prints last: before and after, the teacher, minutes by phase, the skill table, where things are, what
    to do next."""
    curves: dict[str, list[dict]] = {}
    for evaluation in summary["evaluations"]:
        curves.setdefault(conditions(evaluation), []).append(evaluation)
    lines = ["", f"{summary['method']}: held-out success on {summary['games']} games the policy has never trained on"]
    for name, points in curves.items():
        before, after = points[0], points[-1]
        lines.append(
            f"  {name:<20}{before['success_rate']:.3f} +- {before['standard_error']:.3f}  ->  "
            f"{after['success_rate']:.3f} +- {after['standard_error']:.3f}"
        )
    if summary["teacher"]:
        lines.append(teacher.told(summary["teacher"]))
    phases = ", ".join(f"{name} {value:.1f}" for name, value in summary["minutes_by_phase"].items() if value >= 0.05)
    lines.append(f"{summary['minutes']:.1f} minutes: {phases}")
    if summary["skill_table"]:
        lines += [
            "",
            "Log-prob gap of the reply (of its command), teacher with a skill minus policy, nats, by decision:",
            format_table(summary["skill_table"]),
        ]
    lines += [
        "",
        f"weights for transformers or vLLM: {run.workdir / 'export'}",
        f"metrics and episodes:             {run.workdir}",
        f"curves:                           tensorboard --logdir {run.workdir / 'tensorboard'}",
        f"pages, tokens that skills endorse: python -m launch.report --workdir={run.workdir} --out=report",
        "next: the same with `:grpo` after the config file compares the methods; "
        "--config.iterations=N continues this run",
    ]
    return "\n".join(lines)
