"""Supervised fine-tuning on packed rows: behaviour cloning and hindsight-skill SFT share this loop, the model and
the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from seed_jax import sharding
from seed_jax import tokenizer as tok
from seed_jax.images import escape
from seed_jax.models.logprobs import scored_logprobs
from seed_jax.models.spec import ModelSpec
from seed_jax.train.packing import Rows, Sample, Shape, first_fit, pack_rows
from seed_jax.train.state import TrainState, apply_gradients


def encode_pairs(
    tokenizer, pairs: Sequence[tuple[str, str]], images: Sequence[Sequence[np.ndarray]] | None = None
) -> list[Sample]:
    """(prompt, reply) texts -> samples; a reply ends with the end token. images: those of each prompt."""
    prompts = tok.encode_prompts(tokenizer, [prompt for prompt, _ in pairs], images=images)
    images = images or [()] * len(pairs)
    return [
        Sample(ids, tok.encode_response(tokenizer, escape(reply) if seen else reply), images=tuple(seen))
        for ids, (_, reply), seen in zip(prompts, pairs, images, strict=True)
    ]


def build_sft_step(spec: ModelSpec, optimizer, *, dtype: str = "float32", remat: str = "none"):
    """Jitted `(state, rows, weights, lr) -> (state, loss)`; weights [R, N] hold each scored token's share of the
    loss."""

    def loss_fn(params, rows: Rows, weights):
        logp, _ = scored_logprobs(
            params,
            spec,
            rows.tokens,
            rows.segments,
            rows.positions,
            rows.targets,
            remat=remat,
            dtype=jnp.dtype(dtype),
            chunk=4096,
        )
        return -(logp * weights).sum()

    def step(state: TrainState, rows: Rows, weights, lr):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, rows, weights)
        state, _ = apply_gradients(state, grads, optimizer, lr)
        return state, loss

    return jax.jit(step, donate_argnums=0)


def warmup_cosine(step: int, total: int, peak: float, warmup: float = 0.1, floor: float = 0.0) -> float:
    """Learning rate of optimizer step `step` (from 0): linear warm-up over `warmup * total` steps, then half a
    cosine to `floor * peak`."""
    ramp = max(1, int(warmup * total))
    if step < ramp:
        return peak * (step + 1) / ramp
    progress = (step - ramp) / max(1, total - ramp)
    return peak * (floor + (1 - floor) * 0.5 * (1 + np.cos(np.pi * min(1.0, progress))))


def epochs(
    samples: Sequence[Sample], shape: Shape, rows_per_step: int, rng: np.random.Generator
) -> Iterator[list[list[Sample]]]:
    """Endless batches of packed rows (as lists of samples), reshuffled every epoch; a last incomplete batch is
    dropped."""
    while True:
        order = rng.permutation(len(samples))
        shuffled = [samples[i] for i in order]
        rows = first_fit(shuffled, shape)
        if len(rows) < rows_per_step:
            raise ValueError(
                f"{len(samples)} samples fill {len(rows)} rows, fewer than the {rows_per_step} of one step"
            )
        rng.shuffle(rows)
        for start in range(0, len(rows) - rows_per_step + 1, rows_per_step):
            yield [[shuffled[i] for i in row] for row in rows[start : start + rows_per_step]]


def loss_weights(rows: Rows, mask: np.ndarray, prompt_weight: float) -> tuple[Rows, np.ndarray]:
    """(rows, weights): mean loss over response tokens, plus `prompt_weight` times the mean over prompt tokens.

    With a prompt weight every token of a row is scored, so N becomes T.
    """
    response = mask / max(1, mask.sum())
    if not prompt_weight:
        return rows, response.astype(np.float32)
    weights = np.zeros(rows.tokens.shape, np.float32)
    every = np.broadcast_to(np.arange(rows.tokens.shape[1], dtype=np.int32), rows.tokens.shape)
    np.put_along_axis(weights, rows.targets, response.astype(np.float32), axis=1)
    prompt = (rows.segments > 0) & (rows.positions > 0) & (weights == 0)
    weights += prompt_weight * prompt / max(1, prompt.sum())
    return rows.replace(targets=every), weights


def train_sft(
    state: TrainState,
    spec: ModelSpec,
    optimizer,
    mixture: Sequence[tuple[Sequence[Sample], float]],
    shape: Shape,
    *,
    steps: int,
    rows_per_step: int,
    lr: float,
    seed: int,
    prompt_weight: float = 0.0,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> TrainState:
    """`steps` optimizer steps; each draws one data set of the mixture (samples, probability) and takes its next
    batch."""
    rng = np.random.default_rng(seed)
    streams = [
        epochs(samples, shape, rows_per_step, np.random.default_rng((seed, i)))
        for i, (samples, _) in enumerate(mixture)
    ]
    shares = np.array([share for _, share in mixture], float)
    step_fn = build_sft_step(spec, optimizer)
    mesh = sharding.make_mesh()
    state = jax.device_put(state, sharding.replicated(mesh))
    for step in range(steps):
        batch = next(streams[rng.choice(len(streams), p=shares / shares.sum())])
        rows, mask = pack_rows(batch, shape)
        rows, weights = jax.device_put(loss_weights(rows, mask, prompt_weight), sharding.batch_sharding(mesh))
        state, loss = step_fn(state, rows, weights, jnp.float32(warmup_cosine(step, steps, lr)))
        report(step + 1, float(loss))
    return state
