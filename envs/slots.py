"""What both kinds of pool say about slots."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from envs.base import EnvError, Task

_log = logging.getLogger(__name__)


def lost_episode(task: Task, reason: str) -> EnvError:
    _log.warning("the episode of task %s is lost: %s", task.id, reason)
    return EnvError(f"task {task.id}: {reason}")


def check_distinct(slots: Sequence[int]) -> None:
    if len(set(slots)) != len(slots):
        raise ValueError(f"a slot is named twice in one call: {list(slots)}")


def check_open(slots: Sequence[int], games: dict[int, Any]) -> None:
    closed = [slot for slot in slots if slot not in games]
    if closed:
        raise ValueError(f"no game runs in slots {closed}: they were never opened, or their episode was lost")
