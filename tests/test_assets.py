"""The shipped quickstart models load, fit the size they promise, and play as well as their card says."""

from __future__ import annotations

import json

import jax
import pytest

from configs import quickstart
from envs.alfworld.generate import make_tasks
from launch.quickstart_card import measure
from seed_jax import sharding

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
