from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from seed_jax import sharding
from seed_jax.models import attention as attention_lib
from seed_jax.models import transformer
from seed_jax.models.logprobs import score_tokens, token_logprobs
from seed_jax.models.spec import ModelSpec, init_params, weights

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


@functools.partial(jax.jit, static_argnums=2, static_argnames=("remat", "attention", "dtype"))
def placed_step(params, rows, mesh, **options):
    """(gradient, (hidden states at tokens, log-probs, entropies)) with the mesh given to the model."""
    tokens, segments, _ = rows
    targets = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    def loss(params):
        scores = score_tokens(
            params,
            SPEC,
            *rows,
            targets,
            chunk=64,
            with_entropy=True,
            mesh=mesh,
            split_vocab=mesh is not None,
            **options,
        )
        hidden = transformer.hidden_states(params, SPEC, *rows, mesh=mesh, **options)
        hidden = jnp.where((segments != 0)[..., None], hidden, 0)
        total = jnp.mean(scores.logp) + 0.1 * jnp.mean(scores.entropy) + 1e-3 * jnp.mean(hidden**3)
        return total, (hidden, scores.logp, scores.entropy)

    return jax.grad(loss, has_aux=True)(params)


@pytest.mark.parametrize(("fsdp", "tensor", "remat"), [(8, 1, "full"), (4, 2, "none"), (2, 4, "dots"), (4, 2, "full")])
def test_the_model_on_a_mesh_equals_one_device(params, rows, fsdp, tensor, remat, monkeypatch):
    """Weights gathered layer by layer, vocabulary split over all devices; with full remat, rows in three pieces."""
    monkeypatch.setattr(transformer, "FFN_TOKENS", 64 // fsdp)
    assert transformer._ffn_pieces(8, 24, sharding.make_mesh(fsdp=fsdp, tensor=tensor)) == 3
    expected = placed_step(params, rows, None)
    mesh = sharding.make_mesh(fsdp=fsdp, tensor=tensor)
    got = placed_step(
        sharding.reshard(params, SPEC, mesh, "train"), jax.device_put(rows, sharding.batch_sharding(mesh)), mesh,
        remat=remat,
    )  # fmt: skip
    assert_close(got, expected)


def test_splash_on_a_mesh_equals_one_device(params, monkeypatch):
    monkeypatch.setattr(attention_lib, "SPLASH_BLOCK", 128)
    tokens = np.random.default_rng(1).integers(0, SPEC.vocab_size, (4, 256)).astype(np.int32)
    segments = np.repeat([1, 2, 0], [150, 96, 10])[None].repeat(4, 0).astype(np.int32)
    positions = np.concatenate([np.arange(150), np.arange(96), np.zeros(10)])[None].repeat(4, 0).astype(np.int32)
    rows = tokens, segments, positions
    mesh = sharding.make_mesh(fsdp=4, tensor=2)
    placed = sharding.reshard(params, SPEC, mesh, "train")
    got = placed_step(placed, rows, mesh, attention="splash", remat="full")
    assert_close(got, placed_step(params, rows, None))


def test_bfloat16_on_a_mesh_keeps_float32_gradients(params, rows):
    mesh = sharding.make_mesh(fsdp=4, tensor=2)
    placed = sharding.reshard(params, SPEC, mesh, "train")
    gradient, (hidden, logp, _) = placed_step(placed, rows, mesh, remat="full", dtype=jnp.bfloat16)
    _, (_, expected, _) = placed_step(params, rows, None, dtype=jnp.bfloat16)
    assert hidden.dtype == jnp.bfloat16 and logp.dtype == jnp.float32
    # Two roundings of bfloat16 apart: sums over devices are taken in another order.
    assert np.abs(logp - expected).max() < 0.05
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(gradient))
    for name, leaf in gradient["layers"].items():
        assert leaf.sharding.is_equivalent_to(placed["layers"][name].sharding, leaf.ndim), name


def test_layer_gradients_come_back_split(params):
    """A gathered weight is whole inside the layer and its gradient leaves reduce-scattered, like the parameter."""
    mesh = sharding.make_mesh(fsdp=8)
    layer = jax.tree.map(lambda leaf: leaf[0], sharding.reshard(params, SPEC, mesh, "train")["layers"])
    x = jax.device_put(np.random.default_rng(2).normal(size=(8, 32)).astype(np.float32), sharding.batch_sharding(mesh))

    def loss(layer, x):
        gathered = sharding.gather_layer(layer, weights(SPEC)["layers"], mesh, jnp.float32)
        return jnp.sum(jnp.tanh(x @ gathered["gate"]) ** 2)

    gradient = jax.jit(jax.grad(loss))(layer, x)
    expected = jax.grad(lambda gate: jnp.sum(jnp.tanh(x @ gate) ** 2))(np.asarray(layer["gate"]))
    np.testing.assert_allclose(gradient["gate"], expected, atol=1e-5)
    assert gradient["gate"].addressable_shards[0].data.shape == (4, 48)


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


def test_reshard_is_one_jitted_call(params):
    """The same request again compiles nothing, and no value passes through the host."""
    mesh = sharding.make_mesh(fsdp=4, tensor=2)
    train = sharding.reshard(params, SPEC, mesh, "train")
    sharding.reshard(train, SPEC, mesh, "decode", jnp.bfloat16)
    program = sharding._reshard_program(SPEC, mesh, "decode", jnp.bfloat16)
    compiled = program._cache_size()
    with jax.transfer_guard("disallow"):
        sharding.reshard(train, SPEC, mesh, "decode", jnp.bfloat16)
    assert program is sharding._reshard_program(SPEC, mesh, "decode", jnp.bfloat16)
    assert program._cache_size() == compiled == 1


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
