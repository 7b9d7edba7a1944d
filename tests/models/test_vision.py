"""The vision tower and the language model behind it, against `transformers` and against themselves."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seed_jax import sharding
from seed_jax.models import transformer, vision
from seed_jax.models.logprobs import score_tokens
from seed_jax.models.spec import ModelSpec
from tests.models import seeing
from tests.models.seeing import SPEC

SIZE = (84, 140)
LAYOUT = 3, SIZE, 90  # places for images in a row, their size, tokens of a row
features = jax.jit(vision.features, static_argnums=1, static_argnames=("dtype", "remat", "mesh"))


@functools.partial(jax.jit, static_argnums=1)
def logits_of(params, spec, tokens, segments, positions, images=None):
    hidden = transformer.hidden_states(params, spec, tokens, segments, positions, images=images)
    return transformer.unembed(params, spec, hidden)


@pytest.fixture(scope="module")
def params():
    return seeing.make_params()


@pytest.fixture(scope="module")
def torch_model(tmp_path_factory):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    return seeing.torch_model(tmp_path_factory.mktemp("seeing") / "model")


# One window and less, exact windows, a rest in one direction and in both, one cell; (308, 308) is EZPoints.
@pytest.mark.parametrize("size", [(84, 84), (112, 224), (168, 168), (252, 252), (308, 308), (140, 364), (28, 28)])
def test_features_match_transformers(params, torch_model, size):
    import torch

    images = seeing.random_images(2, *size)
    got = features(params, SPEC, images)
    with torch.no_grad():
        expected = torch_model.model.visual(*seeing.pixels(images)).pooler_output.numpy()
    assert got.shape == (2, size[0] * size[1] // 28**2, SPEC.d_model) and np.std(expected) > 0.3
    np.testing.assert_allclose(got.reshape(expected.shape), expected, atol=1e-4, rtol=0)


def test_logits_match_transformers(params, torch_model):
    """Rows with two images, one and none; their unused places are zero."""
    import torch

    rng, images = np.random.default_rng(0), seeing.random_images(3, *SIZE)
    rows = [(seeing.prompt(rng, own), own) for own in (images[:2], images[2:], images[:0])]
    got = logits_of(params, SPEC, *seeing.pack([[row] for row in rows] + [[]], *LAYOUT))
    for row, (ids, own) in enumerate(rows):
        given = torch.tensor(ids, dtype=torch.long)[None]
        extra = {}
        if len(own):
            values, grids = seeing.pixels(own)
            extra = {"pixel_values": values, "image_grid_thw": grids, "mm_token_type_ids": (given == 90).int()}
        with torch.no_grad():
            expected = torch_model(input_ids=given, **extra).logits[0].numpy()
        assert np.std(expected) > 0.3
        np.testing.assert_allclose(got[row, : len(ids)], expected, atol=1e-4, rtol=0)


def test_packed_rows_equal_separate_rows(params):
    rng, images = np.random.default_rng(1), seeing.random_images(4, *SIZE)
    first, second, text, third = (
        (seeing.prompt(rng, own), own) for own in (images[:1], images[1:3], images[:0], images[3:])
    )
    packed = np.asarray(logits_of(params, SPEC, *seeing.pack([[first, text, second], [third], [], []], *LAYOUT)))
    alone = np.asarray(logits_of(params, SPEC, *seeing.pack([[first], [text], [second], [third]], *LAYOUT)))
    ends = np.cumsum([0] + [len(ids) for ids, _ in (first, text, second)])
    for number in range(3):
        length = ends[number + 1] - ends[number]
        np.testing.assert_allclose(packed[0, ends[number] :][:length], alone[number, :length], atol=1e-5, rtol=0)
    np.testing.assert_allclose(packed[1, : len(third[0])], alone[3, : len(third[0])], atol=1e-5, rtol=0)


def test_each_image_counts_where_it_stands(params):
    """Two images in the other order give other scores: nothing is lost in the splice."""
    rng, images = np.random.default_rng(2), seeing.random_images(2, *SIZE)
    ids = seeing.prompt(rng, images)
    rows = seeing.pack([[(ids, images)], [(ids, images[::-1])], [], []], *LAYOUT)
    first, second = np.asarray(logits_of(params, SPEC, *rows))[:2, : len(ids)]
    before = int(np.argmax(ids == seeing.IMAGE))
    np.testing.assert_array_equal(first[:before], second[:before])
    assert np.abs(first[before:] - second[before:]).max(axis=-1).min() > 1e-3


def test_text_through_a_model_that_sees_is_text(params):
    """Without images it is the same program as Qwen2's, whatever the shape of the positions of a text."""
    plain = dataclasses.replace(SPEC, model_type="qwen2", vision=None, rope_sections=())
    text_params = {name: leaf for name, leaf in params.items() if name != "vision"}
    tokens = np.arange(24, dtype=np.int32).reshape(2, 12)
    segments, positions = np.ones_like(tokens), np.tile(np.arange(12, dtype=np.int32), (2, 1))

    def program(spec: ModelSpec) -> str:
        run = functools.partial(transformer.hidden_states, spec=spec, segment_ids=segments, positions=positions)
        return str(jax.make_jaxpr(run)(text_params, tokens=tokens))

    assert program(SPEC) == program(plain)
    expected = logits_of(text_params, plain, tokens, segments, positions)
    threefold = np.repeat(positions[:, :, None], 3, axis=2)
    np.testing.assert_array_equal(logits_of(text_params, SPEC, tokens, segments, threefold), expected)


@pytest.fixture(scope="module")
def batch():
    """8 rows with an image and a text, and a place for an image that only the first row uses."""
    rng, images = np.random.default_rng(3), seeing.random_images(9, *SIZE)
    text = images[:0]
    parts = [[(seeing.prompt(rng, one[None]), one[None]), (seeing.prompt(rng, text), text)] for one in images[1:]]
    parts[0][1] = (seeing.prompt(rng, images[:1]), images[:1])
    return seeing.pack(parts, 2, SIZE, 64)


@functools.partial(jax.jit, static_argnames=("remat", "mesh", "dtype"))
def step(params, tokens, segments, positions, images, remat="none", mesh=None, dtype=None):
    targets = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    def loss(params):
        scores = score_tokens(
            params, SPEC, tokens, segments, positions, targets, remat=remat, mesh=mesh, images=images, dtype=dtype
        )
        return jnp.mean(scores.logp), scores.logp

    return jax.grad(loss, has_aux=True)(params)


@pytest.fixture(scope="module")
def expected_step(params, batch):
    return step(params, *batch)


def assert_close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4), got, want)


def test_every_weight_of_the_tower_has_a_gradient(expected_step):
    gradient, _ = expected_step
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient["vision"]):
        assert np.isfinite(leaf).all() and np.abs(leaf).max() > 1e-6, path
    # A key bias moves all scores of a query alike, which softmax does not see.
    assert np.abs(gradient["vision"]["layers"]["qkv"]).min(axis=(1, 3, 4)).max() > 0


def test_remat_gives_the_same_gradient(params, batch, expected_step):
    """Policy "dots"; "full" is in the test of eight devices."""
    assert_close(step(params, *batch, remat="dots"), expected_step)


@pytest.mark.parametrize("layout", ["train", "decode"])
def test_eight_devices_equal_one(params, batch, expected_step, layout):
    """With the mesh given to the model in the train layout, all left to the partitioner in the other."""
    mesh = sharding.make_mesh(fsdp=4, tensor=2)
    placed = sharding.reshard(params, SPEC, mesh, layout)
    rows = jax.device_put(batch, sharding.batch_sharding(mesh))
    gradient, logp = step(placed, *rows, remat="full", mesh=mesh if layout == "train" else None)
    assert_close((gradient, logp), expected_step)
    if layout == "train":
        pairs = zip(jax.tree.leaves(gradient["vision"]), jax.tree.leaves(placed["vision"]), strict=True)
        assert all(got.sharding.is_equivalent_to(weight.sharding, got.ndim) for got, weight in pairs)


def test_the_tower_is_split_over_the_mesh():
    mesh = sharding.make_mesh(fsdp=4, tensor=2)
    shard = lambda path: sharding.param_shardings(SPEC, mesh, path)["vision"]  # noqa: E731
    train, decode = shard("train"), shard("decode")
    assert tuple(train["layers"]["qkv"].spec) == (None, "fsdp", None, "tensor", None)
    assert tuple(train["layers"]["down"].spec) == (None, "tensor", "fsdp")
    assert tuple(train["patch"].spec) == (None, None, None, None, "fsdp")
    assert tuple(train["merger"]["in"].spec) == (None, "fsdp", "tensor")
    assert tuple(decode["layers"]["qkv"].spec) == (None, None, None, "tensor", None)
    assert not any(decode["patch"].spec)


def test_compute_dtype(params):
    images = seeing.random_images(1, 56, 56)
    exact = features(params, SPEC, images)
    rounded = features(params, SPEC, images, dtype=jnp.bfloat16)
    assert rounded.dtype == jnp.bfloat16
    error = np.asarray(rounded, np.float32) - exact
    assert 0 < np.sqrt(np.mean(error**2)) < 8 * 2.0**-8 * np.sqrt(np.mean(np.square(exact)))
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    assert jax.eval_shape(functools.partial(vision.features, spec=SPEC), half, images=images).dtype == jnp.bfloat16


def test_bad_arguments(params):
    with pytest.raises(ValueError, match=r"84 x 100 pixels is not of fitted size: multiples of 28"):
        vision.features(params, SPEC, seeing.random_images(1, 84, 100))
    with pytest.raises(ValueError, match="remat='some'"):
        vision.features(params, SPEC, seeing.random_images(1, 84, 84), remat="some")
