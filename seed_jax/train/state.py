"""The training state and its optimizer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import serialization, struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec


@struct.dataclass
class TrainState:
    """Everything an update changes. `reference` (the initial policy) and `teacher` (the weights of a teacher that lags
    behind) are None when nothing needs them."""

    params: Any
    opt_state: Any
    step: Any  # [] int32, optimizer steps taken
    reference: Any = None
    teacher: Any = None


def make_optimizer(
    b1: float, b2: float, eps: float, weight_decay: float, grad_clip: float
) -> optax.GradientTransformation:
    """AdamW after global-norm clipping, without the learning rate: `apply_gradients` takes that as a run-time
    number."""
    return optax.chain(
        optax.clip_by_global_norm(grad_clip),
        optax.scale_by_adam(b1=b1, b2=b2, eps=eps),
        optax.add_decayed_weights(weight_decay),
    )


def state_shardings(
    optimizer, params, param_shardings, mesh: Mesh, *, keep_reference: bool, keep_teacher: bool = False
) -> TrainState:
    """Where every array of the state lives: moments and reference like their parameter, counters on every device."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    opt_state = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, params),
        param_shardings,
        transform_non_params=lambda _: everywhere,
    )
    return TrainState(
        params=param_shardings,
        opt_state=opt_state,
        step=everywhere,
        reference=param_shardings if keep_reference else None,
        teacher=param_shardings if keep_teacher else None,
    )


def init_state(
    params, optimizer, *, keep_reference: bool, keep_teacher: bool = False, reference_dtype: Any = jnp.float32
) -> TrainState:
    """A fresh state around float32 master parameters (copied, so that donation cannot eat the caller's arrays).

    reference_dtype: the model's compute dtype; the reference is kept as `frozen` keeps it
    """
    master = jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)
    return TrainState(
        params=master,
        opt_state=optimizer.init(master),
        step=jnp.zeros((), jnp.int32),
        reference=frozen(master, reference_dtype) if keep_reference else None,
        teacher=jax.tree.map(jnp.array, master) if keep_teacher else None,
    )


def frozen(params, dtype) -> Any:
    """A copy of weights that are only scored with, matrices in `dtype`: half the memory in bfloat16.

    The model casts matrices and tables to its compute dtype before it uses them, so with that dtype scores are those
    of the original, bit by bit. Norms and biases stay as they are: norms are computed in float32.
    """

    def copy(path, x):
        name = path[-1].key
        return jnp.array(x, None if "norm" in name or "bias" in name else dtype)

    return jax.tree_util.tree_map_with_path(copy, params)


def apply_gradients(state: TrainState, grads, optimizer, lr) -> tuple[TrainState, dict]:
    """One optimizer step. A gradient that is not finite changes nothing but the count in the metrics."""
    norm = optax.global_norm(grads)
    finite = jnp.isfinite(norm)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = jax.tree.map(lambda p, u: p - lr * u, state.params, updates)
    keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)  # noqa: E731
    state = state.replace(
        params=keep(params, state.params),
        opt_state=keep(opt_state, state.opt_state),
        step=state.step + finite.astype(jnp.int32),
    )
    return state, {"grad_norm": jnp.where(finite, norm, 0.0), "skipped_steps": 1.0 - finite}


def as_tree(state: TrainState) -> dict:
    """The state as plain containers (what is None has no entry), for the checkpoint."""
    return {name: value for name, value in serialization.to_state_dict(state).items() if value is not None}


def from_tree(tree: dict, like: TrainState) -> TrainState:
    return serialization.from_state_dict(like, {"reference": None, "teacher": None, **tree})
