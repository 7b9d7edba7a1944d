"""Policy, KL, entropy and distillation terms against NumPy, hand-computed vectors and the reference's golden values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seed_jax.objectives import policy_loss
from seed_jax.objectives.distill import gap_nll, gate_weights
from seed_jax.objectives.policy_loss import entropy, gspo, kl_k1, kl_k2, kl_k3, ppo_clip, reinforce

CLIP = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}

# Two rows computed with the torch reference.
OLD = np.array([[-1, -0.5, -2], [-0.2, -3, -1.5]], np.float32)
NEW = np.array([[-0.7, -0.55, -1.2], [-0.3, -1.5, -1.4]], np.float32)
TEACHER = np.array([[-0.4, -0.9, -1], [-0.1, -2.5, -1.4]], np.float32)
REF = np.array([[-0.9, -0.5, -1], [-0.25, -2, -1]], np.float32)
MASK = np.array([[1, 1, 0], [1, 1, 1]], np.float32)
ADVANTAGES = np.array([1.0, -2.0], np.float32)


def close(got, want, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def test_golden_policy_loss(golden_cases) -> None:
    for case in golden_cases:
        arguments = (case["old"], case["adv_std_steps"], case["mask"])
        (loss, metrics), grad = jax.value_and_grad(ppo_clip, has_aux=True)(jnp.asarray(case["new"]), *arguments, **CLIP)
        close(loss, case["pg_loss"])
        close(grad, case["pg_grad"])
        close(metrics["clip_fraction"], case["pg_clipfrac"])
        close(metrics["dual_clip_fraction"], case["pg_clipfrac_lower"])
        close(metrics["approx_kl"], case["ppo_kl"])


def test_golden_kl(golden_cases) -> None:
    for case in golden_cases:
        loss, grad = jax.value_and_grad(kl_k3)(jnp.asarray(case["new"]), case["ref"], case["mask"])
        close(loss, case["kl_loss"])
        close(grad, case["kl_grad"])


def test_golden_distillation(golden_cases) -> None:
    for case in golden_cases:
        mask = case["mask"] * case["step_mask"][:, None]
        function = jax.value_and_grad(gap_nll, has_aux=True)
        (loss, metrics), grad = function(jnp.asarray(case["new"]), case["teacher"], mask)
        close(loss, case["opd_loss"])
        close(grad, case["opd_grad"])
        close(metrics["gate_mean"], case["opd_gate_mean"])
        close(metrics["gate_high"], case["opd_gate_active"])
        close(metrics["gap_mean"], case["opd_gap_mean"])


def test_golden_gspo(golden_cases) -> None:
    for case in golden_cases:
        mask = case["mask"]
        lengths = policy_loss.turn_lengths(mask)
        weight = policy_loss.aggregation_weight("seq_mean_token_mean", lengths, 7, mask.sum(), len(mask))
        function = jax.value_and_grad(gspo, has_aux=True)
        (loss, _), grad = function(
            jnp.asarray(case["new"]),
            case["old"],
            case["adv_std_steps"],
            mask,
            clip_low=0.2,
            clip_high=0.2,
            weight=weight,
            token_level=True,
        )
        close(loss, case["gspo_loss"])
        close(grad, case["gspo_grad"])


def test_golden_total(golden_cases) -> None:
    for case in golden_cases:
        arguments = (jnp.asarray(case["new"]), case["old"], case["adv_std_steps"], case["mask"])
        total = ppo_clip(*arguments, **CLIP)[0] + 0.01 * kl_k3(case["new"], case["ref"], case["mask"])
        total += 0.01 * gap_nll(case["new"], case["teacher"], case["mask"] * case["step_mask"][:, None])[0]
        close(total, case["total"])


def test_hand_vector_policy_loss() -> None:
    (loss, metrics), grad = jax.value_and_grad(ppo_clip, has_aux=True)(NEW, OLD, ADVANTAGES, MASK, **CLIP)
    close(loss, 1.5737574)
    close(grad, [[0, -0.1902459, 0], [0.3619350, 0, 0.4420684]])
    close(metrics["clip_fraction"], 0.2)
    close(metrics["dual_clip_fraction"], 0.2)
    close(metrics["approx_kl"], -0.35)
    close(metrics["ratio_max"], np.exp(1.5))


def test_hand_vector_kl() -> None:
    loss, grad = jax.value_and_grad(kl_k3)(NEW, REF, MASK)
    close(loss, 0.0439256)
    close(grad, [[0.0362538, -0.0102542, 0], [-0.0102542, 0.0786939, -0.0983649]])


def test_hand_vector_distillation() -> None:
    (loss, metrics), grad = jax.value_and_grad(gap_nll, has_aux=True)(NEW, TEACHER, MASK)
    close(loss, 0.0665949)
    close(grad, [[-0.1635149, -0.0296094, 0], [-0.1462117, -0.0013386, -0.1]])
    close(metrics["gate_mean"], 0.4406746)
    only_first = MASK * np.array([[1], [0]], np.float32)
    (loss, _), grad = jax.value_and_grad(gap_nll, has_aux=True)(NEW, TEACHER, only_first)
    close(loss, 0.0967279)
    close(grad, [[-0.4087872, -0.0740236, 0], [0, 0, 0]])


def test_token_advantages_and_asymmetric_clip() -> None:
    advantages = np.array([[1, -1, 5], [2, -0.5, 0]], np.float32)
    loss, _ = ppo_clip(NEW, OLD, advantages, MASK, clip_low=0.1, clip_high=0.3, dual_clip=None)
    ratio = np.exp(NEW.astype(np.float64) - OLD)
    per_token = np.maximum(-advantages * ratio, -advantages * np.clip(ratio, 0.9, 1.3))
    close(loss, (per_token * MASK).sum() / 5)


def test_without_dual_clip_the_loss_is_unbounded() -> None:
    loss, metrics = ppo_clip(np.array([[1.5]]), np.array([[0.0]]), np.array([-2.0]), np.ones((1, 1)), dual_clip=None)
    close(loss, 2 * np.exp(1.5))
    assert float(metrics["dual_clip_fraction"]) == 0


# Three turns in two rows: row 0 holds one of two tokens and one of one, row 1 one of three.
TURNS = np.array([[0, 0, 1], [0, 0, 0]])
FULL = np.ones((2, 3), np.float32)
# The same, one turn a row.
UNPACKED = [[(0, 0), (0, 1)], [(0, 2)], [(1, 0), (1, 1), (1, 2)]]


def unpack(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(values, mask) [3, 3] of a packed array [2, 3]."""
    values, mask = np.zeros((2, 3, 3), np.float32)
    for i, places in enumerate(UNPACKED):
        for j, place in enumerate(places):
            values[i, j], mask[i, j] = array[place], 1
    return values, mask


def test_turn_statistics() -> None:
    close(policy_loss.turn_lengths(FULL, TURNS), [[2, 2, 1], [3, 3, 3]])
    close(policy_loss.turn_lengths(MASK, TURNS), [[2, 2, 0], [3, 3, 3]])
    close(policy_loss.turn_sum(NEW, FULL, TURNS)[0], [-1.25, -1.25, -1.2])
    close(policy_loss.turn_mean(NEW, FULL, TURNS)[1], [-3.2 / 3] * 3, 1e-6)
    assert policy_loss.count_turns(policy_loss.turn_lengths(FULL, TURNS), FULL) == 3
    assert policy_loss.count_turns(policy_loss.turn_lengths(MASK, TURNS), MASK) == 2


@pytest.mark.parametrize("mode", policy_loss.AGGREGATIONS)
def test_aggregations(mode: str) -> None:
    values = np.array([[1, 2, 4], [8, 16, 32]], np.float32)
    lengths = policy_loss.turn_lengths(FULL, TURNS)
    weight = policy_loss.aggregation_weight(mode, lengths, 10, 6, 3)
    want = {
        "token_mean": 63 / 6,
        "seq_mean_token_mean": (1.5 + 4 + 56 / 3) / 3,
        "seq_mean_token_sum": (3 + 4 + 56) / 3,
        "seq_mean_token_sum_norm": (3 + 4 + 56) / 30,
    }[mode]
    close(policy_loss.token_mean(values, FULL, 6, weight), want)


def test_unknown_aggregation() -> None:
    with pytest.raises(ValueError, match="aggregation is 'mean'; choose one of token_mean"):
        policy_loss.aggregation_weight("mean", FULL, 1, 1, 1)


def turn_average(mask, turns=None):
    lengths = policy_loss.turn_lengths(mask, turns)
    count = policy_loss.count_turns(lengths, mask)
    return policy_loss.aggregation_weight("seq_mean_token_mean", lengths, 1, mask.sum(), count)


def test_gspo_ratio_is_that_of_the_turn() -> None:
    token_a = np.broadcast_to(np.array([[1.0, 1.0, -2.0]], np.float32), (2, 3)).copy()
    token_a[1] = 0.5
    loss, metrics = gspo(
        NEW, OLD, token_a, FULL, clip_low=0.1, clip_high=0.1, turns=TURNS, weight=turn_average(FULL, TURNS)
    )
    total, ratios = 0.0, []
    for places in UNPACKED:
        ratio = np.exp(np.mean([NEW[p] - OLD[p] for p in places], dtype=np.float64))
        a = token_a[places[0]]
        total += max(-a * ratio, -a * np.clip(ratio, 0.9, 1.1)) / 3
        ratios.append(ratio)
    close(loss, total)
    close(metrics["ratio_max"], max(ratios))


@pytest.mark.parametrize("token_level", [False, True])
def test_gspo_packed_equals_unpacked(token_level: bool) -> None:
    a = np.array([1.0, -2.0, 0.5], np.float32)
    packed_a = np.array([[1, 1, -2], [0.5, 0.5, 0.5]], np.float32)
    new, mask = unpack(NEW)
    function = jax.value_and_grad(gspo, has_aux=True)
    settings = dict(clip_low=0.3, clip_high=0.3, token_level=token_level)
    (want, _), want_grad = function(new, unpack(OLD)[0], a, mask, **settings, weight=turn_average(mask))
    weight = turn_average(FULL, TURNS)
    (got, _), grad = function(NEW, OLD, packed_a, FULL, **settings, weight=weight, turns=TURNS)
    close(got, want)
    close(unpack(np.asarray(grad))[0], want_grad)


def test_gspo_token_gradient_is_the_sequence_gradient_for_a_constant_advantage() -> None:
    function = jax.value_and_grad(gspo, has_aux=True)
    a = np.array([[1, 1, -2], [0.5, 0.5, 0.5]], np.float32)
    settings = dict(clip_low=0.3, clip_high=0.3, turns=TURNS, weight=turn_average(FULL, TURNS))
    (sequence, _), sequence_grad = function(NEW, OLD, a, FULL, **settings)
    (token, _), token_grad = function(NEW, OLD, a, FULL, **settings, token_level=True)
    close(token, sequence)
    close(token_grad, sequence_grad)
    assert np.abs(sequence_grad).max() > 0.01


def test_reinforce() -> None:
    (loss, metrics), grad = jax.value_and_grad(reinforce, has_aux=True)(NEW, OLD, ADVANTAGES, MASK)
    close(loss, -(ADVANTAGES[:, None] * NEW * MASK).sum() / 5)
    close(grad, -ADVANTAGES[:, None] * MASK / 5)
    close(metrics["approx_kl"], -0.35)


def test_importance_weight_is_capped_and_constant() -> None:
    got = policy_loss.importance_weight(NEW, OLD, MASK, 2.0)
    close(got, np.minimum(np.exp((NEW - OLD) * MASK), 2.0))
    total = lambda new: policy_loss.importance_weight(new, OLD, MASK, 2.0).sum()  # noqa: E731
    np.testing.assert_array_equal(jax.grad(total)(NEW), 0.0)
    weighted, _ = ppo_clip(NEW, NEW, ADVANTAGES, MASK, **CLIP, weight=got)
    close(weighted, (-ADVANTAGES[:, None] * np.asarray(got) * MASK).sum() / 5)


def test_kl_estimates() -> None:
    difference = (NEW - REF) * MASK
    loss, grad = jax.value_and_grad(kl_k1)(NEW, REF, MASK)
    close(loss, difference.sum() / 5)
    close(grad, MASK / 5)
    loss, grad = jax.value_and_grad(kl_k2)(NEW, REF, MASK)
    close(loss, (0.5 * difference**2).sum() / 5)
    close(grad, difference / 5)


def test_kl_is_clamped_per_token() -> None:
    logp, reference = np.array([[-5.0, -1.0]], np.float32), np.array([[-1.0, -1.0]], np.float32)
    loss, grad = jax.value_and_grad(kl_k3)(logp, reference, np.ones((1, 2)))
    assert np.exp(4) - 5 > 10
    close(loss, 10 / 2)
    np.testing.assert_array_equal(grad, 0.0)


def test_entropy_is_the_masked_mean() -> None:
    loss, grad = jax.value_and_grad(entropy)(jnp.array([[1.0, 2.0, jnp.nan]]), jnp.array([[1, 1, 0]]))
    close(loss, 1.5)
    close(grad, [[0.5, 0.5, 0]])


def test_gates() -> None:
    gap = jnp.array([[0.0, 0.5, -0.5]])
    close(gate_weights(gap, "none"), [[1, 1, 1]])
    close(gate_weights(gap, "const", const=0.25), [[0.25] * 3])
    close(gate_weights(gap, "sig_gap"), [[0.5, 0.924142, 0.075858]])
    # Steepness 0 is the constant gate .5 of the published "GRPO + OPSD" runs.
    close(gate_weights(gap, "sig_gap", beta=0.0), gate_weights(gap, "const"))


def test_a_constant_gate_ignores_the_teacher_in_the_gradient() -> None:
    gradient = jax.grad(lambda logp, teacher: gap_nll(logp, teacher, MASK, gate="const")[0])
    np.testing.assert_array_equal(gradient(NEW, TEACHER), gradient(NEW, TEACHER - 3))
    close(gradient(NEW, TEACHER), -0.5 * MASK / 5)


def test_gate_statistics() -> None:
    _, metrics = gap_nll(NEW, TEACHER, MASK)
    gap = (TEACHER - NEW)[MASK == 1].astype(np.float64)
    gate = 1 / (1 + np.exp(-5 * gap))
    close(metrics["gate_std"], gate.std())
    close(metrics["gate_square"], (gate**2).mean())
    close(metrics["gate_high"], (gate > 0.5).mean())


@pytest.mark.parametrize("which", ["old", "teacher", "advantages"])
def test_constants_have_no_gradient(which: str) -> None:
    def total(old, teacher, advantages):
        return ppo_clip(NEW, old, advantages, MASK, **CLIP)[0] + gap_nll(NEW, teacher, MASK)[0] + kl_k3(NEW, old, MASK)

    position = ("old", "teacher", "advantages").index(which)
    np.testing.assert_array_equal(jax.grad(total, argnums=position)(OLD, TEACHER, ADVANTAGES), 0.0)


def test_numbers_may_be_traced_without_recompiling() -> None:
    @jax.jit
    def loss(low, high, dual, beta):
        policy, _ = ppo_clip(NEW, OLD, ADVANTAGES, MASK, clip_low=low, clip_high=high, dual_clip=dual)
        return policy + gap_nll(NEW, TEACHER, MASK, beta=beta)[0]

    for numbers in ((0.2, 0.2, 3.0, 5.0), (0.1, 0.3, 2.0, 1.0)):
        low, high, dual, beta = numbers
        want = ppo_clip(NEW, OLD, ADVANTAGES, MASK, clip_low=low, clip_high=high, dual_clip=dual)[0]
        close(loss(*numbers), want + gap_nll(NEW, TEACHER, MASK, beta=beta)[0], 1e-6)
    assert loss._cache_size() == 1


def test_metrics_of_micro_batches_add_up() -> None:
    total = MASK.sum()
    for function, other in ((ppo_clip, OLD), (gap_nll, TEACHER)):
        extra = [ADVANTAGES] if function is ppo_clip else []
        _, want = function(NEW, other, *extra, MASK)
        parts = [function(*[a[i : i + 1] for a in (NEW, other, *extra, MASK)], denominator=total)[1] for i in (0, 1)]
        for name in want.keys() - {"ratio_max", "gate_std"}:
            close(parts[0][name] + parts[1][name], want[name], 1e-6)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: ppo_clip(NEW, OLD[:1], ADVANTAGES, MASK, **CLIP), "old_logp"),
        (lambda: ppo_clip(NEW[0], OLD[0], ADVANTAGES, MASK[0], **CLIP), "logp"),
        (lambda: ppo_clip(NEW, OLD, np.ones(3), MASK, **CLIP), "advantages"),
        (lambda: ppo_clip(NEW, OLD, np.ones((2, 1)), MASK, **CLIP), "advantages"),
        (lambda: kl_k3(NEW, REF[:, :2], MASK), "ref_logp"),
        (lambda: entropy(NEW[:, :2], MASK), "token_entropy"),
        (lambda: gap_nll(NEW, TEACHER[:1], MASK), "teacher_logp"),
        (lambda: gap_nll(NEW, TEACHER, MASK, gate="soft"), "gate is 'soft'; choose one of none, const, sig_gap"),
        (lambda: gap_nll(NEW, TEACHER, MASK, gate="outcome"), "'outcome' needs advantages"),
        (lambda: gspo(NEW, OLD[:1], ADVANTAGES, MASK), "old_logp"),
        (lambda: reinforce(NEW, OLD, np.ones(3), MASK), "advantages"),
        (lambda: kl_k2(NEW, REF[:, :2], MASK), "ref_logp"),
    ],
)
def test_bad_arguments(function, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function()
