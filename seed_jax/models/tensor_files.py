"""A directory of safetensors files: which file holds which tensor, reading slices, writing shards with an index."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.numpy

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_FORMATS = ("F64", "F32", "F16", "BF16")


class CheckpointError(ValueError):
    """A checkpoint directory that cannot be read; the message names the file, the tensor and the remedy."""


class Tensor(NamedTuple):
    """Where a tensor is and what its file says about it, without its values."""

    file: Path
    name: str  # in the file
    shape: tuple[int, ...]
    format: str  # of safetensors: "F32", "BF16", ...


def scan(directory: Path) -> dict[str, Tensor]:
    """Tensor name -> Tensor, from the headers alone. A single file wins over an index, as in `transformers`."""
    single, index = directory / WEIGHTS_FILE, directory / INDEX_FILE
    if single.is_file():
        return _headers(single)
    if not index.is_file():
        raise FileNotFoundError(f"{directory} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; export it as safetensors")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map object of tensor names and file names")
    found: dict[str, Tensor] = {}
    for shard in sorted(set(weight_map.values())):
        path = directory / shard
        if Path(shard).name != shard or not path.is_file():
            raise CheckpointError(f"{index} names the file {shard!r}, which is not in {directory}")
        tensors = _headers(path)
        promised = {name for name, file in weight_map.items() if file == shard}
        if promised - set(tensors):
            raise CheckpointError(f"{path} lacks tensor {min(promised - set(tensors))} that {index} says it holds")
        found |= tensors
    return found


def read(tensor: Tensor, index: tuple[slice, ...]) -> np.ndarray:
    """The part `index` of one tensor, in its stored dtype; only the bytes of that part are read.

    The file is opened for this one call: it is memory-mapped, and every page once read counts as memory of the process
    until the file is closed. Opening costs a fraction of a millisecond.
    """
    with _open(tensor.file) as handle:
        return handle.get_slice(tensor.name)[index]


def write(
    directory: Path, sizes: Mapping[str, int], value: Callable[[str], np.ndarray], max_shard_bytes: int
) -> list[str]:
    """Writes model.safetensors, or numbered shards and their index if the tensors exceed max_shard_bytes.

    sizes: tensor name -> bytes, in the order in which shards are filled; a tensor larger than a shard gets its own
    value: tensor name -> contiguous array; asked for when its shard is written, so one shard is in memory at a time
    Returns the names of the files written.
    """
    shards = plan_shards(sizes, max_shard_bytes)
    if len(shards) == 1:
        files = [WEIGHTS_FILE]
    else:
        files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for file, names in zip(files, shards, strict=True):
        # `transformers` refuses a file without this format note.
        safetensors.numpy.save_file({name: value(name) for name in names}, directory / file, {"format": "pt"})
        # safetensors leaves a file that only its owner can read; others may read what they may read of the directory.
        (directory / file).chmod(directory.stat().st_mode & 0o666)
    if len(shards) == 1:
        return files
    weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    write_json(directory / INDEX_FILE, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})
    return [*files, INDEX_FILE]


def plan_shards(sizes: Mapping[str, int], max_shard_bytes: int) -> list[list[str]]:
    """Names grouped in order, each group as long as its bytes stay within max_shard_bytes."""
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes} must be at least 1")
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size
    return shards


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; CheckpointError names the file that holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); copy the checkpoint again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _headers(path: Path) -> dict[str, Tensor]:
    with _open(path) as handle:
        slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (not a dict)
        return {name: Tensor(path, name, tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        handle = safetensors.safe_open(path, framework="numpy")
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path} is truncated or not a safetensors file ({error}); copy it again") from error
    with handle:
        yield handle
