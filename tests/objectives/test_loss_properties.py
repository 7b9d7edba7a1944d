"""What holds for every batch: order, padding and splits change nothing, and nothing becomes infinite."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seed_jax.objectives import policy_loss
from seed_jax.objectives.distill import GATES, gap_nll
from seed_jax.objectives.policy_loss import entropy, gspo, kl_k2, kl_k3, ppo_clip
from tests.objectives.test_losses import ADVANTAGES, CLIP, MASK, NEW, OLD, REF, TEACHER, close


def all_terms(logp, old, ref, teacher, advantages, mask, denominator=None):
    """The sum of the four terms of the published method, every one with weight 1."""
    policy, _ = ppo_clip(logp, old, advantages, mask, **CLIP, denominator=denominator)
    distillation, _ = gap_nll(logp, teacher, mask, denominator=denominator)
    kl = kl_k3(logp, ref, mask, denominator=denominator)
    return policy + distillation + kl - 0.1 * entropy(-logp, mask, denominator=denominator)


TERMS = jax.jit(jax.value_and_grad(all_terms))


@pytest.mark.parametrize("gap", [80.0, -80.0, 400.0, -400.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_extreme_gaps_stay_finite(gap: float, advantage: float) -> None:
    shape = (2, 3)
    base, far = np.full(shape, -1.0, np.float32), np.full(shape, -1.0 + gap, np.float32)
    loss, grad = TERMS(far, base, base, base, np.full(2, advantage, np.float32), np.ones(shape))
    assert np.isfinite(loss) and np.isfinite(grad).all()
    for name, value in gap_nll(far, base, np.ones(shape))[1].items():
        assert np.isfinite(value), name


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e30])
def test_garbage_at_masked_positions_reaches_nothing(garbage: float) -> None:
    want_loss, want_grad = TERMS(NEW, OLD, REF, TEACHER, ADVANTAGES, MASK)
    dirty = [np.where(MASK == 1, array, garbage) for array in (NEW, OLD, REF, TEACHER)]
    token_advantages = np.where(MASK == 1, ADVANTAGES[:, None], garbage)
    loss, grad = TERMS(*dirty, token_advantages, MASK)
    close(loss, want_loss, 1e-6)
    close(grad, want_grad, 1e-6)


def test_an_empty_mask_is_exactly_zero() -> None:
    loss, grad = TERMS(NEW, OLD, REF, TEACHER, ADVANTAGES, np.zeros_like(MASK))
    assert float(loss) == 0
    np.testing.assert_array_equal(grad, 0.0)
    for gate in GATES:
        loss, metrics = gap_nll(
            NEW, TEACHER, np.zeros_like(MASK), gate=gate, advantages=ADVANTAGES[:, None], entropy=-NEW
        )
        assert float(loss) == 0 and all(float(value) == 0 for value in metrics.values())


ROWS, TOKENS = 6, 4
gaps = st.sampled_from([0.0, 0.05, -0.05, 0.3, -0.7, 1.5, -1.5, 80.0, -80.0])


@st.composite
def batches(draw):
    """logp, old, ref, teacher, advantages, mask; gaps up to +-80."""
    size = ROWS * TOKENS
    logp = np.array(draw(st.lists(st.floats(-6, -0.015625, width=32), min_size=size, max_size=size)), np.float32)
    others = [logp + np.array(draw(st.lists(gaps, min_size=size, max_size=size)), np.float32) for _ in range(3)]
    mask = np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)), np.float32)
    advantages = np.array(draw(st.lists(st.sampled_from([-2.0, 0.0, 1.0]), min_size=ROWS, max_size=ROWS)), np.float32)
    return *[array.reshape(ROWS, TOKENS) for array in (logp, *others)], advantages, mask.reshape(ROWS, TOKENS)


@settings(max_examples=40, deadline=None)
@given(batch=batches(), order=st.permutations(range(ROWS)))
def test_row_order_changes_nothing(batch, order) -> None:
    loss, grad = TERMS(*batch)
    assert np.isfinite(loss) and np.isfinite(grad).all()
    order = np.array(order)
    moved_loss, moved_grad = TERMS(*[array[order] for array in batch])
    close(moved_loss, loss)
    close(moved_grad, np.asarray(grad)[order])


@settings(max_examples=30, deadline=None)
@given(batch=batches())
def test_padding_changes_nothing(batch) -> None:
    loss, grad = TERMS(*batch)
    padded = [np.pad(array, [(0, 2)] + [(0, 3)] * (array.ndim - 1)) for array in batch]
    padded_loss, padded_grad = TERMS(*padded)
    close(padded_loss, loss)
    close(padded_grad[:ROWS, :TOKENS], grad)
    assert not np.asarray(padded_grad)[ROWS:].any() and not np.asarray(padded_grad)[:, TOKENS:].any()


@settings(max_examples=40, deadline=None)
@given(batch=batches())
def test_micro_batches_with_a_global_denominator_add_up(batch) -> None:
    loss, grad = TERMS(*batch)
    total = np.float32(batch[-1].sum())
    half = ROWS // 2
    parts = [TERMS(*[array[rows] for array in batch], total) for rows in (slice(0, half), slice(half, None))]
    close(sum(part[0] for part in parts), loss)
    close(np.concatenate([part[1] for part in parts]), grad)


MODES = [(policy, mode) for policy in ("ppo_clip", "gspo", "gspo_token") for mode in policy_loss.AGGREGATIONS]


def other_terms(logp, old, ref, teacher, advantages, mask, tokens=None, turns=None, *, policy, mode):
    """Another policy loss, aggregation and KL; gates that look at the whole batch are in test_distill.py."""
    lengths = policy_loss.turn_lengths(mask)
    tokens = mask.sum() if tokens is None else tokens
    turns = policy_loss.count_turns(lengths, mask) if turns is None else turns
    weight = policy_loss.aggregation_weight(mode, lengths, 4, tokens, turns)
    shared = dict(denominator=tokens, weight=weight)
    if policy == "ppo_clip":
        loss, _ = ppo_clip(logp, old, advantages, mask, **CLIP, **shared)
    else:
        loss, _ = gspo(logp, old, advantages, mask, **shared, token_level=policy == "gspo_token")
    loss += kl_k2(logp, ref, mask, **shared) + 0.1 * entropy(logp, mask, **shared)
    return loss + gap_nll(logp, teacher, mask, gate="outcome", advantages=advantages[:, None], denominator=tokens)[0]


OTHER = {
    choice: jax.jit(jax.value_and_grad(lambda *a, p=choice[0], m=choice[1]: other_terms(*a, policy=p, mode=m)))
    for choice in MODES
}


@settings(max_examples=60, deadline=None)
@given(batch=batches(), choice=st.sampled_from(MODES), order=st.permutations(range(ROWS)))
def test_other_objectives_do_not_depend_on_order_padding_and_splits(batch, choice, order) -> None:
    terms, order, mask = OTHER[choice], np.array(order), batch[-1]
    loss, grad = terms(*batch)
    assert np.isfinite(loss) and np.isfinite(grad).all()
    scale = max(1.0, abs(float(loss)), float(np.abs(grad).max()))
    near = lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * scale)  # noqa: E731
    moved_loss, moved_grad = terms(*[array[order] for array in batch])
    near(moved_loss, loss)
    near(moved_grad, np.asarray(grad)[order])
    padded_loss, padded_grad = terms(*[np.pad(array, [(0, 2)] + [(0, 3)] * (array.ndim - 1)) for array in batch])
    near(padded_loss, loss)
    near(padded_grad[:ROWS, :TOKENS], grad)
    totals = np.float32(mask.sum()), np.float32(mask.any(axis=1).sum())
    parts = [terms(*[array[rows] for array in batch], *totals) for rows in (slice(0, 2), slice(2, None))]
    near(sum(part[0] for part in parts), loss)
    near(np.concatenate([part[1] for part in parts]), grad)
