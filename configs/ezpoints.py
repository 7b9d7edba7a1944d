"""Any method on EZPoints, with the published settings of its 3B runs (arXiv 2607.14777), the cards shown as text.

python -m launch.train --config=configs/ezpoints.py:seed --config.model.init=DIR --workdir=runs/ezpoints

The published runs show pictures, to Qwen2.5-VL-3B-Instruct: --config.env.observation=image (needs Pillow). A picture of
300 x 300 pixels is read at 308 x 308 and takes 121 of the prompt's tokens.

There are only 304 deals. "seen" and "unseen" are panels of every deal of their split once, 83 and 70; they share no
deal with training, but its pairs of values, of which there are 7. Success is reported by operator. The published 128
draws with repetition: launch.evaluate --reference_style.

python -m launch.evaluate --config=configs/ezpoints.py --checkpoint=runs/ezpoints --split=unseen
"""

from __future__ import annotations

from ml_collections import ConfigDict

from configs import base, methods


def get_config(method: str = "seed") -> ConfigDict:
    """method: a preset of configs/methods.py."""
    config = base.get_config()
    config.iterations = 100
    config.env.name = "ezpoints"
    config.env.max_steps = 8
    config.env.history = 0  # the formula says it all
    config.env.train_tasks = 1600  # a new draw for each of the 100 x 16 tasks
    config.rollout.tasks = 16
    config.rollout.group = 8
    config.rollout.max_prompt_tokens = 1024
    config.rollout.max_response_tokens = 512
    config.hindsight.library = str(base.SKILLS / "ezpoints")
    config.adv.penalty = 0.1
    config.loss.kl_coef = 0.01
    config.pack.rows_per_micro = 4
    config.pack.micros_per_mini = 6  # about the 128 turns of a published mini-batch
    config.pack.max_images_per_row = 8  # a turn with its picture takes 500 tokens or more
    config.eval.every = 5
    config.eval.split = "unseen"
    config.annotate.temperature = 1.0
    config.annotate.max_tokens = 2048
    config.sft.lr = 2e-6
    config.sft.row_tokens = 4096  # the published length of an example; see docs/stage1.md for longer ones
    return methods.apply(config, method)
