"""Tiny models of each family, and batches of packed rows."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from seed_jax.models.spec import ModelSpec, init_params

SPECS = {
    # Grouped queries, QKV bias, tied embeddings, a vocabulary that nothing divides.
    "qwen2": ModelSpec(
        vocab_size=211, d_model=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=48, max_position=128
    ),
    # QK-norm, head_dim that is not d_model / num_heads, untied, a large rope base.
    "qwen3": ModelSpec(
        vocab_size=197, d_model=32, num_layers=2, num_heads=4, num_kv_heads=1, head_dim=16, d_ff=40, rope_theta=1e6,
        tie_embeddings=False, qkv_bias=False, qk_norm=True, model_type="qwen3", max_position=128,
    ),
    # As many kv heads as in SmolLM2 (3), another epsilon.
    "llama": ModelSpec(
        vocab_size=163, d_model=36, num_layers=2, num_heads=9, num_kv_heads=3, head_dim=4, d_ff=50, rms_eps=1e-5,
        tie_embeddings=True, qkv_bias=False, model_type="llama", max_position=128,
    ),
}  # fmt: skip


@pytest.fixture(params=sorted(SPECS))
def spec(request) -> ModelSpec:
    return SPECS[request.param]


@pytest.fixture
def params(spec):
    """Random parameters, with biases and norm scales that are not the trivial 0 and 1."""
    return make_params(spec)


@functools.cache
def make_params(spec: ModelSpec):
    rng = np.random.default_rng(7)
    initial = jax.jit(init_params, static_argnums=0)(spec, jax.random.key(0))
    return jax.tree.map(lambda leaf: leaf + 0.1 * rng.normal(size=leaf.shape).astype(np.float32), initial)


@pytest.fixture
def make_rows():
    """make_rows(spec, lengths) -> tokens, segment_ids, positions [B, T]; lengths: one list of segment lengths a row."""

    def build(spec: ModelSpec, lengths: list[list[int]], width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rng = np.random.default_rng(3)
        tokens = rng.integers(0, spec.vocab_size, (len(lengths), width)).astype(np.int32)
        segments, positions = np.zeros_like(tokens), np.zeros_like(tokens)
        for row, row_lengths in enumerate(lengths):
            start = 0
            for number, length in enumerate(row_lengths, 1):
                segments[row, start : start + length] = number
                positions[row, start : start + length] = np.arange(length)
                start += length
        return tokens, segments, positions

    return build
