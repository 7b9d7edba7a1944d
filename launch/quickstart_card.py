"""What the card of the quickstart models says about them."""

from __future__ import annotations

import json
from pathlib import Path

from jax.sharding import Mesh

from configs import quickstart
from envs.alfworld.domain import FACTORY, AlfworldDomain
from envs.base import Task
from envs.pool import make_pool
from seed_jax import sharding
from seed_jax import tokenizer as tok
from seed_jax.evaluate import evaluate
from seed_jax.hindsight.analyzer import analyze
from seed_jax.models import hf
from seed_jax.rollout import World
from seed_jax.sampler.engine import Sampler

BATCH = 64  # requests decoded together, at most


def measure(directory: Path, panels: dict[str, list[Task]], mesh: Mesh | None = None) -> dict:
    """{panel: success and admissible rate, greedy and at temperature .4} and the parse rate of skills of a model.

    mesh: the devices that it plays on, default all; the figures do not depend on them
    """
    tokenizer = tok.load_tokenizer(directory)
    spec, params = hf.load(directory)
    batch = min(BATCH, *map(len, panels.values()))
    sampler = Sampler(spec, tokenizer.eos_token_id, seed=0, batch=batch, mesh=mesh or sharding.make_mesh())
    sampler.load(params)
    config = quickstart.get_config()
    world = World(AlfworldDomain(config.env.prompt), make_pool(FACTORY), config.env.max_steps, config.env.history)
    results: dict = {}
    for name, tasks in panels.items():
        results[name] = {}
        for temperature in config.eval.temperatures:
            results[name][f"temperature {temperature:g}"], episodes, _ = evaluate(
                sampler,
                tokenizer,
                world,
                tasks,
                temperature=temperature,
                max_tokens=config.rollout.max_response_tokens,
                max_prompt_tokens=config.rollout.max_prompt_tokens,
                seed=config.eval.seed,
            )
    counts = analyze(sampler, tokenizer, episodes, config.hindsight, config.env.prompt, 0)
    results["skill_parse_rate"] = counts["parsed"] / counts["analyzed"]
    print(f"{directory}: {json.dumps(results, indent=1)}", flush=True)
    return results
