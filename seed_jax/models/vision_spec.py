"""Sizes of the vision tower of Qwen2.5-VL (arXiv 2502.13923), and of the images that it reads."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class VisionSpec:
    """A vision tower. Hashable. An image of gh x gw cells becomes gh * gw tokens of the language model.

    depth, d_model, num_heads, d_ff: layers, width, attention heads and feed-forward width of the tower
    patch: side of a patch, in pixels; merge: patches along each side of a cell; frames: copies of an image in a patch
    window: side of an attention window, in pixels; full_layers: layers that attend over the whole image instead
    image_token, start_token, end_token: ids that stand for a cell of an image, and that enclose all of an image
    min_pixels, max_pixels: an image with fewer or more is enlarged or shrunk
    """

    depth: int
    d_model: int
    num_heads: int
    d_ff: int
    image_token: int
    start_token: int
    end_token: int
    patch: int = 14
    merge: int = 2
    frames: int = 2
    window: int = 112
    full_layers: tuple[int, ...] = (7, 15, 23, 31)
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280

    @property
    def cell(self) -> int:
        """Side of the square of pixels behind one token of the language model."""
        return self.patch * self.merge

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Cells of an image of fitted size (see images.fitted_size), in both directions."""
        return height // self.cell, width // self.cell
