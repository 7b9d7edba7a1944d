"""The sampler's programs lowered for the chips of one TPU host that need not exist (see seed_jax/aot.py): each replica
of the model decodes on its own, so the programs of one replica are compiled."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from seed_jax import sharding
from seed_jax.models import spec as spec_lib
from seed_jax.models.spec import ModelSpec
from seed_jax.sampler import decode, paged, weights
from seed_jax.sampler.engine import PREFILL_TOKENS
from seed_jax.sampler.rooms import STEPS, Room


def abstract_weights(spec: ModelSpec, mesh: Mesh, dtype: Any) -> Any:
    """Shapes and places of decode weights."""
    params = spec_lib.map_weights(lambda weight: jax.ShapeDtypeStruct(weight.shape, dtype), spec)
    prepare = functools.partial(weights.decode_weights, spec=spec, dtype=dtype, join=mesh.shape["tensor"] == 1)
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        jax.eval_shape(prepare, params), weights.decode_shardings(spec, mesh),
    )  # fmt: skip


def abstract_cache(spec: ModelSpec, mesh: Mesh, room: Room, dtype: Any) -> Any:
    """Shapes and places of the cache of a replica's share of a room."""
    place, copies = decode.cache_sharding(spec, mesh), decode.kv_copies(spec, mesh)
    return [
        tuple(jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape in layer)
        for layer in decode.cache_shapes(spec, room.slots, room.columns, copies)
    ]


def lower_prefill(
    spec: ModelSpec,
    mesh: Mesh,
    room: Room,
    dtype: Any,
    size: int,
    window: int,
    images: int = 0,
    image_size: tuple[int, int] | None = None,
):
    """Prefill of `size` tokens behind `window` columns, in as many rows as the engine takes at once. images: of the
    request, whose call is then its own."""
    struct = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32, sharding=sharding.replicated(mesh))
    rows = 1 if images else max(1, PREFILL_TOKENS // size)
    inputs = struct((rows, size)), struct((rows,)), struct((rows,)), struct(())
    if images:
        cells = math.prod(spec.vision.grid(*image_size))
        features = struct((images, cells, spec.d_model), dtype=dtype)
        inputs = (*inputs, decode.Pictures(features, struct((rows, size)), struct((rows, size, 3))))
    with jax.set_mesh(mesh):
        return decode.programs(spec, mesh, (0,), "splash").prefill.lower(
            abstract_weights(spec, mesh, dtype), abstract_cache(spec, mesh, room, dtype), *inputs, window=window
        )


def lower_features(spec: ModelSpec, mesh: Mesh, dtype: Any, images: int, image_size: tuple[int, int]):
    """What makes features of as many images."""
    shown = jax.ShapeDtypeStruct((images, *image_size, 3), jnp.uint8, sharding=sharding.replicated(mesh))
    with jax.set_mesh(mesh):
        return decode.programs(spec, mesh, (0,), "splash").features.lower(abstract_weights(spec, mesh, dtype), shown)


def lower_decode(spec: ModelSpec, mesh: Mesh, room: Room, dtype: Any):
    """One call of the decode program: up to STEPS tokens in every slot of the room."""
    with jax.set_mesh(mesh):
        return decode.programs(spec, mesh, (0,), "splash").decode.lower(
            abstract_weights(spec, mesh, dtype),
            abstract_cache(spec, mesh, room, dtype),
            *_decode_inputs(spec, mesh, room),
        )


def _decode_inputs(spec: ModelSpec, mesh: Mesh, room: Room) -> tuple[jax.ShapeDtypeStruct, ...]:
    struct = functools.partial(jax.ShapeDtypeStruct, sharding=sharding.replicated(mesh))
    return (
        struct((room.slots, len(decode.int_columns(spec))), jnp.int32),
        struct((room.slots, len(decode.FLOATS)), jnp.float32),
        struct((room.slots, STEPS, 2), jnp.float32),
    )


def lower_paged(kind: str, spec: ModelSpec, mesh: Mesh, room: Room, dtype: Any, size: int, window: int = 0):
    """As `lower_prefill` or `lower_decode` (kind "prefill" or "decode") with the paged cache."""
    whole, copies = sharding.replicated(mesh), decode.kv_copies(spec, mesh)
    columns = -(-room.columns // paged.PAGE) * paged.PAGE
    place = paged.pages_sharding(spec, mesh)
    shapes = paged.pages_shapes(spec, room.slots, columns, copies)
    cache = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape in shapes]
    places = [place] * len(cache)
    if kind == "decode":
        function = functools.partial(paged.decode, spec=spec, stop_ids=(0,), mesh=mesh, columns=columns)
        step = jax.jit(function, donate_argnums=1, out_shardings=(places, (whole,) * 4))
        inputs = _decode_inputs(spec, mesh, room)
    else:
        options = {"attention": "splash", "mesh": mesh, "window": window, "columns": columns}
        step = jax.jit(functools.partial(paged.prefill, spec=spec, **options), donate_argnums=1, out_shardings=places)
        struct = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32, sharding=whole)
        inputs = struct((1, size)), struct((1,)), struct((1,)), struct(())
    with jax.set_mesh(mesh):
        return step.lower(abstract_weights(spec, mesh, dtype), cache, *inputs)
