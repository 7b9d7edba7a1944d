"""Random rooms, each a function of its seed alone, and their splits.

A room is made as the published environment does it (a random walk stamps floor, boxes are pulled away from their
targets), with one generator for each attempt instead of the global ones.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from envs.sokoban.room import Room
from envs.sokoban.solve import SearchLimit, solve

MAX_ATTEMPTS = 100  # for one seed
MAX_STATES = 300_000  # of the search backwards
# Seeds of the splits. Small rooms repeat across seeds (8,922 of the training seeds make one of the first 128 rooms of
# the other two), so a room also belongs to one split alone, see `split_of`.
SEEDS = {"train": (0, 2**16 - 1), "seen": (2**16, 2**31), "unseen": (2**31, 2**32 - 1)}
_SHARES = 8  # one of so many rooms is for "seen", one for "unseen", the rest for training
_STAMPS = (  # cells around the walker, as (row, column) steps
    ((0, -1), (0, 0), (0, 1)),
    ((-1, 0), (0, 0), (1, 0)),
    ((0, 0), (0, 1), (1, 0)),
    ((0, -1), (0, 0), (1, 0)),
    ((0, 0), (0, 1), (1, 0), (1, 1)),
)
_TURN = 0.35  # chance that the walk changes its direction


class GenerationError(ValueError):
    """No room, or too few, can be made with these settings; the message names them."""


class Rules(NamedTuple):
    """What rooms look like. min_moves, max_moves: length of the shortest solution."""

    rows: int = 6
    columns: int = 6
    boxes: int = 1
    search_depth: int = 30  # of the search that pulls the boxes away
    min_moves: int = 1
    max_moves: int = 15


class Level(NamedTuple):
    """moves: of the shortest solution; attempts: at making the room, 1 if the first one worked."""

    seed: int
    room: Room
    moves: int
    attempts: int


def check(rules: Rules) -> None:
    """Raises GenerationError for sizes that cannot work."""
    most = (rules.rows - 2) * (rules.columns - 2) // 3
    if min(rules.rows, rules.columns) < 5:
        raise GenerationError(f"a room of {rules.rows} x {rules.columns} is too small; rows and columns are 5 or more")
    if not 1 <= rules.boxes <= most:
        raise GenerationError(
            f"{rules.boxes} boxes in a room of {rules.rows} x {rules.columns}: there can be 1 to {most}; "
            "use fewer boxes or a larger room"
        )
    if rules.max_moves < rules.min_moves:
        raise GenerationError(
            f"solutions of {rules.min_moves} to {rules.max_moves} moves: no room has any; raise the second"
        )


def generate(seed: int, rules: Rules) -> tuple[Room, int]:
    """(room, attempts it took). Raises GenerationError after MAX_ATTEMPTS."""
    for attempt in range(MAX_ATTEMPTS):
        room = _attempt(np.random.default_rng((seed, attempt)), rules)
        if room is not None:
            return room, attempt + 1
    raise GenerationError(
        f"seed {seed}: no room of {rules.rows} x {rules.columns} with {rules.boxes} boxes and search depth "
        f"{rules.search_depth} in {MAX_ATTEMPTS} attempts; use fewer boxes or a larger room"
    )


def split_of(room: Room) -> str:
    """The only split that the room, turned or mirrored in any way, may be in."""
    number = hashlib.sha256(room.canonical().encode()).digest()[0] % _SHARES
    return {0: "seen", 1: "unseen"}.get(number, "train")


def levels(split: str, rules: Rules, seeds: int) -> Iterator[Level]:
    """The rooms of the first seeds of a split, in their order, with solutions of the wanted length.

    Training repeats rooms as often as the generator makes them (49,457 seeds make 6,353 different ones of 6 x 6, one
    box); a panel has no two alike.
    """
    start, stop = SEEDS[split]
    known = set()
    for seed in range(start, min(stop, start + seeds)):
        room, attempts = generate(seed, rules)
        form = room.canonical()
        if split_of(room) != split or (form in known and split != "train"):
            continue
        known.add(form)
        try:
            moves = solve(room)
        except SearchLimit:  # too large to tell how hard it is
            continue
        if moves is not None and rules.min_moves <= len(moves) <= rules.max_moves:
            yield Level(seed, room, len(moves), attempts)


def first_levels(split: str, count: int, rules: Rules) -> list[Level]:
    """The first `count` rooms of a split. Raises GenerationError if the seeds do not give so many."""
    check(rules)
    seeds = 2000 + 100 * count  # more of them for rooms that are so rare would take forever
    found = list(itertools.islice(levels(split, rules, seeds), count))
    if len(found) < count:
        raise GenerationError(
            f"the seeds of the {split} split give {len(found)} rooms of {rules.rows} x {rules.columns} with "
            f"{rules.boxes} boxes and solutions of {rules.min_moves} to {rules.max_moves} moves, but {count} are "
            "wanted; lower that number, widen the range of moves, or use a larger room"
        )
    return found


def _attempt(rng: np.random.Generator, rules: Rules) -> Room | None:
    floor = _topology(rng, rules)
    if len(floor) < rules.boxes + 2:
        return None
    cells = [int(cell) for cell in rng.permutation(sorted(floor))]
    player, targets = cells[0], cells[1 : rules.boxes + 1]
    start = Room(rules.rows, rules.columns, frozenset(floor), frozenset(targets), frozenset(targets), player)
    pulled, score = _pull(rng, start, targets, rules.search_depth)
    return _displace(rng, pulled, score) if score else None


def _topology(rng: np.random.Generator, rules: Rules) -> set[int]:
    """Floor cells, stamped by a random walk; the border stays wall."""
    rows, columns = rules.rows, rules.columns
    ways = ((-1, 0), (1, 0), (0, -1), (0, 1))
    row, column = int(rng.integers(1, rows - 1)), int(rng.integers(1, columns - 1))
    way, floor = ways[rng.integers(4)], set()
    for _ in range(int(1.7 * (rows + columns))):
        if rng.random() < _TURN:
            way = ways[rng.integers(4)]
        row = min(max(row + way[0], 1), rows - 2)
        column = min(max(column + way[1], 1), columns - 2)
        for down, right in _STAMPS[rng.integers(len(_STAMPS))]:
            if 0 < row + down < rows - 1 and 0 < column + right < columns - 1:
                floor.add((row + down) * columns + column + right)
    return floor


def _pull(rng: np.random.Generator, start: Room, targets: list[int], depth: int) -> tuple[Room, int]:
    """Depth-first search over backward moves: the player steps away and pulls the box behind, if there is one.

    Returns the state of the highest score with it: how often another box was pulled, times the distances of the boxes
    from their targets; 0 while a target is still covered.
    """
    ways = [int(way) for way in rng.permutation(list(start.ways().values()))]  # ties go to the way tried first
    best, best_score = start, 0
    stack = [(start.player, tuple(targets), -1, 0, 0)]  # player, boxes in the order of targets, box pulled last, ...
    known = {(start.player, start.boxes)}
    while stack and len(known) <= MAX_STATES:
        player, boxes, last, swaps, steps = stack.pop()
        if steps == depth:
            continue
        for way in reversed(ways):
            after = player + way
            if after not in start.floor or after in boxes:
                continue
            moved, pulled, changes = boxes, last, swaps
            if player - way in boxes:
                pulled = boxes.index(player - way)
                moved = (*boxes[:pulled], player, *boxes[pulled + 1 :])
                changes += pulled != last
            key = (after, frozenset(moved))
            if key in known:
                continue
            known.add(key)
            stack.append((after, moved, pulled, changes, steps + 1))
            score = changes * _distance(moved, targets, start.columns)
            if score > best_score and start.targets.isdisjoint(moved):
                best, best_score = start._replace(player=after, boxes=frozenset(moved)), score
    return best, best_score


def _distance(boxes: tuple[int, ...], targets: list[int], columns: int) -> int:
    return sum(
        abs(box // columns - target // columns) + abs(box % columns - target % columns)
        for box, target in zip(boxes, targets, strict=True)
    )


def _displace(rng: np.random.Generator, room: Room, score: int) -> Room:
    """Walks the player away from the box it pulled last, so that the first push is not always at hand."""
    free = room.floor - room.boxes
    chance = 0.8 if score == 1 else 0.5
    while rng.random() < chance:
        for _ in range(int(rng.integers(1, 4))):
            options = [room.player + way for way in room.ways().values() if room.player + way in free]
            if not options:
                return room
            room = room._replace(player=options[rng.integers(len(options))])
        chance = 0.5
    return room
