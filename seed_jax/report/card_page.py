"""The comparison card: method by metric, paired differences from a baseline, and what each piece contributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from seed_jax.report import charts, markup
from seed_jax.report.card import Comparison, Group, Mean, changes, mean, separated
from seed_jax.report.charts import Line
from seed_jax.report.paired import LEVEL
from seed_jax.report.run_page import figure_list

_SHOWN_CHANGES = 4


def body(c: Comparison, pages: Mapping[str, str], figures: Sequence[str] | str) -> str:
    """pages: {name of a run: its page}."""
    listed = "".join(markup.warning(text) for text in c.warnings)
    return "\n".join(
        [
            '<div class="head"><h1>Comparison</h1>'
            f'<p class="lead">{len(c.groups)} settings, {sum(len(g.runs) for g in c.groups)} runs. Held-out games that '
            "no run has trained on; settings stand in the order they were named, not by score.</p></div>",
            listed,
            '<h2>Held-out success</h2><div class="grid">',
            *(metric_card(c, name) for name in c.names),
            "</div>",
            *(ablation(c) if c.full else ()),
            '<h2>Curves</h2><div class="grid">',
            *(
                curve_card(c, name)
                for name in c.names
                if any(name in run.conditions for g in c.groups for run in g.runs)
            ),
            training_card(c),
            cost_card(c),
            "</div>",
            figure_list(figures),
            "<h2>Runs</h2>",
            run_list(c, pages),
        ]
    )


def metric_card(c: Comparison, name: str) -> str:
    rows, styles, by_family = [], [], []
    families = list(dict.fromkeys(f for g in c.groups for final in g.finals(name) for f in final.result["family"]))
    for g in c.groups:
        finals = g.finals(name)
        micro = mean(finals, "success_rate", "standard_error")
        macro = mean(finals, "macro_success_rate", "macro_standard_error")
        found = c.differences[name].get(g.label)
        told = ["\u2013", "\u2013", "baseline"] if g is c.baseline else _told(found, c.baseline.label)
        rows.append([g.label, len(finals), shown(micro), shown(macro), *told])
        styles.append(["", "", "strong", "strong", "", "", _style(found)])
        by_family.append([g.label, *(_family(finals, family) for family in families)])
    minus = f"minus {c.baseline.label}"
    head = ["setting", "seeds", "success", "mean over families", minus, f"{minus}, over families", "verdict"]
    note = (
        "\u00b1 one standard error over the games of a run, and a second one over seeds where there are several. "
        f"Differences are paired over games, with the {LEVEL:.0%} interval of a bootstrap over games and seeds. Not "
        "corrected for the number of comparisons."
    )
    content = markup.table(head, rows, classes=styles)
    content += markup.details("By family", markup.table(["setting", *families], by_family))
    return markup.card(name, content, note, wide=True)


def _told(found: dict | str | None, baseline: str) -> list[str]:
    """Difference, difference of the means over families, verdict."""
    if not isinstance(found, dict):
        return ["\u2013", "\u2013", f"no comparison: {found}"]
    order, over_families = separated(found), separated(found, "macro_")
    verdict = {1: f"better than {baseline}", -1: f"worse than {baseline}", 0: "no order: the interval includes zero"}[
        order
    ]
    if order and over_families != order:
        verdict += ", but not as mean over families"
    return [interval(found), interval(found, "macro_"), verdict]


def interval(found: Mapping, prefix: str = "") -> str:
    low, high = found[f"{prefix}interval"]
    return f"{_signed(found[f'{prefix}difference'])} [{_signed(low)}, {_signed(high)}]"


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "\u2212")


def _style(found: dict | str | None) -> str:
    if not isinstance(found, dict):
        return "quiet text"
    return {1: "up2 text", -1: "down2 text", 0: "quiet text"}[separated(found)]


def shown(m: Mean | None) -> str:
    if m is None:
        return "\u2013"
    over_seeds = "" if m.seeds is None else f" \u00b1 {m.seeds:.3f}"
    return f"{m.value:.3f} \u00b1 {m.games:.3f}{over_seeds}"


def _family(finals: Sequence, family: str) -> str:
    values = [final.result["family"][family] for final in finals if family in final.result["family"]]
    return f"{np.mean(values):.3f}" if values else "\u2013"


def ablation(c: Comparison) -> list[str]:
    """What the full method has over each other setting: the contribution of the pieces in which they differ."""
    cards = ['<h2>Ablation <small>what each piece contributes</small></h2><div class="grid">']
    for name in c.names:
        rows, styles = [], []
        for g in c.groups:
            if g is c.full:
                continue
            found = c.contributions[name][g.label]
            known = isinstance(found, dict)
            verdict = (
                "no comparison: " + found
                if not known
                else {1: "helps", -1: "hurts", 0: "not shown: the interval includes zero"}[separated(found)]
            )
            macro = interval(found, "macro_") if known else "\u2013"
            rows.append([g.label, _changed(c.full, g), interval(found) if known else "\u2013", macro, verdict])
            styles.append(["", "text", "strong", "", _style(found)])
        head = ["without it", "what differs", f"{c.full.label} minus this", "mean over families", "the piece"]
        note = (
            f"{c.full.label} minus each other setting, with the {LEVEL:.0%} interval. A row with several changes says "
            "nothing about one of them."
        )
        cards.append(markup.card(name, markup.table(head, rows, left=2, classes=styles), note, wide=True))
    return [*cards, "</div>"]


def _changed(full: Group, other: Group) -> str:
    lines = changes(full, other)
    more = f"; and {len(lines) - _SHOWN_CHANGES} more" if len(lines) > _SHOWN_CHANGES else ""
    return "; ".join(lines[:_SHOWN_CHANGES]) + more


def curve_card(c: Comparison, name: str) -> str:
    lines = [line for place, g in enumerate(c.groups) if (line := group_curve(g, name, place))]
    note = "Mean over seeds; band: one standard error (over seeds, or over games for one seed)."
    return markup.card(
        name,
        charts.legend([x.name for x in lines], [x.place for x in lines])
        + charts.line_chart(lines, f"Held-out success, {name}", (0.0, 1.0)),
        note,
    )


def group_curve(g: Group, name: str, place: int) -> Line | None:
    """Mean over seeds at the iterations that all of them have evaluated."""
    curves = [{e["iteration"]: e for e in run.curve(name)} for run in g.runs]
    curves = [curve for curve in curves if curve]
    if not curves:
        return None
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = np.array([[curve[step]["success_rate"] for step in steps] for curve in curves])
    if len(curves) > 1:
        errors = values.std(0, ddof=1) / np.sqrt(len(curves))
    else:
        errors = np.array([curves[0][step]["standard_error"] for step in steps])
    return Line(g.label, steps, values.mean(0).tolist(), errors.tolist(), place)


def training_card(c: Comparison) -> str:
    lines = []
    for place, g in enumerate(c.groups):
        series = [dict(zip(*run.series("rollout/success_rate"), strict=True)) for run in g.runs]
        steps = sorted(set.intersection(*(set(s) for s in series)))
        lines.append(Line(g.label, steps, [float(np.mean([s[i] for s in series])) for i in steps], None, place))
    note = "Success on the games that are trained on, at the sampling temperature: not a result."
    return markup.card(
        "Training",
        charts.legend([x.name for x in lines], [x.place for x in lines])
        + charts.line_chart(lines, "Training success", (0.0, 1.0)),
        note,
    )


def cost_card(c: Comparison) -> str:
    rows = []
    for g in c.groups:
        minutes = [
            sum(v for m in run.metrics for k, v in m.items() if k.startswith("time/") and v) / 60 for run in g.runs
        ]
        turns = [sum(m.get("rollout/turns") or 0 for m in run.metrics) for run in g.runs]
        episodes = g.runs[0].iterations * g.config["rollout.tasks"] * g.config["rollout.group"]
        rows.append([g.label, episodes, f"{np.mean(turns):.0f}", f"{np.mean(minutes):.1f}"])
    note = "Minutes depend on the machine and on what else it did."
    return markup.card("Cost of a run", markup.table(["setting", "episodes", "turns", "minutes"], rows), note)


def run_list(c: Comparison, pages: Mapping[str, str]) -> str:
    items = []
    for g in c.groups:
        for run in g.runs:
            last = run.curve(run.conditions[0])[-1] if run.conditions else None
            result = f"{last['success_rate']:.3f} after {last['iteration']} iterations" if last else "no evaluation"
            items.append(
                f'<li><a href="{markup.attribute(pages[run.name])}">{markup.text(run.name)}</a> '
                f"{markup.text(f'{g.label}, seed {run.seed}: {result}')}</li>"
            )
    return f"<ul>{''.join(items)}</ul>"
