from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seed_jax.models import logprobs, transformer
from seed_jax.models.spec import ModelSpec, init_params

token_logprobs = jax.jit(logprobs.token_logprobs, static_argnums=1, static_argnames=("chunk", "remat"))
scored_logprobs = jax.jit(
    logprobs.scored_logprobs, static_argnums=1, static_argnames=("chunk", "remat", "with_entropy")
)


@functools.partial(jax.jit, static_argnums=1)
def full_logits(params, spec, tokens, segments, positions):
    return transformer.unembed(params, spec, transformer.hidden_states(params, spec, tokens, segments, positions))


def reference(params, spec, tokens, segments, positions):
    """log p and entropy of every predictable token from the full [B, T, V] logits, float64; NaN elsewhere."""
    logits = np.asarray(full_logits(params, spec, tokens, segments, positions), np.float64)
    logits -= logits.max(-1, keepdims=True)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    scores, entropies = np.full(tokens.shape, np.nan), np.full(tokens.shape, np.nan)
    for b, t in np.ndindex(*tokens.shape):
        if t > 0 and segments[b, t] != 0 and segments[b, t] == segments[b, t - 1]:
            scores[b, t] = logp[b, t - 1, tokens[b, t]]
            entropies[b, t] = -(np.exp(logp[b, t - 1]) * logp[b, t - 1]).sum()
    return scores, entropies


ROWS = [[7, 9, 1], [19, 2], []]


@pytest.mark.parametrize("chunk", [1, 10, 31, 1024])
def test_token_logprobs_match_full_logits(spec, params, make_rows, chunk):
    rows = make_rows(spec, ROWS, 23)
    expected, _ = reference(params, spec, *rows)
    got = np.asarray(token_logprobs(params, spec, *rows, chunk=chunk))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, np.nan_to_num(expected), atol=1e-5)
    assert (got[np.isnan(expected)] == 0).all()


@pytest.mark.parametrize("chunk", [4, 1024])
def test_scored_logprobs_gather(spec, params, make_rows, chunk):
    rows = make_rows(spec, ROWS, 23)
    expected, entropies = reference(params, spec, *rows)
    targets = np.array([[3, 6, 7, 8, 0], [18, 1, 0, 20, 22], [0, 1, 2, 0, 5]], np.int32)
    logp, entropy = scored_logprobs(params, spec, *rows, targets, chunk=chunk, with_entropy=True)
    index = (np.arange(3)[:, None], targets)
    np.testing.assert_allclose(logp, np.nan_to_num(expected[index]), atol=1e-5)
    np.testing.assert_allclose(entropy, np.nan_to_num(entropies[index]), atol=1e-5)
    # Index 7 starts the second segment of row 0; index 22 of row 1 and all of row 2 are padding.
    assert logp[0, 2] == 0 and logp[1, 4] == 0 and (np.asarray(logp[2]) == 0).all()
    assert scored_logprobs(params, spec, *rows, targets, chunk=chunk)[1] is None


@pytest.mark.parametrize("spec", ["qwen2"], indirect=True)
def test_unscored_targets_have_no_gradient(spec, params, make_rows):
    rows = make_rows(spec, ROWS, 23)
    targets = np.array([[0, 7], [0, 22], [4, 0]], np.int32)

    def loss(params):
        logp, entropy = scored_logprobs(params, spec, *rows, targets, with_entropy=True)
        return jnp.sum(3 * logp + entropy)

    for leaf in jax.tree.leaves(jax.jit(jax.grad(loss))(params)):
        np.testing.assert_array_equal(leaf, 0.0)


@pytest.mark.parametrize("spec", ["llama"], indirect=True)
def test_chunks_do_not_change_the_gradient(spec, params, make_rows):
    rows = make_rows(spec, ROWS, 23)

    def loss(params, chunk, remat):
        targets = np.broadcast_to(np.arange(23, dtype=np.int32), (3, 23))
        logp, entropy = scored_logprobs(params, spec, *rows, targets, chunk=chunk, with_entropy=True, remat=remat)
        return jnp.mean(logp) + 0.1 * jnp.mean(entropy)

    gradient = jax.jit(jax.grad(loss), static_argnums=(1, 2))
    expected = gradient(params, 1024, "none")
    for chunk, remat in ((7, "none"), (50, "full")):
        jax.tree.map(
            lambda got, want: np.testing.assert_allclose(got, want, atol=1e-5),
            gradient(params, chunk, remat),
            expected,
        )


def test_no_array_of_tokens_times_vocabulary(make_rows):
    """Nothing in the forward and backward program is as large as [B, T, V]."""
    spec = ModelSpec(vocab_size=3001, d_model=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4, d_ff=8)
    rows = make_rows(spec, [[60], [60]], 60)
    params = init_params(spec, jax.random.key(0))
    program = jax.make_jaxpr(jax.grad(lambda p: jnp.sum(token_logprobs(p, spec, *rows, chunk=16))))(params)

    def sizes(jaxpr):
        for equation in jaxpr.eqns:
            yield from (variable.aval.size for variable in equation.outvars)
            for value in jax.tree.leaves(equation.params, is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")):
                if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                    yield from sizes(getattr(value, "jaxpr", value))

    assert 16 * 3001 <= max(sizes(program.jaxpr)) < 120 * 3001 / 2


def test_bad_chunk(spec, params, make_rows):
    with pytest.raises(ValueError, match="chunk=0"):
        token_logprobs(params, spec, *make_rows(spec, [[4]], 4), chunk=0)


def numpy_mean_logprob(params, spec, tokens):
    """Mean log-probability of one unpacked row [T], written independently in float64 NumPy."""
    layers, count = params["layers"], len(tokens)

    def norm(x, scale):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + spec.rms_eps) * scale

    def rotate(x):
        half = spec.head_dim // 2
        frequency = spec.rope_theta ** (-2.0 * np.arange(half) / spec.head_dim)
        turn = np.exp(1j * np.arange(count)[:, None, None] * frequency)
        turned = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([turned.real, turned.imag], -1)

    x = params["embed"][tokens]
    for i in range(spec.num_layers):
        hidden = norm(x, layers["attn_norm"][i])
        q, k, v = (np.einsum("td,dhk->thk", hidden, layers[n][i]) + layers.get(f"{n}_bias", {i: 0.0})[i] for n in "qkv")
        if spec.qk_norm:
            q, k = norm(q, layers["q_norm"][i]), norm(k, layers["k_norm"][i])
        q, k = rotate(q), rotate(k)
        k, v = (np.repeat(part, spec.num_heads // spec.num_kv_heads, axis=1) for part in (k, v))
        scores = np.exp(np.einsum("thk,shk->hts", q, k) / np.sqrt(spec.head_dim)) * np.tri(count)
        x = x + np.einsum("hts,shk,hkd->td", scores / scores.sum(-1, keepdims=True), v, layers["o"][i])
        hidden = norm(x, layers["mlp_norm"][i])
        gate = hidden @ layers["gate"][i]
        x = x + (gate / (1 + np.exp(-gate)) * (hidden @ layers["up"][i])) @ layers["down"][i]
    logits = norm(x, params["final_norm"]) @ params.get("lm_head", params["embed"]).T
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return logp[np.arange(count - 1), tokens[1:]].mean()


def test_gradient_matches_float64_finite_difference(spec, params, make_rows):
    tokens, segments, positions = make_rows(spec, [[14]], 14)

    def loss(params):
        return jnp.sum(token_logprobs(params, spec, tokens, segments, positions)) / 13

    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    exact = jax.tree.map(lambda leaf: np.array(leaf, np.float64), params)
    assert abs(numpy_mean_logprob(exact, spec, tokens[0]) - value) < 1e-5
    rng, step = np.random.default_rng(5), 1e-5
    for leaf, slopes in zip(jax.tree.leaves(exact), jax.tree.leaves(gradient), strict=True):
        # The coordinate with the largest slope, and a random one.
        for flat in (int(np.argmax(np.abs(slopes))), int(rng.integers(leaf.size))):
            index = np.unravel_index(flat, leaf.shape)
            original = leaf[index]
            leaf[index] = original + step
            above = numpy_mean_logprob(exact, spec, tokens[0])
            leaf[index] = original - step
            below = numpy_mean_logprob(exact, spec, tokens[0])
            leaf[index] = original
            np.testing.assert_allclose(slopes[index], (above - below) / (2 * step), atol=1e-5, rtol=1e-4)
