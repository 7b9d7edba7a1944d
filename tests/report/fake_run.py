"""Writes workdirs as a trainer leaves them, without training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from configs import quickstart
from seed_jax import config as config_lib
from seed_jax import teacher as player
from seed_jax.runtime.logging import append_jsonl
from seed_jax.types import Episode, Skill

FAMILIES = ("clean", "heat")
SECOND = 1000  # added to the number of a first attempt


def write(
    workdir: Path,
    *,
    method: str = "seed",
    seed: int = 0,
    won: Sequence[Sequence[bool]] = ((False,) * 8, (True,) * 8),
    changes: Mapping[str, Any] | None = None,
    panel: str = "p" * 64,
    metrics: Mapping[str, Any] | None = None,
    teacher: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """A run whose evaluation number i (greedy) was won where `won[i]` says; games alternate over FAMILIES. changes:
    fields of the config; panel: hash of the panel; metrics: added to every iteration; teacher: one
    measurement (see `measured`) for each of the first evaluations."""
    config = quickstart.get_config(method)
    config.seed, config.iterations = seed, len(won) - 1
    with config.unlocked():
        config.update_from_flattened_dict(dict(changes or {}))
    workdir.mkdir(parents=True)
    (workdir / "config.json").write_text(config_lib.to_json(config))
    games = {part: {"sha256": panel, "count": 8, "games": {}} for part in ("panel", "train")}
    (workdir / "games.json").write_text(json.dumps(games))
    for iteration, outcomes in enumerate(won):
        append_jsonl(workdir / "evaluations.jsonl", {"iteration": iteration, **_evaluation(outcomes)})
        records = [
            {"task": f"game{i}", "family": FAMILIES[i % 2], "won": w, "steps": 5} for i, w in enumerate(outcomes)
        ]
        append_jsonl(
            workdir / "outcomes.jsonl",
            {"iteration": iteration, "temperature": 0.0, "with_skills": False, "outcomes": records},
        )
        if iteration:
            append_jsonl(workdir / "metrics.jsonl", {"iteration": iteration, **_METRICS, **(metrics or {})})
    for iteration, found in enumerate(teacher):
        append_jsonl(workdir / "teacher.jsonl", {"iteration": iteration, **found})
    return workdir


def measured(student: str, own: str, wrong: str | None = None, without_skill: int = 0) -> dict[str, Any]:
    """A measurement of the teacher on len(student) games: "1" where they are won. without_skill: the first so many
    have none."""

    def played(won: str, skill: Skill | None) -> list[Episode]:
        return [
            Episode(f"game{i}", FAMILIES[i % 2], "goal", i, i, won=w == "1", given=None if i < without_skill else skill)
            for i, w in enumerate(won)
        ]

    bare, skill = played(student, None), Skill("", "look there")
    return {
        "self": player.compare(bare, played(own, skill)),
        "wrong": None if wrong is None else player.compare(bare, played(wrong, skill)),
    }


_METRICS = {
    "rollout/success_rate": 0.5,
    "rollout/standard_error": 0.1,
    "rollout/response_tokens": 12.0,
    "rollout/steps": 9.0,
    "rollout/env_errors": 0,
    "rollout/turns": 100,
    "adv/penalty_only_groups": 0.0,
    "update/skipped_steps": 0.0,
    "time/update_s": 10.0,
}


def _evaluation(outcomes: Sequence[bool]) -> dict[str, Any]:
    rate = sum(outcomes) / len(outcomes)
    of_family = {f: sum(outcomes[i::2]) / len(outcomes[i::2]) for i, f in enumerate(FAMILIES)}
    return {
        "temperature": 0.0,
        "with_skills": False,
        "games": len(outcomes),
        "success_rate": rate,
        "standard_error": 0.05,
        "macro_success_rate": sum(of_family.values()) / 2,
        "macro_standard_error": 0.05,
        "family": of_family,
        "family_standard_error": dict.fromkeys(FAMILIES, 0.07),
        "family_episodes": {f: len(outcomes[i::2]) for i, f in enumerate(FAMILIES)},
    }


def episode(turns: int = 2, tokens: int = 4, **fields: Any) -> dict[str, Any]:
    """A trajectory record; its reply has a thought and an action."""
    words = ["<think>", *(f" word{i}" for i in range(tokens - 3)), " </think>", " <action>", " go", " </action>"]
    turn = {
        "observation": "You are in a room.",
        "command": "go",
        "valid": True,
        "admissible": True,
        "skill": "look there",
        "tokens": words,
        "student": [-0.5] * len(words),
        "teacher": [-0.5] * (len(words) - 2) + [0.0, -2.0],
        "wrong": [-1.5] * len(words),
        "thought": [1, len(words) - 4],
        "action": [len(words) - 2, len(words) - 1],
        "kind": None,
    }
    record = {
        "iteration": 1,
        "task": "game0",
        "family": "clean",
        "goal": "clean the cup",
        "group": 0,
        "index": 0,
        "won": True,
        "reward": 10.0,
        "skill": "look there",
        "skill_error": "",
        "wrong_skill": "look elsewhere",
        "given_skill": None,
        "attempt_of": None,
        "turns": [dict(turn) for _ in range(turns)],
    }
    return {**record, **fields}


def attempts(skill: str = "look there", **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A lost first attempt, and the second one that read its skill and won; fields: of both but for their numbers."""
    first = episode(**{"skill": skill, "won": False, **fields})
    other = {"index": first["index"] + SECOND, "attempt_of": first["index"], "given_skill": skill, "won": True}
    second = {**episode(**fields), **other, "skill": None, "skill_error": None, "wrong_skill": None}
    for turn in second["turns"]:
        turn["skill"] = skill
        del turn["teacher"], turn["wrong"]
    return first, second


def record(workdir: Path, *episodes: dict[str, Any], panel: bool = False) -> None:
    with (workdir / ("trajectories_panel.jsonl" if panel else "trajectories.jsonl")).open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in episodes)
