"""What an iteration reports: metrics, one line on the terminal, and its episodes as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from seed_jax import evaluate
from seed_jax.objectives import schedules
from seed_jax.runtime import usage
from seed_jax.runtime.logging import Progress
from seed_jax.train import factors
from seed_jax.types import Episode, Turn

PENALTY_ONLY_WARNING = 0.25


def rollout_metrics(episodes: Sequence[Episode], counts: Counter) -> dict:
    played = [episode for episode in episodes if not episode.error]
    summary = evaluate.summarize(played, [episode.group for episode in played])
    tokens = [len(turn.response_ids) for episode in episodes for turn in episode.turns]
    metrics = {
        "rollout/success_rate": summary["success_rate"],
        "rollout/standard_error": summary["standard_error"],
        "rollout/steps": summary["steps"],
        "rollout/turns": len(tokens),
        "rollout/valid_rate": summary["valid_rate"],
        "rollout/admissible_rate": summary["admissible_rate"],
        "rollout/response_tokens": float(np.mean(tokens)),
        "rollout/prompt_truncated": counts["prompt_truncated"],
        "rollout/prompt_overflow": counts["prompt_overflow"],
        "rollout/env_errors": counts["env_errors"],
        **{f"rollout/{name}": measure["mean"] for name, measure in summary.get("measures", {}).items()},
    }
    if counts["generated_tokens"]:  # acting, analyses and second attempts
        metrics["rollout/generated_tokens"] = counts["generated_tokens"]
    if counts["row_tokens"]:
        metrics["pack/fill"] = counts["used_row_tokens"] / counts["row_tokens"]
    if counts["slot_steps"]:
        metrics |= {
            "rollout/occupancy": counts["new_tokens"] / counts["slot_steps"],
            "rollout/tokens_per_s": counts["new_tokens"] / counts["play_s"],
            "rollout/env_wait_s": counts["env_wait_s"],
        }
    if counts["rounds"]:
        metrics |= {"rollout/rounds": counts["rounds"], "rollout/groups_left_out": counts["groups_left_out"]}
    if counts["analyzed"]:
        metrics |= {
            "skill/parse_rate": counts["parsed"] / counts["analyzed"],
            "skill/elided": counts["elided"],
            **{f"skill/{name}": n for name, n in counts.items() if name.startswith("rejected/")},
        }
    return metrics


def update_metrics(run, counts: Counter, seconds: float) -> dict[str, float]:
    """Tokens a second, and MFU: model FLOPs over what all devices could do in that time (on chips whose peak is known;
    not on a CPU)."""
    metrics = {"update/tokens_per_s": counts["used_row_tokens"] / seconds}
    peak = usage.peak_flops(jax.devices()[0])
    if peak is not None:
        metrics["update/mfu"] = update_flops(run, counts) / (seconds * peak * jax.device_count())
    return metrics


def update_flops(run, counts: Counter) -> float:
    """Of one update: scoring under fixed weights, and forward and backward (twice the forward) of every student row.
    What remat computes again does not count."""
    chosen = factors.choices(run.config)
    student = usage.forward_flops(run.spec, counts["used_row_tokens"], counts["scored_tokens"], counts["seen_tokens"])
    teacher = usage.forward_flops(run.spec, counts["teacher_tokens"], counts["taught_tokens"], counts["shown_tokens"])
    passes = 3 + (run.config.old_logprobs == "recompute") + (chosen.kl != "none")
    return passes * student + (1 + (chosen.teacher == "current")) * teacher


def memory_metrics(phases: Mapping[str, float]) -> dict[str, float]:
    """GB in use on the fullest device of this host when each phase ended, and the most so far; {} on a CPU."""
    now = usage.memory_gb()
    return {f"hbm/{phase}_gb": size for phase, size in phases.items()} | ({"hbm/peak_gb": now[1]} if now else {})


def episode_facts(episode: Episode) -> dict:
    """Of an episode as JSON: which it was, how it ended, its skill and the one it was played with."""
    return {
        "task": episode.task_id,
        "family": episode.family,
        "goal": episode.goal,
        "group": episode.group,
        "index": episode.index,
        "won": episode.won,
        "reward": episode.reward,
        "skill": episode.skill.text if episode.skill else None,
        "skill_error": episode.skill_error,
        "given_skill": episode.given.text if episode.given else None,
        "attempt_of": episode.attempt_of,
    }


def turn_facts(turn: Turn) -> dict:
    """Of a turn as JSON: what was seen and done."""
    names = ("observation", "command", "valid", "admissible")
    return {name: getattr(turn, name) for name in names}


def episode_record(episode: Episode) -> dict:
    """An episode as JSON: what was seen, written and done, how it ended, and its skill."""
    turns = [{**turn_facts(turn), "response": turn.response} for turn in episode.turns]
    return {**episode_facts(episode), **episode.measures, "error": episode.error, "turns": turns}


def outcome_record(iteration: int, result: dict, episodes: Sequence[Episode]) -> dict:
    """What every game of an evaluation came to: runs on the same panel are compared game by game."""
    return {
        "iteration": iteration,
        "temperature": result["temperature"],
        "with_skills": result["with_skills"],
        "outcomes": [
            {"task": episode.task_id, "family": episode.family, "won": episode.won, "steps": len(episode.turns)}
            for episode in episodes
        ],
    }


def eval_metrics(results: list[dict]) -> dict:
    """The first temperature of the config is the headline; the others carry their conditions in the name."""
    first, *others = results
    metrics = {
        f"eval/{name}": first[name]
        for name in ("success_rate", "standard_error", "macro_success_rate", "admissible_rate")
    }
    metrics |= {f"eval/family/{family}": rate for family, rate in first["family"].items()}
    metrics |= {f"eval/{name}": measure["mean"] for name, measure in first.get("measures", {}).items()}
    return metrics | {
        f"eval/success_rate_t{r['temperature']:g}{'_with_skills' if r['with_skills'] else ''}": r["success_rate"]
        for r in others
    }


def conditions(result: dict) -> str:
    """Under what an evaluation was played, in short."""
    return f"T={result['temperature']:g}{' with skills' if result.get('with_skills') else ''}"


def note_gap(config, memory: dict, metrics: dict, update: int) -> None:
    """Keeps in `memory` what the handoff schedule must know about the teacher gap of the updates so far."""
    if config.distill.schedule == "handoff" and metrics["opd/token_fraction"] > 0:
        memory["handoff"] = schedules.watch_gap(
            memory.get("handoff", {}),
            metrics["opd/gap_size"],
            update,
            start=config.distill.schedule_start,
            patience=config.distill.schedule_patience,
        )


def report(progress: Progress, done: int, metrics: dict, compiled_again: Sequence[str] = ()) -> None:
    progress.line(
        done,
        success=metrics["rollout/success_rate"],
        admissible=metrics["rollout/admissible_rate"],
        skills=metrics.get("skill/parse_rate"),
        gate=metrics.get("opd/gate_mean"),
        second=metrics.get("second/success_rate"),
        held_out=metrics.get("eval/success_rate"),
        **{"tokens/s": round(metrics["rollout/tokens_per_s"])} if "rollout/tokens_per_s" in metrics else {},
    )
    if metrics["adv/penalty_only_groups"] > PENALTY_ONLY_WARNING:
        progress.message(
            f"  warning: in {metrics['adv/penalty_only_groups']:.0%} of the groups only the penalty differs "
            "(consider adv.invalid_penalty='after_norm' or adv.std_floor)"
        )
    if metrics["update/skipped_steps"]:
        progress.message(
            f"  warning: {metrics['update/skipped_steps']:.0f} optimizer steps skipped, their gradient was not finite"
        )
    if compiled_again:
        progress.message(f"  warning: compiled again for other shapes: {', '.join(compiled_again)}")
