"""Group-relative advantages against NumPy in float64, hand-computed vectors and the torch reference's golden values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seed_jax.objectives import advantages


def numpy_grpo(scores, groups, episodes, *, stat="rows", normalize="std", eps=1e-6, std_floor=0.0) -> np.ndarray:
    """The formula, group by group, in float64."""
    scores = np.asarray(scores, np.float32).astype(np.float64)
    result = np.zeros(len(scores))
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        entries = scores[rows]
        if stat == "episodes":
            entries = scores[[rows[episodes[rows] == e][0] for e in np.unique(episodes[rows])]]
        mean, std = (0.0, 1.0) if len(entries) == 1 else (entries.mean(), entries.std(ddof=1))
        result[rows] = scores[rows] - mean
        if normalize == "std":
            result[rows] /= max(std, std_floor) + eps
    return result


@pytest.mark.parametrize(
    ("golden", "stat", "normalize"),
    [("adv_std_steps", "rows", "std"), ("adv_mean_steps", "rows", "mean"), ("adv_std_episodes", "episodes", "std")],
)
def test_golden_values(golden_cases, golden: str, stat: str, normalize: str) -> None:
    for case in golden_cases:
        rewards, invalid, group, episode = (case[key] for key in ("episode_reward", "invalid", "group", "episode"))
        got = advantages.row_advantages(rewards, invalid, group, episode, stat=stat, normalize=normalize, penalty=0.1)
        np.testing.assert_allclose(got[:, None] * case["mask"], case[golden], rtol=1e-5, atol=1e-5)


# Two groups computed with the torch reference: the second has a single row.
SCORES = np.array([10, 10, 9.9, 0, -0.1, 10], np.float32)
GROUPS = np.array([0, 0, 0, 0, 0, 1])
EPISODES = np.array([0, 0, 0, 1, 1, 2])


def test_hand_vector() -> None:
    with_std = advantages.grpo(SCORES, GROUPS, EPISODES)
    np.testing.assert_allclose(with_std, [0.736337, 0.736337, 0.718110, -1.086279, -1.104505, 9.99999], atol=2e-6)
    mean_only = advantages.grpo(SCORES, GROUPS, EPISODES, normalize="mean")
    np.testing.assert_allclose(mean_only, [4.04, 4.04, 3.94, -5.96, -6.06, 10], atol=2e-6)


def test_episode_statistics_count_every_episode_once() -> None:
    # Entries 10 and 0: mean 5, sample std 7.0711. Every row is measured against them.
    got = advantages.grpo(SCORES[:5], GROUPS[:5], EPISODES[:5], stat="episodes")
    np.testing.assert_allclose(got, (SCORES[:5] - 5) / 7.0710678, atol=1e-6)


@pytest.mark.parametrize("constant", [0.0, 1.0, 10.0, -1.5000002, 9.9, 0.1, 1e-3, -12345.678])
@pytest.mark.parametrize("stat", advantages.STATS)
def test_constant_scores_give_exactly_zero(constant: float, stat: str) -> None:
    rows = 120
    episodes = np.repeat(np.arange(40), 3)
    got = advantages.grpo(np.full(rows, constant, np.float32), np.zeros(rows, int), episodes, stat=stat)
    np.testing.assert_array_equal(got, 0.0)


def test_singleton_groups() -> None:
    got = advantages.grpo(np.array([10.0, -3.0]), np.array([4, 9]), np.array([0, 1]))
    np.testing.assert_allclose(got, [9.99999, -2.999997], atol=1e-5)


def test_one_episode_of_many_rows_is_a_single_entry() -> None:
    got = advantages.grpo(np.array([10.0, 10.0, 9.9]), np.zeros(3, int), np.zeros(3, int), stat="episodes")
    np.testing.assert_allclose(got, [9.99999, 9.99999, 9.8999901], atol=1e-5)


def test_a_group_that_only_failed() -> None:
    """Format alone must not earn full-size advantages once the penalty stays out of the normalised score."""
    rows = 40
    invalid = np.zeros(rows)
    invalid[7] = 1
    arguments = (np.zeros(rows), invalid, np.zeros(rows, int), np.repeat(np.arange(8), 5))

    in_score = advantages.row_advantages(*arguments, invalid_penalty="in_score", penalty=0.1)
    np.testing.assert_allclose(in_score[7], -6.166, atol=1e-3)  # reference values
    np.testing.assert_allclose(in_score[0], 0.158, atol=1e-3)

    after_norm = np.asarray(advantages.row_advantages(*arguments, invalid_penalty="after_norm", penalty=0.1))
    np.testing.assert_allclose(after_norm, -0.1 * invalid, atol=1e-7)

    floored = np.asarray(advantages.row_advantages(*arguments, invalid_penalty="in_score", penalty=0.1, std_floor=1.0))
    assert np.abs(floored).max() < 0.1
    assert floored[7] < 0 < floored[0]


def test_std_floor_leaves_wider_groups_alone() -> None:
    floored = advantages.grpo(SCORES, GROUPS, EPISODES, std_floor=1.0)
    np.testing.assert_array_equal(floored, advantages.grpo(SCORES, GROUPS, EPISODES))


@pytest.mark.parametrize("invalid_penalty", advantages.PENALTIES)
def test_padding_rows_contribute_nothing(invalid_penalty: str) -> None:
    invalid = np.array([0, 0, 1, 0, 1, 0])
    expected = advantages.row_advantages(SCORES, invalid, GROUPS, EPISODES, invalid_penalty=invalid_penalty)
    mask = np.array([0, 1, 1, 1, 0, 1, 1, 1, 0])
    padded = []
    for values, junk in ((SCORES, np.nan), (invalid, 1), (GROUPS, 0), (EPISODES, 0)):
        padded.append(np.full(mask.shape, junk, values.dtype))
        padded[-1][mask == 1] = values
    got = advantages.row_advantages(*padded, mask, invalid_penalty=invalid_penalty)
    np.testing.assert_array_equal(got[mask == 1], expected)
    np.testing.assert_array_equal(got[mask == 0], 0.0)


def test_no_real_rows() -> None:
    got = advantages.grpo(np.ones(4), np.zeros(4, int), np.zeros(4, int), mask=np.zeros(4))
    np.testing.assert_array_equal(got, 0.0)
    metrics = advantages.group_metrics(np.ones(4), np.ones(4), np.zeros(4, int), np.zeros(4))
    assert {name: float(value) for name, value in metrics.items()} == {"mixed_groups": 0, "penalty_only_groups": 0}


def test_ids_are_arbitrary_integers_and_episode_numbers_may_restart() -> None:
    groups, episodes = np.array([-5, -5, 10**6, 10**6, 10**6]), np.array([0, 1, 0, 0, 1])
    scores = np.array([1.0, 0.0, 5.0, 5.0, 1.0])
    for stat in advantages.STATS:
        got = advantages.grpo(scores, groups, episodes, stat=stat)
        np.testing.assert_allclose(got, numpy_grpo(scores, groups, episodes, stat=stat), atol=1e-5)


def test_numbers_may_be_traced() -> None:
    compiled = jax.jit(lambda eps, floor: advantages.grpo(SCORES, GROUPS, EPISODES, eps=eps, std_floor=floor))
    for eps, floor in ((1e-6, 0.0), (0.1, 7.0)):
        want = numpy_grpo(SCORES, GROUPS, EPISODES, eps=eps, std_floor=floor)
        np.testing.assert_allclose(compiled(eps, floor), want, rtol=1e-5)
    assert compiled._cache_size() == 1


def test_group_metrics() -> None:
    # Group 0: mixed; 1: penalty only; 2: nothing differs; 3: nothing differs, all rows invalid.
    rewards = [10, 0, 0, 0, 0, 0, 10, 10, 0, 0]
    invalid = [0, 0, 1, 0, 1, 0, 0, 0, 1, 1]
    groups = [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    arrays = [np.array(values) for values in (rewards, invalid, groups)]
    metrics = advantages.group_metrics(*arrays)
    assert float(metrics["mixed_groups"]) == 0.25
    assert float(metrics["penalty_only_groups"]) == 0.25
    assert float(advantages.group_metrics(*arrays, penalty=0.0)["penalty_only_groups"]) == 0
    assert float(advantages.group_metrics(*arrays, invalid_penalty="after_norm")["penalty_only_groups"]) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stat": "trajectory"}, "stat is 'trajectory'; choose one of rows, episodes"),
        ({"normalize": "max"}, "normalize is 'max'"),
        ({"mask": np.ones(3)}, "must all be"),
    ],
)
def test_bad_arguments(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        advantages.grpo(SCORES, GROUPS, EPISODES, **changes)


def test_bad_penalty_name() -> None:
    for function in (
        lambda: advantages.row_advantages(SCORES, SCORES, GROUPS, EPISODES, invalid_penalty="never"),
        lambda: advantages.group_metrics(SCORES, SCORES, GROUPS, invalid_penalty="never"),
    ):
        with pytest.raises(ValueError, match="invalid_penalty is 'never'; choose one of in_score, after_norm"):
            function()


ROWS = 12
COMPILED = {
    stat: jax.jit(lambda s, g, e, m, stat=stat: advantages.grpo(s, g, e, stat=stat, mask=m))
    for stat in advantages.STATS
}


@settings(max_examples=40, deadline=None)
@given(
    scores=st.lists(st.sampled_from([0.0, -0.1, 1.0, 9.9, 10.0]), min_size=ROWS, max_size=ROWS),
    episodes=st.lists(st.integers(0, 5), min_size=ROWS, max_size=ROWS),
    real=st.lists(st.booleans(), min_size=ROWS, max_size=ROWS),
    order=st.permutations(range(ROWS)),
)
def test_any_batch_equals_numpy_in_any_row_order(scores, episodes, real, order) -> None:
    scores, episodes, real = np.array(scores, np.float32), np.array(episodes), np.array(real)
    groups = episodes // 2
    got = np.asarray(COMPILED["rows"](scores, groups, episodes, real))
    want = np.zeros(ROWS)
    want[real] = numpy_grpo(scores[real], groups[real], episodes[real])
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    order = np.array(order)
    permuted = np.asarray(COMPILED["rows"](scores[order], groups[order], episodes[order], real[order]))
    np.testing.assert_allclose(permuted, got[order], rtol=2e-5, atol=2e-5)


@settings(max_examples=30, deadline=None)
@given(
    scores=st.lists(st.sampled_from([0.0, -0.1, 1.0, 9.9, 10.0]), min_size=ROWS, max_size=ROWS),
    lengths=st.lists(st.integers(1, 4), min_size=ROWS, max_size=ROWS),
    order=st.permutations(range(ROWS)),
)
def test_episode_statistics_do_not_depend_on_the_order_of_episodes(scores, lengths, order) -> None:
    episodes = np.repeat(np.arange(ROWS), lengths)[:ROWS]
    scores, groups, real = np.array(scores, np.float32), episodes // 3, np.ones(ROWS, bool)
    got = np.asarray(COMPILED["episodes"](scores, groups, episodes, real))
    np.testing.assert_allclose(got, numpy_grpo(scores, groups, episodes, stat="episodes"), rtol=2e-5, atol=2e-5)
    moved = np.concatenate([np.flatnonzero(episodes == e) for e in order])
    permuted = np.asarray(COMPILED["episodes"](scores[moved], groups[moved], episodes[moved], real))
    np.testing.assert_allclose(permuted, got[moved], rtol=2e-5, atol=2e-5)


# -- other estimators --------------------------------------------------------------------------------------------------


def test_drgrpo_has_no_standard_deviation() -> None:
    np.testing.assert_allclose(
        advantages.drgrpo(SCORES, GROUPS, EPISODES), [4.04, 4.04, 3.94, -5.96, -6.06, 10], atol=2e-6
    )
    scaled = advantages.drgrpo(3 * SCORES, GROUPS, EPISODES)
    np.testing.assert_allclose(scaled, 3 * advantages.drgrpo(SCORES, GROUPS, EPISODES), rtol=1e-5)


def test_rloo_is_the_score_minus_the_mean_of_the_others() -> None:
    scores, groups = np.array([10, 0, 0, 7, 3, 5], np.float32), np.array([0, 0, 0, 1, 1, 2])
    want = [10 - 0, 0 - 5, 0 - 5, 7 - 3, 3 - 7, 5]  # the last has no others
    np.testing.assert_allclose(advantages.rloo(scores, groups, np.arange(6)), want, atol=1e-5)


def test_rloo_over_episodes_counts_episodes() -> None:
    # Two episodes, of three rows and of one: each is compared with the other, not with three others.
    got = advantages.rloo(np.array([10, 10, 10, 0.0]), np.zeros(4, int), np.array([0, 0, 0, 1]), stat="episodes")
    np.testing.assert_allclose(got, [10, 10, 10, -10], atol=1e-5)


@pytest.mark.parametrize("stat", advantages.STATS)
def test_reinforce_pp_whitens_the_whole_batch(stat: str) -> None:
    # Episodes are numbered anew in each group: (0, 0) and (1, 0) are two.
    groups, episodes = np.array([0, 0, 0, 1, 1, 1]), np.array([0, 0, 1, 0, 1, 1])
    scores = np.array([10, 10, 0, 0, 5, 5], np.float32)
    entries = scores if stat == "rows" else scores[[0, 2, 3, 4]]
    want = (scores - entries.mean()) / (entries.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(advantages.reinforce_pp(scores, groups, episodes, stat=stat), want, atol=1e-5)


ANCHORS = np.array([0, 1, 2, 0, 1, 1])
RETURNS = np.array([9.025, 9.5, 10, 0, 0, 10], np.float32)


def test_gigpo_compares_turns_from_the_same_observation_of_the_same_task() -> None:
    # Group 0: rows 0 and 3 share an observation, rows 1 and 4 too; row 2 is alone. Group 1: its row is alone, though
    # its observation has the number of another task's.
    steps = advantages.gigpo_steps(RETURNS, GROUPS, ANCHORS, normalize="mean")
    np.testing.assert_allclose(steps, [4.5125, 4.75, 0, -4.5125, -4.75, 0], atol=1e-5)
    steps = advantages.gigpo_steps(RETURNS, GROUPS, ANCHORS)
    np.testing.assert_allclose(steps, np.array([1, 1, 0, -1, -1, 0]) / np.sqrt(2), atol=1e-5)


def test_gigpo_adds_a_share_of_the_step_advantage() -> None:
    arguments = (SCORES, RETURNS, GROUPS, EPISODES, ANCHORS)
    of_episode = advantages.grpo(SCORES, GROUPS, EPISODES)
    np.testing.assert_array_equal(advantages.gigpo(*arguments, step_weight=0.0), of_episode)
    half = advantages.gigpo(*arguments, step_weight=0.5) - of_episode
    np.testing.assert_allclose(half, 0.5 * advantages.gigpo_steps(RETURNS, GROUPS, ANCHORS), atol=1e-5)


def test_gigpo_ignores_padding() -> None:
    real = np.array([1, 1, 1, 1, 1, 0])
    got = np.asarray(advantages.gigpo(SCORES, RETURNS, np.zeros(6, int), EPISODES, ANCHORS, mask=real))
    want = advantages.gigpo(SCORES[:5], RETURNS[:5], np.zeros(5, int), EPISODES[:5], ANCHORS[:5])
    np.testing.assert_allclose(got[:5], want, atol=1e-6)
    assert got[5] == 0


@pytest.mark.parametrize("kind", advantages.KINDS)
@pytest.mark.parametrize("invalid_penalty", advantages.PENALTIES)
def test_every_estimator_takes_rewards_and_penalties(kind: str, invalid_penalty: str) -> None:
    rewards, invalid = np.array([10, 10, 10, 0, 0, 0.0]), np.array([0, 0, 1, 0, 1, 0])
    by_step = kind in advantages.BY_STEP
    extra = dict(step_returns=RETURNS, anchor_ids=ANCHORS[:, None]) if by_step else {}
    got = advantages.row_advantages(
        rewards, invalid, np.zeros(6, int), EPISODES, kind=kind, invalid_penalty=invalid_penalty, **extra
    )
    if kind == "zero":
        np.testing.assert_array_equal(got, 0.0)
        return
    score = rewards - 0.1 * invalid if invalid_penalty == "in_score" else rewards
    ids = (np.zeros(6, int), EPISODES)
    if by_step:
        returns = RETURNS - 0.1 * invalid if invalid_penalty == "in_score" else RETURNS
        want = getattr(advantages, kind)(score, returns, *ids, ANCHORS if kind == "gigpo" else ANCHORS[:, None])
    else:
        want = getattr(advantages, kind)(score, *ids)
    if invalid_penalty == "after_norm":
        want = want - 0.1 * invalid
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_gigpo_needs_its_arrays() -> None:
    with pytest.raises(ValueError, match="gigpo needs step_returns and anchor_ids"):
        advantages.row_advantages(SCORES, np.zeros(6), GROUPS, EPISODES, kind="gigpo")
    with pytest.raises(ValueError, match="kind is 'ppo'; choose one of grpo, "):
        advantages.row_advantages(SCORES, np.zeros(6), GROUPS, EPISODES, kind="ppo")


def test_overlong_rises_over_the_buffer() -> None:
    got = advantages.overlong(np.array([[10, 80], [90, 100]]), max_tokens=100, buffer=20, penalty=2.0)
    np.testing.assert_allclose(got, [[0, 0], [1, 2]], atol=1e-6)


def test_mixed_rows() -> None:
    rewards, groups = np.array([10, 0, 0, 0, 10, 10, 10]), np.array([0, 0, 1, 1, 2, 2, 2])
    real = np.array([1, 1, 1, 1, 1, 1, 0])
    np.testing.assert_array_equal(advantages.mixed_rows(rewards, groups, real), [1, 1, 0, 0, 0, 0, 0])


# -- histories ---------------------------------------------------------------------------------------------------------

HISTORIES = np.array(
    [[0, 0], [1, 1], [2, 2], [0, 0], [1, 3], [1, 1]]
)  # rows 0 and 3 share two observations, 1 and 4 one


def hgpo_by_hand(alpha: float, base_weight: float) -> np.ndarray:
    """Level by level, group by group."""
    levels = [numpy_grpo(SCORES, GROUPS, EPISODES)]
    for column in HISTORIES.T:
        level = np.zeros(6)
        for key in {(g, c) for g, c in zip(GROUPS, column, strict=True)}:
            rows = [i for i in range(6) if (GROUPS[i], column[i]) == key]
            if len(rows) > 1:
                level[rows] = (RETURNS[rows] - RETURNS[rows].mean()) / RETURNS[rows].std(ddof=1)
        levels.append(level)
    result = np.zeros(6)
    for row in range(6):
        terms = [(base_weight if k == 0 else (k + 1) ** alpha, level[row]) for k, level in enumerate(levels)]
        kept = [(weight, value) for weight, value in terms if value != 0 and weight > 0]
        result[row] = sum(w * v for w, v in kept) / sum(w for w, _ in kept) if kept else 0.0
    return result


@pytest.mark.parametrize(("alpha", "base_weight"), [(1.0, 0.0), (1.0, 1.0), (0.0, 0.0), (2.0, 0.5)])
def test_hgpo_averages_the_levels_of_history(alpha: float, base_weight: float) -> None:
    arguments = (SCORES, RETURNS, GROUPS, EPISODES, HISTORIES)
    got = advantages.hgpo(*arguments, alpha=alpha, base_weight=base_weight)
    np.testing.assert_allclose(got, hgpo_by_hand(alpha, base_weight), atol=1e-5)


def test_hgpo_of_one_level_is_the_step_part_of_gigpo() -> None:
    got = advantages.hgpo(SCORES, RETURNS, GROUPS, EPISODES, ANCHORS[:, None])
    np.testing.assert_allclose(got, advantages.gigpo_steps(RETURNS, GROUPS, ANCHORS), atol=1e-6)


def test_output_is_float32() -> None:
    assert advantages.grpo(SCORES.astype(np.float64), GROUPS, EPISODES).dtype == jnp.float32
