"""Runs whose teacher plays some of the panel: what they leave, what the schedule makes of it, and interruptions."""

from __future__ import annotations

import zlib
from collections import Counter

import numpy as np
import pytest

from seed_jax import config as config_lib
from seed_jax import teacher
from seed_jax.objectives.schedules import watch_margin
from seed_jax.runtime.logging import read_jsonl
from seed_jax.train import loop
from tests import tiny

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("planner_skills")]

GAMES = 4


MARGINS = {None: 0.4, 0.4: 0.1, 0.1: -0.2}  # last one -> next one: a skill makes no difference to the tiny model


class LessEasyPool(tiny.EasyPool):
    """A third of the places win a game."""

    def step(self, slots, commands):
        results = super().step(slots, commands)
        plain = lambda seen: seen._replace(won=False, done=False, reward=0.0)  # noqa: E731
        return [plain(seen) if zlib.crc32(seen.text.encode()) % 3 else seen for seen in results]


@pytest.fixture(scope="module", autouse=True)
def margins():
    """What the schedule is told in place of what was measured."""
    with pytest.MonkeyPatch.context() as patch:
        watch = lambda state, _: watch_margin(state, MARGINS[state.get("last")])  # noqa: E731
        patch.setattr(loop, "watch_margin", watch)
        yield


def run(config, workdir) -> None:
    change = lambda setup: setup._replace(world=setup.world._replace(pool=LessEasyPool(setup.world.pool)))  # noqa: E731
    tiny.run(config, workdir, change)


def margin_config(model_dir):
    """Two iterations, evaluated after 0, 1 and 2."""
    config = tiny.config(model_dir)
    config.eval.every, config.eval.teacher_games = 1, GAMES
    config.eval.temperatures, config.distill.schedule = (1.0,), "margin"
    config.log.diagnostics_episodes, config.log.tensorboard = 0, False
    config_lib.check(config)
    return config


@pytest.fixture(scope="module")
def whole(model_dir, tmp_path_factory, planner_skills, margins):
    """(workdir, what every update got as its coefficient) of a run."""
    workdir, coefficients, hyper = tmp_path_factory.mktemp("margin"), [], loop.hyper

    def remember(*arguments, **options):
        numbers = hyper(*arguments, **options)
        coefficients.append(float(numbers["distill"]))
        return numbers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "hyper", remember)
        run(margin_config(model_dir), workdir)
    return workdir, coefficients


def test_the_teacher_is_measured_at_every_evaluation(whole):
    """The student's numbers are those of the headline on the same games; the metrics are those of the record."""
    workdir, _ = whole
    records, metrics = read_jsonl(workdir / "teacher.jsonl"), read_jsonl(workdir / "metrics.jsonl")
    outcomes = read_jsonl(workdir / "outcomes.jsonl")
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
    """Told .4 before the first iteration and .1 after it; what comes at the end is for nobody."""
    assert whole[1] == pytest.approx([0.01, 0.01 * 0.1 / 0.4])


def test_measuring_changes_nothing_else(model_dir, tmp_path, whole):
    """The panel, the training and the weights are those of a run without, at a coefficient that does not follow."""
    results = {}
    for games in (0, GAMES):
        config = margin_config(model_dir)
        config.iterations, config.distill.schedule, config.eval.teacher_games = 1, "const", games
        run(config, tmp_path / str(games))
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
            run(config, tmp_path / name)
    whole, extended = (tiny.outcome(tmp_path / name, 2) for name in ("whole", "extended"))
    assert extended["checksums"] == whole["checksums"] and extended["weights"] == whole["weights"]
    assert [r["iteration"] for r in read_jsonl(tmp_path / "extended" / "teacher.jsonl")] == [0, 1, 2]


def stopping(call: int):
    """Asks the run to stop in the teacher's `call`-th round of games (two an evaluation)."""
    rounds, original = Counter(), teacher.play

    def play(*arguments, on_turn, **options):
        rounds["all"] += 1
        due = rounds["all"] == call

        def on_turn_or_signal(number, live):
            if due:
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
            run(config, tmp_path)
    run(config, tmp_path)
    result, expected = tiny.outcome(tmp_path, 2), tiny.outcome(whole[0], 2)
    for part in expected:
        assert result[part] == expected[part], part
    assert read_jsonl(tmp_path / "teacher.jsonl") == read_jsonl(whole[0] / "teacher.jsonl")
