"""Jitted generation with a key-value cache: prefill a padded batch of prompts, then decode until every reply has ended.

Shapes: B requests, P padded prompt, R reply budget, K kv heads, L layers, V vocabulary. Prompts are right-aligned,
    so that all replies
are written to the same cache columns P, P+1, ...
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from seed_jax.models import transformer
from seed_jax.models.spec import ModelSpec
from seed_jax.sampler.sampling import sample


@functools.partial(jax.jit, static_argnames=("spec", "max_tokens", "eos_id"))
def generate(params, prompts, lengths, keys, temperature, *, spec: ModelSpec, max_tokens: int, eos_id: int):
    """prompts [B, P] int32 right-aligned; lengths [B]; keys uint32 [B, 2]; temperature [B].

    Returns (tokens [B, R], log-probs [B, R] float32, reply lengths [B]); a reply includes its end token if it was
    reached.
    """
    batch, prompt_len = prompts.shape
    total = prompt_len + max_tokens
    columns = jnp.arange(prompt_len)
    valid = columns[None, :] >= prompt_len - lengths[:, None]
    positions = jnp.maximum(columns[None, :] - (prompt_len - lengths[:, None]), 0)
    hidden, (keys_cache, values_cache) = transformer.hidden_states(
        params, spec, prompts, valid.astype(jnp.int32), positions, return_kv=True
    )
    # One array a layer: an update of a stacked cache inside the loop would copy all of it at every step.
    room = ((0, 0), (0, max_tokens), (0, 0), (0, 0))
    cache = [(jnp.pad(keys_cache[layer], room), jnp.pad(values_cache[layer], room)) for layer in range(spec.num_layers)]
    layers = [jax.tree.map(lambda w, i=layer: w[i], params["layers"]) for layer in range(spec.num_layers)]

    def body(carry):
        step, logits, done, tokens, logprobs, cache = carry
        token, logprob = sample(logits, keys, step, temperature)
        token = jnp.where(done, 0, token)
        tokens = tokens.at[:, step].set(token)
        logprobs = logprobs.at[:, step].set(jnp.where(done, 0.0, logprob))
        count = step + 1
        done = done | (token == eos_id)
        column = prompt_len + step
        seen = (jnp.arange(total)[None, :] <= column) & (jnp.arange(total)[None, :] >= (prompt_len - lengths)[:, None])
        logits, cache = _step(params, layers, spec, token, lengths + step, cache, column, seen)
        return count, logits, done, tokens, logprobs, cache

    start = (
        jnp.zeros((), jnp.int32),
        transformer.unembed(params, spec, hidden[:, -1]),
        lengths == 0,
        jnp.zeros((batch, max_tokens), jnp.int32),
        jnp.zeros((batch, max_tokens), jnp.float32),
        cache,
    )
    _, _, _, tokens, logprobs, _ = jax.lax.while_loop(lambda c: (c[0] < max_tokens) & ~jnp.all(c[2]), body, start)
    ended = tokens == eos_id
    reply = jnp.where(ended.any(1), jnp.argmax(ended, 1) + 1, max_tokens)
    return tokens, logprobs, jnp.where(lengths == 0, 0, reply)


def _step(params, layers, spec: ModelSpec, token, position, cache, column, seen):
    """One token through the model. token, position [B]; column: cache column to write; seen [B, P+R] -> (logits [B,
    V], cache)."""
    rope = transformer.rope_table(spec, position[:, None])
    x = transformer.embed(params, spec, token[:, None])
    updated = []
    for layer, (past_k, past_v) in zip(layers, cache, strict=True):
        store = {}

        def attend(q, k, v, past_k=past_k, past_v=past_v, store=store):
            store["k"] = jax.lax.dynamic_update_slice(past_k, k.astype(past_k.dtype), (0, column, 0, 0))
            store["v"] = jax.lax.dynamic_update_slice(past_v, v.astype(past_v.dtype), (0, column, 0, 0))
            return _attend_cache(q, store["k"], store["v"], seen)

        x = transformer.block(layer, spec, x, rope, attend)
        updated.append((store["k"], store["v"]))
    return transformer.unembed(params, spec, transformer.final_norm(params, spec, x)[:, 0]), updated


def _attend_cache(q, k, v, seen):
    """q [B, 1, H, hd], k and v [B, S, K, hd], seen [B, S] -> [B, 1, H, hd]; softmax in float32."""
    batch, _, heads, size = q.shape
    kv_heads = k.shape[2]
    q = q.reshape(batch, kv_heads, heads // kv_heads, size)
    scores = jnp.einsum("bkgd,bskd->bkgs", q, k, preferred_element_type=jnp.float32) * size**-0.5
    weights = jax.nn.softmax(jnp.where(seen[:, None, None, :], scores, -1e30), axis=-1)
    out = jnp.einsum("bkgs,bskd->bkgd", weights.astype(v.dtype), v)
    return out.reshape(batch, 1, heads, size)
