"""Which games a run was made of: names and content hashes, so that what is compared is known to be the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envs.base import Task

FORMAT = 1


class ManifestError(ValueError):
    """Games are not what they were; the message names the first and says how many."""


def of_games(tasks: Sequence[Task]) -> dict[str, Any]:
    """{"sha256": of the whole, "count": ..., "games": {task id: hash of its content}}, JSON-able."""
    games = {task.id: _content_hash(task) for task in tasks}
    whole = hashlib.sha256(json.dumps(sorted(games.items())).encode()).hexdigest()
    return {"sha256": whole, "count": len(games), "games": games}


def _content_hash(task: Task) -> str:
    if isinstance(task.source, dict):
        content = json.dumps(task.source, sort_keys=True).encode()
    else:
        content = Path(task.source).read_bytes()
    return hashlib.sha256(content).hexdigest()[:16]


def check_same(recorded: Mapping[str, Any], now: Mapping[str, Any], what: str) -> int:
    """The number of games that both have. Raises ManifestError if one of them has another content now."""
    common = recorded["games"].keys() & now["games"].keys()
    changed = sorted(name for name in common if recorded["games"][name] != now["games"][name])
    if changed:
        raise ManifestError(
            f"{len(changed)} of {len(common)} {what} are not those of the run, first {changed[0]}: the files were "
            "changed or come from another release. Evaluate on the run's own data"
        )
    return len(common)
