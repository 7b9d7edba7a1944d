"""Configs of the environments beside ALFWorld, as published and at the size of the shipped model."""

from __future__ import annotations

from configs import ezpoints, search, sokoban, webshop
from configs.quickstart import ASSETS

CONFIGS = {"webshop": webshop, "search": search}
VISUAL = {"sokoban": sokoban, "ezpoints": ezpoints}


def config_of(name: str, **env):
    config = (CONFIGS | VISUAL)[name].get_config()
    config.model.init = str(ASSETS / "stage1")
    config.env.update(env)
    return config


def small(name: str):
    """At the size of the shipped model."""
    config = config_of(name, prompt="compact", max_steps=2, history=1, topk=1, block_chars=100)
    config.iterations = 2
    config.model.dtype, config.model.remat = "float32", "none"
    config.old_logprobs = "sampler"
    config.rollout.tasks, config.rollout.group, config.rollout.batch = 2, 2, 16
    config.rollout.max_prompt_tokens, config.rollout.max_response_tokens, config.rollout.prompt_bucket = 300, 16, 300
    config.hindsight.max_analysis_tokens, config.hindsight.max_skill_tokens = 300, 24
    config.hindsight.min_coverage_iterations = 0
    config.pack.row_tokens, config.pack.teacher_row_tokens = 360, 360
    config.pack.scored_tokens_per_row, config.pack.max_turns_per_row = 48, 3
    config.pack.rows_per_micro, config.pack.micros_per_mini = 8, 1
    config.mesh.fsdp = -1
    config.eval.games, config.eval.every, config.eval.temperatures = 4, 0, (0.0,)
    config.log.diagnostics_episodes, config.log.tensorboard = 2, False
    return config


def seeing(name: str, model_dir, **env):
    """With pictures, for a tiny model that sees (tiny.vision_model): rooms of 5 x 5 cells of 28 pixels."""
    pictures = {"prompt": "released", "observation": "image", "tile_px": 28, "min_pixels": 0, "rows": 5, "columns": 5}
    config = small(name)
    config.env.update(pictures | {"train_tasks": 8} | env)
    config.model.init = str(model_dir)
    config.old_logprobs = "recompute"
    config.rollout.batch = 4
    config.rollout.max_prompt_tokens, config.rollout.prompt_bucket = 400, 416
    config.hindsight.max_analysis_tokens, config.hindsight.max_skill_tokens = 900, 340
    config.pack.row_tokens, config.pack.teacher_row_tokens = 840, 1300
    config.pack.scored_tokens_per_row, config.pack.max_turns_per_row, config.pack.max_images_per_row = 32, 2, 2
    config.pack.rows_per_micro = 4
    config.eval.games = 2
    return config
