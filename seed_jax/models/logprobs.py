"""What the model says about given tokens, without ever holding [tokens, V]: log-probabilities of the tokens, entropies,
the most likely alternatives, and log-probabilities of given candidates, all from one pass over the vocabulary.

Only the positions that are scored reach the output projection, a chunk at a time; the backward pass recomputes each
chunk's logits. Reductions over the vocabulary are float32. On a mesh, a large vocabulary is split over all devices.

Glossary: B rows, T row tokens, N scored tokens of a row, D model, V vocab, C candidates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from seed_jax.models import transformer
from seed_jax.models.spec import ModelSpec

# An output projection of this many weights (32 MB in bfloat16) or more is split over all devices of a mesh, and the
# hidden states of a chunk visit all of them; a smaller one visits the hidden states.
SPLIT_VOCAB_FROM = 2**24
# The order in which two mesh axes split the vocabulary: "tensor" first, as in the layouts.
_VOCAB_AXES = ("tensor", "fsdp")
_MASKED = -1e30  # the logit of a row that only pads the vocabulary to a multiple of the devices


class Scores(NamedTuple):
    """What `score_tokens` found, float32 in nats; 0, with zero gradient, where nothing is scored. None: not asked for.

    logp: [B, N] log-probability of each scored token
    entropy: [B, N] of the distribution that predicts it
    topk_logp, topk_ids: [B, N, k] the k most likely tokens there, most likely first
    candidate_logp: [B, N, C] log-probability there of each given candidate
    """

    logp: jax.Array
    entropy: jax.Array | None = None
    topk_logp: jax.Array | None = None
    topk_ids: jax.Array | None = None
    candidate_logp: jax.Array | None = None


def score_tokens(
    params: dict[str, Any],
    spec: ModelSpec,
    tokens: jax.Array,
    segment_ids: jax.Array,
    positions: jax.Array,
    targets: jax.Array,
    *,
    candidates: jax.Array | None = None,
    top_k: int = 0,
    with_entropy: bool = False,
    chunk: int = 1024,
    remat: str = "none",
    dtype: Any = None,
    attention: str = "dense",
    mesh: Mesh | None = None,
    images: jax.Array | None = None,
    split_vocab: bool | None = None,
) -> Scores:
    """Scores the tokens at row indices `targets`, each given the tokens before it in its segment.

    tokens [B, T], segment_ids, positions, remat, dtype, attention, mesh, images: as in `transformer.hidden_states`
    targets: [B, N] indices in 0..T-1 of the tokens to score; 0 means nothing. The first token of a segment and padding
        have no prediction and count as nothing too.
    candidates: [B, N, C] ids below V to score at each target, such as a teacher's `topk_ids`
    top_k: how many of the most likely tokens to return
    chunk: tokens (over all rows) whose logits exist at the same time
    split_vocab: split the output projection over the devices of the mesh; default: from SPLIT_VOCAB_FROM weights on
    """
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1 token")
    if not 0 <= top_k <= spec.vocab_size:
        raise ValueError(f"top_k={top_k} must be 0 to vocab_size={spec.vocab_size}")
    hidden = transformer.hidden_states(
        params, spec, tokens, segment_ids, positions, dtype=dtype, remat=remat, attention=attention, mesh=mesh,
        images=images,
    )  # fmt: skip
    sources = jnp.maximum(targets - 1, 0)
    target_segments = jnp.take_along_axis(segment_ids, targets, axis=1)
    source_segments = jnp.take_along_axis(segment_ids, sources, axis=1)
    scored = (targets > 0) & (target_segments != 0) & (target_segments == source_segments)
    labels = jnp.take_along_axis(tokens, targets, axis=1)
    predictors = jnp.take_along_axis(hidden, sources[:, :, None], axis=1)
    table = transformer.output_table(params, spec)
    if split_vocab is None:
        split_vocab = table.size >= SPLIT_VOCAB_FROM
    score = functools.partial(_score_logits, top_k=top_k, with_entropy=with_entropy)
    if split_vocab and mesh is not None and mesh.size > 1:
        scores = _split_head(score, table, predictors, labels, candidates, chunk, mesh)
    else:
        scores = _head(score, table, predictors, labels, candidates, chunk)
    zero = lambda x: jnp.where(scored[..., None] if x.ndim == 3 else scored, x, 0)  # noqa: E731
    return jax.tree.map(zero, scores)


def scored_logprobs(
    params: dict[str, Any],
    spec: ModelSpec,
    tokens: jax.Array,
    segment_ids: jax.Array,
    positions: jax.Array,
    targets: jax.Array,
    *,
    with_entropy: bool = False,
    **options: Any,
) -> tuple[jax.Array, jax.Array | None]:
    """(logp [B, N], entropy [B, N] or None) of the tokens at `targets`; arguments as in `score_tokens`."""
    scores = score_tokens(params, spec, tokens, segment_ids, positions, targets, with_entropy=with_entropy, **options)
    return scores.logp, scores.entropy


def token_logprobs(
    params: dict[str, Any],
    spec: ModelSpec,
    tokens: jax.Array,
    segment_ids: jax.Array,
    positions: jax.Array,
    **options: Any,
) -> jax.Array:
    """[B, T] float32: position t holds log p(token t | its segment before t), 0 where there is none.

    Options as in `score_tokens`.
    """
    targets = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return score_tokens(params, spec, tokens, segment_ids, positions, targets, **options).logp


class _Slice(NamedTuple):
    """The part of the vocabulary that one device holds: ids `start`..; ids from `stop` on are padding."""

    start: jax.Array
    stop: int
    devices: int


def _score_logits(
    logits: jax.Array,
    labels: jax.Array,
    candidates: jax.Array | None,
    part: _Slice | None = None,
    *,
    top_k: int,
    with_entropy: bool,
) -> Scores:
    """logits [B, n, V] (or a slice of V), labels [B, n], candidates [B, n, C] -> scores, equal on all devices."""
    if part is not None:
        ids = part.start + jnp.arange(logits.shape[-1])
        logits = jnp.where(ids < part.stop, logits, _MASKED)
    log_total = _log_total(logits, part)
    scores = Scores(_pick(logits, labels[..., None], part)[..., 0] - log_total)
    if with_entropy:
        probs = jnp.exp(logits - log_total[..., None])
        scores = scores._replace(entropy=log_total - _sum(jnp.sum(probs * logits, axis=-1), part))
    if top_k:
        best, ids = _top_k(logits, top_k, part)
        scores = scores._replace(topk_logp=best - log_total[..., None], topk_ids=ids)
    if candidates is not None:
        scores = scores._replace(candidate_logp=_pick(logits, candidates, part) - log_total[..., None])
    return scores


def _sum(x: jax.Array, part: _Slice | None) -> jax.Array:
    """Sum over the devices that share the vocabulary."""
    return x if part is None else jax.lax.psum(x, _VOCAB_AXES)


def _log_total(logits: jax.Array, part: _Slice | None) -> jax.Array:
    """Logarithm of the sum of exponentials over the whole vocabulary: [..., V] -> [...]."""
    total = jax.nn.logsumexp(logits, axis=-1)
    if part is None:
        return total
    top = jax.lax.pmax(jax.lax.stop_gradient(total), _VOCAB_AXES)
    return top + jnp.log(_sum(jnp.exp(total - top), part))


def _pick(logits: jax.Array, ids: jax.Array, part: _Slice | None) -> jax.Array:
    """Logits of ids [..., c], each held by one device."""
    if part is None:
        return jnp.take_along_axis(logits, ids, axis=-1)
    place = ids - part.start
    if ids.shape[-1] == 1:
        # A comparison joins the pass over the logits; a gather would be a program of its own, and slow on a TPU.
        return _sum(jnp.sum(jnp.where(jnp.arange(logits.shape[-1]) == place, logits, 0), axis=-1, keepdims=True), part)
    found = jnp.take_along_axis(logits, jnp.clip(place, 0, logits.shape[-1] - 1), axis=-1)
    return _sum(jnp.where((place >= 0) & (place < logits.shape[-1]), found, 0), part)


def _top_k(logits: jax.Array, k: int, part: _Slice | None) -> tuple[jax.Array, jax.Array]:
    """(logits, ids) [..., k] of the k largest; of equal ones the smallest id first."""
    best, ids = jax.lax.top_k(logits, min(k, logits.shape[-1]))
    if part is None:
        return best, ids
    # Every device puts its best into its own slot, so that the sum holds those of all.
    slot = (jnp.arange(part.devices) == jax.lax.axis_index(_VOCAB_AXES))[:, None]
    flat = (*best.shape[:-1], -1)
    best = _sum(jnp.where(slot, best[..., None, :], 0), part).reshape(flat)
    ids = _sum(jnp.where(slot, (ids + part.start)[..., None, :], 0), part).reshape(flat)
    best, place = jax.lax.top_k(best, k)
    return best, jnp.take_along_axis(ids, place, axis=-1)


def _head(
    score: Callable[..., Scores],
    table: jax.Array,
    hidden: jax.Array,
    labels: jax.Array,
    candidates: jax.Array | None,
    chunk: int,
) -> Scores:
    """Output projection and scores: table [V, D], hidden [B, N, D], labels [B, N], candidates [B, N, C] or None.

    Chunks cut the N axis and keep all rows, so rows that are sharded over devices stay where they are.
    """

    @jax.checkpoint
    def one_chunk(hidden: jax.Array, labels: jax.Array, candidates: jax.Array | None) -> Scores:
        return score(transformer.project_vocab(table, hidden), labels, candidates)

    return _by_chunks(one_chunk, (hidden, labels, candidates), chunk // hidden.shape[0])


def _split_head(
    score: Callable[..., Scores],
    table: jax.Array,
    hidden: jax.Array,
    labels: jax.Array,
    candidates: jax.Array | None,
    chunk: int,
    mesh: Mesh,
) -> Scores:
    """As `_head`, each device holding 1 / devices of the vocabulary; the rows of a chunk are gathered on all of them.

    For 152k x 2048 weights over 16 devices this replaces a table of 0.6 GB, and a gradient of the same size, on each
    device by hidden states of a few MB.
    """
    batch, vocab = hidden.shape[0], table.shape[0]
    rows, width = ("fsdp" if size % mesh.shape["fsdp"] == 0 else None for size in (batch, table.shape[1]))
    table = jnp.pad(table.astype(hidden.dtype), ((0, -vocab % mesh.size), (0, 0)))

    def on_device(table: jax.Array, *inputs: jax.Array | None) -> Scores:
        if width is not None:  # from 1 / fsdp of the width of V / tensor entries to all of the width of fewer entries
            table = jax.lax.all_to_all(table, width, split_axis=0, concat_axis=1, tiled=True)
        part = _Slice(jax.lax.axis_index(_VOCAB_AXES) * table.shape[0], vocab, mesh.size)

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def one_chunk(*inputs: jax.Array | None) -> Scores:
            if rows is not None:
                inputs = jax.tree.map(lambda x: jax.lax.all_gather(x, rows, tiled=True), inputs)
            hidden, labels, candidates = inputs
            scores = score(transformer.project_vocab(table, hidden), labels, candidates, part)
            return scores if rows is None else jax.tree.map(_own_rows, scores)

        def _own_rows(x: jax.Array) -> jax.Array:
            count = batch // mesh.shape[rows]
            return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(rows) * count, count)

        return _by_chunks(one_chunk, inputs, chunk // batch)

    per_row = PartitionSpec(rows)
    table_spec = PartitionSpec(_VOCAB_AXES) if width is None else PartitionSpec("tensor", width)
    return jax.shard_map(on_device, mesh=mesh, in_specs=(table_spec, *(per_row,) * 3), out_specs=per_row)(
        table, hidden, labels, candidates
    )


def _by_chunks(function: Callable[..., Scores], inputs: tuple[jax.Array | None, ...], width: int) -> Scores:
    """`function` over pieces of at most `width` (and at least 1) along axis 1 of `inputs` [B, N, ...], one by one."""
    batch, count = inputs[0].shape[:2]
    steps = max(1, -(-count // max(1, width)))
    width = max(1, -(-count // steps))
    padding = steps * width - count

    def cut(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(padded.reshape(batch, steps, width, *x.shape[2:]), 1, 0)

    def join(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(batch, steps * width, *x.shape[3:])[:, :count]

    _, results = jax.lax.scan(lambda carry, xs: (carry, function(*xs)), None, jax.tree.map(cut, inputs))
    return jax.tree.map(join, results)
