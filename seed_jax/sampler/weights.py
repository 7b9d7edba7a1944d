"""Weights in the form that decoding reads: one array a layer, products that share their input joined into one.

A stacked weight that is sliced inside the decode loop is copied at every step; held apart it is read in place. Joined
matrices (query, key, value; gate, up) halve the number of small products. With heads and ffn split over "tensor" they
stay apart, because the parts of a joined matrix would not lie on the device that needs them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from seed_jax import sharding
from seed_jax.models import spec as spec_lib
from seed_jax.models.spec import ModelSpec


def decode_weights(params: dict[str, Any], spec: ModelSpec, dtype: Any, join: bool) -> dict[str, Any]:
    """Parameters (stacked layers) -> {"embed", ["head"], "final_norm", "layers": one dict a layer, ["vision"]}, in
    `dtype`.

    Matrices are [out, in]: with few rows, XLA's products on a CPU are up to 1.3 times faster this way around.
    """
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    layers = [_layer({name: leaf[i] for name, leaf in params["layers"].items()}, join) for i in range(spec.num_layers)]
    made = {"embed": params["embed"], "final_norm": params["final_norm"], "layers": layers}
    if spec.vision is not None:
        made["vision"] = params["vision"]  # as it is: no image is read inside the decode loop
    return made if spec.tie_embeddings else made | {"head": params["lm_head"]}


def _layer(layer: dict[str, jax.Array], join: bool) -> dict[str, jax.Array]:
    flat = dict(layer)
    for name in ("q", "k", "v"):
        flat[name] = layer[name].reshape(layer[name].shape[0], -1).T
        if f"{name}_bias" in layer:
            flat[f"{name}_bias"] = layer[f"{name}_bias"].reshape(-1)
    flat["o"] = layer["o"].reshape(-1, layer["o"].shape[-1]).T
    flat |= {name: layer[name].T for name in ("gate", "up", "down")}
    if join:
        flat["qkv"] = jnp.concatenate([flat.pop(name) for name in ("q", "k", "v")])
        if "q_bias" in flat:
            flat["qkv_bias"] = jnp.concatenate([flat.pop(f"{name}_bias") for name in ("q", "k", "v")])
        flat["gate_up"] = jnp.concatenate([flat.pop("gate"), flat.pop("up")])
    return flat


def decode_shardings(spec: ModelSpec, mesh: Mesh) -> dict[str, Any]:
    """Where the result of `decode_weights` lives: split over "tensor" as in the decode layout, whole over "fsdp"."""
    table = spec_lib.weights(spec)
    join = mesh.shape["tensor"] == 1

    def place(*axes: str | None) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*axes))

    def split(name: str) -> str | None:
        parts = sharding.partition_spec(table["layers"][name], mesh, "decode")
        return "tensor" if "tensor" in parts else None

    layer = {name: place() for name in table["layers"]}
    layer |= {name: place(split(name), None) for name in ("q", "k", "v", "gate", "up")}
    layer |= {name: place(split(name)) for name in table["layers"] if name.endswith("_bias")}
    layer |= {name: place(None, split(name)) for name in ("o", "down")}
    if join:
        for name in ("q", "k", "v", "gate", "up", "q_bias", "k_bias", "v_bias"):
            layer.pop(name, None)
        layer |= {"qkv": place(), "gate_up": place()} | ({"qkv_bias": place()} if spec.qkv_bias else {})
    vocab = sharding.partition_spec(table["embed"], mesh, "decode")[0]
    places = {"embed": place(vocab, None), "final_norm": place(), "layers": [layer] * spec.num_layers}
    if spec.vision is not None:
        places["vision"] = sharding.param_shardings(spec, mesh, "decode")["vision"]
    return places if spec.tie_embeddings else places | {"head": place(vocab, None)}


@functools.lru_cache(maxsize=32)
def program(spec: ModelSpec, mesh: Mesh, dtype: Any) -> Any:
    prepare = functools.partial(decode_weights, spec=spec, dtype=dtype, join=mesh.shape["tensor"] == 1)
    return jax.jit(prepare, out_shardings=decode_shardings(spec, mesh))


def load(params: dict[str, Any], spec: ModelSpec, mesh: Mesh, dtype: Any) -> dict[str, Any]:
    """Parameters of any layout on the devices of `mesh` -> decode weights there: one jitted reshard, cast and join.

    Where training has the devices in another order (see `decode_mesh`), the weights are cast and joined in that order,
    still split, and then moved.
    """
    source, dtype = params["embed"].sharding, jnp.dtype(dtype)
    if isinstance(source, NamedSharding) and _moves(source.mesh, mesh):
        prepared = split_program(spec, source.mesh, dtype, mesh.shape["tensor"] == 1)(params)
        return jax.device_put(prepared, decode_shardings(spec, mesh))
    return program(spec, mesh, dtype)(params)


def _moves(source: Mesh, mesh: Mesh) -> bool:
    """Whether both have the same devices, in another order."""
    before, after = list(source.devices.flat), list(mesh.devices.flat)
    return before != after and set(before) == set(after)


@functools.lru_cache(maxsize=32)
def split_program(spec: ModelSpec, mesh: Mesh, dtype: Any, join: bool) -> Any:
    """Decode weights of which every device of the training mesh holds a part."""
    prepare = functools.partial(decode_weights, spec=spec, dtype=dtype, join=join)

    def place(leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        divided = [d for d, size in enumerate(leaf.shape) if size % mesh.size == 0]
        return NamedSharding(mesh, PartitionSpec(*[None] * divided[0], mesh.axis_names) if divided else PartitionSpec())

    params = spec_lib.map_weights(lambda weight: jax.ShapeDtypeStruct(weight.shape, dtype), spec)
    return jax.jit(prepare, out_shardings=jax.tree.map(place, jax.eval_shape(prepare, params)))


def decode_mesh(mesh: Mesh, tensor: int = 0) -> Mesh:
    """The devices of `mesh` as [copies, tensor]: each row is a copy of the model, and lies inside one host.

    tensor: devices of a copy (mesh.decode_tensor in a config); 0 takes that of `mesh`. The training mesh follows the
    chips' network, where four neighbours may belong to two hosts (v5e:4x4 has 2 x 2 chips a host); then devices are
    sorted by host here.
    """
    tensor = tensor or mesh.shape["tensor"]
    by_host = sorted(mesh.devices.flat, key=lambda device: device.process_index)  # stable
    for devices in (list(mesh.devices.flat), by_host):
        rows = [devices[start : start + tensor] for start in range(0, len(devices), tensor)]
        if len(devices) % tensor == 0 and all(len({device.process_index for device in row}) == 1 for row in rows):
            if rows == mesh.devices.tolist():
                return mesh
            return Mesh(np.array(rows), mesh.axis_names, axis_types=mesh.axis_types)
    hosts = {device.process_index for device in by_host}
    raise ValueError(
        f"mesh.decode_tensor (or mesh.tensor) = {tensor} does not divide the devices of a host, {len(by_host)} devices "
        f"on {len(hosts)} hosts; a copy of the model decodes inside one host, so choose a divisor of its devices"
    )


def local_meshes(mesh: Mesh) -> list[Mesh]:
    """A mesh [1, tensor] for each row of `mesh` that is of this process: a replica of the model decodes on each."""
    here = jax.process_index()
    owners = [{device.process_index for device in row} for row in mesh.devices]
    torn = [number for number, owner in enumerate(owners) if here in owner and len(owner) > 1]
    if torn:
        raise ValueError(
            f"mesh.tensor = {mesh.shape['tensor']} spreads one copy of the model over several hosts (mesh row "
            f"{torn[0]}); decoding stays inside a host, so lower mesh.tensor to at most the devices of one host"
        )
    return [
        Mesh(mesh.devices[number : number + 1], mesh.axis_names, axis_types=mesh.axis_types)
        for number, owner in enumerate(owners)
        if owner == {here}
    ]


def local_view(weights: Any, meshes: list[Mesh]) -> list[Any]:
    """The copies of replicated `weights` on each of `meshes`, without moving anything."""

    def view(leaf: jax.Array, mesh: Mesh) -> jax.Array:
        by_device = {shard.device: shard.data for shard in leaf.addressable_shards}
        shards = [by_device[device] for device in mesh.devices.flat]
        return jax.make_array_from_single_device_arrays(leaf.shape, NamedSharding(mesh, leaf.sharding.spec), shards)

    return [jax.tree.map(lambda leaf, mesh=mesh: view(leaf, mesh), weights) for mesh in meshes]
