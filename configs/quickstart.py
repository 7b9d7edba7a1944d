"""SEED on generated ALFWorld games with a model of a million parameters, on a laptop's CPU.

python -m launch.train --config=configs/quickstart.py           --workdir=runs/seed
python -m launch.train --config=configs/quickstart.py:grpo      --workdir=runs/grpo
python -m launch.train --config=configs/quickstart.py:long      --workdir=runs/long      (also long-grpo)
"""

from __future__ import annotations

from pathlib import Path

from ml_collections import ConfigDict

from configs import base, methods

ASSETS = Path(__file__).resolve().parent.parent / "assets" / "quickstart"


def get_config(variant: str = "seed") -> ConfigDict:
    """variant: a method ("seed", "grpo"), or "long" / "long-METHOD" for a run of about an hour."""
    config = base.get_config()
    long = variant == "long" or variant.startswith("long-")
    method = (variant.removeprefix("long").removeprefix("-") or "seed") if long else variant
    config.iterations = 60 if long else 8
    config.old_logprobs = (
        "sampler"  # float32 on one device: the sampler's log-probs are the trainer's (update/sampler_gap)
    )
    config.model.init = str(ASSETS / "stage1")
    config.model.dtype = "float32"
    config.model.remat = "none"

    config.env.prompt = "compact"
    config.env.max_steps = 12
    config.env.history = 4
    config.env.train_tasks = 1440 if long else 720
    config.rollout.max_response_tokens = 20
    config.rollout.max_prompt_tokens = 140
    config.rollout.analysis_batch = 64
    config.hindsight.max_analysis_tokens = 288
    config.hindsight.max_skill_tokens = 40
    config.hindsight.library = str(base.SKILLS / "alfworld_compact")  # in the small model's vocabulary

    # A weak policy needs the penalty outside the normalised score: inside it, format alone earns full-size advantages.
    config.adv.stat = "episodes"
    config.adv.invalid = "inadmissible"
    config.adv.invalid_penalty = "after_norm"
    config.adv.eps = 1.0  # a tenth of the reward
    config.loss.kl_coef = 0.0
    config.loss.entropy_coef = 0.0
    config.optim.lr = 1e-4
    config.optim.weight_decay = 0.0

    config.pack.row_tokens = 160
    config.pack.teacher_row_tokens = 200
    config.pack.max_turns_per_row = 4
    config.pack.scored_tokens_per_row = 48
    config.pack.rows_per_micro = 64
    config.pack.micros_per_mini = 1
    config.eval.every = 2
    config.eval.games = 192
    config.log.trajectories_every = 1
    # Stage 1, which starts from assets/quickstart/base: --config.model.init=assets/quickstart/base
    config.annotate.writer = "planner"
    config.sft.lr = 5e-4
    config.sft.batch = 32
    config.sft.row_tokens = 384
    config.sft.scored_tokens_per_row = 96
    config.sft.rows_per_micro = 8
    methods.apply(config, method)
    if config.hindsight.at_rollout or config.hindsight.train_second:
        config.pack.row_tokens = 200  # a turn and the skill that the policy read
    if config.loss.gen_coef:
        config.hindsight.max_analysis_tokens = 288
        config.pack.row_tokens = 328  # an analysis and its answer
    return config
