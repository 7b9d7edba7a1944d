"""Stage 1, the training: its loss and gradient against plain ones, and that a resumed run is the uninterrupted one."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import quickstart
from envs.alfworld import engine
from envs.alfworld.domain import AlfworldDomain
from envs.alfworld.generate import make_tasks
from launch.environment import open_world
from seed_jax import sharding
from seed_jax.hindsight import dataset
from seed_jax.hindsight.annotate import Rules, annotate, by_rules
from seed_jax.hindsight.prompts import fit_analyses
from seed_jax.hindsight.records import to_record
from seed_jax.models import hf
from seed_jax.models.spec import init_params
from seed_jax.models.transformer import hidden_states
from seed_jax.runtime.logging import WorkdirError, read_jsonl
from seed_jax.runtime.signals import Interrupted
from seed_jax.train import stage1
from seed_jax.train.packing import Sample, Shape
from seed_jax.train.sft import warmup_cosine
from seed_jax.train.stage1 import Data, build_programs, train_stage1
from seed_jax.train.stage1_data import Batches, LengthError, fold, samples_of, token_weights
from seed_jax.train.stage1_export import prepare_workdir
from seed_jax.train.state import init_state, make_optimizer, state_shardings
from seed_jax.types import Episode, Skill, Turn
from tests import tiny

SHAPE = Shape(48, 24, 64)


def random_samples(count: int, vocab: int, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    draw = lambda low, high: rng.integers(3, vocab, rng.integers(low, high)).tolist()  # noqa: E731
    return [Sample(draw(3, 14), draw(1, 9)) for _ in range(count)]


# -- batches -----------------------------------------------------------------------------------------------------------


def test_every_epoch_has_every_example_once_in_another_order():
    samples = random_samples(21, 50)
    batches = Batches(samples, SHAPE, batch=8, epochs=2, rows_per_micro=2, seed=3)
    assert (batches.per_epoch, batches.steps) == (3, 6)
    epochs = [[id(s) for step in range(3 * e, 3 * e + 3) for s in batches.members(step)] for e in range(2)]
    assert all(sorted(order) == sorted(map(id, samples)) for order in epochs) and epochs[0] != epochs[1]
    assert [len(batches.members(step)) for step in range(3)] == [8, 8, 5]
    rows, weights, used = batches.at(2, "token_mean")
    assert rows.tokens.shape == (batches.micros, 2, 48) and weights.shape == (batches.micros, 2, 24)
    assert not rows.segments[int(used) :].any() and rows.segments[: int(used)].any(axis=(1, 2)).all()


@pytest.mark.parametrize("loss", ["example_mean", "token_mean"])
def test_weights_are_shares_of_the_mean(loss):
    groups = [[Sample([1], [2] * 3), Sample([1], [2])], [Sample([1], [2] * 4)], []]
    weights = token_weights(groups, SHAPE, loss)
    expected = [[1 / 9] * 3 + [1 / 3], [1 / 12] * 4] if loss == "example_mean" else [[1 / 8] * 4, [1 / 8] * 4]
    np.testing.assert_allclose(weights[:2, :4], expected, rtol=1e-6)
    assert not weights[:, 4:].any() and not weights[2].any()


def test_examples_that_do_not_fit_are_an_error_that_names_the_field():
    rows = [{"prompt": "look", "response": "look " * n, "episode": f"e{n}"} for n in (2, 30)]
    with pytest.raises(LengthError, match=r"sft\.scored_tokens_per_row = 24: 1 of 2 .* longest \(e30\) has 31 tokens"):
        samples_of(tiny.tokenizer(), rows, Shape(64, 24, 64))
    with pytest.raises(LengthError, match=r"sft\.row_tokens = 20"):
        samples_of(tiny.tokenizer(), rows, Shape(20, 64, 64))
    (sample,) = samples_of(tiny.tokenizer(), rows[:1], Shape(64, 24, 64))
    assert sample.response[-1] == tiny.tokenizer().eos_token_id, "the end is learned too"


# -- the step ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    spec = tiny.spec(64)
    return spec, init_params(spec, jax.random.PRNGKey(1))


@pytest.fixture(scope="module")
def compiled(model):
    """The step and the loss for meshes of one and of eight devices."""
    spec, params = model
    config = quickstart.get_config()
    config.sft.row_tokens = SHAPE.row_tokens
    optimizer = make_optimizer(0.9, 0.95, 1e-8, 0.01, 1.0)

    @functools.cache
    def programs(devices: int):
        mesh = sharding.make_mesh(jax.devices()[:devices], fsdp=devices, tensor=1)
        placed = sharding.param_shardings(spec, mesh, "train")
        shardings = state_shardings(optimizer, params, placed, mesh, keep_reference=False)
        state = lambda: jax.device_put(init_state(params, optimizer, keep_reference=False), shardings)  # noqa: E731
        return SimpleNamespace(
            state=state,
            **dict(zip(("step", "loss"), build_programs(config, spec, mesh, optimizer, shardings), strict=True)),
        )

    return programs


@pytest.fixture(scope="module")
def plain(model):
    """(params, samples, loss) -> (loss, gradient): one example a row, softmax over all logits, no scoring code."""
    spec, _ = model

    @jax.jit
    def weighted(params, tokens, segments, weights):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden = hidden_states(params, spec, tokens, segments, positions)
        logits = hidden @ params.get("lm_head", params["embed"]).T
        nll = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
        return (nll * weights[:, 1:]).sum()

    graded = jax.jit(jax.value_and_grad(weighted))

    def value_and_grad(params, samples: list[Sample], loss: str):
        tokens, segments, weights = (np.zeros((8, 24), dtype) for dtype in (np.int32, np.int32, np.float32))
        total = sum(len(sample.response) for sample in samples)
        for row, sample in enumerate(samples):
            start, end = len(sample.prompt), len(sample.prompt) + len(sample.response)
            tokens[row, :end], segments[row, :end] = [*sample.prompt, *sample.response], 1
            weights[row, start:end] = 1 / total if loss == "token_mean" else 1 / (end - start) / len(samples)
        return graded(params, tokens, segments, weights)

    return value_and_grad


@pytest.mark.parametrize("loss", ["example_mean", "token_mean"])
def test_a_step_is_adamw_on_the_plain_loss(model, compiled, plain, loss):
    spec, params = model
    samples = random_samples(8, spec.vocab_size)
    batches = Batches(samples, SHAPE, batch=8, epochs=1, rows_per_micro=2, seed=0)
    value, grads = plain(params, samples, loss)
    reference = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, 0.9, 0.95, 1e-8, weight_decay=0.01))
    updates, _ = reference.update(grads, reference.init(params), params)
    expected = optax.apply_updates(params, updates)
    programs = compiled(1)
    state, metrics = programs.step(programs.state(), *batches.at(0, loss), jnp.float32(1e-2))
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], optax.global_norm(grads), rtol=1e-4)
    # Adam's first step is the sign of each gradient, so gradients that are zero but for rounding are left out.
    jax.tree.map(
        lambda new, old, grad: np.testing.assert_allclose(
            *(np.where(np.abs(grad) > 1e-6, x, 0.0) for x in (new, old)), atol=1e-4
        ),
        state.params, expected, grads,
    )  # fmt: skip


def test_micro_batches_and_devices_change_nothing(model, compiled):
    spec, _ = model
    samples = random_samples(8, spec.vocab_size, seed=5)
    outcomes = []
    for devices, rows_per_micro in ((1, 2), (8, 8)):
        batches = Batches(samples, SHAPE, batch=8, epochs=1, rows_per_micro=rows_per_micro, seed=0)
        programs = compiled(devices)
        _, metrics = programs.step(programs.state(), *batches.at(0, "example_mean"), jnp.float32(1e-3))
        outcomes.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    np.testing.assert_allclose(outcomes, [outcomes[0]] * 2, rtol=1e-5)


def test_validation_loss_is_the_same_mean(model, compiled, plain):
    spec, params = model
    samples = random_samples(6, spec.vocab_size, seed=7)
    groups = [samples[:2], samples[2:4], samples[4:5], samples[5:]]
    rows, weights = fold(groups, SHAPE, 2, 2, "example_mean")
    total = sum(float(compiled(1).loss(params, jax.tree.map(lambda x, i=i: x[i], rows), weights[i])) for i in range(2))
    np.testing.assert_allclose(total, plain(params, samples, "example_mean")[0], rtol=1e-5)


def test_schedule_warms_up_and_ends_at_zero():
    rates = [warmup_cosine(step, 100, 5e-6, 0.1) for step in range(101)]
    assert rates[9] == max(rates) == 5e-6 and rates[0] == pytest.approx(5e-7)
    assert rates[100] == pytest.approx(0.0, abs=1e-12) and rates[55] == pytest.approx(2.5e-6)
    assert all(a >= b for a, b in itertools.pairwise(rates[9:]))


# -- runs --------------------------------------------------------------------------------------------------------------


def make_data(directory: Path) -> Data:
    """A data set about generated games: their walkthroughs, and skills by rules."""
    domain, tasks, episodes = AlfworldDomain("compact"), make_tasks("train", 12), []
    for task in tasks:
        game = engine.make(task.source)
        observation = game.reset()
        episode = Episode(task.id, task.family, task.goal, 0, 0)
        for command in task.source["walkthrough"]:
            history = [(turn.observation, turn.command, turn.result) for turn in episode.turns]
            prompt = domain.prompt(task.goal, history, observation.text, observation.admissible, 4)
            before, observation = observation, game.step(command)
            reply = f"<think> search for mug . </think> <action> {command} </action>"
            episode.turns.append(Turn(prompt, [], [], None, before.text, reply, command, True, True, observation.text))
        episode.won = observation.won
        episodes.append(episode)
    steps = lambda episode: [(turn.command, turn.result) for turn in episode.turns]  # noqa: E731
    write = lambda i: Skill(*domain.write_skill(tasks[i], steps(episodes[i]), episodes[i].won))  # noqa: E731
    noted = [to_record(episode, 0) for episode in episodes]
    prompts = fit_analyses(tiny.tokenizer(), episodes, "compact", 288)
    lines = list(annotate(noted, episodes, prompts, by_rules(write), rules=Rules(3), asks=1))
    dataset.write(directory, *dataset.build(noted, lines, fraction=0.1, acting=1.0, seed=0))
    train, val, meta = dataset.read(directory)
    assert {row["kind"] for row in train} == {row["kind"] for row in val} == {"skill", "act"}
    return Data(train, val, [task for task in tasks if task.id in meta["val_tasks"]])


def run(home: Path, workdir: Path, **changes) -> dict:
    """What the launcher does, in this process."""
    config = tiny.config(home / "model")
    config.sft.update({"epochs": 2, "batch": 6, "play_episodes": 1, "rows_per_micro": 2})
    config.sft.update(changes)
    config.log.tensorboard = False
    data = make_data(home)
    prepare_workdir(workdir, config, dataset.read(home)[2])
    with open_world(config, data.val_tasks[:1]) as world:
        return train_stage1(config, data, world, workdir)


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, monkeypatch):
    tiny.save_model(tmp_path / "model")
    with tiny.one_device(tmp_path / "xla"):
        summary = run(tmp_path, tmp_path / "whole")
        step, calls = stage1._step, []

        def interrupted(stage, state, number):
            calls.append(number)
            if number == 2 and len(calls) == 3:
                stage.stop.set()
            return step(stage, state, number)

        monkeypatch.setattr(stage1, "_step", interrupted)
        with pytest.raises(Interrupted):
            run(tmp_path, tmp_path / "parts")
        again = run(tmp_path, tmp_path / "parts")
        assert calls == list(range(len(calls))), "no step is done twice"
        with pytest.raises(WorkdirError, match=r"config\.sft\.lr: 0\.0005 -> 0\.001"):
            run(tmp_path, tmp_path / "whole", lr=1e-3)

    without_time = lambda record: {k: v for k, v in record.items() if not k.startswith("time/")}  # noqa: E731
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        whole, parts = (list(map(without_time, read_jsonl(tmp_path / w / name))) for w in ("whole", "parts"))
        assert whole == parts and whole
    for name in ("best", "last"):
        whole, parts = ((tmp_path / w / name / "model.safetensors").read_bytes() for w in ("whole", "parts"))
        assert whole == parts
    assert summary["last"] == again["last"]

    records = read_jsonl(tmp_path / "whole" / "evaluations.jsonl")
    assert [record["epoch"] for record in records] == [0, 1, 2]
    assert records[-1]["val_loss"] < records[0]["val_loss"]
    best = min(records[1:], key=lambda record: record["val_loss"])
    assert summary["best"]["iteration"] == best["iteration"]
    noted = json.loads((tmp_path / "whole" / "best" / "seed_jax.json").read_text())
    assert noted["steps"] == best["iteration"] and noted["method"] == "stage1"
    hf.load(tmp_path / "whole" / "last")
