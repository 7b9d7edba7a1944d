"""README and docs/: every command runs, links lead somewhere, quoted errors are raised, examples work."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from configs import methods
from seed_jax import aot
from tests import documented
from tests.documented import DOCS, ROOT
from tests.envs.search.test_search_data import write_wheels
from tests.hindsight.test_client import Service, answer

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
COMMANDS = [command for _, command in documented.commands()]
# What no test runs, and why.
NOT_RUN = {
    "make test": "runs the linter and these tests",
    "pip install -r requirements-tpu-check.txt": "downloads packages",
    "python -m benchmarks.sampler": "compiles and measures for minutes, and nothing in it can be small",
    "python -m envs.webshop.prepare --data=DIR": "needs a tagger that is downloaded; tests/envs/webshop has its own",
}


class Reader:
    """Somebody who types the commands one after the other into a shell, in a directory with the repository's files."""

    def __init__(self, directory: Path, runner: documented.Runner, url: str):
        self.directory, self.runner, self.url = directory, runner, url
        self.results: list[documented.Result] = []

    def result(self, number: int) -> documented.Result:
        """Of command `number`, after those before it."""
        while len(self.results) <= number:
            command = COMMANDS[len(self.results)]
            self.results.append(documented.Result(0, "", 0.0) if command in NOT_RUN else self.run(command))
        return self.results[number]

    def run(self, command: str) -> documented.Result:
        words = shlex.split(command)
        if words[0] == "make":
            return self.make(words)
        words = documented.scaled(words, self.url)
        if not words[0].startswith("python"):
            return self.shell(words)
        return self.runner.run(words[1:], until=documented.ANSWERS.get(documented.program(words), ""))

    def shell(self, words: list[str]) -> documented.Result:
        options = dict(capture_output=True, text=True, cwd=self.directory, env=self.variables(), timeout=600)
        done = subprocess.run(words, **options)
        return documented.Result(done.returncode, done.stdout + done.stderr, 0.0)

    def variables(self) -> dict[str, str]:
        """Of a shell in which `python` is this one."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "JAX_PLATFORMS": "cpu", "HOME": str(self.directory)}

    def make(self, words: list[str]) -> documented.Result:
        """The line that it would run is a command like the others. The virtual environment is there."""
        asked = self.shell([words[0], "--dry-run", *words[1:], f"VENV={self.directory / 'venv'}"])
        (line,) = [line for line in asked.output.splitlines() if "/bin/python -m " in line]
        return self.run(f"python {line.partition(' ')[2].partition(' 2>')[0]}")


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    home = tmp_path_factory.mktemp("reader")
    for name in ("assets", "configs", "envs", "launch", "seed_jax", "Makefile", "requirements.txt"):
        (home / name).symlink_to(ROOT / name)
    for name in ("requirements-test.txt", "requirements-tpu-check.txt"):
        (home / name).symlink_to(ROOT / name)
    (home / "venv").mkdir()
    for name in ("bin", "lib", "lib64", "pyvenv.cfg"):
        (home / "venv" / name).symlink_to(Path(sys.prefix) / name)
    for name in (".installed", ".installed-test"):
        (home / "venv" / name).touch()
    write_wheels(home / "wheels")
    for _, code in documented.blocks("python"):
        if named := re.match(r"# (\w+\.py)\n", code):
            (home / named[1]).write_text(code)
    skill = {"episode_summary": "the agent looked around", "episode_skill": "go to every shelf before you look again"}
    with (
        Service(lambda body, number: (200, {}, answer(json.dumps(skill)))) as service,
        documented.runner(home, ALFWORLD_DATA=str(home / "official")) as runner,
    ):
        games = runner.run(["-m", "envs.alfworld.generate", "--out=official", "--games=12", "--split=all"])
        assert games.code == 0, games.output
        # An update whose gradient is not finite leaves a dump.
        train = "python -m launch.train --config=configs/quickstart.py:grpo --workdir=runs/overflow"
        broken = runner.run([*documented.scaled(train.split())[1:], "--config.adv.penalty=1e38"])
        assert broken.code == 0, broken.output
        yield Reader(home, runner, service.url)


# -- commands ----------------------------------------------------------------------------------------------------------


def test_every_command_is_run_or_listed():
    assert [command for command in NOT_RUN if command not in COMMANDS] == []
    for command in COMMANDS:
        if command not in NOT_RUN and not command.startswith("make "):
            documented.scaled(shlex.split(command))  # KeyError: a program that the test cannot make small


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(COMMANDS)), ids=COMMANDS)
def test_command(reader, number):
    command = COMMANDS[number]
    if command in NOT_RUN:
        pytest.skip(NOT_RUN[command])
    if "compile_check" in command and aot.missing():
        pytest.skip(str(aot.missing()))
    result = reader.result(number)
    words = shlex.split(command)
    expected = documented.EXITS.get(documented.program(words), 0) if words[0] == "python" else 0
    assert result.code == expected, f"exit code {result.code}\n{result.output[-3000:]}"
    print(f"{result.cpu_s:.1f} CPU s")


# -- pages -------------------------------------------------------------------------------------------------------------


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


def test_quoted_errors_are_raised_somewhere():
    source = "".join(
        path.read_text() for folder in ("seed_jax", "envs", "launch") for path in (ROOT / folder).rglob("*.py")
    )
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # strings over several lines
    quoted = re.findall(r"\*\*`([^`]+)`\*\*", (ROOT / "docs" / "faq.md").read_text())
    assert len(quoted) > 8 and [text for text in quoted if text not in source] == []


def test_the_table_of_methods_is_that_of_the_presets():
    assert methods.table() in (ROOT / "docs" / "methods.md").read_text()


