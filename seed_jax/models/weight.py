"""One row of the table of weights (see spec.weights), and how to write the common ones."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np


class Weight(NamedTuple):
    """One tensor of the model.

    shape: as stored here; tensors of a layer stack lead with its number of layers
    axes: logical axis name of each dimension ("layer", "vocab", "embed", "heads", "kv_heads", "head_dim", "ffn"; those
        that sharding.RULES do not name are whole on every device)
    hf_name: name in a Hugging Face checkpoint, with {layer} where there is one tensor per layer
    hf_shape: shape of one such tensor
    transpose: Hugging Face stores [out, in] and we store [in, out]: ours = hf.T.reshape(shape without the layers)
    std: standard deviation of the initial normal; None means constant `fill`
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    hf_name: str
    hf_shape: tuple[int, ...]
    transpose: bool = False
    std: float | None = None
    fill: float = 0.0

    @property
    def stacked(self) -> bool:
        return self.axes[0] == "layer"

    def from_hf(self, tensor: np.ndarray) -> np.ndarray:
        """One Hugging Face tensor [hf_shape] -> our layout (one layer, without L)."""
        ours = self.shape[1:] if self.stacked else self.shape
        return (tensor.T if self.transpose else tensor).reshape(ours)

    def to_hf(self, tensor: np.ndarray) -> np.ndarray:
        """Inverse of `from_hf`."""
        return tensor.reshape(self.hf_shape[::-1]).T if self.transpose else tensor.reshape(self.hf_shape)


def matrix(hf_name: str, ins: dict[str, int], outs: dict[str, int], layers: int = 0, scale: float = 1.0) -> Weight:
    """The weight [*ins, *outs] of a linear map, given as {logical axis: size}; with `layers`, one for each layer.

    The initial std is scale / sqrt(fan_in).
    """
    fan_in, fan_out = math.prod(ins.values()), math.prod(outs.values())
    lead = {"layer": layers} if layers else {}
    return Weight(
        shape=(*lead.values(), *ins.values(), *outs.values()),
        axes=(*lead, *ins, *outs),
        hf_name=hf_name,
        hf_shape=(fan_out, fan_in),
        transpose=True,
        std=scale / math.sqrt(fan_in),
    )


def vector(hf_name: str, dims: dict[str, int], fill: float, layers: int = 0) -> Weight:
    """A bias or the scale of a norm, `fill` at first."""
    lead = {"layer": layers} if layers else {}
    return Weight((*lead.values(), *dims.values()), (*lead, *dims), hf_name, (math.prod(dims.values()),), fill=fill)
