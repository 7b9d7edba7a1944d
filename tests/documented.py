"""Runs the commands of README.md and docs/ as their reader would: in one directory, page after page.

A command is run as it stands, in a process of its own, with what makes it small behind it (`SCALED`; of a flag that is
given twice the last one counts) and the letters that stand for something of the reader's replaced (`STANDS_FOR`).

A process that has imported JAX forks one for each command (`python -m tests.documented`): that saves the five seconds
in which every command would import it. No thread and no device is there before a fork.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests import xla

ROOT = Path(__file__).resolve().parents[1]
GENERATED = "compile_table.md"  # by launch.compile_check
DOCS = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != GENERATED]
FIRST = ("README.md", "quickstart.md", "environments.md", "stage1.md", "methods.md")  # what is read first
_TEXT = re.compile(r"```(\w+)\n(.*?)```|`([^`\n]+)`", re.DOTALL)
_PROGRAMS = ("python", "pip", "make", "launch/tpu/tpu.sh")

# -- what makes commands small -----------------------------------------------------------------------------------------

_LENGTHS = {
    "env.prompt": "compact", "env.max_steps": 2, "env.history": 1, "old_logprobs": "sampler", "model.dtype": "float32",
    "model.remat": "none", "rollout.batch": 4, "rollout.analysis_batch": 4, "rollout.prompt_bucket": 300,
    "rollout.max_prompt_tokens": 300, "rollout.max_response_tokens": 16, "hindsight.max_analysis_tokens": 300,
    "hindsight.max_skill_tokens": 24, "pack.row_tokens": 360, "pack.teacher_row_tokens": 360,
    "pack.scored_tokens_per_row": 48, "pack.max_turns_per_row": 3, "pack.rows_per_micro": 8, "pack.micros_per_mini": 1,
}  # fmt: skip
_COUNTS = {
    "iterations": 1, "env.train_tasks": 12, "rollout.tasks": 2, "rollout.group": 2, "eval.games": 2,
    "eval.temperatures": "(0.0,)", "log.diagnostics_episodes": 0, "log.trajectories_panel": 1,
    "hindsight.min_coverage_iterations": 0, "annotate.tasks": 12, "annotate.rollouts": 1, "sft.epochs": 1,
    "sft.batch": 4, "sft.row_tokens": 360, "sft.scored_tokens_per_row": 48, "sft.rows_per_micro": 4,
    "sft.play_episodes": 1,
}  # fmt: skip
SMALL = [f"--config.{field}={value}" for field, value in (_LENGTHS | _COUNTS).items()]
SCALED = {
    "launch.train": SMALL,
    "launch.evaluate": SMALL,
    "launch.annotate": SMALL,
    "launch.sft": SMALL,
    "launch.sweep": SMALL,  # and two settings, see _become
    "launch.report": [],
    "launch.export_hf": [],
    "launch.replay": [],
    "launch.build_quickstart": [
        "--base_steps=2", "--polish_steps=1", "--weaken_steps=1", "--stage1_steps=1",
        "--stage1_polish_steps=1", "--stage1_games=30", "--games=30", "--card_games=2",
    ],
    "launch.compile_check": [*SMALL, "--model=assets/quickstart/stage1", "--programs=reshard"],
    "envs.alfworld.generate": ["--games=2"],
    "envs.alfworld.parity": ["--games=1", "--steps=3"],
    "envs.search.prepare": [],
    "envs.search.serve": ["--port=0"],
    "benchmarks.alfworld": ["--games=1", "--envs=2", "--steps=2"],
    "benchmarks.trajectories": [*SMALL, "--config.iterations=2"],
    "benchmarks.what_seed_adds": ["--seeds=1", "--iterations=1", "--methods=grpo", *SMALL],
    "pdoc": [],
    "drawers.py": [],
}  # fmt: skip
STANDS_FOR = {
    "--config=C": "--config=configs/quickstart.py",
    "--config.model.init=BASE": "--config.model.init=assets/quickstart/base",
    "--config.model.init=DIR": "--config.model.init=assets/quickstart/stage1",
    "--data=DIR": "--data=official",
    "--wheels=W": "--wheels=wheels",
    "--out=DIR": "--out=questions",
    "--workdir=D": "--workdir=runs/hosts",
    "--dump=DIR": "--dump=runs/broken/dumps/iteration_000001",
}
ANSWERS = {"envs.search.serve": "http://"}  # a server is stopped when it has printed this
EXITS = {"launch.replay": 1}  # it has found what is not finite


def commands() -> list[tuple[str, str]]:
    """(name of the page, command) of every command, once: lines of bash blocks and what stands between backquotes."""
    pages = [ROOT / "README.md", *DOCS]
    pages.sort(key=lambda page: FIRST.index(page.name) if page.name in FIRST else len(FIRST))
    found: dict[str, str] = {}
    for page in pages:
        for language, block, inline in _TEXT.findall(page.read_text()):
            lines = block.replace("\\\n", " ").splitlines() if language == "bash" else [inline] if inline else []
            for line in lines:
                command = " ".join(re.split(r"\s#\s?", line)[0].split())
                if command.startswith(_PROGRAMS) and " " in command:
                    found.setdefault(command, page.name)
                else:
                    assert not block or not command, f"{page.name}: {command}: is no program that the test knows"
    return [(page, command) for command, page in found.items()]


def blocks(language: str) -> list[tuple[Path, str]]:
    """(page, text) of every block of code."""
    return [(p, body) for p in (ROOT / "README.md", *DOCS) for kind, body, _ in _TEXT.findall(p.read_text())
            if kind == language]  # fmt: skip


def program(words: Sequence[str]) -> str:
    """What a command line of Python starts: a module, or a script."""
    return words[2] if words[1] == "-m" else words[1]


def scaled(words: Sequence[str], url: str = "") -> list[str]:
    """The command as it is run. Raises KeyError for a program that is not in SCALED. url: of a chat service."""
    if words[0] == "launch/tpu/tpu.sh":
        return [words[0], words[1], "--dry_run", *words[2:]]
    more = list(SCALED[program(words)])
    if "--config.hindsight.api_url=URL" in words:
        more += [f"--config.hindsight.api_url={url}", "--config.annotate.writer=openai"]
    if "--process=0" in words:
        more += [f"--coordinator=127.0.0.1:{_free_port()}", "--processes=1"]
    return [*(STANDS_FOR.get(word, word) for word in words), *more]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


# -- the process that forks --------------------------------------------------------------------------------------------

_IMPORTED = ("seed_jax.train.loop", "launch.environment", "launch.common", "launch.settings", "seed_jax.report.card")


class Result(NamedTuple):
    code: int
    output: str
    cpu_s: float


class Runner:
    """Runs command lines of Python one after the other, in `directory`."""

    def __init__(self, directory: Path, variables: dict[str, str]):
        self.directory, self.log = directory, directory / "log"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.documented"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=ROOT, env=variables,
        )  # fmt: skip

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(60)

    def run(self, words: Sequence[str], until: str = "", timeout_s: float = 800.0) -> Result:
        """words: without the interpreter. until: the command is interrupted when it has printed that."""
        self.log.write_text("")
        order = {"words": list(words), "directory": str(self.directory), "log": str(self.log)}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        pid, end = self._answer(60)["pid"], time.monotonic() + timeout_s
        while until and until not in self.log.read_text() and time.monotonic() < end:
            time.sleep(0.05)
        if until:
            os.kill(pid, signal.SIGINT)
        try:
            answer = self._answer(end - time.monotonic())
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            answer = self._answer(60)
        return Result(answer["code"], self.log.read_text(), answer["cpu_s"])

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        if not select.select([self._process.stdout], [], [], max(0.0, timeout_s))[0]:
            raise TimeoutError
        return json.loads(self._process.stdout.readline())


@contextlib.contextmanager
def runner(directory: Path, **variables: str) -> Iterator[Runner]:
    """variables: added to the environment, in which every command has one device and `directory` as its home."""
    mine = {
        "HOME": str(directory), "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla.flags(1), "JAX_COMPILATION_CACHE_DIR": str(directory / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    }  # fmt: skip
    opened = Runner(directory, {**os.environ, **mine, **variables})
    try:
        yield opened
    finally:
        opened.close()


def _serve() -> dict[str, Any] | None:
    """In the parent None, at the end; in each forked process what it shall do."""
    for name in _IMPORTED:
        importlib.import_module(name)
    from seed_jax.tokenizer import load_tokenizer

    load_tokenizer(ROOT / "assets" / "quickstart" / "stage1")  # imports what it needs of transformers
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            return json.loads(line)
        print(json.dumps({"pid": pid}), flush=True)
        _, status, usage = os.wait4(pid, 0)
        code, cpu_s = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
        print(json.dumps({"code": code, "cpu_s": cpu_s}), flush=True)
    return None


def _become(words: Sequence[str], directory: str, log: str) -> None:
    """`python WORDS` in this process."""
    for number, path, mode in ((0, os.devnull, os.O_RDONLY), (1, log, os.O_WRONLY), (2, log, os.O_WRONLY)):
        descriptor = os.open(path, mode | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background commands start without it
    if "launch.compile_check" in words:
        os.environ.pop("XLA_FLAGS")  # a compiler for TPUs refuses those of a CPU
    os.chdir(directory)
    from configs import sweeps

    for name, sweep in sweeps.SWEEPS.items():  # no flag makes a sweep small
        sweeps.SWEEPS[name] = sweep._replace(settings=sweep.settings[:2])
    if words[0] == "-m":
        sys.argv, sys.path[0] = list(words[1:]), directory
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = list(words), str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    todo = _serve()
    if todo:
        _become(**todo)
