"""Any method on Sokoban, with the published settings of its 3B runs (arXiv 2607.14777), the room shown as text.

python -m launch.train --config=configs/sokoban.py:seed --config.model.init=DIR --workdir=runs/sokoban

The published runs show pictures, to Qwen2.5-VL-3B-Instruct: --config.env.observation=image (needs Pillow). A picture of
96 x 96 pixels is enlarged to 256 x 256 as there, read at 252 x 252, and takes 81 of the prompt's tokens. With
--config.env.tile_px=28 --config.env.min_pixels=0 it is drawn at 168 x 168, a cell of the room a token: 36 of them.

Rooms are generated unless --config.env.data=DIR names a folder with train.txt, seen.txt and unseen.txt (levels as text,
an empty line between two). Generated rooms of "seen" and "unseen" occur in no other split, turned and mirrored ones
included. Harder rooms: --config.env.min_moves=8, --config.env.boxes=2, --config.env.rows=8.

python -m launch.evaluate --config=configs/sokoban.py --checkpoint=runs/sokoban --split=unseen
"""

from __future__ import annotations

from ml_collections import ConfigDict

from configs import base, methods


def get_config(method: str = "seed") -> ConfigDict:
    """method: a preset of configs/methods.py."""
    config = base.get_config()
    config.iterations = 150
    config.env.name = "sokoban"
    config.env.max_steps = 15
    config.env.history = 2  # of text; a picture stands alone
    config.env.train_tasks = 4800  # a new room for each of the 150 x 32 tasks
    config.rollout.tasks = 32
    config.rollout.group = 8
    config.rollout.max_prompt_tokens = 1024
    config.rollout.max_response_tokens = 512
    config.hindsight.library = str(base.SKILLS / "sokoban")
    config.hindsight.max_analysis_tokens = 24_576
    config.adv.penalty = 0.1
    config.loss.kl_coef = 0.01
    config.pack.rows_per_micro = 4
    config.pack.micros_per_mini = 3  # about the 64 turns of a published mini-batch
    config.pack.max_images_per_row = 8  # a turn with its picture takes 500 tokens or more
    config.eval.every = 5
    config.eval.split = "unseen"
    config.eval.games = 128
    config.annotate.temperature = 1.0
    config.annotate.max_tokens = 2048
    config.sft.lr = 2e-6
    config.sft.row_tokens = 4096  # the published length of an example; see docs/stage1.md for longer ones
    return methods.apply(config, method)
