"""The comparison of runs, by hand."""

from __future__ import annotations

import json

import pytest

from seed_jax.report.comparison import curves, figures, read_summary, run_table, seed_table


def evaluation(iteration: int, temperature: float, rate: float, **more) -> dict:
    return {
        "iteration": iteration, "temperature": temperature, "success_rate": rate, "standard_error": 0.05,
        "macro_success_rate": rate / 2, **more,
    }  # fmt: skip


def summary(before: float, after: float, **more) -> dict:
    evaluations = [evaluation(0, 0.0, before), evaluation(4, 0.0, after), evaluation(2, 0.0, 0.9)]
    evaluations += [evaluation(step, 0.0, 1 - rate, with_skills=True) for step, rate in ((0, before), (4, after))]
    return {
        "evaluations": evaluations,
        "games": 64,
        "final_training_success": 0.25,
        "iterations": 4,
        "minutes": 1.25,
    } | more


def test_figures_are_those_of_the_first_and_the_last_iteration():
    assert list(curves(summary(0.1, 0.5))) == ["T=0", "T=0 with skills"]
    result = figures(summary(0.1, 0.5))
    assert result["held_out"]["T=0"] == {"before": 0.1, "after": 0.5, "standard_error": 0.05, "macro": 0.25}
    assert result["held_out"]["T=0 with skills"]["after"] == 0.5
    assert result["minutes"] == 1.25 and result["iterations"] == 4 and result["games"] == 64


def test_table_of_runs():
    runs = [
        {"setting": {"distill.coef": 0.01}, "status": "finished", "figures": figures(summary(0.1, 0.5))},
        {"setting": {"method": "grpo"}, "status": "failed: NoSkills: none"},
    ]
    head, first, second = run_table(runs).splitlines()
    columns = "distill.coef method T=0: before -> after T=0 with skills: before -> after training minutes status"
    assert head.split() == columns.split()
    assert first.split() == "0.01 0.100 -> 0.500 +- 0.050 0.900 -> 0.500 +- 0.050 0.250 1.2 finished".split()
    assert second.split() == "grpo - - - - failed: NoSkills: none".split()
    waiting = run_table([{"setting": {"seed": 0}, "status": "waiting"}])
    assert waiting.splitlines()[1].split() == ["0", "-", "-", "waiting"]


def test_table_over_seeds():
    runs = [
        {"setting": {"method": "grpo", "seed": seed}, "status": "finished", "figures": figures(summary(0.2, after))}
        for seed, after in enumerate((0.3, 0.5, 0.7))
    ]
    runs.append({"setting": {"method": "seed", "seed": 0}, "status": "finished", "figures": figures(summary(0.2, 0.4))})
    runs.append({"setting": {"method": "seed", "seed": 1}, "status": "waiting"})
    head, grpo, seed = seed_table(runs).splitlines()
    assert head.split()[:2] == ["method", "seeds"]
    assert grpo.split()[:9] == ["grpo", "3", "0.200,", "0.500", "+-", "0.200,", "0.300", "0.500", "0.700"]
    assert seed.split()[:7] == ["seed", "1", "0.200,", "0.400", "+-", "nan,", "0.400"]
    assert seed_table(runs[2:]) == "", "one seed each: nothing to average"


@pytest.mark.parametrize("content", [None, "", "{", "[1]"])
def test_no_or_damaged_summary_is_none(tmp_path, content):
    if content is not None:
        (tmp_path / "summary.json").write_text(content)
    assert read_summary(tmp_path) is None
    assert read_summary(tmp_path / "nowhere") is None


def test_summary_is_read(tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps(summary(0.1, 0.2)))
    assert read_summary(tmp_path) == summary(0.1, 0.2)
