"""Sizes of the vision tower of Qwen2.5-VL (arXiv 2502.13923), and of the images that it reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

# Mean and deviation of the pixels of CLIP's training images (red, green, blue; arXiv 2103.00020), of full scale 1.
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)

# Field -> (name in vision_config, the class default of `transformers`, which a config.json may leave out).
_SIZES = {
    "depth": ("depth", 32),
    "d_model": ("hidden_size", 3584),
    "num_heads": ("num_heads", 16),
    "d_ff": ("intermediate_size", 3420),
    "window": ("window_size", 112),
}
_TOKENS = {
    "image_token": ("image_token_id", 151655),
    "start_token": ("vision_start_token_id", 151652),
    "end_token": ("vision_end_token_id", 151653),
}
_FULL_LAYERS = (7, 15, 23, 31)
# What vision.py computes, and nothing else: field of vision_config -> its only value.
_FIXED = {
    "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "in_chans": 3,
    "hidden_act": "silu",
}  # fmt: skip
_ROPE = {"rope_type": "axial", "rope_theta": 10_000.0}


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
    full_layers: tuple[int, ...] = _FULL_LAYERS
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280

    def __post_init__(self) -> None:
        for name in ("depth", "d_model", "num_heads", "d_ff", "min_pixels"):
            if getattr(self, name) < 1:
                raise ValueError(f"vision {name}={getattr(self, name)} must be at least 1")
        if self.d_model % (4 * self.num_heads):
            raise ValueError(
                f"vision d_model={self.d_model} over num_heads={self.num_heads} is no multiple of 4: a head rotates by "
                "the row and by the column, in pairs"
            )
        if self.window < self.cell or self.window % self.cell:
            raise ValueError(f"vision window={self.window} pixels must be a multiple of a cell of {self.cell}")
        if self.max_pixels < self.min_pixels:
            raise ValueError(f"max_pixels={self.max_pixels} is less than min_pixels={self.min_pixels}")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def cell(self) -> int:
        """Side of the square of pixels behind one token of the language model."""
        return self.patch * self.merge

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Cells of an image of fitted size (see images.fitted_size), in both directions."""
        return height // self.cell, width // self.cell

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], d_text: int) -> VisionSpec:
        """The tower of a parsed config.json whose language model has width `d_text`; the limits of an image stand in
        another file (`with_processor`).

        Raises ValueError naming the field for everything that vision.py does not compute.
        """
        tower = config.get("vision_config")
        if not isinstance(tower, Mapping) or not tower:
            raise ValueError(
                f"config field vision_config={tower!r} must describe the vision tower; for a model of text alone use "
                "another model_type"
            )
        for field, only in _FIXED.items():
            value = tower.get(field, only)
            if value != only:
                raise ValueError(f"config field vision_config.{field}={value!r} is not supported; only {only!r} is")
        for field, value in (tower.get("rope_parameters") or {}).items():
            if value != _ROPE.get(field, value):
                raise ValueError(
                    f"config field vision_config.rope_parameters.{field}={value!r} is not supported; only "
                    f"{_ROPE[field]} is"
                )
        if tower.get("out_hidden_size", 3584) != d_text:
            raise ValueError(
                f"config field vision_config.out_hidden_size={tower.get('out_hidden_size', 3584)} is not the width of "
                f"the language model, hidden_size={d_text}"
            )
        full = tower.get("fullatt_block_indexes", _FULL_LAYERS)
        sizes = {ours: _integer(tower, *field, "vision_config.") for ours, field in _SIZES.items()}
        tokens = {ours: _integer(config, *field) for ours, field in _TOKENS.items()}
        return cls(**sizes, **tokens, full_layers=tuple(int(layer) for layer in full))

    def to_hf(self, d_text: int) -> dict[str, Any]:
        """The fields of config.json that say this."""
        tower = {name: getattr(self, ours) for ours, (name, _) in _SIZES.items()}
        return {
            **{name: getattr(self, ours) for ours, (name, _) in _TOKENS.items()},
            "vision_config": {
                "model_type": "qwen2_5_vl",
                **tower,
                **_FIXED,
                "fullatt_block_indexes": list(self.full_layers),
                "out_hidden_size": d_text,
            },
        }

    def with_processor(self, config: Mapping[str, Any]) -> VisionSpec:
        """This tower with the limits of a parsed preprocessor_config.json, in its old or its new spelling.

        Raises ValueError naming the field if images are to be cut or scaled in another way.
        """
        fixed = {"patch_size": self.patch, "merge_size": self.merge, "temporal_patch_size": self.frames}
        for field, only in fixed.items():
            if config.get(field, only) != only:
                raise ValueError(
                    f"field {field}={config[field]!r} is not supported; only patches of {self.patch} pixels, "
                    f"{self.merge} x {self.merge} to a cell, {self.frames} frames deep are (patch_size={self.patch}, "
                    f"merge_size={self.merge}, temporal_patch_size={self.frames})"
                )
        for field, only in (("image_mean", MEAN), ("image_std", STD)):
            given = config.get(field) or only
            if len(given) != 3 or any(abs(a - b) > 1e-6 for a, b in zip(given, only, strict=True)):
                raise ValueError(f"field {field}={given} is not supported; only that of CLIP is: {list(only)}")
        size = config.get("size") or {}
        limits = {}
        for ours, name in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            found = (config.get(ours), size.get(ours), size.get(name), getattr(self, ours))
            limits[ours] = _integer({ours: next(value for value in found if value is not None)}, ours)
        return dataclasses.replace(self, **limits)

    def processor_config(self) -> dict[str, Any]:
        """A preprocessor_config.json that says this, for `transformers` and vLLM."""
        return {
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2_5_VLProcessor",
            "min_pixels": self.min_pixels,
            "max_pixels": self.max_pixels,
            "patch_size": self.patch,
            "merge_size": self.merge,
            "temporal_patch_size": self.frames,
            "image_mean": list(MEAN),
            "image_std": list(STD),
        }


def _integer(config: Mapping[str, Any], name: str, default: int | None = None, where: str = "") -> int:
    value = config.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"config field {where}{name}={value!r} must be an integer")
    return value
