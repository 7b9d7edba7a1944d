"""Hugging Face checkpoints in and out: a directory (or hub id) with config.json and safetensors <-> (spec, params)."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seed_jax import sharding as sharding_lib
from seed_jax.models import spec as spec_lib
from seed_jax.models import tensor_files
from seed_jax.models.spec import ModelSpec, Weight
from seed_jax.models.tensor_files import INDEX_FILE, WEIGHTS_FILE, CheckpointError, Tensor, read_json, write_json
from seed_jax.runtime.staging import replacing

__all__ = ["INDEX_FILE", "WEIGHTS_FILE", "CheckpointError", "check_replaceable", "load", "load_spec", "resolve", "save"]

RECORD_FILE = "seed_jax.json"  # written by every export, with the names of its files: what may be replaced
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
# How to cut and scale images; `transformers` 5 writes the second one, vLLM needs one of the first two.
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
# What an export holds whose record has no list of files, as the first version wrote it.
_UNLISTED_FILES = ("config.json", "generation_config.json", WEIGHTS_FILE, RECORD_FILE, *TOKENIZER_FILES)
EXPORT_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
MAX_SHARD_BYTES = 5 * 10**9

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ("*.safetensors", INDEX_FILE, "config.json", "generation_config.json", *TOKENIZER_FILES, *PROCESSOR_FILES)
_ROWS_PER_READ = 8192  # of a table [V, D]; one layer is read at once
# Buffers that old checkpoints store although they follow from the config.
_IGNORED_SUFFIX = "rotary_emb.inv_freq"
# Prefix of a tensor of Qwen2.5-VL in `transformers` -> on the hub, where the table of weights has its names from.
_HUB_PREFIXES = {"model.visual.": "visual.", "model.language_model.": "model."}


def load(
    source: str | os.PathLike[str], mesh: jax.sharding.Mesh | None = None, dtype: Any = jnp.float32
) -> tuple[ModelSpec, dict[str, Any]]:
    """Read a checkpoint: (spec, params), params as in `spec.weights` in `dtype`.

    source: directory with config.json and either model.safetensors or shards with model.safetensors.index.json; or the
        id of a model on the Hugging Face Hub ("org/name"), which is downloaded into the local cache
    mesh: place the parameters in the train layout of this mesh, every host reading only the slices of its own devices;
        default: on the default device
    One parameter is read at a time, so the host holds little more than the parameters themselves.
    Raises FileNotFoundError for a missing directory, file or model, ValueError for a config this model does not
    support, and CheckpointError for missing, extra or misshaped tensors and unreadable files.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype={dtype!r} is not a floating-point type; use float32 or bfloat16")
    directory = resolve(source)
    spec = load_spec(directory)
    stored = _scan(spec, directory)
    _check_tensors(spec, stored, directory)
    return spec, spec_lib.map_weights(lambda weight: _load_weight(weight, stored, mesh, np.dtype(dtype)), spec)


def resolve(source: str | os.PathLike[str]) -> Path:
    """The directory of a checkpoint. What is no existing path and looks like "org/name" is fetched from the hub."""
    path = Path(source).expanduser()
    if path.exists() or not _HUB_ID.fullmatch(os.fspath(source)):
        return path
    from huggingface_hub import snapshot_download  # slow to import

    repo = os.fspath(source)
    try:
        return Path(snapshot_download(repo, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # the client of the hub raises many types; the reason is reported
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
        raise FileNotFoundError(
            f"there is no directory {repo}, and the model {repo} cannot be fetched from the Hugging Face Hub "
            f"({type(error).__name__}: {reason}). Without a network, fetch it elsewhere with "
            f"`hf download {repo} --local-dir DIR` and give DIR; for a gated model run `hf auth login` first"
        ) from error


def load_spec(directory: str | os.PathLike[str]) -> ModelSpec:
    """The ModelSpec of a checkpoint directory, from its config.json (and the limits of images from its processor's)."""
    directory = Path(directory)
    if not directory.is_dir():
        state = "is a file; give its directory" if directory.exists() else "does not exist"
        raise FileNotFoundError(f"checkpoint directory {directory} {state}")
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{directory} has no config.json; it is not a Hugging Face checkpoint directory")
    config = read_json(path)
    try:
        spec = ModelSpec.from_hf(config)
        for name in PROCESSOR_FILES[:2] if spec.vision is not None else ():
            if (directory / name).is_file():
                path = directory / name
                config = read_json(path)
                vision = spec.vision.with_processor(config.get("image_processor", config))
                return dataclasses.replace(spec, vision=vision)
        return spec
    except CheckpointError:
        raise
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


# -- in ----------------------------------------------------------------------------------------------------------------


def _scan(spec: ModelSpec, directory: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint by their names on the hub."""
    stored = tensor_files.scan(directory)
    if spec.vision is None:
        return stored

    def hub_name(name: str) -> str:
        prefix = next((prefix for prefix in _HUB_PREFIXES if name.startswith(prefix)), None)
        return name if prefix is None else _HUB_PREFIXES[prefix] + name.removeprefix(prefix)

    return {hub_name(name): tensor for name, tensor in stored.items()}


def _check_tensors(spec: ModelSpec, stored: Mapping[str, Tensor], directory: Path) -> None:
    """Names, shapes and formats, before any value is read."""
    expected = {name: weight for _, weight in _iterate(spec) for name in _hf_names(weight)}
    missing = sorted(set(expected) - set(stored))
    if missing:
        raise CheckpointError(
            f"{directory} lacks {len(missing)} tensor(s) that its config.json asks for: {_some(missing)}"
        )
    extra = sorted(name for name in set(stored) - set(expected) if not _is_redundant(spec, name))
    if extra:
        raise CheckpointError(
            f"{stored[extra[0]].file} holds {len(extra)} tensor(s) that its config.json does not know: {_some(extra)}"
        )
    for name, weight in expected.items():
        file, _, shape, form = stored[name]
        if shape != weight.hf_shape:
            raise CheckpointError(f"{file}: tensor {name} has shape {shape}; config.json asks for {weight.hf_shape}")
        if form not in tensor_files.FLOAT_FORMATS:
            raise CheckpointError(
                f"{file}: tensor {name} is stored as {form}; supported are {', '.join(tensor_files.FLOAT_FORMATS)}"
            )


def _iterate(spec: ModelSpec):
    return spec_lib.iterate(spec_lib.weights(spec))


def _hf_names(weight: Weight) -> list[str]:
    layers = range(weight.shape[0]) if weight.stacked else (None,)
    return [weight.hf_name.format(layer=layer) for layer in layers]


def _is_redundant(spec: ModelSpec, name: str) -> bool:
    """A copy of the tied embedding, or a buffer that follows from the config."""
    return name.endswith(_IGNORED_SUFFIX) or (spec.tie_embeddings and name == "lm_head.weight")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _load_weight(weight: Weight, stored: Mapping[str, Tensor], mesh: jax.sharding.Mesh | None, dtype: np.dtype):
    """One parameter as an array of `weight.shape` on the mesh (or the default device)."""
    parts: dict[tuple[tuple[int, int], ...], np.ndarray] = {}  # devices that hold the same part share one read

    def part(index: tuple[slice, ...]) -> np.ndarray:
        bounds = tuple(one.indices(size)[:2] for one, size in zip(index, weight.shape, strict=True))
        if bounds not in parts:
            parts[bounds] = _read_part(weight, bounds, stored, dtype)
        return parts[bounds]

    if mesh is None:
        array = jax.device_put(part((slice(None),) * len(weight.shape)))
    else:
        placement = jax.sharding.NamedSharding(mesh, sharding_lib.partition_spec(weight, mesh, "train"))
        array = jax.make_array_from_callback(weight.shape, placement, part, dtype=dtype)
    # Transfers are asynchronous: without waiting, the host copies of several parameters would add up.
    return jax.block_until_ready(array)


def _read_part(
    weight: Weight, bounds: Sequence[tuple[int, int]], stored: Mapping[str, Tensor], dtype: np.dtype
) -> np.ndarray:
    """The part of one parameter within `bounds` [(start, stop) a dimension], read layer by layer or in runs of rows."""
    part = _aligned_empty([stop - start for start, stop in bounds], dtype)
    first, end = bounds[0]
    if weight.stacked:
        for layer in range(first, end):
            part[layer - first] = _read_tensor(weight, weight.hf_name.format(layer=layer), bounds[1:], stored)
        return part
    for start in range(first, end, _ROWS_PER_READ):
        rows = (start, min(start + _ROWS_PER_READ, end))
        part[start - first : rows[1] - first] = _read_tensor(weight, weight.hf_name, (rows, *bounds[1:]), stored)
    return part


def _aligned_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An array at a multiple of 64 bytes: on a CPU, JAX takes such memory over, where it would copy any other."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)


def _read_tensor(
    weight: Weight, name: str, bounds: Sequence[tuple[int, int]], stored: Mapping[str, Tensor]
) -> np.ndarray:
    """The part of one stored tensor that is `bounds` of our layout (one layer, without L).

    A stored dimension is one or several of ours flattened ([H, hd] -> [H * hd]). The stored range is cut along the
    outermost of them; what is cut along the inner ones is cut after reading.
    """
    ours = weight.shape[1:] if weight.stacked else weight.shape
    ranges, shape, inner = [], [], []
    for group in _flattened(weight, ours):
        (start, stop), width = bounds[group.start], math.prod(ours[group][1:])
        ranges.append(slice(start * width, stop * width))
        shape += [stop - start, *ours[group][1:]]
        inner += [slice(None), *(slice(*one) for one in bounds[group][1:])]
    if weight.transpose:
        ranges.reverse()
    tensor = tensor_files.read(stored[name], tuple(ranges))
    return (tensor.T if weight.transpose else tensor).reshape(shape)[tuple(inner)]


def _flattened(weight: Weight, ours: Sequence[int]) -> list[slice]:
    """For each stored dimension, in the order of ours, the run of our dimensions that it flattens."""
    groups, position = [], 0
    for size in reversed(weight.hf_shape) if weight.transpose else weight.hf_shape:
        start, position = position, position + 1
        while math.prod(ours[start:position]) != size:
            position += 1
        groups.append(slice(start, position))
    return groups


# -- out ---------------------------------------------------------------------------------------------------------------


def save(
    params: dict[str, Any],
    spec: ModelSpec,
    out_dir: str | os.PathLike[str],
    tokenizer_dir: str | os.PathLike[str] | None = None,
    dtype: str = "float32",
    *,
    eos_token_id: int | Sequence[int] | None = None,
    bos_token_id: int | None = None,
    pad_token_id: int | None = None,
    extra_files: Mapping[str, str] | None = None,
    record: Mapping[str, Any] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write a directory that `transformers` and `load` read: config, generation config, weights, tokenizer.

    tokenizer_dir: its tokenizer files, chat template and image processor's files are copied
    dtype: "float32" | "bfloat16", of the stored tensors
    extra_files: file name -> text, e.g. a model card
    record: what seed_jax.json says beside the names of the files; that file marks the directory as an export
    max_shard_bytes: larger weights are split into several files with an index
    Everything is written to a sibling directory that is renamed at the end, so an interrupted call leaves either the
    old directory or the new one. An existing out_dir is replaced only if it is empty or an earlier export.
    """
    out = Path(out_dir).resolve()
    if dtype not in EXPORT_DTYPES:
        raise ValueError(f"dtype={dtype!r} is not supported; use one of {', '.join(EXPORT_DTYPES)}")
    check_replaceable(out)
    tensors = _tensors(params, spec)
    token_ids = {
        "bos_token_id": bos_token_id,
        "eos_token_id": list(eos_token_id) if isinstance(eos_token_id, Sequence) else eos_token_id,
        "pad_token_id": pad_token_id,
    }
    with replacing(out) as partial:
        _write_weights(partial, tensors, np.dtype(EXPORT_DTYPES[dtype]), max_shard_bytes)
        # Old and new `transformers` spell the dtype differently.
        write_json(partial / "config.json", {**spec.to_hf(), **token_ids, "dtype": dtype, "torch_dtype": dtype})
        write_json(partial / "generation_config.json", token_ids)
        if tokenizer_dir is not None:
            _copy_tokenizer(Path(tokenizer_dir), partial)
        if spec.vision is not None and not any((partial / name).is_file() for name in PROCESSOR_FILES[:2]):
            write_json(partial / PROCESSOR_FILES[0], spec.vision.processor_config())
        for name, text in (extra_files or {}).items():
            if Path(name).name != name or name == RECORD_FILE or (partial / name).exists():
                raise ValueError(f"extra_files name {name!r} must be a plain, unused file name")
            (partial / name).write_text(text, encoding="utf-8")
        files = sorted([RECORD_FILE, *(path.name for path in partial.iterdir())])
        write_json(partial / RECORD_FILE, {**(record or {}), "files": files})
    return out


def check_replaceable(out: Path) -> None:
    """Raises FileExistsError unless `out` is absent, empty, or an earlier export and nothing else."""
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"out_dir {out} is a file; give a directory")
    present = {path.name for path in out.iterdir()} if out.is_dir() else set()
    if present and RECORD_FILE not in present:
        raise FileExistsError(
            f"out_dir {out} holds other files and no {RECORD_FILE}, so it is no earlier export; "
            "give a new or empty directory"
        )
    if present:
        foreign = sorted(present - set(read_json(out / RECORD_FILE).get("files", _UNLISTED_FILES)))
        if foreign:
            raise FileExistsError(
                f"out_dir {out} is an earlier export with other files beside it ({_some(foreign)}), which would be "
                "lost; move them away or give another directory"
            )


def _tensors(params: dict[str, Any], spec: ModelSpec) -> dict[str, tuple[Weight, jax.Array, int | None]]:
    """Hugging Face name -> (weight, parameter, layer); layer by layer, after what has none."""
    pairs: list[tuple[Weight, jax.Array]] = []

    def add(weight: Weight, leaf: Any) -> None:
        if leaf.shape != weight.shape:
            raise ValueError(f"parameter {weight.hf_name} has shape {leaf.shape}; the spec asks for {weight.shape}")
        pairs.append((weight, leaf if isinstance(leaf, np.ndarray) else jnp.asarray(leaf)))

    spec_lib.map_weights(add, spec, params)
    tensors = {weight.hf_name: (weight, leaf, None) for weight, leaf in pairs if not weight.stacked}
    for layer in range(max(weight.shape[0] for weight, _ in pairs if weight.stacked)):
        for weight, leaf in pairs:
            if weight.stacked and layer < weight.shape[0]:
                tensors[weight.hf_name.format(layer=layer)] = (weight, leaf, layer)
    return tensors


def _write_weights(
    directory: Path, tensors: Mapping[str, tuple[Weight, jax.Array, int | None]], dtype: np.dtype, max_shard_bytes: int
) -> None:
    def value(name: str) -> np.ndarray:
        weight, leaf, layer = tensors[name]
        # Cast on the host: XLA on a CPU rounds the smallest (subnormal) numbers to zero.
        part = leaf if layer is None else leaf[layer] if isinstance(leaf, np.ndarray) else _layer(leaf, layer)
        ours = np.asarray(part).astype(dtype, copy=False)
        return np.ascontiguousarray(weight.to_hf(ours))

    sizes = {name: math.prod(weight.hf_shape) * dtype.itemsize for name, (weight, _, _) in tensors.items()}
    tensor_files.write(directory, sizes, value, max_shard_bytes)


@jax.jit
def _layer(stack: jax.Array, layer: int) -> jax.Array:
    """One layer of a stacked parameter [L, ...]: a transfer of its own, so no host copy of the whole stack is made."""
    return jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False)


def _copy_tokenizer(source: Path, target: Path) -> None:
    found = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    if not found:
        raise FileNotFoundError(f"tokenizer_dir {source} has none of {', '.join(TOKENIZER_FILES)}")
    for name in [*found, *(name for name in PROCESSOR_FILES if (source / name).is_file())]:
        shutil.copyfile(source / name, target / name)
