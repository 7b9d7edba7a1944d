"""The decoder-only transformer as pure functions of a parameter tree (see spec.weights).

Training, prefill and decoding share `block`'s two halves: `project_qkv` and `finish`. Normalization, rotation and
softmax are computed in float32; everything else in the compute dtype.

Glossary: B rows, T row tokens, H heads, K kv heads, hd head dim, D model, F ffn, V vocab, L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from seed_jax import sharding
from seed_jax.models import attention as attention_lib
from seed_jax.models import rope as rope_lib
from seed_jax.models import spec as spec_lib
from seed_jax.models import vision
from seed_jax.models.layers import REMAT_POLICIES, UNROLL_UP_TO, Rope, check_remat, project, rms_norm, rotate
from seed_jax.models.spec import ModelSpec

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

# With full remat on a mesh, the feed-forward part takes at most this many tokens of a device at a time: enough to keep
# the matrix unit busy. Qwen2.5-3B with 16384 tokens on each of 16 v5e chips: 5.07 GB of temporary memory without
# pieces, 3.96 GB with two (compiled, not run).
FFN_TOKENS = 8192


def embed(
    params: dict[str, Any], spec: ModelSpec, tokens: jax.Array, dtype: Any = None, mesh: Mesh | None = None
) -> jax.Array:
    """Token ids [...] -> embeddings [..., D] in `dtype` (default: the table's).

    mesh: ids are [B, T]; each device reads its slice of D for the tokens of all rows, then the rows go to their
        devices. Left alone, the partitioner gathers the whole table.
    """
    del spec  # same signature as the other stages
    vectors = jnp.take(params["embed"], sharding.constrain(tokens, mesh), axis=0)
    vectors = vectors if dtype is None else vectors.astype(dtype)
    return sharding.constrain(sharding.constrain(vectors, mesh, None, None, "fsdp"), mesh, "fsdp")


def splice(x: jax.Array, tokens: jax.Array, features: jax.Array, spec: ModelSpec) -> jax.Array:
    """x [B, T, D] with the k-th image token of each row of tokens [B, T] replaced by features[:, k], of [B, F, D]."""
    seen = tokens == spec.vision.image_token
    place = jnp.clip(jnp.cumsum(seen, axis=1) - 1, 0, features.shape[1] - 1)
    picked = jnp.take_along_axis(features, place[:, :, None], axis=1).astype(x.dtype)
    return jnp.where(seen[:, :, None], picked, x)


def rope_table(spec: ModelSpec, positions: jax.Array) -> Rope:
    """Cosines and sines of the rotary embedding (Su et al. 2021, eq. 15): positions [...] -> two [..., hd/2].

    Both are float32. With spec.rope_sections, positions may also be [B, T, 3]: each section of the pairs turns by its
    own number (M-RoPE, arXiv 2409.12191, section 2.1); [B, T] is the same number three times.
    """
    frequencies = rope_lib.inverse_frequencies(spec.head_dim, spec.rope_theta, spec.rope_scaling)
    if spec.rope_sections and positions.ndim == 3:
        angles = positions[..., np.repeat(np.arange(3), spec.rope_sections)].astype(jnp.float32) * frequencies
    else:
        angles = positions[..., None].astype(jnp.float32) * frequencies
    magnitude = rope_lib.magnitude(spec.rope_scaling)
    if magnitude == 1.0:
        return jnp.cos(angles), jnp.sin(angles)
    return magnitude * jnp.cos(angles), magnitude * jnp.sin(angles)


def project_qkv(layer: dict[str, jax.Array], spec: ModelSpec, x: jax.Array, rope: Rope) -> tuple[jax.Array, ...]:
    """First half of a layer: x [B, T, D] -> rotated q [B, T, H, hd], rotated k and v [B, T, K, hd].

    layer: one slice of params["layers"] (no L axis); rope: `rope_table` of the tokens' positions.
    """
    hidden = rms_norm(x, layer["attn_norm"], spec.rms_eps)
    q, k, v = (project(hidden, layer[name]) for name in "qkv")
    if spec.qkv_bias:
        q, k, v = (part + layer[f"{name}_bias"].astype(x.dtype) for part, name in zip((q, k, v), "qkv", strict=True))
    if spec.qk_norm:
        q = rms_norm(q, layer["q_norm"], spec.rms_eps)
        k = rms_norm(k, layer["k_norm"], spec.rms_eps)
    return rotate(q, rope), rotate(k, rope), v


def finish(
    layer: dict[str, jax.Array], spec: ModelSpec, x: jax.Array, attended: jax.Array, pieces: int = 1
) -> jax.Array:
    """Second half of a layer: x [B, T, D] and the attention output [B, T, H, hd] -> the next x [B, T, D].

    pieces: a divisor of T. The feed-forward part runs over so many pieces of the rows, one after the other, forward and
        backward: only one piece of its [B, T, F] intermediates exists at a time.
    """
    x = x + project(attended, layer["o"], contracted=2)

    def feed_forward(x: jax.Array) -> jax.Array:
        hidden = rms_norm(x, layer["mlp_norm"], spec.rms_eps)
        gated = jax.nn.silu(project(hidden, layer["gate"])) * project(hidden, layer["up"])
        return x + project(gated, layer["down"])

    if pieces == 1:
        return feed_forward(x)
    batch, length, width = x.shape
    cut = jnp.moveaxis(x.reshape(batch, pieces, length // pieces, width), 1, 0)
    out = jax.lax.map(jax.checkpoint(feed_forward, prevent_cse=False), cut)
    return jnp.moveaxis(out, 0, 1).reshape(x.shape)


def _ffn_pieces(batch: int, length: int, mesh: Mesh | None) -> int:
    """Into how many pieces to cut rows of `length` tokens, so that a device has at most FFN_TOKENS in each."""
    if mesh is None:
        return 1
    rows = -(-batch // mesh.shape["fsdp"])
    enough = (n for n in range(1, length + 1) if length % n == 0 and rows * length // n <= FFN_TOKENS)
    return next(enough, length)


def block(layer: dict[str, jax.Array], spec: ModelSpec, x: jax.Array, rope: Rope, attend: Attend) -> jax.Array:
    """One layer: x [B, T, D] -> [B, T, D]. `attend(q, k, v) -> [B, T, H, hd]` decides which keys a query sees."""
    return finish(layer, spec, x, attend(*project_qkv(layer, spec, x, rope)))


def final_norm(params: dict[str, Any], spec: ModelSpec, x: jax.Array) -> jax.Array:
    """The norm after the last layer, [..., D] -> [..., D]."""
    return rms_norm(x, params["final_norm"], spec.rms_eps)


def output_table(params: dict[str, Any], spec: ModelSpec) -> jax.Array:
    """The output projection [V, D]."""
    return params["embed"] if spec.tie_embeddings else params["lm_head"]


def unembed(params: dict[str, Any], spec: ModelSpec, h: jax.Array) -> jax.Array:
    """Final hidden states [..., D] -> float32 logits [..., V]."""
    return project_vocab(output_table(params, spec), h)


def project_vocab(table: jax.Array, h: jax.Array) -> jax.Array:
    """Hidden states [..., D] times rows of the output projection [V, D] -> float32 logits [..., V]."""
    return jnp.einsum("...d,vd->...v", h, table.astype(h.dtype), preferred_element_type=jnp.float32)


def hidden_states(
    params: dict[str, Any],
    spec: ModelSpec,
    tokens: jax.Array,
    segment_ids: jax.Array,
    positions: jax.Array,
    *,
    dtype: Any = None,
    remat: str = "none",
    attention: str = "dense",
    mesh: Mesh | None = None,
    images: jax.Array | None = None,
    return_kv: bool = False,
) -> jax.Array | tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Run the layers over packed rows; the result is after the final norm.

    tokens: [B, T] ids below V; segment_ids: [B, T], 0 is padding and nothing else says so; positions: [B, T], counted
        from 0 inside each segment, or [B, T, 3] (see `rope_table`)
    dtype: compute dtype, default that of the parameters
    remat: "none" | "dots" | "full", what the backward pass recomputes
    attention: backend, see attention.BACKENDS
    mesh: says how the work is split: rows over "fsdp", heads and ffn over "tensor", and each layer's weights gathered
        when the layer runs. Splash and cudnn need it on more than one device. None leaves all to the partitioner.
    images: [B, I, H, W, 3] uint8 of fitted size, those of each row in the order of their image tokens; what is behind
        them is not used
    return_kv: also return the rotated keys and the values of every layer, each [L, B, T, K, hd] (prefill)
    returns [B, T, D], or ([B, T, D], (keys, values)); finite but meaningless at padding
    """
    check_remat(remat)
    rope, table = rope_table(spec, positions), spec_lib.weights(spec)["layers"]
    pieces = _ffn_pieces(*tokens.shape, mesh) if remat == "full" else 1

    def layer_step(x: jax.Array, layer: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        layer = sharding.gather_layer(layer, table, mesh, x.dtype)
        q, k, v = project_qkv(layer, spec, x, rope)
        attended = attention_lib.attention(q, k, v, segment_ids, segment_ids, backend=attention, mesh=mesh)
        x = sharding.constrain(finish(layer, spec, x, attended, pieces), mesh, "fsdp")
        return x, (k, v) if return_kv else None

    if remat != "none":
        # Inside a scan the compiler cannot merge the recomputation with the original, so no barrier is needed.
        layer_step = jax.checkpoint(layer_step, policy=REMAT_POLICIES[remat], prevent_cse=False)
    unroll = spec.num_layers <= UNROLL_UP_TO
    x = embed(params, spec, tokens, dtype, mesh)
    if images is not None:
        batch, _, *size = images.shape
        seen = vision.features(params, spec, images.reshape(-1, *size), dtype=x.dtype, mesh=mesh, remat=remat)
        x = splice(x, tokens, seen.reshape(batch, -1, spec.d_model), spec)
    x, kv = jax.lax.scan(layer_step, x, params["layers"], unroll=unroll)
    hidden = final_norm(params, spec, x)
    return (hidden, kv) if return_kv else hidden
