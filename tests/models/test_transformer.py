from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seed_jax.models import attention as attention_lib
from seed_jax.models import hf, transformer
from seed_jax.models.attention import attention
from seed_jax.models.logprobs import token_logprobs
from seed_jax.models.rope import RopeScaling
from seed_jax.models.spec import ModelSpec

hidden_states = jax.jit(transformer.hidden_states, static_argnums=1, static_argnames=("dtype", "remat", "return_kv"))


@functools.partial(jax.jit, static_argnums=1)
def logits_of(params, spec, tokens, segments, positions):
    return transformer.unembed(params, spec, transformer.hidden_states(params, spec, tokens, segments, positions))


@pytest.fixture
def torch_model(spec, params, tmp_path):
    """The same weights in `transformers`, float32 on CPU."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    hf.save(params, spec, tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="float32")
    return model.eval()


def test_logits_match_transformers(spec, params, torch_model, make_rows):
    import torch

    tokens, segments, positions = make_rows(spec, [[37], [37]], 37)
    with torch.no_grad():
        expected = torch_model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(logits_of(params, spec, tokens, segments, positions), expected, atol=1e-4, rtol=0)


YARN = RopeScaling("yarn", factor=4.0, original_max_position=16)
LLAMA3 = RopeScaling("llama3", factor=8.0, original_max_position=24)
ODD = {
    "qwen2 tied, linear": ModelSpec(
        vocab_size=131, d_model=60, num_layers=3, num_heads=6, num_kv_heads=3, head_dim=10, d_ff=77, max_position=128,
        rope_scaling=RopeScaling("linear", factor=3.0),
    ),
    "qwen2 untied, yarn": ModelSpec(
        vocab_size=113, d_model=54, num_layers=2, num_heads=9, num_kv_heads=3, head_dim=6, d_ff=51, max_position=128,
        tie_embeddings=False, rope_theta=1e6, rope_scaling=YARN,
    ),
    "qwen3 tied, yarn": ModelSpec(
        vocab_size=127, d_model=44, num_layers=2, num_heads=6, num_kv_heads=3, head_dim=14, d_ff=67, max_position=128,
        model_type="qwen3", qkv_bias=False, qk_norm=True, rope_theta=1e6, rope_scaling=YARN,
    ),
    "qwen3 untied": ModelSpec(
        vocab_size=139, d_model=40, num_layers=7, num_heads=3, num_kv_heads=3, head_dim=22, d_ff=35, max_position=128,
        model_type="qwen3", qkv_bias=False, qk_norm=True, tie_embeddings=False,
    ),
    "llama tied, llama3": ModelSpec(
        vocab_size=149, d_model=48, num_layers=2, num_heads=6, num_kv_heads=3, head_dim=18, d_ff=53, max_position=128,
        model_type="llama", qkv_bias=False, rms_eps=1e-5, rope_theta=5e5, rope_scaling=LLAMA3,
    ),
    "llama untied, linear": ModelSpec(
        vocab_size=151, d_model=42, num_layers=2, num_heads=6, num_kv_heads=3, head_dim=12, d_ff=61, max_position=128,
        model_type="llama", qkv_bias=False, tie_embeddings=False, rope_scaling=RopeScaling("linear", factor=2.0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("spec", ODD.values(), ids=ODD)
def test_odd_sizes_match_transformers(spec, params, torch_model, make_rows):
    """Sizes with nothing in common, 3 kv heads, free head sizes, every rope type: logits, and chunked log-probs."""
    import torch

    tokens, segments, positions = make_rows(spec, [[61], [61]], 61)
    with torch.no_grad():
        expected = torch_model(torch.tensor(tokens, dtype=torch.long)).logits
    np.testing.assert_allclose(
        logits_of(params, spec, tokens, segments, positions), expected.numpy(), atol=1e-4, rtol=0
    )
    logp = torch.log_softmax(expected.double(), -1)[:, :-1]
    chosen = torch.gather(logp, -1, torch.tensor(tokens, dtype=torch.long)[:, 1:, None])[..., 0].numpy()
    got = token_logprobs(params, spec, tokens, segments, positions, chunk=17)
    np.testing.assert_allclose(got[:, 1:], chosen, atol=1e-4, rtol=0)


def test_packed_rows_equal_separate_rows(spec, params, make_rows):
    lengths = [[5, 11, 5], [1, 11], []]
    tokens, segments, positions = make_rows(spec, lengths, 23)
    packed = np.asarray(logits_of(params, spec, tokens, segments, positions))
    assert np.isfinite(packed).all()
    for row, row_lengths in enumerate(lengths):
        start = 0
        for length in row_lengths:
            alone = tokens[row : row + 1, start : start + length]
            ones, index = np.ones_like(alone), np.arange(length, dtype=np.int32)[None]
            expected = logits_of(params, spec, alone, ones, index)[0]
            np.testing.assert_allclose(packed[row, start : start + length], expected, atol=1e-5, rtol=0)
            start += length


def test_padding_never_leaks(spec, params, make_rows):
    tokens, segments, positions = make_rows(spec, [[6, 4]], 15)
    other = np.where(segments == 0, (tokens + 1) % spec.vocab_size, tokens)
    np.testing.assert_array_equal(
        logits_of(params, spec, tokens, segments, positions)[:, :10],
        logits_of(params, spec, other, segments, positions)[:, :10],
    )


@pytest.mark.parametrize("spec", ["qwen3"], indirect=True)
def test_remat_policies_give_the_same_gradient(spec, params, make_rows):
    rows = make_rows(spec, [[9, 8], [12]], 18)

    def loss(params, remat):
        return jnp.mean(transformer.hidden_states(params, spec, *rows, remat=remat) ** 3)

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    expected = gradient(params, "none")
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(expected["layers"]))
    for remat in ("dots", "full"):
        jax.tree.map(
            lambda got, want: np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5),
            gradient(params, remat),
            expected,
        )


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize("spec", ["qwen2"], indirect=True)
def test_splash_model_equals_dense_model(spec, params, make_rows, remat, monkeypatch):
    """Hidden states and gradient of a whole model with the TPU's attention (in interpret mode)."""
    monkeypatch.setattr(attention_lib, "SPLASH_BLOCK", 128)
    rows = make_rows(spec, [[90, 120, 20], [256]], 256)

    @functools.partial(jax.jit, static_argnums=1)
    def run(params, attention):
        def loss(params):
            hidden = transformer.hidden_states(params, spec, *rows, attention=attention, remat=remat)
            hidden = jnp.where((rows[1] != 0)[..., None], hidden, 0.0)
            return jnp.sum(hidden**3) / 256, hidden

        return jax.grad(loss, has_aux=True)(params)

    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, atol=2e-4, rtol=1e-4),
        run(params, "splash"),
        run(params, "dense"),
    )


def test_keys_and_values_of_prefill_continue_the_row(spec, params, make_rows):
    """A decode step over the returned cache, built from `block`, equals the full forward pass."""
    tokens, segments, positions = make_rows(spec, [[12], [12]], 12)
    full = hidden_states(params, spec, tokens, segments, positions)
    _, (keys, values) = hidden_states(params, spec, tokens[:, :-1], segments[:, :-1], positions[:, :-1], return_kv=True)
    assert keys.shape == values.shape == (spec.num_layers, 2, 11, spec.num_kv_heads, spec.head_dim)

    @jax.jit
    def decode_last(params):
        x = transformer.embed(params, spec, tokens[:, -1:])
        rope = transformer.rope_table(spec, jnp.asarray(positions[:, -1:]))
        for index in range(spec.num_layers):

            def attend(q, k, v, index=index):
                k, v = (jnp.concatenate([past[index], new], axis=1) for past, new in ((keys, k), (values, v)))
                return attention(q, k, v, segments[:, -1:], segments, positions[:, -1:])

            layer = jax.tree.map(lambda leaf, index=index: leaf[index], params["layers"])
            x = transformer.block(layer, spec, x, rope, attend)
        return transformer.final_norm(params, spec, x)

    np.testing.assert_allclose(decode_last(params)[:, 0], full[:, -1], atol=1e-5)


def test_compute_dtype(spec, params, make_rows):
    rows = make_rows(spec, [[20]], 20)
    exact = hidden_states(params, spec, *rows)
    from_float32 = hidden_states(params, spec, *rows, dtype=jnp.bfloat16)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    from_bfloat16 = hidden_states(half, spec, *rows)
    assert exact.dtype == jnp.float32 and from_float32.dtype == from_bfloat16.dtype == jnp.bfloat16
    assert transformer.unembed(half, spec, from_bfloat16).dtype == jnp.float32
    # Hidden states after the final norm have unit scale; eight roundings of bfloat16, which keeps 8 bits.
    for rounded in (from_float32, from_bfloat16):
        error = np.asarray(rounded, np.float32) - exact
        assert 0 < np.sqrt(np.mean(error**2)) < 8 * 2.0**-8


def test_bad_arguments(spec, params, make_rows):
    rows = make_rows(spec, [[4]], 4)
    with pytest.raises(ValueError, match=r"remat='some'.*none, dots, full"):
        transformer.hidden_states(params, spec, *rows, remat="some")
    with pytest.raises(ValueError, match=r"backend 'flash'"):
        transformer.hidden_states(params, spec, *rows, attention="flash")
