"""The update with images: packing, micro-batches and devices change nothing, and the tower learns."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seed_jax import sharding
from seed_jax.models.spec import init_params
from seed_jax.train import dumps
from seed_jax.train.factors import choices
from seed_jax.train.packing import Sample, Shape, pack
from seed_jax.train.state import frozen, init_state, state_shardings
from seed_jax.train.update import build_optimizer, build_update, hyper
from tests import tiny
from tests.updating import make_config

WORDS = 40
SPEC = dataclasses.replace(tiny.vision_spec(WORDS), vision=dataclasses.replace(
    tiny.vision_spec(WORDS).vision, image_token=WORDS - 1, start_token=WORDS - 2, end_token=WORDS - 3
))  # fmt: skip
SIZE, CELLS = (56, 56), 4
SHAPE = Shape(48, 16, 3, 64, images=3, image_size=SIZE, vision=SPEC.vision)


@pytest.fixture(scope="module")
def weights():
    params = init_params(SPEC, jax.random.PRNGKey(1))
    return {**params, "embed": 8.0 * params["embed"]}


def samples(count: int = 16, seed: int = 0) -> list[Sample]:
    """Half of the turns show an image, every third one has no skill."""
    rng = np.random.default_rng(seed)
    draw = lambda low, high: rng.integers(1, WORDS - 3, rng.integers(low, high)).tolist()  # noqa: E731
    made = []
    for i in range(count):
        images = tuple(rng.integers(0, 256, (i % 2, *SIZE, 3), np.uint8))
        place = [WORDS - 2, *[WORDS - 1] * CELLS, WORDS - 3] * len(images)
        before, after, response, hint = draw(1, 4), draw(1, 4), draw(1, 5), draw(1, 5)
        prompt = [*before, *place, *after]
        teacher = [*before, *hint, *place, *after] if i % 3 else None
        logprobs = -rng.uniform(2, 4, len(response)).astype(np.float32)
        reward = 10.0 * (i % 8 in (1, 2, 5))
        made.append(Sample(prompt, response, teacher, logprobs, reward, False, i // 8, i // 2, images=images))
    return made


def updated(weights, shape: Shape = SHAPE, devices: int = 1, rows: int = 8, micros: int = 1, **changes):
    """(state, metrics) after one update on the same turns, in one mini-batch or more of one packing."""
    config = make_config(pack__rows_per_micro=rows, pack__micros_per_mini=micros, **changes)
    mesh, optimizer, keep = sharding.make_mesh(jax.devices()[:devices]), build_optimizer(config), choices(config)
    keep = {"keep_reference": keep.needs_reference, "keep_teacher": keep.keeps_teacher}
    places = sharding.param_shardings(SPEC, mesh, "train")
    places = state_shardings(optimizer, weights, places, mesh, **keep)
    state = jax.device_put(init_state(weights, optimizer, **keep), places)
    batch = pack(samples(), shape, rows * micros, True)
    numbers = hyper(config) | {"lr": jnp.float32(0.01)}
    state, metrics = build_update(config, SPEC, mesh, places)(state, batch, numbers)
    assert int(batch.minis) == 1
    return jax.device_get(state), {name: float(value) for name, value in metrics.items()}


@pytest.fixture(scope="module")
def reference(weights):
    return updated(weights)


def close(one, other) -> None:
    for left, right in zip(jax.tree.leaves(one[0].params), jax.tree.leaves(other[0].params), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5, rtol=1e-5)
    for name, value in one[1].items():
        assert value == pytest.approx(other[1][name], abs=1e-5, rel=1e-5), name


def test_the_tower_learns(reference, weights):
    state, metrics = reference
    assert metrics["update/skipped_steps"] == 0 and metrics["opd/gap_size"] > 0
    moved = jax.tree.map(lambda new, old: float(np.abs(new - old).max()), state.params["vision"], weights["vision"])
    assert all(change > 0 for change in jax.tree.leaves(moved))


@pytest.mark.slow
def test_a_frozen_tower(weights):
    """With weight decay, which would move it without a gradient."""
    state, metrics = updated(weights, model__freeze_vision=True, optim__weight_decay=0.1)
    for new, old in zip(jax.tree.leaves(state.params["vision"]), jax.tree.leaves(weights["vision"]), strict=True):
        assert np.array_equal(new, old)
    assert metrics["update/grad_norm"] > 0 and not np.array_equal(state.params["embed"], weights["embed"])


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"rows": 2, "micros": 4}, {"devices": 2}], ids=str)
def test_micro_batches_and_devices_change_nothing(reference, weights, changes):
    close(updated(weights, **changes), reference)


@pytest.mark.slow
def test_packed_is_unpacked(reference, weights):
    """Every turn alone in its row, with its own image."""
    close(updated(weights, SHAPE._replace(turns=1, images=1), rows=16), reference)


def test_a_dump_keeps_images(tmp_path):
    config = make_config(pack__rows_per_micro=8, pack__micros_per_mini=1)
    batch = pack(samples(), SHAPE, 8, True)
    again = dumps.load(dumps.save(tmp_path, config, 1, batch, {"lr": 0.1}, {})).batch
    for which in ("student", "teacher"):
        before, after = getattr(batch, which), getattr(again, which)
        assert after.images.dtype == np.uint8 and np.array_equal(after.images, before.images)
        assert np.array_equal(after.positions, before.positions)


def test_a_frozen_copy_keeps_norms_and_biases(weights):
    copy = frozen(weights, "bfloat16")["vision"]
    kept = {
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(copy)
        if leaf.dtype != "bfloat16"
    }
    assert kept and all("norm" in name or "bias" in name for name in kept)
    assert copy["layers"]["qkv"].dtype == "bfloat16" and copy["layers"]["qkv_bias"].dtype == "float32"
