"""Every factor inside the one jitted update: identities between methods, invariance to splits, what is left out."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from seed_jax.config_fields import CHOICES
from seed_jax.objectives import advantages, distill, policy_loss, schedules, shaping
from seed_jax.spans import SPANS
from seed_jax.train import factors, objective
from seed_jax.train.metrics import note_gap
from seed_jax.train.packing import first_fit
from seed_jax.train.update import build_update, hyper
from tests.updating import (
    SHAPE,
    SPEC,
    Trainer,
    assert_bitwise,
    assert_close,
    assert_metrics_close,
    distance,
    leaves,
    make_config,
    make_samples,
    trainer,
    weights,
    written,
)

MEAN = {"adv__normalize": "mean"}
TURNS = {"loss__aggregation": "seq_mean_token_mean"}


def shaped(kind: str, weight: float = 0.5, **more):
    """The config of a method that only shapes the advantage."""
    return {"distill__kind": "none", "distill__gap": "old", "adv__shape": kind, "adv__shape_weight": weight, **more}


def with_credit(samples):
    """The samples with what only some factors need: two histories of three anchors, a return, every second token as the
    span, two views, places in the episode, values of the skills."""
    rng = np.random.default_rng(7)
    return [
        s._replace(
            anchor=tuple(int(i) for i in rng.integers(3, size=2)),
            step_return=0.9 * s.reward,
            span=np.arange(len(s.response)) % 2 == 0,
            given=s.episode % 2 == 1,
            step=i % 2,
            value=0.5 * (s.episode % 4) - 0.5,
        )
        for i, s in enumerate(samples)
    ]


def test_choices_of_the_config_are_those_of_the_objective():
    assert set(CHOICES["adv.kind"]) == set(advantages.KINDS)
    assert set(CHOICES["adv.shape"]) == set(shaping.SHAPES)
    assert set(CHOICES["adv.shape_signal"]) == set(shaping.SIGNALS)
    assert set(CHOICES["adv.shape_value"]) == set(shaping.VALUES)
    assert set(CHOICES["loss.kind"]) == set(policy_loss.POLICIES)
    assert set(CHOICES["loss.aggregation"]) == set(policy_loss.AGGREGATIONS)
    assert set(CHOICES["loss.kl_type"]) == set(policy_loss.KL_TYPES)
    assert set(CHOICES["distill.kind"]) == set(distill.KINDS)
    assert set(CHOICES["distill.gate"]) == set(distill.GATES)
    assert set(CHOICES["distill.gap"]) == set(factors.GAPS)
    assert set(CHOICES["distill.teacher"]) == set(factors.TEACHERS)
    assert set(CHOICES["distill.rows"]) == set(factors.ROWS)
    assert set(CHOICES["distill.span"]) == set(SPANS)
    assert set(CHOICES["distill.denominator"]) == set(factors.DENOMINATORS)
    assert set(CHOICES["distill.schedule"]) == set(schedules.SCHEDULES)
    assert CHOICES["distill.value"] == ("none", "second_attempts") and CHOICES["loss.gen_reward"][0] == "gap"
    assert set(CHOICES["rollout.group_filter"]) == set(factors.GROUP_FILTERS)


# -- one compilation ---------------------------------------------------------------------------------------------------


def test_six_settings_of_coefficient_and_beta_compile_once():
    run, samples, results = Trainer(make_config("seed")), make_samples(16), []
    for coef in (0.001, 0.01, 0.1):
        for beta in (1.0, 5.0):
            config = make_config("seed", distill__beta=beta, distill__coef=coef)
            assert factors.choices(config) == run.choices
            state, _ = run.update(run.fresh_state(), run.pack(samples), hyper(config))
            results.append(np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(jax.device_get(state.params))]))
    assert run.update._cache_size() == 1
    assert len({result.tobytes() for result in results}) == 6


def test_numbers_follow_the_schedule():
    config = make_config("seed", distill__coef=0.5, adv__shape_weight=0.2)
    config.distill.schedule, config.distill.schedule_start, config.distill.schedule_stop = "linear", 0, 4
    course = [hyper(config, update) for update in (1, 2, 4, 5)]
    assert [float(h["distill"]) for h in course] == pytest.approx([0.375, 0.25, 0, 0])
    assert [float(h["shape"]) for h in course] == pytest.approx([0.15, 0.1, 0, 0])
    config.distill.schedule = "handoff"
    assert float(hyper(config, 9)["distill"]) == 0.5
    assert float(hyper(config, 9, {"since": 7})["distill"]) == 0.25
    config.distill.schedule = "margin"
    margins = [None, {"last": 0.1, "best": 0.4}, {"last": -0.1, "best": 0.4}, {"last": 0.0, "best": 0.0}]
    course = [hyper(config, 9, {"since": 7}, margin=margin) for margin in margins]
    assert [float(h["distill"]) for h in course] == pytest.approx([0.5, 0.125, 0, 0])
    assert [float(h["shape"]) for h in course] == pytest.approx([0.2, 0.05, 0, 0])
    config.distill.schedule = "const"
    assert float(hyper(config, 9, margin=margins[1])["distill"]) == 0.5
    config.distill.refresh_every = 3
    assert [float(hyper(config, update)["refresh_teacher"]) for update in (1, 3, 4, 6)] == [0, 1, 0, 1]


def test_the_handoff_is_remembered_between_updates():
    config, memory = make_config("seed"), {}
    note_gap(config, memory, {"opd/token_fraction": 0.5, "opd/gap_size": 0.3}, 1)
    assert memory == {}, "no other schedule needs it"
    config.distill.schedule, config.distill.schedule_patience = "handoff", 2
    note_gap(config, memory, {"opd/token_fraction": 0.0, "opd/gap_size": 0.0}, 1)
    assert memory == {}, "an update without a teacher says nothing"
    for update in range(1, 5):
        note_gap(config, memory, {"opd/token_fraction": 0.5, "opd/gap_size": 0.3}, update)
    assert memory["handoff"]["since"] == 3
    assert float(hyper(config, 53, memory["handoff"])["distill"]) == pytest.approx(0.5 * 0.5)


# -- identities: of two programs, compiled as users compile them; quickly compiled ones differ in the last bit ---------


@pytest.mark.optimized
@pytest.mark.parametrize("kind", ["score", "k2", "k3_is"])
def test_any_distillation_with_coefficient_zero_is_grpo(kind):
    samples = make_samples(16)
    grpo, _ = trainer("grpo")(samples)
    got, metrics = trainer("seed", distill__kind=kind, distill__gate="none")(samples, distill=0.0)
    assert metrics["opd/coverage"] > 0.5
    assert_bitwise(got, grpo)


@pytest.mark.optimized
@pytest.mark.parametrize("kind", ["mult_clip", "add_gap", "add_gate"])
def test_shape_of_weight_zero_changes_nothing(kind):
    samples = make_samples(16)
    got, _ = trainer("seed", **shaped(kind, 0.0))(samples)
    assert_bitwise(got, trainer("grpo")(samples)[0])
    moved, _ = trainer("seed", **shaped(kind, 0.0))(samples, shape=0.5)
    assert max(np.abs(a - b).max() for a, b in zip(leaves(moved), leaves(got), strict=True)) > 1e-4


@pytest.mark.optimized
def test_opid_of_weight_zero_is_drgrpo():
    samples = make_samples(16)
    drgrpo, _ = trainer("grpo", adv__kind="drgrpo", **MEAN)(samples)
    opid, _ = trainer("seed", **shaped("add_gap", 0.0), adv__kind="drgrpo", **MEAN)(samples)
    assert_bitwise(opid, drgrpo)
    mean_only, _ = trainer("grpo", **MEAN)(samples)
    assert_bitwise(drgrpo, mean_only)


@pytest.mark.optimized
def test_gigpo_of_step_weight_zero_is_grpo():
    samples = with_credit(make_samples(16))
    run = trainer("grpo", adv__kind="gigpo")
    without, _ = run(samples, step_weight=0.0)
    assert_bitwise(without, trainer("grpo")(samples)[0])
    with_steps, _ = run(samples)
    assert max(np.abs(a - b).max() for a, b in zip(leaves(with_steps), leaves(without), strict=True)) > 1e-4


def test_gate_beside_the_policy_loss_equals_gate_inside_it():
    """On the first mini-batch, over equal denominators and without clip: SEED is a bonus of coef * gate."""
    samples = make_samples(16)
    beside, _ = trainer("seed", distill__denominator="all")(samples, distill=0.3, rl=1.0)
    inside, _ = trainer("seed", **shaped("add_gate", 0.3, distill__gap="current"))(samples)
    assert_close(beside, inside)
    assert distance(beside) > 1e-3


def test_zero_advantage_leaves_distillation_alone():
    samples = make_samples(16)
    zero, metrics = trainer("seed", adv__kind="zero", loss__entropy_coef=0.0)(samples)
    assert metrics["adv/abs_mean"] == 0 and metrics["update/pg_loss"] == 0
    without_rl, _ = trainer("seed", loss__entropy_coef=0.0)(samples, rl=0.0)
    assert_close(zero, without_rl)
    assert distance(zero) > 1e-3


def test_no_gradient_reaches_teacher_gap_gate_or_shaped_advantage():
    """Whatever comes from the teacher is a constant: its weights get exactly the gradient they have as the policy."""
    config = make_config("seed", distill__kind="score", distill__gate="sig_gap", adv__shape="mult_clip")
    static, rng = factors.choices(config), np.random.default_rng(0)
    shape = (3, 4)
    draw = lambda: -rng.uniform(0.1, 3, shape).astype(np.float32)  # noqa: E731
    fixed = objective.Fixed(draw(), draw())
    mask = np.ones(shape, bool)
    tokens = {"mask": mask, "distilled": mask, "advantage": draw(), "sampled": draw()}
    totals = {"tokens": np.float32(12), "distilled": np.float32(12)}
    numbers = {**hyper(config), "shape": np.float32(0.5)}

    def loss(fixed, advantage, logp):
        student = objective.Student(logp, draw())
        return objective.loss(static, student, fixed, {**tokens, "advantage": advantage}, totals, numbers)[0]

    grads = jax.grad(loss, argnums=(0, 1, 2))(fixed, tokens["advantage"], draw())
    for constant in (*grads[0][:2], grads[1]):
        np.testing.assert_array_equal(constant, 0.0)
    assert np.abs(grads[2]).max() > 0


def test_divergences_over_the_whole_vocabulary():
    """All tokens of a tiny vocabulary as the likeliest ones, and the exact KL against its estimates' average."""
    samples = make_samples(16)
    full, metrics = trainer("seed", distill__kind="full_fwd", distill__gate="none")(samples)
    topk, _ = trainer("seed", distill__kind="topk_fwd", distill__gate="none", distill__top_k=999)(samples)
    assert metrics["update/distill_loss"] > 0.01, "an average of divergences"
    assert_close(full, topk)
    few, few_metrics = trainer("seed", distill__kind="topk_fwd", distill__gate="none", distill__top_k=4)(samples)
    assert 0 < few_metrics["update/distill_loss"] < metrics["update/distill_loss"], "merging entries loses divergence"
    assert distance(few) > 1e-3
    run = trainer("grpo", loss__kl_coef=0.1, loss__kl_type="full")
    other = jax.tree.map(lambda x: 0.9 * np.asarray(x), weights())
    state = run.fresh_state().replace(reference=jax.device_put(other, run.shardings.params))
    _, metrics = run(samples, state)
    assert metrics["update/kl"] > 1e-3
    _, metrics = run(samples)
    assert metrics["update/kl"] == pytest.approx(0, abs=1e-6)


def test_whole_vocabularies_must_be_small():
    spec = dataclasses.replace(SPEC, vocab_size=10_000)
    for changes in ({"distill__kind": "full_jsd"}, {"loss__kl_type": "full", "loss__kl_coef": 0.1}):
        run = trainer("seed")
        with pytest.raises(ValueError, match=r"(distill\.kind|loss\.kl_type)='full.*this one has 10000"):
            build_update(make_config("seed", **changes), spec, run.mesh, run.shardings)


# -- invariance --------------------------------------------------------------------------------------------------------

# Every factor of the loss in few compositions, whether or not anyone would want them: each compiles twice.
FACTORS = {
    "gspo": (
        "grpo",
        {"loss__kind": "gspo", **TURNS, "loss__kl_coef": 0.1, "loss__kl_type": "k2", "adv__kind": "gigpo"},
    ),
    "gspo_token": ("seed", {**shaped("mult_clip", adv__shape_signal="turn"), "loss__kind": "gspo_token", **TURNS}),
    "hgpo": (
        "grpo",
        {"adv__kind": "hgpo", "loss__aggregation": "seq_mean_token_sum", "loss__kl_coef": 0.1, "loss__kl_type": "full"},
    ),
    "score": (
        "seed",
        {
            "distill__kind": "score",
            "distill__gate": "centered",
            "distill__rows": "losing_view",
            "distill__span_weight": 2.0,
            "distill__value": "second_attempts",
            "loss__importance_cap": 2.0,
            "adv__kind": "rloo",
            **MEAN,
        },
    ),
    "k3_is": (
        "seed",
        {
            "distill__kind": "k3_is",
            "distill__gate": "standardised",
            "distill__rows": "failed_only",
            "distill__gap": "old",
            "adv__shape": "add_gap",
            "adv__shape_weight": 0.5,
            "adv__shape_signal": "running",
            "adv__shape_value": "agreement",
        },
    ),
    "current": (
        "seed",
        {
            "distill__kind": "topk_jsd",
            "distill__top_k": 5,
            "distill__teacher": "current",
            "distill__gate": "outcome",
            "distill__denominator": "all",
            "adv__kind": "reinforce_pp",
        },
    ),
    "full": (
        "seed",
        {
            "distill__kind": "full_rev",
            "distill__gate": "soft_or",
            "loss__kind": "reinforce",
            "loss__aggregation": "seq_mean_token_sum_norm",
            "adv__kind": "drgrpo",
            **MEAN,
        },
    ),
    "generation": (
        "seed",
        {
            **shaped("add_gap", adv__shape_signal="teacher"),
            "loss__gen_coef": 0.5,
            "rollout__group_filter": "mask",
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FACTORS)
def test_micro_batches_and_order_change_nothing(name):
    method, changes = FACTORS[name]
    samples = with_credit(make_samples(16))
    if name == "generation":
        samples += written(samples)
    run = trainer(method, **changes)
    one, metrics = run(samples)
    two, split_metrics = trainer(method, **changes, pack__rows_per_micro=4, pack__micros_per_mini=2)(samples)
    assert one.step == two.step == 1 and distance(one) > 1e-4
    assert_close(one, two)
    assert_metrics_close(metrics, split_metrics)
    shuffled = [samples[i] for i in np.random.default_rng(3).permutation(len(samples))]
    neighbours = lambda order: {frozenset(id(order[i]) for i in row) for row in first_fit(order, SHAPE)}  # noqa: E731
    assert neighbours(shuffled).isdisjoint(neighbours(samples)), "other turns share a row"
    state, shuffled_metrics = run(shuffled)
    assert_close(state, one)
    assert_metrics_close(shuffled_metrics, metrics)
    assert all(np.isfinite(value) for value in metrics.values())
    empty, metrics = run(with_credit(make_samples(16))[:0])
    assert distance(empty) == 0 and all(np.isfinite(value) for value in metrics.values())


def test_a_trajectory_without_a_skill_changes_only_the_denominator():
    """Coefficient times tokens with a skill is what each of them weighs."""
    samples = [s._replace(teacher_prompt=s.teacher_prompt or [*s.prompt, 1]) for s in make_samples(16)]
    lost = [s._replace(teacher_prompt=None) if s.episode == 0 else s for s in samples]
    zeroed = [s._replace(span=np.full(len(s.response), s.episode != 0)) for s in samples]
    run = trainer("seed")
    tokens = {name: sum(len(s.response) for s in samples if name or s.episode) for name in (0, 1)}
    failed, metrics = run(lost)
    assert metrics["opd/token_fraction"] == pytest.approx(tokens[0] / tokens[1])
    masked, masked_metrics = run(zeroed)
    assert_close(failed, masked)
    assert metrics["update/distill_loss"] == pytest.approx(masked_metrics["update/distill_loss"], abs=1e-6)
    everywhere = trainer("seed", distill__denominator="all")
    rescaled, _ = everywhere(lost, distill=0.5 * tokens[1] / tokens[0])
    assert_close(rescaled, failed)
