"""The task schedule: pure, balanced over families, nothing repeated before everything was played."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import pytest

from seed_jax.tasks import schedule


class Item(NamedTuple):
    id: str
    family: str


def items(**sizes: int) -> list[Item]:
    return [Item(f"{family}{n}", family) for family, size in sizes.items() for n in range(size)]


def stream(tasks, seed: int, iterations: int, count: int, start: int = 0) -> list[str]:
    return [t.id for i in range(start, start + iterations) for t in schedule(tasks, seed, i, count)]


def test_balanced_over_families():
    tasks = items(a=40, b=10, c=5)
    for iteration in range(20):
        families = Counter(task.family for task in schedule(tasks, 0, iteration, 16))
        assert max(families.values()) - min(families.values()) <= 1
    whole = Counter(task.family for i in range(3) for task in schedule(tasks, 0, i, 16))
    assert set(whole.values()) == {16}


def test_every_task_of_a_family_once_before_one_is_repeated():
    drawn = stream(items(a=7, b=3), 4, 10, 6)  # 30 of each family
    for family, size in (("a", 7), ("b", 3)):
        mine = [name for name in drawn if name.startswith(family)]
        passes = [mine[i : i + size] for i in range(0, len(mine) - size + 1, size)]
        assert all(len(set(one)) == size for one in passes)
        assert len({tuple(one) for one in passes}) > 1, "each pass has its own order"


def test_pure_and_resumable():
    tasks = items(a=9, b=9, c=9)
    whole = stream(tasks, 1, 12, 5)
    assert whole == stream(tasks, 1, 12, 5)
    assert whole[35:] == stream(tasks, 1, 5, 5, start=7)
    assert whole != stream(tasks, 2, 12, 5)
    assert whole == stream(tasks, 1, 6, 10), "only the position in the stream counts, not where iterations cut it"


def test_no_tasks():
    with pytest.raises(ValueError, match="no tasks to train on"):
        schedule([], 0, 0, 4)
