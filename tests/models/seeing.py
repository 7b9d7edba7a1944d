"""Tiny models that see, with weights of a size that shows in the result, and their twins in `transformers`."""

from __future__ import annotations

import functools

import jax
import numpy as np

from seed_jax import images as images_lib
from seed_jax.models import hf
from seed_jax.models.spec import ModelSpec, init_params
from seed_jax.models.vision_spec import VisionSpec

IMAGE, START, END = 90, 91, 92
# Deep enough for a scan, with two layers that see the whole image; 3 rows of windows at 308 pixels.
TOWER = VisionSpec(
    depth=7, d_model=32, num_heads=2, d_ff=40, full_layers=(2, 6), image_token=IMAGE, start_token=START, end_token=END
)
SPEC = ModelSpec(
    vocab_size=93, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=48, rope_theta=1e6,
    max_position=512, model_type="qwen2_5_vl", vision=TOWER, rope_sections=(1, 1, 2),
)  # fmt: skip


@functools.cache
def make_params(spec: ModelSpec = SPEC):
    rng = np.random.default_rng(5)
    initial = jax.jit(init_params, static_argnums=0)(spec, jax.random.key(0))
    return jax.tree.map(lambda leaf: leaf + 0.1 * rng.normal(size=leaf.shape).astype(np.float32), initial)


def torch_model(directory, spec: ModelSpec = SPEC):
    """The same weights in `transformers`, float32 on CPU."""
    import transformers

    hf.save(make_params(spec), spec, directory)
    model, report = transformers.AutoModelForImageTextToText.from_pretrained(
        directory, dtype="float32", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def pixels(images):
    """(pixel_values, image_grid_thw) of images [N, H, W, 3] by the processor of transformers."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    made = Qwen2VLImageProcessorPil(min_pixels=1, max_pixels=10**8)(list(images), return_tensors="pt")
    return made["pixel_values"], made["image_grid_thw"]


def random_images(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*shape, 3), dtype=np.uint8)


def prompt(rng: np.random.Generator, images) -> np.ndarray:
    """Ids of text with the images in it."""
    ids = rng.integers(0, 80, 5).tolist()
    for image in images:
        ids += [START, *[IMAGE] * images_lib.tokens_of(image, TOWER), END, *rng.integers(0, 80, 4).tolist()]
    return np.array(ids, np.int32)


def pack(parts, images: int, size: tuple[int, int], width: int):
    """Rows of segments [(ids, images)] -> tokens, segment_ids [B, T], positions [B, T, 3], images [B, I, H, W, 3]."""
    shape = (len(parts), width)
    tokens, segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros((*shape, 3), np.int32)
    seen = np.zeros((len(parts), images, *size, 3), np.uint8)
    for row, segs in enumerate(parts):
        start, used = 0, 0
        for number, (ids, own) in enumerate(segs, 1):
            place = slice(start, start + len(ids))
            tokens[row, place], segments[row, place] = ids, number
            positions[row, place] = images_lib.positions(ids, own, TOWER)
            seen[row, used : used + len(own)] = own
            start, used = start + len(ids), used + len(own)
    return tokens, segments, positions, seen
