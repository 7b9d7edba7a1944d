"""A gradient that is not finite changes nothing, is counted, kept and explained, and stops the run if it goes on."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from launch import replay as launch_replay
from seed_jax import sharding
from seed_jax.runtime.logging import read_jsonl
from seed_jax.train import dumps, loop, replay
from seed_jax.train.packing import PackedBatch
from seed_jax.train.update import hyper
from tests import tiny
from tests.updating import SPEC, assert_bitwise, make_samples, trainer


def broken(samples, index: int = 5):
    """The sampler's log-probs of one turn are not numbers."""
    return [
        sample._replace(logprobs=np.full(len(sample.response), np.nan)) if number == index else sample
        for number, sample in enumerate(samples)
    ]


@pytest.fixture
def sampled_ratio():
    return trainer("seed", old_logprobs="sampler")


def test_a_bad_step_changes_nothing_and_is_counted(sampled_ratio):
    before = sampled_ratio.fresh_state()
    start = jax.device_get(before)
    state, metrics = sampled_ratio(broken(make_samples()), state=before, skipped_before=3)
    assert_bitwise(state, start)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(*map(jax.tree.leaves, (state, start)), strict=True))
    assert metrics["update/skipped_steps"] == 1 and metrics["update/skipped_in_a_row"] == 4
    state, metrics = sampled_ratio(make_samples(), skipped_before=4)
    assert metrics["update/skipped_steps"] == 0 and metrics["update/skipped_in_a_row"] == 0
    assert int(state.step) == 1


def test_what_is_not_finite_is_named(sampled_ratio):
    t, samples = sampled_ratio, broken(make_samples())
    batch = t.pack(samples)
    report = replay.examine(t.config, SPEC, t.mesh, t.fresh_state(), batch, hyper(t.config))
    (turn,) = report["batch"]["sampled"]
    expected = samples[5]
    assert (turn["group"], turn["episode"]) == (expected.group, expected.episode)
    tokens = batch.student.tokens[turn["row"]][batch.student.segments[turn["row"]] == turn["turn"] + 1]
    assert tokens.tolist() == [*expected.prompt, *expected.response]
    assert report["scores"] == {"old": [turn]} and report["weights"] == []
    (micro,) = report["micro_batches"]
    assert micro["rows"][0] <= turn["row"] <= micro["rows"][1]
    assert {"loss", "pg_loss"} <= set(micro["terms"]) and "entropy" not in micro["terms"]
    assert "['embed']" in micro["gradients"]
    assert "sampled is not finite at 1 turns" in replay.text(report)
    clean = replay.examine(t.config, SPEC, t.mesh, t.fresh_state(), t.pack(make_samples()), hyper(t.config))
    assert clean == {"weights": [], "batch": {}, "scores": {}, "micro_batches": []}
    assert replay.text(clean) == "everything is finite"


def test_weights_that_are_not_finite_are_named(sampled_ratio):
    t = sampled_ratio
    state = t.fresh_state()
    state = state.replace(params={**state.params, "final_norm": state.params["final_norm"].at[0].set(np.inf)})
    report = replay.examine(t.config, SPEC, t.mesh, state, t.pack(make_samples()), hyper(t.config))
    assert report["weights"] == ["['params']['final_norm']"] and report["micro_batches"]


# -- what is kept ------------------------------------------------------------------------------------------------------


def same(left: PackedBatch, right: PackedBatch) -> None:
    a, b = (dumps._fields(batch) for batch in (left, right))
    assert a.keys() == b.keys()
    for name, array in a.items():
        assert np.asarray(array).dtype == b[name].dtype
        np.testing.assert_array_equal(array, b[name], err_msg=name)


def test_a_dump_comes_back_as_it_was(sampled_ratio, tmp_path):
    t = sampled_ratio
    batch, numbers = t.pack(broken(make_samples())), hyper(t.config)
    for iteration in (2, 3, 5, 8):
        path = dumps.save(tmp_path, t.config, iteration, batch, numbers, {"update/pg_loss": float("nan")})
    names = [folder.name for folder in sorted((tmp_path / "dumps").iterdir())]
    assert names == ["iteration_000003", "iteration_000005", "iteration_000008"]
    dump = dumps.load(path)
    same(dump.batch, batch)
    assert {name: float(value) for name, value in dump.numbers.items()} == {n: float(v) for n, v in numbers.items()}
    assert dump.record["iteration"] == 8 and dump.record["metrics"] == {"update/pg_loss": None}
    assert json.loads((path / "dump.json").read_text())["config"]["optim"]["lr"] == t.config.optim.lr


def test_rows_of_two_processes_are_joined_as_in_the_run(sampled_ratio, tmp_path, monkeypatch):
    """Process p packs places 4 p to 4 p + 3 of every micro-batch of eight rows."""
    t = sampled_ratio
    whole, numbers = t.pack(make_samples(60)), hyper(t.config)
    assert len(whole.mask) > 8
    monkeypatch.setattr(dumps.jax, "process_count", lambda: 2)
    for process in (1, 0):
        monkeypatch.setattr(dumps.jax, "process_index", lambda process=process: process)
        places = np.arange(len(whole.mask)) % 8 // 4 == process
        mine = jax.tree.map(lambda x, places=places: x if np.ndim(x) == 0 else x[places], whole)
        path = dumps.save(tmp_path, t.config, 1, mine, numbers, {})
    same(dumps.load(path).batch, whole)


def test_what_is_no_dump(tmp_path):
    with pytest.raises(dumps.DumpError, match="is no complete dump of a run"):
        dumps.load(tmp_path)
    (tmp_path / "dump.json").write_text('{"format": 99}')
    with pytest.raises(dumps.DumpError, match="has format 99; this version reads 1"):
        dumps.load(tmp_path)


# -- a run -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("planner_skills")
def test_a_run_stops_and_tells_what_to_do(model_dir, tmp_path, monkeypatch, capsys):
    config = tiny.config(model_dir)
    config.iterations, config.optim.max_skipped, config.log.diagnostics_episodes = 4, 2, 0
    config.log.tensorboard = False
    good = loop.batch_samples
    monkeypatch.setattr(loop, "batch_samples", lambda *arguments: broken(good(*arguments)))
    with pytest.raises(dumps.NotFinite, match=r"last 2 optimizer steps was not finite \(optim\.max_skipped = 2\)"):
        tiny.run(config, tmp_path)
    records = read_jsonl(tmp_path / "metrics.jsonl")
    assert [record["update/skipped_in_a_row"] for record in records] == [1, 2]
    folders = sorted((tmp_path / "dumps").iterdir())
    assert [folder.name for folder in folders] == ["iteration_000001", "iteration_000002"]
    assert f"python -m launch.replay --dump={folders[0]}" in capsys.readouterr().out

    with monkeypatch.context() as patch:  # the run had one device, the replay takes all eight
        patch.setattr(sharding, "make_mesh", sharding.make_mesh.func)
        report = launch_replay.examine_dump(folders[1])
    assert report["weights_after_iteration"] == 1 and len(report["batch"]["sampled"]) == 1
    assert report["update"]["update/skipped_steps"] == 1
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["1", "2"]
    monkeypatch.setattr(loop, "batch_samples", good)
    assert tiny.run(config, tmp_path)["iterations"] == 4
    assert read_jsonl(tmp_path / "metrics.jsonl")[-1]["update/skipped_in_a_row"] == 0
