"""What skills do to single decisions: gap and gate by kind of decision, from trajectories and from the skill table."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from seed_jax.diagnostics import SOURCES
from seed_jax.report import markup
from seed_jax.report.markup import signed
from seed_jax.report.runs import Run

_MAX_EXPONENT = 500.0  # math.exp overflows beyond 709


def gate_of(config: Mapping[str, Any]) -> Callable[[float], float]:
    """Gap of a token -> its weight. Gates that depend on more are shown as sigmoid(beta * gap)."""
    fixed = {"none": 1.0, "const": 0.5}
    kind, beta, threshold = (config[f"distill.{name}"] for name in ("gate", "beta", "threshold"))
    if kind in fixed:
        return lambda gap: fixed[kind]
    if kind == "hard":
        return lambda gap: float(gap > threshold)
    return lambda gap: 1.0 / (1.0 + math.exp(-max(-_MAX_EXPONENT, min(_MAX_EXPONENT, beta * gap))))


def gaps_by_class(records: Iterable[Mapping[str, Any]], gate) -> dict[str, dict[str, Any]]:
    """{kind of decision: turns, mean gap of the reply (nats) and mean gate of its tokens, for teacher and wrong skill}
    of recorded trajectories. gate: gap of a token -> its weight."""
    sums: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        for turn in record["turns"]:
            if "teacher" not in turn:
                continue
            outcome = "success" if record["won"] else "failure"
            kind = turn.get("kind") or f"{outcome}: other turns"
            for view in ("teacher", "wrong"):
                if view in turn:
                    gaps = [a - b for a, b in zip(turn[view], turn["student"], strict=True)]
                    sums[kind][f"{view}_gap"].append(sum(gaps))
                    sums[kind][f"{view}_gates"] += [gate(g) for g in gaps]
    mean = lambda values: sum(values) / len(values) if values else None  # noqa: E731
    return {
        kind: {
            "turns": len(s["teacher_gap"]),
            "teacher_gap": mean(s["teacher_gap"]),
            "teacher_gate": mean(s["teacher_gates"]),
            "wrong_gap": mean(s["wrong_gap"]),
            "wrong_gate": mean(s["wrong_gates"]),
        }
        for kind, s in sorted(sums.items())
    }


def class_card(run: Run, classes: Mapping[str, Mapping[str, Any]]) -> str:
    head = ["decision", "turns", "gap, own skill", "gate", "gap, wrong skill", "gate, wrong"]
    rows, styles = [], []
    for name, c in classes.items():
        rows.append(
            [
                name,
                c["turns"],
                signed(c["teacher_gap"]),
                decimals(c["teacher_gate"]),
                signed(c["wrong_gap"]),
                decimals(c["wrong_gate"]),
            ]
        )
        styles.append(["", "", tint(c["teacher_gap"]), "", tint(c["wrong_gap"]), ""])
    if not rows:
        return markup.card(
            "Gap and gate by kind of decision",
            '<p class="note">No trajectories are recorded (log.trajectories_every).</p>',
            wide=True,
        )
    return markup.card(
        "Gap and gate by kind of decision",
        markup.table(head, rows, classes=styles),
        "From the recorded training episodes: gap of the whole reply in nats, mean over turns; gate: mean over their "
        "tokens. The episodes are chosen by outcome, so only compare within a row.",
        wide=True,
    )


def skill_card(run: Run) -> str:
    found = run.summary and run.summary.get("skill_table")
    if not found:
        return ""
    head = [
        "decision",
        "turns",
        *(f"{source} skill" for source in SOURCES),
        *(f"{source}, share > 0" for source in SOURCES),
    ]
    rows, styles = [], []
    for name, cells in found.items():
        gaps = [cells[s]["gap"] for s in SOURCES]
        rows.append(
            [
                name,
                cells["true"]["rows"],
                *(signed(g) for g in gaps),
                *(decimals(cells[s]["positive"]) for s in SOURCES),
            ]
        )
        styles.append(["", "", *(tint(g) for g in gaps), "", "", ""])
    return markup.card(
        "Skill table of the final weights",
        markup.table(head, rows, classes=styles),
        "Held-out episodes at temperature 1. Gap of the whole reply, nats: with the true skill of the game, the "
        "self-written one, and that of another game. A teacher that knows something raises right decisions with the "
        "first two only.",
        wide=True,
    )


def decimals(value: float | None) -> str:
    return "\u2013" if value is None else f"{value:.2f}"


def tint(value: float | None) -> str:
    """The class that colours a cell: endorsed or rejected, in three strengths; around zero nothing."""
    if value is None or abs(value) < 0.1:
        return ""
    strength = 1 if abs(value) < 0.5 else 2 if abs(value) < 1.5 else 3
    return f"{'up' if value > 0 else 'down'}{strength}"
