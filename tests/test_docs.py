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
from seed_jax.runtime.logging import METRICS_FILE, read_jsonl
from tests import documented
from tests.documented import DOCS, ROOT
from tests.envs.search.test_search_data import write_wheels
from tests.hindsight.test_client import Service, answer

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
COMMANDS = [command for _, command in documented.commands()]
# What is not run here, and why.
NOT_RUN = {
    **{
        command: "tests/launch/test_launch_stage1_images.py runs it in small, with a model that sees"
        for command in COMMANDS
        if "--config=configs/sokoban.py --config.env.observation=image" in command
    },
    "make test": "runs the linter and these tests",
    "pip install -r requirements-tpu-check.txt": "downloads packages",
    "python -m benchmarks.exactness --out=runs/exactness --kills=10 --config.iterations=12 --config.checkpoint.every=1 "
    "--config.rollout.tasks=4 --config.eval.games=24": "kills and resumes for minutes; tests/launch/test_exactness.py "
    "is the same in small",
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
        # An update whose gradient is not finite leaves a dump: 0 / 0, since all rewards are equal.
        train = "python -m launch.train --config=configs/quickstart.py:grpo --workdir=runs/broken"
        broken = runner.run([*documented.scaled(train.split())[1:], "--config.adv.eps=1e-50"])
        assert broken.code == 0, broken.output
        yield Reader(home, runner, service.url)


# -- commands ----------------------------------------------------------------------------------------------------------


def test_every_command_is_run_or_listed():
    assert [command for command in NOT_RUN if command not in COMMANDS] == []
    for command in COMMANDS:
        if command not in NOT_RUN and not command.startswith("make "):
            documented.scaled(shlex.split(command))  # KeyError: a program that the test cannot make small
    with pytest.raises(KeyError):
        documented.scaled(["python", "-m", "launch.unheard_of"])


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


def test_there_are_at_most_nine_pages_and_a_readme_of_one_screen():
    assert len(DOCS) <= 9
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


# -- what commands leave, and code -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_leaves_what_the_quickstart_says(reader):
    reader.result(COMMANDS.index("python -m launch.train --config=configs/quickstart.py:grpo --workdir=runs/grpo"))
    text = (ROOT / "docs" / "quickstart.md").read_text()
    table = text.partition("| in the workdir |")[2].partition("\n\n")[0]
    promised = {name for row in table.splitlines()[2:] for name in re.findall(r"`([\w./]+)`", row.split("|")[1])}
    elsewhere = {"dumps/": "broken", "profile/": None}  # a run that goes wrong; log.profile_iteration
    assert len(promised) > 10 and elsewhere.keys() < promised
    for name in promised:
        workdir = elsewhere.get(name, "seed")
        assert workdir is None or (reader.directory / "runs" / workdir / name).exists(), name
    records = [read_jsonl(reader.directory / "runs" / run / METRICS_FILE)[0] for run in ("seed", "grpo")]
    names = "|".join(re.escape(name).replace("\\*", ".*") for name in re.findall(r"`([a-z]+/[\w./*]+)`", text))
    assert [name for name in {**records[0], **records[1]} if "/" in name and not re.fullmatch(names, name)] == []


@pytest.mark.slow
def test_the_exported_card_says_what_the_run_did(reader):
    reader.result(COMMANDS.index("python -m launch.export_hf --checkpoint=runs/seed --out=model"))
    card = (reader.directory / "model" / "README.md").read_text()
    workdir = reader.directory / "runs" / "seed"
    games = json.loads((workdir / "games.json").read_text())
    for part in ("train", "panel"):
        assert f"{games[part]['count']} games, sha256 `{games[part]['sha256']}`" in card
    before, after = (record for record in read_jsonl(workdir / "evaluations.jsonl") if record["temperature"] == 0)
    rates = [f"{record['success_rate']:.3f} ± {record['standard_error']:.3f}" for record in (before, after)]
    assert f"| 0 | {rates[0]} | {rates[1]} | {after['macro_success_rate']:.3f} |" in card
    assert "not recorded" not in card.partition("## License")[0]


@pytest.mark.slow
def test_the_example_of_an_environment_trains(reader):
    result = reader.result(COMMANDS.index("python drawers.py runs/drawers"))
    assert (reader.directory / "runs" / "drawers" / "summary.json").exists() and "[2/2]" in result.output


@pytest.mark.slow
def test_the_example_of_a_method_trains(reader):
    """The line stands where the page says, in the table of presets."""
    [line] = [body for _, body in documented.blocks("python") if body.startswith('"')]
    name = line.split('"')[1]
    assert name not in methods.PRESETS
    (reader.directory / "new_method.py").write_text(
        "from configs import alfworld, methods\nfrom configs.methods import _AS_SEED, _SELF, Preset\n\n"
        f"methods.PRESETS.update({{\n{line}}})\n\n\n"
        f"def get_config():\n    return alfworld.get_config({name!r})\n"
    )
    train = "python -m launch.train --config=new_method.py --config.model.init=DIR --workdir=runs/new_method"
    result = reader.run(train)
    assert result.code == 0, result.output[-3000:]
    stored = json.loads((reader.directory / "runs" / "new_method" / "config.json").read_text())
    assert stored["method"] == name and stored["distill"]["gate"] == "hard"


@pytest.mark.slow
def test_other_code_runs(reader):
    """Models of the hub lie in directories of their names."""
    (reader.directory / "Qwen").mkdir()
    (reader.directory / "Qwen" / "Qwen2.5-0.5B-Instruct").symlink_to(ROOT / "assets" / "quickstart" / "base")
    scripts = [body for _, body in documented.blocks("python") if body.startswith("from ")]
    assert scripts
    for number, body in enumerate(scripts):
        (reader.directory / f"code{number}.py").write_text(body)
        result = reader.runner.run([f"code{number}.py"])
        assert result.code == 0, result.output[-3000:]
