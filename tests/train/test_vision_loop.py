"""Runs of a tiny random model that sees pictures: everything from the games to the exported weights."""

from __future__ import annotations

import math

import numpy as np
import pytest

from launch.environment import open_environment
from seed_jax import config as config_lib
from seed_jax.config import ConfigError
from seed_jax.models import hf
from seed_jax.runtime.logging import prepare_workdir, read_jsonl
from seed_jax.train import loop
from seed_jax.train.loop import train
from seed_jax.train.packing import Shape, pack
from seed_jax.train.scoring import score
from tests import tiny
from tests.worlds import VISUAL, seeing

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sighted(tmp_path_factory):
    return tiny.vision_model(tmp_path_factory.mktemp("model") / "sighted", seed=2)


def run(config, workdir):
    config_lib.check(config)
    resuming = prepare_workdir(workdir, config)
    with open_environment(config) as setup:
        return train(config, setup, workdir, resuming=resuming)


def library(name: str, model_dir):
    config = seeing(name, model_dir)
    config.hindsight.source = "static_library"
    return config


@pytest.fixture(scope="module")
def taught(sighted, one_device, tmp_path_factory):
    """{environment: (workdir, summary)} of two iterations whose teacher reads the library's skill."""
    found = {}
    for name in VISUAL:
        workdir = tmp_path_factory.mktemp(name)
        found[name] = workdir, run(library(name, sighted), workdir)
    return found


@pytest.mark.parametrize("name", VISUAL)
def test_two_iterations(name, taught):
    workdir, summary = taught[name]
    rows = read_jsonl(workdir / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == [1, 2]
    for row in rows:
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
        assert row["rollout/env_errors"] == 0 and row["update/skipped_steps"] == 0
        assert row["update/sampler_gap"] < 1e-4, "training and decoding see the same picture in the same place"
        assert row["opd/coverage"] == 1 and row["opd/gap_size"] > 1e-3
        assert row["update/grad_norm"] > 0
    assert summary["games"] == 2 and 0 <= summary["eval_after"] <= 1
    assert summary["skill_table"].keys() <= {"failure: invalid action", "failure: no move"}
    views = [turn for record in read_jsonl(workdir / "trajectories.jsonl") for turn in record["turns"]]
    assert all(np.isfinite(turn[view]).all() for turn in views for view in ("student", "teacher"))


def test_the_tower_is_trained_and_exported(taught, sighted):
    from safetensors.numpy import load_file

    workdir, _ = taught["sokoban"]
    before, after = (load_file(folder / "model.safetensors") for folder in (sighted, workdir / "export"))
    assert before.keys() == after.keys()
    moved = [name for name in before if "visual" in name and not np.array_equal(before[name], after[name])]
    assert len(moved) > 20


def test_resuming_goes_on_bit_by_bit(taught, sighted, tmp_path):
    workdir, _ = taught["sokoban"]
    config = library("sokoban", sighted)
    config.iterations = 1
    run(config, tmp_path)
    config.iterations = 2
    run(config, tmp_path)
    ours, theirs = (tiny.outcome(folder, 2) for folder in (tmp_path, workdir))
    assert ours["weights"] == theirs["weights"] and ours["checksums"] == theirs["checksums"]


def once(config):
    """One iteration, with nothing but training."""
    config.iterations = 1
    config.log.trajectories_every = config.log.trajectories_panel = config.log.diagnostics_episodes = 0
    return config


def test_the_analyzer_sees_the_episode_and_is_trained_on_it(sighted, one_device, tmp_path, monkeypatch):
    """A random model writes no usable skill: no turn has a teacher, but what was written is scored with its images, and
    training finds the log-probs that it was sampled with."""
    packed = []
    monkeypatch.setattr(loop, "pack", lambda samples, *rest: packed.append(samples) or pack(samples, *rest))
    config = once(seeing("ezpoints", sighted))
    config.hindsight.source, config.hindsight.max_skill_tokens = "self_hindsight", 16
    config.loss.gen_coef = 0.1
    config.pack.row_tokens = config.pack.teacher_row_tokens = 920
    run(config, tmp_path)
    [row] = read_jsonl(tmp_path / "metrics.jsonl")
    assert row["update/skipped_steps"] == 0 and row["update/sampler_gap"] < 1e-4
    assert row["update/generation_loss"] == 0 and math.isfinite(row["update/grad_norm"])
    written = [sample for sample in packed[0] if sample.generated]
    assert len(written) == 4 and all(len(sample.images) == 2 for sample in written)
    spec, params = hf.load(sighted)
    shape = Shape(920, 32, 1, images=2, image_size=written[0].images[0].shape[:2], vision=spec.vision)
    for sample, logprobs in zip(written, score(params, spec, written, shape, rows_per_call=4), strict=True):
        np.testing.assert_allclose(logprobs, sample.logprobs, atol=1e-4)


def test_a_model_of_text_is_refused(sighted, one_device, tmp_path):
    config = library("sokoban", sighted)
    with open_environment(config) as setup:
        config.model.init = str(tiny.save_model(tmp_path / "blind"))
        with pytest.raises(ConfigError, match=r"'image', but model.init is a model without vision"):
            train(config, setup, tmp_path / "run")


def test_a_model_that_sees_reads_text(sighted, one_device, tmp_path):
    config = once(seeing("ezpoints", sighted, observation="text"))
    config.hindsight.source = "static_library"
    run(config, tmp_path)
    [row] = read_jsonl(tmp_path / "metrics.jsonl")
    assert row["update/sampler_gap"] < 1e-4 and row["opd/gap_size"] > 1e-3
