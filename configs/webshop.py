"""Any method on WebShop, with the published settings of its 3B runs (arXiv 2607.14777).

python -m launch.train --config=configs/webshop.py:seed --config.model.init=DIR --workdir=runs/webshop

The catalogue is generated unless --config.env.data=DIR names a folder with WebShop's files; for those the nouns of the
product names must be stored once: python -m envs.webshop.prepare --data=DIR. Goals are in one fixed order: the first
500 are the test split ("unseen"), the next 1,000 the dev split ("seen"), the rest is for training.

python -m launch.evaluate --config=configs/webshop.py --checkpoint=runs/webshop --split=unseen
"""

from __future__ import annotations

from ml_collections import ConfigDict

from configs import base, methods


def get_config(method: str = "seed") -> ConfigDict:
    """method: a preset of configs/methods.py."""
    config = base.get_config()
    config.iterations = 160
    config.env.name = "webshop"
    config.env.max_steps = 15
    config.env.history = 2
    config.env.train_tasks = 100_000  # all there are
    config.rollout.tasks = 16
    config.rollout.group = 8
    config.rollout.max_prompt_tokens = 4096
    config.rollout.max_response_tokens = 512
    config.hindsight.library = str(base.SKILLS / "webshop")
    config.adv.normalize = "mean"
    config.adv.penalty = 0.1
    config.loss.kl_coef = 0.01
    config.pack.row_tokens = 8192
    config.pack.teacher_row_tokens = 12_288
    config.pack.scored_tokens_per_row = 2048
    config.pack.rows_per_micro = 4
    config.pack.micros_per_mini = 4  # about the 64 turns of a published mini-batch
    config.eval.every = 5
    config.eval.split = "unseen"
    config.eval.games = 128
    return methods.apply(config, method)
