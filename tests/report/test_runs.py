"""Reading workdirs: what is refused, and that the numbers on a page are those of the files."""

from __future__ import annotations

import json
import re

import pytest

from seed_jax.report import charts, decisions, markup, run_page, trajectory_page
from seed_jax.report.runs import ReportError, load_runs
from tests.report import fake_run


def without(workdir, section: str, field: str) -> None:
    config = json.loads((workdir / "config.json").read_text())
    del config[section][field]
    (workdir / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("make, problem", [
    (lambda d: None, "there is no such directory"),
    (lambda d: d.mkdir(), "it holds no run; name the workdir of launch.train or launch.sweep"),
    (lambda d: (d.mkdir(), (d / "config.json").write_text("{}")), "config.json is not the config of a run"),
    (lambda d: (fake_run.write(d, won=((True,) * 2,)) / "evaluations.jsonl").unlink(), "nothing is recorded yet"),
    (lambda d: (fake_run.write(d) / "metrics.jsonl").write_text("{\n{}\n"), "metrics.jsonl, line 1 is not JSON"),
    (lambda d: without(fake_run.write(d), "distill", "gate"), "its config has no distill.gate; use the version"),
    (lambda d: (fake_run.write(d) / "evaluation_seen.json").write_text("[]"), "evaluation_seen.json is not a result"),
])  # fmt: skip
def test_what_cannot_be_shown_is_named(tmp_path, make, problem):
    make(tmp_path / "run")
    with pytest.raises(ReportError, match=rf"--workdir={tmp_path / 'run'}: .*{problem}"):
        load_runs([tmp_path / "run"])


def test_a_workdir_named_twice(tmp_path):
    run = fake_run.write(tmp_path / "run")
    with pytest.raises(ReportError, match="named twice"):
        load_runs([run, tmp_path])


def test_directories_of_runs_and_equal_names(tmp_path):
    for sweep in ("one", "two"):
        fake_run.write(tmp_path / sweep / "seed=0")
    (tmp_path / "two" / "waiting").mkdir()
    (tmp_path / "two" / "waiting" / "config.json").write_text("{}")  # has begun and recorded nothing
    assert [run.name for run in load_runs([tmp_path / "two"])] == ["seed=0"]
    assert [run.name for run in load_runs([tmp_path / "one", tmp_path / "two"])] == ["one/seed=0", "two/seed=0"]


def test_results_of_launch_evaluate_stand_beside_the_runs_own(tmp_path):
    workdir = fake_run.write(tmp_path / "run")
    own = json.loads((workdir / "evaluations.jsonl").read_text().splitlines()[-1])
    result = {**own, "outcomes": [{"task": "x", "family": "clean", "won": True}], "success_rate": 0.25}
    panel = {"split": "unseen", "reference_style": False, "sha256": "u" * 64}
    content = {"policy": {"iteration": 1}, "panel": panel, "results": [result]}
    (workdir / "evaluation_unseen.json").write_text(json.dumps(content))
    finals = load_runs([workdir])[0].finals()
    assert {name: final.result["success_rate"] for name, final in finals.items()} == {"T=0": 1.0, "unseen, T=0": 0.25}
    assert finals["T=0"].sha256 != finals["unseen, T=0"].sha256


def test_page_of_a_run_tells_its_numbers_and_anomalies(tmp_path):
    odd = {
        "update/skipped_steps": 2.0,
        "rollout/env_errors": 3,
        "skill/rejected/too_short": 4,
        "adv/penalty_only_groups": 0.5,
    }
    won = ((False,) * 8, (True, *(False,) * 7), (True,) * 8, (True,) * 8)
    (run,) = load_runs([fake_run.write(tmp_path / "run", won=won, metrics=odd)])
    page = run_page.body(run, {}, "no figures")
    assert "0.000 \u00b1 0.050" in page and "1.000 \u00b1 0.050" in page and "+1.00" in page
    cells = re.findall(r'<td class="left">([^<]*)</td><td class="warn">(\d+)</td><td>([^<]*)</td>', page)
    assert {what: (count, where) for what, count, where in cells} == {
        "optimizer steps skipped, gradient not finite": ("6", "1\u20133"),
        "episodes lost to environment errors": ("9", "1\u20133"),
        "skills rejected: too_short": ("12", "1\u20133"),
        "more than 25% of the groups differ in the penalty alone": ("3", "1\u20133"),
    }
    assert "no figures" in page and "no summary.json" in page


def teacher_part(workdir) -> str:
    (run,) = load_runs([workdir])
    return "\n".join(run_page.teacher(run, {}))


WEAK = fake_run.measured("10000000", "10000000", "00000000", without_skill=2)
STRONG = fake_run.measured("00000011", "11111111", "10000001")


def test_teacher_and_student_stand_on_the_page_with_the_numbers_of_the_file(tmp_path):
    part = teacher_part(fake_run.write(tmp_path / "run", teacher=[WEAK, STRONG]))
    rows = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", part)]
    # sqrt(p (1 - p) / n) of 8 games; all 8 games at once, then 6 lost and 2 won ones
    assert rows[1][:3] == ["0", "0.125 \u00b1 0.117", "0.125 \u00b1 0.117"]
    assert rows[1][3:] == ["+0.000 [+0.000, +0.000]", "0.000 of 7", "1.000 of 1", "0.000 \u00b1 0.000"]
    assert rows[2][:3] == ["1", "0.250 \u00b1 0.153", "1.000 \u00b1 0.000"]
    assert rows[2][3].startswith("+0.750 [+0.") and rows[2][4:] == ["1.000 of 6", "1.000 of 2", "0.250 \u00b1 0.153"]
    for tip in ("student, bare, 1: 0.25 \u00b1 0.153", "teacher, its skill, 1: 1 \u00b1 0.000"):
        assert f"<title>{tip}</title>" in part
    assert "teacher, wrong skills, 0: 0 \u00b1 0.000" in part and part.count('class="band') == 3
    assert "8 games of the panel" in part and "had a skill" not in part


@pytest.mark.parametrize("order, warned", [((STRONG, WEAK), True), ((WEAK, STRONG), False)])
def test_the_last_measurement_decides_about_the_warning(tmp_path, order, warned):
    part = teacher_part(fake_run.write(tmp_path / "run", teacher=order))
    assert ("distillation has nothing to give here" in part) == warned
    assert ("The last time 75% of them had a skill." in part) == warned


def test_a_control_is_named_and_has_no_wrong_skills(tmp_path):
    placebo = fake_run.measured("0001", "0011")
    changes = {"hindsight.control": "placebo"}
    part = teacher_part(fake_run.write(tmp_path / "run", teacher=[placebo], changes=changes))
    assert "teacher, placebo" in part and "wrong" not in part and "its skill<" not in part


def test_no_card_of_what_a_run_has_not_measured(tmp_path):
    assert teacher_part(fake_run.write(tmp_path / "old")) == ""
    rates = {"second/success_rate": 0.75, "second/first_success_rate": 0.25}
    part = teacher_part(fake_run.write(tmp_path / "seconds", metrics=rates))
    titles = re.findall(r"<h3>(.*?)</h3>", part)
    assert titles == ["Second attempts"]
    assert "second, with the skill, 1: 0.75" in part and "first, without, 1: 0.25" in part


def test_a_damaged_measurement_is_named(tmp_path):
    workdir = fake_run.write(tmp_path / "run", teacher=[STRONG])
    content = (workdir / "teacher.jsonl").read_text()
    (workdir / "teacher.jsonl").write_text("{\n" + content)
    with pytest.raises(ReportError, match=r"teacher\.jsonl, line 1 is not JSON"):
        load_runs([workdir])


# -- trajectories ------------------------------------------------------------------------------------------------------


def places(records) -> list[tuple[int, int | None]]:
    return [(r["index"], r.get("attempt_of")) for r in records]


def test_second_attempts_follow_their_first_ones_and_are_linked_to_them(tmp_path):
    workdir = fake_run.write(tmp_path / "run")
    for iteration in (1, 2):
        one, again = fake_run.attempts(iteration=iteration, index=0)
        other = fake_run.episode(iteration=iteration, index=1)
        orphan = {**again, "index": 1001, "attempt_of": 7}
        fake_run.record(workdir, other, orphan, again, one)
    old = fake_run.episode(iteration=3, index=5)
    del old["attempt_of"]
    fake_run.record(workdir, old)
    fake_run.record(workdir, fake_run.episode(iteration=0, index=0), panel=True)
    (run,) = load_runs([workdir])
    records = trajectory_page.read_trajectories(run)
    of_one = [(0, None), (1000, 0), (1, None), (1001, 7)]
    assert places(records) == [(0, None), *of_one, *of_one, (5, None)]
    data = trajectory_page.encode(run, records)[0].split(">", 1)[1].removesuffix("</script>")
    linked = {i: e["first"] for i, e in enumerate(json.loads(data)["episodes"]) if e.get("second")}
    assert linked == {2: 1, 4: None, 6: 5, 8: None}


@pytest.mark.parametrize("count", [1, 2, 3, 17, 100, 299, 300])
def test_thinning_keeps_attempts_together_and_reaches_the_end(count):
    """Every second task has a second attempt, so a choice of every second record, or task, is a trap."""
    records = []
    for i in range(200):
        one, again = fake_run.attempts(turns=1, iteration=i // 20 + 1, index=i)
        records += [{**r, "panel": False} for r in ((one, again) if i % 2 == 0 else (one,))]
    kept = trajectory_page.thinned(records, count)
    assert len(kept) <= count and (len(kept) >= 0.6 * count or count < 3)
    firsts = {r["index"] for r in kept if r["attempt_of"] is None}
    if count > 1:
        assert {r["attempt_of"] for r in kept} - {None} == {i for i in firsts if i % 2 == 0}
    if count >= 17:
        assert kept[-1]["iteration"] == 10 and kept[0]["iteration"] == 1


# -- numbers and charts ------------------------------------------------------------------------------------------------


def test_gap_and_gate_by_kind_of_decision():
    record = fake_run.episode(turns=2)
    record["turns"][0]["kind"] = "success: search"
    del record["turns"][1]["teacher"]
    lost = fake_run.episode(turns=1, won=False)
    found = decisions.gaps_by_class([record, lost], gate=lambda gap: float(gap > 0))
    assert list(found) == ["failure: other turns", "success: search"]
    words = len(record["turns"][0]["tokens"])
    assert found["success: search"]["turns"] == 1
    assert found["success: search"]["teacher_gap"] == pytest.approx(0.5 - 1.5)
    assert found["success: search"]["teacher_gate"] == pytest.approx(1 / words)
    assert found["success: search"]["wrong_gap"] == pytest.approx(-1.0 * words)


def test_gate_of_a_config():
    sig = decisions.gate_of({"distill.gate": "sig_gap", "distill.beta": 5.0, "distill.threshold": 0.0})
    assert [sig(0.0), sig(0.5), sig(-0.5)] == pytest.approx([0.5, 0.9241, 0.0759], abs=1e-4)
    assert sig(-1e6) < 1e-200 and sig(1e6) == 1.0  # no overflow
    hard = decisions.gate_of({"distill.gate": "hard", "distill.beta": 5.0, "distill.threshold": 0.1})
    assert [hard(0.05), hard(0.2)] == [0.0, 1.0]


def test_ticks_are_round_and_inside():
    assert charts.ticks(0, 1, 4) == [0, 0.25, 0.5, 0.75, 1]
    assert charts.ticks(0, 15, 6) == [0, 2.5, 5, 7.5, 10, 12.5, 15]
    assert charts.ticks(-0.03, 0.05, 4) == [-0.02, 0, 0.02, 0.04]
    assert charts.ticks(3, 3) == [3]


@pytest.mark.parametrize("y, error", [([0.5], [0.1]), ([0.0, 0.0], None), ([-1.0, -2.0], None), ([5e9, 6e9], None)])
def test_charts_of_odd_numbers_stay_inside(y, error):
    drawing = charts.line_chart([charts.Line("x", list(range(len(y))), y, error)], "odd")
    places = [float(v) for pair in re.findall(r'points="([^"]*)"', drawing) for v in re.split("[ ,]", pair)]
    assert all(0 <= v <= charts.WIDTH for v in places) and "nan" not in drawing
    assert "nothing recorded" in charts.line_chart([charts.Line("x", [], [])], "empty")


def test_text_of_others_stays_text():
    nasty = '<script>alert(1)</script>" onload="x" \u202eevil\u202c \x00 &amp;'
    for shown in (markup.text(nasty), markup.attribute(nasty)):
        assert "<" not in shown and "\u202e" not in shown and "\x00" not in shown
    assert '"' not in markup.attribute(nasty)
    data = markup.embed("d", {"a": "</script><script>alert(1)//&<!--"})
    inside = data.removeprefix('<script type="application/json" id="d">').removesuffix("</script>")
    assert "<" not in inside and json.loads(inside) == {"a": "</script><script>alert(1)//&<!--"}
