"""The part of launch.annotate that plays: episodes of the bare policy, and later the same tasks with a skill in the
prompt.

Tasks are played in waves of rollout.tasks. What an episode samples depends on its place alone, so what is missing is
played as it would have been, and an episode with a skill has the sampler's keys of the one without.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from launch import common
from launch.environment import open_world, tasks_of
from seed_jax import config as config_lib
from seed_jax import teacher
from seed_jax.evaluate import summarize
from seed_jax.hindsight import dataset, pictures
from seed_jax.hindsight import records as records_lib
from seed_jax.hindsight.client import Client
from seed_jax.hindsight.sources import Skills
from seed_jax.images import shown
from seed_jax.models import hf
from seed_jax.rollout import play
from seed_jax.runtime.logging import TurnProgress, append_jsonl
from seed_jax.runtime.terminal import Countdown
from seed_jax.served import CharacterTokenizer, ServedSampler
from seed_jax.tasks import schedule
from seed_jax.types import Episode, SamplingParams, Skill

ROLLOUT_STREAM = (1 << 29) + (1 << 28)  # apart from evaluations (from 1 << 29 on, a few) and from training


class Policy(NamedTuple):
    """What plays; skills: puts the skills of episodes into their prompts, None if there are none."""

    sampler: Any
    tokenizer: Any
    max_prompt_tokens: int
    skills: Skills | None = None


class Wave(NamedTuple):
    """Episodes that are played together, and the task of each."""

    tasks: list[Any]
    episodes: list[Episode]


def chosen_tasks(config) -> list:
    """The training tasks that are played, families in turn. A longer list starts with the shorter one."""
    try:
        train, _ = tasks_of(config)
    except (ValueError, FileNotFoundError) as error:
        raise records_lib.RecordError(str(error)) from error
    tasks = schedule(train, config.seed, 0, config.annotate.tasks)
    if len({task.id for task in tasks}) < len(tasks):
        raise config_lib.ConfigError(
            f"annotate.tasks = {len(tasks)}: some families of the {len(train)} training tasks have fewer than their "
            "share; lower it, or raise env.train_tasks"
        )
    return tasks


def waves_of(config) -> list[Wave]:
    """annotate.rollouts unplayed episodes of each of the chosen tasks."""
    tasks, size, group = chosen_tasks(config), config.rollout.tasks, config.annotate.rollouts
    waves = []
    for start in range(0, len(tasks), size):
        slots = [task for task in tasks[start : start + size] for _ in range(group)]
        waves.append(Wave(slots, [Episode(t.id, t.family, t.goal, i // group, i) for i, t in enumerate(slots)]))
    return waves


def open_policy(config, out: Path, server: str | None = None, served_model: str | None = None) -> Policy:
    """The model in model.init, or the one behind a chat service."""
    if server:
        h = config.hindsight
        limits = (h.api_timeout_s, h.api_workers, config.annotate.retries)
        client = Client(server, served_model, *limits, source="--server", cache=out / "cache")
        vision = hf.load_spec(hf.resolve(config.model.init)).vision if config.env.observation == "image" else None
        return Policy(ServedSampler(client), CharacterTokenizer(vision), sys.maxsize)
    return Policy(*common.open_model(config), config.rollout.max_prompt_tokens)


def _play_missing(
    config,
    waves: list[Wave],
    there: set[str],
    opened: Callable[[], Policy],
    append: Callable[[Policy, Episode, int], None],
) -> Counter:
    """Plays the episodes that are not `there`, which grows; the policy is opened if there are any. append: is given
    each with the number of its rollout. Returns counts of `play`."""
    policy, counts, group = None, Counter(), config.annotate.rollouts
    total = sum(len(wave.episodes) for wave in waves)
    countdown, turns = Countdown(total, len(there)), TurnProgress(config.env.max_steps, len(waves))
    name = lambda episode: records_lib.episode_id(episode.task_id, episode.index % group)  # noqa: E731
    first = next(wave.tasks[0] for wave in waves if wave.tasks)
    with open_world(config, [first]) as world:
        for number, wave in enumerate(waves):
            missing = [place for place, episode in enumerate(wave.episodes) if name(episode) not in there]
            if not missing:
                continue
            policy = policy or opened()
            played = play(
                policy.sampler,
                policy.tokenizer,
                world,
                [wave.tasks[place] for place in missing],
                group=1,
                episodes=[wave.episodes[place] for place in missing],
                params=SamplingParams(config.rollout.max_response_tokens, config.annotate.temperature),
                stream=ROLLOUT_STREAM + number,
                max_prompt_tokens=policy.max_prompt_tokens,
                seed=config.seed,
                counts=counts,
                skills=policy.skills,
                on_turn=turns,
            )
            turns.close()
            for episode in played:
                if not episode.error:
                    append(policy, episode, episode.index % group)
                    there.add(name(episode))
            far = f"{len(there)} episodes of {total}, {countdown.text(len(there))}"
            print(f"wave {number + 1}/{len(waves)}: {far}", flush=True)
    return counts


# -- without a skill ---------------------------------------------------------------------------------------------------


def collect(config, out: Path, server: str | None = None, served_model: str | None = None) -> dict[str, Any]:
    """Appends the episodes that are not there yet; returns the report."""
    records_lib.check_settings(out, "rollouts", _settings(config, server, served_model))
    path = out / records_lib.ROLLOUTS_FILE
    records_lib.mend(path)
    waves = waves_of(config)

    def append(_: Policy, episode: Episode, rollout: int) -> None:
        pictures.store(out, shown(episode.turns))
        append_jsonl(path, records_lib.to_record(episode, rollout))

    there = {record["episode"] for record in records_lib.read_records(path)}
    counts = _play_missing(config, waves, there, lambda: open_policy(config, out, server, served_model), append)
    return _rollout_report(records_lib.read_records(path), sum(len(wave.episodes) for wave in waves), counts)


def _settings(config, server: str | None = None, served_model: str | None = None) -> dict[str, Any]:
    """What an episode depends on. The number of tasks does not shape those that are there."""
    values = config_lib.flatten(config)
    return {
        **{field: value for field, value in values.items() if _shapes_rollouts(field)},
        "server": server,
        "served_model": served_model,
    }


def _shapes_rollouts(field: str) -> bool:
    free = (
        "env.workers",
        "env.step_timeout_s",
        "rollout.batch",
        "rollout.analysis_batch",
        "rollout.prompt_bucket",
        "rollout.group",
    )
    if field.startswith(free) or field in ("rollout.temperature", "rollout.max_rounds"):
        return False
    return field.startswith(("env.", "rollout.")) or field in (
        "seed", "model.init", "model.dtype", "annotate.rollouts", "annotate.temperature",
    )  # fmt: skip


def _rollout_report(records: list[dict[str, Any]], wanted: int, counts: Counter) -> dict[str, Any]:
    episodes = [records_lib.to_episode(record) for record in records]
    summary = summarize(episodes, [episode.task_id for episode in episodes])
    return {"missing": max(0, wanted - len(records)), **_drops(counts), **summary}


def _drops(counts: Counter) -> dict[str, int]:
    return {name: counts[name] for name in ("prompt_truncated", "prompt_overflow", "env_errors")}


# -- with a skill ------------------------------------------------------------------------------------------------------


def follow(config, out: Path) -> dict[str, Any]:
    """For every usable skill plays its task once more, with that skill in the prompt. Appends the episodes that are not
    there yet; returns the report."""
    bare, skills = dataset.load_sources(
        (out / records_lib.ROLLOUTS_FILE, "rollouts"), (out / records_lib.SKILLS_FILE, "skills")
    )
    other_player = _other_player(config, out)
    read = {field: config_lib.flatten(config)[field] for field in ("hindsight.placement", "hindsight.max_skill_tokens")}
    records_lib.check_settings(out, "following", {**_settings(config), **read})
    usable = {line["episode"]: Skill(line["summary"], line["skill"]) for line in skills if line["skill"]}
    waves = _with_skills(config, usable)
    if other_player:
        print(
            f"note: the episodes without a skill are of another player ({other_player}), so the report has no margin; "
            "launch.evaluate --skills=self measures it",
            file=sys.stderr,
        )
    path = out / records_lib.FOLLOWED_FILE
    records_lib.mend(path)

    def opened() -> Policy:
        policy = open_policy(config, out)
        return policy._replace(skills=Skills(config, policy.tokenizer))

    def append(policy: Policy, episode: Episode, rollout: int) -> None:
        pictures.store(out, shown(episode.turns))
        append_jsonl(path, followed_record(policy.skills, episode, rollout))

    counts = _play_missing(config, waves, {line["episode"] for line in _followed(path, usable)}, opened, append)
    followed = _followed(path, usable)
    report = {
        "missing": max(0, sum(len(wave.episodes) for wave in waves) - len(followed)),
        "without_usable_skill": len(skills) - len(usable),
        "turns_without_room": sum(not turn["with_skill"] for line in followed for turn in line["turns"]),
        **_drops(counts),
        "same_player": not other_player,
        **_compared(bare, followed, not other_player),
    }
    if not other_player and (warning := teacher.nothing_to_give(report["margin"])):
        print(f"note: {warning}", file=sys.stderr)
    return report


def _other_player(config, out: Path) -> str:
    """In what the policy of the bare episodes is not the one that plays now; "" if both can be compared. Raises
    RecordError if the games are not the same."""
    noted, mine = records_lib.noted_settings(out).get("rollouts"), _settings(config)
    differing = [] if noted is None else [field for field in mine if noted.get(field) != mine[field]]
    shown_as = {field: f"{field}: {noted.get(field)!r} -> {mine[field]!r}" for field in differing}
    games = [field for field in differing if field.startswith("env.") or field in ("seed", "annotate.rollouts")]
    if games:
        raise records_lib.RecordError(
            f"the episodes of {out} are of other games (there -> yours): {', '.join(shown_as[f] for f in games)}; use "
            "the config that they were made with"
        )
    return ", ".join(shown_as[field] for field in differing if field != "rollout.tasks")


def _with_skills(config, usable: dict[str, Skill]) -> list[Wave]:
    """The waves, with their skills, of those episodes that have one; a wave may be empty, which keeps its number."""
    waves, group = waves_of(config), config.annotate.rollouts
    for wave in waves:
        for episode in wave.episodes:
            episode.given = usable.get(records_lib.episode_id(episode.task_id, episode.index % group))
    kept = [[place for place, episode in enumerate(wave.episodes) if episode.given] for wave in waves]
    if not any(kept):
        raise records_lib.RecordError(
            f"{records_lib.SKILLS_FILE} has no usable skill for the tasks of this config; see report_skills.json"
        )
    return [
        Wave([wave.tasks[i] for i in places], [wave.episodes[i] for i in places])
        for wave, places in zip(waves, kept, strict=True)
    ]


def followed_record(skills: Skills, episode: Episode, rollout: int) -> dict[str, Any]:
    """A line of followed.jsonl: the episode, the skill that it was given, and of each turn whether its prompt had room
    for it. The prompts are those without."""
    record = records_lib.to_record(episode, rollout) | {"skill": episode.given.text}
    for turn, had_room in zip(record["turns"], skills.had_room(episode), strict=True):
        turn["with_skill"] = had_room
    return record


def _followed(path: Path, usable: dict[str, Skill]) -> list[dict[str, Any]]:
    """The lines whose skill is still the one of skills.jsonl."""
    lines = records_lib.read_records(path)
    return [line for line in lines if line["episode"] in usable and line["skill"] == usable[line["episode"]].text]


def _compared(bare: list[dict[str, Any]], followed: list[dict[str, Any]], same_player: bool) -> dict[str, Any]:
    """`teacher.compare` of the episodes with a skill and those about which it was written; without what needs both to
    be of one player if they are not."""
    by_name = {record["episode"]: record for record in bare}
    before = [records_lib.to_episode(by_name[line["episode"]], place) for place, line in enumerate(followed)]
    after = [records_lib.to_episode(line, place) for place, line in enumerate(followed)]
    result = teacher.compare(before, after)
    del result["coverage"]  # all of them have a skill
    if same_player:
        return result
    of_teacher = lambda part: {name: part[name] for name in ("episodes", "teacher")}  # noqa: E731
    family = {name: of_teacher(part) for name, part in result["family"].items()}
    return {**of_teacher(result), "games": result["games"], "family": family}
