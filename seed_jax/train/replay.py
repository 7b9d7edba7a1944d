"""Where an update breaks: recomputes it on one batch, piece by piece, and names what is not finite.

In the order of the computation: weights, what was packed, advantages, log-probs under fixed weights, then for every
micro-batch the terms of the loss and the gradient of each parameter. What comes later usually follows from what comes
first.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seed_jax.train import objective, update
from seed_jax.train.packing import PackedBatch
from seed_jax.train.state import TrainState

SHOWN = 8  # turns of a kind that a report names


def examine(config, spec, mesh, state: TrainState, batch: PackedBatch, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """{"weights", "batch", "scores", "micro_batches"}: what is not finite; empty lists if everything is.

    weights: parameters and optimizer moments, by name; batch and scores: {array: turns}, a turn as {"row", "turn",
    "group", "episode", "step"}; micro_batches: those with a loss term or a gradient that is not finite.
    Under the weights of `state`, so of later mini-batches it tells what they would do to these.
    """
    static = update.structure(config, spec, mesh)
    numbers = {name: jnp.float32(value) for name, value in numbers.items()}
    inputs, advantages = jax.jit(functools.partial(update.prepare, static))(state, batch, numbers)
    *_, fixed, tokens = inputs
    scores = {name: getattr(fixed, name) for name in ("old", "teacher", "reference")}
    scored = np.asarray(batch.mask | batch.generated)
    return {
        "weights": not_finite({"params": state.params, "opt_state": state.opt_state}),
        "batch": _turns_by_array(batch, {"sampled": batch.sampled}, scored)
        | _turns_by_array(batch, {"reward": batch.reward, "step_return": batch.step_return}, batch.real)
        | _turns_by_array(batch, {"advantage": np.asarray(advantages)}, batch.real),
        "scores": _turns_by_array(
            batch,
            {n: np.asarray(x).reshape(scored.shape) for n, x in scores.items() if x is not None},
            {
                "old": scored,
                "reference": scored,
                "teacher": np.asarray(tokens["distilled"]).reshape(scored.shape),
            },
        ),
        "micro_batches": _micro_batches(static, state.params, inputs, int(batch.minis), numbers),
    }


def not_finite(tree: Any) -> list[str]:
    """Names of the arrays that hold a NaN or an infinity."""
    bad = jax.device_get(_bad(tree))
    return [jax.tree_util.keystr(path) for path, is_bad in jax.tree_util.tree_leaves_with_path(bad) if is_bad]


@jax.jit
def _bad(tree: Any) -> Any:
    return jax.tree.map(lambda x: ~jnp.isfinite(x).all(), tree)


def _micro_batches(static, params, inputs, minis: int, numbers: dict) -> list[dict[str, Any]]:
    loss = jax.value_and_grad(functools.partial(update._micro_loss, static), has_aux=True)

    @jax.jit
    def of_micro(params, mini, micro):
        *_, fixed, tokens = mini
        totals = objective.mini_totals(static.objective, fixed, tokens, numbers)
        (value, terms), grads = loss(params, *jax.tree.map(lambda x: x[micro], mini), totals, numbers)
        return {"loss": value, **terms}, _bad(grads)

    found = []
    for number in range(minis):
        mini = jax.tree.map(lambda x, number=number: x[number], inputs)
        for micro in range(static.micros_per_mini):
            terms, bad = jax.device_get(of_micro(params, mini, micro))
            wrong = [name for name, value in terms.items() if not np.isfinite(value)]
            gradients = [jax.tree_util.keystr(p) for p, is_bad in jax.tree_util.tree_leaves_with_path(bad) if is_bad]
            if wrong or gradients:
                first = (number * static.micros_per_mini + micro) * static.rows_per_micro
                rows = [first, first + static.rows_per_micro - 1]
                found.append({"mini": number, "micro": micro, "rows": rows, "terms": wrong, "gradients": gradients})
    return found


def _turns_by_array(batch: PackedBatch, arrays: Mapping[str, Any], where) -> dict[str, list[dict[str, int]]]:
    """The turns at which an array is not finite although it counts there (`where`: one mask, or one an array)."""
    found = {}
    for name, array in arrays.items():
        counts = where[name] if isinstance(where, Mapping) else where
        bad = ~np.isfinite(np.asarray(array, np.float32)) & np.asarray(counts)
        over_tokens = bad.shape == np.shape(batch.turn) and bad.shape != np.shape(batch.real)
        places = {
            (int(row), int(batch.turn[row, column]) if over_tokens else int(column))
            for row, column in zip(*np.nonzero(bad), strict=True)
        }
        if places:
            found[name] = [_turn(batch, row, turn) for row, turn in sorted(places)]
    return found


def _turn(batch: PackedBatch, row: int, turn: int) -> dict[str, int]:
    ids = {name: int(getattr(batch, name)[row, turn]) for name in ("group", "episode", "step")}
    return {"row": row, "turn": turn, **ids}


def text(report: Mapping[str, Any]) -> str:
    """The report as lines for people."""
    lines = []
    if report["weights"]:
        lines.append("weights that are not finite: " + ", ".join(report["weights"][:SHOWN]))
    for part, title in (("batch", "in the batch"), ("scores", "log-probs")):
        for name, turns in report[part].items():
            shown = "; ".join(", ".join(f"{key} {value}" for key, value in turn.items()) for turn in turns[:SHOWN])
            lines.append(f"{title}: {name} is not finite at {len(turns)} turns: {shown}")
    for micro in report["micro_batches"]:
        terms = ", ".join(micro["terms"]) or "none"
        gradients = ", ".join(micro["gradients"][:SHOWN]) or "none"
        lines.append(
            f"mini-batch {micro['mini']}, micro-batch {micro['micro']} (rows {micro['rows'][0]} to "
            f"{micro['rows'][1]}), not finite: terms {terms}; gradients {gradients}"
        )
    return "\n".join(lines) or "everything is finite"
