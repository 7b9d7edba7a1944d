"""Which tasks an iteration plays: a pure function of (seed, iteration), balanced over task families."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np


def schedule(tasks: Sequence[Any], seed: int, iteration: int, count: int) -> list[Any]:
    """The `count` tasks of an iteration (from 0).

    Families take turns; inside a family every task is played once, in an order drawn anew for each pass, before one
    is repeated.
    Nothing is remembered between calls, so a resumed run continues where it stopped.
    """
    if not tasks:
        raise ValueError("there are no tasks to train on")
    families: dict[str, list[Any]] = defaultdict(list)
    for task in tasks:
        families[task.family].append(task)
    names = sorted(families)
    return [_draw(families, names, seed, iteration * count + i) for i in range(count)]


def _draw(families, names, seed: int, position: int):
    family = position % len(names)
    members = families[names[family]]
    turn = position // len(names)
    order = np.random.default_rng((seed, family, turn // len(members))).permutation(len(members))
    return members[order[turn % len(members)]]
