"""Round trips are bitwise; damage to the newest checkpoint is noticed, reported and survived."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from seed_jax.runtime.checkpoint import Checkpointer, CheckpointError


def make_tree(seed: int) -> dict:
    weights = jax.random.normal(jax.random.key(seed), (60, 40))
    params = {"kernel": weights.at[0, 0].set(jnp.nan).at[0, 1].set(-0.0), "bias": jnp.ones((5,), jnp.bfloat16)}
    optimizer = optax.adam(1e-3).init(params)
    return {"params": params, "optimizer": optimizer, "key": jax.random.PRNGKey(seed), "flags": jnp.array([True])}


def abstract(tree: dict) -> dict:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)


def assert_bitwise_equal(actual: dict, expected: dict) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert left.dtype == right.dtype and left.shape == right.shape
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()


def save_steps(directory: Path, *steps: int, keep: int = 3) -> None:
    with Checkpointer(directory, keep) as checkpointer:
        for step in steps:
            checkpointer.save(step, make_tree(step), {"step": step})


def largest_file(directory: Path) -> Path:
    return max((path for path in directory.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def truncate(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_round_trip_is_bitwise(tmp_path):
    tree, meta = make_tree(3), {"iteration": 3, "seen": ["a", "b"], "score": 0.1}
    with Checkpointer(tmp_path / "new" / "checkpoints") as checkpointer:
        assert checkpointer.restore_latest(abstract(tree)) is None
        checkpointer.save(3, tree, meta)
    with Checkpointer(tmp_path / "new" / "checkpoints") as checkpointer:
        for target in (abstract(tree), tree):
            restored = checkpointer.restore_latest(target)
            assert (restored.step, restored.meta) == (3, meta)
            assert_bitwise_equal(restored.tree, tree)


def test_keeps_the_newest_and_a_step_is_saved_once(tmp_path):
    save_steps(tmp_path, 1, 2, 5, 5, 9, keep=2)
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.steps() == [5, 9]
        checkpointer.save(9, make_tree(0), {"step": "another"})
        assert checkpointer.restore_latest(abstract(make_tree(0))).meta == {"step": 9}


@pytest.mark.parametrize(
    "damage",
    [
        lambda step: largest_file(step).unlink(),
        lambda step: largest_file(step).write_bytes(b""),
        lambda step: truncate(largest_file(step)),
        lambda step: flip_a_bit(largest_file(step)),
        lambda step: (step / "meta" / "metadata").unlink(),
        lambda step: (step / "state" / "manifest.ocdbt").unlink(),
        lambda step: [path.unlink() for path in step.rglob("*") if path.is_file()],
    ],
    ids=["deleted", "emptied", "truncated", "bit flipped", "no meta", "no manifest", "all files gone"],
)
def test_damaged_newest_checkpoint_falls_back(tmp_path, caplog, damage: Callable[[Path], object]):
    save_steps(tmp_path, 5, 10)
    damage(tmp_path / "10")
    with Checkpointer(tmp_path) as checkpointer, caplog.at_level(logging.WARNING, "seed_jax"):
        restored = checkpointer.restore_latest(abstract(make_tree(0)))
        assert (restored.step, restored.meta) == (5, {"step": 5})
        assert_bitwise_equal(restored.tree, make_tree(5))
        (warning,) = [record.getMessage() for record in caplog.records if record.name.startswith("seed_jax")]
        assert str(tmp_path / "10") in warning and "cannot be read" in warning and "step 5" in warning
        # The run repeats the lost steps and saves them as if nothing had happened, even at other intervals.
        checkpointer.save(7, make_tree(7), {"step": 7})
        checkpointer.save(10, make_tree(10), {"step": 10})
        checkpointer.wait()
        assert checkpointer.steps() == [5, 7, 10]
        assert_bitwise_equal(checkpointer.restore_latest(abstract(make_tree(0))).tree, make_tree(10))


def test_unfinished_checkpoint_is_no_checkpoint(tmp_path):
    save_steps(tmp_path, 5)
    unfinished = tmp_path / "10.orbax-checkpoint-tmp-123"
    unfinished.mkdir()
    (unfinished / "part").write_text("x")
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore_latest(abstract(make_tree(0))).step == 5
        checkpointer.save(10, make_tree(10), {})
    assert Checkpointer(tmp_path).steps() == [5, 10]


def test_nothing_restorable_is_an_error_that_deletes_nothing(tmp_path):
    save_steps(tmp_path, 5, 10)
    other_model = make_tree(0)
    other_model["params"]["kernel"] = jnp.zeros((60, 41))
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(CheckpointError) as error:
            checkpointer.restore_latest(abstract(other_model))
        assert checkpointer.steps() == [5, 10]
    message = str(error.value)
    assert str(tmp_path) in message and "step 10: " in message and "step 5: " in message and "--overwrite" in message


# -- read-only: a part of the tree -------------------------------------------------------------------------------------


def files(directory: Path) -> dict:
    return {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in directory.rglob("*")}


def test_part_of_the_tree_from_a_directory_that_is_only_read(tmp_path):
    save_steps(tmp_path, 5, 10)
    (tmp_path / "11.orbax-checkpoint-tmp-123").mkdir()
    before, tree = files(tmp_path), make_tree(5)
    with Checkpointer(tmp_path, read_only=True) as checkpointer:
        assert checkpointer.steps() == [5, 10]
        restored = checkpointer.restore_part(5, abstract({"params": tree["params"], "flags": tree["flags"]}))
    assert (restored.step, restored.meta) == (5, {"step": 5})
    assert_bitwise_equal(restored.tree, {"params": tree["params"], "flags": tree["flags"]})
    assert files(tmp_path) == before


def test_part_that_does_not_match(tmp_path):
    save_steps(tmp_path, 5)
    part = {"params": abstract(make_tree(5)["params"])}
    more = {"params": {**part["params"], "scale": part["params"]["bias"]}}
    less = {"params": {"bias": part["params"]["bias"]}}
    with Checkpointer(tmp_path, read_only=True) as checkpointer:
        for wrong, message in (
            (more, r"lacks \['params'\]\['scale'\]"),
            (less, r"also holds \['params'\]\['kernel'\]"),
        ):
            with pytest.raises(CheckpointError, match=message):
                checkpointer.restore_part(5, wrong)
        with pytest.raises(CheckpointError, match=r"/6 cannot be read"):
            checkpointer.restore_part(6, part)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # from reads that were given up
@pytest.mark.parametrize("damage", [truncate, flip_a_bit], ids=["truncated", "bit flipped"])
def test_damaged_part_is_an_error_that_deletes_nothing(tmp_path, damage):
    save_steps(tmp_path, 5, 10)
    damage(largest_file(tmp_path / "10"))
    before = files(tmp_path)
    part = {"params": abstract(make_tree(10)["params"])}
    with Checkpointer(tmp_path, read_only=True) as checkpointer, pytest.raises(CheckpointError, match="/10 cannot be"):
        checkpointer.restore_part(10, part)
    assert files(tmp_path) == before


def test_read_only_creates_no_directory(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        Checkpointer(tmp_path / "nowhere", read_only=True)
    assert not (tmp_path / "nowhere").exists()


# -- elsewhere ---------------------------------------------------------------------------------------------------------


def test_checkpoints_elsewhere_are_found_by_the_usual_path(tmp_path):
    there = tmp_path / "bucket" / "run"
    with Checkpointer(tmp_path / "checkpoints", elsewhere=str(there)) as checkpointer:
        checkpointer.save(4, make_tree(4), {"step": 4})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["elsewhere.txt"]
    assert (there / "4").is_dir()
    with Checkpointer(tmp_path / "checkpoints", read_only=True) as checkpointer:
        assert checkpointer.steps() == [4]
        assert_bitwise_equal(checkpointer.restore_part(4, abstract(make_tree(0))).tree, make_tree(4))
