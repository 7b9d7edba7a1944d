"""Log-probabilities and entropies of scored tokens, without ever holding [tokens, V].

Only the positions that are scored reach the output projection, a chunk at a time; the backward pass recomputes each
chunk's logits. Reductions over the vocabulary are float32.

Glossary: B rows, T row tokens, N scored tokens of a row, D model, V vocab.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from seed_jax.models import transformer
from seed_jax.models.spec import ModelSpec


def scored_logprobs(
    params: dict[str, Any],
    spec: ModelSpec,
    tokens: jax.Array,
    segment_ids: jax.Array,
    positions: jax.Array,
    targets: jax.Array,
    *,
    chunk: int = 1024,
    with_entropy: bool = False,
    remat: str = "none",
    dtype: Any = None,
    attention: str = "dense",
) -> tuple[jax.Array, jax.Array | None]:
    """Log-probability of the tokens at row indices `targets`, each given the tokens before it in its segment.

    tokens, segment_ids, positions: [B, T], as in `transformer.hidden_states`
    targets: [B, N] indices in 0..T-1 of the tokens to score; 0 means nothing. The first token of a segment and padding
        have no prediction and count as nothing too.
    chunk: tokens (over all rows) whose logits exist at the same time
    with_entropy: also the entropy in nats of the distribution that predicts each target
    returns logp [B, N] float32 and entropy [B, N] float32 or None; both 0, with zero gradient, where nothing is scored
    """
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1 token")
    hidden = transformer.hidden_states(
        params, spec, tokens, segment_ids, positions, dtype=dtype, remat=remat, attention=attention
    )
    sources = jnp.maximum(targets - 1, 0)
    target_segments = jnp.take_along_axis(segment_ids, targets, axis=1)
    source_segments = jnp.take_along_axis(segment_ids, sources, axis=1)
    scored = (targets > 0) & (target_segments != 0) & (target_segments == source_segments)
    labels = jnp.take_along_axis(tokens, targets, axis=1)
    predictors = jnp.take_along_axis(hidden, sources[:, :, None], axis=1)
    logp, entropy = head_logprobs(params, spec, predictors, labels, chunk=chunk, with_entropy=with_entropy)
    logp = jnp.where(scored, logp, 0.0)
    return logp, jnp.where(scored, entropy, 0.0) if with_entropy else None


def token_logprobs(
    params: dict[str, Any],
    spec: ModelSpec,
    tokens: jax.Array,
    segment_ids: jax.Array,
    positions: jax.Array,
    **options: Any,
) -> jax.Array:
    """[B, T] float32: position t holds log p(token t | its segment before t), 0 where there is none.

    Options as in `scored_logprobs`, `with_entropy` excepted.
    """
    targets = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return scored_logprobs(params, spec, tokens, segment_ids, positions, targets, **options)[0]


def head_logprobs(
    params: dict[str, Any],
    spec: ModelSpec,
    hidden: jax.Array,
    labels: jax.Array,
    *,
    chunk: int,
    with_entropy: bool,
) -> tuple[jax.Array, jax.Array]:
    """Output projection and log-softmax: hidden [B, N, D], labels [B, N] -> logp, entropy [B, N] float32.

    Chunks cut the N axis and keep all rows, so rows that are sharded over devices stay where they are. The entropy is
    zeros unless asked for.
    """
    batch, count, _ = hidden.shape
    steps = max(1, -(-count // max(1, chunk // batch)))
    width = max(1, -(-count // steps))
    padding = steps * width - count

    def cut(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(padded.reshape(batch, steps, width, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def score(chunk_hidden: jax.Array, chunk_labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = transformer.unembed(params, spec, chunk_hidden)
        log_total = jax.nn.logsumexp(logits, axis=-1)
        logp = jnp.take_along_axis(logits, chunk_labels[..., None], axis=-1)[..., 0] - log_total
        if not with_entropy:
            return logp, jnp.zeros_like(logp)
        probs = jnp.exp(logits - log_total[..., None])
        return logp, log_total - jnp.sum(probs * logits, axis=-1)

    _, results = jax.lax.scan(lambda carry, xs: (carry, score(*xs)), None, (cut(hidden), cut(labels)))
    logp, entropy = (jnp.moveaxis(part, 0, 1).reshape(batch, steps * width)[:, :count] for part in results)
    return logp, entropy
