"""Levels that somebody wrote: a folder with train.txt, seen.txt and unseen.txt, levels separated by empty lines."""

from __future__ import annotations

import re
from pathlib import Path

from envs.sokoban.room import LevelError, Room, read_level
from envs.sokoban.solve import SearchLimit, solve


def read_rooms(folder: Path, split: str) -> list[tuple[str, Room, int | None]]:
    """(name, room, moves of its shortest solution, None if the search for it was too long) of a split in file order.

    Raises LevelError with file, level, line and column.
    """
    path = folder / f"{split}.txt"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LevelError(f"{path} cannot be read ({error}); write levels in it, or set env.data='generated'") from error
    rooms = []
    for number, level in enumerate(re.split(r"\n(?:\s*\n)+", text.strip("\n")), 1):
        try:
            room = read_level(level)
            moves = _length(room)
        except LevelError as error:
            raise LevelError(f"{path}, level {number}: {error}") from error
        rooms.append((f"{number:05d}", room, moves))
    return rooms


def _length(room: Room) -> int | None:
    try:
        moves = solve(room)
    except SearchLimit:
        return None
    if not moves:
        raise LevelError("is solved already" if moves == [] else "has no solution")
    return len(moves)
