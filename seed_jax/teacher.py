"""The teacher as a player: whether the policy wins more often with a skill in its prompt than without.

Distillation can give at most what the teacher has. So the games of a panel are played bare, a skill is found for each
of these episodes, and the same games are played again, with the same keys of the sampler, with that skill in the
prompt. What the skill says is then told apart from its mere presence by skills that are about something else.

Skills (`KINDS`): "self", what the policy writes about its own episode; "true", what the environment knows to be right;
"wrong", those of other tasks (of another family where there is one); "placebo", filler words of equal length;
"library", those of a static library or bank.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from seed_jax.evaluate import EVAL_STREAM, REPEAT_STRIDE, PanelError, rate
from seed_jax.hindsight.analyzer import analyze
from seed_jax.hindsight.sources import Skills, swap_skills
from seed_jax.report.paired import paired
from seed_jax.rollout import World, play
from seed_jax.runtime import multihost
from seed_jax.types import Episode, SamplingParams, Skill

KINDS = ("self", "true", "wrong", "placebo", "library")
PARTS = ("all", "workflow", "places")
ANALYSIS_STREAM = (1 << 29) + 3  # of analyses of panel episodes, which training never makes


class Player(NamedTuple):
    """Who plays, and how: as in `evaluate`, with the `Skills` that put a skill into a prompt."""

    sampler: Any
    tokenizer: Any
    world: World
    skills: Skills
    temperature: float
    seed: int
    max_tokens: int
    max_prompt_tokens: int
    on_turn: Callable[[int, int], None] = lambda step, live: None


def copies(episodes: Sequence[Episode]) -> list[Episode]:
    """The episodes without what was written about them: the caller's stay as they are."""
    return [dataclasses.replace(episode, skill=None, skill_error=None, written=None) for episode in episodes]


def write_skills(player: Player, episodes: Sequence[Episode]) -> Counter:
    """The policy analyzes the episodes: each gets a `skill` or a `skill_error`. Returns the analyzer's counts."""
    skills = player.skills
    with multihost.together():
        return analyze(
            player.sampler, player.tokenizer, episodes, skills.hindsight, skills.style, ANALYSIS_STREAM
        )


def chosen_skills(
    kind: str, player: Player, episodes: Sequence[Episode], tasks: Mapping[str, Any]
) -> list[Skill | None]:
    """A skill of `kind` for each episode, which carries the one that was written about it. tasks: by their ids."""
    if kind == "true":
        return [Skill("", player.world.domain.true_skill(tasks[episode.task_id])) for episode in episodes]
    if kind == "library":
        return [player.skills.find(episode) for episode in episodes]
    given = copies(episodes)
    for copy, episode in zip(given, episodes, strict=True):
        copy.skill = episode.skill
    if kind == "wrong":
        swap_skills(given)
    elif kind == "placebo":
        for episode in given:
            episode.skill = episode.skill and player.skills.placebo_of(episode.skill)
    return [episode.skill for episode in given]


def only_part(skill: Skill | None, part: str, domain: Any) -> Skill | None:
    """The skill's sentences about what to do ("workflow"), or about where things are ("places"); None if it has none
    such."""
    if part == "all" or skill is None:
        return skill
    text = domain.skill_parts(skill.text or "")[PARTS.index(part) - 1]
    return Skill(skill.summary, text) if text else None


def play_again(
    player: Player,
    episodes: Sequence[Episode],
    skills: Sequence[Skill | None],
    tasks: Mapping[str, Any],
    repeat: int = 0,
) -> list[Episode]:
    """The same games with the same keys of the sampler, each with its skill in the prompt. Raises PanelError."""
    again = [
        Episode(e.task_id, e.family, e.goal, group=e.group, index=e.index, given=skill)
        for e, skill in zip(episodes, skills, strict=True)
    ]
    with multihost.together():
        played = play(
            player.sampler,
            player.tokenizer,
            player.world,
            [tasks[episode.task_id] for episode in again],
            group=1,
            episodes=again,
            params=SamplingParams(player.max_tokens, player.temperature),
            stream=EVAL_STREAM + repeat * REPEAT_STRIDE,
            max_prompt_tokens=player.max_prompt_tokens,
            seed=player.seed,
            skills=player.skills,
            on_turn=player.on_turn,
        )
    if lost := [episode for episode in played if episode.error]:
        raise PanelError(f"{len(lost)} of {len(played)} games failed, first {lost[0].task_id}: {lost[0].error}")
    return played


def compare(student: Sequence[Episode], teacher: Sequence[Episode]) -> dict[str, Any]:
    """Both as players of the same games, pair by pair; of many hosts, of the games of all.

    student, teacher, margin (teacher minus student): success_rate and standard_error, the margin also its bootstrap
    interval; first_lost, first_won: the teacher's success on the games that the student lost and won; family: all three
    by task family; coverage: share of the games for which there was a skill.
    """
    student, teacher = (sorted(multihost.gather_episodes(e), key=lambda e: e.index) for e in (student, teacher))
    difference = paired(_records(teacher), _records(student))  # raises if they are not of the same games
    games = [episode.task_id for episode in student]
    before, after = (np.array([episode.won for episode in played], float) for played in (student, teacher))
    families = np.array([episode.family for episode in student])

    def of(where: np.ndarray) -> dict[str, Any]:
        values = {"student": before[where], "teacher": after[where], "margin": (after - before)[where]}
        chosen = [game for game, kept in zip(games, where, strict=True) if kept]
        return {
            "episodes": int(where.sum()),
            **{
                name: dict(zip(("success_rate", "standard_error"), rate(value, chosen), strict=True))
                for name, value in values.items()
            },
        }

    result = of(np.ones(len(games), bool))
    result["margin"] |= {name: difference[name] for name in ("interval", "p_value", "better_on", "worse_on")}
    return result | {
        "games": len(set(games)),
        "coverage": float(np.mean([episode.given is not None for episode in teacher])),
        "first_lost": of(before == 0),
        "first_won": of(before == 1),
        "family": {str(name): of(families == name) for name in sorted(set(families))},
    }


def _records(episodes: Sequence[Episode]) -> list[dict[str, Any]]:
    return [{"task": e.task_id, "family": e.family, "won": e.won} for e in episodes]


def nothing_to_give(margin: Mapping[str, Any]) -> str | None:
    """What to say of a teacher that is not measurably ahead of the student; None if it is."""
    low, high = margin["interval"]
    if low > 0:
        return None
    return (
        f"with its skill the policy wins {margin['success_rate']:+.3f} [{low:+.3f}, {high:+.3f}] more of these games "
        "than without: distillation has nothing to give here"
    )


def told(measured: Mapping[str, Any]) -> str:
    """A line for the terminal, and a warning below it if there is nothing to distill."""
    own, wrong = measured["self"], measured["wrong"]
    low, high = own["margin"]["interval"]
    line = (
        f"  the teacher on {own['games']} of these games: {own['teacher']['success_rate']:.3f} with its skill, "
        f"{own['student']['success_rate']:.3f} without, margin {own['margin']['success_rate']:+.3f} "
        f"[{low:+.3f}, {high:+.3f}]"
    )
    line += f"; {wrong['teacher']['success_rate']:.3f} with wrong skills" if wrong else ""
    warning = nothing_to_give(own["margin"])
    return line + (f"\n  warning: {warning}" if warning else "")


# -- in training -------------------------------------------------------------------------------------------------------


def measures(run) -> bool:
    """Whether a run measures its teacher: it has one whose skill is about a single episode, and bare games of the panel
    to compare with."""
    single = run.skills.library is not None or run.skills.source in ("self_hindsight", "ground_truth")
    return bool(run.config.eval.teacher_games) and run.distills and single and run.skills.at_eval[0] is False


def measure(run, episodes: Sequence[Episode], temperature: float) -> dict[str, Any]:
    """The run's own teacher, its control applied, and the same with wrong skills, on some games of the panel.

    episodes: the headline's, of this host. Returns {"self": as `compare`, "wrong": the same or None}.
    """
    config = run.config
    tasks = {task.id: task for task in run.setup.panel}
    places = set(in_turn([task.family for task in run.setup.panel], config.eval.teacher_games))
    student = copies([episode for episode in episodes if episode.index in places])
    player = Player(
        run.sampler, run.tokenizer, run.setup.world, run.skills, temperature, config.eval.seed,
        config.rollout.max_response_tokens, config.rollout.max_prompt_tokens, run.on_turn,
    )  # fmt: skip
    if run.skills.source == "self_hindsight":
        write_skills(player, student)
    run.skills.assign(student)
    result = {"self": compare(student, play_again(player, student, [e.skill for e in student], tasks)), "wrong": None}
    if run.skills.control == "none":
        wrong = chosen_skills("wrong", player, student, tasks)
        result["wrong"] = compare(student, play_again(player, student, wrong, tasks))
    return result


def in_turn(families: Sequence[str], count: int) -> list[int]:
    """Places of `count` games, families in turn: the first of each, then the second of each, ..."""
    seen: Counter = Counter()
    ranked = []
    for place, family in enumerate(families):
        ranked.append((seen[family], place))
        seen[family] += 1
    return [place for _, place in sorted(ranked)[:count]]


def teacher_metrics(measured: Mapping[str, Any]) -> dict[str, float]:
    own, wrong = measured["self"], measured["wrong"]
    metrics = {
        "teacher/student_success": own["student"]["success_rate"],
        "teacher/success_self": own["teacher"]["success_rate"],
        "teacher/margin": own["margin"]["success_rate"],
        "teacher/margin_low": own["margin"]["interval"][0],
        "teacher/margin_high": own["margin"]["interval"][1],
        "teacher/coverage": own["coverage"],
    }
    for part in ("first_lost", "first_won"):
        if own[part]["episodes"]:
            metrics[f"teacher/{part}"] = own[part]["teacher"]["success_rate"]
    if wrong:
        metrics["teacher/success_wrong"] = wrong["teacher"]["success_rate"]
    return metrics
