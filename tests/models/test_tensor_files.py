"""Shards are filled in order, and an index says where everything is."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from seed_jax.models import tensor_files


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 100))
def test_shards_keep_the_order_and_the_limit(sizes, limit):
    named = {f"t{number:02d}": size for number, size in enumerate(sizes)}
    shards = tensor_files.plan_shards(named, limit)
    assert [name for shard in shards for name in shard] == list(named)
    totals = [sum(named[name] for name in shard) for shard in shards]
    assert all(total <= limit or len(shard) == 1 for total, shard in zip(totals, shards, strict=True))
    # No shard could have taken the first tensor of the next one.
    assert all(total + named[after[0]] > limit for total, after in zip(totals, shards[1:], strict=False))


def test_shard_size_must_be_positive():
    with pytest.raises(ValueError, match="max_shard_bytes=0"):
        tensor_files.plan_shards({"a": 1}, 0)


def test_write_one_shard_at_a_time_and_read_slices(tmp_path):
    tensors = {name: np.arange(12, dtype=np.float32).reshape(3, 4) + number for number, name in enumerate("abcde")}
    asked: list[tuple[str, int]] = []

    def value(name: str) -> np.ndarray:
        asked.append((name, len(list(tmp_path.iterdir()))))
        return tensors[name]

    files = tensor_files.write(tmp_path, {name: 48 for name in tensors}, value, 100)
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert files == [*shards, tensor_files.INDEX_FILE]
    assert asked == [("a", 0), ("b", 0), ("c", 1), ("d", 1), ("e", 2)]
    index = json.loads((tmp_path / tensor_files.INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == 5 * 48
    for name, file in index["weight_map"].items():
        np.testing.assert_array_equal(safetensors.numpy.load_file(tmp_path / file)[name], tensors[name])
    found = tensor_files.scan(tmp_path)
    assert found["d"] == (tmp_path / shards[1], "d", (3, 4), "F32")
    part = tensor_files.read(found["d"], (slice(1, 3), slice(0, 2)))
    np.testing.assert_array_equal(part, tensors["d"][1:, :2])


def test_a_single_file_has_no_index_and_wins_over_one(tmp_path):
    one = np.ones(2, np.float32)
    assert tensor_files.write(tmp_path, {"a": 8}, lambda _: one, 8) == [tensor_files.WEIGHTS_FILE]
    (tmp_path / tensor_files.INDEX_FILE).write_text("{}")
    assert set(tensor_files.scan(tmp_path)) == {"a"}


def test_weights_are_as_readable_as_any_new_file(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    tensor_files.write(folder, {"a": 8}, lambda _: np.ones(2, np.float32), 8)
    (folder / "plain").write_text("")
    assert (folder / tensor_files.WEIGHTS_FILE).stat().st_mode == (folder / "plain").stat().st_mode
