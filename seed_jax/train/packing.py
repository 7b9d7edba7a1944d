"""Turns -> fixed-shape rows. First fit in NumPy; the teacher version of a turn sits in the same row, in the same order.

Shapes: R rows, T student row tokens, U teacher row tokens, N scored tokens a row, S turns a row. `segments == 0` is
    padding, everywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from flax import struct

from seed_jax import images as images_lib
from seed_jax.models.vision_spec import VisionSpec
from seed_jax.runtime import multihost


class Sample(NamedTuple):
    """One turn: what was read, what was written, and (if it has a skill) what the teacher reads instead.

    logprobs: sampler log-probs of the response tokens, [n]; group, episode: ids of the task group and of the episode;
    step: number of the turn in its episode; given: whether its prompt holds a skill that the policy read;
    step_return: discounted reward from this turn on; anchor: id of what was observed before it, or several of them, for
    histories of growing length; span: the response tokens that may be distilled, [n] bool (None: all); value: of the
    skill, measured by second attempts; generated: not a turn but a skill that the policy wrote about the episode;
    images: of the prompt, which are those of the teacher's.
    """

    prompt: Sequence[int]
    response: Sequence[int]
    teacher_prompt: Sequence[int] | None = None
    logprobs: np.ndarray | None = None
    reward: float = 0.0
    invalid: bool = False
    group: int = 0
    episode: int = 0
    step: int = 0
    given: bool = False
    step_return: float = 0.0
    anchor: int | Sequence[int] = 0
    span: np.ndarray | None = None
    value: float = 0.0
    generated: bool = False
    images: tuple[np.ndarray, ...] = ()


@struct.dataclass
class Rows:
    """Packed token rows. `targets` are the indices of the scored tokens (0 = none), in the order of the turns."""

    tokens: Any  # [R, T] int32
    segments: Any  # [R, T] int32, 1.. per turn
    positions: Any  # [R, T] int32, from 0 in each segment; [R, T, 3] with images, see images.positions
    targets: Any  # [R, N] int32
    images: Any = None  # [R, I, height, width, 3] uint8, in the order of their places, then zeros; None: text alone


@struct.dataclass
class PackedBatch:
    """One iteration's turns. Arrays over tokens are [R, N], arrays over turns [R, S]; both describe the same rows."""

    student: Rows
    teacher: Rows | None
    mask: Any  # [R, N] bool, a scored token of a turn
    generated: Any  # [R, N] bool, a scored token of a written skill
    turn: Any  # [R, N] int32, the turn's slot in its row
    sampled: Any  # [R, N] float32, log-prob when it was sampled
    reward: Any  # [R, S] float32
    invalid: Any  # [R, S] bool
    group: Any  # [R, S] int32
    episode: Any  # [R, S] int32
    has_skill: Any  # [R, S] bool
    real: Any  # [R, S] bool, a turn (not padding)
    minis: Any  # [] int32, mini-batches that hold anything
    step: Any  # [R, S] int32, the turn's number in its episode
    given: Any  # [R, S] bool, the policy read a skill
    step_return: Any  # [R, S] float32
    anchor: Any  # [R, S, K] int32, K lengths of history
    value: Any  # [R, S] float32, measured value of the turn's skill, -1..1
    span: Any = None  # [R, N] bool, tokens that may be distilled; None: all


class Shape(NamedTuple):
    """Row geometry: all sizes in tokens but `turns` (turns a row) and `images` (images a row, 0 = text alone).

    image_size: height and width of every image; vision: of the model that reads them
    """

    row_tokens: int
    scored_tokens: int
    turns: int
    teacher_row_tokens: int = 0
    images: int = 0
    image_size: tuple[int, int] = (0, 0)
    vision: VisionSpec | None = None


def shape_of(pack, image_size: tuple[int, int] | None = None, vision: VisionSpec | None = None) -> Shape:
    """Of a run. pack: that section of its config; image_size: as the model reads them, None for text alone."""
    shape = Shape(pack.row_tokens, pack.scored_tokens_per_row, pack.max_turns_per_row, pack.teacher_row_tokens)
    if image_size is None:
        return shape
    return shape._replace(images=pack.max_images_per_row, image_size=image_size, vision=vision)


def first_fit(samples: Sequence[Sample], shape: Shape, open_rows: int = 64) -> list[list[int]]:
    """Which samples go together: each into the first of the last `open_rows` rows where both of its versions fit."""
    rows: list[list[int]] = []
    capacity = np.array([*shape[:5]])
    room = np.zeros((open_rows, len(capacity)), np.int64)  # ring: row i lives at i % open_rows
    for index, sample in enumerate(samples):
        need = _need(sample)
        if (need > capacity).any():
            raise ValueError(
                f"a turn needs (tokens, scored, turns, teacher tokens, images) {need.tolist()}, a row has "
                f"{capacity.tolist()}; raise pack.row_tokens, pack.scored_tokens_per_row, pack.teacher_row_tokens or "
                "pack.max_images_per_row"
            )
        fits = (room >= need).all(axis=1)
        if fits.any():
            ages = (np.arange(open_rows) - len(rows)) % open_rows  # smallest = oldest open row
            slot = int(np.where(fits, ages, open_rows).argmin())
            rows[len(rows) - open_rows + ages[slot]].append(index)
        else:
            slot = len(rows) % open_rows
            room[slot] = capacity
            rows.append([index])
        room[slot] -= need
    return rows


def _need(sample: Sample) -> np.ndarray:
    n = len(sample.response)
    teacher = len(sample.teacher_prompt) + n if sample.teacher_prompt is not None else 0
    return np.array([len(sample.prompt) + n, n, 1, teacher, len(sample.images)])


def bucket(count: int, unit: int) -> int:
    """Number of units (mini-batches) to allocate for `count` rows: a power of two, so that few shapes are ever
    compiled.

    What is allocated beyond the need costs memory but no time: the update runs only the mini-batches that hold
    something.
    """
    return 1 << (max(1, -(-int(count) // unit)) - 1).bit_length()


def pack(samples: Sequence[Sample], shape: Shape, rows_per_mini: int, with_teacher: bool) -> PackedBatch:
    """All samples -> one PackedBatch whose row count is a bucketed multiple of `rows_per_mini`.

    Of many hosts each packs its own samples; shapes and the number of mini-batches are those of the fullest.
    """
    members = first_fit(samples, shape)
    minis, anchors, spanned = multihost.agree_max(
        [
            -(-len(members) // rows_per_mini),
            max((np.size(s.anchor) for s in samples), default=1),
            any(sample.span is not None for sample in samples),
        ]
    )
    members += [[] for _ in range(bucket(minis, 1) * rows_per_mini - len(members))]
    groups = [[samples[i] for i in row] for row in members]
    student, mask = pack_rows(groups, shape)
    teacher = pack_rows(groups, shape, teacher=True)[0] if with_teacher else None
    count = len(groups)
    turn, sampled = np.zeros((count, shape.scored_tokens), np.int32), np.zeros((count, shape.scored_tokens), np.float32)
    turns = {
        name: np.zeros((count, shape.turns), dtype)
        for name, dtype in (
            ("reward", np.float32),
            ("invalid", bool),
            ("group", np.int32),
            ("episode", np.int32),
            ("step", np.int32),
            ("given", bool),
            ("step_return", np.float32),
            ("value", np.float32),
            ("has_skill", bool),
            ("real", bool),
        )
    }
    turns["anchor"] = np.zeros((count, shape.turns, anchors), np.int32)
    generated = np.zeros_like(mask)
    spans = mask.copy() if spanned else None
    for r, row in enumerate(groups):
        scored = 0
        for slot, sample in enumerate(row):
            span = slice(scored, scored + len(sample.response))
            turn[r, span] = slot
            if sample.logprobs is not None:
                sampled[r, span] = sample.logprobs
            if spans is not None and sample.span is not None:
                spans[r, span] = sample.span
            for name in ("reward", "invalid", "group", "episode", "step", "given", "step_return", "value", "anchor"):
                turns[name][r, slot] = getattr(sample, name)
            turns["has_skill"][r, slot] = sample.teacher_prompt is not None
            turns["real"][r, slot] = not sample.generated
            generated[r, span] = sample.generated
            scored = span.stop
    tokens = dict(mask=mask & ~generated, generated=generated, turn=turn, sampled=sampled, span=spans)
    return PackedBatch(student=student, teacher=teacher, minis=np.int32(minis), **tokens, **turns)


def pack_rows(groups: Sequence[Sequence[Sample]], shape: Shape, teacher: bool = False) -> tuple[Rows, np.ndarray]:
    """Writes each group of samples into one row -> (rows, scored mask [R, N]).

    In the teacher version a turn without a skill takes no tokens and no images but keeps its place among the scored
    ones, so column j of the teacher's targets always names the same response token as column j of the student's.
    """
    length = shape.teacher_row_tokens if teacher else shape.row_tokens
    blank = lambda *size: np.zeros((len(groups), *size), np.int32)  # noqa: E731
    rows = Rows(
        tokens=blank(length),
        segments=blank(length),
        positions=blank(length, 3) if shape.images else blank(length),
        targets=blank(shape.scored_tokens),
        images=np.zeros((len(groups), shape.images, *shape.image_size, 3), np.uint8) if shape.images else None,
    )
    mask = np.zeros((len(groups), shape.scored_tokens), bool)
    for r, row in enumerate(groups):
        start = scored = shown = 0
        for slot, sample in enumerate(row):
            prompt = sample.teacher_prompt if teacher else sample.prompt
            n = len(sample.response)
            if prompt is not None:
                middle, end = start + len(prompt), start + len(prompt) + n
                rows.tokens[r, start:middle], rows.tokens[r, middle:end] = prompt, sample.response
                rows.segments[r, start:end] = slot + 1
                if shape.images:
                    read = rows.tokens[r, start:end]
                    rows.positions[r, start:end] = images_lib.positions(read, sample.images, shape.vision)
                    for image in sample.images:
                        rows.images[r, shown], shown = image, shown + 1
                else:
                    rows.positions[r, start:end] = np.arange(end - start)
                rows.targets[r, scored : scored + n] = np.arange(middle, end)
                mask[r, scored : scored + n] = True
                start = end
            scored += n
    return rows, mask


def row_use(batch: PackedBatch, vision: VisionSpec | None = None) -> Counter:
    """used_row_tokens, teacher_tokens: of student and teacher rows, without padding; scored_tokens, taught_tokens: of
    these the ones that reach the vocabulary, seen_tokens, shown_tokens: that stand for a part of an image; row_tokens:
    of all student rows that hold anything, with padding."""
    used = batch.student.segments > 0
    scored = batch.mask | batch.generated
    counts = Counter(
        used_row_tokens=int(used.sum()),
        row_tokens=int(used.any(axis=1).sum()) * used.shape[1],
        scored_tokens=int(scored.sum()),
    )
    if batch.teacher is not None:
        taught = scored & np.take_along_axis(batch.has_skill, batch.turn, axis=1)
        counts.update(teacher_tokens=int((batch.teacher.segments > 0).sum()), taught_tokens=int(taught.sum()))
    for name, rows in (("seen_tokens", batch.student), ("shown_tokens", batch.teacher)) if vision else ():
        counts[name] = 0 if rows is None else int((rows.tokens == vision.image_token).sum())
    return counts
