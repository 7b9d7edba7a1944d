from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from seed_jax import sharding
from seed_jax.models.logprobs import token_logprobs
from seed_jax.models.spec import ModelSpec, init_params

SPEC = ModelSpec(vocab_size=91, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=48)


@pytest.fixture(scope="module")
def params():
    return init_params(SPEC, jax.random.key(0))


@pytest.fixture(scope="module")
def rows():
    """tokens, segment_ids, positions [8, 24]: two segments and some padding a row."""
    tokens = np.random.default_rng(0).integers(0, SPEC.vocab_size, (8, 24)).astype(np.int32)
    segments = np.repeat([1, 2, 0], [11, 9, 4])[None].repeat(8, 0).astype(np.int32)
    positions = np.concatenate([np.arange(11), np.arange(9), np.zeros(4)])[None].repeat(8, 0).astype(np.int32)
    return tokens, segments, positions


def assert_close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5), got, want)


@jax.jit
@functools.partial(jax.value_and_grad, has_aux=True)
def step(params, rows):
    logp = token_logprobs(params, SPEC, *rows, chunk=64)
    return jnp.mean(logp), logp


@pytest.mark.parametrize(
    ("layout", "fsdp", "tensor"),
    [("train", 8, 1), ("train", 4, 2), ("train", 2, 4), ("decode", 4, 2), ("decode", 1, 8)],
)
def test_eight_devices_equal_one(params, rows, layout, fsdp, tensor):
    (_, expected), expected_gradient = step(params, rows)
    mesh = sharding.make_mesh(fsdp=fsdp, tensor=tensor)
    placed = sharding.reshard(params, SPEC, mesh, layout)
    assert all(len(leaf.sharding.device_set) == 8 for leaf in jax.tree.leaves(placed))
    (_, got), gradient = step(placed, jax.device_put(rows, sharding.batch_sharding(mesh)))
    assert_close(got, expected)
    assert_close(gradient, expected_gradient)


def test_layouts_and_fall_back_to_replication():
    mesh = sharding.make_mesh(fsdp=2, tensor=4)
    train = jax.tree.map(lambda s: s.spec, sharding.param_shardings(SPEC, mesh, "train"))
    assert train["layers"]["q"] == PartitionSpec(None, "fsdp", "tensor", None)
    assert train["layers"]["k"] == PartitionSpec(None, "fsdp", None, None)  # 2 kv heads on 4 devices
    assert train["layers"]["down"] == PartitionSpec(None, "tensor", "fsdp")
    assert train["embed"] == PartitionSpec(None, "fsdp")  # a vocabulary of 91 on 4 devices
    decode = jax.tree.map(lambda s: s.spec, sharding.param_shardings(SPEC, mesh, "decode"))
    assert decode["layers"]["q"] == PartitionSpec(None, None, "tensor", None)
    assert decode["layers"]["attn_norm"] == PartitionSpec(None, None)
    with pytest.raises(ValueError, match=r"layout='serve'.*train, decode"):
        sharding.param_shardings(SPEC, mesh, "serve")


def test_reshard_moves_and_casts(params):
    mesh = sharding.make_mesh(fsdp=4, tensor=2)
    train = sharding.reshard(params, SPEC, mesh, "train")
    assert train["layers"]["gate"].addressable_shards[0].data.shape == (2, 8, 24)
    decode = sharding.reshard(train, SPEC, mesh, "decode", jnp.bfloat16)
    assert decode["layers"]["gate"].addressable_shards[0].data.shape == (2, 32, 24)
    for leaf, original in zip(jax.tree.leaves(decode), jax.tree.leaves(params), strict=True):
        assert leaf.dtype == jnp.bfloat16
        np.testing.assert_array_equal(leaf, original.astype(jnp.bfloat16))


def test_one_device(params):
    mesh = sharding.make_mesh(jax.devices()[:1])
    assert dict(mesh.shape) == {"fsdp": 1, "tensor": 1}
    jax.tree.map(np.testing.assert_array_equal, sharding.reshard(params, SPEC, mesh, "train"), params)


@pytest.mark.parametrize(
    ("sizes", "expected"), [({}, (8, 1)), ({"tensor": 2}, (4, 2)), ({"fsdp": 2, "tensor": -1}, (2, 4))]
)
def test_mesh_sizes(sizes, expected):
    assert tuple(sharding.make_mesh(**sizes).shape.values()) == expected


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"fsdp": 3}, "does not use 8 devices"),
        ({"tensor": 3}, "does not use 8 devices"),
        ({"tensor": 16}, "does not use 8 devices"),
        ({"fsdp": 0}, "fsdp=0"),
        ({"fsdp": -1, "tensor": -1}, "both -1"),
    ],
)
def test_bad_mesh_sizes(sizes, message):
    with pytest.raises(ValueError, match=message):
        sharding.make_mesh(**sizes)
