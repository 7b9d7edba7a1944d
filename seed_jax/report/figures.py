"""The same charts as PNG and SVG files for papers. matplotlib is optional: without it the page says what to install."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from seed_jax.report.card import Comparison
from seed_jax.report.card_page import group_curve
from seed_jax.report.charts import Line
from seed_jax.report.run_page import held_out_line
from seed_jax.report.runs import Run

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#7A6A00", "#56636E")  # after Okabe and Ito
MARKERS = "os^DPX"
MISSING = "Not drawn: matplotlib is not installed. pip install matplotlib, and run launch.report again."
FOLDER = "figures"
_STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "seed",  # equal runs give equal files
    "figure.dpi": 200,
}


def draw_run(run: Run, out: Path, stem: str) -> list[str] | str:
    """Files of one run, relative to `out`; a text if they cannot be drawn."""
    lines = [held_out_line(run, name, place) for place, name in enumerate(run.conditions)]
    x, y = run.series("rollout/success_rate")
    errors = run.series("rollout/standard_error")[1]
    training = [Line(run.method, x, y, errors if len(errors) == len(y) else None)]
    return _panels([("held-out games", lines), ("training games", training)], out, f"{stem}-curves")


def draw_comparison(c: Comparison, out: Path) -> list[str] | str:
    panels = []
    for name in c.names:
        lines = [line for i, g in enumerate(c.groups) if (line := group_curve(g, name, i))]
        if lines:
            panels.append((f"held-out games, {name}", lines))
    return _panels(panels, out, "comparison-curves")


def _panels(panels: Sequence[tuple[str, Sequence[Line]]], out: Path, stem: str) -> list[str] | str:
    try:
        import matplotlib
    except ImportError:
        return MISSING
    matplotlib.use("agg")
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it tells when it lists the fonts
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    panels = [(title, lines) for title, lines in panels if any(len(line.x) for line in lines)]
    (out / FOLDER).mkdir(parents=True, exist_ok=True)
    with pyplot.rc_context(_STYLE):
        figure, axes = pyplot.subplots(
            1, max(1, len(panels)), figsize=(3.4 * max(1, len(panels)), 2.7), sharey=True, squeeze=False
        )
        for axis, (title, lines) in zip(axes[0], panels, strict=False):
            for line in lines:
                _draw(axis, line)
            axis.set_title(title, fontsize=9)
            axis.set_xlabel("iteration")
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            axis.set_ylim(0, 1)
            if len(lines) > 1:
                axis.legend()
        axes[0][0].set_ylabel("success")
        figure.tight_layout()
        files = [f"{FOLDER}/{stem}.{kind}" for kind in ("svg", "png")]
        for file in files:
            figure.savefig(out / file, metadata={"Date": None} if file.endswith("svg") else None)
        pyplot.close(figure)
    return files


def _draw(axis, line: Line) -> None:
    color, marker = COLORS[line.place % len(COLORS)], MARKERS[line.place % len(MARKERS)]
    axis.plot(line.x, line.y, color=color, marker=marker, markersize=3, linewidth=1.4, label=line.name)
    if line.error is not None:
        low, high = ([y + s * e for y, e in zip(line.y, line.error, strict=True)] for s in (-1, 1))
        axis.fill_between(line.x, low, high, color=color, alpha=0.18, linewidth=0)
