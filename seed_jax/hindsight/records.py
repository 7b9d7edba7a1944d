"""Stage 1 on disk: episodes and skills as JSON lines that are only ever appended, so that an interrupted collection
goes on where it stopped.

A line is one episode (rollouts.jsonl), what was written about one (skills.jsonl), or its task played again with that in
the prompt (followed.jsonl), known by its `episode`: the task's id and the number of the rollout. Images are files of
their own (pictures.py), which lines name.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from seed_jax import png
from seed_jax.runtime.logging import read_jsonl, write_whole
from seed_jax.types import Episode, Skill, Turn

ROLLOUTS_FILE, SKILLS_FILE, FOLLOWED_FILE = "rollouts.jsonl", "skills.jsonl", "followed.jsonl"
TRAIN_FILE, VAL_FILE, DATASET_FILE = "train.jsonl", "val.jsonl", "dataset.json"
SETTINGS_FILE = "settings.json"
IMAGES_FOLDER = "images"
_TURN = ("prompt", "observation", "response", "command", "valid", "admissible", "result", "reward")


class RecordError(ValueError):
    """Files of stage 1 cannot be used; the message names the file and the remedy."""


def episode_id(task_id: str, rollout: int) -> str:
    return f"{task_id}#{rollout}"


def image_name(image: np.ndarray) -> str:
    """The file of an image, relative to the directory of the lines that name it."""
    return f"{IMAGES_FOLDER}/{png.digest(image)}.png"


def to_record(episode: Episode, rollout: int) -> dict[str, Any]:
    """An episode as JSON, without token ids: it may be read with another tokenizer."""
    return {
        "episode": episode_id(episode.task_id, rollout),
        "task": episode.task_id,
        "family": episode.family,
        "rollout": rollout,
        "goal": episode.goal,
        "won": episode.won,
        "reward": episode.reward,
        "turns": [_turn_record(turn) for turn in episode.turns],
    }


def _turn_record(turn: Turn) -> dict[str, Any]:
    image = {} if turn.image is None else {"image": image_name(turn.image)}
    return {name: getattr(turn, name) for name in _TURN} | image


def to_episode(
    record: dict[str, Any], index: int = 0, read_image: Callable[[str], np.ndarray] | None = None
) -> Episode:
    """The episode of a record, without token ids and log-probs, and without images if nothing reads them."""
    turns = [Turn(prompt_ids=[], response_ids=[], logprobs=None, **{n: t[n] for n in _TURN}) for t in record["turns"]]
    if read_image:
        for turn, noted in zip(turns, record["turns"], strict=True):
            turn.image = read_image(noted["image"]) if "image" in noted else None
    return Episode(
        task_id=record["task"],
        family=record["family"],
        goal=record["goal"],
        group=0,
        index=index,
        turns=turns,
        reward=record["reward"],
        won=record["won"],
    )


def skill_answer(skill: Skill) -> str:
    """The answer that is learned: the JSON object of the analysis prompt, with nothing around it."""
    return json.dumps({"episode_summary": skill.summary, "episode_skill": skill.text}, ensure_ascii=False)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a file, each episode once. Raises RecordError for a damaged file."""
    try:
        found = {record["episode"]: record for record in read_jsonl(path)}
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path} is damaged: {error}") from error
    return list(found.values())


def mend(path: Path) -> None:
    """Before anything is appended: removes a last line that a crash has cut off, ends one that only lacks its end."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        tail = content[content.rfind(b"\n") + 1 :]
        if not tail:
            return
        try:
            json.loads(tail)
        except ValueError:
            file.truncate(len(content) - len(tail))
        else:
            file.write(b"\n")


@contextlib.contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Nobody else appends to the files of a directory meanwhile. Raises RecordError if somebody does."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            problem = f"another process is writing to {directory}; wait for it, or choose another --out"
            raise RecordError(problem) from None
        yield


def noted_settings(directory: Path) -> dict[str, dict[str, Any]]:
    """stage -> the settings that it was run with. Raises RecordError."""
    path = directory / SETTINGS_FILE
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise RecordError(f"{path} is damaged ({error}); remove it to go on without the check") from error


def check_settings(directory: Path, stage: str, settings: dict[str, Any]) -> None:
    """Notes with what a stage is run; refuses to go on with anything else, since one file would mix both."""
    noted = noted_settings(directory)
    before = noted.get(stage)
    if before is not None and before != settings:
        lines = [
            f"  - {name}: {before.get(name)!r} -> {settings.get(name)!r}"
            for name in sorted(before.keys() | settings.keys())
            if before.get(name) != settings.get(name)
        ]
        raise RecordError(
            f"{directory} was begun with other settings (there -> yours):\n"
            + "\n".join(lines)
            + "\nChoose another --out."
        )
    write_whole(directory / SETTINGS_FILE, json.dumps({**noted, stage: settings}, indent=1, sort_keys=True) + "\n")
