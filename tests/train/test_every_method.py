"""Every preset trains on the toy environment."""

from __future__ import annotations

import math
from pathlib import Path

import jax
import numpy as np
import pytest

from configs import methods
from seed_jax import config as config_lib
from seed_jax.hindsight.evidence import SOURCES as EVIDENCE
from seed_jax.models import hf
from seed_jax.runtime.logging import read_jsonl
from tests import tiny
from tests.hindsight.test_client import Service, answer
from tests.test_methods import EVALUATED_ONLY, EXTERNAL

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("planner_skills")]


@pytest.fixture
def service(monkeypatch):
    monkeypatch.setenv("SEED_JAX_API_KEY", "key")
    skill = '{"episode_summary": "it failed", "episode_skill": "search for it on shelf 1 first ."}'
    with Service(lambda body, number: (200, {}, answer(skill))) as running:
        yield running


def config(model_dir: Path, method: str, url: str):
    made = tiny.config(model_dir, method)
    made.log.diagnostics_episodes, made.log.tensorboard = 0, False
    made.eval.temperatures = (0.4,)
    if made.hindsight.at_rollout:
        made.pack.row_tokens = made.pack.teacher_row_tokens
    if method in EXTERNAL:
        made.hindsight.api_url, made.hindsight.api_model = url, "writer"
    if made.hindsight.source == "skill_bank":  # a bank's skills are longer than a hint
        made.hindsight.max_skill_tokens = 300
        made.pack.row_tokens = made.pack.teacher_row_tokens = 460
    if made.hindsight.source in EVIDENCE:  # and so are a solution and an answer of the environment
        made.hindsight.max_skill_tokens, made.pack.teacher_row_tokens = 120, 280
    if made.distill.schedule == "margin":
        made.eval.every, made.eval.teacher_games = 1, 2
    made.rollout.max_rounds = 2
    return made


def different() -> list[str]:
    """The methods that train, without those that are another one under another name."""
    found = {}
    for method, preset in methods.PRESETS.items():
        if method not in EVALUATED_ONLY:
            found.setdefault(repr(sorted(preset.values.items())), method)
    return list(found.values())


def always_taught(made) -> bool:
    """Whether most turns have a teacher, however the games go."""
    by_luck = made.hindsight.source in ("peer_success", "group_reflection") or made.distill.rows == "losing_view"
    return not by_luck and made.hindsight.granularity != "step"


@pytest.mark.parametrize("method", different())
def test_two_iterations(method, model_dir, tmp_path, service):
    made = config(model_dir, method, service.url)
    config_lib.check(made)
    summary = tiny.run(made, tmp_path)
    assert summary["method"] == method and summary["iterations"] == 2
    records = read_jsonl(tmp_path / "metrics.jsonl")
    for record in records:
        assert record["update/skipped_steps"] == 0
        assert all(value is not None and math.isfinite(value) for value in record.values()), record
        taught = made.distill.kind != "none" or made.adv.shape != "none"
        assert taught == ("opd/coverage" in record)
        if taught and always_taught(made):
            assert record["opd/coverage"] > 0.5
    before, after = (jax.tree.leaves(hf.load(folder)[1]) for folder in (model_dir, tmp_path / "export"))
    moved = max(np.abs(a - b).max() for a, b in zip(after, before, strict=True))
    if made.rollout.group_filter == "off":
        assert moved > 1e-6
    else:  # two rounds may not hold a group with both outcomes
        assert (moved > 1e-6) == any(record["update/grad_norm"] > 0 for record in records)


def test_a_teacher_of_its_own_survives_a_restart(model_dir, tmp_path, service):
    """Stopped after one iteration and extended: the same weights, bit for bit, as without the stop."""
    made = config(model_dir, "sdpo", service.url)
    made.eval.every = 1
    tiny.run(made, tmp_path / "whole")
    made.iterations = 1
    tiny.run(made, tmp_path / "parts")
    made.iterations = 2
    tiny.run(made, tmp_path / "parts")
    whole, parts = (tiny.outcome(tmp_path / name, 2) for name in ("whole", "parts"))
    for part in ("metrics", "episodes", "checksums", "weights"):
        assert whole[part] == parts[part], part
    assert any("teacher" in name for name in whole["checksums"])
