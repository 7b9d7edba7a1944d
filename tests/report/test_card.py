"""Groups, differences and warnings of the comparison card."""

from __future__ import annotations

import numpy as np
import pytest

from seed_jax.report import card, card_page
from seed_jax.report.paired import ComparisonError, paired
from seed_jax.report.runs import ReportError, load_runs
from tests.report import fake_run

NEVER, ALWAYS = (False,) * 8, (True,) * 8


def comparison(tmp_path, baseline=None, full=None):
    return card.compare_groups(card.grouped(load_runs([tmp_path])), baseline, full)


def outcomes(won) -> list[dict]:
    return [{"task": f"g{i:03}", "family": "ab"[i % 3 == 0], "won": bool(w)} for i, w in enumerate(won)]


def test_one_seed_each_agrees_with_the_paired_bootstrap():
    rng = np.random.default_rng(0)
    a, b = outcomes(rng.random(200) < 0.6), outcomes(rng.random(200) < 0.5)
    mine, theirs = card.bootstrap([a], [b]), paired(a, b)
    assert mine["difference"] == pytest.approx(theirs["difference"])
    assert mine["macro_difference"] == pytest.approx(theirs["macro_difference"])
    for name in ("interval", "macro_interval"):
        assert mine[name] == pytest.approx(theirs[name], abs=0.01)  # two times ten thousand draws


def test_interval_holds_the_spread_of_seeds():
    """Two seeds that differ in every game: drawing seeds alone makes the mean -1, 0 or 1 with odds 1, 2, 1."""
    won, lost, half = outcomes([1] * 50), outcomes([0] * 50), outcomes([i % 2 for i in range(50)])
    found = card.bootstrap([won, lost], [half, half])
    assert found["difference"] == 0.0 and found["seeds"] == (2, 2)
    assert found["interval"][0] < -0.45 and found["interval"][1] > 0.45
    same = card.bootstrap([half, half], [half, half])
    assert same["interval"] == [0.0, 0.0]


def test_other_games_cannot_be_compared():
    with pytest.raises(ComparisonError, match="1 games are in one evaluation only"):
        card.bootstrap([outcomes([1, 0, 1])], [outcomes([1, 0])])


def test_means_over_seeds(tmp_path):
    for seed, last in enumerate((ALWAYS, NEVER, (True,) * 4 + (False,) * 4)):
        fake_run.write(tmp_path / f"s{seed}", seed=seed, won=(NEVER, last))
    fake_run.write(tmp_path / "g", method="grpo", won=(NEVER, ALWAYS))
    groups = {group.label: group for group in card.grouped(load_runs([tmp_path]))}
    assert {label: [run.seed for run in group.runs] for label, group in groups.items()} == {
        "grpo": [0],
        "seed": [0, 1, 2],
    }
    found = card.mean(groups["seed"].finals("T=0"), "success_rate", "standard_error")
    assert found == pytest.approx((0.5, 0.05, 0.5 / 3**0.5))
    alone = card.mean(groups["grpo"].finals("T=0"), "success_rate", "standard_error")
    assert alone == card.Mean(1.0, 0.05, None)


def test_groups_of_one_method_are_told_apart_by_their_fields(tmp_path):
    for coef in (0.01, 0.03):
        fake_run.write(tmp_path / f"c{coef}", changes={"distill.coef": coef, "distill.beta": 5.0})
    assert [group.label for group in card.grouped(load_runs([tmp_path]))] == ["seed coef=0.01", "seed coef=0.03"]


def test_no_order_where_the_interval_includes_zero(tmp_path):
    fake_run.write(tmp_path / "seed", won=(NEVER, (True,) * 5 + (False,) * 3))
    fake_run.write(tmp_path / "grpo", method="grpo", won=(NEVER, (False,) * 3 + (True,) * 5))
    fake_run.write(tmp_path / "gspo", method="gspo", won=(NEVER, NEVER))
    fake_run.write(tmp_path / "rloo", method="rloo", won=(NEVER, ALWAYS))
    found = comparison(tmp_path)
    assert found.baseline.label == "grpo" and found.full.label == "seed"
    verdicts = {label: card.separated(d) for label, d in found.differences["T=0"].items()}
    assert verdicts == {"seed": 0, "gspo": -1, "rloo": 1}
    page = card_page.body(found, {run.name: "x.html" for g in found.groups for run in g.runs}, [])
    assert page.count("no order: the interval includes zero") == 1
    assert "better than grpo" in page and "worse than grpo" in page
    # settings stand in the order of the runs, whatever they reached
    assert page.index(">gspo<") < page.index(">rloo<") < page.index(">seed<")
    assert "hindsight.source: self_hindsight \u2192 none" in page  # what the ablation took away


def test_warnings_name_what_differs(tmp_path):
    fake_run.write(tmp_path / "a", won=(NEVER, ALWAYS, ALWAYS), panel="a" * 64)
    fake_run.write(tmp_path / "b", method="grpo", panel="b" * 64, changes={"rollout.group": 4, "eval.seed": 7})
    found = comparison(tmp_path)
    text = "\n".join(found.warnings)
    assert "Budgets (iterations that are done) differ. seed: 2; grpo: 1" in text
    assert "rollout.group differ. seed: 8; grpo: 4" in text and "eval.seed" in text
    assert "Hashes of the held-out games differ. seed: aaaaaaaaaaaa; grpo: bbbbbbbbbbbb" in text
    assert "Fewer than 3 seeds: seed, grpo" in text and "Not finished: a, b." in text
    assert found.differences["T=0"]["seed"] == "different panels"


def test_alike_runs_warn_of_nothing(tmp_path):
    for method in ("seed", "grpo"):
        for seed in range(3):
            workdir = fake_run.write(tmp_path / f"{method}{seed}", method=method, seed=seed)
            (workdir / "summary.json").write_text("{}")
    assert comparison(tmp_path).warnings == []


def test_old_runs_without_outcomes_are_shown_and_not_compared(tmp_path):
    fake_run.write(tmp_path / "a")
    (fake_run.write(tmp_path / "b", method="grpo") / "outcomes.jsonl").unlink()
    found = comparison(tmp_path)
    assert found.differences["T=0"]["seed"] == "outcomes of games not recorded"
    page = card_page.body(found, {"a": "a.html", "b": "b.html"}, [])
    assert "no comparison: outcomes of games not recorded" in page


def test_unknown_baseline_lists_what_there_is(tmp_path):
    fake_run.write(tmp_path / "a")
    fake_run.write(tmp_path / "b", method="grpo")
    with pytest.raises(ReportError, match=r"--baseline=sdar: no group is called so; there are 'seed', 'grpo'"):
        comparison(tmp_path, baseline="sdar")
    assert comparison(tmp_path, baseline="seed").baseline.label == "seed"
