"""Evaluation numbers by hand and against NumPy, and the panel's keys."""

from __future__ import annotations

import math

import numpy as np
import pytest

from envs.alfworld.domain import AlfworldDomain
from envs.alfworld.generate import make_tasks
from envs.pool import make_pool
from seed_jax.evaluate import EVAL_STREAM, REPEAT_STRIDE, evaluate, reference_draws, summarize
from seed_jax.rollout import World
from seed_jax.types import Episode, SamplingParams, Turn
from tests import tiny
from tests.scripted import ScriptedSampler


def episode(family: str, won: bool, turns: list[tuple[bool, bool]]) -> Episode:
    made = [Turn("", [], [], np.zeros(0), "", "", None, valid, admissible) for valid, admissible in turns]
    return Episode("id", family, "goal", 0, 0, made, won=won, reward=10.0 * won)


def test_summary_by_hand():
    good, bad, half = (True, True), (False, False), (True, False)
    result = summarize(
        [
            episode("heat", True, [good, good]),
            episode("heat", False, [good, bad, half]),
            episode("heat", True, [good]),
            episode("cool", False, [bad, half]),
            episode("cool", False, [good, good]),
        ]
    )
    assert result["games"] == 5
    assert result["success_rate"] == pytest.approx(2 / 5)
    assert result["standard_error"] == pytest.approx(math.sqrt(0.4 * 0.6 / 5))
    assert result["family"] == {"cool": 0.0, "heat": pytest.approx(2 / 3)}
    assert result["macro_success_rate"] == pytest.approx(1 / 3)
    assert result["steps"] == pytest.approx(2.0)
    assert result["valid_rate"] == pytest.approx(8 / 10)
    assert result["admissible_rate"] == pytest.approx(6 / 10)


def test_extremes():
    assert summarize([])["games"] == 0 and summarize([])["success_rate"] == 0
    assert summarize([episode("heat", True, [])])["standard_error"] == 0


def test_standard_errors_are_those_of_a_sample_of_games():
    """Ten games, four episodes each: the error over games is that of NumPy over the games' means; with one episode each
    it is that of a share."""
    rng = np.random.default_rng(0)
    chances = rng.random(10)
    episodes = [episode("heat" if game < 6 else "cool", rng.random() < chances[game], []) for game in range(10)] * 1
    games = list(range(10))
    for _ in range(3):
        episodes += [episode(e.family, bool(rng.random() < chances[g]), []) for g, e in enumerate(episodes[:10])]
        games += list(range(10))
    means = np.array([e.won for e in episodes], float).reshape(4, 10).mean(0)
    result = summarize(episodes, games)
    assert (result["games"], result["episodes"]) == (10, 40)
    assert result["standard_error"] == pytest.approx(means.std() / math.sqrt(10))
    errors = means[6:].std() / math.sqrt(4), means[:6].std() / math.sqrt(6)
    assert list(result["family_standard_error"].values()) == pytest.approx(list(errors))
    assert result["macro_standard_error"] == pytest.approx(math.hypot(*errors) / 2)
    assert result["family_episodes"] == {"cool": 16, "heat": 24}


def test_reference_draws_are_its_environments_own_next_games():
    tasks = list(range(140))
    for round_number in (0, 3):
        expected = []
        for seed in range(1000, 1128):
            games = list(tasks)
            np.random.RandomState(seed).shuffle(games)
            expected.append(games[round_number])
        assert reference_draws(tasks, round_number) == expected
    assert 75 < len(set(reference_draws(tasks))) < 95 and len(reference_draws(tasks)) == 128


def test_success_is_the_environments_own_and_keys_depend_on_the_place_in_the_panel():
    panel = make_tasks("seen", 4)

    def reply(path):
        _, index, turn = path
        command = panel[index].source["walkthrough"][turn] if index != 1 else "look"
        return f"<think> </think> <action> {command} </action>"

    winner = ScriptedSampler(reply)
    world = World(AlfworldDomain("compact"), make_pool("envs.alfworld.engine:make"), 8, 4)
    result, episodes, _ = evaluate(
        winner, tiny.tokenizer(), world, panel, temperature=0.4, max_tokens=20, max_prompt_tokens=300, seed=9
    )
    assert [e.won for e in episodes] == [True, False, True, True]
    assert (result["success_rate"], result["temperature"], result["games"]) == (0.75, 0.4, 4)
    for step, asked in enumerate(winner.rounds):
        for _, params, (stream, _, turn), seed in asked:
            assert params == SamplingParams(20, 0.4) and seed == 9
            assert stream == EVAL_STREAM and turn == step
    assert [index for _, _, (_, index, _), _ in winner.rounds[0]] == [0, 1, 2, 3]

    winner.rounds.clear()
    result, episodes, _ = evaluate(
        winner, tiny.tokenizer(), world, panel[:2], temperature=0.4, max_tokens=20, max_prompt_tokens=300, seed=9,
        repeats=3,
    )  # fmt: skip
    assert [e.task_id for e in episodes] == [task.id for task in panel[:2]] * 3
    assert [e.won for e in episodes] == [True, False] * 3
    assert (result["games"], result["episodes"], result["standard_error"]) == (2, 6, pytest.approx(0.5 / math.sqrt(2)))
    streams = list(dict.fromkeys(stream for asked in winner.rounds for _, _, (stream, _, _), _ in asked))
    assert streams == [EVAL_STREAM + repeat * REPEAT_STRIDE for repeat in range(3)]
