"""Weights on their way to a decode mesh whose devices have another order, and the mesh itself."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from seed_jax import sharding
from seed_jax.models.spec import ModelSpec, init_params
from seed_jax.sampler import weights

SPEC = ModelSpec(vocab_size=64, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=48)
TORUS = [0, 1, 4, 5, 6, 7, 3, 2]  # an order in which neighbours follow each other


def mesh_of(order, shape) -> Mesh:
    devices = np.array(jax.devices())[order].reshape(shape)
    return Mesh(devices, sharding.MESH_AXES, axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize("tensor", [1, 2])
def test_weights_arrive_whatever_the_order_of_devices(tensor):
    params = init_params(SPEC, jax.random.key(0))
    trained = mesh_of(TORUS, (8, 1))
    placed = jax.device_put(params, sharding.param_shardings(SPEC, trained, "train"))
    decoding = mesh_of(range(8), (8 // tensor, tensor))
    loaded = weights.load(placed, SPEC, decoding, jnp.bfloat16)
    expected = weights.decode_weights(params, SPEC, jnp.bfloat16, join=tensor == 1)
    places = weights.decode_shardings(SPEC, decoding)
    jax.tree.map(lambda got, want: np.testing.assert_array_equal(got, want), loaded, expected)
    assert jax.tree.all(jax.tree.map(lambda got, place: got.sharding.is_equivalent_to(place, got.ndim), loaded, places))
    for view, row in zip(
        weights.local_view(loaded, weights.local_meshes(decoding)), decoding.devices.tolist(), strict=True
    ):
        assert {device for leaf in jax.tree.leaves(view) for device in leaf.sharding.device_set} == set(row)


def hosts(*owners: int, shape=None):
    """A stand-in for a mesh: devices that know their host only."""
    devices = np.empty(len(owners), object)
    devices[:] = [SimpleNamespace(process_index=owner, id=number) for number, owner in enumerate(owners)]
    shape = shape or (len(owners), 1)
    return SimpleNamespace(
        devices=devices.reshape(shape), shape=dict(zip(sharding.MESH_AXES, shape, strict=True)),
        axis_names=sharding.MESH_AXES, axis_types=(AxisType.Auto,) * 2,
    )  # fmt: skip


def rows(mesh: SimpleNamespace, tensor: int, monkeypatch) -> list[list[int]]:
    monkeypatch.setattr(weights, "Mesh", lambda devices, *_, **__: SimpleNamespace(devices=devices))
    return [[device.id for device in row] for row in weights.decode_mesh(mesh, tensor).devices]


def test_a_copy_of_the_model_stays_inside_a_host(monkeypatch):
    """v5e:4x4 has 2 x 2 chips a host, so four neighbours along a side belong to two hosts."""
    torus = hosts(0, 0, 1, 1, 1, 1, 0, 0)
    assert rows(torus, 4, monkeypatch) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert rows(torus, 2, monkeypatch) == [[0, 1], [2, 3], [4, 5], [6, 7]]  # whole already: the order stays
    torn = hosts(0, 0, 1, 1, 0, 0, 1, 1, shape=(2, 4))
    assert rows(torn, 0, monkeypatch) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    fine = hosts(0, 0, 1, 1, shape=(2, 2))
    assert weights.decode_mesh(fine) is fine


def test_a_copy_that_no_host_can_hold():
    with pytest.raises(ValueError, match=r"mesh\.decode_tensor \(or mesh\.tensor\) = 4 .* 4 devices on 2 hosts"):
        weights.decode_mesh(hosts(0, 0, 1, 1), 4)
