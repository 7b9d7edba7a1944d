"""The rows of stage 1 as token samples, and the batches of each optimizer step: a pure function of seed and step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from seed_jax.hindsight import dataset
from seed_jax.hindsight.records import RecordError
from seed_jax.images import tokens_of
from seed_jax.models.vision_spec import VisionSpec
from seed_jax.rollout import World
from seed_jax.train.packing import Rows, Sample, Shape, first_fit, pack_rows
from seed_jax.train.sft import encode_pairs

MAX_PER_ROW = 64  # examples in a packed row


class LengthError(ValueError):
    """An example does not fit a row; nothing is ever cut."""


def row_shape(sft, vision: VisionSpec | None, world: World) -> Shape:
    """The rows of stage 1. With images as many of them as its tokens can be; `with_images` makes that what they are."""
    shape = Shape(sft.row_tokens, sft.scored_tokens_per_row, MAX_PER_ROW)
    if (size := world.read_size(vision)) is None:
        return shape
    return shape._replace(images=sft.row_tokens, image_size=size, vision=vision)


def with_images(shape: Shape, packings: Sequence[Sequence[Sequence[Sample]]]) -> Shape:
    """The shape with room for the images of the fullest row: the vision tower reads empty places too."""
    most = max((sum(len(sample.images) for sample in row) for rows in packings for row in rows), default=0)
    return shape._replace(images=most)


def packed(samples: Sequence[Sample], shape: Shape) -> list[list[Sample]]:
    """The samples of each row."""
    return [[samples[i] for i in row] for row in first_fit(samples, shape)]


def samples_of(
    tokenizer,
    rows: Sequence[dict[str, Any]],
    shape: Shape,
    read_image: Callable[[str], np.ndarray] | None = None,
) -> list[Sample]:
    """Rows of the data set -> samples. Raises RecordError for images that are not those of the rows or of the model,
    LengthError, naming how long the longest is."""
    images = dataset.images_of(rows, read_image)
    for row, seen in zip(rows, images or (), strict=images is not None):
        _check_sizes(row, seen, shape)
    samples = encode_pairs(tokenizer, [(row["prompt"], row["response"]) for row in rows], images)
    total = [len(sample.prompt) + len(sample.response) for sample in samples]
    scored = [len(sample.response) for sample in samples]
    for field, limit, lengths in (
        ("sft.row_tokens", shape.row_tokens, total),
        ("sft.scored_tokens_per_row", shape.scored_tokens, scored),
    ):
        longest = int(np.argmax(lengths)) if lengths else 0
        if lengths and lengths[longest] > limit:
            of_images = _of_images(samples[longest], shape) if lengths is total else ""
            raise LengthError(
                f"{field} = {limit}: {sum(n > limit for n in lengths)} of {len(lengths)} examples are longer, the "
                f"longest ({rows[longest]['episode']}) has {lengths[longest]} tokens{of_images}; raise it, or make the "
                "data with a smaller hindsight.max_analysis_tokens"
            )
    return samples


def _of_images(sample: Sample, shape: Shape) -> str:
    if not sample.images:
        return ""
    tokens = sum(tokens_of(image, shape.vision) for image in sample.images)
    return f" ({tokens} of them of {len(sample.images)} images)"


def _check_sizes(row: dict[str, Any], images: Sequence[np.ndarray], shape: Shape) -> None:
    for name, image in zip(row.get("images", ()), images, strict=True):
        if image.shape[:2] != shape.image_size:
            there, wanted = (" x ".join(map(str, size)) for size in (image.shape[:2], shape.image_size))
            raise RecordError(
                f"row of {row['episode']}: {name} has {there} pixels, and the images of this config {wanted} as the "
                "model reads them; use the config that the data was made with"
            )


class Batches:
    """Which examples each optimizer step trains on: every epoch all of them once, in an order drawn anew.

    A step's examples are packed into rows; all steps have the same number of micro-batches allocated, `micros`, of
    which those that hold something come first.
    """

    def __init__(
        self, samples: Sequence[Sample], shape: Shape, *, batch: int, epochs: int, rows_per_micro: int, seed: int
    ):
        if not samples:
            raise ValueError("there is nothing to train on: train.jsonl has no rows")
        self.samples, self.shape, self.batch, self.seed = samples, shape, batch, seed
        self.rows_per_micro, self.epochs = rows_per_micro, epochs
        self.per_epoch = -(-len(samples) // batch)
        self.steps = epochs * self.per_epoch
        packings = [self._packed(step) for step in range(self.steps)]
        self.micros = max(-(-len(rows) // rows_per_micro) for rows in packings)
        self.shape = with_images(shape, packings)

    def members(self, step: int) -> list[Sample]:
        """The examples of a step (from 0). The last one of an epoch may have fewer."""
        epoch, place = divmod(step, self.per_epoch)
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.samples))
        return [self.samples[i] for i in order[place * self.batch : (place + 1) * self.batch]]

    def at(self, step: int, loss: str) -> tuple[Rows, np.ndarray, np.int32]:
        """(rows, weights, micro-batches that hold something); arrays are [M, r, ...]."""
        groups = self._packed(step)
        used = np.int32(-(-len(groups) // self.rows_per_micro))
        return *fold(groups, self.shape, self.micros, self.rows_per_micro, loss), used

    def _packed(self, step: int) -> list[list[Sample]]:
        return packed(self.members(step), self.shape)


def fold(
    groups: Sequence[Sequence[Sample]], shape: Shape, micros: int, rows_per_micro: int, loss: str
) -> tuple[Rows, np.ndarray]:
    """Rows [M, r, ...] of groups of samples and the share of every scored token in the loss, [M, r, N]."""
    padded = [*groups, *([] for _ in range(micros * rows_per_micro - len(groups)))]
    rows, _ = pack_rows(padded, shape)
    weights = token_weights(padded, shape, loss)
    return jax.tree.map(lambda x: x.reshape(micros, rows_per_micro, *x.shape[1:]), (rows, weights))


def token_weights(groups: Sequence[Sequence[Sample]], shape: Shape, loss: str) -> np.ndarray:
    """[R, N] weights that sum to 1. example_mean: the same for every example, spread over its tokens; token_mean: the
    same for every token."""
    lengths = [[len(sample.response) for sample in row] for row in groups]
    examples, tokens = sum(map(len, lengths)), sum(map(sum, lengths))
    weights = np.zeros((len(groups), shape.scored_tokens), np.float32)
    for r, row in enumerate(lengths):
        each = [1 / (n * examples) if loss == "example_mean" else 1 / tokens for n in row]
        weights[r, : sum(row)] = np.repeat(each, row)
    return weights
