"""The plan of the cache: sizes by hand, and what a config asks for."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from configs import alfworld, quickstart
from seed_jax import config as config_lib
from seed_jax.models.spec import ModelSpec
from seed_jax.sampler.decode import cache_shapes
from seed_jax.sampler.rooms import (
    bytes_a_column,
    check_plan,
    fitting_room,
    grown_room,
    make_room,
    plan_text,
    rooms_of,
    with_bucket,
)

QWEN25_3B = ModelSpec(
    vocab_size=151936, d_model=2048, num_layers=36, num_heads=16, num_kv_heads=2, head_dim=128, d_ff=11008
)


def test_a_column_is_what_the_cache_holds_of_a_token():
    assert bytes_a_column(QWEN25_3B, "bfloat16") == 36 * 1024
    shapes = cache_shapes(QWEN25_3B, 3, 100)
    assert sum(np.prod(shape) for layer in shapes for shape in layer) * 2 == 3 * 100 * 36 * 1024


def test_rooms_of_a_config():
    acting, analysis = rooms_of(alfworld.get_config("seed"))
    assert (acting.slots, acting.prompt_tokens, acting.reply_tokens) == (64, 2048 + 256, 512)
    assert acting.columns == 3 * 1024 and analysis.columns == 16384 + 256 + 8
    assert (analysis.slots, analysis.prompt_tokens, analysis.reply_tokens) == (8, 16384, 256)
    (only,) = rooms_of(quickstart.get_config("grpo"))
    assert (only.prompt_tokens, only.reply_tokens) == (140, 20)
    given = rooms_of(quickstart.get_config("skill_grpo"))  # the policy reads a skill in its prompt
    assert [room.prompt_tokens for room in given] == [180]


@pytest.mark.parametrize(
    ("method", "changes", "tokens"),
    [
        ("seed", {"eval.teacher_games": 0}, 140),  # only a teacher reads the skills, and it writes nothing
        ("seed", {"eval.teacher_games": 1}, 180),  # the teacher plays some games of the panel
        ("seed", {"eval.teacher_games": 0, "hindsight.second_attempts": 0.25}, 180),
        ("grpo", {"eval.teacher_games": 48}, 140),  # it has no skills
        ("skill_grpo", {"eval.teacher_games": 0}, 180),
    ],
)
def test_a_prompt_has_room_for_a_skill_only_where_the_policy_reads_one(method, changes, tokens):
    config = quickstart.get_config(method)
    config.update_from_flattened_dict(changes)
    assert rooms_of(config)[0].prompt_tokens == tokens


def test_a_wider_bucket_widens_a_room():
    room = make_room("acting", 8, 140, 20, 32)
    assert room.columns == 168 and with_bucket(room, 32) == room
    assert with_bucket(room, 128).columns == 256


def test_plan_in_words():
    rooms = [make_room("acting", 64, 2048, 512, 128), make_room("analysis", 7, 16384, 4096, 128)]
    first, second, third = plan_text(rooms, QWEN25_3B, "bfloat16", 2).splitlines()
    acting, analysis = 64 * 2568 * 36864 / 1e9, 8 * 20488 * 36864 / 1e9  # four slots on each of two replicas
    assert f"{acting + analysis:.3f} GB on this host, 2 replicas" in first
    assert "64 slots of   2568 columns (2048 + 512 tokens)" in second and f"{acting:.3f} GB" in second
    assert "8 slots of  20488 columns (16384 + 4096 tokens)" in third and f"{analysis:.3f} GB" in third


@pytest.mark.parametrize(("gigabytes", "fits"), [(13.0, True), (6.0, False), (None, True)])
def test_a_plan_beyond_the_device_is_refused(gigabytes, fits):
    statistics = None if gigabytes is None else {"bytes_limit": gigabytes * 1e9}
    device = SimpleNamespace(memory_stats=lambda: statistics)
    mesh = SimpleNamespace(devices=np.array([[device, device]]), shape={"tensor": 2})
    rooms = [make_room("acting", 128, 2048, 512, 128)]  # 12.1 GB, half on each device of a replica
    if fits:
        check_plan(rooms, QWEN25_3B, "bfloat16", [mesh])
    else:
        with pytest.raises(ValueError, match=r"needs 6\.1 GB on each device, which has 6\.0 GB; lower rollout\.batch"):
            check_plan(rooms, QWEN25_3B, "bfloat16", [mesh])


def test_the_room_follows_from_the_request():
    rooms = [make_room("long", 2, 60, 20), make_room("short", 8, 24, 12)]
    assert fitting_room(rooms, 24, 12).name == "short" and fitting_room(rooms, 24, 13).name == "long"
    assert [grown_room(prompt, 8, 4, 16, 8).columns for prompt in (1, 48, 49, 200)] == [64, 64, 128, 256]


def test_a_run_needs_a_slot_for_analysis():
    config = quickstart.get_config()
    config.model.init = "somewhere"
    config.rollout.analysis_batch = 0
    with pytest.raises(config_lib.ConfigError, match=r"rollout\.analysis_batch"):
        config_lib.check(config)
