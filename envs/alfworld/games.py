"""Find and read ALFWorld game files.

Layout: `<root>/<split>/<family>-<Object>-None-<Receptacle>-<scene>/<trial>/game.tw-pddl`. The package's own loader
looks for `traj_data.json` beside each game, which the release for text play does not have, so it would find nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from envs.alfworld.problem import CorruptGame, parse_problem, sections
from envs.base import Task

TASK_MARKER = "Your task is to: "
FAMILIES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
SPLIT_DIRS = {  # accepted name -> directory
    "train": "train",
    "seen": "valid_seen",
    "unseen": "valid_unseen",
    "valid_seen": "valid_seen",
    "valid_unseen": "valid_unseen",
}
GAME_FILE = "game.tw-pddl"
GAME_KEYS = ("pddl_domain", "grammar", "pddl_problem", "solvable", "walkthrough")
# sha256 of (domain, grammar without its task sentence) that our engine plays exactly as TextWorld does -> a type that
# the problem must not name. In the package's domain things are not cleaned at a SinkType, as they are in the release's.
KNOWN_TEXTS = {
    (  # of the release json_2.1.2
        "0af55e7f92d12b09d28515aa730e4d03fddd17228ef1fd7b18a3ee8ba49b27b9",
        "10da93e13b58e1a6039723f5d4a59ceae7c60772515bfab9fc603bafa7f8ee06",
    ): None,
    (  # of the package alfworld 0.4.2, which generated games are written with
        "f1473041ed01da514de1f87adfd7ef0804862361f83ccf63c75e43633b0eb280",
        "c294eb280206a4428664cdb4e2037e267e86de5b7fa862212718a961513a7de4",
    ): "sinktype",
}
MAX_BAD_SHARE = 0.01  # of a split's files; one bad file is always tolerated outside of strict mode
DATA_VARIABLE = "ALFWORLD_DATA"  # environment variable: where the official games were unpacked
RELEASE_DIR = "json_2.1.1"  # what the release unpacks to
DOWNLOAD_HINT = (
    "Download the games with: export ALFWORLD_DATA=DIR; curl -L -o tw.zip "
    "https://github.com/alfworld/alfworld/releases/download/0.4.0/json_2.1.2_tw-pddl.zip "
    "&& unzip tw.zip -d $ALFWORLD_DATA "
    f"(the games are then under $ALFWORLD_DATA/{RELEASE_DIR}), or use generated games (env.data=generated)."
)

_TASK_LINE = re.compile(re.escape(TASK_MARKER) + r'[^"\n]*')
# Releases before 0.4 placed objects with "put X in/on Y"; every prompt and skill of today says "move X to Y".
_OLD_TEMPLATE = re.compile(r'action\s+PutObject\s*\{\s*template\s*::\s*"put ')


class Game(NamedTuple):
    """A game file that can be played."""

    path: Path
    family: str
    goal: str  # the task sentence, without its final period


def load_json(path: str | Path) -> dict[str, Any]:
    """The game file's JSON object. Unreadable, a key missing, or from an ALFWorld before 0.4: CorruptGame."""
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CorruptGame(path, f"cannot be read ({error.strerror or error})") from error
    except ValueError as error:  # JSON and UTF-8 errors
        raise CorruptGame(
            path, f"is not valid JSON ({error}); the file may be cut off, download or write it again"
        ) from error
    if not isinstance(data, dict):
        raise CorruptGame(path, f"must hold a JSON object, holds a {type(data).__name__}")
    missing = [key for key in GAME_KEYS if key not in data]
    if missing:
        raise CorruptGame(path, f"lacks the key {missing[0]!r} (needs {', '.join(GAME_KEYS)})")
    for key in ("pddl_domain", "grammar", "pddl_problem"):
        if not isinstance(data[key], str):
            raise CorruptGame(path, f"{key!r} must be text, is a {type(data[key]).__name__}")
    if _OLD_TEMPLATE.search(data["grammar"]):
        raise CorruptGame(
            path, 'was made by ALFWorld before 0.4 (it says "put X in/on Y", not "move X to Y"). ' + DOWNLOAD_HINT
        )
    task_line(data["grammar"], path)
    return data


def task_line(grammar: str, path: str | Path) -> str:
    """`Your task is to: ...` as the game's grammar has it."""
    found = _TASK_LINE.search(grammar)
    if found is None:
        raise CorruptGame(path, f"the grammar lacks the task sentence ({TASK_MARKER!r})")
    return found.group(0)


def has_known_texts(data: Mapping[str, Any]) -> bool:
    """Whether domain and grammar are those that our engine was written for."""
    texts = (data["pddl_domain"], _TASK_LINE.sub(TASK_MARKER, data["grammar"]))
    key = tuple(hashlib.sha256(text.encode()).hexdigest() for text in texts)
    return key in KNOWN_TEXTS and (KNOWN_TEXTS[key] or "\0") not in data["pddl_problem"].lower()


def goal_sentence(line: str) -> str:
    """`Your task is to: put a cup on shelf.` -> `put a cup on shelf`."""
    return line.removeprefix(TASK_MARKER).strip().removesuffix(".")


def data_root(root: str | Path | None, split: str = "train") -> Path:
    """The directory that holds the splits: `root` (None or "": $ALFWORLD_DATA), or the release's directory in it."""
    named = root or os.environ.get(DATA_VARIABLE)
    if not named:
        raise FileNotFoundError(f"No ALFWorld games: {DATA_VARIABLE} is not set. {DOWNLOAD_HINT}")
    base = Path(named).expanduser()
    released = base / RELEASE_DIR
    return released if released.is_dir() and not (base / SPLIT_DIRS[split]).is_dir() else base


def find_game_files(root: str | Path | None, split: str) -> list[Path]:
    """Sorted game files of a split, without the sliced and movable-receptacle tasks, which text ALFWorld leaves out."""
    if split not in SPLIT_DIRS:
        raise ValueError(f"split {split!r} is unknown; choose one of {', '.join(SPLIT_DIRS)}")
    folder = data_root(root, split) / SPLIT_DIRS[split]
    if not folder.is_dir():
        raise FileNotFoundError(f"No ALFWorld games: {folder} is not a directory. {DOWNLOAD_HINT}")
    files = []
    for task in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if not task.is_dir() or "movable" in task.name or "Sliced" in task.name:
            continue
        trials = sorted(os.scandir(task.path), key=lambda entry: entry.name)
        files += [
            game for game in (Path(trial.path) / GAME_FILE for trial in trials if trial.is_dir()) if game.is_file()
        ]
    if not files:
        raise FileNotFoundError(f"No ALFWorld games: {folder} holds no */*/{GAME_FILE}. {DOWNLOAD_HINT}")
    return files


def read_game(path: Path) -> Game | None:
    """Check one game file down to its PDDL problem. None for a game that is marked as not solvable."""
    data = load_json(path)
    if data["solvable"] is not True:
        return None
    family = path.parent.parent.name.split("-", 1)[0]
    if family not in FAMILIES:
        raise CorruptGame(path, f"the directory name starts with {family!r}, not with one of {', '.join(FAMILIES)}")
    check = parse_problem if has_known_texts(data) else sections  # of another domain only the outline can be checked
    check(data["pddl_problem"], path)
    return Game(path, family, goal_sentence(task_line(data["grammar"], path)))


def list_games(root: str | Path | None, split: str) -> list[Game]:
    """All playable games of a split in path order (os.walk's depends on the file system). Bad file: CorruptGame.

    root: where the official games or written ones are; None = $ALFWORLD_DATA.
    """
    return [game for game in map(read_game, find_game_files(root, split)) if game is not None]


def load_tasks(root: str | Path | None, split: str, strict: bool = False) -> tuple[list[Task], list[CorruptGame]]:
    """Tasks of a split and the files that were skipped.

    strict raises at the first bad file (for evaluation, whose panel must be complete). Otherwise bad files are skipped,
    unless there are more than one and more than 1 % of all.
    """
    base = data_root(root, split)
    tasks: list[Task] = []
    skipped: list[CorruptGame] = []
    files = find_game_files(root, split)
    for path in files:
        try:
            game = read_game(path)
        except CorruptGame as error:
            if strict:
                raise
            skipped.append(error)
            continue
        if game is not None:
            identifier = path.parent.relative_to(base).as_posix()
            tasks.append(Task(identifier, game.family, game.goal, str(path)))
    if len(skipped) > max(1, MAX_BAD_SHARE * len(files)):
        raise CorruptGame(
            skipped[0].path, f"{skipped[0].reason} [and {len(skipped) - 1} more of the {len(files)} files of {split}]"
        )
    return tasks, skipped


def fraction_of(tasks: Sequence[Task], fraction: float, seed: int) -> list[Task]:
    """That share of every family's tasks, rounded up, in order. With one seed a smaller share lies in a larger."""
    families: dict[str, list[Task]] = defaultdict(list)
    for task in tasks:
        families[task.family].append(task)
    kept: set[str] = set()
    for members in families.values():
        drawn = sorted(members, key=lambda task: hashlib.sha256(f"{seed} {task.id}".encode()).digest())
        kept.update(task.id for task in drawn[: math.ceil(round(fraction * len(members), 9))])
    return [task for task in tasks if task.id in kept]
