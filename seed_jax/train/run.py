"""What a run is made of before its first iteration: config, environment, model, sampler, compiled update, writers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from seed_jax import sharding
from seed_jax import tokenizer as tok
from seed_jax.hindsight.evidence import solver, truth
from seed_jax.hindsight.sources import Skills
from seed_jax.models import hf
from seed_jax.rollout import World
from seed_jax.runtime import multihost, usage
from seed_jax.runtime.logging import (
    EPISODES_FILE,
    EVALUATIONS_FILE,
    EpisodeWriter,
    MetricsWriter,
    read_jsonl,
)
from seed_jax.runtime.signals import Interrupted
from seed_jax.runtime.terminal import reporters
from seed_jax.sampler.engine import sampler_of
from seed_jax.train import factors, second
from seed_jax.train.compiled import shared_update
from seed_jax.train.packing import shape_of
from seed_jax.train.state import TrainState, init_state, state_shardings
from seed_jax.train.update import build_optimizer


class Setup(NamedTuple):
    """What the launcher brings: the environment (prompts, pool, limits), the training tasks and the evaluation
    panel."""

    world: World
    train_tasks: Sequence[Any]
    panel: Sequence[Any]


class Run:
    """The fixed parts of a run: config, model, sampler, compiled update, writers. Everything that changes is in
    TrainState."""

    def __init__(self, config, setup: Setup, workdir: Path):
        self.config, self.setup, self.workdir = config, setup, workdir
        self.model_dir = hf.resolve(config.model.init)
        vision = hf.load_spec(self.model_dir).vision
        self.tokenizer = tok.load_tokenizer(self.model_dir, config.rollout.thinking, vision)
        self.shape = shape_of(config.pack, setup.world.read_size(vision), vision)
        self.mesh = sharding.make_mesh(fsdp=config.mesh.fsdp, tensor=config.mesh.tensor)
        multihost.check_rows(self.mesh)
        self.spec, self.initial = hf.load(self.model_dir, self.mesh)
        self.optimizer, choices = build_optimizer(config), factors.choices(config)
        self.keep = {"keep_reference": choices.needs_reference, "keep_teacher": choices.keeps_teacher}
        self.shardings = state_shardings(
            self.optimizer,
            self.initial,
            sharding.param_shardings(self.spec, self.mesh, "train"),
            self.mesh,
            **self.keep,
        )
        self.update = shared_update(config, self.spec, self.mesh, self.shardings)
        self.sampler = sampler_of(config, self.spec, self.tokenizer, self.mesh)
        tasks = (*setup.train_tasks, *setup.panel)
        domain = setup.world.domain
        self.skills = Skills(
            config, self.tokenizer, {t.family for t in tasks}, solver(domain, tasks), truth(domain, tasks)
        )
        self.distills = choices.needs_teacher
        self.attempts = second.split_group(config.rollout, config.hindsight)  # (first, second) at each task
        self.uses_skills = self.distills or self.attempts[1] > 0
        self.leads = multihost.leads()  # only this process writes files and prints
        self.metrics = MetricsWriter(workdir, tensorboard=config.log.tensorboard, enabled=self.leads)
        self.episodes = EpisodeWriter(workdir / EPISODES_FILE, enabled=self.leads)
        self.compilations = usage.Compilations()
        self.progress, self.turns, self.timer, self.view, self.begin = reporters(
            config.iterations, config.env.max_steps
        )
        self.progress.message(self.sampler.plan())
        self.stop = threading.Event()

    def fresh_state(self) -> TrainState:
        initial, self.initial = self.initial, None  # four bytes a weight that nothing needs again
        state = init_state(initial, self.optimizer, **self.keep, reference_dtype=self.config.model.dtype)
        return jax.device_put(state, self.shardings)

    def load_sampler(self, state: TrainState) -> None:
        self.sampler.load(state.params)

    def on_turn(self, step: int, live: int) -> None:
        if self.stop.is_set():
            raise Interrupted
        self.turns(step, live)

    def stop_if_asked(self) -> None:
        """Where all hosts meet between two phases: they stop at the same point or not at all."""
        if multihost.agree_any(self.stop.is_set()):
            raise Interrupted

    def evaluations(self) -> list[dict]:
        """What evaluations.jsonl holds, as the process that writes it sees it."""
        return multihost.from_first(lambda: read_jsonl(self.workdir / EVALUATIONS_FILE))
