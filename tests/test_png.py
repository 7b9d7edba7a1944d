"""Images as PNG: nothing is lost, and a page gets small ones."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

from envs.ezpoints import deal
from envs.ezpoints import draw as cards
from envs.sokoban.draw import picture
from envs.sokoban.room import read_level
from seed_jax import png
from seed_jax.report.trajectory_page import _turn
from seed_jax.train.trajectories import trajectory
from tests import pictured

ROOM = picture(read_level(pictured.ROOM["level"]), 28)


def opened(uri: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(uri.removeprefix("data:image/png;base64,"))))


@pytest.mark.parametrize("image", [ROOM, cards.picture(deal.deal(0), ())])
def test_nothing_is_lost(image):
    np.testing.assert_array_equal(png.decode(png.encode(image)), image)
    np.testing.assert_array_equal(np.array(opened(png.data_uri(image))), image)


def test_images_differ_by_their_pixels_and_by_their_shape():
    changed = ROOM.copy()
    changed[-1, -1, -1] ^= 1
    digests = {png.digest(image) for image in (ROOM, changed, ROOM.reshape(ROOM.shape[1], ROOM.shape[0], 3))}
    assert len(digests) == 3 and png.digest(ROOM.copy()) in digests


@pytest.mark.parametrize("image", [ROOM, cards.picture(deal.deal(0), ()), np.kron(ROOM, np.ones((3, 3, 1), np.uint8))])
def test_thumbnails_are_small_and_look_alike(image):
    uri = png.thumbnail_uri(image)
    shown = opened(uri)
    assert len(uri) < 8_000 and max(shown.size) <= png.THUMBNAIL_PX
    assert shown.size[0] / shown.size[1] == pytest.approx(image.shape[1] / image.shape[0], abs=0.02)
    expected = np.asarray(Image.fromarray(image).resize(shown.size, Image.Resampling.BICUBIC), float)
    assert abs(np.asarray(shown.convert("RGB"), float) - expected).mean() < 8


def test_the_player_of_a_thumbnail_is_green():
    room = Image.fromarray(ROOM)
    room.thumbnail((png.THUMBNAIL_PX, png.THUMBNAIL_PX))
    pixels = np.asarray(room, int)
    player = np.abs(pixels - (76, 200, 60)).sum(axis=2) < 30
    shown = np.asarray(opened(png.thumbnail_uri(ROOM)).convert("RGB"), int)
    assert player.sum() > 20 and np.abs(shown - pixels)[player].max() < 40


def test_even_noise_is_small():
    noise = np.random.default_rng(0).integers(0, 256, (300, 300, 3)).astype(np.uint8)
    assert len(png.thumbnail_uri(noise)) <= 13_000


def test_recorded_turns_show_their_picture():
    episode = pictured.played(2)
    for turn in episode.turns:
        turn.logprobs = np.zeros(0)
    record = trajectory(pictured.tokenizer(), episode, None, {})
    for turn, noted in zip(episode.turns, record["turns"], strict=True):
        assert noted["image"] == png.thumbnail_uri(turn.image) == _turn(noted, None, {})["im"]
    episode.turns[0].image = None
    assert "image" not in trajectory(pictured.tokenizer(), episode, None, {})["turns"][0]
