from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seed_jax.models.attention import attention, choose_backend


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


def test_bad_arguments():
    q, k, v = make(np.random.default_rng(3), 9, 9)
    with pytest.raises(ValueError, match=r"'flash'.*dense"):
        attention(q, k, v, SEGMENTS, SEGMENTS, backend="flash")
    with pytest.raises(ValueError, match="6 query heads are not a multiple of 4"):
        attention(q, np.zeros((2, 9, 4, 8), np.float32), v, SEGMENTS, SEGMENTS)


def test_backend_by_platform():
    assert choose_backend("cpu") == "dense"
    with pytest.raises(ValueError, match="abacus"):
        choose_backend("abacus")
