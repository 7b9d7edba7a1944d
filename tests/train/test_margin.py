"""Runs whose teacher plays some of the panel: what they leave, what the schedule makes of it, and interruptions."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from seed_jax import config as config_lib
from seed_jax import teacher
from seed_jax.runtime.logging import read_jsonl
from seed_jax.train import loop
from tests import tiny

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("planner_skills")]

GAMES = 4


def margin_config(model_dir):
    """Two iterations, evaluated after 0, 1 and 2."""
    config = tiny.config(model_dir)
    config.eval.every, config.eval.teacher_games = 1, GAMES
    config.distill.schedule = "margin"
    config.log.diagnostics_episodes, config.log.tensorboard = 0, False
    config_lib.check(config)
    return config


@pytest.fixture(scope="module")
def whole(model_dir, tmp_path_factory, planner_skills):
    """(workdir, what every update got as its coefficient) of a run."""
    workdir, coefficients, hyper = tmp_path_factory.mktemp("margin"), [], loop.hyper

    def remember(*arguments, **options):
        numbers = hyper(*arguments, **options)
        coefficients.append(float(numbers["distill"]))
        return numbers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "hyper", remember)
        tiny.run(margin_config(model_dir), workdir)
    return workdir, coefficients


def test_the_teacher_is_measured_at_every_evaluation(whole):
    """The student's numbers are those of the headline on the same games; the metrics are those of the record."""
    workdir, _ = whole
    records, metrics = read_jsonl(workdir / "teacher.jsonl"), read_jsonl(workdir / "metrics.jsonl")
    outcomes = [r for r in read_jsonl(workdir / "outcomes.jsonl") if r["temperature"] == 0.0]
    assert [r["iteration"] for r in records] == [r["iteration"] for r in outcomes] == [0, 1, 2]
    for record, played in zip(records, outcomes, strict=True):
        panel = played["outcomes"]
        chosen = [panel[place] for place in teacher.in_turn([game["family"] for game in panel], GAMES)]
        for measured in (record["self"], record["wrong"]):
            assert measured["games"] == measured["episodes"] == GAMES
            assert measured["student"]["success_rate"] == pytest.approx(np.mean([game["won"] for game in chosen]))
            difference = measured["teacher"]["success_rate"] - measured["student"]["success_rate"]
            assert measured["margin"]["success_rate"] == pytest.approx(difference)
            assert sum(part["episodes"] for part in measured["family"].values()) == GAMES
            assert measured["first_lost"]["episodes"] + measured["first_won"]["episodes"] == GAMES
        assert record["self"]["coverage"] == 2 / 4, "games 1 and 2 of the first four, see tiny.write_skills"
    for record, line in zip(records[1:], metrics, strict=True):
        got = {name: value for name, value in line.items() if name.startswith("teacher/")}
        assert got == pytest.approx(teacher.teacher_metrics(record))
        assert line["time/teacher_s"] > 0
        assert got["teacher/margin"] == record["self"]["margin"]["success_rate"]


def test_the_coefficient_follows_the_margin(whole):
    workdir, coefficients = whole
    margins = [record["self"]["margin"]["success_rate"] for record in read_jsonl(workdir / "teacher.jsonl")]
    expected = []
    for update in (1, 2):
        best = max(margins[:update])
        expected.append(max(0.0, margins[update - 1]) / best if best > 0 else 0.0)
    assert coefficients == pytest.approx([0.01 * share for share in expected])


def test_measuring_changes_nothing_else(model_dir, tmp_path, whole):
    """The panel, the training and the weights are those of a run without, at a coefficient that does not follow."""
    results = {}
    for games in (0, GAMES):
        config = margin_config(model_dir)
        config.iterations, config.distill.schedule, config.eval.teacher_games = 1, "const", games
        tiny.run(config, tmp_path / str(games))
        results[games] = tiny.outcome(tmp_path / str(games), 1)
    assert not (tmp_path / "0" / "teacher.jsonl").exists()
    for record in results[GAMES]["metrics"]:
        for name in [name for name in record if name.startswith("teacher/")]:
            del record[name]
    assert results[0] == results[GAMES]


def test_an_extended_run_forgets_the_margin_of_its_first_end(model_dir, tmp_path):
    """Evaluated after 0 and 2; one run ends after the first iteration, with an evaluation that the other lacks."""
    for name, ends in (("whole", (2,)), ("extended", (1, 2))):
        config = margin_config(model_dir)
        config.eval.every = 2
        for config.iterations in ends:
            tiny.run(config, tmp_path / name)
    whole, extended = (tiny.outcome(tmp_path / name, 2) for name in ("whole", "extended"))
    assert extended["checksums"] == whole["checksums"] and extended["weights"] == whole["weights"]
    assert [r["iteration"] for r in read_jsonl(tmp_path / "extended" / "teacher.jsonl")] == [0, 1, 2]


def stopping(call: int):
    """Asks the run to stop at the second turn of the teacher's `call`-th round of games (two an evaluation)."""
    rounds, original = Counter(), teacher.play

    def play(*arguments, on_turn, **options):
        rounds["all"] += 1
        due = rounds["all"] == call

        def on_turn_or_signal(number, live):
            if due and number == 1:
                on_turn.__self__.stop.set()  # what the signal handler does
            on_turn(number, live)

        return original(*arguments, on_turn=on_turn_or_signal, **options)

    return play


@pytest.mark.parametrize("call", [1, 4, 5])
def test_a_run_stopped_while_its_teacher_plays_equals_a_whole_one(model_dir, tmp_path, whole, call):
    """Before training, with wrong skills after the first iteration, and in the last evaluation."""
    config = margin_config(model_dir)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teacher, "play", stopping(call))
        with pytest.raises(loop.Interrupted):
            tiny.run(config, tmp_path)
    tiny.run(config, tmp_path)
    result, expected = tiny.outcome(tmp_path, 2), tiny.outcome(whole[0], 2)
    for part in expected:
        assert result[part] == expected[part], part
    assert read_jsonl(tmp_path / "teacher.jsonl") == read_jsonl(whole[0] / "teacher.jsonl")
