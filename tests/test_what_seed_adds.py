"""The comparison of what SEED adds: its figures by hand, on runs whose files are written here."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import what_seed_adds as adds
from launch.settings import METHOD


def write_run(workdir, success: dict[int, list[bool]], tokens: float = 100.0, teacher: float | None = None):
    """success: {iteration: who of the panel's games was won}."""
    workdir.mkdir(parents=True)
    evaluations = [{"iteration": i, "success_rate": float(np.mean(won))} for i, won in success.items()]
    (workdir / "summary.json").write_text(json.dumps({"evaluations": evaluations}))
    metrics = [
        {
            "iteration": i, "rollout/generated_tokens": tokens, "time/update_s": 2.0, "time/eval_s": 50.0,
            **({"update/distill_grad_norm": 3.0, "update/rl_grad_norm": 2.0} if i == 1 else {}),
        }
        for i in range(1, max(success) + 1)
    ]  # fmt: skip
    outcomes = [
        {"iteration": i, "outcomes": [{"task": f"g{n}", "family": "f", "won": w} for n, w in enumerate(won)]}
        for i, won in success.items()
    ]
    measured = [{"iteration": i, "self": {"teacher": {"success_rate": teacher}}} for i in success] if teacher else []
    for name, records in (("metrics", metrics), ("outcomes", outcomes), ("teacher", measured)):
        (workdir / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return workdir


@pytest.fixture
def runs(tmp_path):
    """Two seeds of two methods on four games; the second method wins one game more at the end, in both seeds."""
    weak = {0: [True, False, False, False], 2: [True, False, False, False], 4: [True, True, False, False]}
    strong = {0: [True, False, False, False], 2: [True, True, False, False], 4: [True, True, True, False]}
    return {
        "grpo": [(write_run(tmp_path / f"grpo{seed}", weak), 64) for seed in range(2)],
        adds.BEST: [(write_run(tmp_path / f"best{seed}", strong, 150.0, 0.8), 64) for seed in range(2)],
    }


def test_course_adds_up_what_was_spent_on_training(runs):
    course = adds.course(*runs[adds.BEST][0])
    assert course["iterations"] == [0, 2, 4] and course["episodes"] == [0, 128, 256]
    assert course["success"] == [0.25, 0.5, 0.75]
    assert course["tokens"] == [0, 300, 600] and course["seconds"] == [0, 4, 8]  # evaluations are not training
    assert course["teacher"] == [0.8, 0.8, 0.8] and course["gradients"] == [1.5]


def test_area_and_price():
    run = {"episodes": [0, 100, 300], "success": [0.2, 0.4, 0.8]}
    assert adds.area(run) == pytest.approx((100 * 0.3 + 200 * 0.6) / 300)
    assert adds.episodes_to(run, 0.6) == pytest.approx(200)
    assert adds.episodes_to(run, 0.2) == 0 and adds.episodes_to(run, 0.9) is None
    assert adds.area({"episodes": [0], "success": [0.3]}) == 0.3


def test_differences_are_paired_over_seeds_and_games(runs):
    results = adds.evaluate(runs)
    difference = results["differences"]["grpo"][adds.BEST]
    assert difference["final"]["difference"] == pytest.approx(0.25)
    assert difference["mean"]["difference"] == pytest.approx(0.25)  # one game of four, at both later evaluations
    low, high = difference["final"]["interval"]
    assert 0 <= low < 0.25 < high <= 1  # games differ, seeds do not
    text = adds.table(results)
    assert f"| {adds.BEST} | 2 | 0.250 | 0.750 ± 0.000 | 0.500 | 179 (2 of 2) | 600 | 8 | 1.5 |" in text
    assert "| grpo | 2 | 0.250 | 0.500 ± 0.000 |" in text and "never" in text


def test_interval_of_equal_differences_is_a_point():
    assert adds.interval(np.full((3, 5), 0.2), np.random.default_rng(0)) == pytest.approx([0.2, 0.2])


def test_pictures_are_drawn(runs, tmp_path):
    courses = adds.evaluate(runs)["courses"]
    adds.plot(courses, tmp_path / "curves.svg")
    adds.front(courses, tmp_path / "front.svg")
    lines = {name: (tmp_path / f"{name}.svg").read_text().count("PolyCollection") for name in ("curves", "front")}
    assert lines == {"curves": 3 * 2, "front": 3}  # bands: two methods on three axes; the best, its teacher, GRPO


def test_names_of_methods():
    assert adds.setting_of("BEST") == {METHOD: adds.BEST} == adds.setting_of(adds.BEST)
    assert adds.setting_of("gigpo") == {METHOD: "gigpo"}
    assert adds.setting_of("seed")["distill.coef"] == 0.01  # as published


def test_runs_of_different_length_are_not_compared(runs, tmp_path):
    short = write_run(tmp_path / "short", {0: [True], 2: [True]})
    with pytest.raises(adds.SweepError, match="different numbers of evaluations"):
        adds.evaluate({**runs, "seed": [(short, 64)]})
