"""The rows of stage 1: (analysis prompt -> skill); turns of successful episodes, so that acting is not unlearned; and
turns of successful episodes that were played with a skill in the prompt, so that skills are followed.

A row whose prompt has images names their files ("images"), in the order of their places in it (pictures.py).

The split is by task: no task has episodes on both sides. It depends on the tasks and the seed only, never on the order
in which answers came.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from seed_jax.hindsight.prompts import prompt_with_skill
from seed_jax.hindsight.records import DATASET_FILE, TRAIN_FILE, VAL_FILE, RecordError, read_records, skill_answer
from seed_jax.images import check_places, escape
from seed_jax.runtime.logging import write_whole
from seed_jax.types import Skill

KINDS = SKILL, ACT, FOLLOW = "skill", "act", "follow"  # of rows
FORMAT = 1  # of dataset.json


def split_tasks(family_of: dict[str, str], fraction: float, seed: int) -> set[str]:
    """The validation tasks: of every family `fraction` of its tasks, rounded, at least one if it has two or more.

    family_of: task -> family. Inside a family the order is that of a hash of seed and task.
    """
    families: dict[str, list[str]] = defaultdict(list)
    for task, family in family_of.items():
        families[family].append(task)
    chosen: set[str] = set()
    for tasks in families.values():
        count = round(fraction * len(tasks)) or (fraction > 0 and len(tasks) > 1)
        chosen.update(sorted(tasks, key=lambda task: _hash(seed, task))[:count])
    return chosen


def build(
    episodes: Sequence[dict[str, Any]],
    skills: Sequence[dict[str, Any]],
    *,
    fraction: float,
    acting: float,
    seed: int,
    followed: Iterable[dict[str, Any]] = (),
    following: float = 0.0,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """(training rows, validation rows, what dataset.json says) from the lines of rollouts.jsonl and skills.jsonl, and
    `followed`, which are `following_rows`.

    acting, following: such rows for each skill row, on either side of the split; fewer if there are not enough.
    """
    val_tasks = split_tasks({record["task"]: record["family"] for record in episodes}, fraction, seed)
    usable = [line for line in skills if line["skill"] is not None]
    more = ((list(_acting_rows(episodes)), acting), (list(followed), following))
    rows: dict[bool, list[dict[str, Any]]] = {}
    for val in (False, True):
        mine = [_skill_row(line) for line in usable if (line["task"] in val_tasks) == val]
        written = len(mine)
        for turns, share in more:
            there = [row for row in turns if (row["task"] in val_tasks) == val]
            mine += _balanced(there, round(share * written), seed)
        rows[val] = sorted(mine, key=lambda row: _hash(seed, row["kind"], row["episode"], row["turn"]))
    count = lambda side: dict(Counter(row["kind"] for row in side))  # noqa: E731
    meta = {
        "format": FORMAT,
        "seed": seed,
        "train": count(rows[False]),
        "val": count(rows[True]),
        "val_tasks": sorted(val_tasks),
        "train_tasks": len({record["task"] for record in episodes} - val_tasks),
        "skills_left_out": len(skills) - len(usable),
        "images": len({name for side in rows.values() for row in side for name in row.get("images", ())}),
    }
    return rows[False], rows[True], meta


def write(directory: Path, train: Iterable[dict], val: Iterable[dict], meta: dict[str, Any]) -> None:
    digests = {}
    for name, rows in ((TRAIN_FILE, train), (VAL_FILE, val)):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_whole(directory / name, text)
        digests[name] = hashlib.sha256(text.encode()).hexdigest()
    write_whole(directory / DATASET_FILE, json.dumps({**meta, "sha256": digests}, indent=1) + "\n")


def read(directory: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """(training rows, validation rows, dataset.json). Raises RecordError if something is missing or was changed."""
    path = directory / DATASET_FILE
    try:
        meta = json.loads(path.read_text())
        if meta["format"] != FORMAT:
            raise ValueError(f"its format is {meta['format']}, not {FORMAT}")
        raw = {name: (directory / name).read_bytes() for name in (TRAIN_FILE, VAL_FILE)}
        for name, content in raw.items():
            if hashlib.sha256(content).hexdigest() != meta["sha256"][name]:
                raise ValueError(f"{name} is not the file that was written with it; make the data set anew")
        train, val = ([json.loads(line) for line in content.splitlines()] for content in raw.values())
    except OSError as error:
        raise RecordError(
            f"{error.filename or path}: {error.strerror}; make the data set with launch.annotate --stage=dataset"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path} cannot be used: {error}") from error
    return train, val, meta


def images_of(rows: Sequence[dict[str, Any]], read_image: Callable[[str], np.ndarray]) -> list[list[np.ndarray]] | None:
    """The images of each row; None if no row has any. Raises RecordError for a row whose prompt has not one place for
    each of its images, and for images that `read_image` cannot read."""
    if not any("images" in row for row in rows):
        return None
    found = []
    for row in rows:
        names = row.get("images", [])
        if not isinstance(names, list):
            raise RecordError(f"row of {row['episode']}: images = {names!r} must be a list of names")
        try:
            check_places(row["prompt"], names)
        except ValueError as error:
            raise RecordError(f"row of {row['episode']}: {error}; make the data set anew") from error
        found.append([read_image(name) for name in names])
    return found


def _skill_row(line: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": SKILL,
        **{name: line[name] for name in ("episode", "task", "family", "won")},
        "turn": -1,
        "prompt": line["prompt"],
        "response": skill_answer(Skill(line["summary"], line["skill"])),
        **({"images": line["images"]} if "images" in line else {}),
    }


def _acting_rows(episodes: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    for record, number, turn in _useful_turns(episodes):
        yield _turn_row(ACT, record, number, turn, turn["prompt"])


def following_rows(followed: Iterable[dict[str, Any]], style: str, placement: str) -> Iterable[dict[str, Any]]:
    """From the lines of followed.jsonl: their prompts are what a teacher reads, the bare prompt with the skill in it. A
    turn that had no room for its skill was played without, and is left out. placement: one of TEXT_PLACEMENTS."""
    for record, number, turn in _useful_turns(followed):
        if turn["with_skill"]:
            skill = escape(record["skill"]) if "image" in turn else record["skill"]  # as it was read: prompts.py
            prompt = prompt_with_skill(turn["prompt"], skill, style, placement)
            yield _turn_row(FOLLOW, record, number, turn, prompt)


def _useful_turns(episodes: Iterable[dict[str, Any]]) -> Iterable[tuple[dict[str, Any], int, dict[str, Any]]]:
    """(line, number, turn) of the turns of successful episodes whose reply was of use: the right form, and a command
    that the game took."""
    for record in episodes:
        for number, turn in enumerate(record["turns"] if record["won"] else ()):
            if turn["valid"] and turn["admissible"]:
                yield record, number, turn


def _turn_row(kind: str, record: dict[str, Any], number: int, turn: dict[str, Any], prompt: str) -> dict[str, Any]:
    return {
        "kind": kind,
        **{name: record[name] for name in ("episode", "task", "family", "won")},
        "turn": number,
        "prompt": prompt,
        "response": turn["response"],
        **({"images": [turn["image"]]} if "image" in turn else {}),
    }


def _balanced(rows: Sequence[dict[str, Any]], count: int, seed: int) -> list[dict[str, Any]]:
    """`count` rows, families in turn as long as they have some, in the order of a hash."""
    families: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: _hash(seed, row["episode"], row["turn"])):
        families[row["family"]].append(row)
    ranked = [(place, family, row) for family, members in families.items() for place, row in enumerate(members)]
    ranked.sort(key=lambda entry: entry[:2])
    return [row for _, _, row in ranked[:count]]


def _hash(*parts: Any) -> bytes:
    return hashlib.sha256(json.dumps(parts).encode()).digest()


def load_sources(*files: tuple[Path, str]) -> list[list[dict[str, Any]]]:
    """The lines of each file; files: (path, stage that makes it). Raises RecordError, naming the stage, if one is
    missing."""
    for path, stage in files:
        if not path.exists():
            raise RecordError(f"{path} does not exist; make it with launch.annotate --stage={stage}")
    return [read_records(path) for path, _ in files]
