"""A tiny model, made-up turns, and a compiled update of any config: shared by the tests of update and objective."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base, methods
from seed_jax import sharding
from seed_jax.models import transformer
from seed_jax.models.spec import ModelSpec, init_params
from seed_jax.train.factors import choices
from seed_jax.train.packing import Sample, Shape, pack
from seed_jax.train.state import init_state, state_shardings
from seed_jax.train.update import build_optimizer, build_update, hyper

SPEC = ModelSpec(vocab_size=64, d_model=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, d_ff=24)
SHAPE = Shape(row_tokens=40, scored_tokens=16, turns=3, teacher_row_tokens=56)


def make_config(method: str = "seed", **changes: object):
    """A config whose optimizer step depends smoothly on the gradient: Adam with a tiny epsilon would turn a rounding
    error into a full step."""
    config = base.get_config()
    config.model.dtype, config.model.remat = "float32", "none"
    config.optim.lr, config.optim.eps, config.optim.weight_decay = 0.02, 1e-2, 0.0
    config.pack.rows_per_micro, config.pack.micros_per_mini = 8, 1
    config.loss.kl_coef, config.loss.entropy_coef = 0.0, 0.01
    config.distill.coef = 0.5
    methods.apply(config, method)
    for name, value in changes.items():
        section, _, field = name.partition("__")
        if field:
            config[section][field] = value
        else:
            config[section] = value
    return config


class Trainer:
    """A compiled update of one config on one mesh, called on fresh copies of the same weights."""

    def __init__(self, config, devices: int = 1):
        self.config, self.mesh = config, sharding.make_mesh(jax.devices()[:devices])
        self.optimizer, self.choices = build_optimizer(config), choices(config)
        self.keep = {"keep_reference": self.choices.needs_reference, "keep_teacher": self.choices.keeps_teacher}
        self.shardings = state_shardings(
            self.optimizer,
            weights(),
            sharding.param_shardings(SPEC, self.mesh, "train"),
            self.mesh,
            **self.keep,
        )
        self.update = build_update(config, SPEC, self.mesh, self.shardings)

    def fresh_state(self):
        return jax.device_put(init_state(weights(), self.optimizer, **self.keep), self.shardings)

    def pack(self, samples):
        pack_config = self.config.pack
        unit = pack_config.rows_per_micro * pack_config.micros_per_mini
        return pack(samples, SHAPE, unit, self.choices.needs_teacher)

    def __call__(self, samples, state=None, batch=None, **numbers: float):
        batch = self.pack(samples) if batch is None else batch
        given = hyper(self.config) | {name: jnp.float32(value) for name, value in numbers.items()}
        state, metrics = self.update(self.fresh_state() if state is None else state, batch, given)
        return jax.device_get(state), {name: float(value) for name, value in metrics.items()}


@functools.cache
def trainer(method: str = "seed", devices: int = 1, **changes: object) -> Trainer:
    return Trainer(make_config(method, **changes), devices)


@functools.cache
def weights():
    """With a larger embedding than at the start of training, so that tokens differ in probability."""
    params = init_params(SPEC, jax.random.PRNGKey(1))
    return {**params, "embed": 8.0 * params["embed"]}


def make_samples(count: int = 24, seed: int = 0, *, skills: bool = True, won: bool = True) -> list[Sample]:
    """Groups of eight turns: four episodes of two. Half of the episodes win, every third turn has no skill."""
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(count):
        prompt = rng.integers(1, SPEC.vocab_size, rng.integers(4, 10)).tolist()
        response = rng.integers(1, SPEC.vocab_size, rng.integers(1, 7)).tolist()
        hint = rng.integers(1, SPEC.vocab_size, rng.integers(1, 5)).tolist()
        teacher = [*prompt[:2], *hint, *prompt[2:]] if skills and i % 3 else None
        reward = 10.0 if won and (i // 2) % 4 in ((1, 2), (0,), (0, 1, 3))[i // 8 % 3] else 0.0
        logprobs = -rng.uniform(2, 6, len(response)).astype(np.float32)
        samples.append(Sample(prompt, response, teacher, logprobs, reward, bool(rng.random() < 0.4), i // 8, i // 2))
    return samples


def written(samples, seed: int = 2):
    """What the policy wrote about three episodes of the first group, one of which lost."""
    rng = np.random.default_rng(seed)
    draw = lambda low, high: rng.integers(1, SPEC.vocab_size, rng.integers(low, high)).tolist()  # noqa: E731
    firsts = [next(s for s in samples if s.episode == episode) for episode in (0, 1, 2)]
    return [
        Sample(draw(4, 9), response := draw(2, 6), None, np.full(len(response), -3.0), group=s.group, episode=s.episode,
               generated=True)
        for s in firsts
    ]  # fmt: skip


def turn_logprobs(params, prompts, responses, width: int = 24, longest: int = 6):
    """Every turn alone in its row, no packing: (log-probs, entropies, mask), each [turns, longest response]."""
    tokens, segments = np.zeros((2, len(prompts), width), np.int32)
    place, target, mask = np.zeros((3, len(prompts), longest), np.int32)
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        tokens[i, : len(prompt) + len(response)] = [*prompt, *response]
        segments[i, : len(prompt) + len(response)] = 1
        place[i, : len(response)] = np.arange(len(prompt), len(prompt) + len(response)) - 1
        target[i, : len(response)], mask[i, : len(response)] = response, 1
    return *score_rows(params, tokens, segments, place, target), mask.astype(bool)


@jax.jit
def score_rows(params, tokens, segments, place, target):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden = transformer.hidden_states(params, SPEC, tokens, segments, positions)
    logp = jax.nn.log_softmax(transformer.unembed(params, SPEC, hidden))
    logp = jnp.take_along_axis(logp, place[:, :, None], axis=1)
    entropy = -(jnp.exp(logp) * logp).sum(-1)
    return jnp.take_along_axis(logp, target[:, :, None], axis=2)[..., 0], entropy


def leaves(state):
    return jax.tree.leaves(state.params)


def assert_bitwise(left, right):
    for a, b in zip(leaves(left), leaves(right), strict=True):
        assert a.tobytes() == b.tobytes()


def assert_close(left, right):
    for a, b in zip(leaves(left), leaves(right), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


def assert_metrics_close(left: dict, right: dict):
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value == pytest.approx(right[name], abs=1e-5, rel=1e-5), name


def distance(state) -> float:
    """Largest change of a weight."""
    return max(np.abs(a - np.asarray(b)).max() for a, b in zip(leaves(state), jax.tree.leaves(weights()), strict=True))
