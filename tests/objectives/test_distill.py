"""Estimators against exact expectations over a vocabulary of five tokens, gates against their formulas, schedules."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seed_jax.objectives import distill, policy_loss, schedules

STUDENT = np.array([0.3, -0.2, 1.1, 0.0, -1.3], np.float32)
TEACHER = np.array([-0.5, 0.4, 0.9, 0.2, 0.1], np.float32)
STALE = np.array([0.1, 0.1, 0.6, -0.3, -0.9], np.float32)
ONES = np.ones((1, 5))


def log_softmax(logits) -> jax.Array:
    return jax.nn.log_softmax(jnp.asarray(logits))[None]


def close(got, want, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def expected_gradient(kind: str, student=STUDENT, teacher=TEACHER, sampler=None, gate: str = "none") -> np.ndarray:
    """Gradient with respect to the logits, averaged exactly over tokens drawn from the sampler (the student itself)."""
    old = log_softmax(student if sampler is None else sampler)

    def loss(logits):
        logp = log_softmax(logits)
        values = distill.sampled_divergence(kind, logp, log_softmax(teacher), ONES, old_logp=old)
        weights = distill.gate_weights(log_softmax(teacher) - logp, gate)
        return jnp.sum(jnp.exp(old) * jax.lax.stop_gradient(weights) * values)

    return np.asarray(jax.grad(loss)(student))


def kl_gradient(direction: str, student=STUDENT, teacher=TEACHER) -> np.ndarray:
    def divergence(logits):
        s, t = log_softmax(logits), log_softmax(teacher)
        p, q = (s, t) if direction == "reverse" else (t, s)
        return jnp.sum(jnp.exp(p) * (p - q))

    return np.asarray(jax.grad(divergence)(student))


@pytest.mark.parametrize(
    ("kind", "direction"), [("score", "reverse"), ("k2", "reverse"), ("k3_is", "reverse"), ("k3", "forward")]
)
def test_expected_gradient_is_that_of_the_divergence(kind: str, direction: str) -> None:
    want = kl_gradient(direction)
    assert np.abs(want).max() > 0.05
    close(expected_gradient(kind), want)


def test_k3_is_corrects_for_stale_samples() -> None:
    close(expected_gradient("k3_is", sampler=STALE), kl_gradient("reverse"))
    assert np.abs(expected_gradient("k2", sampler=STALE) - kl_gradient("reverse")).max() > 1e-2


def test_gap_nll_without_a_gate_teaches_nothing() -> None:
    close(expected_gradient("gap_nll"), 0.0, 1e-6)
    close(expected_gradient("gap_nll", gate="const"), 0.0, 1e-6)
    np.testing.assert_array_equal(
        expected_gradient("gap_nll", gate="const"), expected_gradient("gap_nll", gate="const", teacher=-3 * TEACHER)
    )


def test_gap_nll_with_a_gate_moves_towards_the_teacher_and_rests_there() -> None:
    close(expected_gradient("gap_nll", gate="sig_gap", teacher=STUDENT), 0.0, 1e-6)
    gradient = expected_gradient("gap_nll", gate="sig_gap")
    assert float(gradient @ kl_gradient("reverse")) > 0
    other = expected_gradient("gap_nll", gate="sig_gap", teacher=-TEACHER)
    assert np.abs(gradient - other).max() > 1e-2


def test_values() -> None:
    logp, teacher = log_softmax(STUDENT), log_softmax(TEACHER)
    gap = np.asarray(teacher - logp, np.float64)
    value = lambda kind, **extra: distill.sampled_divergence(kind, logp, teacher, ONES, **extra)  # noqa: E731
    close(value("gap_nll"), gap)
    close(value("score"), -gap * np.asarray(logp))
    close(value("score", clip=0.3), -np.clip(gap, -0.3, 0.3) * np.asarray(logp))
    close(value("k2"), gap**2 / 2)
    close(value("k3"), np.exp(gap) - 1 - gap)
    old = log_softmax(STALE)
    close(value("k3_is", old_logp=old), np.exp(logp - old) * (np.exp(gap) - 1 - gap))
    with pytest.raises(ValueError, match="'k3_is' needs old_logp"):
        value("k3_is")
    with pytest.raises(ValueError, match="distillation kind is 'kl'; choose one of gap_nll, score"):
        value("kl")


@pytest.mark.parametrize("kind", distill.SAMPLED)
@pytest.mark.parametrize("gap", [80.0, -80.0])
def test_extreme_gaps_and_masked_garbage(kind: str, gap: float) -> None:
    logp = np.array([[-1.0, -2.0, np.nan]], np.float32)
    teacher = np.array([[-1.0 + gap, -2.0, np.inf]], np.float32)
    mask = np.array([[1, 1, 0]])

    def total(logp, teacher, old):
        return distill.sampled_divergence(kind, logp, teacher, mask, old_logp=old).sum()

    value, gradients = jax.value_and_grad(total, argnums=(0, 1, 2))(logp, teacher, logp + gap)
    assert np.isfinite(value) and np.isfinite(gradients[0]).all()
    assert gradients[0][0, 2] == 0
    np.testing.assert_array_equal(gradients[1], 0.0)
    np.testing.assert_array_equal(gradients[2], 0.0)


# -- divergences over the vocabulary -----------------------------------------------------------------------------------


def vocabulary_loss(kind: str, k: int = 5, support: str = "renorm", **numbers):
    """Divergence of one token as a function of the student's logits, over the teacher's k likeliest tokens."""
    ids = np.argsort(-TEACHER)[:k]

    def loss(logits, teacher=TEACHER):
        student, target = (distill.on_support(log_softmax(x)[:, None, ids], support) for x in (logits, teacher))
        return distill.vocabulary_divergence(kind, student, target, np.ones((1, 1)), **numbers)[0, 0]

    return loss


@pytest.mark.parametrize("scope", ["full", "topk"])
@pytest.mark.parametrize("support", distill.SUPPORTS)
@pytest.mark.parametrize(("end", "direction"), [("rev", "reverse"), ("fwd", "forward")])
def test_divergence_over_all_tokens_is_exact(scope: str, support: str, end: str, direction: str) -> None:
    value, gradient = jax.value_and_grad(vocabulary_loss(f"{scope}_{end}", support=support))(STUDENT)
    s, t = np.asarray(log_softmax(STUDENT), np.float64)[0], np.asarray(log_softmax(TEACHER), np.float64)[0]
    p, q = (s, t) if end == "rev" else (t, s)
    close(value, (np.exp(p) * (p - q)).sum(), 2e-5)
    close(gradient, kl_gradient(direction), 2e-5)


def test_jensen_shannon_divergence() -> None:
    s, t = np.asarray(log_softmax(STUDENT), np.float64)[0], np.asarray(log_softmax(TEACHER), np.float64)[0]
    kl = lambda p, q: (np.exp(p) * (p - q)).sum()  # noqa: E731
    for mix in (0.2, 0.5, 0.9):
        mixture = np.log(mix * np.exp(t) + (1 - mix) * np.exp(s))
        close(vocabulary_loss("full_jsd", mix=mix)(STUDENT), mix * kl(t, mixture) + (1 - mix) * kl(s, mixture))
    for mix, end in ((0.0, "fwd"), (1.0, "rev")):
        got = jax.value_and_grad(vocabulary_loss("full_jsd", mix=mix))(STUDENT)
        want = jax.value_and_grad(vocabulary_loss(f"full_{end}"))(STUDENT)
        close(got[0], want[0])
        close(got[1], want[1])
    close(vocabulary_loss("full_jsd")(TEACHER), 0.0, 1e-6)


def test_support_of_some_tokens() -> None:
    logp = log_softmax(TEACHER)[:, None, np.argsort(-TEACHER)[:2]]
    mass = float(np.exp(logp).sum())
    close(np.exp(distill.on_support(logp, "renorm")).sum(), 1.0)
    tail = np.exp(distill.on_support(logp, "tail"))
    assert tail.shape == (1, 1, 3)
    close(tail[0, 0, 2], 1 - mass)
    with pytest.raises(ValueError, match="support is 'head'; choose one of tail, renorm"):
        distill.on_support(logp, "head")


@pytest.mark.parametrize("kind", distill.VOCABULARY)
@pytest.mark.parametrize("support", distill.SUPPORTS)
def test_student_without_mass_on_the_support(kind: str, support: str) -> None:
    logits = np.array([-60.0, -60.0, 40.0, -60.0, -60.0], np.float32)
    teacher = np.array([3.0, 2.0, -40.0, -1.0, -1.0], np.float32)

    def loss(logits):
        student, target = (distill.on_support(log_softmax(x)[:, None, :2], support) for x in (logits, teacher))
        return distill.vocabulary_divergence(kind, student, target, np.ones((1, 1))).sum()

    value, gradient = jax.value_and_grad(loss)(logits)
    assert np.isfinite(value) and np.isfinite(gradient).all()


def test_one_entry_of_a_divergence_is_clipped() -> None:
    plain, clipped = (vocabulary_loss("full_fwd", clip=clip)(STUDENT) for clip in (np.inf, 0.1))
    s, t = np.asarray(log_softmax(STUDENT), np.float64)[0], np.asarray(log_softmax(TEACHER), np.float64)[0]
    close(clipped, np.minimum(np.exp(t) * (t - s), 0.1).sum())
    assert clipped < plain - 0.05


def test_masked_tokens_of_a_divergence_reach_nothing() -> None:
    student = np.full((1, 2, 3), -1.0, np.float32)
    student[0, 1] = np.nan
    mask = np.array([[1, 0]])
    total = lambda s, t: distill.vocabulary_divergence("topk_jsd", s, t, mask).sum()  # noqa: E731
    value, gradients = jax.value_and_grad(total, argnums=(0, 1))(student, student - 0.5)
    assert np.isfinite(value)
    assert np.isfinite(gradients[0]).all() and not np.asarray(gradients[0])[0, 1].any()
    np.testing.assert_array_equal(gradients[1], 0.0)
    with pytest.raises(ValueError, match="distillation kind is 'topk_kl'"):
        distill.vocabulary_divergence("topk_kl", student, student, mask)


# -- gates -------------------------------------------------------------------------------------------------------------

GAP = np.array([[0.0, 0.5, -0.5, 2.0]], np.float32)


def sigmoid(x) -> np.ndarray:
    return 1 / (1 + np.exp(-np.asarray(x, np.float64)))


def test_gates() -> None:
    close(distill.gate_weights(GAP, "hard"), [[0, 1, 0, 1]])
    close(distill.gate_weights(GAP, "hard", threshold=1.0), [[0, 0, 0, 1]])
    close(distill.gate_weights(GAP, "centered", center=0.4), sigmoid(5 * GAP) - 0.4)
    close(distill.gate_weights(GAP, "standardised", beta=1.0, spread=2.0), sigmoid(GAP / 2))
    entropy = np.array([[0.0, 0.7, 2.0, 1.0]], np.float32)
    close(distill.gate_weights(GAP, "sig_entropy", entropy=entropy), sigmoid(5 * entropy))
    both = sigmoid(5 * (1 - (1 - entropy.astype(np.float64)) * (1 - GAP)))
    close(distill.gate_weights(GAP, "soft_or", entropy=entropy), both)
    for gate in distill.NEED_ENTROPY:
        with pytest.raises(ValueError, match=f"the gate '{gate}' needs the student's entropy"):
            distill.gate_weights(GAP, gate)
    signs = np.array([[1.0, -3.0, -1.0, 0.0]])
    close(distill.gate_weights(GAP, "outcome", advantages=signs), sigmoid(5 * GAP * [[1, -1, -1, 1]]))


def test_gate_statistics() -> None:
    mask = np.array([[1, 1, 1, 0]])
    got = distill.gate_statistics(GAP, mask)
    close(got["center"], sigmoid(5 * GAP[:, :3]).mean())
    close(got["spread"], GAP[:, :3].std())
    empty = distill.gate_statistics(GAP, np.zeros((1, 4)))
    assert float(empty["center"]) == float(empty["spread"]) == 0


def test_a_centered_gate_has_mean_zero_and_no_constant_push() -> None:
    logp = np.full((1, 4), -1.0, np.float32)
    _, metrics = distill.gap_nll(logp, logp + GAP, np.ones((1, 4)), gate="centered")
    close(metrics["gate_mean"], 0.0, 1e-6)
    gradient = jax.grad(lambda x: distill.gap_nll(x, logp + GAP, np.ones((1, 4)), gate="centered")[0])(logp)
    close(gradient.sum(), 0.0, 1e-6)


def test_a_standardised_gate_does_not_depend_on_the_unit_of_the_gap() -> None:
    logp = np.full((1, 4), -1.0, np.float32)
    loss = lambda scale: jax.grad(  # noqa: E731
        lambda x: distill.gap_nll(x, logp + scale * GAP, np.ones((1, 4)), gate="standardised", beta=1.0)[0]
    )(logp)
    close(loss(1.0), loss(7.0))
    assert np.isfinite(loss(0.0)).all(), "a gap that is 0 everywhere has no spread"


def test_saturation_is_measured() -> None:
    logp = np.full((1, 4), -1.0, np.float32)
    _, metrics = distill.gap_nll(logp, logp + 2 * GAP, np.ones((1, 4)))
    close(metrics["gate_saturated"], 0.75)  # gates .5, .993, .007, 1.0


@pytest.mark.parametrize("gate", distill.GATES)
def test_gates_have_no_gradient(gate: str) -> None:
    signs = np.array([[1.0, -3.0, -1.0, 0.0]], np.float32)
    total = lambda gap, a, h: distill.gate_weights(gap, gate, advantages=a, entropy=h).sum()  # noqa: E731
    for position in (0, 1, 2):
        np.testing.assert_array_equal(jax.grad(total, argnums=position)(GAP, signs, GAP), 0.0)


def test_a_gate_is_a_bonus_in_the_advantage_on_fresh_samples() -> None:
    """gap_nll with gate g and coefficient c: the policy gradient with A + c g, while the ratio is 1."""
    rng = np.random.default_rng(0)
    logp = rng.uniform(-3, -0.1, (3, 4)).astype(np.float32)
    teacher = logp + rng.normal(0, 0.5, (3, 4)).astype(np.float32)
    mask, advantage, coef = np.ones((3, 4)), np.array([1.0, -0.5, 0.0], np.float32), 0.3

    def beside(x):
        return policy_loss.ppo_clip(x, logp, advantage, mask)[0] + coef * distill.gap_nll(x, teacher, mask)[0]

    def inside(x):
        bonus = advantage[:, None] + coef * distill.gate_weights(teacher - x, "sig_gap")
        return policy_loss.ppo_clip(x, logp, bonus, mask, dual_clip=None)[0]

    close(jax.grad(beside)(logp), jax.grad(inside)(logp))


# -- schedules ---------------------------------------------------------------------------------------------------------


def test_schedules() -> None:
    course = lambda kind, **extra: [  # noqa: E731
        schedules.strength(kind, u, **{"start": 2, "stop": 6, "end": 0.5, **extra}) for u in (1, 2, 4, 6, 9)
    ]
    assert course("const") == [1, 1, 1, 1, 1]
    assert course("linear") == [1, 1, 0.75, 0.5, 0.5]
    assert course("linear", start=0, stop=8, end=0.0) == [1 - u / 8 for u in (1, 2, 4, 6)] + [0]
    assert course("window") == [0, 1, 1, 1, 0]
    assert course("window", start=2, stop=2) == [0, 1, 0, 0, 0]
    assert course("handoff") == [1, 1, 1, 1, 1]
    assert course("handoff", handoff={"since": 4}) == [1, 1, 1, 0.75, 0.5]
    assert course("margin", margin={"last": 0.1, "best": 0.4}) == [0.25] * 5
    with pytest.raises(ValueError, match="schedule is 'cosine'; choose one of const, linear, window, handoff, margin"):
        course("cosine")


def test_handoff_begins_when_the_gap_has_stopped_shrinking() -> None:
    state: dict = {}
    for update in range(1, 91):
        gap = max(1.0 - 0.05 * update, 0.2)  # shrinks until update 16
        state = schedules.watch_gap(state, gap, update, start=5, patience=4)
    # The average follows with a delay: it still falls by 1 % for a while after update 16, then the patience runs out.
    assert 40 < state["since"] < 70
    assert schedules.watch_gap(state, 0.0, 91, start=5, patience=4) == state, "a handoff is not taken back"


def test_handoff_does_not_begin_too_early() -> None:
    state: dict = {}
    for update in range(1, 31):
        state = schedules.watch_gap(state, 0.5, update, start=25, patience=3)
        assert bool(state["since"]) == (update >= 25)


def test_the_margin_schedule_is_a_share_of_the_largest_margin() -> None:
    """By hand; nothing is known before the first measurement, and a teacher that never was ahead has nothing to give.
    """
    strength = lambda state: schedules.strength("margin", 7, start=0, stop=1, end=0.9, margin=state)  # noqa: E731
    assert strength(None) == strength({}) == 1.0
    state: dict = {}
    course = [(0.2, 1.0), (0.1, 0.5), (0.4, 1.0), (0.3, 0.75), (-0.1, 0.0), (0.0, 0.0), (0.4, 1.0)]
    for margin, expected in course:
        state = schedules.watch_margin(state, margin)
        assert strength(state) == pytest.approx(expected, abs=1e-12)
    assert state == {"last": 0.4, "best": 0.4}
    behind = schedules.watch_margin(schedules.watch_margin({}, -0.3), -0.1)
    assert behind == {"last": -0.1, "best": -0.1} and strength(behind) == 0.0
    assert strength(schedules.watch_margin({}, 0.0)) == 0.0
    assert strength(schedules.watch_margin(behind, 0.05)) == 1.0
