"""The part of launch.evaluate behind --skills: the same games again with a skill in the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from seed_jax import teacher
from seed_jax.hindsight.evidence import truth
from seed_jax.hindsight.sources import LIBRARIES, Skills
from seed_jax.rollout import World
from seed_jax.types import Episode

WRITTEN = ("self", "wrong", "placebo")  # kinds of skills that begin with one that the policy has written


class SkillsError(ValueError):
    """Skills that an environment or a command line cannot give."""


def prepare(config, kind: str) -> None:
    """Changes a config so that its policy can write and read skills of `kind`, and nothing else is asked of it."""
    hindsight = config.hindsight
    if kind != "library":
        hindsight.source = "self_hindsight"
    elif hindsight.source not in LIBRARIES:
        hindsight.source = "static_library"
    hindsight.control, hindsight.at_eval, hindsight.granularity = "none", "no", "episode"
    hindsight.at_rollout = hindsight.second_attempts = 0.0
    hindsight.teach_readers = hindsight.train_second = False
    config.eval.teacher_games = 1  # the sampler's slots hold a prompt with its skill


def check_world(kind: str, part: str, name: str, domain: Any) -> None:
    """Raises SkillsError for skills that the environment `name` does not know."""
    if kind == "true" and truth(domain, ()) is None:
        raise SkillsError(f"--skills=true: the environment {name!r} does not tell what would solve a task; use self")
    if part != "all" and not hasattr(domain, "skill_parts"):
        raise SkillsError(
            f"--skill_part={part}: the environment {name!r} does not tell workflow and places apart; use all"
        )


def measure(
    kind: str,
    part: str,
    player: teacher.Player,
    tasks: Sequence[Any],
    episodes: Sequence[Episode],
) -> dict[str, Any]:
    """What `teacher.compare` says of the bare `episodes` (repeat by repeat, in the order of the tasks) and the same
    games with their skills; and of the skills, how many could be read, in how many turns there was no room for them,
    and some examples."""
    by_id = {task.id: task for task in tasks}
    mine = max(1, len({episode.index for episode in episodes}))
    student = teacher.copies(episodes)
    played, counts = [], None
    if kind in WRITTEN:
        counts = teacher.write_skills(player, student)
        for episode in student:  # before a placebo takes their place, which is as long as they are
            episode.skill = teacher.only_part(episode.skill, part, player.world.domain)
    for repeat in range(len(student) // mine):
        part_of = student[repeat * mine : (repeat + 1) * mine]
        given = teacher.chosen_skills(kind, player, part_of, by_id)
        if kind not in WRITTEN:
            given = [teacher.only_part(skill, part, player.world.domain) for skill in given]
        played += teacher.play_again(player, part_of, given, by_id, repeat)
    result = teacher.compare(student, played)
    result |= {"temperature": player.temperature, "skills": kind, "part": part}
    result["turns_without_room"] = sum(not read for e in played if e.given for read in player.skills.had_room(e))
    if counts is not None:
        result["parse_rate"] = counts["parsed"] / max(1, counts["analyzed"])
    result["examples"] = [
        {"task": e.task_id, "student_won": s.won, "teacher_won": e.won, "skill": e.given.text}
        for s, e in zip(student, played, strict=True)
        if e.given
    ][:8]
    return result


def format_skills(result: dict[str, Any]) -> str:
    """Lines for the terminal."""
    lines = []
    for r in result["temperatures"]:
        (low, high), lost, won = r["margin"]["interval"], r["first_lost"], r["first_won"]
        of_part = "" if r["part"] == "all" else f", {r['part']} only"
        lines += [
            f"skills: {r['skills']}{of_part}, T={r['temperature']:g}, {r['games']} games, {r['coverage']:.3f} of them "
            "with a skill" + (f", {r['parse_rate']:.3f} of the answers parse" if "parse_rate" in r else ""),
            f"  student {_pm(r['student'])}, teacher {_pm(r['teacher'])}, margin {_pm(r['margin'])} "
            f"[{low:+.3f}, {high:+.3f}]",
            f"  teacher where the student lost {_pm(lost['teacher'])} ({lost['episodes']}), where it won "
            f"{_pm(won['teacher'])} ({won['episodes']})",
        ]
        width = max(map(len, r["family"]))
        lines += [
            f"  {name:<{width}}  {_pm(f['student'])} -> {_pm(f['teacher'])}  ({f['episodes']})"
            for name, f in r["family"].items()
        ]
        if r["turns_without_room"]:
            lines.append(
                f"  {r['turns_without_room']} turns were played without the skill, which made the prompt too long; "
                "raise hindsight.max_skill_tokens"
            )
        if warning := teacher.nothing_to_give(r["margin"]):
            lines.append(f"  {warning}")
    return "\n".join(lines)


def _pm(value: dict[str, float]) -> str:
    return f"{value['success_rate']:.3f} ± {value['standard_error']:.3f}"


def player_of(config, policy: Any, world: World, skills: Skills, temperature: float, on_turn) -> teacher.Player:
    return teacher.Player(
        policy.sampler, policy.tokenizer, world, skills, temperature, config.eval.seed,
        config.rollout.max_response_tokens, config.rollout.max_prompt_tokens, on_turn,
    )  # fmt: skip
