"""Images on their way to a model, on the host: their size, their place in a prompt, their positions.

An image is a uint8 array [height, width, 3] from the environment to the device, where the model cuts and scales it. In
the text of a prompt it is PLACEHOLDER; in its ids it is start, gh * gw times the image token, end, where gh x gw are
its cells (VisionSpec.grid). Sizes and positions are those of Qwen2-VL (arXiv 2409.12191, section 2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from seed_jax.models.vision_spec import VisionSpec

PLACEHOLDER = "<image>"
_ESCAPED = "<image >"
_LARGEST_RATIO = 200  # of the sides


def fitted_size(height: int, width: int, vision: VisionSpec) -> tuple[int, int]:
    """The nearest size whose sides are whole cells and whose area is within the limits of `vision`."""
    if max(height, width) > _LARGEST_RATIO * min(height, width):
        raise ValueError(f"an image of {height} x {width} pixels: a side is over {_LARGEST_RATIO} times the other")
    cell = vision.cell
    rows, columns = round(height / cell), round(width / cell)  # 0 for a side below half a cell, which is enlarged
    pixels = rows * columns * cell**2
    if pixels > vision.max_pixels:
        shrink = math.sqrt(height * width / vision.max_pixels)
        rows, columns = (max(1, math.floor(side / shrink / cell)) for side in (height, width))
    elif pixels < vision.min_pixels:
        enlarge = math.sqrt(vision.min_pixels / (height * width))
        rows, columns = (math.ceil(side * enlarge / cell) for side in (height, width))
    return rows * cell, columns * cell


def enlarged_size(height: int, width: int, pixels: int) -> tuple[int, int]:
    """The size to which an image of fewer than `pixels` pixels is enlarged, in proportion and rounded down."""
    if height * width >= pixels:
        return height, width
    enlarge = math.sqrt(pixels / (height * width))
    return int(height * enlarge), int(width * enlarge)


def fit(image: np.ndarray, vision: VisionSpec, pixels: int = 0) -> np.ndarray:
    """uint8 [height, width, 3] -> the image at its fitted size, bicubic where that differs; one of fewer than `pixels`
    pixels is enlarged first."""
    larger = enlarged_size(*image.shape[:2], pixels)
    return _resized(_resized(image, larger), fitted_size(*larger, vision))


def _resized(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    if image.shape[:2] == size:
        return image
    from PIL import Image  # only images need it

    return np.asarray(Image.fromarray(image).resize(size[::-1], Image.Resampling.BICUBIC))


def shown(turns: Iterable[Any]) -> tuple[np.ndarray, ...]:
    """The images of turns, in their order; () without any."""
    return tuple(turn.image for turn in turns if turn.image is not None)


def tokens_of(image: np.ndarray, vision: VisionSpec) -> int:
    """Image tokens of an image of fitted size."""
    return math.prod(vision.grid(*image.shape[:2]))


def escape(text: str) -> str:
    """Text of a model or of an environment, in which nothing may stand for an image, nor for another special token."""
    return text.replace(PLACEHOLDER, _ESCAPED).replace("<|", "< |")


def check_places(text: str, images: Sequence[Any]) -> None:
    """Raises ValueError if a prompt has not one place for each image."""
    if text.count(PLACEHOLDER) != len(images):
        raise ValueError(
            f"a prompt has {text.count(PLACEHOLDER)} places for images ({PLACEHOLDER}) and {len(images)} images"
        )


def expand(ids: Sequence[int], images: Sequence[np.ndarray], vision: VisionSpec) -> list[int]:
    """Ids with one image token for each image -> ids with all of them. Raises ValueError if the numbers differ."""
    found = sum(token == vision.image_token for token in ids)
    if found != len(images):
        raise ValueError(f"a prompt has {found} places for images ({PLACEHOLDER}) and {len(images)} images")
    counts = iter([tokens_of(image, vision) for image in images])
    return [token for one in ids for token in [one] * (next(counts) if one == vision.image_token else 1)]


def positions(tokens: Sequence[int], images: Sequence[np.ndarray], vision: VisionSpec) -> np.ndarray:
    """[T, 3] int32: frame, row and column of each token of one segment.

    A text token has the same number in all three, one more than the largest before it. The tokens of an image have its
    first position plus their row and column; the text behind it goes on one after the largest of these.
    """
    tokens = np.asarray(tokens)
    found = np.zeros((len(tokens), 3), np.int32)
    place = following = 0
    for image in images:
        rows, columns = vision.grid(*image.shape[:2])
        start = place + int(np.argmax(tokens[place:] == vision.image_token))
        found[place:start] = (following + np.arange(start - place))[:, None]
        following += start - place
        row, column = np.divmod(np.arange(rows * columns), columns)
        place = start + rows * columns
        found[start:place] = following + np.stack([0 * row, row, column], axis=1)
        following += max(rows, columns)
    found[place:] = (following + np.arange(len(tokens) - place))[:, None]
    return found
