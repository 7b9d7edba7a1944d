"""The programs of the sampler: `prefill` writes prompts to cache slots, `decode` adds up to N tokens to every slot. A
model that sees has `features` beside them, which makes of images what `prefill` reads in the places of their tokens.

A slot holds the keys and values of one request, its column c those of token c. Inside `decode` the cache is only read:
the N new columns of all slots go to small buffers in which every slot writes the same column, and are copied to each
slot's own place at the end. (Writing at a place of its own in every slot costs a loop over the slots at every step.)
Prefill stops before the last token of a prompt; decoding starts with it. So prefill needs no vocabulary projection, and
nothing behind keys and values in the last layer.

What is computed for a request depends on the request alone, bit by bit: the shape of its prefill follows from its
length, a decode call has one fixed shape, and a request enters a slot between two calls, so that its tokens always have
the same place in the small buffers.

Shapes: B slots, S columns of a slot, R prompts of one prefill call, P padded tokens of each, N steps, K kv heads, G
query heads of each, hd head size, V vocabulary; A images, n tokens of each, D model.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from seed_jax import sharding
from seed_jax.models import attention as attention_lib
from seed_jax.models import transformer
from seed_jax.models.spec import ModelSpec
from seed_jax.sampler.sampling import sample, sample_without

Cache = list[tuple[jax.Array, jax.Array]]  # a layer: keys [B, K, hd, S], values [B, K, S, hd]

# Columns of the integer state that the host passes to `decode`.
INTS = ("token", "length", "left", "top_k")
FLOATS = ("temperature", "top_p", "min_p")
_MASKED = -1e30


class Programs(NamedTuple):
    """Compiled on first use, once for each shape of their arguments; prefill and decode donate the cache.

    features(weights, images [A, H, W, 3] uint8) -> [A, n, D]; None for a model of text
    """

    prefill: Any
    decode: Any
    features: Any


class Pictures(NamedTuple):
    """The images of what is prefilled. features: [A, n, D]; index: [R, P] which of all their tokens stands here, -1 for
    text; positions: [R, P, 3]."""

    features: jax.Array
    index: jax.Array
    positions: jax.Array


def int_columns(spec: ModelSpec) -> tuple[str, ...]:
    """Of the integer state; with images the position of a token is its column + shift."""
    return INTS if spec.vision is None else (*INTS, "shift")


def kv_copies(spec: ModelSpec, mesh: Mesh) -> int:
    """How often each kv head is kept. With fewer kv heads than devices, each device keeps the one that its query heads
    share: no device reads what it does not need, and attention stays local."""
    tensor = mesh.shape["tensor"]
    fewer = tensor % spec.num_kv_heads == 0 and spec.num_heads % tensor == 0
    return tensor // spec.num_kv_heads if fewer and tensor > spec.num_kv_heads else 1


def cache_sharding(spec: ModelSpec, mesh: Mesh) -> NamedSharding:
    """Keys and values are split by kv head where the tensor axis divides them, else every device has them all."""
    divides = spec.num_kv_heads * kv_copies(spec, mesh) % mesh.shape["tensor"] == 0
    return NamedSharding(mesh, PartitionSpec(None, "tensor" if divides else None))


def cache_shapes(spec: ModelSpec, slots: int, columns: int, copies: int = 1) -> list[tuple[tuple[int, ...], ...]]:
    heads, size = spec.num_kv_heads * copies, spec.head_dim
    return [((slots, heads, size, columns), (slots, heads, columns, size))] * spec.num_layers


@functools.lru_cache(maxsize=32)
def empty_cache_program(spec: ModelSpec, mesh: Mesh, slots: int, columns: int, dtype: Any) -> Any:
    """() -> a cache of zeros, made where it lives."""
    shapes = cache_shapes(spec, slots, columns, kv_copies(spec, mesh))
    place = cache_sharding(spec, mesh)

    def make() -> Cache:
        return [tuple(jnp.zeros(shape, dtype) for shape in layer) for layer in shapes]

    return jax.jit(make, out_shardings=[(place, place)] * spec.num_layers)


@functools.lru_cache(maxsize=32)
def programs(spec: ModelSpec, mesh: Mesh, stop_ids: tuple[int, ...], attention: str) -> Programs:
    """The two programs on one replica's mesh [1, tensor]; attention: backend of prefill (attention.BACKENDS)."""
    place = cache_sharding(spec, mesh)
    cache, whole = [(place, place)] * spec.num_layers, sharding.replicated(mesh)
    return Programs(
        prefill=jax.jit(
            functools.partial(prefill, spec=spec, attention=attention, mesh=mesh),
            static_argnames="window",
            donate_argnums=1,
            out_shardings=cache,
        ),
        decode=jax.jit(
            functools.partial(decode, spec=spec, stop_ids=stop_ids, copies=kv_copies(spec, mesh)),
            donate_argnums=1,
            out_shardings=(cache, (whole,) * 4),
        ),
        features=spec.vision and jax.jit(functools.partial(_features, spec=spec), out_shardings=whole),
    )


def _features(weights, images: jax.Array, spec: ModelSpec) -> jax.Array:
    from seed_jax.models import vision  # only images need it

    return vision.features(weights, spec, images, dtype=weights["embed"].dtype)


def _dense(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., in] times weight [out, in], as one matrix product over all tokens."""
    product = jnp.einsum("ti,oi->to", x.reshape(-1, x.shape[-1]), weight)
    return product.reshape(*x.shape[:-1], weight.shape[0])


def project_qkv(layer: dict[str, jax.Array], spec: ModelSpec, x: jax.Array, rope) -> tuple[jax.Array, ...]:
    """transformer.project_qkv on decode weights: x [B, T, D] -> rotated q [B, T, H, hd], rotated k, v [B, T, K, hd]."""
    hidden = transformer.rms_norm(x, layer["attn_norm"], spec.rms_eps)
    sizes = [heads * spec.head_dim for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
    if "qkv" in layer:
        joined = _dense(hidden, layer["qkv"])
        joined = joined + layer["qkv_bias"] if spec.qkv_bias else joined
        parts = jnp.split(joined, (sizes[0], sizes[0] + sizes[1]), axis=-1)
    else:
        parts = [_dense(hidden, layer[name]) for name in "qkv"]
        if spec.qkv_bias:
            parts = [part + layer[f"{name}_bias"] for part, name in zip(parts, "qkv", strict=True)]
    q, k, v = (part.reshape(*part.shape[:-1], -1, spec.head_dim) for part in parts)
    if spec.qk_norm:
        q = transformer.rms_norm(q, layer["q_norm"], spec.rms_eps)
        k = transformer.rms_norm(k, layer["k_norm"], spec.rms_eps)
    return transformer.rotate(q, rope), transformer.rotate(k, rope), v


def spread(heads: jax.Array, copies: int) -> jax.Array:
    """[B, T, K, hd] -> [B, T, copies * K, hd], see `kv_copies`."""
    return heads if copies == 1 else jnp.repeat(heads, copies, axis=2)


def finish(layer: dict[str, jax.Array], spec: ModelSpec, x: jax.Array, attended: jax.Array) -> jax.Array:
    """transformer.finish on decode weights: x [B, T, D], attended [B, T, H, hd] -> [B, T, D]."""
    x = x + _dense(attended.reshape(*attended.shape[:-2], -1), layer["o"])
    hidden = transformer.rms_norm(x, layer["mlp_norm"], spec.rms_eps)
    if "gate_up" in layer:
        gate, up = jnp.split(_dense(hidden, layer["gate_up"]), 2, axis=-1)
    else:
        gate, up = _dense(hidden, layer["gate"]), _dense(hidden, layer["up"])
    return x + _dense(jax.nn.silu(gate) * up, layer["down"])


# -- prefill -----------------------------------------------------------------------------------------------------------


def prefill(
    weights, cache: Cache, tokens, slots, offsets, count, pictures: Pictures | None = None, *, window: int,
    spec: ModelSpec, attention: str, mesh: Mesh,
) -> Cache:  # fmt: skip
    """Writes keys and values of `count` prompts, or of the next piece of each, to their slots.

    tokens [R, P], left-aligned; slots [R]; offsets [R]: column of each prompt's first token here; what lies behind a
    prompt's end is written too, and never read.
    window: how many columns before `offsets` may hold earlier pieces; 0 for the first piece
    """
    copies = kv_copies(spec, mesh)
    positions = offsets[:, None] + jnp.arange(tokens.shape[1]) if pictures is None else pictures.positions
    rope = transformer.rope_table(spec, positions)
    x = jnp.take(weights["embed"], tokens, axis=0)
    if pictures is not None:
        shown = jnp.take(pictures.features.reshape(-1, x.shape[-1]), jnp.maximum(pictures.index, 0), axis=0)
        x = jnp.where(pictures.index[..., None] >= 0, shown.astype(x.dtype), x)
    written = []
    for number, (layer, (keys, values)) in enumerate(zip(weights["layers"], cache, strict=True)):
        q, k, v = project_qkv(layer, spec, x, rope)
        written.append((spread(k, copies).transpose(0, 2, 3, 1), spread(v, copies).transpose(0, 2, 1, 3)))
        if number == spec.num_layers - 1:
            break  # nothing reads what comes out of the last layer
        if window:
            past = (keys[slots, :, :, :window], values[slots, :, :window])
            attended = _attend_past(q, *past, *written[-1], offsets)
        else:
            one = jnp.ones(tokens.shape, jnp.int32)
            attended = attention_lib.attention(q, k, v, one, one, backend=attention, mesh=mesh)
        x = finish(layer, spec, x, attended)
    return _copy_to_slots(cache, written, slots, offsets, count)


def _attend_past(q, past_k, past_v, k, v, offsets) -> jax.Array:
    """q [R, P, H, hd]; past_k [R, K, hd, W], past_v [R, K, W, hd]: columns below `offsets` count; k [R, K, hd, P],
    v [R, K, P, hd]: this piece itself, causal. Softmax in float32."""
    rows, length, heads, size = q.shape
    kv_heads, window = k.shape[1], past_k.shape[3]
    q = q.reshape(rows, length, kv_heads, heads // kv_heads, size)
    before = jnp.broadcast_to(
        (jnp.arange(window) < offsets[:, None])[:, None, None, None], (rows, 1, 1, length, window)
    )
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (rows, 1, 1, length, length))
    product = functools.partial(jnp.einsum, "rpkgd,rkds->rkgps", q, preferred_element_type=jnp.float32)
    scores = jnp.concatenate([product(past_k), product(k)], axis=-1) * size**-0.5
    scores = jnp.where(jnp.concatenate([before, causal], axis=-1), scores, _MASKED)
    shares = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("rkgps,rksd->rpkgd", shares[..., :window], past_v)
    out = out + jnp.einsum("rkgps,rksd->rpkgd", shares[..., window:], v)
    return out.reshape(rows, length, heads, size)


def _copy_to_slots(cache: Cache, new: Cache, slots, columns, count) -> Cache:
    """Copies rows 0 .. count - 1 of `new` (keys [R, K, hd, P], values [R, K, P, hd]) to their slots and columns."""

    def copy(row, cache):
        slot, column = slots[row], columns[row]
        return [
            (
                jax.lax.dynamic_update_slice(keys, jax.lax.dynamic_slice_in_dim(k, row, 1), (slot, 0, 0, column)),
                jax.lax.dynamic_update_slice(values, jax.lax.dynamic_slice_in_dim(v, row, 1), (slot, 0, column, 0)),
            )
            for (keys, values), (k, v) in zip(cache, new, strict=True)
        ]

    return jax.lax.fori_loop(0, count, copy, cache)


# -- decode ------------------------------------------------------------------------------------------------------------


def decode(weights, cache: Cache, ints, floats, draws, *, spec: ModelSpec, stop_ids: tuple[int, ...], copies: int = 1):
    """Adds up to N tokens to every slot that has some left; stops early when none has.

    ints [B, len(int_columns)]: the token to read next, columns that are filled, tokens still allowed (0: the slot is
    idle), top_k and, with images, the shift; floats [B, len(FLOATS)]; draws [B, N, 2]: the random numbers of the tokens
    to come
    Returns (cache, (tokens [B, N], log-probs at temperature 1 [B, N], log-probs of the sampled distribution [B, N],
    how many of the tokens count [B])).
    """
    slots, length = ints.shape[0], ints[:, INTS.index("length")]
    seen = jnp.arange(cache[0][0].shape[3]) < length[:, None]
    start = length if spec.vision is None else length + ints[:, len(INTS)]

    def forward(recent: Cache, token: jax.Array, step: jax.Array):
        return _forward(weights, cache, recent, spec, token, start + step, step, seen, copies)

    shapes = cache_shapes(spec, slots, draws.shape[1], copies)
    recent = [tuple(jnp.zeros(shape, cache[0][0].dtype) for shape in layer) for layer in shapes]
    recent, out = sampling_loop(forward, recent, ints, floats, draws, stop_ids, spec)
    return _copy_to_slots(cache, recent, jnp.arange(slots), length, slots), out


def sampling_loop(forward, cache, ints, floats, draws, stop_ids: tuple[int, ...], spec: ModelSpec):
    """`forward(cache, token [B], step) -> (logits [B, V], cache)` and `sample`, up to N times.

    A model that sees never writes the token of images: in a later prompt, or in training, it would ask for an image.
    Returns (cache, what `decode` returns beside the cache).
    """
    state = {name: ints[:, column] for column, name in enumerate(INTS)}
    temperature, *cuts = (floats[:, column] for column in range(len(FLOATS)))
    stops, (slots, steps) = jnp.array(stop_ids, jnp.int32), draws.shape[:2]

    def body(carry):
        step, token, active, cache, out = carry
        logits, cache = forward(cache, token, step)
        settings = draws[:, step], temperature, (state["top_k"], *cuts)
        if spec.vision is None:
            token, *logprobs = sample(logits, *settings)
        else:
            token, *logprobs = sample_without(spec.vision.image_token, logits, *settings)
        written = [part.at[:, step].set(value) for part, value in zip(out[:3], (token, *logprobs), strict=True)]
        out = (*written, out[3] + active)
        active &= (step + 1 < state["left"]) & ~(token[:, None] == stops).any(axis=1)
        return step + 1, token, active, cache, out

    out = [jnp.zeros((slots, steps), kind) for kind in (jnp.int32, jnp.float32, jnp.float32)]
    start = (jnp.int32(0), state["token"], state["left"] > 0, cache, (*out, jnp.zeros(slots, jnp.int32)))
    _, _, _, cache, out = jax.lax.while_loop(lambda c: (c[0] < steps) & c[2].any(), body, start)
    return cache, out


def _forward(weights, cache: Cache, recent: Cache, spec: ModelSpec, token, position, step, seen, copies: int):
    """One token of every slot through the model -> (logits [B, V] float32, recent with column `step` written)."""
    rope = transformer.rope_table(spec, position[:, None])
    x = jnp.take(weights["embed"], token, axis=0)[:, None]
    columns, updated = jnp.arange(recent[0][0].shape[3]) <= step, []
    for layer, (past_k, past_v), (new_k, new_v) in zip(weights["layers"], cache, recent, strict=True):
        q, k, v = project_qkv(layer, spec, x, rope)
        k, v = spread(k, copies), spread(v, copies)
        new_k = jax.lax.dynamic_update_slice(new_k, k[:, 0, :, :, None], (0, 0, 0, step))
        new_v = jax.lax.dynamic_update_slice(new_v, v[:, 0, :, None], (0, 0, step, 0))
        updated.append((new_k, new_v))
        x = finish(layer, spec, x, _attend(q, past_k, past_v, new_k, new_v, seen, columns))
    return unembed(weights, spec, x[:, 0]), updated


def unembed(weights, spec: ModelSpec, x: jax.Array) -> jax.Array:
    """What the last layer gives [B, D] -> float32 logits [B, V]."""
    hidden = transformer.rms_norm(x, weights["final_norm"], spec.rms_eps)
    return transformer.project_vocab(weights["embed"] if spec.tie_embeddings else weights["head"], hidden)


def _attend(q, past_k, past_v, new_k, new_v, seen, columns) -> jax.Array:
    """q [B, 1, H, hd] over past [.., S] where seen [B, S] and new [.., N] where columns [N] -> [B, 1, H, hd].

    One softmax over both parts, in float32 and without joining them: divided by its sum at the very end.
    """
    slots, _, heads, size = q.shape
    kv_heads = past_k.shape[1]
    q = q.reshape(slots, kv_heads, heads // kv_heads, size)
    product = functools.partial(jnp.einsum, "bkgd,bkds->bkgs", q, preferred_element_type=jnp.float32)
    past = jnp.where(seen[:, None, None], product(past_k) * size**-0.5, _MASKED)
    new = jnp.where(columns, product(new_k) * size**-0.5, _MASKED)
    peak = jnp.maximum(past.max(axis=-1, keepdims=True), new.max(axis=-1, keepdims=True))
    past, new = jnp.exp(past - peak), jnp.exp(new - peak)
    total = past.sum(axis=-1, keepdims=True) + new.sum(axis=-1, keepdims=True)
    mix = functools.partial(jnp.einsum, "bkgs,bksd->bkgd", preferred_element_type=jnp.float32)
    out = (mix(past.astype(past_v.dtype), past_v) + mix(new.astype(new_v.dtype), new_v)) / total
    return out.astype(q.dtype).reshape(slots, 1, heads, size)
