"""The two programs of decode.py on another cache: pages for the ragged paged attention kernel of TPUs (arXiv
2604.15464), which reads only the pages that a request has filled.

A layer's cache is one array [B * S / page, page, 2 K, hd], keys and values of a head side by side. The pages of a slot
are neighbours, so the page table is a constant: memory is planned by rooms, and only the reading is ragged.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from seed_jax.models import attention as attention_lib
from seed_jax.models import transformer
from seed_jax.models.spec import ModelSpec
from seed_jax.sampler import decode as dense

PAGE = 64  # columns
# Sizes of the kernel's blocks. Given here because its own table asks for a TPU, which a compile-only check has not.
PAGES_A_BLOCK, QUERIES_A_BLOCK = 8, 32
_VMEM_BYTES = 64 * 2**20

Pages = list[jax.Array]


def pages_sharding(spec: ModelSpec, mesh: Mesh) -> NamedSharding:
    divides = spec.num_kv_heads * dense.kv_copies(spec, mesh) % mesh.shape["tensor"] == 0
    return NamedSharding(mesh, PartitionSpec(None, None, "tensor" if divides else None))


def pages_shapes(spec: ModelSpec, slots: int, columns: int, copies: int = 1) -> list[tuple[int, ...]]:
    if spec.vision is not None:
        raise ValueError("the paged cache is for models of text: it has no prefill with images")
    if columns % PAGE:
        raise ValueError(f"{columns} columns are no multiple of the page of {PAGE}")
    return [(slots * columns // PAGE, PAGE, 2 * spec.num_kv_heads * copies, spec.head_dim)] * spec.num_layers


def prefill(
    weights, cache: Pages, tokens, slots, offsets, count, *, window: int, spec: ModelSpec, attention: str, mesh: Mesh,
    columns: int,
) -> Pages:  # fmt: skip
    """As decode.prefill; columns: of a slot. A piece and its offset are whole pages."""
    copies = dense.kv_copies(spec, mesh)
    positions = offsets[:, None] + jnp.arange(tokens.shape[1])
    rope = transformer.rope_table(spec, positions)
    x = jnp.take(weights["embed"], tokens, axis=0)
    filled = []
    for number, (layer, pages) in enumerate(zip(weights["layers"], cache, strict=True)):
        q, k, v = dense.project_qkv(layer, spec, x, rope)
        pages = _write_piece(pages, _combine(k, v, copies), slots, offsets, count, columns)
        filled.append(pages)
        if number == spec.num_layers - 1:
            break
        if window:
            flat = q.reshape(-1, *q.shape[2:])
            lengths = jnp.full(slots.shape, tokens.shape[1], jnp.int32)
            attended = _kernel(flat, pages, slots, offsets + lengths, lengths, mesh, columns).reshape(q.shape)
        else:
            one = jnp.ones(tokens.shape, jnp.int32)
            attended = attention_lib.attention(q, k, v, one, one, backend=attention, mesh=mesh)
        x = dense.finish(layer, spec, x, attended)
    return filled


def decode(
    weights, cache: Pages, ints, floats, draws, *, spec: ModelSpec, stop_ids: tuple[int, ...], mesh: Mesh,
    columns: int,
):  # fmt: skip
    """As decode.decode; columns: of a slot."""
    slots, length = jnp.arange(ints.shape[0]), ints[:, dense.INTS.index("length")]
    one, copies = jnp.ones(ints.shape[0], jnp.int32), dense.kv_copies(spec, mesh)

    def forward(cache: Pages, token: jax.Array, step: jax.Array):
        position = length + step
        rope = transformer.rope_table(spec, position[:, None])
        x = jnp.take(weights["embed"], token, axis=0)[:, None]
        row = slots * (columns // PAGE) + position // PAGE
        written = []
        for layer, pages in zip(weights["layers"], cache, strict=True):
            q, k, v = dense.project_qkv(layer, spec, x, rope)
            pages = pages.at[row, position % PAGE].set(_combine(k, v, copies)[:, 0])
            written.append(pages)
            attended = _kernel(q[:, 0], pages, slots, position + 1, one, mesh, columns)
            x = dense.finish(layer, spec, x, attended[:, None])
        return dense.unembed(weights, spec, x[:, 0]), written

    return dense.sampling_loop(forward, cache, ints, floats, draws, stop_ids, spec)


def _combine(k: jax.Array, v: jax.Array, copies: int) -> jax.Array:
    """[B, T, K, hd] twice -> [B, T, 2 copies K, hd], keys at even places."""
    k, v = dense.spread(k, copies), dense.spread(v, copies)
    return jnp.stack([k, v], axis=3).reshape(*k.shape[:2], -1, k.shape[3])


def _write_piece(pages, piece, slots, offsets, count, columns: int) -> jax.Array:
    """piece [R, P, 2 K, hd] of rows below `count` to their slots."""
    by_page = piece.reshape(piece.shape[0], -1, PAGE, *piece.shape[2:])

    def write(row, pages):
        first = (slots[row] * columns + offsets[row]) // PAGE
        return jax.lax.dynamic_update_slice(pages, by_page[row], (first, 0, 0, 0))

    return jax.lax.fori_loop(0, count, write, pages)


def _kernel(q, pages, slots, lengths, queries, mesh: Mesh, columns: int) -> jax.Array:
    """q [tokens of all rows, H, hd], row after row, `queries` [R] of each, which are the last of its `lengths` [R]."""
    each = columns // PAGE
    table = slots[:, None] * each + jnp.arange(each)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(queries)]).astype(jnp.int32)
    heads, kv_heads, tensor = q.shape[1], pages.shape[2] // 2, mesh.shape["tensor"]

    attend = functools.partial(ragged_attention, sequences=jnp.array([slots.shape[0]], jnp.int32))
    arguments = (q, pages, lengths.astype(jnp.int32), table.astype(jnp.int32), starts)
    if tensor == 1:
        return attend(*arguments)
    if kv_heads % tensor:
        raise ValueError(f"{heads} query heads and {kv_heads} kv heads cannot be split over mesh.tensor = {tensor}")
    whole = PartitionSpec()
    by_head = PartitionSpec(None, "tensor")
    return jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(by_head, PartitionSpec(None, None, "tensor"), whole, whole, whole),
        out_specs=by_head,
        check_vma=False,  # a Pallas call does not say along which axes its result varies
    )(*arguments)


def ragged_attention(q, pages, lengths, table, starts, sequences) -> jax.Array:
    """The kernel on one device: q [tokens, H, hd], starts [R + 1] of each row's queries, table [R, pages of a slot]."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    return ragged_paged_attention(
        q, pages, lengths, table, starts, sequences, sm_scale=q.shape[2] ** -0.5,
        num_kv_pages_per_block=min(PAGES_A_BLOCK, table.shape[1]), vmem_limit_bytes=_VMEM_BYTES,
        num_queries_per_block=min(QUERIES_A_BLOCK, q.shape[0]),
    )  # fmt: skip
