"""Pictures of rooms: our own shapes, painted with NumPy at any tile size."""

from __future__ import annotations

import functools

import numpy as np

from envs.sokoban.room import BOX, BOX_ON_TARGET, FLOOR, PLAYER, PLAYER_ON_TARGET, TARGET, WALL, Room

MIN_TILE_PX = 8
_FINE = 8  # each pixel is the mean of 8 x 8 finer ones

_GROUND, _BLACK = (58, 52, 44), (0, 0, 0)
_BRICK, _MORTAR = (142, 92, 66), (92, 60, 46)
_RED, _GREEN, _EYES = (226, 30, 38), (76, 200, 60), (8, 12, 8)
_YELLOW, _EDGE, _ORANGE, _DARK = (246, 206, 62), (176, 128, 24), (236, 104, 16), (150, 40, 20)


def picture(room: Room, tile_px: int) -> np.ndarray:
    """uint8 array (rows * tile_px, columns * tile_px, 3)."""
    grid = tiles(tile_px)[np.array(room.kinds())]  # (rows, columns, px, px, 3)
    return grid.transpose(0, 2, 1, 3, 4).reshape(room.rows * tile_px, room.columns * tile_px, 3)


@functools.lru_cache(maxsize=8)
def tiles(px: int) -> np.ndarray:
    """The tile of each kind of cell: uint8 (7, px, px, 3). Raises ValueError for tiles under 8 pixels."""
    if px < MIN_TILE_PX:
        raise ValueError(
            f"env.tile_px = {px}: a tile has {MIN_TILE_PX} pixels or more (published: 16; 28 fits patches)"
        )
    drawn = np.empty((7, px, px, 3), np.uint8)
    for kind in range(7):
        canvas = _Canvas(px * _FINE)
        _PAINTERS[kind](canvas)
        fine = canvas.pixels.reshape(px, _FINE, px, _FINE, 3)
        drawn[kind] = np.rint(fine.mean(axis=(1, 3)))
    drawn.flags.writeable = False
    return drawn


class _Canvas:
    """A square whose corners are (0, 0) and (1, 1), x to the right and y down."""

    def __init__(self, size: int):
        middle = (np.arange(size) + 0.5) / size
        self.x, self.y = np.meshgrid(middle, middle)
        self.pixels = np.zeros((size, size, 3))

    def box(self, left, top, right, bottom, colour) -> None:
        self.pixels[(self.x >= left) & (self.x < right) & (self.y >= top) & (self.y < bottom)] = colour

    def ellipse(self, x, y, half_width, half_height, colour) -> None:
        self.pixels[((self.x - x) / half_width) ** 2 + ((self.y - y) / half_height) ** 2 < 1] = colour

    def diamond(self, x, y, half, colour) -> None:
        self.pixels[abs(self.x - x) + abs(self.y - y) < half] = colour

    def stroke(self, start, end, width, colour) -> None:
        (x0, y0), (x1, y1) = start, end
        along = ((self.x - x0) * (x1 - x0) + (self.y - y0) * (y1 - y0)) / ((x1 - x0) ** 2 + (y1 - y0) ** 2)
        along = np.clip(along, 0, 1)
        far = np.hypot(self.x - x0 - along * (x1 - x0), self.y - y0 - along * (y1 - y0))
        self.pixels[far < width / 2] = colour


def _wall(c: _Canvas) -> None:
    c.box(0, 0, 1, 1, _MORTAR)
    for course in range(4):
        top = course / 4
        for left in (-0.25, 0.25, 0.75) if course % 2 else (0.0, 0.5):
            c.box(left + 0.03, top + 0.03, left + 0.47, top + 0.22, _BRICK)


def _floor(c: _Canvas) -> None:
    c.box(0, 0, 1, 1, _GROUND)


def _target(c: _Canvas) -> None:
    _outline(c)
    c.diamond(0.5, 0.5, 0.2, _RED)


def _outline(c: _Canvas) -> None:
    c.box(0, 0, 1, 1, _RED)
    c.box(0.09, 0.09, 0.91, 0.91, _BLACK)


def _crate(c: _Canvas, left: float, cross) -> None:
    right = 1 - left
    c.box(left, left, right, right, _EDGE)
    c.box(left + 0.07, left + 0.07, right - 0.07, right - 0.07, _YELLOW)
    near, far = left + 0.16, right - 0.16
    c.stroke((near, near), (far, far), 0.13, cross)
    c.stroke((near, far), (far, near), 0.13, cross)


def _box(c: _Canvas) -> None:
    _floor(c)
    _crate(c, 0.05, _ORANGE)


def _box_on_target(c: _Canvas) -> None:
    _outline(c)
    _crate(c, 0.16, _DARK)


def _alien(c: _Canvas) -> None:
    for side in (-1, 1):
        c.stroke((0.5 + 0.10 * side, 0.36), (0.5 + 0.22 * side, 0.14), 0.07, _GREEN)
        c.ellipse(0.5 + 0.23 * side, 0.14, 0.07, 0.07, _GREEN)
        c.stroke((0.5 + 0.12 * side, 0.74), (0.5 + 0.16 * side, 0.86), 0.12, _GREEN)
    c.ellipse(0.5, 0.54, 0.30, 0.27, _GREEN)
    for side in (-1, 1):
        c.ellipse(0.5 + 0.13 * side, 0.49, 0.075, 0.10, _EYES)


def _player(c: _Canvas) -> None:
    _floor(c)
    _alien(c)


def _player_on_target(c: _Canvas) -> None:
    _outline(c)
    _alien(c)


_PAINTERS = {
    WALL: _wall,
    FLOOR: _floor,
    TARGET: _target,
    BOX_ON_TARGET: _box_on_target,
    BOX: _box,
    PLAYER: _player,
    PLAYER_ON_TARGET: _player_on_target,
}
