"""The shipped quickstart models load, fit the size they promise, and play as well as their card says."""

from __future__ import annotations

import json

import jax
import pytest

from configs import quickstart
from envs.alfworld.domain import FACTORY, AlfworldDomain
from envs.alfworld.generate import make_tasks
from envs.pool import make_pool
from launch import skill_evaluation
from launch.quickstart_card import measure
from seed_jax import sharding, teacher
from seed_jax import tokenizer as tok
from seed_jax.evaluate import evaluate
from seed_jax.hindsight.sources import Skills
from seed_jax.models import hf
from seed_jax.rollout import World
from seed_jax.sampler.engine import sampler_of

CARD = quickstart.ASSETS / "card.json"


def test_the_shipped_files_are_small_and_safe():
    files = [path for path in quickstart.ASSETS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 6e6
    assert {path.suffix for path in files} <= {".json", ".jinja", ".safetensors"}


def test_the_base_is_weak_on_purpose_and_perceives_well():
    card = json.loads(CARD.read_text())["base"]
    for panel in ("settings", "seen"):
        base = card[panel]["temperature 0"]
        assert base["games"] >= 192
        assert 0.35 <= base["success_rate"] <= 0.50
        assert base["admissible_rate"] >= 0.88


@pytest.mark.slow
@pytest.mark.parametrize("name", ["base", "stage1"])
def test_a_shipped_model_plays_at_its_stated_rate(name):
    """Same games and keys as the card: only float rounding of another machine may change a few episodes."""
    stated = json.loads(CARD.read_text())[name]
    two = sharding.make_mesh(jax.devices()[:2])  # eight take twice the processor time here
    measured = measure(quickstart.ASSETS / name, {"seen": make_tasks("seen", 192)}, two)
    for temperature in ("temperature 0", "temperature 0.4"):
        now, then = measured["seen"][temperature], stated["seen"][temperature]
        assert now["games"] == then["games"]
        assert abs(now["success_rate"] - then["success_rate"]) <= 2 * then["standard_error"]
        assert abs(now["admissible_rate"] - then["admissible_rate"]) <= 0.03
    assert abs(measured["skill_parse_rate"] - stated["skill_parse_rate"]) <= 0.05


@pytest.mark.slow
def test_what_a_skill_says_is_all_that_it_does():
    """The teacher of the shipped stage 1 on the panel, greedy: filler words and skills of other families leave it where
    it is without any, its own skill and the true one make the difference."""
    directory, config = quickstart.ASSETS / "stage1", quickstart.get_config()
    config.eval.teacher_games = 1  # room for a skill
    tasks, tokenizer = make_tasks("seen", 192), tok.load_tokenizer(directory)
    spec, params = hf.load(directory)
    sampler = sampler_of(config, spec, tokenizer, sharding.make_mesh(jax.devices()[:2]))
    sampler.load(params)
    world = World(AlfworldDomain("compact"), make_pool(FACTORY), config.env.max_steps, config.env.history)
    limits = config.rollout.max_response_tokens, config.rollout.max_prompt_tokens
    player = teacher.Player(sampler, tokenizer, world, Skills(config, tokenizer), 0.0, config.eval.seed, *limits)
    played = evaluate(
        sampler, tokenizer, world, tasks, temperature=0.0, max_tokens=limits[0], max_prompt_tokens=limits[1],
        seed=config.eval.seed,
    )  # fmt: skip
    measured = {
        kind: skill_evaluation.measure(kind, "all", player, tasks, played.own)
        for kind in ("self", "true", "wrong", "placebo")
    }
    bare = measured["self"]["student"]["success_rate"]
    assert 0.25 <= bare <= 0.40 and measured["self"]["parse_rate"] >= 0.97
    margin = {kind: result["margin"]["success_rate"] for kind, result in measured.items()}
    assert abs(margin["wrong"]) <= 0.05 and abs(margin["placebo"]) <= 0.05
    assert margin["true"] >= 0.40 and margin["self"] >= 0.35
