"""A tiny model with the quickstart's tokenizer, and a config to train it: shared by the tests of sampler, update and loop."""

from __future__ import annotations

import tempfile
from pathlib import Path

import jax

from configs import quickstart
from envs.alfworld import vocabulary
from seed_jax import tokenizer as tok
from seed_jax.models import hf
from seed_jax.models.spec import ModelSpec, init_params


def tokenizer():
    return tok.build_phrase_tokenizer(
        vocabulary.phrases(), vocabulary.classes(), vocabulary.words(), vocabulary.MAX_NUMBER
    )


def spec(vocab_size: int) -> ModelSpec:
    return ModelSpec(
        vocab_size=vocab_size, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=48, max_position=512
    )


def save_model(out: Path, seed: int = 0) -> Path:
    """A random tiny model as a Hugging Face directory."""
    words = tokenizer()
    shape = spec(len(words))
    with tempfile.TemporaryDirectory() as folder:
        words.save_pretrained(folder)
        hf.save(
            init_params(shape, jax.random.PRNGKey(seed)),
            shape,
            out,
            tokenizer_dir=folder,
            eos_token_id=words.eos_token_id,
            pad_token_id=words.pad_token_id,
        )
    return out


def config(model_dir: Path, method: str = "seed"):
    """The quickstart's config at toy size."""
    config = quickstart.get_config(method)
    config.model.init = str(model_dir)
    config.iterations = 2
    config.env.max_steps = 3
    config.env.train_tasks = 12
    config.rollout.tasks = 3
    config.rollout.group = 2
    config.rollout.batch = 16
    config.pack.rows_per_micro = 8
    config.mesh.fsdp = 1
    config.eval.games = 6
    config.eval.every = 0
    config.checkpoint.every = 1
    config.log.diagnostics_episodes = 6
    config.hindsight.min_coverage_iterations = 0
    return config
