"""Packing: nothing lost, teacher and student aligned, clear errors."""

from __future__ import annotations

import numpy as np
import pytest

from configs import base
from seed_jax import images
from seed_jax.train.packing import Sample, Shape, bucket, first_fit, pack, row_use, shape_of
from tests import tiny

SHAPE = Shape(row_tokens=40, scored_tokens=16, turns=4, teacher_row_tokens=56)


def samples(count=30, seed=0):
    rng = np.random.default_rng(seed)
    result = []
    for i in range(count):
        prompt, response = rng.integers(1, 99, rng.integers(3, 20)), rng.integers(100, 199, rng.integers(1, 8))
        teacher = None if i % 4 == 0 else [*prompt[:2], 55, 56, *prompt[2:]]
        result.append(
            Sample(
                prompt.tolist(), response.tolist(), teacher, -rng.random(len(response)), float(i), i % 3 == 0, i // 5, i
            )._replace(value=i / 7 - 2)
        )
    return result


def test_every_turn_is_there_once_with_its_own_fields():
    data = samples()
    batch = pack(data, SHAPE, rows_per_mini=4, with_teacher=True)
    seen = []
    for r, slot in zip(*np.nonzero(batch.real), strict=True):
        where = batch.student.segments[r] == slot + 1
        tokens = batch.student.tokens[r][where].tolist()
        index = int(batch.reward[r, slot])
        sample = data[index]
        seen.append(index)
        assert tokens == [*sample.prompt, *sample.response]
        assert batch.student.positions[r][where].tolist() == list(range(len(tokens)))
        scored = batch.mask[r] & (batch.turn[r] == slot)
        assert batch.student.tokens[r][batch.student.targets[r][scored]].tolist() == sample.response
        np.testing.assert_allclose(batch.sampled[r][scored], sample.logprobs, rtol=1e-6)
        assert batch.has_skill[r, slot] == (sample.teacher_prompt is not None)
        assert (batch.invalid[r, slot], batch.group[r, slot]) == (sample.invalid, sample.group)
        assert batch.value[r, slot] == np.float32(sample.value)
        if sample.teacher_prompt is not None:
            assert batch.teacher.tokens[r][batch.teacher.targets[r][scored]].tolist() == sample.response
            teacher = batch.teacher.tokens[r][batch.teacher.segments[r] == slot + 1].tolist()
            assert teacher == [*sample.teacher_prompt, *sample.response]
    assert sorted(seen) == list(range(len(data)))
    counts = row_use(batch)
    assert counts["used_row_tokens"] == sum(len(s.prompt) + len(s.response) for s in data)
    assert counts["scored_tokens"] == sum(len(s.response) for s in data)
    taught = [s for s in data if s.teacher_prompt is not None]
    assert counts["teacher_tokens"] == sum(len(s.teacher_prompt) + len(s.response) for s in taught)
    assert counts["taught_tokens"] == sum(len(s.response) for s in taught)
    assert 0.5 < counts["used_row_tokens"] / counts["row_tokens"] <= 1


def test_rows_are_padded_to_a_power_of_two_of_mini_batches():
    assert [bucket(n, 4) for n in (0, 1, 4, 5, 8, 9, 16, 17, 33)] == [1, 1, 1, 2, 2, 4, 4, 8, 16]
    batch = pack(samples(), SHAPE, rows_per_mini=4, with_teacher=False)
    used = int(np.any(batch.student.segments > 0, axis=1).sum())
    assert batch.teacher is None
    assert len(batch.student.tokens) == bucket(used, 4) * 4
    assert batch.minis == -(-used // 4)


def test_first_fit_respects_every_limit():
    data = samples(200, seed=3)
    for row in first_fit(data, SHAPE):
        members = [data[i] for i in row]
        assert len(members) <= SHAPE.turns
        assert sum(len(s.prompt) + len(s.response) for s in members) <= SHAPE.row_tokens
        assert sum(len(s.response) for s in members) <= SHAPE.scored_tokens
        teachers = [s for s in members if s.teacher_prompt is not None]
        assert sum(len(s.teacher_prompt) + len(s.response) for s in teachers) <= SHAPE.teacher_row_tokens


def test_a_turn_that_cannot_fit_names_the_fields():
    with pytest.raises(ValueError, match=r"pack\.row_tokens"):
        pack([Sample([1] * 50, [2])], SHAPE, 4, False)


def test_an_empty_batch_has_no_mini_batches():
    batch = pack([], SHAPE, rows_per_mini=4, with_teacher=True)
    assert batch.minis == 0
    assert not batch.real.any()
    assert batch.value.shape == batch.real.shape and batch.value.dtype == np.float32 and not batch.value.any()


def test_the_value_of_a_turn_is_none_unless_it_is_said():
    batch = pack([s._replace(value=Sample([1], [2]).value) for s in samples()], SHAPE, 4, False)
    assert batch.real.any() and not batch.value.any()


# -- images


VISION = tiny.vision_spec(300).vision
SEEING = Shape(60, 16, 4, 80, images=3, image_size=(28, 56), vision=VISION)


def seen(count=12, seed=0):
    """Turns with no image, one or two, of two tokens each; every fourth has no skill."""
    rng, made = np.random.default_rng(seed), []
    for number in range(count):
        images = tuple(rng.integers(1, 256, (number % 3, 28, 56, 3), np.uint8))
        prompt = [5, *[VISION.start_token, VISION.image_token, VISION.image_token, VISION.end_token, 6] * len(images)]
        teacher = None if number % 4 == 0 else [5, 7, 7, *prompt[1:]]
        made.append(Sample(prompt, [8, 9], teacher, reward=float(number), images=images))
    return made


def test_images_follow_their_turns():
    data = seen()
    batch = pack(data, SEEING, rows_per_mini=2, with_teacher=True)
    for rows, prompt_of in ((batch.student, lambda s: s.prompt), (batch.teacher, lambda s: s.teacher_prompt)):
        assert rows.images.shape == (*rows.tokens.shape[:1], 3, 28, 56, 3) and rows.images.dtype == np.uint8
        for r in range(len(rows.tokens)):
            members = [data[int(batch.reward[r, slot])] for slot in np.flatnonzero(batch.real[r])]
            shown = [image for sample in members if prompt_of(sample) is not None for image in sample.images]
            assert np.array_equal(rows.images[r, : len(shown)], np.array(shown).reshape(-1, 28, 56, 3))
            assert not rows.images[r, len(shown) :].any()
            assert (rows.tokens[r] == VISION.image_token).sum() == 2 * len(shown)
            for slot, sample in enumerate(members):
                if prompt_of(sample) is not None:
                    ids = [*prompt_of(sample), *sample.response]
                    found = rows.positions[r][rows.segments[r] == slot + 1]
                    assert np.array_equal(found, images.positions(ids, sample.images, VISION))
    assert sum(len(s.images) for s in data) > 3 and batch.student.positions.shape[2] == 3
    counts, taught = row_use(batch, VISION), [sample for sample in data if sample.teacher_prompt is not None]
    assert counts["seen_tokens"] == 2 * sum(len(sample.images) for sample in data)
    assert counts["shown_tokens"] == 2 * sum(len(sample.images) for sample in taught)


def test_rows_of_text_have_no_images():
    assert pack(samples(), SHAPE, 4, True).student.images is None


def test_too_many_images_for_a_row():
    with pytest.raises(ValueError, match=r"raise .* or pack\.max_images_per_row"):
        first_fit(seen(), SEEING._replace(images=1))


def test_the_shape_of_a_run():
    config = base.get_config().pack
    assert shape_of(config) == Shape(4096, 1024, 64, 8192)
    assert shape_of(config, (28, 56), VISION)[4:] == (config.max_images_per_row, (28, 56), VISION)
