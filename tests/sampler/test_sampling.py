"""Draws against distributions that NumPy computes with sorts."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from seed_jax.sampler.sampling import request_key, sample, uniforms

ROWS, WORDS = 60_000, 300  # the vocabulary is no multiple of the lanes
GOLDEN = [0.70148033, 0.12253886, 0.83685958, 0.68033880]
LOGITS = (2 * np.random.default_rng(0).standard_normal(WORDS)).astype(np.float32)


def distribution(temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Temperature, then the k likeliest, then of these the fewest with mass top_p, then those above min_p times the
    likeliest; float64."""
    p = np.exp(LOGITS.astype(np.float64) / temperature)
    p /= p.sum()
    if top_k:
        p[np.argsort(-p)[top_k:]] = 0
        p /= p.sum()
    if top_p < 1:
        order = np.argsort(-p)
        kept = np.searchsorted(np.cumsum(p[order]), top_p) + 1
        p[order[kept:]] = 0
    p[p < min_p * p.max()] = 0
    return p / p.sum()


def draw(temperature: float, top_k: int, top_p: float, min_p: float):
    draws = uniforms(request_key(5, 1), ROWS)
    full = lambda value, kind: np.full(ROWS, value, kind)  # noqa: E731
    filters = (full(top_k, np.int32), full(top_p, np.float32), full(min_p, np.float32))
    logits = np.broadcast_to(LOGITS, (ROWS, WORDS))
    return map(np.asarray, jax.jit(sample)(logits, draws, full(temperature, np.float32), filters))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.6, 0, 1.0, 0.0),
        (1.0, 7, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.0, 0, 1.0, 0.05),
        (1.3, 40, 0.9, 0.01),
    ],
    ids=["plain", "temperature", "top_k", "top_p", "min_p", "all"],
)
def test_draws_follow_the_distribution(temperature, top_k, top_p, min_p):
    expected = distribution(temperature, top_k, top_p, min_p)
    tokens, plain, sampled = draw(temperature, top_k, top_p, min_p)
    counts = np.bincount(tokens, minlength=WORDS)
    assert counts[expected == 0].sum() == 0, "a word that the filter drops was drawn"
    # Pearson's statistic over words expected at least five times; its mean is their number, its variance twice that.
    often = expected * ROWS >= 5
    statistic = ((counts - expected * ROWS)[often] ** 2 / (expected * ROWS)[often]).sum()
    assert abs(statistic - often.sum()) < 4 * np.sqrt(2 * often.sum())
    assert counts[~often].sum() == pytest.approx(expected[~often].sum() * ROWS, abs=4 * np.sqrt(ROWS * 1e-2))
    np.testing.assert_allclose(sampled, np.log(expected[tokens]), atol=2e-5)
    np.testing.assert_allclose(plain, np.log(distribution(1.0, 0, 1.0, 0.0)[tokens]), atol=2e-5)


def test_greedy_takes_the_first_of_the_best():
    logits = np.tile(LOGITS, (3, 1))
    logits[1, [40, 200]] = 50.0
    off = (np.zeros(3, np.int32), np.ones(3, np.float32), np.zeros(3, np.float32))
    tokens, plain, sampled = sample(logits, np.full((3, 2), 0.99, np.float32), np.array([0, 0, 1], np.float32), off)
    assert tokens[0] == LOGITS.argmax() and tokens[1] == 40
    assert np.array_equal(plain, sampled)
    expected = LOGITS.astype(np.float64)
    assert plain[0] == pytest.approx(expected.max() - np.log(np.exp(expected).sum()), abs=1e-5)


def test_a_row_does_not_notice_the_settings_of_others():
    """Greedy and filtered rows switch parts of the program on; a plain row gets the same bits."""
    rows, rng = 8, np.random.default_rng(1)
    logits = rng.standard_normal((rows, WORDS)).astype(np.float32)
    draws = rng.random((rows, 2)).astype(np.float32)
    plain = np.ones(rows, np.float32), (np.zeros(rows, np.int32), np.ones(rows, np.float32), np.zeros(rows, np.float32))
    mixed = plain[0].copy(), tuple(part.copy() for part in plain[1])
    mixed[0][0], mixed[1][0][1], mixed[1][1][2], mixed[0][3] = 0.0, 5, 0.5, 0.7
    program = jax.jit(sample)
    for one, other in zip(program(logits, draws, *plain), program(logits, draws, *mixed), strict=True):
        assert np.array_equal(one[4:], other[4:])


@pytest.mark.parametrize("draw", [0.0, 1 - 2**-24])
def test_the_ends_of_the_unit_interval_never_give_an_impossible_word(draw):
    logits = np.full((2, WORDS), -np.inf, np.float32)
    logits[0, [5, 130, 131]], logits[1, 299] = 0.0, 0.0
    off = (np.zeros(2, np.int32), np.ones(2, np.float32), np.zeros(2, np.float32))
    tokens, _, _ = sample(logits, np.full((2, 2), draw, np.float32), np.ones(2, np.float32), off)
    assert tokens[0] in (5, 130, 131) and tokens[1] == 299


def test_uniform_numbers_depend_on_key_and_position_only():
    paths = [(0, 1, 2), (0, 1, 3), (1, 1, 2), (0, 0, 1, 2), (0, 1), (0, 1, 2, 0)]
    many = np.stack([uniforms(request_key(*path), 5000) for path in paths])
    assert many.shape == (6, 5000, 2) and many.min() >= 0 and many.max() < 1
    np.testing.assert_array_equal(uniforms(request_key(0, 1, 2), 7), many[0, :7])
    assert abs(many.mean() - 0.5) < 4 * np.sqrt(1 / 12 / many.size)
    columns = np.concatenate([many[:, :, 0], many[:, :, 1]])
    correlation = np.corrcoef(columns) - np.eye(12)
    assert np.abs(correlation).max() < 5 / np.sqrt(5000)
    assert abs(np.corrcoef(many[0, 1:, 0], many[0, :-1, 0])[0, 1]) < 5 / np.sqrt(5000)


def test_the_stream_is_what_it_was():
    """Golden numbers: another stream would change every seeded run."""
    np.testing.assert_allclose(uniforms(request_key(7, 1, 2, 3), 2).ravel(), GOLDEN, rtol=0, atol=1e-7)
