"""A Sokoban room: an immutable state, its moves, and its forms as text."""

from __future__ import annotations

from typing import NamedTuple

ACTIONS = ("up", "down", "left", "right")
WALL, FLOOR, TARGET, BOX_ON_TARGET, BOX, PLAYER, PLAYER_ON_TARGET = range(7)
SYMBOLS = "#_O√XPS"  # of these kinds of cell, as published
_READ = {symbol: kind for kind, symbol in enumerate(SYMBOLS)} | dict(zip(" .*$@+", range(1, 7), strict=True))


class LevelError(ValueError):
    """A level cannot be played; the message says where it is wrong."""


class Room(NamedTuple):
    """Cells are numbers, row * columns + column. Everything that is not floor is wall; targets are floor, too."""

    rows: int
    columns: int
    floor: frozenset[int]
    targets: frozenset[int]
    boxes: frozenset[int]
    player: int

    @property
    def placed(self) -> int:
        """Boxes on targets."""
        return len(self.boxes & self.targets)

    @property
    def solved(self) -> bool:
        return self.boxes == self.targets

    def ways(self) -> dict[str, int]:
        """What each action adds to a cell."""
        return dict(zip(ACTIONS, (-self.columns, self.columns, -1, 1), strict=True))

    def moved(self, action: str) -> Room:
        """The room after an action; itself where the way is blocked. A box is pushed, never pulled, and never two."""
        way = self.ways()[action]
        ahead, behind = self.player + way, self.player + 2 * way
        if ahead not in self.floor:
            return self
        if ahead not in self.boxes:
            return self._replace(player=ahead)
        if behind not in self.floor or behind in self.boxes:
            return self
        return self._replace(player=ahead, boxes=self.boxes - {ahead} | {behind})

    def kinds(self) -> list[list[int]]:
        """The kind of every cell, by row."""
        return [[self._kind(row * self.columns + column) for column in range(self.columns)] for row in range(self.rows)]

    def _kind(self, cell: int) -> int:
        if cell not in self.floor:
            return WALL
        target = cell in self.targets
        if cell in self.boxes:
            return BOX_ON_TARGET if target else BOX
        if cell == self.player:
            return PLAYER_ON_TARGET if target else PLAYER
        return TARGET if target else FLOOR

    def level(self) -> str:
        """One line a row, one symbol a cell."""
        return "\n".join("".join(SYMBOLS[kind] for kind in row) for row in self.kinds())

    def table(self) -> str:
        """As the published environment writes it: each symbol between a space and a space with a tab."""
        return "\n".join("".join(f" {SYMBOLS[kind]} \t" for kind in row) for row in self.kinds())

    def digits(self) -> str:
        """The kinds of cell as numbers, in one line, for the compact prompt."""
        return " / ".join(" ".join(map(str, row)) for row in self.kinds())

    def canonical(self) -> str:
        """The same for all rooms that are turned or mirrored images of each other."""
        grid = self.level().split("\n")
        forms = []
        for _ in range(4):
            grid = ["".join(row) for row in zip(*grid[::-1], strict=True)]  # turned by 90 degrees
            forms += ["\n".join(grid), "\n".join(row[::-1] for row in grid)]
        return min(forms)


def read_level(text: str) -> Room:
    """A room from its level text, in our symbols or in the usual ones (`#`, space, `.`, `*`, `$`, `@`, `+`).

    Raises LevelError with line and column, both from 1, for everything that makes no room with a closed border.
    """
    lines = text.strip("\n").split("\n")
    width = len(lines[0])
    cells: dict[int, list[int]] = {kind: [] for kind in range(7)}
    for number, line in enumerate(lines, 1):
        if len(line) != width:
            raise LevelError(f"line {number} has {len(line)} cells, line 1 has {width}; all rows must be equally long")
        for column, symbol in enumerate(line, 1):
            if symbol not in _READ:
                raise LevelError(f"line {number}, column {column}: {symbol!r} is no cell; use {' '.join(SYMBOLS)}")
            edge = number in (1, len(lines)) or column in (1, width)
            if edge and _READ[symbol] != WALL:
                raise LevelError(f"line {number}, column {column}: the border is open; put a wall ({SYMBOLS[WALL]})")
            cells[_READ[symbol]].append((number - 1) * width + column - 1)
    players = cells[PLAYER] + cells[PLAYER_ON_TARGET]
    boxes = cells[BOX] + cells[BOX_ON_TARGET]
    targets = cells[TARGET] + cells[BOX_ON_TARGET] + cells[PLAYER_ON_TARGET]
    if len(players) != 1:
        where = "".join(f"; line {cell // width + 1}, column {cell % width + 1}" for cell in players)
        raise LevelError(f"there are {len(players)} players{where}; a level has exactly one (P, or S on a target)")
    if len(boxes) != len(targets) or not boxes:
        raise LevelError(f"there are {len(boxes)} boxes and {len(targets)} targets; a level needs one for each")
    floor = {cell for kind, found in cells.items() if kind != WALL for cell in found}
    return Room(len(lines), width, frozenset(floor), frozenset(targets), frozenset(boxes), players[0])
