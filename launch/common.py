"""What every launcher that trains does: settings of the process, and one run from config to summary."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from envs.search.game import RetrievalDown
from launch.environment import DataError, open_environment, record_games
from seed_jax import config as config_lib
from seed_jax import sharding
from seed_jax import tokenizer as tok
from seed_jax.evaluate import PanelError
from seed_jax.hindsight.client import ClientError
from seed_jax.hindsight.library import SkillError
from seed_jax.hindsight.sources import load_library
from seed_jax.models import hf
from seed_jax.rollout import PromptError
from seed_jax.runtime import multihost
from seed_jax.runtime.checkpoint import CheckpointError
from seed_jax.runtime.host import keep_freed_memory, use_every_core
from seed_jax.runtime.logging import WorkdirError, prepare_workdir
from seed_jax.sampler.engine import Sampler, sampler_of
from seed_jax.train.dumps import NotFinite
from seed_jax.train.loop import train

# What a config or a user's files can cause: told in one line, without a traceback.
INPUT_ERRORS = (
    config_lib.ConfigError, DataError, SkillError, ClientError, WorkdirError, PromptError, multihost.HostError
)  # fmt: skip
# What can end a run on its way, likewise in one line; the same command resumes from the last checkpoint.
RUN_ERRORS = (PanelError, RetrievalDown, NotFinite)
EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130


def check(config) -> None:
    """Raises one of INPUT_ERRORS if the config, or a skill library that it names, cannot work; prints warnings."""
    config_lib.check(config)
    load_library(config.hindsight)
    for warning in config_lib.warnings(config):
        print(f"warning: {warning}", file=sys.stderr)


def prepare_process(configs: Sequence, rows: int = 0) -> None:
    """Settings of JAX and the host for one or more runs in this process. Call before anything touches a device.

    rows: of another batch that the devices of a CPU must be able to share; 0 = there is none
    """
    keep_freed_memory()
    use_every_core(math.gcd(rows, *(min(c.pack.rows_per_micro, max(1, c.rollout.batch // 4)) for c in configs)))
    logging.getLogger("absl").setLevel(logging.WARNING)
    jax.config.update("jax_compilation_cache_dir", str(Path.home() / ".cache" / "seed_jax" / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def open_model(config) -> tuple[Sampler, Any]:
    """(sampler, tokenizer) of the model in model.init. Raises ConfigError if it cannot be used."""
    mesh = sharding.make_mesh(fsdp=config.mesh.fsdp, tensor=config.mesh.tensor)
    try:
        model_dir = hf.resolve(config.model.init)
        spec, params = hf.load(model_dir, mesh)
        tokenizer = tok.load_tokenizer(model_dir, config.rollout.thinking, spec.vision)
    except (OSError, ValueError, CheckpointError) as error:
        raise config_lib.ConfigError(f"model.init = {config.model.init!r}: {error}") from error
    sampler = sampler_of(config, spec, tokenizer, mesh)
    sampler.load(params)
    return sampler, tokenizer


def run(config, workdir: Path, *, overwrite: bool = False) -> dict:
    """Trains in a workdir, or resumes what it holds; returns the summary."""
    multihost.require_same("the config", config_lib.config_hash(config))
    resuming = multihost.from_first(lambda: prepare_workdir(workdir, config, overwrite))
    with open_environment(config) as setup:
        record_games(config, setup, workdir)
        return train(config, setup, workdir, resuming=resuming)
