"""A trained policy as a Hugging Face directory with a model card, from the state of a run or from its checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from seed_jax import config as config_lib
from seed_jax import tokenizer as tok
from seed_jax.models import hf, tensor_files
from seed_jax.models import spec as spec_lib
from seed_jax.models.spec import ModelSpec
from seed_jax.runtime.checkpoint import Checkpointer, CheckpointError
from seed_jax.runtime.logging import CONFIG_FILE, EVALUATIONS_FILE, GAMES_FILE, read_config, read_jsonl
from seed_jax.train.card import policy_card

CHECKPOINTS_DIR = "checkpoints"
# The cache of the Hugging Face Hub keeps a model in a folder of this name.
_CACHED_MODEL = re.compile(r"models--([^/]+?)--([^/]+)")


class Exported(NamedTuple):
    directory: Path
    iteration: int
    num_params: int


class Opened(NamedTuple):
    """The policy of a checkpoint. config: of the run, as mappings; model_dir: its base model; params: on the CPU."""

    workdir: Path
    config: dict[str, Any]
    model_dir: Path
    spec: ModelSpec
    iteration: int
    params: dict[str, Any]


def write_policy(
    params: dict[str, Any],
    spec: ModelSpec,
    out: Path,
    *,
    config: Mapping[str, Any],
    model_dir: Path,
    iteration: int,
    evaluations: Sequence[Mapping[str, Any]],
    games: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    max_shard_bytes: int = hf.MAX_SHARD_BYTES,
) -> Path:
    """Weights, config, tokenizer, generation config, model card and seed_jax.json in `out`, all or nothing.

    config: of the run, with sections as mappings
    model_dir: the base model, whose tokenizer, chat template and token ids are taken over
    evaluations: records of evaluations.jsonl; those of `iteration` and of iteration 0 are shown
    games: what `read_games` found
    """
    record = {
        "method": config["method"],
        "config_hash": config_lib.config_hash(config),
        "iterations": iteration,
        "base_model": hub_id(model_dir) or "/".join(Path(config["model"]["init"]).parts[-2:]),
    }
    return hf.save(
        params,
        spec,
        out,
        tokenizer_dir=model_dir,
        dtype=dtype,
        extra_files={"README.md": policy_card(spec, config, record, evaluations, games, dtype, hub_id(model_dir))},
        record=record,
        max_shard_bytes=max_shard_bytes,
        **token_ids(model_dir),
    )


def export_checkpoint(
    source: Path,
    out: Path,
    *,
    step: int | None = None,
    dtype: str = "float32",
    max_shard_bytes: int = hf.MAX_SHARD_BYTES,
    base_model: str | None = None,
) -> Exported:
    """Exports the policy of a checkpoint, which is only read; of the whole training state only the policy.

    source: workdir of a run, or its checkpoints directory
    step: iteration to export; default: the newest
    base_model: where the base model is now; default: where the config of the run says
    Raises OSError or ValueError for paths and files that cannot be used, CheckpointError for a damaged checkpoint.
    """
    hf.check_replaceable(out)  # before anything is read
    opened = open_checkpoint(source, step, base_model)
    write_policy(
        opened.params,
        opened.spec,
        out,
        config=opened.config,
        model_dir=opened.model_dir,
        iteration=opened.iteration,
        evaluations=read_jsonl(opened.workdir / EVALUATIONS_FILE),
        games=read_games(opened.workdir),
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
    )
    return Exported(out, opened.iteration, opened.spec.num_params)


def read_games(workdir: Path) -> dict[str, Any] | None:
    """How many games a run was trained and evaluated on and the hashes of their contents, as its launcher recorded
    them; None if it did not. Raises ValueError for a damaged file."""
    path = workdir / GAMES_FILE
    if not path.is_file():
        return None
    try:
        recorded = json.loads(path.read_text())
        return {part: {name: recorded[part][name] for name in ("count", "sha256")} for part in ("train", "panel")}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); remove it to export without the hashes of the games") from error


def is_run(source: Path) -> bool:
    """Whether a directory is a run's workdir (or the checkpoints in it), not a model in Hugging Face format."""
    return source.name == CHECKPOINTS_DIR or (source / CHECKPOINTS_DIR).is_dir()


def open_checkpoint(source: Path, step: int | None = None, base_model: str | None = None) -> Opened:
    """Reads the policy of a checkpoint and nothing else of it. Arguments and errors as for `export_checkpoint`."""
    workdir = _workdir(source)
    config = read_config(workdir / CONFIG_FILE, advice="--checkpoint must name the workdir of a run")
    model_dir = _base_directory(config, base_model)
    spec = hf.load_spec(model_dir)
    step, params = _restore_policy(workdir / CHECKPOINTS_DIR, spec, step)
    return Opened(workdir, config, model_dir, spec, step, params)


def _workdir(source: Path) -> Path:
    workdir = source.absolute()
    if workdir.name == CHECKPOINTS_DIR and not (workdir / CHECKPOINTS_DIR).is_dir():
        workdir = workdir.parent
    if not (workdir / CHECKPOINTS_DIR).is_dir():
        state = f"has no directory {CHECKPOINTS_DIR}" if source.is_dir() else "does not exist"
        raise FileNotFoundError(
            f"{source} {state}; give the workdir of a run, or the {CHECKPOINTS_DIR} directory in it"
        )
    if not (workdir / CONFIG_FILE).is_file():
        raise FileNotFoundError(f"{workdir} has no {CONFIG_FILE}, so the base model of the run is unknown")
    return workdir


def _base_directory(config: Mapping[str, Any], base_model: str | None) -> Path:
    try:
        directory = hf.resolve(base_model or config["model"]["init"])
        hf.load_spec(directory)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error} (the base model of the run; name its new place with --base_model)") from error
    return directory


def _restore_policy(directory: Path, spec: ModelSpec, step: int | None) -> tuple[int, dict[str, Any]]:
    """(step, parameters on the CPU) of one checkpoint; the master weights of a run are float32."""
    cpu = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    abstract = spec_lib.map_weights(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.float32, sharding=cpu), spec)
    with Checkpointer(directory, read_only=True) as checkpoints:
        steps = checkpoints.steps()
        if not steps:
            raise CheckpointError(f"{directory} holds no finished checkpoint")
        step = steps[-1] if step is None else step
        if step not in steps:
            raise CheckpointError(f"{directory} has no step {step}; there are {', '.join(map(str, steps))}")
        try:
            return step, checkpoints.restore_part(step, {"params": abstract}).tree["params"]
        except CheckpointError as error:
            others = ", ".join(str(other) for other in steps if other != step) or "none"
            raise CheckpointError(f"{error}; other steps: {others}") from error


def token_ids(model_dir: Path) -> dict[str, Any]:
    """Begin, end and padding ids for config.json and generation_config.json.

    Replies end with the tokenizer's end token, as in training, or with any other that the base model names. The base's
    sampling fields (temperature, top_p, repetition_penalty) are left out: the policy was trained without them.
    """
    tokenizer = tok.load_tokenizer(model_dir)
    stated: dict[str, Any] = {}
    for name in ("config.json", "generation_config.json"):
        if (model_dir / name).is_file():
            content = tensor_files.read_json(model_dir / name)
            stated |= {key: value for key, value in content.items() if value is not None}
    named = stated.get("eos_token_id", [])
    ends = list(dict.fromkeys([tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])]))
    return {
        "eos_token_id": ends[0] if len(ends) == 1 else ends,
        "bos_token_id": stated.get("bos_token_id", tokenizer.bos_token_id),
        "pad_token_id": tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stated.get("pad_token_id"),
    }


def hub_id(model_dir: Path) -> str | None:
    """The id of a model that lies in the cache of the Hugging Face Hub; None for any other directory."""
    cached = _CACHED_MODEL.search(str(model_dir.resolve()))
    return "/".join(cached.groups()) if cached else None
