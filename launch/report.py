"""Writes pages about runs: curves, a comparison, trajectories. They are files without any dependency: open, mail, host.

python -m launch.report --workdir=DIR [--workdir=DIR2 ...] --out=report/

--workdir is that of launch.train, also while it runs, or a directory of such (launch.sweep). One run gives index.html
and trajectories.html; several give index.html with the comparison and a page for each. Figures for papers (PNG, SVG)
are drawn if matplotlib is installed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from absl import app, flags

from launch import common
from seed_jax.report import card, card_page, decisions, figures, markup, run_page, trajectory_page
from seed_jax.report.runs import ReportError, Run, load_runs


def main(_) -> int:
    given = flags.FLAGS
    out = Path(given.out).expanduser()
    try:
        runs = load_runs(given.workdir)
        chosen = dict(baseline=given.baseline, full=given.full, episodes=given.episodes, draw=given.figures)
        written = write(runs, out, **chosen)
    except ReportError as error:
        print(f"error: {error}", file=sys.stderr)
        return common.EXIT_BAD_INPUT
    except OSError as error:
        print(f"error: cannot write --out={out}: {error.strerror}", file=sys.stderr)
        return common.EXIT_BAD_INPUT
    print(f"written: {len(written)} pages; open {out / 'index.html'}")
    return 0


def write(
    runs: list[Run],
    out: Path,
    *,
    baseline: str | None = None,
    full: str | None = None,
    episodes: int = 500,
    draw: bool = True,
) -> list[Path]:
    """Writes all pages; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    several = len(runs) > 1
    compared = card.compare_groups(card.grouped(runs), baseline, full) if several else None
    nav = [("Comparison", "index.html"), *((run.name, _file(run)) for run in runs)] if several else []
    written = []
    for run in runs:
        here = _file(run) if several else "index.html"
        records = trajectory_page.read_trajectories(run)
        paths = figures.draw_run(run, out, _stem(run) if several else "run") if draw else "Not drawn: --nofigures."
        classes = decisions.gaps_by_class((r for r in records if not r["panel"]), decisions.gate_of(run.config))
        links = nav or [("Run", here)]
        browse = f"trajectories-{_stem(run)}.html" if several else "trajectories.html"
        if records:
            links = [*links, ("Trajectories", browse)]
            content = trajectory_page.body(run, records, episodes)
            scripts = trajectory_page.SCRIPTS
            page = markup.page(f"{run.name}: trajectories", content, links, browse, scripts)
            written.append(_save(out / browse, page))
        page = markup.page(f"{run.name}: run", run_page.body(run, classes, paths), links, here)
        written.append(_save(out / here, page))
    if compared:
        paths = figures.draw_comparison(compared, out) if draw else "Not drawn: --nofigures."
        content = card_page.body(compared, {run.name: _file(run) for run in runs}, paths)
        written.append(_save(out / "index.html", markup.page("Comparison", content, nav, "index.html")))
    return written


def _stem(run: Run) -> str:
    """The run's name as part of a file name."""
    return re.sub(r"[^A-Za-z0-9._=,+-]", "_", run.name)


def _file(run: Run) -> str:
    return f"run-{_stem(run)}.html"


def _save(path: Path, content: str) -> Path:
    path.write_text(content, encoding="utf-8")
    return path


def run() -> None:
    flags.DEFINE_multi_string("workdir", None, "workdir of a run, or a directory of runs; may be repeated")
    flags.DEFINE_string("out", "report", "directory that receives the pages")
    flags.DEFINE_string("baseline", None, "what the others are compared with; default: grpo, or the first")
    flags.DEFINE_string("full", None, "what the ablation card takes pieces from; default: seed, if it is there")
    flags.DEFINE_integer("episodes", 500, "episodes of a trajectory page, at most", lower_bound=1)
    flags.DEFINE_bool("figures", True, "draw PNG and SVG files for papers")
    flags.mark_flags_as_required(["workdir"])
    app.run(main)


if __name__ == "__main__":
    run()
