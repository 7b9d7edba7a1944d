"""Pictures of a deal and its formula: our own cards, drawn with Pillow, which is imported only when one is drawn."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from envs.ezpoints.deal import Card, Deal

SIZE_PX = 300
CARD_PX = (135, 189)  # width, height
CARDS_AT = ((5, 55), (153, 55))  # upper left corners
FORMULA_AT, FORMULA_PX = (10, 258), 20
_RANK_PX = 40
TABLE = (53, 101, 77)
_RED, _BLACK, _PAPER, _LINE = (200, 24, 36), (20, 20, 24), (252, 252, 248), (120, 120, 120)
_FINE = 4  # shapes are drawn so many times larger, and shrunk

# Outlines of suits in a square of side 1; circles as (x, y, radius). No font of Pillow's has their letters.
_SHAPES: dict[str, tuple[list[tuple[float, float]], list[tuple[float, float, float]]]] = {
    "diamonds": ([(0.5, 0.0), (0.88, 0.5), (0.5, 1.0), (0.12, 0.5)], []),
    "hearts": ([(0.04, 0.40), (0.5, 0.98), (0.96, 0.40), (0.5, 0.22)], [(0.27, 0.29, 0.255), (0.73, 0.29, 0.255)]),
    "spades": ([(0.05, 0.55), (0.5, 0.0), (0.95, 0.55), (0.5, 0.70)], [(0.27, 0.60, 0.225), (0.73, 0.60, 0.225)]),
    "clubs": ([], [(0.5, 0.24, 0.235), (0.25, 0.60, 0.235), (0.75, 0.60, 0.235), (0.5, 0.50, 0.14)]),
}
_STEM = [(0.5, 0.55), (0.68, 1.0), (0.32, 1.0)]  # of the black suits


class PillowMissing(ValueError):
    """Pictures were asked for, and the package that draws them is not there."""


def picture(cards: Deal, symbols: Sequence[str], font: str = "") -> np.ndarray:
    """uint8 array (300, 300, 3): the cards side by side, and the formula below them. Raises PillowMissing."""
    image, draw = _pillow()[:2]
    canvas = image.new("RGB", (SIZE_PX, SIZE_PX), TABLE)
    for card, corner in zip(cards, CARDS_AT, strict=True):
        face = _face(card, font)
        canvas.paste(face, corner, face)
    text = f"Formula: {' '.join(symbols)}"
    draw.Draw(canvas).text(FORMULA_AT, text, fill="white", font=_font(font, FORMULA_PX))
    return np.asarray(canvas)


def _pillow() -> tuple[Any, Any, Any]:
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise PillowMissing(
            "pictures of cards need Pillow: pip install pillow, or set env.observation='text'"
        ) from error
    return Image, ImageDraw, ImageFont


@functools.lru_cache(maxsize=16)
def _font(path: str, size: int) -> Any:
    """A file that cannot be read is replaced by Pillow's own font, with one warning."""
    fonts = _pillow()[2]
    if path:
        try:
            return fonts.truetype(path, size)
        except OSError as error:
            warnings.warn(f"env.font = {path!r} cannot be read ({error}); Pillow's own font is used", stacklevel=2)
    return fonts.load_default(size)


@functools.lru_cache(maxsize=256)
def _face(card: Card, font: str) -> Any:
    """One card, RGBA: its rank and suit in two corners (the second upside down), its suit in the middle."""
    image, draw, _ = _pillow()
    (width, height), fine = CARD_PX, _FINE
    large = image.new("RGBA", (width * fine, height * fine))
    pen = draw.Draw(large)
    pen.rounded_rectangle((0, 0, width * fine - 1, height * fine - 1), 10 * fine, _PAPER, _LINE, fine)
    colour = _RED if card.suit in ("diamonds", "hearts") else _BLACK
    for _ in range(2):
        written = {"font": _font(font, _RANK_PX * fine), "anchor": "mt", "stroke_width": fine}  # a stroke makes it bold
        pen.text((29 * fine, 9 * fine), card.rank, fill=colour, **written)
        _suit(pen, card.suit, (18 * fine, 47 * fine), 22 * fine, colour)
        large = large.rotate(180)
        pen = draw.Draw(large)
    middle = 56
    _suit(pen, card.suit, ((width - middle) // 2 * fine, (height - middle) // 2 * fine), middle * fine, colour)
    return large.resize(CARD_PX, image.Resampling.LANCZOS)


def _suit(pen: Any, suit: str, corner: tuple[int, int], side: int, colour: tuple[int, int, int]) -> None:
    (left, top), (outline, circles) = corner, _SHAPES[suit]
    polygons = [outline, _STEM] if suit in ("clubs", "spades") else [outline]
    for points in polygons:
        if points:
            pen.polygon([(left + x * side, top + y * side) for x, y in points], fill=colour)
    for x, y, radius in circles:
        x, y, radius = left + x * side, top + y * side, radius * side
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
