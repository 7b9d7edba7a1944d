"""The teacher as a player (seed_jax.teacher): whether a skill in the prompt makes the policy win more often."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from seed_jax.report import charts, markup
from seed_jax.report.charts import Line
from seed_jax.report.markup import pm, signed
from seed_jax.report.paired import LEVEL
from seed_jax.report.runs import Run
from seed_jax.teacher import nothing_to_give


def teacher_card(run: Run) -> str:
    """Student, teacher and wrong skills on the same games, by iteration; "" for a run that did not measure them."""
    if not run.teacher:
        return ""
    control = run.config["hindsight.control"]
    name = "teacher, its skill" if control == "none" else f"teacher, {control.replace('_', ' ')}"
    wrong = [m for m in run.teacher if m["wrong"]]
    lines = [_line("student, bare", run.teacher, "self", "student", 0), _line(name, run.teacher, "self", "teacher", 1)]
    lines += [_line("teacher, wrong skills", wrong, "wrong", "teacher", 2)] if wrong else []
    last = run.teacher[-1]["self"]
    warning = nothing_to_give(last["margin"])
    covered = f" The last time {last['coverage']:.0%} of them had a skill." if last["coverage"] < 1 else ""
    return markup.card(
        "Teacher and student",
        charts.legend([line.name for line in lines])
        + charts.line_chart(lines, "Success of student and teacher on the same games by iteration", (0.0, 1.0))
        + (markup.warning(warning) if warning else "")
        + markup.details("Numbers", _numbers(run.teacher, bool(wrong))),
        f"{last['games']} games of the panel, families in turn, played bare and again with a skill in the "
        f"prompt.{covered} Margin: teacher minus student, game by game, the most that distillation can give. "
        "Bands: one standard error.",
        wide=True,
    )


def _line(name: str, measured: Sequence[Mapping[str, Any]], kind: str, who: str, place: int) -> Line:
    found = [m[kind][who] for m in measured]
    rates, errors = ([f[part] for f in found] for part in ("success_rate", "standard_error"))
    return Line(name, [m["iteration"] for m in measured], rates, errors, place)


def _numbers(measured: Sequence[Mapping[str, Any]], with_wrong: bool) -> str:
    head = ["iteration", "student", "teacher", "margin [interval]", "first lost", "first won"]
    rows = []
    for m in measured:
        own = m["self"]
        row = [m["iteration"], _rate(own["student"]), _rate(own["teacher"]), _margin(own["margin"])]
        row += [_among(own["first_lost"]), _among(own["first_won"])]
        rows.append(row + ([_rate(m["wrong"]["teacher"]) if m["wrong"] else "\u2013"] if with_wrong else []))
    caption = (
        f"Interval: {LEVEL:.0%}, by bootstrap over games. First lost, first won: the teacher's success on the games "
        "that the student lost and won, and how many these are."
    )
    return markup.table([*head, *(["wrong"] if with_wrong else [])], rows, left=0, caption=caption)


def _rate(found: Mapping[str, Any]) -> str:
    return pm(found["success_rate"], found["standard_error"])


def _margin(margin: Mapping[str, Any]) -> str:
    low, high = margin["interval"]
    return f"{signed(margin['success_rate'], 3)} [{signed(low, 3)}, {signed(high, 3)}]"


def _among(part: Mapping[str, Any]) -> str:
    """The teacher's success on some of the games, and how many they are."""
    return f"{part['teacher']['success_rate']:.3f} of {part['episodes']}" if part["episodes"] else "\u2013"
