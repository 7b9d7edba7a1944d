"""README and docs/: commands exist with their flags, links lead somewhere, quoted errors are raised, examples run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from configs import methods

ROOT = Path(__file__).resolve().parents[1]
GENERATED = "compile_table.md"  # by launch.compile_check
DOCS = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != GENERATED]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
_BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
# Letters that stand for something of the user's -> something that exists.
_STANDS_FOR = {"C": "configs/quickstart.py", "BASE": "assets/quickstart/base", "DIR": "assets/quickstart/stage1"}
# Runs a program as far as its flags and its config, which it checks first of all.
_DRY = """
import argparse, runpy, sys
from absl import app, flags
name, sys.argv = sys.argv[1], sys.argv[1:]
def parse_flags(main, flags_parser=flags.FLAGS):
    rest = flags_parser(sys.argv)
    if name == "launch.sweep":
        from configs.sweeps import SWEEPS
        from launch.settings import parse_overrides
        SWEEPS[flags.FLAGS.sweep]
        parse_overrides(rest[1:])
    elif not isinstance(getattr(flags.FLAGS, "config", ""), str):  # of benchmarks.exactness: the name of a file
        from seed_jax import config as config_lib
        config_lib.check(flags.FLAGS.config, ("env", "rollout", "hindsight"))
def parse_arguments(self, arguments=None, parse=argparse.ArgumentParser.parse_args):
    parse(self, arguments)
    sys.exit()
app.run, argparse.ArgumentParser.parse_args = parse_flags, parse_arguments
runpy.run_module(name, run_name="__main__")
"""


def blocks(language: str) -> list[tuple[Path, str]]:
    return [(page, body) for page in PAGES for kind, body in _BLOCK.findall(page.read_text()) if kind == language]


def commands() -> list[str]:
    """Every command of every page, once, without its comment."""
    lines = [line for _, body in blocks("bash") for line in body.replace("\\\n", " ").splitlines()]
    return sorted({line.split("  #")[0].strip() for line in lines if line.strip() and not line.startswith("#")})


def test_there_are_at_most_eight_pages_and_a_readme_of_one_screen():
    assert len(DOCS) <= 8
    assert len((ROOT / "README.md").read_text().splitlines()) <= 60


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_page_is_linked_from_the_readme():
    text = (ROOT / "README.md").read_text()
    assert [page.name for page in DOCS if f"docs/{page.name}" not in text] == []


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("python -m ")])
def test_commands(command):
    words = [_STANDS_FOR.get(word, word) for word in shlex.split(command)]
    words = [re.sub(r"(?<==)(C|BASE|DIR)$", lambda match: _STANDS_FOR[match[1]], word) for word in words]
    variables = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    call = [sys.executable, "-c", _DRY, *words[2:]]
    done = subprocess.run(call, capture_output=True, text=True, cwd=ROOT, env=variables, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def test_other_commands_are_known():
    """make has the target; everything else is a python program or sets a variable."""
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in commands():
        first, *rest = command.split()
        if first == "make":
            assert rest[0] in targets, command
        else:
            assert first in ("python", "pip", "launch/tpu/tpu.sh", "export"), command


def test_quoted_errors_are_raised_somewhere():
    source = "".join(
        path.read_text() for folder in ("seed_jax", "envs", "launch") for path in (ROOT / folder).rglob("*.py")
    )
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # strings over several lines
    quoted = re.findall(r"\*\*`([^`]+)`\*\*", (ROOT / "docs" / "faq.md").read_text())
    assert len(quoted) > 8 and [text for text in quoted if text not in source] == []


def test_the_table_of_methods_is_that_of_the_presets():
    assert methods.table() in (ROOT / "docs" / "methods.md").read_text()


def test_the_example_of_a_method_is_a_preset():
    [line] = [body for page, body in blocks("python") if page.name == "extending.md" and body.startswith('"')]
    name, _, value = line.strip().rstrip(",").partition(": ")
    preset = eval(value, vars(methods).copy())  # our own documentation
    assert isinstance(preset, methods.Preset) and name.strip('"') not in methods.PRESETS


@pytest.mark.slow
def test_the_example_of_an_environment_trains(tmp_path):
    [code] = [body for _, body in blocks("python") if body.startswith("# drawers.py")]
    (tmp_path / "drawers.py").write_text(code)
    variables = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    call = [sys.executable, "drawers.py", "run"]
    done = subprocess.run(call, capture_output=True, text=True, cwd=tmp_path, env=variables, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "run" / "summary.json").exists() and "[2/2]" in done.stdout
