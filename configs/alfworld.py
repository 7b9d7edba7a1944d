"""Any method on ALFWorld, with the published settings of its 3B runs (arXiv 2607.14777).

python -m launch.train --config=configs/alfworld.py:seed --config.model.init=DIR --workdir=runs/seed

DIR is a model in Hugging Face format: the base model, or one after stage 1 (the README's table says what each method
starts from). The games are generated unless --config.env.data=official (those in $ALFWORLD_DATA) or =DIR says where
others are.

python -m launch.evaluate --config=configs/alfworld.py --checkpoint=runs/seed --split=unseen --config.env.data=official
"""

from __future__ import annotations

from ml_collections import ConfigDict

from configs import base, methods


def get_config(method: str = "seed") -> ConfigDict:
    """method: a preset of configs/methods.py."""
    return methods.apply(base.get_config(), method)
