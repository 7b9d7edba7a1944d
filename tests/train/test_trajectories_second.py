"""What a run with second attempts records of them, token by token."""

from __future__ import annotations

import numpy as np
import pytest

from launch import report
from seed_jax.report.runs import load_runs
from seed_jax.runtime.logging import read_jsonl
from seed_jax.train import second as second_attempts
from tests import tiny


@pytest.mark.slow
def test_second_attempts_of_a_run(model_dir, tmp_path, planner_skills, monkeypatch):
    """They have one view, with the skill in the prompt: its log-probs are those with which the sampler played."""
    played, play_seconds = [], second_attempts.play_seconds

    def keeping(*args):
        played.extend(play_seconds(*args))
        return played

    monkeypatch.setattr(second_attempts, "play_seconds", keeping)
    config = tiny.config(model_dir)
    config.iterations, config.old_logprobs = 1, "recompute"
    config.rollout.group, config.hindsight.second_attempts = 3, 0.34
    config.log.trajectories_per_iteration = config.rollout.tasks * config.rollout.group
    config.log.diagnostics_episodes, config.log.tensorboard, config.log.trajectories_panel = 0, False, 0
    tiny.run(config, tmp_path / "run")
    records = {r["index"]: r for r in read_jsonl(tmp_path / "run" / "trajectories.jsonl")}
    seconds = [r for r in records.values() if r["attempt_of"] is not None]
    assert len(seconds) == 3 and len(records) == 9
    for again in seconds:
        first = records[again["attempt_of"]]
        assert (again["task"], again["group"]) == (first["task"], first["group"])
        assert again["given_skill"] == first["skill"] and first["given_skill"] is None
        assert again["skill"] is None and again["wrong_skill"] is None
        (episode,) = (e for e in played if e.index == again["index"])
        for turn, sampled in zip(again["turns"], episode.turns, strict=True):
            np.testing.assert_allclose(turn["student"], sampled.logprobs, atol=6e-4)  # three digits in the file
            assert "teacher" not in turn and "wrong" not in turn and len(turn["student"]) == len(turn["tokens"])
            assert turn["skill"].endswith(first["skill"])
    page = report.write(load_runs([tmp_path / "run"]), tmp_path / "out", draw=False)
    assert "A second attempt plays a game again" in page[0].read_text()
    assert "<h3>Second attempts</h3>" in page[1].read_text()
