"""The vision tower's part of the weight table (see spec.weights)."""

from __future__ import annotations

import math
from typing import Any

from seed_jax.models.vision_spec import VisionSpec
from seed_jax.models.weight import Weight, matrix, vector


def weights(vision: VisionSpec, d_text: int) -> dict[str, Any]:
    """{"patch", "layers": {...}, "merger": {...}} of a tower that feeds a language model of width `d_text`."""
    depth, residual = vision.depth, 1.0 / math.sqrt(2 * vision.depth)
    embed, ffn = {"embed": vision.d_model}, {"ffn": vision.d_ff}
    heads = {"heads": vision.num_heads, "head_dim": vision.head_dim}
    # The patches of a cell side by side, and the merger's inner width, which is the same number.
    cell = {"cell": vision.merge**2, **embed}
    inner = {"ffn": vision.merge**2 * vision.d_model}

    def linear(name: str, ins: dict[str, int], outs: dict[str, int], scale: float = 1.0) -> tuple[Weight, Weight]:
        name = f"visual.blocks.{{layer}}.{name}"
        return matrix(f"{name}.weight", ins, outs, depth, scale), vector(f"{name}.bias", outs, 0.0, depth)

    layers = {
        "attn_norm": vector("visual.blocks.{layer}.norm1.weight", embed, 1.0, depth),
        "mlp_norm": vector("visual.blocks.{layer}.norm2.weight", embed, 1.0, depth),
    }
    for ours, (weight, bias) in {
        "qkv": linear("attn.qkv", embed, {"qkv": 3, **heads}),
        "o": linear("attn.proj", heads, embed, residual),
        "gate": linear("mlp.gate_proj", embed, ffn),
        "up": linear("mlp.up_proj", embed, ffn),
        "down": linear("mlp.down_proj", ffn, embed, residual),
    }.items():
        layers |= {ours: weight, f"{ours}_bias": bias}
    pixels = (vision.patch, vision.patch, vision.frames, 3)  # column, row, copy of the image, colour
    return {
        "patch": Weight(
            shape=(*pixels, vision.d_model),
            axes=("column", "row", "frame", "colour", "embed"),
            hf_name="visual.patch_embed.proj.weight",
            hf_shape=(vision.d_model, *pixels[::-1]),
            transpose=True,
            std=1.0 / math.sqrt(math.prod(pixels)),
        ),
        "layers": layers,
        "merger": {
            "norm": vector("visual.merger.ln_q.weight", embed, 1.0),
            "in": matrix("visual.merger.mlp.0.weight", cell, inner),
            "in_bias": vector("visual.merger.mlp.0.bias", inner, 0.0),
            "out": matrix("visual.merger.mlp.2.weight", inner, {"embed": d_text}),
            "out_bias": vector("visual.merger.mlp.2.bias", {"embed": d_text}, 0.0),
        },
    }
