"""A tiny model with the quickstart's tokenizer, and a config to train it: shared by the tests of sampler, update and
loop."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import jax

from configs import quickstart
from envs.alfworld import games, generate, vocabulary
from seed_jax import tokenizer as tok
from seed_jax.models import hf
from seed_jax.models.spec import ModelSpec, init_params
from seed_jax.runtime.logging import prepare_workdir, read_jsonl

GRAMMAR = """grammar :: {{"task": [{{"rhs": "Your task is to: {goal}."}}]}};
action PutObject {{
    template :: "move {{o}} to {{r}}";
}}
"""


@functools.cache
def tokenizer():
    return tok.build_phrase_tokenizer(
        vocabulary.phrases(), vocabulary.classes(), vocabulary.words(), vocabulary.MAX_NUMBER
    )


def spec(vocab_size: int) -> ModelSpec:
    return ModelSpec(
        vocab_size=vocab_size, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=48,
        max_position=512,
    )  # fmt: skip


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
    config.rollout.prompt_bucket = 160  # one padded length, so that the sampler compiles once
    config.pack.rows_per_micro = 8
    config.mesh.fsdp = 1
    config.eval.games = 6
    config.eval.every = 0
    config.checkpoint.every = 1
    config.log.diagnostics_episodes = 6
    config.hindsight.min_coverage_iterations = 0
    return config


def run(config, workdir: Path, change_setup=lambda setup: setup) -> dict:
    """What the launcher does, in this process: starts the run, or resumes it if the workdir already holds it."""
    from launch.environment import open_environment
    from seed_jax.train import loop

    resuming = prepare_workdir(workdir, config)
    with open_environment(config) as setup:
        return loop.train(config, change_setup(setup), workdir, resuming=resuming)


def outcome(workdir: Path, iteration: int) -> dict:
    """Everything a run leaves that must not depend on interruptions: compared with ==, so bit by bit.

    `checksums` covers weights, moments and counters of the checkpoint of the last iteration.
    """
    without_time = lambda record: {k: v for k, v in record.items() if not k.startswith("time/")}  # noqa: E731
    meta = json.loads((workdir / "checkpoints" / str(iteration) / "meta" / "metadata").read_text())
    return {
        "weights": (workdir / "export" / "model.safetensors").read_bytes(),
        "checksums": meta["leaf_checksums"],
        "metrics": [without_time(record) for record in read_jsonl(workdir / "metrics.jsonl")],
        "evaluations": read_jsonl(workdir / "evaluations.jsonl"),
        "episodes": read_jsonl(workdir / "episodes.jsonl"),
    }


def write_games(root: Path, split: str, count: int) -> list[Path]:
    """Generated games as files in the official layout (with the parts that the native engine reads)."""
    paths = []
    for task in generate.make_tasks(split, count):
        game = task.source
        path = root / games.SPLIT_DIRS[split] / game["directory"] / f"trial_{game['seed']:07d}" / games.GAME_FILE
        path.parent.mkdir(parents=True)
        content = {
            "pddl_domain": "(define (domain alfred))",
            "grammar": GRAMMAR.format(goal=game["goal"]),
            "pddl_problem": game["pddl_problem"],
            "solvable": True,
            "walkthrough": game["walkthrough"],
        }
        path.write_text(json.dumps(content))
        paths.append(path)
    return paths
