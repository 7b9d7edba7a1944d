"""Choosing the next token. Randomness is a pure function of the request's key and the position in its reply, never of
the batch around it.

A token is drawn by inverting the cumulative distribution in two steps: first one of LANES interleaved parts of the
vocabulary by its mass, then a token of that part; each step takes one uniform number. This is exact, needs two random
numbers a token where the Gumbel-max rule needs one for each word of the vocabulary (on a CPU 32 rows of 32,000 words:
2 ms against 40 ms), and no sort. The filters find their probability threshold by bisection, also without a sort.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

LANES = 128
_LOWEST = -1e30


def request_key(seed: int, *path: int) -> np.ndarray:
    """The key of one request, e.g. request_key(seed, iteration, episode, turn) -> uint64 [2]."""
    # With the length: the hash pads with zeros, so (1, 2) and (1, 2, 0) would be the same.
    return np.random.SeedSequence((seed, len(path), *path)).generate_state(2, np.uint64)


def uniforms(key: np.ndarray, count: int) -> np.ndarray:
    """The random numbers of a request's first `count` tokens, float32 [count, 2] in [0, 1): the Philox stream of `key`.

    Made on the host: two numbers a token are next to nothing to send, and the program needs no generator.
    """
    return np.random.Generator(np.random.Philox(key=key)).random((count, 2), np.float32)


def sample(logits: jax.Array, draws: jax.Array, temperature: jax.Array, filters: tuple[jax.Array, ...]):
    """One token a row.

    logits [B, V]; draws [B, 2] in [0, 1); temperature [B], 0 = greedy; filters: (top_k int, top_p, min_p), each [B],
        applied in this order after the temperature; 0, 1.0 and 0.0 turn them off
    Returns (tokens [B] int32, their log-probs at temperature 1 without filters [B] float32, their log-probs in the
    distribution that was sampled [B] float32). Greedy has no distribution of its own: both are the former.
    """
    logits = logits.astype(jnp.float32)
    greedy = temperature == 0
    scaled = logits * (1.0 / jnp.where(greedy, 1.0, temperature))[:, None]
    peak = jnp.max(scaled, axis=-1, keepdims=True)
    filtered = _filtered(*filters) & ~greedy
    threshold = _threshold(scaled, peak, *filters, filtered)

    def masses(values: jax.Array, extra: int) -> jax.Array:
        """Unnormalized probabilities, 0 for what the filters drop; extra: axes of `values` beside the rows."""
        shape = (-1,) + (1,) * extra
        return jnp.where(values >= threshold.reshape(shape), jnp.exp(values - peak.reshape(shape)), 0.0)

    lanes = _lanes(scaled)
    by_lane = masses(lanes, 2).sum(axis=1)
    lane, total = _invert(by_lane, draws[:, 0])
    column = jnp.take_along_axis(lanes, lane[:, None, None], axis=2)[:, :, 0]
    place, _ = _invert(masses(column, 1), draws[:, 1])
    drawn = place * lanes.shape[2] + lane
    best = jax.lax.cond(
        greedy.any(), lambda: jnp.argmax(logits, axis=-1).astype(jnp.int32), lambda: jnp.zeros(drawn.shape, jnp.int32)
    )
    tokens = jnp.where(greedy, best, drawn).astype(jnp.int32)
    sampled = _at(scaled, tokens) - peak[:, 0] - jnp.log(total)
    changed = filtered | ~(greedy | (temperature == 1))
    plain = jax.lax.cond(
        changed.any(), lambda: _at(logits, tokens) - jax.nn.logsumexp(logits, axis=-1), lambda: sampled
    )
    return tokens, jnp.where(changed, plain, sampled), sampled


def sample_without(banned: int, logits: jax.Array, draws: jax.Array, temperature: jax.Array, filters):
    """As `sample`, but never the token `banned`, which is one more filter: log-probs at temperature 1 count it."""
    tokens, _, sampled = sample(logits.at[:, banned].set(_LOWEST), draws, temperature, filters)
    plain = _at(logits, tokens) - jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)
    return tokens, plain, jnp.where(temperature == 0, plain, sampled)


def _at(values: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values, index[:, None], axis=-1)[:, 0]


def _filtered(top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    return (top_k > 0) | (top_p < 1) | (min_p > 0)


def _lanes(scaled: jax.Array) -> jax.Array:
    """[B, V] -> [B, ceil(V / LANES), LANES]: part j holds the words j, j + LANES, ... Sums over axis 1 run along
    vectors."""
    width = -scaled.shape[1] % LANES
    if width:
        scaled = jnp.pad(scaled, ((0, 0), (0, width)), constant_values=_LOWEST)
    return scaled.reshape(scaled.shape[0], -1, LANES)


def _invert(mass: jax.Array, draw: jax.Array) -> tuple[jax.Array, jax.Array]:
    """mass [B, N] not negative, draw [B] in [0, 1) -> (index [B] with probability mass / total, total [B]).

    An index without mass is never returned, whatever the sums round to.
    """
    size = mass.shape[1]
    before = jnp.triu(jnp.ones((size, size), jnp.float32))
    cumulative = jnp.matmul(mass, before, precision=jax.lax.Precision.HIGHEST)
    total = cumulative[:, -1]
    possible = mass > 0
    beyond = possible & (cumulative > (draw * total)[:, None])
    last = size - 1 - jnp.argmax(possible[:, ::-1], axis=1)
    return jnp.where(beyond.any(axis=1), jnp.argmax(beyond, axis=1), last).astype(jnp.int32), total


def _threshold(scaled, peak, top_k, top_p, min_p, on) -> jax.Array:
    """The lowest logit that the filters keep, [B]; -inf where `on` is false. Work is done only if a row is on."""

    def find() -> jax.Array:
        words = scaled.shape[1]
        ones = jnp.ones_like(scaled)
        kth = _highest(scaled, ones, jnp.where(top_k > 0, jnp.minimum(top_k, words), words).astype(jnp.float32))
        mass = jnp.where(scaled >= kth[:, None], jnp.exp(scaled - peak), 0.0)
        nucleus = jnp.where(top_p < 1, _highest(scaled, mass, top_p * mass.sum(axis=1)), -jnp.inf)
        relative = jnp.where(min_p > 0, peak[:, 0] + jnp.log(min_p), -jnp.inf)
        return jnp.where(on, jnp.maximum(kth, jnp.maximum(nucleus, relative)), -jnp.inf)

    return jax.lax.cond(on.any(), find, lambda: jnp.full(top_p.shape, -jnp.inf, jnp.float32))


def _highest(values: jax.Array, weight: jax.Array, target: jax.Array) -> jax.Array:
    """The highest of `values` [B, V] at or above which the weights add up to `target` [B] or more.

    Bisection on the bits of a float, so the result is one of the values, and equal values stay together.
    """

    def halve(_, bounds):
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)
        enough = jnp.where(values >= _from_order(middle)[:, None], weight, 0.0).sum(axis=1) >= target
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    low = jnp.full(target.shape, _to_order(jnp.float32(-jnp.inf)))
    high = jnp.full(target.shape, _to_order(jnp.float32(jnp.inf)))
    return _from_order(jax.lax.fori_loop(0, 32, halve, (low, high))[0])


def _to_order(value: jax.Array) -> jax.Array:
    """Floats as integers of the same order."""
    bits = jax.lax.bitcast_convert_type(value, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _from_order(order: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(order ^ ((order >> 31) & 0x7FFFFFFF), jnp.float32)
