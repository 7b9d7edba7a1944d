"""Orbax checkpoints that survive a crash: a damaged newest checkpoint costs some iterations, never the run."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from seed_jax.runtime import multihost
from seed_jax.runtime.logging import write_whole

_log = logging.getLogger(__name__)
ELSEWHERE_FILE = "elsewhere.txt"  # in a checkpoint directory: the path or URL where its checkpoints are
_CHECKSUMS = "leaf_checksums"  # key in the saved JSON beside the caller's meta


class CheckpointError(RuntimeError):
    """Checkpoints exist and none of them can be restored; the message says why for each."""


class Restored(NamedTuple):
    step: int
    tree: Any
    meta: dict[str, Any]


class Checkpointer:
    """Saves and restores (array tree, JSON-able dict) by step number in one directory.

    Saving is asynchronous: call `wait` or `close` (or leave the `with` block) before the process ends.
    A checkpoint carries a checksum of every array, because a changed byte inside an array is otherwise restored
    without an error, and a run would go on from weights that nobody trained.
    """

    def __init__(self, directory: str | Path, keep: int = 3, *, elsewhere: str = "", read_only: bool = False):
        """keep: how many of the newest checkpoints stay on disk; read_only: nothing is created, saved or deleted.

        elsewhere: where the checkpoints really are, a path or a URL such as gs://bucket/run; `directory` then holds a
            file that says so, and whoever opens it later need not know. URLs go through etils.epath and Orbax; they are
            not tested here, where there is no such service.
        On many hosts all of them save and restore together, in a directory that all of them see.
        """
        self._directory = _followed(Path(directory).absolute(), elsewhere)
        if read_only and not self._directory.is_dir():
            raise FileNotFoundError(f"checkpoint directory {self._directory} does not exist")
        # For a read-only directory Orbax resets the last two itself, each with a warning.
        settings = {"read_only": True, "create": False, "save_interval_steps": 0}
        options = ocp.CheckpointManagerOptions(**(settings if read_only else {"max_to_keep": keep}))
        self._manager = ocp.CheckpointManager(self._directory, options=options)

    def steps(self) -> list[int]:
        """Steps with a finished checkpoint, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, tree: Any, meta: dict[str, Any]) -> None:
        """Saves under `step`; does nothing if that step is already saved (a run is deterministic)."""
        if step in self._manager.all_steps():
            return
        content = {"meta": meta, _CHECKSUMS: _leaf_checksums(tree)}
        arguments = ocp.args.Composite(state=ocp.args.StandardSave(tree), meta=ocp.args.JsonSave(content))
        self._manager.save(step, args=arguments, force=True)

    def restore_latest(self, abstract_tree: Any) -> Restored | None:
        """The newest checkpoint that can be read, or None if there is none at all.

        abstract_tree: arrays or `jax.ShapeDtypeStruct`s with the shapes, types and shardings of the result.
        Newer ones that cannot be read are named in a warning and deleted, so that their steps can be saved again.
        Raises CheckpointError, deleting nothing, if there are checkpoints and none can be read.
        """
        self._manager.wait_until_finished()
        failures: dict[int, str] = {}
        for step in reversed(multihost.from_first(self.steps)):
            try:
                tree, meta = self._restore(step, abstract_tree)
            except Exception as error:  # Orbax and TensorStore raise many types; the reason is reported
                failures[step] = f"{type(error).__name__}: {_first_line(error)}"
                continue
            for broken, reason in failures.items():
                _log.warning(
                    "checkpoint %s cannot be read (%s); it is deleted and the run goes on from step %d",
                    self._directory / str(broken), reason, step,
                )  # fmt: skip
                self._manager.delete(broken)
            return Restored(step, tree, meta)
        if failures:
            reasons = "\n".join(f"  - step {step}: {reason}" for step, reason in failures.items())
            raise CheckpointError(
                f"no checkpoint in {self._directory} can be restored:\n{reasons}\n"
                "If the model or the optimizer was changed, use another workdir; "
                "otherwise start again with --overwrite."
            )
        return None

    def restore_part(self, step: int, abstract_part: Any) -> Restored:
        """Some entries of the tree saved under `step`, such as {"params": ...}; the others are not read.

        abstract_part: as for `restore_latest`. Deletes nothing; raises CheckpointError if that one cannot be read.
        """
        try:
            return Restored(step, *self._restore(step, abstract_part, part=True))
        except Exception as error:  # as in restore_latest
            reason = f"{type(error).__name__}: {_first_line(error)}"
            raise CheckpointError(f"checkpoint {self._directory / str(step)} cannot be read ({reason})") from error

    def wait(self) -> None:
        """Returns when everything saved so far is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.wait_until_finished()
        self._manager.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _restore(self, step: int, abstract_tree: Any, part: bool = False) -> tuple[Any, dict[str, Any]]:
        # Orbax's handlers alone: its manager waits for all hosts after reading, for ever if one could not read.
        directory = self._directory / str(step)
        _abandon_reads_quietly()
        with _read_by_all(step):
            # The small JSON first: a checkpoint without it is not worth reading gigabytes.
            content = ocp.JsonCheckpointHandler().restore(directory / "meta")
        with _read_by_all(step):
            if part:
                _check_entries(abstract_tree, content[_CHECKSUMS])
                each = ocp.checkpoint_utils.construct_restore_args(abstract_tree)
                asked = ocp.args.PyTreeRestore(abstract_tree, restore_args=each, partial_restore=True)
                tree = ocp.PyTreeCheckpointHandler().restore(directory / "state", args=asked)
            else:
                asked = ocp.args.StandardRestore(abstract_tree)
                tree = ocp.StandardCheckpointHandler().restore(directory / "state", args=asked)
        changed = [path for path, checksum in _leaf_checksums(tree).items() if content[_CHECKSUMS][path] != checksum]
        if changed:
            raise ValueError(f"the stored values of {', '.join(changed[:3])} are damaged (checksum differs)")
        return tree, content["meta"]


def _followed(directory: Path, elsewhere: str) -> epath.Path:
    pointer = directory / ELSEWHERE_FILE
    if not elsewhere:
        return epath.Path(pointer.read_text().strip() if pointer.is_file() else directory)
    if multihost.leads():
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(pointer, f"{elsewhere}\n")
    place = epath.Path(elsewhere)
    return place if "://" in elsewhere else place.absolute()


def _check_entries(part: dict[str, Any], saved: dict[str, int]) -> None:
    """Orbax passes over entries that only one side has; for a part of the tree neither side may have more."""
    asked = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(part)}
    there = {path for path in saved if path.startswith(tuple(f"[{name!r}]" for name in part))}
    for paths, problem in ((asked - there, "lacks"), (there - asked, "also holds")):
        if paths:
            raise ValueError(f"it {problem} {', '.join(sorted(paths)[:3])}")


def _leaf_checksums(tree: Any) -> dict[str, int]:
    """One uint32 for each array: the wrapping sum of its bit pattern, which no sharding or order can change."""
    sums = jax.device_get(_bit_sums(tree))
    return {jax.tree_util.keystr(path): int(value) for path, value in jax.tree_util.tree_leaves_with_path(sums)}


@jax.jit
def _bit_sums(tree: Any) -> Any:
    def bit_sum(leaf: jax.Array) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if leaf.dtype == jnp.bool_:
            return leaf.sum(dtype=jnp.uint32)
        unsigned = np.dtype(f"uint{8 * leaf.dtype.itemsize}")
        return jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32).sum(dtype=jnp.uint32)

    return jax.tree.map(bit_sum, tree)


@contextlib.contextmanager
def _read_by_all(step: int) -> Iterator[None]:
    """Many hosts read a checkpoint or none does: what one of them cannot read is an error on all."""
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    failed = multihost.agree_any(failure is not None)
    if failure is not None:
        raise failure
    if failed:
        raise ValueError(f"another host cannot read step {step}")


@functools.cache
def _abandon_reads_quietly() -> None:
    """From now on Python does not report what becomes of Orbax's other reads after one has failed: they are abandoned,
    and each would print kilobytes of a traceback when it ends, some time later."""
    report = sys.unraisablehook

    def report_others(unraisable: Any) -> None:
        if "orbax" not in getattr(getattr(unraisable.object, "cr_code", None), "co_filename", ""):
            report(unraisable)

    sys.unraisablehook = report_others


def _first_line(error: Exception, max_chars: int = 200) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:max_chars] if lines else "no message"
