"""Second attempts: some of an iteration's tasks are played once more, with the skill just written in the prompt.

They say what a skill is worth, which a teacher's log-probs cannot: by how much a group's episodes win more often with a
skill than without. Each use of them is a factor of its own: as a weight of the distillation (`distill.value`), as
training rows for following a skill (`hindsight.train_second`), as the analyzer's reward (`loss.gen_reward`).

Of the `rollout.group` episodes of a task a share (`hindsight.second_attempts`) are second attempts, so an iteration
plays as many episodes with them as without.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from seed_jax.rollout import play
from seed_jax.runtime import multihost
from seed_jax.types import Episode, SamplingParams

PRIOR = 2.0  # second attempts that the mean over all groups counts for in the value of one group


def split_group(rollout, hindsight) -> tuple[int, int]:
    """(first, second) attempts at each task. With a share above 0 there is at least one second attempt."""
    if not hindsight.second_attempts:
        return rollout.group, 0
    seconds = max(1, round(hindsight.second_attempts * rollout.group))
    return rollout.group - seconds, seconds


def plan(episodes: Sequence[Episode], count: int, first_number: int) -> list[Episode]:
    """`count` unplayed second attempts of each group whose episodes have a skill, each with the skill of the next of
    them in order: whether it won does not matter, so that the value of a skill is not biased.

    first_number: behind the numbers (`index`) of all first attempts, of all hosts
    """
    groups: dict[int, list[Episode]] = defaultdict(list)
    for episode in episodes:
        if episode.skill is not None and episode.turns and not episode.error:
            groups[episode.group].append(episode)
    planned = []
    for group, members in sorted(groups.items()):
        for number in range(count):
            of = members[number % len(members)]
            planned.append(
                Episode(
                    task_id=of.task_id,
                    family=of.family,
                    goal=of.goal,
                    group=group,
                    index=first_number + group * count + number,
                    given=of.skill,
                    attempt_of=of.index,
                )
            )
    return planned


def play_seconds(run, episodes: Sequence[Episode], tasks: Sequence[Any], iteration: int, counts: Counter) -> list:
    """The second attempts of an iteration, played. tasks: of the first ones."""
    config = run.config
    first, count = split_group(config.rollout, config.hindsight)
    planned = plan(episodes, count, config.rollout.tasks * first)
    by_id = {task.id: task for task in tasks}
    played = play(
        run.sampler,
        run.tokenizer,
        run.setup.world,
        [by_id[episode.task_id] for episode in planned],
        group=1,
        episodes=planned,
        stream=iteration,
        counts=counts,
        params=SamplingParams(config.rollout.max_response_tokens, config.rollout.temperature),
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        skills=run.skills,
        on_turn=run.on_turn,
    )
    counts["second_without_skill"] += count * len({episode.group for episode in episodes}) - len(planned)
    return played


def set_values(episodes: Sequence[Episode], seconds: Sequence[Episode]) -> None:
    """`value` of the first attempts of each group: success of its second attempts minus success of its first ones.

    Two or three attempts say little, so it is drawn towards the mean over all groups (of all hosts, which meet here),
    which counts as PRIOR attempts; a group without second attempts has that mean. 0 if there are none at all.
    """
    without, with_skill = _rates(episodes), _rates(seconds)
    both = {group: (rate - without[group][0], count) for group, (rate, count) in with_skill.items() if group in without}
    found = multihost.gather_json([difference for difference, _ in both.values()])
    differences = [difference for part in found for difference in part]
    mean = float(np.mean(differences)) if differences else 0.0
    for episode in episodes:
        difference, count = both.get(episode.group, (0.0, 0))
        episode.value = (count * difference + PRIOR * mean) / (count + PRIOR)


def skill_values(episodes: Sequence[Episode], seconds: Sequence[Episode]) -> dict[int, float]:
    """{number of a first attempt: success of the second attempts that read its skill, minus its group's without}."""
    without, found = _rates(episodes), defaultdict(list)
    for second in seconds:
        if not second.error and second.group in without:
            found[second.attempt_of].append(second.won - without[second.group][0])
    return {number: float(np.mean(values)) for number, values in found.items()}


def as_groups(seconds: Sequence[Episode], config) -> list[Episode]:
    """Copies in groups of their own: what is won with a skill is compared only with what is won with one."""
    offset = config.rollout.tasks
    return [dataclasses.replace(episode, group=episode.group + offset) for episode in seconds]


def metrics(episodes: Sequence[Episode], seconds: Sequence[Episode], counts: Counter) -> dict[str, float]:
    """Success with and without the skill in the prompt, over the groups that have both; {} without second attempts."""
    without, with_skill = _rates(episodes), _rates(seconds)
    groups = sorted(without.keys() & with_skill.keys())
    if not groups:
        return {}
    before = float(np.mean([without[group][0] for group in groups]))
    after = float(np.mean([with_skill[group][0] for group in groups]))
    return {
        "second/success_rate": after,
        "second/first_success_rate": before,
        "second/margin": after - before,
        "second/episodes": len(seconds),
        "second/without_skill": counts["second_without_skill"],
    }


def _rates(episodes: Sequence[Episode]) -> dict[int, tuple[float, int]]:
    """{group: (share of its episodes that won, how many they are)}; episodes lost to an error do not count."""
    won: dict[int, list[bool]] = defaultdict(list)
    for episode in episodes:
        if not episode.error:
            won[episode.group].append(episode.won)
    return {group: (float(np.mean(values)), len(values)) for group, values in won.items()}
