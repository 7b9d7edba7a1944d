"""Log-probs of given replies under given weights, outside the update: validation loss, skill table, trajectories."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from seed_jax.models.logprobs import scored_logprobs
from seed_jax.models.spec import ModelSpec
from seed_jax.runtime import multihost
from seed_jax.train.packing import Sample, Shape, first_fit, pack_rows


@functools.partial(jax.jit, static_argnames=("spec", "split", "options"))
def _row_logprobs(params, rows, spec: ModelSpec, split, options: tuple[tuple[str, Any], ...]):
    places = rows.tokens, rows.segments, rows.positions, rows.targets
    found = scored_logprobs(params, spec, *places, images=rows.images, **dict(options))[0]
    return found if split is None else jax.lax.with_sharding_constraint(found, split)


def score(
    params,
    spec: ModelSpec,
    samples: Sequence[Sample],
    shape: Shape,
    rows_per_call: int = 32,
    split: jax.sharding.NamedSharding | None = None,
    **options: Any,
) -> list[np.ndarray]:
    """Log-prob of every response token of every sample, in order: a list of arrays [n] (nats).

    split: how rows are split over devices (`rows_per_call` must be divisible); None = not at all. Over the devices of
        many hosts all come here together, each with samples of its own or none, and an equal share of `rows_per_call`
    options: dtype, attention and mesh of the model's functions; see `score_tokens`
    """
    chosen = tuple(sorted(options.items()))
    members = first_fit(samples, shape)
    result: list[np.ndarray] = [np.zeros(0)] * len(samples)
    mine = rows_per_call if split is None else rows_per_call // jax.process_count()
    calls = -(-len(members) // mine)
    if split is not None:
        (calls,) = multihost.agree_max([calls])
    for start in range(0, calls * mine, mine):
        chunk = members[start : start + mine]
        padded = [[samples[i] for i in row] for row in chunk] + [[]] * (mine - len(chunk))
        rows = pack_rows(padded, shape)[0]
        if split is not None:
            rows = jax.device_put(multihost.join_rows(rows, split.mesh, rows_per_call, 1), split)
        logprobs = multihost.own_rows(_row_logprobs(params, rows, spec, split, chosen))
        for row, indices in enumerate(chunk):
            place = 0
            for i in indices:
                n = len(samples[i].response)
                result[i] = logprobs[row, place : place + n]
                place += n
    return result


def validation_loss(params, spec: ModelSpec, samples: Sequence[Sample], shape: Shape) -> float:
    """Mean negative log-likelihood of the response tokens, nats a token."""
    scores = score(params, spec, samples, shape)
    return -float(sum(s.sum() for s in scores)) / max(1, sum(len(s) for s in scores))
