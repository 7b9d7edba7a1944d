"""The compiled update of each structure, kept while the process lives.

Runs that differ in numbers only (coefficients, clip ranges, beta, learning rate) have one structure; when a sweep
starts them one after the other in one process, the update is compiled for the first of them.
"""

from __future__ import annotations

from collections import OrderedDict

from jax.sharding import Mesh

from seed_jax.models.spec import ModelSpec
from seed_jax.train.state import TrainState
from seed_jax.train.update import build_update, structure

KEPT = 4  # structures; a compiled program holds device memory
_UPDATES: OrderedDict = OrderedDict()


def shared_update(config, spec: ModelSpec, mesh: Mesh, shardings: TrainState):
    """`build_update`, or what it gave before for the same structure and the same numbers inside the optimizer.

    `shardings` follows from spec, mesh and structure.
    """
    optim = config.optim
    key = (structure(config, spec, mesh), optim.b1, optim.b2, optim.eps, optim.weight_decay, optim.grad_clip)
    if key not in _UPDATES:
        _UPDATES[key] = build_update(config, spec, mesh, shardings)
    _UPDATES.move_to_end(key)
    while len(_UPDATES) > KEPT:
        _UPDATES.popitem(last=False)
    return _UPDATES[key]
