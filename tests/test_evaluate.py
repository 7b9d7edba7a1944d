"""Evaluation numbers by hand, and the panel's keys."""

from __future__ import annotations

import math

import numpy as np
import pytest

from envs.alfworld.domain import AlfworldDomain
from envs.alfworld.generate import make_tasks
from envs.pool import make_pool
from seed_jax import tokenizer as tok
from seed_jax.evaluate import EVAL_STREAM, evaluate, summarize
from seed_jax.rollout import World
from seed_jax.types import Completion, Episode, SamplingParams, Turn
from tests import tiny


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


def test_success_is_the_environments_own_and_keys_depend_on_the_place_in_the_panel():
    panel, calls = make_tasks("seen", 4), []

    class Winner:
        def generate(self, prompts, params, paths, *, seed):
            calls.append((params, paths, seed))
            commands = [panel[i].source["walkthrough"] if i != 1 else ["look"] * 9 for _, i, _ in paths]
            texts = [
                f"<think> </think> <action> {c[t]} </action>" for c, (_, _, t) in zip(commands, paths, strict=True)
            ]
            ids = [tok.encode_response(tiny.tokenizer(), text) for text in texts]
            return [Completion(one, np.zeros(len(one), np.float32), "stop") for one in ids]

    world = World(AlfworldDomain("compact"), make_pool("envs.alfworld.engine:make"), 8, 4)
    result, episodes = evaluate(
        Winner(), tiny.tokenizer(), world, panel, temperature=0.4, max_tokens=20, max_prompt_tokens=300, seed=9
    )
    assert [e.won for e in episodes] == [True, False, True, True]
    assert (result["success_rate"], result["temperature"], result["games"]) == (0.75, 0.4, 4)
    for step, (params, paths, seed) in enumerate(calls):
        assert params == SamplingParams(20, 0.4) and seed == 9
        assert all(stream == EVAL_STREAM and turn == step for stream, _, turn in paths)
    assert [index for _, index, _ in calls[0][1]] == [0, 1, 2, 3]
