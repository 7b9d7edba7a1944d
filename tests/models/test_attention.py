from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seed_jax.models import attention as attention_lib
from seed_jax.models.attention import attention, choose_backend, splash_block
from seed_jax.sharding import make_mesh


def naive(q, k, v, q_segments, kv_segments, q_positions):
    """One query at a time in float64; queries that see nothing give NaN."""
    out = np.full(q.shape, np.nan)
    groups = q.shape[2] // k.shape[2]
    for b, t, h in np.ndindex(*q.shape[:3]):
        seen = (kv_segments[b] == q_segments[b, t]) & (kv_segments[b] != 0)
        seen &= np.arange(k.shape[1]) <= q_positions[b, t]
        if seen.any():
            keys, values = k[b, seen, h // groups].astype(float), v[b, seen, h // groups].astype(float)
            logits = keys @ q[b, t, h].astype(float) / np.sqrt(q.shape[-1])
            weights = np.exp(logits - logits.max())
            out[b, t, h] = weights @ values / weights.sum()
    return out


def make(rng, queries, keys, heads=6, kv_heads=3, head_dim=8, batch=2):
    q = rng.normal(size=(batch, queries, heads, head_dim)).astype(np.float32)
    k, v = (rng.normal(size=(batch, keys, kv_heads, head_dim)).astype(np.float32) for _ in range(2))
    return q, k, v


SEGMENTS = np.array([[1, 1, 1, 2, 2, 3, 3, 3, 0], [0, 0, 5, 5, 5, 5, 0, 0, 0]], np.int32)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_packed_rows_match_a_loop(kv_heads):
    q, k, v = make(np.random.default_rng(0), 9, 9, kv_heads=kv_heads)
    positions = np.broadcast_to(np.arange(9), (2, 9))
    expected = naive(q, k, v, SEGMENTS, SEGMENTS, positions)
    real = SEGMENTS != 0
    np.testing.assert_allclose(np.asarray(attention(q, k, v, SEGMENTS, SEGMENTS))[real], expected[real], atol=1e-5)


def test_few_queries_against_a_longer_cache():
    q, k, v = make(np.random.default_rng(1), 2, 9)
    q_segments, positions = np.array([[2, 3], [5, 5]], np.int32), np.array([[4, 6], [3, 8]], np.int32)
    expected = naive(q, k, v, q_segments, SEGMENTS, positions)
    np.testing.assert_allclose(attention(q, k, v, q_segments, SEGMENTS, positions), expected, atol=1e-5)


def test_padding_is_finite_and_gives_no_gradient():
    q, k, v = make(np.random.default_rng(2), 9, 9)
    segments = SEGMENTS.copy()
    segments[1] = 0  # a row of nothing but padding

    def loss(q, k, v):
        out = attention(q, k, v, segments, segments)
        return jnp.sum(jnp.where(jnp.asarray(segments != 0)[:, :, None, None], out, 0.0) ** 2), out

    gradients, out = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)
    assert np.isfinite(out).all()
    for gradient in gradients:
        assert np.isfinite(gradient).all()
        np.testing.assert_array_equal(np.asarray(gradient)[segments == 0], 0.0)


# Rows of 256 tokens: three segments and padding, one segment, only padding, a segment that ends where a block ends.
LONG = np.array(
    [
        np.repeat([*range(1, len(lengths) + 1), 0], [*lengths, 256 - sum(lengths)])
        for lengths in ([100, 27, 96], [256], [], [128, 5])
    ],
    np.int32,
)


@functools.cache
def value_and_gradients(backend, mesh, heads, kv_heads):
    """Output at tokens, and gradients, of a weighted sum of the outputs at tokens."""
    q, k, v = make(np.random.default_rng(4), 256, 256, heads, kv_heads, head_dim=16, batch=4)
    weights = np.random.default_rng(5).normal(size=q.shape).astype(np.float32) * (LONG != 0)[:, :, None, None]

    def loss(q, k, v):
        out = attention(q, k, v, LONG, LONG, backend=backend, mesh=mesh)
        return jnp.sum(out * weights), out

    gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    assert np.isfinite(out).all()
    return np.asarray(out)[LONG != 0], *gradients


@pytest.fixture
def small_blocks(monkeypatch):
    """Two blocks in a row of 256 tokens, so that blocks are skipped, revisited and cut by segments."""
    monkeypatch.setattr(attention_lib, "SPLASH_BLOCK", 128)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_splash_equals_dense(small_blocks, heads, kv_heads):
    """Forward and backward of the TPU kernel, in interpret mode."""
    for got, want in zip(
        value_and_gradients("splash", None, heads, kv_heads), value_and_gradients("dense", None, heads, kv_heads),
        strict=True,
    ):  # fmt: skip
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "fsdp", "tensor"),
    [(4, 2, 4, 2), (8, 2, 2, 4), (6, 3, 4, 2)],
    ids=["heads split", "a kv head for two devices", "heads whole"],
)
def test_splash_on_a_mesh_equals_dense(small_blocks, heads, kv_heads, fsdp, tensor):
    mesh = make_mesh(fsdp=fsdp, tensor=tensor)
    for got, want in zip(
        value_and_gradients("splash", mesh, heads, kv_heads), value_and_gradients("dense", None, heads, kv_heads),
        strict=True,
    ):  # fmt: skip
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_splash_in_bfloat16():
    q, k, v = make(np.random.default_rng(6), 128, 128, heads=4, kv_heads=2, head_dim=64)
    segments = np.ones((2, 128), np.int32)
    exact = np.asarray(attention(q, k, v, segments, segments))
    half = attention(*(x.astype(jnp.bfloat16) for x in (q, k, v)), segments, segments, backend="splash")
    assert half.dtype == jnp.bfloat16
    # Inputs, scaled queries and output are rounded to 8 bits.
    assert 0 < np.abs(np.asarray(half, np.float32) - exact).mean() / np.abs(exact).mean() < 4 * 2.0**-8


@pytest.mark.parametrize(
    ("length", "block"), [(128, 128), (384, 384), (640, 128), (768, 384), (2560, 512), (4096, 512), (8192, 512)]
)
def test_splash_blocks_divide_the_row(length, block):
    assert splash_block(length) == block and length % block == 0


@pytest.mark.parametrize("length", [0, 100, 2500])
def test_rows_that_splash_cannot_take(length):
    with pytest.raises(ValueError, match=rf"rows of {length} tokens.*Use {max(128, -(-length // 128) * 128)} \(pack"):
        choose_backend("tpu", row_tokens=(4096, length))


def test_kernels_refuse_what_they_cannot_compute():
    q, k, v = make(np.random.default_rng(7), 128, 128, heads=2, kv_heads=1, head_dim=8, batch=3)
    ones = np.ones((3, 128), np.int32)
    positions = np.broadcast_to(np.arange(128), (3, 128))
    for backend in ("splash", "cudnn"):
        with pytest.raises(ValueError, match=f"{backend}.*attend to themselves.*'dense'"):
            attention(q, k, v, ones, ones, positions, backend=backend)
        with pytest.raises(ValueError, match="64 queries placed among 128 keys"):
            attention(q[:, :64], k, v, ones[:, :64], ones, backend=backend)
    with pytest.raises(ValueError, match="3 rows cannot be split over mesh axis fsdp=8"):
        attention(q, k, v, ones, ones, backend="splash", mesh=make_mesh(fsdp=8))
    with pytest.raises(ValueError, match="bfloat16 or float16, not float32"):
        attention(q, k, v, ones, ones, backend="cudnn")


def cudnn_arguments(dtype):
    q, k, v = make(np.random.default_rng(8), 256, 256, heads=4, kv_heads=2, head_dim=16, batch=4)
    return *(jnp.asarray(x, dtype) for x in (q, k, v)), LONG, LONG


def test_cudnn_masks_as_dense():
    """What is passed to cuDNN, computed by XLA instead."""
    *arguments, q_segments, kv_segments = cudnn_arguments(np.float32)
    got = attention_lib._cudnn(*arguments, q_segments, kv_segments, implementation="xla")
    assert np.isfinite(got).all()
    real = q_segments != 0
    np.testing.assert_allclose(
        np.asarray(got)[real], np.asarray(attention(*arguments, q_segments, kv_segments))[real], atol=1e-5
    )


def test_cudnn_lowers_for_a_gpu(monkeypatch):
    """Forward and backward become cuDNN's fused kernels; they can be run on a GPU only."""
    fused = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91000)

    def loss(q, k, v):
        return jnp.sum(attention(q, k, v, LONG, LONG, backend="cudnn").astype(jnp.float32))

    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(*cudnn_arguments(jnp.bfloat16)[:3])
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert re.search(r"fmhaScaleBiasSoftmax\b", text) and "fmhaScaleBiasSoftmaxBackward" in text


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU with cuDNN")
def test_cudnn_equals_dense():
    arguments = cudnn_arguments(jnp.bfloat16)
    real = LONG != 0
    got, want = (np.asarray(attention(*arguments, backend=b), np.float32)[real] for b in ("cudnn", "dense"))
    np.testing.assert_allclose(got, want, atol=2e-2)


def test_bad_arguments():
    q, k, v = make(np.random.default_rng(3), 9, 9)
    with pytest.raises(ValueError, match=r"'flash'.*dense"):
        attention(q, k, v, SEGMENTS, SEGMENTS, backend="flash")
    with pytest.raises(ValueError, match="6 query heads are not a multiple of 4"):
        attention(q, np.zeros((2, 9, 4, 8), np.float32), v, SEGMENTS, SEGMENTS)


def test_backend_by_platform():
    half = {"dtype": jnp.bfloat16, "head_dim": 128, "row_tokens": (4096, 8192)}
    assert choose_backend("cpu") == choose_backend("cpu", **half) == "dense"
    assert choose_backend("tpu", **half) == "splash"
    assert choose_backend("gpu", **half) == "cudnn"
    assert choose_backend("rocm", **half) == "dense"
    for change in ({"dtype": jnp.float32}, {"head_dim": 20}, {"head_dim": 256}, {"row_tokens": (4096, 101)}):
        assert choose_backend("gpu", **{**half, **change}) == "dense"
    with pytest.raises(ValueError, match="abacus"):
        choose_backend("abacus")
