"""Any method on Search-QA, with the published settings of its 3B runs (arXiv 2607.14777).

python -m launch.train --config=configs/search.py:seed --config.model.init=DIR --workdir=runs/search

Questions and corpus are generated unless --config.env.data=DIR names a folder with train, dev and test as .jsonl or
.parquet and with corpus.jsonl (python -m envs.search.prepare makes one of real text). A corpus of full size belongs
behind a server: --config.env.retriever=http --config.env.retriever_url=http://HOST:PORT (python -m envs.search.serve,
or any server of Search-R1). "seen" is the dev split, "unseen" the test split.

python -m launch.evaluate --config=configs/search.py --checkpoint=runs/search --split=unseen
"""

from __future__ import annotations

from ml_collections import ConfigDict

from configs import base, methods


def get_config(method: str = "seed") -> ConfigDict:
    """method: a preset of configs/methods.py."""
    config = base.get_config()
    config.iterations = 150
    config.env.name = "search"
    config.env.max_steps = 4
    config.env.history = 4  # every earlier turn
    config.env.train_tasks = 1_000_000  # all there are
    config.rollout.tasks = 128
    config.rollout.group = 8
    config.rollout.max_prompt_tokens = 4096
    config.rollout.max_response_tokens = 512
    config.hindsight.library = str(base.SKILLS / "search")
    config.adv.penalty = 0.01
    config.loss.kl_coef = 0.001
    config.loss.entropy_coef = 0.0
    config.optim.warmup_steps = 90  # about 15 iterations
    config.pack.row_tokens = 8192
    config.pack.teacher_row_tokens = 12_288
    config.pack.scored_tokens_per_row = 4096
    config.pack.rows_per_micro = 4
    config.pack.micros_per_mini = 16  # about the 512 turns of a published mini-batch
    config.eval.every = 0  # before and after: the test split is large
    config.eval.split = "unseen"
    return methods.apply(config, method)
