"""The jitted update against a plain computation turn by turn, and the identities that hold whatever the weights are."""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from seed_jax.train import update as update_lib
from seed_jax.train.packing import bucket, first_fit, pack
from seed_jax.train.update import hyper
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
    turn_logprobs,
    weights,
)

SEVERAL_STEPS = {"pack__rows_per_micro": 2, "loss__kl_coef": 0.3, "optim__weight_decay": 0.1}
OUTSIDE = {"adv__stat": "episodes", "adv__invalid_penalty": "after_norm", "old_logprobs": "sampler"}


# -- a plain computation -----------------------------------------------------------------------------------------------


def hand_advantages(samples, config) -> np.ndarray:
    """GRPO in float64, one group after the other."""
    scores = np.array([s.reward - config.adv.penalty * s.invalid for s in samples], np.float64)
    if config.adv.invalid_penalty == "after_norm":
        scores = np.array([s.reward for s in samples], np.float64)
    result = np.zeros(len(samples))
    for group in {s.group for s in samples}:
        rows = [i for i, s in enumerate(samples) if s.group == group]
        entries = rows
        if config.adv.stat == "episodes":
            entries = [i for i in rows if samples[i].episode not in [samples[j].episode for j in rows if j < i]]
        mean, std = scores[entries].mean(), scores[entries].std(ddof=1)
        result[rows] = (scores[rows] - mean) / (std + config.adv.eps)
    if config.adv.invalid_penalty == "after_norm":
        result -= config.adv.penalty * np.array([s.invalid for s in samples])
    return result


def reference_update(samples, config, reference_params=None):
    """SEED's loss as in the paper, gradients of whole mini-batches, optax.adamw. Returns the new parameters."""
    params, loss_config, optim = weights(), config.loss, config.optim
    prompts, responses = [s.prompt for s in samples], [s.response for s in samples]
    # The packed batch lists turns row by row; statistics over "episodes" take the first of an episode in that order.
    rows = first_fit(samples, SHAPE)
    order = [i for row in rows for i in row]
    advantage = np.zeros(len(samples))
    advantage[order] = hand_advantages([samples[i] for i in order], config)
    old, _, mask = turn_logprobs(params, prompts, responses)
    if config.old_logprobs == "sampler":
        old = np.zeros(mask.shape, np.float32)
        for i, sample in enumerate(samples):
            old[i, : len(sample.response)] = sample.logprobs
    teacher = turn_logprobs(params, [s.teacher_prompt or s.prompt for s in samples], responses)[0]
    held = turn_logprobs(reference_params or params, prompts, responses)[0]
    skill = mask & np.array([s.teacher_prompt is not None for s in samples])[:, None]
    optimizer = optax.chain(
        optax.clip_by_global_norm(optim.grad_clip),
        optax.adamw(optim.lr, optim.b1, optim.b2, optim.eps, weight_decay=optim.weight_decay),
    )
    opt_state = optimizer.init(params)

    def loss(params, chosen):
        logp, entropy, _ = turn_logprobs(params, prompts, responses)
        where = mask & chosen[:, None]
        ratio, a = jnp.exp(logp - old), advantage[:, None]
        clipped = jnp.minimum(ratio * a, jnp.clip(ratio, 1 - loss_config.clip_low, 1 + loss_config.clip_high) * a)
        clipped = jnp.where(a < 0, jnp.maximum(clipped, loss_config.dual_clip * a), clipped)
        average = lambda x, m: jnp.where(m, x, 0).sum() / jnp.maximum(1, m.sum())  # noqa: E731
        total = -loss_config.rl_coef * average(clipped, where) - loss_config.entropy_coef * average(entropy, where)
        total += loss_config.kl_coef * average(jnp.exp(held - logp) - (held - logp) - 1, where)
        if config.distill.kind != "none":
            gap = teacher - logp
            gate = jax.lax.stop_gradient(1 / (1 + jnp.exp(-config.distill.beta * gap)))
            total += config.distill.coef * average(gate * gap, skill & chosen[:, None])
        return total

    gradient = jax.jit(jax.grad(loss))
    per_mini = config.pack.rows_per_micro * config.pack.micros_per_mini
    for start in range(0, len(rows), per_mini):
        chosen = np.zeros(len(samples), bool)
        chosen[[i for row in rows[start : start + per_mini] for i in row]] = True
        grads = gradient(params, chosen)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("seed", {}),
        ("seed", OUTSIDE),
        ("seed", SEVERAL_STEPS),  # each held to the first weights
        ("grpo", {}),
    ],
)
def test_equals_a_plain_computation(method, changes):
    run = trainer(method, **changes)
    samples = make_samples()
    minis = -(-len(first_fit(samples, SHAPE)) // run.config.pack.rows_per_micro)
    assert minis > 1 or "pack__rows_per_micro" not in changes
    state, metrics = run(samples)
    assert state.step == minis and metrics["update/skipped_steps"] == 0
    expected = jax.tree.leaves(reference_update(samples, run.config))
    for got, want in zip(leaves(state), expected, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    assert distance(state) > 1e-3, "a comparison of weights that hardly move says nothing"
    if changes.get("old_logprobs") == "sampler":
        assert metrics["update/clip_fraction"] > 0.1 and metrics["update/dual_clip_fraction"] > 0.01
    if "loss__kl_coef" in changes:
        assert metrics["update/kl"] > 1e-4


def test_kl_holds_on_to_the_reference():
    run = trainer(**SEVERAL_STEPS)
    samples = make_samples()
    other = jax.tree.map(lambda x: 0.9 * np.asarray(x), weights())
    state = run.fresh_state().replace(reference=jax.device_put(other, run.shardings.params))
    state, metrics = run(samples, state)
    for got, want in zip(leaves(state), jax.tree.leaves(reference_update(samples, run.config, other)), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    for kept, given in zip(jax.tree.leaves(state.reference), jax.tree.leaves(other), strict=True):
        assert kept.tobytes() == np.asarray(given).tobytes()
    assert metrics["update/kl"] > 1e-3


# -- identities: of two programs, compiled as users compile them; quickly compiled ones differ in the last bit ---------


@pytest.mark.optimized
def test_distillation_with_coefficient_zero_is_grpo():
    samples = make_samples()
    seed, metrics = trainer("seed")(samples, distill=0.0)
    grpo, _ = trainer("grpo")(samples)
    assert metrics["opd/coverage"] == pytest.approx(2 / 3)
    assert_bitwise(seed, grpo)


@pytest.mark.optimized
def test_distillation_without_any_skill_is_grpo():
    samples = make_samples(skills=False)
    seed, metrics = trainer("seed")(samples)
    grpo, _ = trainer("grpo")(samples)
    assert metrics["opd/coverage"] == metrics["opd/gate_mean"] == metrics["opd/gap_mean"] == 0
    assert metrics["update/distill_loss"] == 0
    assert_bitwise(seed, grpo)


def test_micro_batches_change_nothing():
    samples = make_samples(16)
    one, metrics = trainer("seed")(samples)
    two, split_metrics = trainer("seed", pack__rows_per_micro=4, pack__micros_per_mini=2)(samples)
    assert one.step == two.step == 1
    assert_close(one, two)
    assert_metrics_close(metrics, split_metrics)


def test_order_of_turns_changes_nothing():
    samples = make_samples(16)
    run = trainer("seed")
    expected, metrics = run(samples)
    for seed in range(3):
        shuffled = [samples[i] for i in np.random.default_rng(seed).permutation(len(samples))]
        batch = run.pack(shuffled)
        assert batch.minis == 1
        state, shuffled_metrics = run(None, batch=batch)
        assert_close(state, expected)
        assert_metrics_close(shuffled_metrics, metrics)


@pytest.mark.optimized
def test_padding_changes_nothing():
    run = trainer(**SEVERAL_STEPS)
    samples = make_samples()
    batch = run.pack(samples)
    rows = len(batch.mask)
    assert rows == bucket(len(first_fit(samples, SHAPE)), 2) * 2
    empty = lambda x: np.concatenate([x, np.zeros_like(x)]) if np.ndim(x) else x  # noqa: E731
    padded = jax.tree.map(empty, batch)
    expected, metrics = run(None, batch=batch)
    state, padded_metrics = run(None, batch=padded)
    assert len(padded.mask) == 2 * rows and state.step == expected.step == batch.minis
    assert_bitwise(state, expected)
    assert padded_metrics == metrics


def test_empty_batch_changes_nothing():
    state, metrics = trainer("seed")([])
    assert state.step == 0 and distance(state) == 0
    assert all(np.isfinite(value) for value in metrics.values())


def test_one_device_equals_eight():
    samples = make_samples()
    one, metrics = trainer("seed")(samples)
    eight, metrics_of_eight = trainer("seed", devices=8)(samples)
    assert_close(one, eight)
    assert_metrics_close(metrics, metrics_of_eight)


# -- the penalty trap --------------------------------------------------------------------------------------------------


def test_groups_that_only_failed():
    """Inside the score the penalty earns full-size advantages, outside it keeps its size (and 0 moves nothing)."""
    samples = make_samples(skills=False, won=False)
    inside, after = (functools.partial(run, entropy=0.0) for run in (trainer("grpo"), trainer(**OUTSIDE)))
    state, metrics = inside(samples, penalty=0.1)
    assert metrics["adv/penalty_only_groups"] == 1 and metrics["adv/mixed_groups"] == 0
    assert metrics["adv/abs_mean"] > 0.5 and distance(state) > 1e-3
    state, metrics = inside(samples, penalty=0.0)
    assert metrics["adv/abs_mean"] == 0 and distance(state) == 0

    state, metrics = after(samples, penalty=0.1)
    share = np.mean([sample.invalid for sample in samples])
    assert metrics["adv/penalty_only_groups"] == 0
    assert metrics["adv/abs_mean"] == pytest.approx(0.1 * share, rel=1e-5) and distance(state) > 1e-4
    state, metrics = after(samples, penalty=0.0)
    assert metrics["adv/abs_mean"] == 0 and distance(state) == 0


# -- the call ----------------------------------------------------------------------------------------------------------


def test_numbers_change_without_compiling_again():
    run, samples = trainer("seed"), make_samples()
    first, _ = run(samples)
    compiled = run.update._cache_size()
    numbers = {name: 0.5 * float(value) + 0.01 for name, value in hyper(run.config).items()}
    other, _ = run(samples, **numbers)
    run(make_samples(20, seed=5))  # other turns in the same bucket
    assert run.update._cache_size() == compiled
    assert any(a.tobytes() != b.tobytes() for a, b in zip(leaves(first), leaves(other), strict=True))


def test_warm_up_scales_the_learning_rate():
    run, samples = trainer("seed"), make_samples(16)
    full, half = run(samples)[0], run(samples, warmup_steps=2.0)[0]
    for a, b, start in zip(leaves(full), leaves(half), jax.tree.leaves(weights()), strict=True):
        np.testing.assert_allclose(b - start, 0.5 * (a - start), atol=1e-6)


def test_state_is_donated_and_stays_in_place():
    run = trainer("seed", devices=8)
    state = run.fresh_state()
    placed = jax.tree.map(lambda x: x.sharding, state)
    result, _ = run.update(state, run.pack(make_samples()), hyper(run.config))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.params, state.opt_state)) if leaf.ndim)
    assert jax.tree.map(lambda x: x.sharding, result) == placed


def test_gradient_that_is_not_finite_is_skipped_and_counted():
    run = trainer(**OUTSIDE)
    samples = make_samples(16)
    samples[3] = samples[3]._replace(logprobs=np.full(len(samples[3].response), np.nan, np.float32))
    state, metrics = run(samples)
    assert metrics["update/skipped_steps"] == 1 and state.step == 0
    assert distance(state) == 0 and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.opt_state))


def test_rows_must_divide_over_the_devices():
    with pytest.raises(ValueError, match=r"pack\.rows_per_micro=2 must be a multiple of mesh\.fsdp=8"):
        Trainer(make_config("seed", pack__rows_per_micro=2), devices=8)


# -- where the model runs ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "shape"), [("dense", SHAPE), ("splash", SHAPE._replace(row_tokens=128, teacher_row_tokens=128))]
)
def test_the_plan_for_accelerators_equals_one_device(monkeypatch, attention, shape):
    """Kernel and mesh given to the model, as on a TPU: weights gathered layer by layer, rows and heads split."""
    samples, config = make_samples(), make_config()
    batch = pack(samples, shape, config.pack.rows_per_micro, with_teacher=True)
    expected, expected_metrics = trainer()(samples, batch=batch)
    monkeypatch.setattr(update_lib, "model_placement", lambda config, spec, mesh: (attention, mesh))
    state, metrics = Trainer(config, devices=8)(samples, batch=batch)
    assert_close(state, expected)
    assert_metrics_close(metrics, expected_metrics)


def test_the_plan_follows_the_platform():
    def on(platform, **changes):
        mesh = types.SimpleNamespace(devices=np.array([types.SimpleNamespace(platform=platform)]))
        placed = update_lib.model_placement(make_config(**changes), SPEC, mesh)
        return placed[0], placed[1] is mesh

    assert on("cpu") == ("dense", False)
    assert on("tpu") == ("splash", True)
    assert on("gpu", model__dtype="bfloat16") == ("cudnn", True)
    assert on("gpu", model__dtype="float32") == ("dense", True)
    with pytest.raises(ValueError, match=r"rows of 8000 tokens.*Use 8064 \(pack\.row_tokens"):
        on("tpu", pack__teacher_row_tokens=8000)
    assert on("tpu", method="grpo", pack__teacher_row_tokens=8000) == ("splash", True)  # no teacher rows
