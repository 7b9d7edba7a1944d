"""A training state that was saved on some devices comes back on others, bit by bit."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from seed_jax import sharding
from seed_jax.models.spec import ModelSpec, init_params
from seed_jax.runtime.checkpoint import Checkpointer
from seed_jax.train.state import as_tree, from_tree, init_state, make_optimizer, state_shardings

SPEC = ModelSpec(vocab_size=64, d_model=16, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=4, d_ff=32)


def state_on(devices: int, seed: int, **sizes: int):
    mesh = sharding.make_mesh(jax.devices()[:devices], **sizes)
    optimizer, params = make_optimizer(0.9, 0.95, 1e-8, 0.1, 1.0), init_params(SPEC, jax.random.PRNGKey(seed))
    keep = {"keep_reference": True, "keep_teacher": True}
    places = state_shardings(optimizer, params, sharding.param_shardings(SPEC, mesh, "train"), mesh, **keep)
    state = init_state(params, optimizer, **keep)
    return jax.device_put(state.replace(step=state.step + 7 * seed), places)


@pytest.mark.parametrize(
    ("devices", "sizes"),
    [(4, {"fsdp": 4}), (8, {"fsdp": 2, "tensor": 4}), (2, {"fsdp": 1, "tensor": 2}), (1, {})],
    ids=["half the devices", "split over tensor", "two devices, tensor", "one device"],
)
def test_restored_on_other_devices(tmp_path, devices, sizes):
    saved, target = state_on(8, 1, fsdp=8), state_on(devices, 2, **sizes)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(3, as_tree(saved), {"memory": {"handoff": {"best": 0.5}, "skipped": 2.0}})
    with Checkpointer(tmp_path) as checkpoints:
        restored = checkpoints.restore_latest(as_tree(target))
    assert restored.meta == {"memory": {"handoff": {"best": 0.5}, "skipped": 2.0}}
    state = from_tree(restored.tree, target)
    for got, want, place in zip(*map(jax.tree.leaves, (state, saved, target)), strict=True):
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()
        assert got.sharding.is_equivalent_to(place.sharding, got.ndim)
