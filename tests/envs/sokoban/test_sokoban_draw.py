"""Pictures of rooms, read back, and compared with what the prompt says about them."""

from __future__ import annotations

import numpy as np
import pytest

from envs.sokoban.draw import picture, tiles
from envs.sokoban.game import SokobanGame
from envs.sokoban.generate import Rules, generate
from envs.sokoban.room import (
    ACTIONS,
    BOX,
    BOX_ON_TARGET,
    FLOOR,
    PLAYER,
    PLAYER_ON_TARGET,
    SYMBOLS,
    TARGET,
    WALL,
    read_level,
)

EVERY_KIND = "######\n#S_X_#\n#√_O_#\n#_X__#\n######"


def read_back(image: np.ndarray, px: int) -> str:
    """The level in a picture: the tile that differs least, cell by cell."""
    rows, columns = image.shape[0] // px, image.shape[1] // px
    cells = image.reshape(rows, px, columns, px, 3).transpose(0, 2, 1, 3, 4).astype(int)
    apart = abs(cells[:, :, None] - tiles(px).astype(int)).sum(axis=(3, 4, 5))
    assert (apart.min(axis=2) == 0).all()
    return "\n".join("".join(SYMBOLS[kind] for kind in row) for row in apart.argmin(axis=2))


@pytest.mark.parametrize(("px", "side"), [(16, 96), (28, 168)])
def test_pictures_show_what_the_text_says(px, side):
    for seed in range(20):
        game = SokobanGame(generate(seed, Rules())[0], 15, tile_px=px)
        shown = game.reset()
        for action in (*ACTIONS, *ACTIONS):
            assert shown.image.shape == (side, side, 3) and shown.image.dtype == np.uint8
            text = "\n".join("".join(line.split()) for line in shown.text.split("\n"))
            assert read_back(shown.image, px) == text
            shown = game.step(action)
    assert picture(read_level(EVERY_KIND), px).shape == (5 * px, 6 * px, 3)
    assert read_back(picture(read_level(EVERY_KIND), px), px) == EVERY_KIND


@pytest.mark.parametrize("px", [8, 16, 28])
def test_kinds_of_cell_are_told_apart_easily(px):
    """Any two tiles differ by more than 10 of 255 on average over pixels and colours."""
    drawn = tiles(px).astype(float)
    apart = {(a, b): abs(drawn[a] - drawn[b]).mean() for a in range(7) for b in range(a)}
    assert min(apart.values()) > 10, apart


@pytest.mark.parametrize("px", [16, 28])
def test_colours_are_those_of_the_description(px):
    def share(kind: int, colour: tuple[int, int, int]) -> float:
        return (abs(tiles(px)[kind].astype(int) - colour).max(axis=-1) < 60).mean()

    green, yellow, red, orange, black = (76, 200, 60), (246, 206, 62), (226, 30, 38), (236, 104, 16), (0, 0, 0)
    for player in (PLAYER, PLAYER_ON_TARGET):
        assert share(player, green) > 0.15
    assert share(BOX, yellow) > 0.3 and share(BOX, orange) > 0.08 and share(BOX_ON_TARGET, yellow) > 0.15
    for on_target in (TARGET, BOX_ON_TARGET, PLAYER_ON_TARGET):
        edge = tiles(px)[on_target][0].astype(int)
        assert (abs(edge - red).max(axis=-1) < 60).all(), "the red outline"
    assert share(TARGET, black) > 0.4
    for other in (WALL, FLOOR, BOX, PLAYER):
        assert share(other, red) == 0
    assert share(WALL, green) == share(FLOOR, green) == share(BOX, green) == 0


def test_the_same_picture_every_time():
    room = read_level(EVERY_KIND)
    before = picture(room, 16)
    tiles.cache_clear()
    assert np.array_equal(picture(room, 16), before)
    before[:] = 0  # the caller's own copy
    assert picture(room, 16).any()
    with pytest.raises(ValueError, match="read-only"):
        tiles(16)[0] = 0


def test_tiles_that_are_too_small():
    with pytest.raises(ValueError, match=r"env\.tile_px = 7: a tile has 8 pixels or more"):
        tiles(7)
