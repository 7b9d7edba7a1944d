"""Grouped-query attention over packed rows.

Glossary: B rows, T query tokens, S key tokens, H heads, K kv heads, G = H / K, hd head dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

BACKENDS = ("dense",)

# Finite, so that a query with nothing to attend to gives a uniform average instead of 0/0. float32 holds it exactly
# enough: exp(MASKED - anything a logit can be) is 0.
_MASKED = -1e30


def choose_backend(platform: str) -> str:
    """The attention backend for a jax platform name ("cpu", "gpu", "tpu"). Dense runs on all of them."""
    if platform not in ("cpu", "gpu", "cuda", "rocm", "tpu"):
        raise ValueError(f"platform={platform!r} is not a jax platform; use cpu, gpu or tpu")
    return "dense"


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_segments: jax.Array,
    kv_segments: jax.Array,
    q_positions: jax.Array | None = None,
    *,
    backend: str = "dense",
) -> jax.Array:
    """Causal attention inside segments.

    A query sees the keys of its own segment at or before its index in the row; segment 0 is padding and is never seen.

    q: [B, T, H, hd]; k, v: [B, S, K, hd] with H a multiple of K
    q_segments: [B, T] int; kv_segments: [B, S] int
    q_positions: [B, T] index of each query among the S keys; default 0..T-1
    returns [B, T, H, hd] in q's dtype; finite but meaningless where q_segments is 0 or a query sees no key
    """
    if backend not in BACKENDS:
        raise ValueError(f"attention backend {backend!r} is not supported; use one of {', '.join(BACKENDS)}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads are not a multiple of {k.shape[2]} key/value heads")
    return _dense(q, k, v, visible(q_segments, kv_segments, q_positions))


def visible(q_segments: jax.Array, kv_segments: jax.Array, q_positions: jax.Array | None = None) -> jax.Array:
    """Which key each query may see: [B, T, S] bool. Arguments as in `attention`."""
    if q_positions is None:
        q_positions = jnp.arange(q_segments.shape[1])[None, :]
    same = (q_segments[:, :, None] == kv_segments[:, None, :]) & (kv_segments != 0)[:, None, :]
    return same & (jnp.arange(kv_segments.shape[1]) <= q_positions[:, :, None])


def _dense(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax attention that builds the [B, K, G, T, S] scores; mask [B, T, S].

    The G query heads of one kv head are folded into the query axis, so both products are plain batched matrix
    multiplications over (B, K) and keys and values are never repeated.
    """
    batch, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    groups = heads // kv_heads
    folded = q.reshape(batch, length, kv_heads, groups, head_dim).transpose(0, 2, 3, 1, 4)
    folded = folded.reshape(batch, kv_heads, groups * length, head_dim)
    scores = jnp.einsum("bkqh,bskh->bkqs", folded, k, preferred_element_type=jnp.float32) * head_dim**-0.5
    scores = scores.reshape(batch, kv_heads, groups, length, -1)
    scores = jnp.where(mask[:, None, None], scores, _MASKED)
    probs = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    probs = probs.reshape(batch, kv_heads, groups * length, -1)
    out = jnp.einsum("bkqs,bskh->bkqh", probs, v)
    out = out.reshape(batch, kv_heads, groups, length, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, length, heads, head_dim)
