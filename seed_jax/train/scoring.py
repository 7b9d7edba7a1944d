"""Log-probs of given replies under given weights, outside the update: validation loss, skill table, trajectories."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from seed_jax.models.logprobs import scored_logprobs
from seed_jax.models.spec import ModelSpec
from seed_jax.train.packing import Sample, Shape, first_fit, pack_rows


@functools.partial(jax.jit, static_argnames=("spec", "options"))
def _row_logprobs(params, rows, spec: ModelSpec, options: tuple[tuple[str, Any], ...]):
    places = rows.tokens, rows.segments, rows.positions, rows.targets
    return scored_logprobs(params, spec, *places, images=rows.images, **dict(options))[0]


def score(
    params,
    spec: ModelSpec,
    samples: Sequence[Sample],
    shape: Shape,
    rows_per_call: int = 32,
    split: jax.sharding.Sharding | None = None,
    **options: Any,
) -> list[np.ndarray]:
    """Log-prob of every response token of every sample, in order: a list of arrays [n] (nats).

    split: how rows are split over devices (`rows_per_call` must be divisible); None = not at all
    options: dtype, attention and mesh of the model's functions; see `score_tokens`
    """
    chosen = tuple(sorted(options.items()))
    members = first_fit(samples, shape)
    result: list[np.ndarray] = [np.zeros(0)] * len(samples)
    for start in range(0, len(members), rows_per_call):
        chunk = members[start : start + rows_per_call]
        padded = [[samples[i] for i in row] for row in chunk] + [[]] * (rows_per_call - len(chunk))
        rows = pack_rows(padded, shape)[0]
        rows = rows if split is None else jax.device_put(rows, split)
        logprobs = np.asarray(_row_logprobs(params, rows, spec, chosen))
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
