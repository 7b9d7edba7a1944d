"""Which groups of episodes an update sees: all of a round, or, with DAPO's dynamic filter, those with both outcomes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from seed_jax.runtime import multihost
from seed_jax.types import Episode


def gather(
    play_round: Callable[[int], list[Episode]], iteration: int, rollout, counts: Counter
) -> tuple[list[Episode], list[Episode]]:
    """(episodes played, episodes to learn from). `play_round(n)` plays the n-th round of tasks of the whole run.

    With rollout.group_filter = "dynamic" (arXiv 2503.14476, section 3.2) rounds are played until rollout.tasks groups
    have episodes of different reward, rollout.max_rounds at most; the other groups, and any beyond the number, are left
    out. Of many hosts each has the episodes of its own groups; all of them count the same. Counts: rounds,
    groups_left_out (of this host).
    """
    if rollout.group_filter != "dynamic":
        episodes = play_round(round_number(iteration, rollout))
        return episodes, episodes
    played: list[Episode] = []
    kept: list[int] = []
    for number in range(rollout.max_rounds):
        episodes = play_round(round_number(iteration, rollout) + number)
        for episode in episodes:
            episode.group += number * rollout.tasks
            episode.index += number * rollout.tasks * rollout.group
        played += episodes
        kept += sorted(group for part in multihost.gather_json(mixed_groups(episodes)) for group in part)
        if len(kept) >= rollout.tasks:
            break
    chosen = set(kept[: rollout.tasks])
    counts["rounds"] += multihost.leads() * (number + 1)  # once in the sum over hosts
    counts["groups_left_out"] += len({episode.group for episode in played} - chosen)
    return played, [episode for episode in played if episode.group in chosen]


def round_number(iteration: int, rollout) -> int:
    """The first round of tasks that `gather` plays in an iteration."""
    return iteration * (rollout.max_rounds if rollout.group_filter == "dynamic" else 1)


def mixed_groups(episodes: Sequence[Episode]) -> list[int]:
    """The groups whose episodes have different rewards, in order; episodes lost to an error do not count."""
    rewards: dict[int, set[float]] = defaultdict(set)
    for episode in episodes:
        if not episode.error:
            rewards[episode.group].add(episode.reward)
    return [group for group, values in rewards.items() if len(values) > 1]
