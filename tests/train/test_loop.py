"""A run leaves what it promises, and what goes wrong inside is told."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from envs.base import EnvError
from seed_jax.hindsight.analyzer import NoSkills
from seed_jax.hindsight.sources import Skills
from seed_jax.models import hf
from seed_jax.runtime.logging import read_jsonl
from seed_jax.sampler.engine import Sampler
from seed_jax.train import loop
from seed_jax.train.samples import batch_samples
from seed_jax.types import Episode, SamplingParams, Skill, Turn
from tests import tiny

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("planner_skills")]


@pytest.fixture(scope="module")
def seed_run(model_dir, tmp_path_factory, planner_skills) -> tuple[Path, dict]:
    workdir = tmp_path_factory.mktemp("seed")
    return workdir, tiny.run(tiny.config(model_dir), workdir)


# -- what a run leaves -------------------------------------------------------------------------------------------------


def test_files_of_a_seed_run(seed_run):
    workdir, summary = seed_run
    assert {path.name for path in workdir.iterdir()} == {
        "config.json", "metrics.jsonl", "episodes.jsonl", "evaluations.jsonl", "outcomes.jsonl", "trajectories.jsonl",
        "trajectories_panel.jsonl", "summary.json", "checkpoints", "export", "tensorboard",
    }  # fmt: skip
    metrics = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [record["iteration"] for record in metrics] == [1, 2]
    for record in metrics:
        assert {"rollout/success_rate", "skill/parse_rate", "opd/gate_mean", "opd/coverage", "adv/mixed_groups"} <= set(
            record
        )
        assert all(record[f"time/{phase}_s"] >= 0 for phase in ("rollout", "analysis", "pack", "update", "reshard"))
        assert record["skill/parse_rate"] == pytest.approx(2 / 3)
        assert record["rollout/env_errors"] == 0
        assert 0 < record["opd/gate_mean"] < 1
        assert record["update/skipped_steps"] == 0
    assert "eval/success_rate" not in metrics[0] and metrics[1]["eval/success_rate"] == summary["eval_after"]
    assert metrics[1]["time/eval_s"] > 0 and metrics[0]["time/eval_s"] > 0  # the first includes the one before training

    episodes = read_jsonl(workdir / "episodes.jsonl")
    assert [(e["iteration"], e["group"], e["index"]) for e in episodes] == [
        (iteration, index // 2, index) for iteration in (1, 2) for index in range(6)
    ]
    for episode in episodes:
        assert episode["won"] or len(episode["turns"]) == 3
        assert episode["error"] is None and episode["reward"] == 10.0 * episode["won"]
        assert (episode["skill"] is None) == (episode["index"] % 3 == 0)
        assert set(episode["turns"][0]) == {"observation", "response", "command", "valid", "admissible"}
    for record in metrics:
        mine = [episode for episode in episodes if episode["iteration"] == record["iteration"]]
        assert record["rollout/success_rate"] == pytest.approx(np.mean([episode["won"] for episode in mine]))
        turns = [len(episode["turns"]) for episode in mine]
        assert record["rollout/turns"] == sum(turns)
        taught = sum(n for n, episode in zip(turns, mine, strict=True) if episode["skill"])
        assert record["opd/coverage"] == pytest.approx(taught / sum(turns))
    assert sorted(int(path.name) for path in (workdir / "checkpoints").iterdir()) == [1, 2]


def test_summary_of_a_seed_run(seed_run):
    workdir, summary = seed_run
    assert json.loads((workdir / "summary.json").read_text()) == summary
    evaluations = read_jsonl(workdir / "evaluations.jsonl")
    assert [(e["iteration"], e["temperature"]) for e in evaluations] == [(0, 0.0), (0, 0.4), (2, 0.0), (2, 0.4)]
    assert summary["eval_before"] == evaluations[0]["success_rate"]
    assert summary["eval_after"] == evaluations[2]["success_rate"]
    assert summary["games"] == 6 and summary["iterations"] == 2 and summary["method"] == "seed"
    assert summary["minutes"] == pytest.approx(sum(summary["minutes_by_phase"].values()))
    times = [v for r in read_jsonl(workdir / "metrics.jsonl") for k, v in r.items() if k.startswith("time/")]
    assert summary["minutes"] >= sum(times) / 60 > 0
    card = (workdir / "export" / "README.md").read_text()
    assert f"`{summary['config_hash']}`" in card and f"{summary['eval_after']:.3f} ± " in card
    assert summary["skill_table"], "a reply in the right form is an invalid action or goes somewhere"


def test_export_speaks_like_our_sampler_in_transformers(seed_run, model_dir):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export = seed_run[0] / "export"
    reference, tokenizer = AutoModelForCausalLM.from_pretrained(export), AutoTokenizer.from_pretrained(export)
    spec, params = hf.load(export)
    assert spec == hf.load(model_dir)[0]
    sampler = Sampler(spec, tokenizer.eos_token_id, seed=0, batch=4, prompt_bucket=160)
    sampler.load(params)
    texts = [f"your task is to: put some mug on shelf\nactions: go to shelf {number}" for number in (1, 2, 3)]
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in texts
    ]
    prompts = tokenizer(chats, add_special_tokens=False)["input_ids"]
    replies = sampler.generate(prompts, SamplingParams(20, 0.0), [(0, 0, 0)] * 3)
    for prompt, reply in zip(prompts, replies, strict=True):
        out = reference.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=20, do_sample=False
        )
        expected = tokenizer.decode(out[0, len(prompt) :], skip_special_tokens=True)
        assert tokenizer.decode(reply.tokens, skip_special_tokens=True) == expected


def test_weights_move_and_the_export_holds_the_last_ones(seed_run, model_dir):
    before, after = (jax.tree.leaves(hf.load(folder)[1]) for folder in (model_dir, seed_run[0] / "export"))
    assert all(np.abs(a - b).max() > 1e-6 for a, b in zip(after, before, strict=True))


def test_grpo_run(model_dir, tmp_path, seed_run):
    config = tiny.config(model_dir, "grpo")
    summary = tiny.run(config, tmp_path)
    metrics = read_jsonl(tmp_path / "metrics.jsonl")
    assert [record["iteration"] for record in metrics] == [1, 2]
    assert not [name for name in metrics[0] if name.startswith(("skill/", "opd/", "time/analysis"))]
    assert "rollout/success_rate" in metrics[0] and "eval/success_rate" in metrics[1]
    assert summary["method"] == "grpo" and summary["skill_table"] is None
    assert (tmp_path / "export" / "model.safetensors").exists()
    # The same seed plays the same first iteration whatever the method.
    mine, theirs = read_jsonl(tmp_path / "episodes.jsonl")[:6], read_jsonl(seed_run[0] / "episodes.jsonl")[:6]
    assert [episode["turns"] for episode in mine] == [episode["turns"] for episode in theirs]


# -- what goes wrong inside --------------------------------------------------------------------------------------------


class LosingPool:
    """Loses the game in slot 2 at its first command, in the third round of games (the first training rollout)."""

    def __init__(self, pool):
        self.pool, self.rounds, self.lost = pool, 0, False

    def open(self, slots, tasks):
        self.rounds += 1
        return self.pool.open(slots, tasks)

    def prefetch(self, slots, tasks):
        self.pool.prefetch(slots, tasks)

    def step(self, slots, commands):
        results = self.pool.step(slots, commands)
        if self.rounds == 3 and 2 in slots and not self.lost:
            results[list(slots).index(2)], self.lost = EnvError("the game has crashed"), True
        return results


def test_lost_episode_is_counted_and_left_out(model_dir, tmp_path, monkeypatch):
    config = tiny.config(model_dir)
    config.iterations, config.log.diagnostics_episodes = 1, 0
    packed, pack = [], loop.pack
    monkeypatch.setattr(loop, "pack", lambda samples, *rest: packed.append(samples) or pack(samples, *rest))
    tiny.run(
        config, tmp_path, lambda setup: setup._replace(world=setup.world._replace(pool=LosingPool(setup.world.pool)))
    )
    (record,) = read_jsonl(tmp_path / "metrics.jsonl")
    assert record["rollout/env_errors"] == 1
    episodes = read_jsonl(tmp_path / "episodes.jsonl")
    assert [e["error"] for e in episodes] == [None, None, "the game has crashed", None, None, None]
    assert len(episodes[2]["turns"]) == 1 and episodes[2]["skill"] is None
    assert len(packed[0]) == record["rollout/turns"] - 1 and all(sample.episode != 2 for sample in packed[0])
    assert record["skill/parse_rate"] == pytest.approx(3 / 5)


def test_panel_without_a_game_is_an_error(model_dir, tmp_path):
    class Broken(LosingPool):
        def open(self, slots, tasks):
            return [*self.pool.open(slots, tasks)[:-1], EnvError("no such game")]

    config = tiny.config(model_dir, "grpo")
    with pytest.raises(RuntimeError, match=r"1 of 6 panel games failed, first seen/mini/.*: no such game"):
        tiny.run(
            config, tmp_path, lambda setup: setup._replace(world=setup.world._replace(pool=Broken(setup.world.pool)))
        )


def test_no_skills_stop_the_run(model_dir, tmp_path, monkeypatch):
    from seed_jax.hindsight.analyzer import analyze

    config = tiny.config(model_dir)
    config.iterations, config.hindsight.min_coverage_iterations = 5, 2
    monkeypatch.setattr(loop, "analyze", analyze)  # the tiny model's own
    with pytest.raises(NoSkills, match=r"for 2 iterations .*rejected: \{.*(unfinished|no_json).*hindsight-skill SFT"):
        tiny.run(config, tmp_path)
    (record,) = read_jsonl(tmp_path / "metrics.jsonl")
    assert record["skill/parse_rate"] == 0 and record["opd/coverage"] == 0


def test_stopping_does_not_count_an_iteration_without_skills_twice(model_dir, tmp_path, monkeypatch):
    """Stopped when the skills of iteration 1 are known but its update has not run: it is played again."""
    from seed_jax.hindsight.analyzer import analyze

    config = tiny.config(model_dir)
    config.iterations, config.hindsight.min_coverage_iterations, config.log.diagnostics_episodes = 1, 2, 0

    def analyze_and_signal(*arguments):
        counts = analyze(*arguments)
        running[0].stop.set()
        return counts

    running, start = [], loop.Run.__init__
    with monkeypatch.context() as patch:
        patch.setattr(loop, "analyze", analyze_and_signal)
        patch.setattr(loop.Run, "__init__", lambda self, *rest: start(self, *rest) or running.append(self))
        with pytest.raises(loop.Interrupted):
            tiny.run(config, tmp_path)
    monkeypatch.setattr(loop, "analyze", analyze)
    tiny.run(config, tmp_path)
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 1


def test_workdir_can_hold_official_game_files(model_dir, tmp_path, capsys):
    """Games from files, one of them damaged: it is skipped in training, and an error if the panel needs it."""
    root = tmp_path / "games"
    train, panel = tiny.write_games(root, "train", 13), tiny.write_games(root, "seen", 6)
    train[4].write_text(train[4].read_text()[:200])
    config = tiny.config(model_dir)
    config.env.data = str(root)
    config.iterations = 1
    summary = tiny.run(config, tmp_path / "run")
    assert summary["skill_table"]
    message = capsys.readouterr().err
    assert str(train[4]) in message and "1 of 13 training games" in message

    panel[2].write_text("{")
    with pytest.raises(ValueError, match="is not valid JSON") as error:
        tiny.run(config, tmp_path / "second")
    assert str(panel[2]) in str(error.value)


# -- samples -----------------------------------------------------------------------------------------------------------


def made_turn(number: int, valid: bool, admissible: bool) -> Turn:
    return Turn(
        f"your task is to: look\nnow: {number}", [number], [number, 1], np.zeros(2), "", "", "look", valid, admissible
    )


@pytest.mark.parametrize(
    ("invalid", "expected"),
    [
        ("format", {0: False, 1: False, 2: True, 3: True}),
        ("inadmissible", {0: False, 1: True, 2: True, 3: True}),  # "also": a broken format stays invalid
    ],
)
def test_samples_carry_reward_penalty_and_teacher(model_dir, invalid, expected):
    config = tiny.config(model_dir)
    config.adv.invalid = invalid
    kinds = [(True, True), (True, False), (False, True), (False, False)]
    won = Episode("t", "f", "look", 3, 6, [made_turn(n, *kinds[n]) for n in range(4)], reward=10.0, won=True)
    won.skill = Skill("", "go to shelf 1")
    lost = Episode("t", "f", "look", 3, 7, [made_turn(n, True, True) for n in range(4, 6)])
    failed = Episode("t", "f", "look", 4, 8, [made_turn(9, True, True)], error="crashed")
    words = tiny.tokenizer()
    run = SimpleNamespace(config=config, tokenizer=words, skills=Skills(config, words), distills=True)
    samples = batch_samples(run, [won, lost, failed], 0, Counter())
    assert sorted(sample.prompt[0] for sample in samples) == [0, 1, 2, 3, 4, 5]
    for sample in samples:
        number = sample.prompt[0]
        assert (sample.group, sample.episode, sample.reward) == ((3, 6, 10.0) if number < 4 else (3, 7, 0.0))
        assert sample.invalid == expected.get(number, False)
        assert (sample.teacher_prompt is not None) == (number < 4)
    orders = [[s.prompt[0] for s in batch_samples(run, [won, lost], i, Counter())] for i in (0, 0, 1, 2)]
    assert orders[0] == orders[1] and len({tuple(order) for order in orders}) > 1
