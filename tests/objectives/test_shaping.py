"""What the teacher says about tokens, turns, episodes and views, against loops over turns in float64."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seed_jax.objectives import shaping
from seed_jax.objectives.shaping import agreement_value, batch_signal, losing_margin, shape_by_teacher

TOKEN_A = np.array([[1.0, -2.0, 0.0, 1.0]], np.float32)
GAP = np.array([[0.1, 0.1, 3.0, -80.0]], np.float32)
HAS_TEACHER = np.array([[1, 1, 1, 1]])


def test_shapes() -> None:
    shape = lambda kind, **numbers: shape_by_teacher(TOKEN_A, GAP, HAS_TEACHER, kind, **numbers)  # noqa: E731
    np.testing.assert_array_equal(shape("none", weight=0.5), TOKEN_A)
    np.testing.assert_allclose(shape("add_gap", weight=0.5), TOKEN_A + 0.5 * GAP, rtol=1e-6)
    gate = 1 / (1 + np.exp(-5 * GAP.astype(np.float64)))
    np.testing.assert_allclose(shape("add_gate", weight=0.5), TOKEN_A + 0.5 * gate, atol=1e-6)
    factor = np.array([[0.5 + 0.5 * np.exp(0.1), 0.5 + 0.5 * np.exp(-0.1), 1, 0.5 + 0.5 * 0.8]])
    np.testing.assert_allclose(shape("mult_clip", weight=0.5), TOKEN_A * factor, rtol=1e-6)
    weights = np.array([[0.5, 0.0, 0.5, 0.0]], np.float32)
    np.testing.assert_allclose(shape("add_gap", weight=weights), TOKEN_A + weights * GAP, rtol=1e-6)
    with pytest.raises(ValueError, match="shape is 'turn_mult'"):
        shape("turn_mult", weight=1.0)


@pytest.mark.parametrize("kind", ["add_gap", "mult_clip"])
def test_shape_weight_zero_changes_nothing(kind: str) -> None:
    got = shape_by_teacher(TOKEN_A, GAP, HAS_TEACHER, kind, weight=0.0)
    np.testing.assert_array_equal(got, TOKEN_A)


@pytest.mark.parametrize("kind", ["add_gap", "mult_clip", "add_gate"])
def test_tokens_without_a_teacher_keep_their_advantage(kind: str) -> None:
    gap = np.array([[0.1, np.nan, 3.0, np.inf]])
    got = shape_by_teacher(TOKEN_A, gap, np.array([[1, 0, 1, 0]]), kind, weight=0.5)
    np.testing.assert_array_equal(np.asarray(got)[0, [1, 3]], TOKEN_A[0, [1, 3]])
    assert np.isfinite(got).all()


@settings(max_examples=50, deadline=None)
@given(
    advantage=st.sampled_from([0.0, 1e-6, -1e-6, 0.3, -1.0, 5.0]),
    gap=st.floats(-80, 80, width=32),
    weight=st.floats(0, 1, width=32),
    clip=st.floats(0, 0.875, width=32),
)
def test_mult_clip_keeps_the_sign_and_its_range(advantage, gap, weight, clip) -> None:
    arrays = (np.full((1, 1), advantage, np.float32), np.full((1, 1), gap, np.float32), np.ones((1, 1)))
    got = float(shape_by_teacher(*arrays, "mult_clip", weight=weight, clip=clip)[0, 0])
    assert np.sign(got) == np.sign(np.float32(advantage))
    bound = weight * clip + 1e-5
    assert (1 - bound) * abs(advantage) <= abs(got) <= (1 + bound) * abs(advantage) + 1e-30


def test_no_gradient_through_a_shaped_advantage() -> None:
    total = lambda a, gap: shape_by_teacher(a, gap, HAS_TEACHER, "add_gap", weight=0.5).sum()  # noqa: E731
    for position in (0, 1):
        np.testing.assert_array_equal(jax.grad(total, argnums=position)(TOKEN_A, GAP), 0.0)


# -- signals of a whole batch ------------------------------------------------------------------------------------------

# Two groups of two episodes of two turns (three in the last), in an order that mixes them; the turns of each row.
GROUP, EPISODE, STEP = np.array([[0, 0, 1, 0, 0, 1, 1, 1, 1], [0, 1, 2, 0, 1, 3, 2, 3, 3], [1, 0, 1, 0, 1, 0, 0, 2, 1]])
ROWS = [[0, 1, 2], [3, 4], [5, 6, 7], [8]]
TOKENS = 8


def batch(seed: int = 0):
    """(teacher, old, mask, turn [R, N]), (group, episode, step [R, S]), place of the turn or -1 [R, S]. Turn 4 has no
    teacher."""
    rng = np.random.default_rng(seed)
    shape = (len(ROWS), TOKENS)
    teacher, old = (-rng.uniform(0.1, 4, shape).astype(np.float32) for _ in range(2))
    mask, turn = np.zeros(shape, bool), np.zeros(shape, np.int32)
    place = np.full((len(ROWS), 3), -1)
    for r, row in enumerate(ROWS):
        start = 0
        for slot, index in enumerate(row):
            n = int(rng.integers(1, 3))
            turn[r, start : start + n], mask[r, start : start + n] = slot, index != 4
            place[r, slot] = index
            start += n
    teacher[~mask] = np.nan
    of_turn = lambda values: np.where(place >= 0, values[place], 0).astype(np.int32)  # noqa: E731
    return (teacher, old, mask, turn), (of_turn(GROUP), of_turn(EPISODE), of_turn(STEP)), place


def tokens_of(index: int, mask, turn, place) -> tuple[np.ndarray, np.ndarray]:
    r, slot = (int(x[0]) for x in np.nonzero(place == index))
    return np.nonzero(mask & (turn == slot) & (np.arange(len(ROWS)) == r)[:, None])


def turn_gaps(arrays, place) -> dict[int, float]:
    teacher, old, mask, turn = arrays
    found = {i: tokens_of(i, mask, turn, place) for i in range(len(GROUP))}
    gap = teacher.astype(np.float64) - old
    return {i: float(gap[where].mean()) for i, where in found.items() if len(where[0])}


def expected_signal(kind: str, arrays, place, floor: float = 0.1) -> np.ndarray:
    teacher, _, mask, turn = arrays
    gaps, result = turn_gaps(arrays, place), np.zeros(mask.shape)
    centred = {}
    for i in gaps:
        where = tokens_of(i, mask, turn, place)
        centred[i] = teacher[where].astype(np.float64) - teacher[where].astype(np.float64).mean()
    for i in gaps:
        group = [gaps[j] for j in gaps if GROUP[j] == GROUP[i]]
        if kind == "turn":
            value = (gaps[i] - np.mean(group)) / max(np.std(group, ddof=1), floor)
        elif kind == "running":
            value = sum(gaps[j] for j in gaps if EPISODE[j] == EPISODE[i] and STEP[j] <= STEP[i])
        else:
            episode = np.concatenate([centred[j] for j in gaps if EPISODE[j] == EPISODE[i]])
            value = centred[i] / max(np.sqrt((episode**2).mean()), 1e-3)
        result[tokens_of(i, mask, turn, place)] = value
    return result


@pytest.mark.parametrize("kind", ["turn", "running", "teacher"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_signals(kind: str, seed: int) -> None:
    arrays, ids, place = batch(seed)
    want = expected_signal(kind, arrays, place)
    assert np.abs(want).max() > 0.5
    np.testing.assert_allclose(batch_signal(kind, *arrays, *ids), want, atol=1e-5)


def test_the_signal_of_a_token_is_its_gap() -> None:
    arrays, ids, _ = batch()
    teacher, old, mask, _ = arrays
    np.testing.assert_array_equal(batch_signal("token", *arrays, *ids), np.where(mask, teacher - old, 0))
    with pytest.raises(ValueError, match="signal is 'row'; choose one of token, turn, running, teacher"):
        batch_signal("row", *arrays, *ids)


def test_a_small_spread_is_not_believed_and_a_single_turn_says_nothing() -> None:
    arrays, ids, place = batch()
    want = expected_signal("turn", arrays, place, floor=50.0)
    assert np.abs(want).max() < 0.1
    np.testing.assert_allclose(batch_signal("turn", *arrays, *ids, floor=50.0), want, atol=1e-6)
    alone = [np.where(place == 0, values + 7, values).astype(np.int32) for values in ids]
    got = np.asarray(batch_signal("turn", *arrays, *alone))
    np.testing.assert_array_equal(got[tokens_of(0, arrays[2], arrays[3], place)], 0.0)


def test_agreement_is_worth_what_it_wins() -> None:
    arrays, (group, _, _), place = batch()
    _, _, mask, turn = arrays
    winners = {0, 3}
    won = np.isin(EPISODE, list(winners))
    gaps = turn_gaps(arrays, place)
    got = np.asarray(agreement_value(*arrays, group, np.where(place >= 0, won[place], False)))
    values = []
    for number in (0, 1):
        sides = [[won[i] for i in gaps if GROUP[i] == number and (gaps[i] > 0) == agrees] for agrees in (True, False)]
        values.append(np.mean(sides[0]) - np.mean(sides[1]) if all(sides) else 0.0)
    assert any(values), "otherwise this test shows little"
    for i in gaps:
        np.testing.assert_allclose(got[tokens_of(i, mask, turn, place)], values[GROUP[i]], atol=1e-6)


def test_the_better_view_teaches_the_other() -> None:
    """Group 0: episodes with a skill win 1 of 2, those without 0 of 2. Group 1: reversed, by 1. Group 2: one view."""
    group = np.array([[0, 0, 0, 0, 0], [1, 1, 2, 2, 0]])
    episode = np.array([[0, 0, 1, 2, 3], [4, 5, 6, 7, 0]])
    given = np.array([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]], bool)
    won = np.array([[1, 1, 0, 0, 0], [0, 1, 1, 0, 1]], bool)
    real = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]], bool)
    want = np.array([[0, 0, 0, 0.5, 0.5], [1, 0, 0, 0, 0]])
    np.testing.assert_allclose(losing_margin(won, given, group, episode, real), want, atol=1e-6)


def test_no_teacher_no_signal() -> None:
    arrays, ids, place = batch()
    nothing = (arrays[0], arrays[1], np.zeros_like(arrays[2]), arrays[3])
    for kind in shaping.SIGNALS:
        np.testing.assert_array_equal(batch_signal(kind, *nothing, *ids), 0.0)
    np.testing.assert_array_equal(agreement_value(*nothing, ids[0], place >= 0), 0.0)
