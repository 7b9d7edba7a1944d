"""The sampler's programs of Qwen2.5-3B compiled for one TPU host without a TPU: do they compile, what does a chip need?

    JAX_PLATFORMS=cpu python -m seed_jax.sampler.aot [--json]

Needs libtpu (requirements-tpu-check.txt). Nothing is run. Each host holds as many replicas as its chips allow with the
tensor size below; the programs of one replica are compiled, with the rooms of the published ALFWorld configuration.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from seed_jax import aot, sharding
from seed_jax.models import spec as spec_lib
from seed_jax.models.spec import ModelSpec
from seed_jax.sampler import decode, paged, weights
from seed_jax.sampler.rooms import PIECE, STEPS, make_room

QWEN25_3B = ModelSpec(
    vocab_size=151936, d_model=2048, num_layers=36, num_heads=16, num_kv_heads=2, head_dim=128, d_ff=11008,
    rope_theta=1e6,
)  # fmt: skip
BUCKET = 128

# One host of each kind -> devices that share a replica (specs: v5e 16 GB a chip, v5p 95 GB, v6e 32 GB).
HOSTS = {"v5e:2x2": 4, "v5p:2x2x1": 2, "v6e:2x4": 4}
# (prompt, reply, requests of one replica)
ACTING, ANALYSIS = (2048, 512, 32), (16384, 4096, 4)


class Report(NamedTuple):
    """Of one program on one chip, in bytes; cache_bytes is part of argument_bytes."""

    host: str
    program: str
    temp_bytes: int
    argument_bytes: int
    cache_bytes: int
    compile_s: float


def abstract_weights(spec: ModelSpec, mesh: Mesh, dtype: Any) -> Any:
    """Shapes and places of decode weights."""
    params = spec_lib.map_weights(lambda weight: jax.ShapeDtypeStruct(weight.shape, dtype), spec)
    prepare = functools.partial(weights.decode_weights, spec=spec, dtype=dtype, join=mesh.shape["tensor"] == 1)
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        jax.eval_shape(prepare, params), weights.decode_shardings(spec, mesh),
    )  # fmt: skip


def lowered(program: str, spec: ModelSpec, mesh: Mesh, room, slots: int, dtype: Any, size: int, rows: int):
    """program: "prefill", "prefill-piece" (a later piece of a long prompt) or "decode"; "-paged" behind it or not."""
    kind, is_paged = program.removesuffix("-paged"), program.endswith("-paged")
    whole, copies = sharding.replicated(mesh), decode.kv_copies(spec, mesh)
    struct = functools.partial(jax.ShapeDtypeStruct, sharding=whole)
    columns = -(-room.columns // paged.PAGE) * paged.PAGE
    if is_paged:
        place, module, extra = paged.pages_sharding(spec, mesh), paged, {"columns": columns}
        cache = [
            jax.ShapeDtypeStruct(s, dtype, sharding=place) for s in paged.pages_shapes(spec, slots, columns, copies)
        ]
    else:
        place, module, extra = decode.cache_sharding(spec, mesh), decode, {}
        cache = [
            tuple(jax.ShapeDtypeStruct(s, dtype, sharding=place) for s in layer)
            for layer in decode.cache_shapes(spec, slots, columns, copies)
        ]
    places = jax.tree.map(lambda leaf: leaf.sharding, cache)
    params = abstract_weights(spec, mesh, dtype)
    if kind == "decode":
        extra |= {"mesh": mesh} if is_paged else {"copies": copies}
        function = functools.partial(module.decode, spec=spec, stop_ids=(0,), **extra)
        state = struct((slots, len(decode.INTS)), jnp.int32), struct((slots, len(decode.FLOATS)), jnp.float32)
        state += (struct((slots, STEPS, 2), jnp.float32),)
        step = jax.jit(function, donate_argnums=1, out_shardings=(places, (whole,) * 4))
    else:
        window = PIECE * 4 if kind == "prefill-piece" else 0
        function = functools.partial(module.prefill, spec=spec, attention="splash", mesh=mesh, window=window, **extra)
        state = struct((rows, size), jnp.int32), struct((rows,), jnp.int32), struct((rows,), jnp.int32)
        state += (struct((), jnp.int32),)
        step = jax.jit(function, donate_argnums=1, out_shardings=places)
    with jax.set_mesh(mesh):
        return step.lower(params, cache, *state)


def compile_report(
    host: str, program: str, spec: ModelSpec, mesh: Mesh, room, slots: int, size: int, rows: int
) -> Report:
    dtype = jnp.dtype("bfloat16")
    low = lowered(program, spec, mesh, room, slots, dtype, size, rows)
    start = time.perf_counter()
    memory = low.compile().memory_analysis()
    heads = spec.num_kv_heads * decode.kv_copies(spec, mesh) / mesh.shape["tensor"]
    cache = int(2 * spec.num_layers * heads * spec.head_dim * slots * room.columns * dtype.itemsize)
    return Report(
        host, program, memory.temp_size_in_bytes, memory.argument_size_in_bytes, cache, time.perf_counter() - start
    )


def replica_mesh(host: str, tensor: int) -> Mesh:
    mesh = aot.topology_mesh(host, tensor=tensor)
    return Mesh(mesh.devices[:1], mesh.axis_names, axis_types=mesh.axis_types)


def reports(host: str, tensor: int, spec: ModelSpec = QWEN25_3B) -> list[Report]:
    mesh, made = replica_mesh(host, tensor), []
    for name, (prompt, reply, slots) in (("acting", ACTING), ("analysis", ANALYSIS)):
        room = make_room(name, slots, prompt, reply, BUCKET)
        kinds = ("prefill", "decode") if name == "acting" else ("prefill-piece", "decode")
        for program in [kind + suffix for kind in kinds for suffix in ("", "-paged")]:
            report = compile_report(host, program, spec, mesh, room, slots, PIECE, 1)
            made.append(report._replace(program=f"{name} {program}"))
    return made


def table(rows: list[Report]) -> str:
    names = f"{'arguments':>10} {'of it cache':>12} {'temporary':>10} {'sum GB':>8} {'compile':>9}"
    lines = [f"{'host':<10} {'program':<30} {names}"]
    for row in rows:
        gb = [value / 1e9 for value in (row.argument_bytes, row.cache_bytes, row.temp_bytes)]
        lines.append(
            f"{row.host:<10} {row.program:<30} {gb[0]:>10.2f} {gb[1]:>12.2f} {gb[2]:>10.2f} {gb[0] + gb[2]:>8.2f} "
            f"{row.compile_s:>7.0f} s"
        )
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    problem = aot.missing()
    if problem:
        sys.exit(problem)
    rows = []
    for host, tensor in HOSTS.items():
        rows += reports(host, tensor)
        if "--json" in arguments:
            print("\n".join(json.dumps(row._asdict()) for row in rows if row.host == host), flush=True)
    if "--json" not in arguments:
        print(table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
