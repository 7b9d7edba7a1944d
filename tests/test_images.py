"""Images on the host, against the image processor and the position index of transformers' Qwen2.5-VL."""

from __future__ import annotations

import numpy as np
import pytest

from seed_jax import images as images_lib
from seed_jax.models.vision_spec import MEAN, STD, VisionSpec

VISION = VisionSpec(
    depth=1, d_model=8, num_heads=2, d_ff=8, image_token=90, start_token=91, end_token=92, max_pixels=28 * 28 * 64
)


def image(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def processor():
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    return module.Qwen2VLImageProcessorPil(min_pixels=VISION.min_pixels, max_pixels=VISION.max_pixels)


def test_fitted_size_is_that_of_transformers():
    """Sides from a pixel up, over both limits of the area, and with exact halves of a cell."""
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    sides = (1, 3, 13, 14, 15, 27, 28, 41, 42, 55, 56, 70, 96, 98, 160, 223, 224, 252, 300, 308, 449, 701)
    sizes = [(height, width) for height in sides for width in sides if max(height, width) <= 200 * min(height, width)]
    assert len(sizes) > 450
    for size in sizes:
        expected = module.smart_resize(*size, 28, VISION.min_pixels, VISION.max_pixels)
        assert images_lib.fitted_size(*size, VISION) == expected, size


def test_a_strip_has_no_fitted_size():
    with pytest.raises(ValueError, match=r"2 x 401 pixels: a side is over 200 times the other"):
        images_lib.fitted_size(2, 401, VISION)


@pytest.mark.parametrize("size", [(96, 96), (300, 300), (50, 333), (20, 20), (168, 84)])
def test_fit_resizes_like_the_processor(processor, size):
    pytest.importorskip("PIL")
    from transformers.image_utils import SizeDict

    limits = SizeDict(shortest_edge=VISION.min_pixels, longest_edge=VISION.max_pixels)
    given = image(*size)
    expected = processor.resize(given.transpose(2, 0, 1), limits, 3, 28).transpose(1, 2, 0)
    fitted = images_lib.fit(given, VISION)
    assert fitted.dtype == np.uint8 and fitted.shape[:2] == images_lib.fitted_size(*size, VISION)
    np.testing.assert_array_equal(fitted, expected)
    assert images_lib.fit(fitted, VISION) is fitted


@pytest.mark.parametrize("size", [(84, 84), (112, 196)])
def test_patches_are_the_pixel_values_of_the_processor(processor, size):
    from seed_jax.models.vision import patches

    given = np.stack([image(*size, seed) for seed in range(2)])
    values = processor(list(given), return_tensors="np")["pixel_values"]
    frames = values.reshape(2, -1, 3, 2, 14, 14)  # image, patch, colour, frame, row, column
    np.testing.assert_array_equal(frames[:, :, :, 0], frames[:, :, :, 1])
    expected = frames[:, :, :, 0].transpose(0, 1, 4, 3, 2)
    np.testing.assert_allclose(patches(given, VISION), expected, atol=1e-6, rtol=0)


def test_mean_and_deviation_are_those_of_clip():
    utils = pytest.importorskip("transformers.image_utils")
    assert list(MEAN) == list(utils.OPENAI_CLIP_MEAN) and list(STD) == list(utils.OPENAI_CLIP_STD)


def prompt(rng: np.random.Generator, images: list[np.ndarray]) -> list[int]:
    """Ids with every image between its two tokens, and text of random length around them."""
    ids = rng.integers(0, 80, rng.integers(0, 6)).tolist()
    for one in images:
        ids += [VISION.start_token, *[VISION.image_token] * images_lib.tokens_of(one, VISION), VISION.end_token]
        ids += rng.integers(0, 80, rng.integers(0, 6)).tolist()
    return ids


def test_positions_are_the_index_of_transformers():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2_5_VLConfig(
        text_config={"vocab_size": 93, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1},
        vision_config={"depth": 1, "hidden_size": 8, "num_heads": 1},
    )
    with torch.device("meta"):
        model = transformers.Qwen2_5_VLModel(config)
    rng = np.random.default_rng(1)
    for sizes in ([], [(84, 84)], [(28, 140), (140, 56)], [(56, 56), (84, 196), (28, 28)]):
        images = [image(*size) for size in sizes]
        ids = np.array([*prompt(rng, images), 5])
        grids = torch.tensor([[1, height // 14, width // 14] for height, width in sizes])
        seen = torch.tensor(ids == VISION.image_token, dtype=torch.int32)[None]
        expected, _ = model.get_rope_index(torch.tensor(ids)[None], seen, grids if sizes else None)
        np.testing.assert_array_equal(images_lib.positions(ids, images, VISION), expected[:, 0].T)


def test_expand_puts_every_image_in_its_place():
    first, second = image(84, 84), image(28, 140)
    pad = VISION.image_token
    assert images_lib.expand([1, pad, 2, pad], [first, second], VISION) == [1, *[pad] * 9, 2, *[pad] * 5]
    assert images_lib.expand([1, 2], [], VISION) == [1, 2]


@pytest.mark.parametrize(("ids", "count"), [([1, 90, 2], 0), ([1, 2], 1), ([90, 90, 90], 2)])
def test_expand_states_both_numbers(ids, count):
    with pytest.raises(ValueError, match=rf"{ids.count(90)} places for images \(<image>\) and {count} images"):
        images_lib.expand(ids, [image(28, 28)] * count, VISION)


def test_no_text_stands_for_an_image_once_escaped():
    text = "see <image> and <image><image>"
    assert images_lib.PLACEHOLDER not in images_lib.escape(text)
    assert images_lib.escape("no image here") == "no image here"
