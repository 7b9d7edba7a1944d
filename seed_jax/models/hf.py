"""Hugging Face checkpoints in and out: a directory with config.json and safetensors <-> (spec, params)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from seed_jax import sharding as sharding_lib
from seed_jax.models import spec as spec_lib
from seed_jax.models.spec import ModelSpec, Weight

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
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
EXPORT_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
_FLOAT_FORMATS = ("F64", "F32", "F16", "BF16")
# Buffers that old checkpoints store although they follow from the config.
_IGNORED_SUFFIX = "rotary_emb.inv_freq"


class CheckpointError(ValueError):
    """A checkpoint directory that cannot be read; the message names the file, the tensor and the remedy."""


def load(
    directory: str | os.PathLike[str], dtype: Any = jnp.float32, mesh: jax.sharding.Mesh | None = None
) -> tuple[ModelSpec, dict[str, Any]]:
    """Read a checkpoint directory: (spec, params), params as in `spec.weights` in `dtype`.

    directory: holds config.json and either model.safetensors or shards with model.safetensors.index.json
    mesh: place the parameters in the train layout of this mesh; default: on the default device
    Raises FileNotFoundError for a missing directory or file, ValueError for a config this model does not support, and
    CheckpointError for missing, extra or misshaped tensors and unreadable files.
    """
    directory = Path(directory)
    spec = load_spec(directory)
    files = _tensor_files(directory)
    _check_names(spec, files, directory)
    with contextlib.ExitStack() as stack:
        handles = {path: stack.enter_context(_open(path)) for path in sorted(set(files.values()))}

        def read(weight: Weight) -> jax.Array:
            array = _read_weight(weight, files, handles, np.dtype(dtype))
            if mesh is None:
                return jnp.asarray(array)
            placement = jax.sharding.NamedSharding(mesh, sharding_lib.partition_spec(weight, mesh, "train"))
            return jax.device_put(array, placement)

        return spec, spec_lib.map_weights(read, spec)


def load_spec(directory: str | os.PathLike[str]) -> ModelSpec:
    """The ModelSpec of a checkpoint directory, from its config.json."""
    directory = Path(directory)
    if not directory.is_dir():
        raise FileNotFoundError(f"checkpoint directory {directory} does not exist")
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{directory} has no config.json; it is not a Hugging Face checkpoint directory")
    config = _read_json(path)
    try:
        return ModelSpec.from_hf(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); copy the checkpoint again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        handle = safetensors.safe_open(path, framework="numpy")
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path} is truncated or not a safetensors file ({error}); copy it again") from error
    with handle:
        yield handle


def _tensor_files(directory: Path) -> dict[str, Path]:
    """Tensor name -> file that holds it. A single file wins over an index, as in `transformers`."""
    single, index = directory / WEIGHTS_FILE, directory / INDEX_FILE
    if single.is_file():
        with _open(single) as handle:
            return dict.fromkeys(handle.keys(), single)
    if not index.is_file():
        raise FileNotFoundError(f"{directory} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; export it as safetensors")
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index} has no weight_map object")
    files: dict[str, Path] = {}
    for shard in sorted(set(weight_map.values())):
        path = directory / shard
        if Path(shard).name != shard or not path.is_file():
            raise CheckpointError(f"{index} names the file {shard!r}, which is not in {directory}")
        with _open(path) as handle:
            names = set(handle.keys())
        promised = {name for name, file in weight_map.items() if file == shard}
        if promised - names:
            raise CheckpointError(f"{path} lacks tensor {min(promised - names)} that {index} says it holds")
        files |= dict.fromkeys(names, path)
    return files


def _hf_names(spec: ModelSpec, weight: Weight) -> list[str]:
    layers = range(spec.num_layers) if weight.stacked else (None,)
    return [weight.hf_name.format(layer=layer) for layer in layers]


def _check_names(spec: ModelSpec, files: Mapping[str, Path], directory: Path) -> None:
    expected = {name for _, weight in spec_lib.iterate(spec_lib.weights(spec)) for name in _hf_names(spec, weight)}
    missing = sorted(expected - set(files))
    if missing:
        raise CheckpointError(
            f"{directory} lacks {len(missing)} tensor(s) that its config.json asks for: {_some(missing)}"
        )
    extra = sorted(name for name in set(files) - expected if not _is_redundant(spec, name))
    if extra:
        raise CheckpointError(
            f"{files[extra[0]]} holds {len(extra)} tensor(s) that its config.json does not know: {_some(extra)}"
        )


def _is_redundant(spec: ModelSpec, name: str) -> bool:
    """A copy of the tied embedding, or a buffer that follows from the config."""
    return name.endswith(_IGNORED_SUFFIX) or (spec.tie_embeddings and name == "lm_head.weight")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _read_weight(weight: Weight, files: Mapping[str, Path], handles: Mapping[Path, Any], dtype: np.dtype) -> np.ndarray:
    """One parameter in our layout; layers are read one by one into the stacked array."""
    if not weight.stacked:
        return weight.from_hf(_read_tensor(weight.hf_name, weight, files, handles)).astype(dtype)
    stacked = np.empty(weight.shape, dtype)
    for layer in range(weight.shape[0]):
        stacked[layer] = weight.from_hf(_read_tensor(weight.hf_name.format(layer=layer), weight, files, handles))
    return stacked


def _read_tensor(name: str, weight: Weight, files: Mapping[str, Path], handles: Mapping[Path, Any]) -> np.ndarray:
    path = files[name]
    header = handles[path].get_slice(name)
    shape = tuple(header.get_shape())
    if shape != weight.hf_shape:
        raise CheckpointError(f"{path}: tensor {name} has shape {shape}; config.json asks for {weight.hf_shape}")
    if header.get_dtype() not in _FLOAT_FORMATS:
        raise CheckpointError(
            f"{path}: tensor {name} is stored as {header.get_dtype()}; supported are {', '.join(_FLOAT_FORMATS)}"
        )
    return handles[path].get_tensor(name)


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
) -> Path:
    """Write a directory that `transformers` and `load` read: config, generation config, weights, tokenizer.

    tokenizer_dir: its tokenizer files and chat template are copied
    dtype: "float32" | "bfloat16", of the stored tensors
    extra_files: file name -> text, e.g. a model card
    Everything is written to a sibling directory that is renamed at the end, so an interrupted call leaves either the
    old directory or the new one. An existing out_dir is replaced only if it is empty or holds a config.json.
    """
    out = Path(os.path.abspath(out_dir))
    if dtype not in EXPORT_DTYPES:
        raise ValueError(f"dtype={dtype!r} is not supported; use one of {', '.join(EXPORT_DTYPES)}")
    _check_replaceable(out)
    token_ids = {
        "bos_token_id": bos_token_id,
        "eos_token_id": list(eos_token_id) if isinstance(eos_token_id, Sequence) else eos_token_id,
        "pad_token_id": pad_token_id,
    }
    tensors = _hf_tensors(params, spec, EXPORT_DTYPES[dtype])
    # Old and new `transformers` spell the dtype differently.
    config = {**spec.to_hf(), **token_ids, "dtype": dtype, "torch_dtype": dtype}
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        safetensors.numpy.save_file(tensors, partial / WEIGHTS_FILE, metadata={"format": "pt"})
        _write_json(partial / "config.json", config)
        _write_json(partial / "generation_config.json", token_ids)
        if tokenizer_dir is not None:
            _copy_tokenizer(Path(tokenizer_dir), partial)
        for name, text in (extra_files or {}).items():
            if Path(name).name != name or (partial / name).exists():
                raise ValueError(f"extra_files name {name!r} must be a plain, unused file name")
            (partial / name).write_text(text, encoding="utf-8")
        _swap(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def _hf_tensors(params: dict[str, Any], spec: ModelSpec, dtype: Any) -> dict[str, np.ndarray]:
    """Hugging Face name -> contiguous array on the host."""
    tensors: dict[str, np.ndarray] = {}

    def add(weight: Weight, leaf: Any) -> None:
        if leaf.shape != weight.shape:
            raise ValueError(f"parameter {weight.hf_name} has shape {leaf.shape}; the spec asks for {weight.shape}")
        host = np.asarray(jax.device_get(leaf)).astype(dtype)
        for name, tensor in zip(_hf_names(spec, weight), host if weight.stacked else [host], strict=True):
            tensors[name] = np.ascontiguousarray(weight.to_hf(tensor))

    spec_lib.map_weights(add, spec, params)
    return tensors


def _check_replaceable(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"out_dir {out} is a file; give a directory")
    if out.is_dir() and any(out.iterdir()) and not (out / "config.json").is_file():
        raise FileExistsError(f"out_dir {out} holds other files and no config.json; give a new or empty directory")


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _copy_tokenizer(source: Path, target: Path) -> None:
    found = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    if not found:
        raise FileNotFoundError(f"tokenizer_dir {source} has none of {', '.join(TOKENIZER_FILES)}")
    for name in found:
        shutil.copyfile(source / name, target / name)


def _swap(new: Path, out: Path) -> None:
    """Put `new` in the place of `out`. POSIX cannot rename over a directory with files, so the old one steps aside."""
    if not out.exists():
        new.rename(out)
        return
    aside = out.with_name(f".{out.name}.old-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    out.rename(aside)
    try:
        new.rename(out)
    except BaseException:
        aside.rename(out)
        raise
    shutil.rmtree(aside)
