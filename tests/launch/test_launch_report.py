"""launch.report from end to end: files, links between pages, figures, errors."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from launch import report
from seed_jax.report import figures
from seed_jax.report.runs import load_runs
from tests.report import fake_run


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "launch.report", *arguments], capture_output=True, text=True, timeout=300, check=False
    )


def test_command_writes_pages_whose_links_lead_somewhere(tmp_path):
    for method in ("seed", "grpo"):
        workdir = fake_run.write(tmp_path / "runs" / f"method={method},seed=0", method=method)
        fake_run.record(workdir, fake_run.episode())
    out = tmp_path / "new" / "report"
    done = run(f"--workdir={tmp_path / 'runs'}", f"--out={out}", "--nofigures")
    assert done.returncode == 0, done.stderr
    assert f"open {out / 'index.html'}" in done.stdout
    pages = {path.name: path.read_text() for path in out.glob("*.html")}
    assert len(pages) == 5
    for name, page in pages.items():
        assert set(re.findall(r'href="([^"#]*\.html)"', page)) <= pages.keys(), name
        assert not re.search(r'(src|href)="(https?:)?//', page)  # nothing is loaded from elsewhere
        assert not re.search(r"<[^>]*\son\w+=", page)  # no handlers inside the markup


def test_command_says_what_is_wrong(tmp_path):
    done = run(f"--workdir={tmp_path / 'nothing'}", f"--out={tmp_path}")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2, f"error: --workdir={tmp_path / 'nothing'}: there is no such directory"
    )  # fmt: skip


def test_output_that_cannot_be_written(tmp_path):
    fake_run.write(tmp_path / "run")
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        report.write(load_runs([tmp_path / "run"]), tmp_path / "file", draw=False)


def test_figures_for_papers(tmp_path):
    pytest.importorskip("matplotlib")
    for method in ("seed", "grpo"):
        fake_run.write(tmp_path / method, method=method)
    report.write(load_runs([tmp_path / "seed", tmp_path / "grpo"]), tmp_path / "out")
    drawn = {path.name for path in (tmp_path / "out" / "figures").iterdir()}
    assert drawn == {f"{stem}-curves.{kind}" for stem in ("seed", "grpo", "comparison") for kind in ("svg", "png")}
    assert 'href="figures/comparison-curves.svg"' in (tmp_path / "out" / "index.html").read_text()
    first = (tmp_path / "out" / "figures" / "seed-curves.svg").read_bytes()
    report.write(load_runs([tmp_path / "seed", tmp_path / "grpo"]), tmp_path / "out")
    assert (tmp_path / "out" / "figures" / "seed-curves.svg").read_bytes() == first


def test_without_matplotlib_the_page_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    report.write(load_runs([fake_run.write(tmp_path / "run")]), tmp_path / "out")
    assert figures.MISSING in (tmp_path / "out" / "index.html").read_text()
    assert "pip install matplotlib" in figures.MISSING
