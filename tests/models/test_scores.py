"""Entropy, top-k and candidate log-probs of `score_tokens`, whole and with the vocabulary split over devices."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seed_jax import sharding
from seed_jax.models import logprobs, transformer
from seed_jax.models.logprobs import score_tokens
from seed_jax.models.spec import ModelSpec, init_params

ROWS = [[7, 9, 1], [19, 2], [], [5, 5, 5, 5]]
TARGETS = np.array([[3, 6, 7, 8, 0], [18, 1, 0, 20, 22], [0, 1, 2, 0, 5], [1, 4, 6, 19, 5]], np.int32)
TOP_K = 4


@functools.partial(jax.jit, static_argnums=1, static_argnames=("chunk", "top_k", "mesh", "split_vocab"))
def scores_and_gradient(params, spec, tokens, segments, positions, candidates, **options):
    """Scores, and the gradient of a mean over targets that weighs each of them differently."""

    def loss(params):
        scores = score_tokens(
            params, spec, tokens, segments, positions, TARGETS, candidates=candidates, with_entropy=True, **options
        )
        total = jnp.sum(scores.logp * jnp.arange(5)) + 0.3 * jnp.sum(scores.entropy)
        total += jnp.sum(scores.candidate_logp * jnp.arange(1, 4)) + 0.7 * jnp.sum(scores.topk_logp[..., 1:])
        return total / TARGETS.size, scores

    gradient, scores = jax.grad(loss, has_aux=True)(params)
    return scores, gradient


@pytest.fixture
def candidates(spec):
    """Three ids a target, some of them equal."""
    ids = np.random.default_rng(9).integers(0, spec.vocab_size, (*TARGETS.shape, 3)).astype(np.int32)
    ids[0, 0] = ids[0, 0, 0]
    return ids


def plain(params, spec, rows, candidates):
    """The same from full [B, T, V] log-probabilities, in float64 NumPy."""
    hidden = transformer.hidden_states(params, spec, *rows)
    logits = np.asarray(transformer.unembed(params, spec, hidden), np.float64)
    logp = logits - logits.max(-1, keepdims=True)
    logp -= np.log(np.exp(logp).sum(-1, keepdims=True))
    tokens, segments, _ = rows
    shape = TARGETS.shape
    expected = logprobs.Scores(
        np.zeros(shape),
        np.zeros(shape),
        np.zeros((*shape, TOP_K)),
        np.zeros((*shape, TOP_K), int),
        np.zeros((*shape, 3)),
    )
    for index in np.ndindex(*shape):
        row, target = index[0], TARGETS[index]
        if target > 0 and segments[row, target] != 0 and segments[row, target] == segments[row, target - 1]:
            there = logp[row, target - 1]
            order = np.argsort(-there, kind="stable")[:TOP_K]
            expected.logp[index] = there[tokens[row, target]]
            expected.entropy[index] = -(np.exp(there) * there).sum()
            expected.topk_logp[index], expected.topk_ids[index] = there[order], order
            expected.candidate_logp[index] = there[candidates[index]]
    return expected


def assert_scores(got, want):
    assert got.topk_ids.dtype == jnp.int32
    np.testing.assert_array_equal(got.topk_ids, want.topk_ids)
    for name in ("logp", "entropy", "topk_logp", "candidate_logp"):
        part = getattr(got, name)
        assert part.dtype == jnp.float32
        np.testing.assert_allclose(part, getattr(want, name), atol=1e-5, err_msg=name)


@pytest.mark.parametrize("chunk", [1, 11, 1024])
def test_scores_match_full_logits(spec, params, make_rows, candidates, chunk):
    rows = make_rows(spec, ROWS, 23)
    got, _ = scores_and_gradient(params, spec, *rows, candidates, chunk=chunk, top_k=TOP_K)
    assert_scores(got, plain(params, spec, rows, candidates))


@pytest.mark.parametrize(("fsdp", "tensor"), [(4, 2), (2, 4), (8, 1)], ids=str)
def test_split_vocabulary_changes_nothing(spec, params, make_rows, candidates, fsdp, tensor):
    """No vocabulary here is a multiple of 8; with fsdp 8 the rows are not split at all."""
    rows = make_rows(spec, ROWS, 23)
    expected, expected_gradient = scores_and_gradient(params, spec, *rows, candidates, chunk=11, top_k=TOP_K)
    mesh = sharding.make_mesh(fsdp=fsdp, tensor=tensor)
    placed = sharding.reshard(params, spec, mesh, "train")
    got, gradient = scores_and_gradient(
        placed, spec, *rows, candidates, chunk=11, top_k=TOP_K, mesh=mesh, split_vocab=True
    )
    assert_scores(got, expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5), gradient, expected_gradient)


def test_top_k_of_more_than_one_device_holds(params, spec, make_rows, candidates):
    """Each of eight devices has fewer ids than are asked for."""
    rows, mesh = make_rows(spec, ROWS, 23), sharding.make_mesh(fsdp=4, tensor=2)
    count = spec.vocab_size // 8 + 5
    options = {"chunk": 11, "top_k": count}
    whole, _ = scores_and_gradient(params, spec, *rows, candidates, **options)
    split, _ = scores_and_gradient(params, spec, *rows, candidates, **options, mesh=mesh, split_vocab=True)
    np.testing.assert_allclose(split.topk_logp, whole.topk_logp, atol=1e-5)
    assert (np.diff(whole.topk_logp, axis=-1) <= 0).all() and (np.diff(split.topk_logp, axis=-1) <= 0).all()


def test_only_what_is_asked_for(spec, params, make_rows):
    scores = score_tokens(params, spec, *make_rows(spec, ROWS, 23), TARGETS)
    assert scores.logp.shape == TARGETS.shape and scores[1:] == (None,) * 4
    with pytest.raises(ValueError, match=r"top_k=999 .* vocab_size"):
        score_tokens(params, spec, *make_rows(spec, ROWS, 23), TARGETS, top_k=999)


@pytest.mark.parametrize("spec", ["qwen3"], indirect=True)
def test_teacher_top_k_under_the_student(spec, params, make_rows):
    """Top-k distillation: a student equal to the teacher scores the teacher's candidates as the teacher did."""
    rows = make_rows(spec, ROWS, 23)
    teacher = score_tokens(params, spec, *rows, TARGETS, top_k=TOP_K)
    student = score_tokens(params, spec, *rows, TARGETS, candidates=teacher.topk_ids)
    scored = np.asarray(teacher.logp) != 0
    np.testing.assert_allclose(student.candidate_logp[scored], teacher.topk_logp[scored], atol=1e-5)


def largest(program, dimension: int) -> int:
    """Elements of the largest array with a dimension of this size in a program (on one device, in a shard_map)."""

    def shapes(jaxpr):
        for equation in jaxpr.eqns:
            yield from (variable.aval.shape for variable in equation.outvars)
            for value in jax.tree.leaves(equation.params, is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")):
                if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                    yield from shapes(getattr(value, "jaxpr", value))

    return max(np.prod(shape) for shape in shapes(program.jaxpr) if dimension in shape)


@pytest.mark.parametrize("split", [False, True])
def test_no_array_of_tokens_times_vocabulary(make_rows, split):
    """Logits of sixteen tokens exist at a time, forward and backward; a device with 1/8 of V sees 1/8 of them."""
    spec = ModelSpec(vocab_size=3000, d_model=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4, d_ff=8)
    rows, params = make_rows(spec, [[60]] * 8, 60), init_params(spec, jax.random.key(0))
    targets = np.broadcast_to(np.arange(60, dtype=np.int32), (8, 60))
    mesh = sharding.make_mesh(fsdp=4, tensor=2) if split else None

    def loss(params):
        scores = score_tokens(
            params, spec, *rows, targets, candidates=targets[..., None] * 2, top_k=3, with_entropy=True, chunk=16,
            mesh=mesh, split_vocab=split,
        )  # fmt: skip
        return sum(jnp.sum(x) for x in (scores.logp, scores.entropy, scores.topk_logp, scores.candidate_logp))

    program = jax.make_jaxpr(jax.grad(loss))(params)
    assert largest(program, 3000 // 8 if split else 3000) == 16 * (3000 // 8 if split else 3000)
    assert largest(program, 3000) == (3000 * 8 if split else 16 * 3000)  # split: nothing but the table itself
