"""What a finished run says about its teacher: in summary.json and in its last lines."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from configs import quickstart
from seed_jax.runtime.logging import jsonable
from seed_jax.train import finish
from tests.report import fake_run

LOST_MORE = fake_run.measured("11000000", "10000000", "11100000")
AHEAD = fake_run.measured("00000011", "11111111", "00000011")


def finished(workdir, *teacher):
    """A run whose files are as it leaves them, and its summary as it is read back."""
    fake_run.write(workdir, teacher=teacher)
    timer = SimpleNamespace(totals={})
    run = SimpleNamespace(config=quickstart.get_config("seed"), workdir=workdir, timer=timer)
    return run, jsonable(finish.summarize(run, None))


def test_the_last_measurement_is_the_summarys(tmp_path):
    _, summary = finished(tmp_path / "run", LOST_MORE, AHEAD)
    assert summary["teacher"]["iteration"] == 1
    assert summary["teacher"]["self"]["student"]["success_rate"] == 0.25
    assert summary["teacher"]["self"]["margin"]["success_rate"] == 0.75


@pytest.mark.parametrize("teacher, said, warned", [
    ((LOST_MORE, AHEAD), "the teacher on 8 of these games: 1.000 with its skill, 0.250 without, margin +0.750 [+0.", 0),
    ((AHEAD, LOST_MORE), "the teacher on 8 of these games: 0.125 with its skill, 0.250 without, margin -0.125 [-0.", 1),
])  # fmt: skip
def test_closing_text_says_what_the_teacher_has_to_give(tmp_path, teacher, said, warned):
    lines = finish.closing_text(*finished(tmp_path / "run", *teacher)).splitlines()
    (place,) = (i for i, line in enumerate(lines) if said in line)
    assert lines[place].endswith("0.250 with wrong skills" if not warned else "0.375 with wrong skills")
    warnings = [i for i, line in enumerate(lines) if line.endswith("distillation has nothing to give here")]
    assert warnings == [place + 1] * warned


def test_a_run_without_a_measurement_says_nothing_of_it(tmp_path):
    run, summary = finished(tmp_path / "run")
    assert summary["teacher"] is None and "teacher" not in finish.closing_text(run, summary)
