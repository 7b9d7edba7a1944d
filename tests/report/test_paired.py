"""Paired comparisons of two evaluations: against exact values and the normal approximation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from seed_jax.report.paired import ComparisonError, compare, format_comparison, paired


def records(won, families=None) -> list[dict]:
    families = families or ["heat"] * len(won)
    return [{"task": f"g{i}", "family": f, "won": bool(w)} for i, (w, f) in enumerate(zip(won, families, strict=True))]


def evaluation(won, temperature=0.4, sha256="aa", **panel) -> dict:
    return {
        "panel": {"split": "unseen", "sha256": sha256, "games": len(won), "reference_style": False, **panel},
        "results": [{"temperature": temperature, "with_skills": False, "outcomes": records(won)}],
    }


def test_interval_is_that_of_the_differences():
    rng = np.random.default_rng(1)
    mine, other = rng.random(200) < 0.6, rng.random(200) < 0.4
    result = paired(records(mine), records(other))
    difference = mine.astype(float) - other
    error = difference.std() / math.sqrt(200)
    assert result["difference"] == pytest.approx(difference.mean())
    assert result["interval"] == pytest.approx(
        [difference.mean() - 1.96 * error, difference.mean() + 1.96 * error], abs=0.012
    )
    assert (result["better_on"], result["worse_on"]) == ((difference > 0).sum(), (difference < 0).sum())
    assert result["p_value"] < 0.01
    assert paired(records(mine), records(mine))["interval"] == [0.0, 0.0]
    assert paired(records(mine), records(mine))["p_value"] == 1.0


def test_pairing_is_what_makes_the_interval_narrow():
    """Two policies that win the same games but for two of them: sure, though each rate alone is not."""
    mine, other = np.arange(100) < 52, np.arange(100) < 50
    low, high = paired(records(mine), records(other))["interval"]
    assert 0 <= low < 0.02 < high < 0.06


def test_mean_over_families_and_repeats():
    families = ["heat"] * 3 + ["cool"]
    mine = records([1, 1, 0, 1], families) + records([0, 1, 0, 1], families)
    result = paired(mine, records([0, 0, 0, 0], families))
    assert result["games"] == 4
    assert result["difference"] == pytest.approx((0.5 + 1 + 0 + 1) / 4)
    assert result["macro_difference"] == pytest.approx((0.5 + 1) / 2)
    assert result["macro_interval"][1] == pytest.approx(1.0)


def test_what_cannot_be_paired_is_refused():
    mine = evaluation([1, 0])
    for other in (evaluation([1, 0], sha256="bb"), evaluation([1, 0], reference_style=True)):
        with pytest.raises(ComparisonError, match="of different panels"):
            compare(mine, other)
    with pytest.raises(ComparisonError, match="no temperature in common"):
        compare(mine, evaluation([1, 0], temperature=0.0))
    with pytest.raises(ComparisonError, match="1 games are in one evaluation only"):
        paired(records([1, 0]), records([1]))


def test_text():
    [result] = compare(evaluation([1, 1, 1, 1]), evaluation([0, 0, 0, 0]))
    text = format_comparison([result], "this", "old.json")
    assert "this minus old.json" in text and "+1.000 [+1.000, +1.000]" in text and "better on 4" in text
