"""Grouped-query attention over packed rows: one call, three backends.

dense   everywhere; builds the [T, S] scores, so it is for short rows, CPUs, and queries against a cache
splash  TPU; the in-tree Pallas kernel (in interpret mode elsewhere, for tests), a block at a time
cudnn   GPU; cuDNN's flash attention through jax.nn.dot_product_attention, in bfloat16 or float16

Glossary: B rows, T query tokens, S key tokens, H heads, K kv heads, G = H / K, hd head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

BACKENDS = ("dense", "splash", "cudnn")

# Dense attention of a row to itself runs over so many tokens of queries at a time (at most so many pieces), each piece
# only against the keys up to its end.
_DENSE_TOKENS, _DENSE_PIECES = 128, 8

# Finite, so that a query with nothing to attend to gives a uniform average instead of 0/0. float32 holds it exactly
# enough: exp(MASKED - anything a logit can be) is 0.
_MASKED = -1e30

_LANES = 128  # a splash block is a multiple of the width of the TPU's vector registers
SPLASH_BLOCK = 512  # largest block of queries and of keys, tokens
# cuDNN takes head sizes up to 256 from Hopper on; 128 works on every GPU that has the kernel.
_CUDNN_MAX_HEAD_DIM = 128
_CUDNN_DTYPES = ("bfloat16", "float16")


def choose_backend(
    platform: str, *, dtype: Any = None, head_dim: int | None = None, row_tokens: Sequence[int] = ()
) -> str:
    """The attention backend for a jax platform name ("cpu", "gpu", "tpu"), a compute dtype and lengths of rows.

    "tpu" is always splash; rows that do not fit it are an error here, before anything is compiled. "gpu" is cudnn where
    dtype, head size and rows allow it (what is not given does not), else dense.
    """
    if platform not in ("cpu", "gpu", "cuda", "rocm", "tpu"):
        raise ValueError(f"platform={platform!r} is not a jax platform; use cpu, gpu or tpu")
    if platform == "tpu":
        for length in row_tokens:
            splash_block(length)
        return "splash"
    known = dtype is not None and head_dim is not None and len(row_tokens) > 0
    if platform in ("gpu", "cuda") and known:
        fits = all(_cudnn_problem(dtype, head_dim, length) is None for length in row_tokens)
        return "cudnn" if fits else "dense"
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
    mesh: Mesh | None = None,
) -> jax.Array:
    """Causal attention inside segments.

    A query sees the keys of its own segment at or before its index in the row; segment 0 is padding and is never seen
    by a token.

    q: [B, T, H, hd]; k, v: [B, S, K, hd] with H a multiple of K
    q_segments: [B, T] int; kv_segments: [B, S] int
    q_positions: [B, T] index of each query among the S keys; default 0..T-1. Only dense has it, and S that is not T.
    mesh: with more than one device, splash and cudnn need it: each device works on its own rows (axis "fsdp") and heads
        (axis "tensor", where it divides them)
    returns [B, T, H, hd] in q's dtype; finite but meaningless where q_segments is 0 or a query sees no key
    """
    if backend not in BACKENDS:
        raise ValueError(f"attention backend {backend!r} is not supported; use one of {', '.join(BACKENDS)}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads are not a multiple of {k.shape[2]} key/value heads")
    if backend == "dense":
        if q_positions is None and q.shape[1] == k.shape[1]:
            return _dense_causal(q, k, v, q_segments)
        return _dense(q, k, v, visible(q_segments, kv_segments, q_positions))
    if q_positions is not None or q.shape[1] != k.shape[1]:
        raise ValueError(
            f"attention backend {backend!r} is for rows that attend to themselves, not for {q.shape[1]} queries placed "
            f"among {k.shape[1]} keys; use 'dense'"
        )
    if backend == "splash":
        platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
        kernel = functools.partial(_splash, block=splash_block(q.shape[1]), interpret=platform != "tpu")
    else:
        problem = _cudnn_problem(q.dtype, q.shape[3], q.shape[1])
        if problem is not None:
            raise ValueError(problem)
        kernel = _cudnn
    return _over_mesh(kernel, mesh, q, k, v, q_segments, kv_segments)


def bidirectional(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
    """Every token sees all of its own segment, in both directions: q, k, v [B, T, H, hd] -> [B, T, H, hd].

    segments: [B, T] or [1, T] int; finite but meaningless where it is 0
    """
    same = (segments[:, :, None] == segments[:, None, :]) & (segments != 0)[:, None, :]
    return _dense(q, k, v, same)


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


def _dense_causal(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
    """`_dense` of rows to themselves, without the keys that come after a piece of queries.

    The backward pass computes a piece's scores again, so those of only one piece exist. On a CPU, forward and backward
    of an 8-layer model over rows of 704 tokens take .78 of the time of one [T, T] product (.88 with remat "dots").
    """
    length = q.shape[1]
    pieces = min(_DENSE_PIECES, length // _DENSE_TOKENS)
    if pieces <= 1:
        return _dense(q, k, v, visible(segments, segments))
    size = -(-length // pieces)

    @jax.checkpoint
    def attend(q: jax.Array, k: jax.Array, v: jax.Array, q_segments: jax.Array, kv_segments: jax.Array) -> jax.Array:
        places = jnp.arange(k.shape[1] - q.shape[1], k.shape[1])[None, :]
        return _dense(q, k, v, visible(q_segments, kv_segments, places))

    ends = [(start, min(start + size, length)) for start in range(0, length, size)]
    parts = [attend(q[:, i:j], k[:, :j], v[:, :j], segments[:, i:j], segments[:, :j]) for i, j in ends]
    return jnp.concatenate(parts, axis=1)


def _over_mesh(
    kernel: Callable[..., jax.Array],
    mesh: Mesh | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_segments: jax.Array,
    kv_segments: jax.Array,
) -> jax.Array:
    """`kernel` on the rows and heads of each device; arguments as in `attention`.

    A kernel is opaque to the partitioner, which would gather its arguments on every device.
    """
    if mesh is None or mesh.size == 1:
        return kernel(q, k, v, q_segments, kv_segments)
    batch, heads, kv_heads = q.shape[0], q.shape[2], k.shape[2]
    fsdp, tensor = mesh.shape["fsdp"], mesh.shape["tensor"]
    if batch % fsdp:
        raise ValueError(f"{batch} rows cannot be split over mesh axis fsdp={fsdp}; use a multiple of it")
    head_axis = "tensor" if kv_heads % tensor == 0 else None
    if head_axis is None and tensor % kv_heads == 0 and heads % tensor == 0:
        # Fewer kv heads than devices: each device gets a copy of the one that its query heads share.
        head_axis = "tensor"
        k, v = (jnp.repeat(x, tensor // kv_heads, axis=2) for x in (k, v))
    per_head, per_token = PartitionSpec("fsdp", None, head_axis), PartitionSpec("fsdp")
    return jax.shard_map(
        kernel,
        mesh=mesh,
        in_specs=(per_head,) * 3 + (per_token,) * 2,
        out_specs=per_head,
        check_vma=False,  # a Pallas call does not say along which axes its result varies
    )(q, k, v, q_segments, kv_segments)


def splash_block(length: int) -> int:
    """Block size of the splash kernel for rows of `length` tokens: the largest that divides them."""
    if length < 1 or length % _LANES:
        raise ValueError(
            f"rows of {length} tokens do not fit splash attention (the TPU's backend): a row must be a multiple of "
            f"{_LANES} tokens. Use {-(-length // _LANES) * _LANES or _LANES} (pack.row_tokens and "
            "pack.teacher_row_tokens in a config), or the attention backend 'dense'"
        )
    return max(block for block in range(_LANES, min(length, SPLASH_BLOCK) + 1, _LANES) if length % block == 0)


@functools.lru_cache(maxsize=64)
def _splash_kernel(heads: int, length: int, block: int, interpret: bool) -> Any:
    """The kernel for `heads` causal heads; its small block tables are NumPy arrays.

    The library's `make_splash_mha` would put the tables on a device, which fails under `jax.set_mesh` of a topology
    without devices (compile-only), so this does the same steps without that one.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as tables

    mask = masks.MultiHeadMask([masks.CausalMask((length, length))] * heads)
    options = {"downcast_smem_data": True, "head_shards": 1, "q_seq_shards": 1}
    forward, mask_function = tables.process_mask(mask, (block, block), **options)
    backward, _ = tables.process_mask_dkv(mask, (block, block), **options)
    sizes = dict.fromkeys(
        ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute", "block_q_dq", "block_kv_dq"),
        block,
    )
    return library.SplashAttentionKernel(
        forward,
        forward,
        backward,
        block_sizes=library.BlockSizes(**sizes, block_kv_compute=block),
        is_mqa=False,
        save_residuals=False,
        mask_value=library.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=None,
        residual_checkpoint_name=None,
        mask_function=mask_function,
        interpret=interpret,
    )


def _splash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_segments: jax.Array,
    kv_segments: jax.Array,
    *,
    block: int,
    interpret: bool,
) -> jax.Array:
    """Splash attention on one device. Padding sees padding, so no row of the scores is empty."""
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    kernel = _splash_kernel(q.shape[2], q.shape[1], block, interpret)
    # The kernel has no scale of its own.
    scaled = (q.astype(jnp.float32) * q.shape[3] ** -0.5).astype(q.dtype)
    by_head = (x.transpose(0, 2, 1, 3) for x in (scaled, k, v))
    out = jax.vmap(kernel)(*by_head, SegmentIds(q_segments, kv_segments))
    return out.transpose(0, 2, 1, 3).astype(q.dtype)


def _cudnn_problem(dtype: Any, head_dim: int, length: int) -> str | None:
    """Why cuDNN's kernel cannot take this, or None (jax/_src/cudnn/fused_attention_stablehlo.py has its rules)."""
    if np.dtype(dtype).name not in _CUDNN_DTYPES:
        return f"cudnn attention computes in {' or '.join(_CUDNN_DTYPES)}, not {np.dtype(dtype).name}; use 'dense'"
    if head_dim % 8 or head_dim > _CUDNN_MAX_HEAD_DIM:
        return f"cudnn attention needs a head size of 8, 16, ... {_CUDNN_MAX_HEAD_DIM}, not {head_dim}; use 'dense'"
    if length % 2:
        return f"rows of {length} tokens do not fit cudnn attention; use an even number, or 'dense'"
    return None


def _cudnn(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_segments: jax.Array,
    kv_segments: jax.Array,
    *,
    implementation: str = "cudnn",
) -> jax.Array:
    """cuDNN's flash attention on one device.

    Its own causal mask lets it skip half of the blocks. Segments need a [B, 1, T, T] bias: its layout for packed rows
    is not in jax.nn and needs Hopper. Padding sees padding, so no row of the scores is empty.
    """
    same = q_segments[:, None, :, None] == kv_segments[:, None, None, :]
    return jax.nn.dot_product_attention(q, k, v, mask=same, is_causal=True, implementation=implementation)
