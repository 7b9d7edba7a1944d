"""DAPO's dynamic filter on episodes: rounds are played until enough groups have both outcomes."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

from seed_jax.train.groups import gather, mixed_groups
from seed_jax.types import Episode


def rounds(*rewards: list[list[float]]):
    """play_round and the numbers it was called with; rewards[n] holds the groups of round n."""
    called = []

    def play_round(number: int) -> list[Episode]:
        groups = rewards[len(called)]
        called.append(number)
        flat = [(g, reward) for g, group in enumerate(groups) for reward in group]
        return [Episode("t", "f", "goal", g, i, reward=reward) for i, (g, reward) in enumerate(flat)]

    return play_round, called


def settings(**changes):
    return SimpleNamespace(**{"group_filter": "dynamic", "max_rounds": 3, "tasks": 2, "group": 2, **changes})


EQUAL, MIXED = [0.0, 0.0], [10.0, 0.0]


def test_without_a_filter_one_round_is_played():
    play_round, called = rounds([EQUAL, MIXED])
    counts = Counter()
    played, kept = gather(play_round, 7, settings(group_filter="off"), counts)
    assert called == [7] and played == kept and len(kept) == 4 and not counts


def test_rounds_until_enough_groups_are_mixed():
    play_round, called = rounds([EQUAL, MIXED], [MIXED, MIXED], [MIXED, MIXED])
    counts = Counter()
    played, kept = gather(play_round, 5, settings(), counts)
    assert called == [15, 16], "round numbers are unique over the run, so that tasks and random keys are new"
    assert [(e.group, e.index) for e in played] == [(0, 0), (0, 1), (1, 2), (1, 3), (2, 4), (2, 5), (3, 6), (3, 7)]
    assert [(e.group, e.reward) for e in kept] == [(1, 10.0), (1, 0.0), (2, 10.0), (2, 0.0)]
    assert counts == Counter(rounds=2, groups_left_out=2)


def test_the_number_of_rounds_is_limited():
    play_round, called = rounds([EQUAL, EQUAL], [EQUAL, MIXED], [EQUAL, EQUAL])
    counts = Counter()
    played, kept = gather(play_round, 0, settings(), counts)
    assert called == [0, 1, 2] and len(played) == 12
    assert {e.group for e in kept} == {3}
    assert counts == Counter(rounds=3, groups_left_out=5)


def test_lost_episodes_do_not_make_a_group_mixed():
    episodes = [Episode("t", "f", "g", 0, i, reward=10.0 * (i == 0)) for i in range(3)]
    assert mixed_groups(episodes) == [0]
    episodes[0].error = "crashed"
    assert mixed_groups(episodes) == []
