"""Packing: nothing lost, teacher and student aligned, clear errors."""

from __future__ import annotations

import numpy as np
import pytest

from seed_jax.train.packing import Sample, Shape, bucket, first_fit, pack, row_use

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
            )
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
