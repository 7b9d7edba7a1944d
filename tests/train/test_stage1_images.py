"""Stage 1 on rows with images: the packed loss is that of single examples, and learning lowers it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import quickstart
from seed_jax import images as images_lib
from seed_jax import sharding
from seed_jax.models.spec import init_params
from seed_jax.models.transformer import hidden_states
from seed_jax.train.packing import Sample, Shape
from seed_jax.train.stage1 import build_programs
from seed_jax.train.stage1_data import Batches, fold, packed, row_shape, with_images
from seed_jax.train.state import init_state, make_optimizer, state_shardings
from tests import tiny

SIZE = (56, 84)  # 2 x 3 cells
CELLS = 6
COUNTS = (2, 0, 1, 3, 1, 0, 2)  # images of each example


@pytest.fixture(scope="module")
def model():
    spec = tiny.vision_spec(len(tiny.vision_tokenizer()))
    return spec, init_params(spec, jax.random.PRNGKey(2))


@pytest.fixture(scope="module")
def samples(model) -> list[Sample]:
    """Words, and images between them."""
    spec, rng = model[0], np.random.default_rng(0)
    words = lambda: rng.integers(3, 600, rng.integers(2, 6)).tolist()  # noqa: E731
    made = []
    for count in COUNTS:
        prompt = words()
        for _ in range(count):
            place = [spec.vision.start_token, *[spec.vision.image_token] * CELLS, spec.vision.end_token]
            prompt += [*place, *words()]
        images = tuple(rng.integers(0, 256, (count, *SIZE, 3), np.uint8))
        made.append(Sample(prompt, rng.integers(3, 600, rng.integers(2, 9)).tolist(), images=images))
    return made


@pytest.fixture(scope="module")
def shape(model) -> Shape:
    return Shape(96, 24, 64, images=96, image_size=SIZE, vision=model[0].vision)


@pytest.fixture(scope="module")
def programs(model):
    spec, params = model
    config = quickstart.get_config()
    config.sft.row_tokens = 96
    optimizer = make_optimizer(0.9, 0.95, 1e-8, 0.01, 1.0)
    mesh = sharding.make_mesh(jax.devices()[:1], fsdp=1, tensor=1)
    placed = sharding.param_shardings(spec, mesh, "train")
    shardings = state_shardings(optimizer, params, placed, mesh, keep_reference=False)
    step, loss = build_programs(config, spec, mesh, optimizer, shardings)
    state = lambda: jax.device_put(init_state(params, optimizer, keep_reference=False), shardings)  # noqa: E731
    return SimpleNamespace(step=step, loss=loss, state=state)


@pytest.fixture(scope="module")
def plain(model):
    """(params, samples) -> (mean over examples of the mean loss of their replies, gradient): one example a row."""
    spec, _ = model

    @jax.jit
    def weighted(params, tokens, segments, positions, images, weights):
        hidden = hidden_states(params, spec, tokens, segments, positions, images=images)
        logits = hidden @ params.get("lm_head", params["embed"]).T
        nll = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
        return (nll * weights[:, 1:]).sum()

    graded = jax.jit(jax.value_and_grad(weighted))

    def value_and_grad(params, samples: list[Sample]):
        count = len(samples)
        tokens, segments = np.zeros((count, 64), np.int32), np.zeros((count, 64), np.int32)
        positions, weights = np.zeros((count, 64, 3), np.int32), np.zeros((count, 64), np.float32)
        images = np.zeros((count, max(COUNTS), *SIZE, 3), np.uint8)
        for row, sample in enumerate(samples):
            start, end = len(sample.prompt), len(sample.prompt) + len(sample.response)
            tokens[row, :end], segments[row, :end] = [*sample.prompt, *sample.response], 1
            positions[row, :end] = images_lib.positions(tokens[row, :end], sample.images, spec.vision)
            weights[row, start:end] = 1 / (end - start) / count
            for place, image in enumerate(sample.images):
                images[row, place] = image
        return graded(params, tokens, segments, positions, images, weights)

    return value_and_grad


def test_rows_have_room_for_the_images_of_the_fullest(samples, shape):
    """What is packed together does not depend on that."""
    batches = Batches(samples, shape, batch=4, epochs=2, rows_per_micro=2, seed=0)
    groups = [packed(batches.members(step), shape) for step in range(batches.steps)]
    assert batches.shape.images == max(sum(len(s.images) for s in row) for rows in groups for row in rows) > 2
    for step, rows in enumerate(groups):
        assert [list(map(id, row)) for row in rows] == [list(map(id, row)) for row in batches._packed(step)]
        found, _, used = batches.at(step, "example_mean")
        assert found.images.shape == (batches.micros, 2, batches.shape.images, *SIZE, 3)
        assert found.positions.shape == (batches.micros, 2, 96, 3) and found.images.dtype == np.uint8
        assert int(used) == -(-len(rows) // 2)
        flat = found.images.reshape(-1, *found.images.shape[2:])
        for row, images in zip(rows, flat, strict=False):
            seen = [image for sample in row for image in sample.images]
            np.testing.assert_array_equal(images[: len(seen)], np.array(seen).reshape(len(seen), *SIZE, 3))
            assert not images[len(seen) :].any()


def test_text_alone_has_rows_as_ever(samples, shape):
    batches = Batches(samples, shape, batch=4, epochs=1, rows_per_micro=2, seed=0)
    text = [sample._replace(images=(), prompt=[5, 6]) for sample in samples]
    plain_rows = Batches(text, shape, batch=4, epochs=1, rows_per_micro=2, seed=0).at(0, "example_mean")[0]
    assert plain_rows.images is None and plain_rows.positions.ndim == 3 and batches.shape.images > 0
    world = SimpleNamespace(read_size=lambda vision: None)
    sft = SimpleNamespace(row_tokens=96, scored_tokens_per_row=24)
    assert row_shape(sft, shape.vision, world) == Shape(96, 24, 64)
    seeing = row_shape(sft, shape.vision, SimpleNamespace(read_size=lambda vision: SIZE))
    assert seeing == shape and with_images(seeing, [[samples[:1]]]).images == COUNTS[0]


@pytest.mark.slow
def test_the_packed_loss_is_that_of_single_examples(model, programs, plain, samples, shape):
    _, params = model
    groups = packed(samples, shape)
    assert len(groups) < len(samples)
    value, grads = plain(params, samples)
    rows, weights = fold(groups, with_images(shape, [groups]), 1, len(groups), "example_mean")
    validated = programs.loss(params, jax.tree.map(lambda x: x[0], rows), weights[0])
    np.testing.assert_allclose(validated, value, rtol=1e-5)
    batches = Batches(samples, shape, batch=len(samples), epochs=1, rows_per_micro=2, seed=0)
    _, metrics = programs.step(programs.state(), *batches.at(0, "example_mean"), jnp.float32(1e-3))
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], optax.global_norm(grads), rtol=1e-4)
    assert float(optax.global_norm(grads["vision"])) > 1e-4, "the tower learns too"


@pytest.mark.slow
def test_the_loss_depends_on_each_picture(model, programs, samples, shape):
    _, params = model
    groups = packed(samples, shape)
    rows, weights = fold(groups, with_images(shape, [groups]), 1, len(groups), "example_mean")
    micro, weights = jax.tree.map(lambda x: x[0], rows), weights[0]
    before = float(programs.loss(params, micro, weights))
    for place in ((0, 0), (1, 0)):
        changed = micro.images.copy()
        changed[place] = 255 - changed[place]
        assert abs(float(programs.loss(params, micro.replace(images=changed), weights)) - before) > 1e-6, place
    empty = micro.images.copy()
    unused = [len(empty[row]) - sum(len(s.images) for s in group) for row, group in enumerate(groups)]
    for row, count in enumerate(unused):
        empty[row, empty.shape[1] - count :] = 200
    assert max(unused) > 0 and float(programs.loss(params, micro.replace(images=empty), weights)) == before


@pytest.mark.slow
def test_steps_on_one_batch_lower_its_loss(programs, samples, shape):
    batch = Batches(samples, shape, batch=len(samples), epochs=1, rows_per_micro=2, seed=0).at(0, "example_mean")
    state, losses = programs.state(), []
    for _ in range(6):
        state, metrics = programs.step(state, *batch, jnp.float32(1e-2))
        losses.append(float(metrics["loss"]))
    assert np.isfinite(losses).all() and all(b < a for a, b in itertools.pairwise(losses)), losses
