"""Choosing the next token. Randomness is a pure function of the request's key and the position, never of the batch
around it."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def request_key(seed: int, *path: int) -> jax.Array:
    """The key of one request, e.g. request_key(seed, iteration, episode, turn) -> uint32 [2]."""
    key = jax.random.PRNGKey(seed)
    for part in path:
        key = jax.random.fold_in(key, part)
    return key


request_keys = jax.jit(jax.vmap(lambda seed, path: request_key(seed, path[0], path[1], path[2]), in_axes=(None, 0)))


def sample(logits: jax.Array, keys: jax.Array, step: jax.Array, temperature: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One token a row by the Gumbel-max rule (no sort, no truncation).

    logits [B, V]; keys uint32 [B, 2]; step: position in the reply; temperature [B], 0 = greedy.
    Returns (tokens [B] int32, log-probs at temperature 1 [B] float32).
    """
    logits = logits.astype(jnp.float32)
    noise = jax.vmap(lambda key: jax.random.gumbel(jax.random.fold_in(key, step), logits.shape[-1:]))(keys)
    tokens = jnp.argmax(logits + noise * temperature[:, None], axis=-1).astype(jnp.int32)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return tokens, chosen - jax.nn.logsumexp(logits, axis=-1)
