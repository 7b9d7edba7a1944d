"""Batches whose gradient was not finite, kept for `python -m launch.replay`: NumPy arrays and JSON, never pickles.

dumps/iteration_000012/
  dump.json      iteration, what the update reported, the config, the workdir (checkpoints are beside the dumps)
  rows_000.npz   packed rows of process 0, by dotted field ("student.tokens"), and the update's numbers ("number.lr")
  rows_001.npz   those of process 1, ...
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from seed_jax.runtime import multihost
from seed_jax.runtime.logging import jsonable, write_whole
from seed_jax.train.packing import PackedBatch, Rows

FORMAT = 1
DUMP_FILE = "dump.json"
KEPT = 3  # newest dumps that stay in a workdir
_NUMBER = "number."


class DumpError(ValueError):
    """A directory is no dump, or a damaged one; the message names the file."""


class NotFinite(RuntimeError):
    """Too many optimizer steps in a row had a gradient that was not finite."""


def is_stuck(config, memory: Mapping[str, Any]) -> bool:
    """Whether the last optim.max_skipped optimizer steps or more were skipped; `memory` counts them."""
    return 0 < config.optim.max_skipped <= memory.get("skipped", 0)


def stuck_text(config, memory: Mapping[str, Any], workdir: Path) -> str:
    return (
        f"the gradient of the last {memory['skipped']:.0f} optimizer steps was not finite (optim.max_skipped = "
        f"{config.optim.max_skipped}). The weights are unchanged since then and saved. `python -m launch.replay "
        f"--dump=DIR` says which rows and terms it comes from, for the newest DIR in {workdir / 'dumps'}; a lower "
        "optim.lr or optim.grad_clip, or model.dtype = 'float32', may help"
    )


class Dump(NamedTuple):
    """record: dump.json; batch: the rows of all processes, as one process would have packed them."""

    record: dict[str, Any]
    batch: PackedBatch
    numbers: dict[str, np.ndarray]


def save(
    workdir: Path, config, iteration: int, batch: PackedBatch, numbers: Mapping[str, Any], metrics: Mapping[str, Any]
) -> Path:
    """Writes the batch of `iteration` (counted from 1): every process its own rows, process 0 the rest."""
    directory = workdir / "dumps" / f"iteration_{iteration:06d}"
    directory.mkdir(parents=True, exist_ok=True)
    arrays = {name: np.asarray(value) for name, value in _fields(batch).items()}
    arrays |= {f"{_NUMBER}{name}": np.asarray(value) for name, value in numbers.items()}
    np.savez_compressed(directory / f"rows_{jax.process_index():03d}.npz", **arrays)
    if multihost.leads():
        record = {
            "format": FORMAT,
            "iteration": iteration,
            "processes": jax.process_count(),
            "workdir": str(workdir.absolute()),
            "metrics": dict(metrics),
            "config": config.to_dict(),
        }
        write_whole(directory / DUMP_FILE, json.dumps(jsonable(record), indent=1) + "\n")
        for old in sorted(directory.parent.glob("iteration_*"))[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    return directory


def load(directory: Path) -> Dump:
    """Raises DumpError."""
    path = directory / DUMP_FILE
    try:
        record = json.loads(path.read_text())
        if record["format"] != FORMAT:
            raise DumpError(f"{path} has format {record['format']!r}; this version reads {FORMAT}")
        pack = record["config"]["pack"]
        parts = [_arrays(directory / f"rows_{process:03d}.npz") for process in range(record["processes"])]
        numbers = {name.removeprefix(_NUMBER): x for name, x in parts[0].items() if name.startswith(_NUMBER)}
        join = lambda name: _join([part[name] for part in parts], pack["rows_per_micro"], pack["micros_per_mini"])  # noqa: E731
        fields = {name: join(name) for name in parts[0] if not name.startswith(_NUMBER)}
        return Dump(record, _batch(fields), numbers)
    except DumpError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DumpError(f"{directory} is no complete dump of a run ({type(error).__name__}: {error})") from error


def _arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as stored:
        return dict(stored)


def _join(parts: list[np.ndarray], rows_per_micro: int, micros_per_mini: int) -> np.ndarray:
    """As `multihost.join_rows`: every micro-batch takes its share of rows from each process."""
    if parts[0].ndim == 0:
        return parts[0]
    rows = rows_per_micro // len(parts)
    folded = [part.reshape(-1, micros_per_mini, rows, *part.shape[1:]) for part in parts]
    return np.concatenate(folded, axis=2).reshape(-1, *parts[0].shape[1:])


def _fields(batch: PackedBatch) -> dict[str, Any]:
    """Arrays by dotted name; what is None is left out."""
    found = {}
    for name, value in vars(batch).items():
        if isinstance(value, Rows):
            found |= {f"{name}.{part}": array for part, array in vars(value).items() if array is not None}
        elif value is not None:
            found[name] = value
    return found


def _batch(fields: dict[str, np.ndarray]) -> PackedBatch:
    plain = {name: value for name, value in fields.items() if "." not in name}
    parts = {name: {} for name in ("student", "teacher")}
    for name, value in fields.items():
        if "." in name:
            which, part = name.split(".")
            parts[which][part] = value
    rows = {name: Rows(**found) for name, found in parts.items() if found}
    return PackedBatch(**{"teacher": None, **rows, **plain})
