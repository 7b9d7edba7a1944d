"""The page of one run: what it has learned on held-out games, what it did on training games, and what went wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from seed_jax.report import charts, markup
from seed_jax.report.charts import Bar, Line
from seed_jax.report.decisions import class_card, skill_card
from seed_jax.report.markup import pm, signed
from seed_jax.report.runs import Run
from seed_jax.report.teacher_card import teacher_card
from seed_jax.runtime.logging import duration

_WARN_PENALTY = 0.25  # of groups that differ in the penalty alone; train/metrics.py warns at the same share


def body(run: Run, classes: Mapping[str, Mapping[str, Any]], figures: Sequence[str] | str) -> str:
    """classes: what decisions.gaps_by_class says; figures: files drawn for papers, or why there are none."""
    sections = [
        header(run),
        '<h2>Held-out games <small>never trained on; the result of the run</small></h2><div class="grid">',
        held_out(run),
        families(run),
        "</div><h2>Training games <small>what it learns from, at the sampling temperature; not a result</small></h2>"
        '<div class="grid">',
        training(run),
        lengths(run),
        "</div>",
        *teacher(run, classes),
        '<h2>The machine</h2><div class="grid">',
        phases(run),
        norms(run),
        anomalies(run),
        "</div>",
        figure_list(figures),
        settings(run),
    ]
    return "\n".join(sections)


def header(run: Run) -> str:
    c = run.config
    headline = run.conditions[0] if run.conditions else None
    facts = []
    if headline:
        points = run.curve(headline)
        first, last = points[0], points[-1]
        facts.append(("before", pm(first["success_rate"], first["standard_error"])))
        facts.append((after(last["iteration"]), pm(last["success_rate"], last["standard_error"])))
        facts.append(("gain", signed(last["success_rate"] - first["success_rate"])))
        facts.append(("mean over families", f"{last['macro_success_rate']:.3f}"))
        facts.append(("held-out games", last["games"]))
    seconds = sum(v for m in run.metrics for k, v in m.items() if k.startswith("time/") and v)
    facts.append(("time", duration(seconds)))
    tiles = "".join(f"<div><dt>{markup.text(name)}</dt><dd>{markup.text(value)}</dd></div>" for name, value in facts)
    far = f"This run has no summary.json: {run.iterations} of {c['iterations']} iterations are recorded."
    state = "" if run.summary else markup.warning(far)
    under = f" Success is that at {headline}, ± one standard error over games." if headline else ""
    episodes = c["rollout.tasks"] * c["rollout.group"]
    lead = (
        f"{c['env.name']}, {c['env.data']} games; {run.iterations} iterations of {episodes} episodes; model "
        f"{_short_model(c['model.init'])}.{under}"
    )
    return (
        f'<div class="head"><h1>{markup.text(run.method)} <small>seed {run.seed}</small></h1>'
        f'<p class="lead">{markup.text(lead)}</p>{state}<dl class="tiles">{tiles}</dl></div>'
    )


def after(iterations: int) -> str:
    return f"after {iterations} iteration{'s' if iterations > 1 else ''}" if iterations else "before training"


def _short_model(name: str) -> str:
    return "/".join(name.rstrip("/").split("/")[-2:])


def held_out_line(run: Run, condition: str, place: int) -> Line:
    points = run.curve(condition)
    steps = [e["iteration"] for e in points]
    return Line(condition, steps, [e["success_rate"] for e in points], [e["standard_error"] for e in points], place)


def held_out(run: Run) -> str:
    lines = [held_out_line(run, name, place) for place, name in enumerate(run.conditions)]
    rows = []
    for name in run.conditions:
        for e in run.curve(name):
            macro = pm(e["macro_success_rate"], e["macro_standard_error"])
            rows.append([e["iteration"], name, pm(e["success_rate"], e["standard_error"]), macro, e["games"]])
    chart = charts.line_chart(lines, "Held-out success by iteration", (0.0, 1.0))
    return markup.card(
        "Success",
        charts.legend(run.conditions)
        + chart
        + markup.details(
            "Numbers", markup.table(["iteration", "condition", "success", "mean over families", "games"], rows, left=0)
        ),
        "Every game of the frozen panel once. Bands: one standard error over games.",
    )


def families(run: Run) -> str:
    if not run.conditions:
        return ""
    points = run.curve(run.conditions[0])
    first, last = points[0], points[-1]
    both = [first, last] if first is not last else [last]
    names = [after(e["iteration"]) for e in both]
    rows = [
        Bar(family, [e["family"].get(family) for e in both], [e["family_standard_error"].get(family) for e in both])
        for family in last["family"]
    ]
    counts = last["family_episodes"]
    numbers = [
        [row.name, counts[row.name], *(pm(v, e) for v, e in zip(row.values, row.errors, strict=True))] for row in rows
    ]
    return markup.card(
        "By task family",
        charts.blocks(names)
        + charts.bars(rows, names, "Held-out success by task family")
        + markup.details("Numbers", markup.table(["family", "games", *names], numbers)),
        f"{run.conditions[0]}; whiskers: one standard error.",
    )


def training(run: Run) -> str:
    x, y = run.series("rollout/success_rate")
    errors = run.series("rollout/standard_error")[1]
    known = len(errors) == len(y)
    lines = [Line("success", x, y, errors if known else None, 0)]
    others = {"admissible commands": "rollout/admissible_rate", "valid form": "rollout/valid_rate"}
    lines += [Line(name, *run.series(metric), None, place) for place, (name, metric) in enumerate(others.items(), 1)]
    note = (
        "Episodes at the sampling temperature. Band: one standard error over tasks."
        if known
        else "No standard errors: this run was recorded without them."
    )
    return markup.card(
        "Success and form",
        charts.legend([line.name for line in lines])
        + charts.line_chart(lines, "Training success by iteration", (0.0, 1.0)),
        note,
    )


def lengths(run: Run) -> str:
    """Tokens of a reply and turns of an episode, a card each."""
    cards = []
    for title, metric, limit in (
        ("Tokens a reply", "rollout/response_tokens", run.config["rollout.max_response_tokens"]),
        ("Turns an episode", "rollout/steps", run.config["env.max_steps"]),
    ):
        chart = charts.line_chart([Line(title, *run.series(metric))], f"{title} by iteration")
        cards.append(markup.card(title, chart, f"Mean; at most {limit}."))
    return "".join(cards)


def teacher(run: Run, classes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What skills did; nothing for a method without them."""
    cards = [teacher_card(run), second_attempts(run)]
    if any(m.get("opd/coverage") is not None for m in run.metrics):
        cards += [*distillation(run), class_card(run, classes), skill_card(run)]
    if not any(cards):
        return []
    title = '<h2>The teacher <small>the same policy with a skill in its prompt</small></h2><div class="grid">'
    return [title, *cards, "</div>"]


def second_attempts(run: Run) -> str:
    """By iteration; "" for a run without them."""
    rates = {"second, with the skill": "second/success_rate", "first, without": "second/first_success_rate"}
    if not run.series("second/success_rate")[0]:
        return ""
    note = "Training tasks played again with the skill just written in the prompt, and the first attempts at the same."
    return _curves(run, "Second attempts", rates, (0.0, 1.0), note)


def distillation(run: Run) -> list[str]:
    skills = {"parse rate": "skill/parse_rate", "turns with a skill": "opd/coverage"}
    gate = {"mean": "opd/gate_mean", "share above one half": "opd/gate_high", "share saturated": "opd/gate_saturated"}
    gap = {"won episodes": "opd/gap_success", "lost episodes": "opd/gap_failure", "size": "opd/gap_size"}
    gate_note = f"Gate {run.config['distill.gate']}: the weight of each token in the distillation."
    gap_note = (
        "Teacher minus policy log-prob. Over the policy's own samples the mean is negative by nature (minus a KL "
        "divergence); by kind of decision, below, it says more."
    )
    return [
        _curves(run, "Skills", skills, (0.0, 1.0), "Skills that could be read, and turns whose teacher has one."),
        _curves(run, "Gate", gate, (0.0, 1.0), gate_note),
        _curves(run, "Gap, nats a token", gap, None, gap_note),
    ]


def _curves(run: Run, title: str, metrics: Mapping[str, str], limits: tuple[float, float] | None, note: str) -> str:
    """A card with a line for each {name: metric}."""
    lines = [Line(name, *run.series(metric), None, place) for place, (name, metric) in enumerate(metrics.items())]
    lines = [line for line in lines if line.x]
    chart = charts.line_chart(lines, f"{title} by iteration", limits)
    return markup.card(
        title, charts.legend([line.name for line in lines], [line.place for line in lines]) + chart, note
    )


def phases(run: Run) -> str:
    names = sorted(
        {k for m in run.metrics for k in m if k.startswith("time/")},
        key=lambda k: -sum(m.get(k) or 0 for m in run.metrics),
    )
    totals = {name: sum(m.get(name) or 0.0 for m in run.metrics) for name in names}
    everything = sum(totals.values()) or 1.0
    shown = [_phase(name) for name in names[: charts.SERIES - 1]]
    rest = names[charts.SERIES - 1 :]
    columns = []
    for m in run.metrics:
        amounts = {_phase(name): m.get(name) or 0.0 for name in names[: charts.SERIES - 1]}
        if rest:
            amounts["other"] = sum(m.get(name) or 0.0 for name in rest)
        columns.append((str(m["iteration"]), amounts))
    order = [*shown, *(["other"] if rest else [])]
    rows = [
        [_phase(n), f"{v / 60:.2f}", f"{v / everything:.0%}", f"{v / max(1, len(run.metrics)):.2f}"]
        for n, v in totals.items()
    ]
    return markup.card(
        "Seconds by phase",
        charts.blocks(order) + charts.stacked(columns, order, "Seconds of each iteration by phase", "s")
        + markup.details("Numbers", markup.table(["phase", "minutes", "share", "s an iteration"], rows)),
        "The first iteration compiles.",
    )  # fmt: skip


def _phase(name: str) -> str:
    return name.removeprefix("time/").removesuffix("_s")


def norms(run: Run) -> str:
    (x, distill), (_, rl) = run.series("update/distill_grad_norm"), run.series("update/rl_grad_norm")
    if not x or len(rl) != len(distill):
        total = Line("gradient norm", *run.series("update/grad_norm"))
        why = "" if run.config["distill.kind"] == "none" else " Its two parts are measured with log.grad_norms_every."
        chart = charts.line_chart([total], "Gradient norm by iteration")
        return markup.card("Gradient norm", chart, f"Mean over the optimizer steps.{why}")
    ratio = [d / r if r else math.nan for d, r in zip(distill, rl, strict=True)]
    fine = [(a, b) for a, b in zip(x, ratio, strict=True) if math.isfinite(b)]
    line = Line("distillation / RL", [a for a, _ in fine], [b for _, b in fine])
    rows = [[a, f"{r:.3g}", f"{d:.3g}", f"{q:.3g}"] for a, r, d, q in zip(x, rl, distill, ratio, strict=True)]
    return markup.card(
        "Gradient norms",
        charts.line_chart([line], "Ratio of the gradient norms of distillation and RL")
        + markup.details("Numbers", markup.table(["iteration", "RL", "distillation", "ratio"], rows, left=0)),
        "Norm of the distillation's part over that of the rest, before clipping, first mini-batch.",
    )


def anomalies(run: Run) -> str:
    wanted = {
        "update/skipped_steps": "optimizer steps skipped, gradient not finite",
        "rollout/env_errors": "episodes lost to environment errors",
        "rollout/prompt_truncated": "prompts that lost their oldest turns",
        "rollout/prompt_overflow": "episodes that ended because their next prompt was too long",
        "skill/teacher_overflow": "turns whose skill did not fit the teacher's prompt",
        "skill/given_overflow": "turns whose skill did not fit the policy's prompt",
        "skill/elided": "episodes shortened for the analyzer",
    }
    rejected = sorted({k for m in run.metrics for k in m if k.startswith("skill/rejected/")})
    wanted |= {k: f"skills rejected: {k.rsplit('/', 1)[-1]}" for k in rejected}
    rows = []
    for metric, what in wanted.items():
        hits = [(m["iteration"], m[metric]) for m in run.metrics if m.get(metric)]
        recorded = any(metric in m for m in run.metrics)
        if recorded:
            total = sum(v for _, v in hits)
            rows.append([what, f"{total:g}", spans(i for i, _ in hits) or "\u2013"])
    penalty = [m["iteration"] for m in run.metrics if (m.get("adv/penalty_only_groups") or 0) > _WARN_PENALTY]
    alone = f"more than {_WARN_PENALTY:.0%} of the groups differ in the penalty alone"
    rows.append([alone, len(penalty), spans(penalty) or "\u2013"])
    missing = sorted({m for a in run.metrics for m, v in a.items() if v is None and "grad_norm" not in m})
    rows.append(["metrics that were not finite", len(missing), ", ".join(missing) or "\u2013"])
    quiet = not any(float(row[1]) for row in rows[:2]) and not penalty and not missing
    note = "No step was skipped and no episode lost." if quiet else ""
    styles = [["", "warn" if float(row[1]) else "quiet", ""] for row in rows]
    return markup.card("Anomalies", markup.table(["what", "count", "iterations"], rows, classes=styles), note)


def spans(numbers: Iterable[int]) -> str:
    """ "1, 4-6" for 1, 4, 5, 6."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}\u2013{b}" for a, b in runs)


def figure_list(figures: Sequence[str] | str) -> str:
    if isinstance(figures, str):
        return f"<h2>Figures for papers</h2>{markup.warning(figures)}"
    links = " ".join(f'<a href="{markup.attribute(f)}">{markup.text(f.rsplit("/", 1)[-1])}</a>' for f in figures)
    return f'<h2>Figures for papers</h2><p class="files">{links}</p>'


def settings(run: Run) -> str:
    rows = [[field, value] for field, value in run.config.items() if not field.startswith(("annotate.", "sft."))]
    return markup.details("Every setting of the run", markup.table(["field", "value"], rows, left=2))
