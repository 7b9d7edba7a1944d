"""Device mesh, and the one table that says where each logical axis of a weight lives.

Two layouts share one mesh with axes "fsdp" and "tensor". Training splits every weight over both; decoding splits over
"tensor" only, so that a token needs no weight gathers. Rows of a batch are split over "fsdp" in both.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from seed_jax.models import spec as spec_lib
from seed_jax.models.spec import ModelSpec

MESH_AXES = ("fsdp", "tensor")

# Logical axis (spec.Weight.axes) -> mesh axis; an axis not listed is replicated.
_TENSOR_RULES = {"vocab": "tensor", "heads": "tensor", "kv_heads": "tensor", "ffn": "tensor"}
RULES: dict[str, dict[str, str]] = {
    "train": {"embed": "fsdp", **_TENSOR_RULES},
    "decode": _TENSOR_RULES,
}


def make_mesh(devices: Sequence[jax.Device] | None = None, fsdp: int = -1, tensor: int = 1) -> Mesh:
    """A mesh [fsdp, tensor] over `devices` (default: all). One of the two sizes may be -1: whatever is left."""
    devices = jax.devices() if devices is None else list(devices)
    sizes = {"fsdp": fsdp, "tensor": tensor}
    for name, size in sizes.items():
        if size < 1 and size != -1:
            raise ValueError(f"mesh axis {name}={size} must be at least 1, or -1 for the rest of the devices")
    if fsdp == tensor == -1:
        raise ValueError("mesh axes fsdp and tensor are both -1; only one can take the rest of the devices")
    known = fsdp if tensor == -1 else tensor
    if -1 in sizes.values():
        rest = len(devices) // known
        fsdp, tensor = (rest, tensor) if fsdp == -1 else (fsdp, rest)
    if fsdp * tensor != len(devices):
        raise ValueError(
            f"a mesh of fsdp={sizes['fsdp']} times tensor={sizes['tensor']} does not use {len(devices)} devices "
            "exactly; choose sizes whose product is the number of devices"
        )
    return jax.make_mesh((fsdp, tensor), MESH_AXES, axis_types=(AxisType.Auto,) * 2, devices=devices)


def partition_spec(weight: spec_lib.Weight, mesh: Mesh, layout: str) -> PartitionSpec:
    """Where one weight lives. A dimension that its mesh axis does not divide is replicated."""
    if layout not in RULES:
        raise ValueError(f"layout={layout!r} is not known; use one of {', '.join(RULES)}")
    mesh_axes = [RULES[layout].get(axis) for axis in weight.axes]
    return PartitionSpec(
        *(
            axis if axis is not None and size % mesh.shape[axis] == 0 else None
            for size, axis in zip(weight.shape, mesh_axes, strict=True)
        )
    )


def param_shardings(spec: ModelSpec, mesh: Mesh, layout: str) -> dict[str, Any]:
    """Tree of NamedSharding, one per parameter."""
    return spec_lib.map_weights(lambda weight: NamedSharding(mesh, partition_spec(weight, mesh, layout)), spec)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of arrays whose leading axis is batch rows [B, ...]; B must be a multiple of the fsdp size."""
    return NamedSharding(mesh, PartitionSpec("fsdp"))


def constrain(x: jax.Array, mesh: Mesh | None, *axes: str | None) -> jax.Array:
    """`x` with dimension i split over mesh axis `axes[i]` (None or not given: whole), inside jit.

    A dimension that its axis does not divide stays whole. Without a mesh, or with one device, `x` itself.
    """
    if mesh is None or mesh.size == 1:
        return x
    split = (
        axis if axis is not None and size % mesh.shape[axis] == 0 else None
        for size, axis in zip(x.shape, axes, strict=False)
    )
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*split)))


def gather_layer(
    layer: dict[str, jax.Array], table: dict[str, spec_lib.Weight], mesh: Mesh | None, dtype: Any
) -> dict[str, jax.Array]:
    """The weights of one layer (no L axis), ready for its products: whole over "fsdp", still split over "tensor".

    table: their part of the weight table
    Matrices are cast to `dtype` first, which halves what is sent. The gradient takes the way back: summed over "fsdp"
    and split in one step (reduce-scatter). Without a mesh, or with one device, `layer` itself.
    """
    if mesh is None or mesh.size == 1:
        return layer
    gathered = {}
    for name, weight in table.items():
        split = partition_spec(weight, mesh, "train")[1 if weight.stacked else 0 :]
        whole = tuple(None if axis == "fsdp" else axis for axis in split)
        value = layer[name].astype(dtype) if weight.transpose else layer[name]
        gathered[name] = _gather(
            value, NamedSharding(mesh, PartitionSpec(*whole)), NamedSharding(mesh, PartitionSpec(*split))
        )
    return gathered


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: jax.Array, whole: NamedSharding, split: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, whole)


# The transpose of a sharding constraint is the same constraint: without this rule the gradient would be summed whole.
_gather.defvjp(
    lambda x, whole, split: (jax.lax.with_sharding_constraint(x, whole), None),
    lambda whole, split, _, gradient: (jax.lax.with_sharding_constraint(gradient, split),),
)


def replicated(mesh: Mesh) -> NamedSharding:
    """The same value on every device of the mesh."""
    return NamedSharding(mesh, PartitionSpec())


@functools.lru_cache(maxsize=32)
def _reshard_program(spec: ModelSpec, mesh: Mesh, layout: str, dtype: Any) -> Any:
    def cast(params: dict[str, Any]) -> dict[str, Any]:
        return params if dtype is None else jax.tree.map(lambda leaf: leaf.astype(dtype), params)

    return jax.jit(cast, out_shardings=param_shardings(spec, mesh, layout))


def reshard(params: dict[str, Any], spec: ModelSpec, mesh: Mesh, layout: str, dtype: Any = None) -> dict[str, Any]:
    """Parameters in another layout and dtype, by one jitted call on the devices of `mesh`.

    dtype: None keeps each parameter's own. Leaves that need no change may share their buffer with `params`: do not
    donate either tree while the other is in use.
    """
    return _reshard_program(spec, mesh, layout, dtype)(params)
