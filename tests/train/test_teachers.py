"""Inside the one jitted update: which tokens a teacher reaches, whose weights it has, what is measured."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from configs import base
from seed_jax.train import objective
from seed_jax.train.factors import choices
from seed_jax.train.packing import pack
from seed_jax.train.update import hyper
from seed_jax.train.writing import generation_weights, skill_rewards
from tests.updating import (
    SHAPE,
    assert_bitwise,
    assert_close,
    leaves,
    make_config,
    make_samples,
    trainer,
    turn_logprobs,
    weights,
    written,
)

# -- what is left out --------------------------------------------------------------------------------------------------


def test_span_without_tokens_is_grpo_and_a_full_span_is_seed():
    samples = make_samples(16)
    run = trainer("seed")
    spans = lambda value: [s._replace(span=np.full(len(s.response), value)) for s in samples]  # noqa: E731
    nothing, metrics = run(spans(False))
    assert metrics["opd/token_fraction"] == 0
    assert_close(nothing, trainer("grpo")(samples)[0])
    everything, _ = run(spans(True))
    assert_close(everything, run(samples)[0])


@pytest.mark.parametrize(("rows", "won"), [("failed_only", False), ("success_only", True)])
def test_row_selection(rows, won):
    samples = make_samples(16)
    chosen = [s if (s.reward > 0) == won else s._replace(teacher_prompt=None) for s in samples]
    got, metrics = trainer("seed", distill__rows=rows)(samples)
    want, expected = trainer("seed")(chosen)
    assert_close(got, want)
    assert (
        metrics["opd/token_fraction"] == pytest.approx(expected["opd/token_fraction"])
        and metrics["opd/token_fraction"] > 0
    )


def test_group_filter_leaves_groups_of_equal_rewards_out():
    samples = make_samples(16)
    samples = [s._replace(reward=0.0) if s.group == 0 else s for s in samples]
    filtered, metrics = trainer("seed", rollout__group_filter="mask")(samples)
    assert metrics["adv/mixed_groups"] == 0.5
    without, _ = trainer("seed")([s for s in samples if s.group == 1])
    assert_close(filtered, without)
    everything, _ = trainer("seed")(samples)
    assert max(np.abs(a - b).max() for a, b in zip(leaves(filtered), leaves(everything), strict=True)) > 1e-4


def test_overlong_replies_lose_reward():
    changes = {"adv__overlong_buffer": 3, "adv__overlong_penalty": 4.0, "rollout__max_response_tokens": 6}
    samples = make_samples(16)
    shaped_reward = lambda n: 4.0 * min(max((n - 3) / 3, 0), 1)  # noqa: E731
    lowered = [s._replace(reward=s.reward - shaped_reward(len(s.response))) for s in samples]
    assert len({len(s.response) > 3 for s in samples}) == 2
    got, _ = trainer("grpo", **changes)(samples)
    assert_close(got, trainer("grpo")(lowered)[0])


def test_importance_weight_of_equal_log_probs_changes_nothing():
    samples = make_samples(16)
    run = trainer("grpo", loss__importance_cap=1e-3)
    state, metrics = run(samples, importance_cap=2.0)
    assert metrics["update/importance"] != pytest.approx(1.0, abs=0.01), "the samplers' log-probs are made up"
    capped, metrics = run(samples)
    assert metrics["update/importance"] <= 1e-3 + 1e-9
    assert max(np.abs(a - b).max() for a, b in zip(leaves(state), leaves(capped), strict=True)) > 1e-4


# -- the teacher's weights ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("teacher", ["old", "current"])
def test_empty_skill_has_no_gap(teacher):
    """Whatever the placement, an empty skill leaves the prompt alone (tests/hindsight/test_prompts.py)."""
    samples = [s._replace(teacher_prompt=s.prompt) for s in make_samples(16)]
    _, metrics = trainer("seed", **({} if teacher == "old" else {"distill__teacher": teacher}))(samples)
    assert metrics["opd/coverage"] == 1
    for name in ("opd/gap_size", "opd/gap_success", "opd/gap_failure", "update/distill_loss"):
        assert abs(metrics[name]) < 1e-5, name
    assert metrics["opd/gate_mean"] == pytest.approx(0.5, abs=1e-5) and metrics["opd/gate_std"] < 1e-3


def test_current_teacher_is_the_old_one_in_the_first_step_only():
    one_step = make_samples(16)
    assert_close(trainer("seed", distill__teacher="current")(one_step)[0], trainer("seed")(one_step)[0])
    steps = {"pack__rows_per_micro": 2, "distill__kind": "score", "distill__gate": "none"}
    old, _ = trainer("seed", **steps)(one_step)
    current, _ = trainer("seed", **steps, distill__teacher="current")(one_step)
    assert old.step == current.step > 1
    assert max(np.abs(a - b).max() for a, b in zip(leaves(old), leaves(current), strict=True)) > 1e-4


def test_frozen_teacher_scores_with_the_initial_weights():
    run = trainer("seed", distill__teacher="frozen_init")
    assert run.choices.needs_reference and run.choices.kl == "none"
    samples = make_samples(16)
    same, metrics = run(samples)
    assert_close(same, trainer("seed")(samples)[0])
    other = jax.tree.map(lambda x: 0.5 * np.asarray(x), weights())
    state = run.fresh_state().replace(reference=jax.device_put(other, run.shardings.params))
    moved, other_metrics = run(samples, state)
    assert other_metrics["opd/gap_mean"] != pytest.approx(metrics["opd/gap_mean"], abs=1e-3)
    for kept, given in zip(jax.tree.leaves(moved.reference), jax.tree.leaves(other), strict=True):
        assert kept.tobytes() == np.asarray(given).tobytes()


def test_moving_average_teacher():
    run = trainer("seed", distill__teacher="ema")
    state, _ = run(make_samples(16), ema_rate=0.25)
    for teacher, policy, start in zip(
        jax.tree.leaves(state.teacher), leaves(state), jax.tree.leaves(weights()), strict=True
    ):
        np.testing.assert_allclose(teacher, 0.75 * np.asarray(start) + 0.25 * policy, atol=1e-6)


def test_periodic_teacher_is_copied_when_its_time_has_come():
    run = trainer("seed", distill__teacher="periodic")
    samples = make_samples(16)
    kept, _ = run(samples, refresh_teacher=0.0)
    for teacher, start in zip(jax.tree.leaves(kept.teacher), jax.tree.leaves(weights()), strict=True):
        assert teacher.tobytes() == np.asarray(start).tobytes()
    copied, _ = run(samples, refresh_teacher=1.0)
    for teacher, policy in zip(jax.tree.leaves(copied.teacher), leaves(copied), strict=True):
        np.testing.assert_array_equal(teacher, policy)


# -- what looks at the whole batch -------------------------------------------------------------------------------------


def test_signals_are_given_the_fields_of_the_batch():
    """Packed turns against a loop over samples: the sum of mean gaps of an episode, and what agreement wins."""
    samples = [s._replace(step=1 - i % 2) for i, s in enumerate(make_samples(24))]
    batch = pack([samples[i] for i in np.random.default_rng(1).permutation(24)], SHAPE, 8, True)
    config = make_config("seed", distill__gap="old", adv__shape="add_gap", adv__shape_signal="running")
    config.adv.shape_value = "agreement"
    numbers, rng = hyper(config), np.random.default_rng(0)
    teacher, old = (-rng.uniform(0.1, 3, batch.mask.shape).astype(np.float32) for _ in range(2))
    distilled = batch.mask & np.take_along_axis(batch.has_skill, batch.turn, axis=1)
    found = objective.batch_signals(choices(config), batch, teacher, old, distilled, numbers)

    turns = {}  # (episode, step) -> (group, reward, tokens, mean gap or None)
    for r, slot in zip(*np.nonzero(batch.real), strict=True):
        where = np.nonzero(distilled & (batch.turn == slot) & (np.arange(len(batch.mask)) == r)[:, None])
        mean = float((teacher - old)[where].mean()) if len(where[0]) else None
        key = (int(batch.episode[r, slot]), int(batch.step[r, slot]))
        turns[key] = (int(batch.group[r, slot]), float(batch.reward[r, slot]), where, mean)
    assert len(turns) == 24
    trust = {}
    for group in range(3):
        sides = [[r > 0 for g, r, _, m in turns.values() if g == group and m is not None and (m > 0) == agrees]
                 for agrees in (True, False)]  # fmt: skip
        value = np.mean(sides[0]) - np.mean(sides[1]) if all(sides) else 0.0
        trust[group] = 1 / (1 + np.exp(-config.distill.beta * value))
    assert len(set(trust.values())) > 1
    for (episode, step), (group, _, where, mean) in turns.items():
        if mean is not None:
            earlier = [turns[episode, s][3] for s in range(step + 1) if (episode, s) in turns]
            want = sum(m for m in earlier if m is not None)
            np.testing.assert_allclose(found["signal"][where], want, atol=1e-5)
            np.testing.assert_allclose(found["trust"][where], trust[group], atol=1e-5)


def test_written_skills_earn_the_gap_they_make_on_won_episodes():
    """Against every turn alone in its row: R = mean gap of the episode's tokens if it won; - R mean log-prob."""
    samples = make_samples(16)
    skills = written(samples)
    run = trainer("seed", loss__gen_coef=0.5)
    state, metrics = run([*samples, *skills])
    prompts, responses = [s.prompt for s in samples], [s.response for s in samples]
    old, _, mask = turn_logprobs(weights(), prompts, responses)
    teacher = turn_logprobs(weights(), [s.teacher_prompt or s.prompt for s in samples], responses)[0]
    gap, rewards = np.asarray(teacher - old), []
    for skill in skills:
        mine = np.array([s.episode == skill.episode and s.reward > 0 and s.teacher_prompt is not None for s in samples])
        rewards.append(np.clip(gap[mask & mine[:, None]].mean(), -2, 2) if mine.any() else 0.0)
    assert sum(reward != 0 for reward in rewards) == 2 and rewards[0] == 0, "the first one lost"
    logp, _, lengths = turn_logprobs(weights(), [s.prompt for s in skills], [s.response for s in skills])
    means = np.where(lengths, logp, 0).sum(1) / lengths.sum(1)
    assert metrics["update/generation_loss"] == pytest.approx(-np.mean(rewards * means), rel=1e-4)

    without, plain = trainer("seed")(samples)
    switched_off, off = run([*samples, *skills], generation=0.0)
    assert_close(switched_off, without)
    for name in ("adv/abs_mean", "opd/coverage", "update/entropy", "opd/gap_mean", "opd/token_fraction"):
        assert off[name] == pytest.approx(plain[name], abs=1e-5), name
    assert max(np.abs(a - b).max() for a, b in zip(leaves(state), leaves(without), strict=True)) > 1e-4


def test_a_reflection_earns_the_gap_in_its_whole_group():
    config, samples = make_config("seed", loss__gen_coef=0.5), make_samples(16)
    config.hindsight.source = "group_reflection"
    assert choices(config).generation == "group"
    batch = pack([*samples, *written(samples)], SHAPE, 8, True)
    rng = np.random.default_rng(0)
    teacher, old = (-rng.uniform(0.1, 3, batch.mask.shape).astype(np.float32) for _ in range(2))
    distilled = batch.mask & np.take_along_axis(batch.has_skill, batch.turn, axis=1)
    got = np.asarray(skill_rewards("group", batch, teacher, old, distilled))
    won = np.take_along_axis((batch.reward > 0) & (batch.group == 0), batch.turn, axis=1)
    want = (teacher - old)[distilled & won].mean()
    skills = np.zeros(got.shape, bool)
    for r, n in zip(*np.nonzero(batch.generated), strict=True):
        skills[r, batch.turn[r, n]] = True
    assert skills.sum() == 3
    np.testing.assert_allclose(got[skills], want, rtol=1e-5)


def test_measured_skills_earn_their_value():
    """R is the value that the sample carries, over the length of the skill, by NumPy; the gap plays no part."""
    samples = make_samples(16)
    values = (0.75, -0.5, 0.0)
    skills = [s._replace(value=value) for s, value in zip(written(samples), values, strict=True)]
    batch = pack([*samples, *skills], SHAPE, 8, True)
    shape, lengths = batch.mask.shape, {s.episode: len(s.response) for s in skills}
    got = generation_weights("episode", batch, np.zeros(shape), np.ones(shape), batch.mask, measured=True)
    share, reward = np.zeros(shape), np.zeros(shape)
    for r, n in zip(*np.nonzero(batch.generated), strict=True):
        episode = int(batch.episode[r, batch.turn[r, n]])
        share[r, n], reward[r, n] = 1 / lengths[episode], values[episode] / lengths[episode]
    np.testing.assert_allclose(got["skill_share"], share, rtol=1e-6)
    np.testing.assert_allclose(got["skill_reward"], reward, rtol=1e-6)

    run = trainer("seed", loss__gen_coef=0.5, loss__gen_reward="second_attempts")
    state, metrics = run([*samples, *skills])
    logp, _, mask = turn_logprobs(weights(), [s.prompt for s in skills], [s.response for s in skills])
    means = np.where(mask, logp, 0).sum(1) / mask.sum(1)
    assert metrics["update/generation_loss"] == pytest.approx(-np.mean(values * means), rel=1e-4)
    without, _ = trainer("seed")(samples)
    assert max(np.abs(a - b).max() for a, b in zip(leaves(state), leaves(without), strict=True)) > 1e-4
    useless, metrics = run([*samples, *(s._replace(value=0.0) for s in skills)])
    assert metrics["update/generation_loss"] == 0
    assert_close(useless, without)


def valued(samples, value):
    """The samples with what their skills are worth, by the number of the episode."""
    return [s._replace(value=value(s.episode)) for s in samples]


def test_worthless_skills_are_not_distilled():
    """Also those with which fewer games were won: there is no distillation away from a teacher."""
    samples, run = make_samples(16), trainer("seed", distill__value="second_attempts")
    grpo, _ = trainer("grpo")(samples)
    for value in (lambda episode: 0.0, lambda episode: -1.0, lambda episode: -0.1 * episode):
        got, metrics = run(valued(samples, value))
        assert metrics["update/distill_loss"] == 0 and metrics["opd/coverage"] > 0.5
        assert_close(got, grpo)
    alone, _ = run(valued(samples, lambda episode: 0.0), rl=0.0, entropy=0.0)
    for leaf, start in zip(leaves(alone), jax.tree.leaves(weights()), strict=True):
        assert leaf.tobytes() == np.asarray(start).tobytes(), "no gradient at all"


def test_skills_of_full_value_are_distilled_as_without_values():
    samples, run = make_samples(16), trainer("seed", distill__value="second_attempts")
    got, metrics = run(valued(samples, lambda episode: 1.0))
    want, expected = trainer("seed")(samples)
    for a, b in zip(leaves(got), leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6, rtol=0)
    assert metrics == pytest.approx(expected, abs=1e-6, rel=1e-5)
    assert metrics["update/distill_loss"] != 0
    ignored, _ = trainer("seed")(valued(samples, lambda episode: -0.3))
    assert_bitwise(ignored, want)


def test_a_turn_is_distilled_as_much_as_its_skill_is_worth():
    """The loss is linear in the values, over the same tokens; it is the mean of value times gate times gap."""
    samples, run = make_samples(16), trainer("seed", distill__value="second_attempts")
    losses, value = [], lambda episode: 0.125 * (episode % 4)
    for chosen in range(4):
        found = run(valued(samples, lambda episode, chosen=chosen: float(episode % 4 == chosen)), rl=0.0)[1]
        losses.append(found["update/distill_loss"])
    _, metrics = run(valued(samples, value), rl=0.0)
    assert len(set(losses)) == 4
    assert metrics["update/distill_loss"] == pytest.approx(np.dot(losses, [0, 0.125, 0.25, 0.375]), rel=1e-4)

    prompts, responses = [s.prompt for s in samples], [s.response for s in samples]
    logp, _, mask = turn_logprobs(weights(), prompts, responses)
    teacher = turn_logprobs(weights(), [s.teacher_prompt or s.prompt for s in samples], responses)[0]
    gap, taught = np.asarray(teacher - logp, np.float64), np.array([s.teacher_prompt is not None for s in samples])
    where = np.asarray(mask) & taught[:, None]
    weight = np.array([value(s.episode) for s in samples])[:, None]
    gate = 1 / (1 + np.exp(-run.config.distill.beta * gap))
    want = (weight * gate * gap)[where].sum() / where.sum()
    assert metrics["update/distill_loss"] == pytest.approx(want, rel=1e-4)


def test_a_token_of_the_span_weighs_more():
    """Twice the weight is once more the gradient of the span alone, over the same denominator."""
    samples = [s._replace(span=np.arange(len(s.response)) % 2 == 0) for s in make_samples(16)]
    weighted = trainer("seed", distill__span_weight=2.0, distill__denominator="all")
    alone = trainer("seed", distill__denominator="all")
    _, both = weighted(samples, rl=0.0)
    _, only = alone(samples, rl=0.0)
    _, everything = alone([s._replace(span=None) for s in samples], rl=0.0)
    assert both["opd/token_fraction"] == pytest.approx(everything["opd/token_fraction"])
    want = everything["update/distill_loss"] + only["update/distill_loss"]
    assert both["update/distill_loss"] == pytest.approx(want, rel=1e-5)


def test_the_losing_view_is_taught_by_its_margin():
    """One group: readers win 3 of 4 episodes, the others 1 of 4; only the others learn, at half the weight."""
    samples = make_samples(16)
    won = {0: False, 1: True, 2: False, 3: True, 4: True, 5: True, 6: False, 7: False}
    samples = [
        s._replace(
            group=0, reward=10.0 * won[s.episode], given=s.episode % 2 == 1, teacher_prompt=s.teacher_prompt or s.prompt
        )
        for s in samples
    ]
    reader_rate, other_rate = np.mean([won[e] for e in (1, 3, 5, 7)]), np.mean([won[e] for e in (0, 2, 4, 6)])
    assert reader_rate - other_rate == 0.5
    got, metrics = trainer("seed", distill__rows="losing_view")(samples, rl=0.0, entropy=0.0)
    losers = [s if s.episode % 2 == 0 else s._replace(teacher_prompt=None) for s in samples]
    want, expected = trainer("seed")(losers, rl=0.0, entropy=0.0, distill=0.25)
    assert_close(got, want)
    assert metrics["update/distill_loss"] == pytest.approx(0.5 * expected["update/distill_loss"], rel=1e-5)


# -- metrics -----------------------------------------------------------------------------------------------------------


def test_gradient_norms_of_the_parts():
    samples = make_samples(16)
    run = trainer("seed", log__grad_norms_every=2)
    _, metrics = run(samples, measure_norms=1.0)
    _, only_rl = trainer("seed")(samples, distill=0.0)
    assert metrics["update/rl_grad_norm"] == pytest.approx(only_rl["update/grad_norm"], rel=1e-5)
    _, only_distill = trainer("seed")(samples, rl=0.0, entropy=0.0)
    assert metrics["update/distill_grad_norm"] == pytest.approx(only_distill["update/grad_norm"], rel=1e-5)
    _, unmeasured = run(samples, measure_norms=0.0)
    assert np.isnan(unmeasured["update/rl_grad_norm"]) and np.isnan(unmeasured["update/distill_grad_norm"])
    assert [float(hyper(run.config, update)["measure_norms"]) for update in (1, 2, 3)] == [1, 0, 1]
    assert float(hyper(base.get_config(), 1)["measure_norms"]) == 0


def test_metrics_of_the_gate_and_the_gap():
    samples = make_samples(16)
    _, metrics = trainer("seed")(samples)
    for name in (
        "gate_mean",
        "gate_std",
        "gate_high",
        "gate_saturated",
        "coverage",
        "token_fraction",
        "sign_agreement",
    ):
        assert 0 < metrics[f"opd/{name}"] <= 1, name
    assert metrics["opd/gap_size"] >= abs(metrics["opd/gap_mean"]) > 0
    assert {"opd/gap_success", "opd/gap_failure", "update/entropy", "update/clip_fraction"} <= set(metrics)
