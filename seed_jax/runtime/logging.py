"""What a run leaves in its workdir while it trains (metrics, episodes, config), and what it prints."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from ml_collections import ConfigDict

from seed_jax import config as config_lib

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
EPISODES_FILE = "episodes.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
OUTCOMES_FILE = "outcomes.jsonl"
TRAJECTORIES_FILE = "trajectories.jsonl"
PANEL_TRAJECTORIES_FILE = "trajectories_panel.jsonl"
TEACHER_FILE = "teacher.jsonl"  # the policy with a skill in its prompt against itself without
SUMMARY_FILE = "summary.json"
GAMES_FILE = "games.json"
# Everything a trainer writes; --overwrite removes these and nothing else.
OWN_FILES = (
    METRICS_FILE,
    EPISODES_FILE,
    EVALUATIONS_FILE,
    OUTCOMES_FILE,
    TRAJECTORIES_FILE,
    PANEL_TRAJECTORIES_FILE,
    TEACHER_FILE,
    SUMMARY_FILE,
    GAMES_FILE,
    "checkpoints",
    "export",
    "dumps",
    "profile",
    "tensorboard",
    CONFIG_FILE,
)
# Metrics, by the start of their names, that depend on the machine and the moment, not on the run alone.
_MEASURED = (
    "time/",
    "compile/",
    "hbm/",
    "rollout/occupancy",
    "rollout/tokens_per_s",
    "rollout/env_wait_s",
    "update/tokens_per_s",
    "update/mfu",
)


def is_measured(metric: str) -> bool:
    """Whether two equal runs may differ in this metric."""
    return metric.startswith(_MEASURED)


class WorkdirError(RuntimeError):
    """The workdir cannot be used; the message says why and what to do."""


def prepare_workdir(path: str | Path, config: ConfigDict, overwrite: bool = False) -> bool:
    """Creates or adopts a workdir and stores the config in it. Returns whether this continues an earlier run.

    overwrite: remove what an earlier run left (OWN_FILES only; other files stay).
    Raises WorkdirError if the path cannot be written, or belongs to a run of another config.
    """
    workdir = Path(path)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        probe = workdir / ".write_test"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise WorkdirError(f"cannot write to workdir {workdir}: {error.strerror}; choose another --workdir") from error

    stored = workdir / CONFIG_FILE
    resuming = stored.exists()
    if not resuming and any((workdir / name).exists() for name in OWN_FILES):
        raise WorkdirError(f"workdir {workdir} has files of a run but no {CONFIG_FILE}; choose another --workdir")
    if resuming:
        saved = read_config(stored)
        if overwrite:
            remove_files(workdir, OWN_FILES)
            resuming = False
        elif config_lib.config_hash(saved) != config_lib.config_hash(config):
            lines = "\n".join(f"  - {line}" for line in config_lib.diff(saved, config, config_lib.FREE_ON_RESUME))
            raise WorkdirError(
                f"workdir {workdir} belongs to a run of another config (its value -> yours):\n{lines}\n"
                "Choose another --workdir, or add --overwrite to start again here."
            )
    write_whole(stored, config_lib.to_json(config))
    return resuming


def read_config(stored: Path, advice: str = "move it away or choose another --workdir") -> dict[str, Any]:
    """The config an earlier run stored. Refuses a file that is not ours, since --overwrite would delete it."""
    try:
        saved = json.loads(stored.read_text())
    except (OSError, ValueError) as error:
        raise WorkdirError(f"cannot read {stored} ({error}); {advice}") from error
    if not isinstance(saved, dict) or not {"iterations", "rollout", "optim"} <= saved.keys():
        raise WorkdirError(f"{stored} is not the config of a run; {advice}")
    return saved


def remove_files(workdir: Path, names: Sequence[str]) -> None:
    """Removes files and whole directories of a run; names that do not exist are fine."""
    for name in names:
        path = workdir / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that a crash leaves either the old or the new content."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)


def jsonable(value: Any) -> Any:
    """The value in the types of JSON: arrays and NumPy scalars unpacked, NaN and infinity as None."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, (str, bool, int)) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "__array__"):  # NumPy and JAX arrays and scalars
        return jsonable(np.asarray(value).tolist())
    raise TypeError(f"cannot write a {type(value).__name__} as JSON: {value!r}")


def append_jsonl(path: Path, record: Mapping[str, Any]) -> None:
    """Appends one line; it is on its way to the disk when this returns."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(jsonable(record), ensure_ascii=False, allow_nan=False) + "\n")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The records of a file; [] if it does not exist. A last line cut off by a crash is left out.

    Raises ValueError naming the line if any other line is damaged.
    """
    return [record for _, record in _lines_and_records(path)]


def truncate_jsonl(path: Path, iteration: int) -> None:
    """Drops records with an "iteration" above the given one, and a last line cut off by a crash."""
    if path.exists():
        partial = path.with_name(path.name + ".partial")
        with partial.open("wb") as file:  # line by line: the episodes of a long run do not fit in memory
            for line, record in _lines_and_records(path):
                if record["iteration"] <= iteration:
                    file.write(line + b"\n")
        partial.replace(path)


def _lines_and_records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    if not path.exists():
        return
    damaged = ""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if damaged:  # so it was not the last one
                raise ValueError(damaged)
            try:
                record = json.loads(line)
            except ValueError as error:
                damaged = f"{path}, line {number} is not JSON ({error}); remove that line"
                continue
            yield line.rstrip(b"\n"), record


class MetricsWriter:
    """Appends one JSON object an iteration to metrics.jsonl and the same numbers to TensorBoard."""

    def __init__(self, workdir: str | Path, tensorboard: bool = True, enabled: bool = True):
        """enabled: only on the process that writes."""
        self._workdir = Path(workdir)
        self._wants_tensorboard, self._enabled = tensorboard, enabled
        self._purge_step: int | None = None
        self._board: Any = None

    def truncate_after(self, iteration: int, *others: Path) -> None:
        """For a resumed run: forgets what came after `iteration`, in metrics.jsonl and in the other JSONL files.

        A run that stopped before its first checkpoint forgets everything: iteration = -1.
        """
        for path in (self._workdir / METRICS_FILE, *others):
            truncate_jsonl(path, iteration)
        self._purge_step = iteration + 1

    def write(self, iteration: int, metrics: Mapping[str, Any]) -> None:
        """metrics: names "phase/quantity" to numbers (or texts, which TensorBoard does not get)."""
        if not self._enabled:
            return
        record = jsonable({"iteration": iteration, **metrics})
        append_jsonl(self._workdir / METRICS_FILE, record)
        if self._wants_tensorboard:
            board = self._open_board()
            for name, value in record.items():
                if isinstance(value, (int, float)) and name != "iteration":
                    board.add_scalar(name, value, iteration)
            board.flush()

    def close(self) -> None:
        if self._board is not None:
            self._board.close()

    def _open_board(self) -> Any:
        if self._board is None:
            from tensorboardX import SummaryWriter  # slow to import, and not wanted by every run

            # TensorBoard hides the events of an earlier run from the purge step on.
            self._board = SummaryWriter(str(self._workdir / "tensorboard"), purge_step=self._purge_step)
        return self._board


class EpisodeWriter:
    """Appends episodes, one JSON object a line."""

    def __init__(self, path: str | Path, enabled: bool = True):
        self.path, self._enabled = Path(path), enabled

    def write(self, iteration: int, record: Mapping[str, Any]) -> None:
        if self._enabled:
            append_jsonl(self.path, {"iteration": iteration, **record})


class PhaseTimer:
    """Adds up wall-clock seconds by phase. JAX computes asynchronously: block on results inside the phase.

    memory: tells how much is in use (None: unknown); `memory_by_phase` keeps what it said when each phase last ended.
    on_phase: told the name of each phase as it begins
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        memory: Callable[[], float | None] = lambda: None,
        on_phase: Callable[[str], None] = lambda phase: None,
    ):
        self._clock, self._memory, self._on_phase = clock, memory, on_phase
        self._current: dict[str, float] = {}
        self.memory_by_phase: dict[str, float] = {}
        self.totals: dict[str, float] = {}  # seconds by phase over the whole process

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._on_phase(phase)
        start = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - start
            self._current[phase] = self._current.get(phase, 0.0) + seconds
            self.totals[phase] = self.totals.get(phase, 0.0) + seconds
            if (used := self._memory()) is not None:
                self.memory_by_phase[phase] = used

    def seconds(self, phase: str) -> float:
        """Of one phase since the last `collect`."""
        return self._current.get(phase, 0.0)

    def collect(self) -> dict[str, float]:
        """Metrics "time/<phase>_s" since the last call."""
        metrics = {f"time/{phase}_s": seconds for phase, seconds in self._current.items()}
        self._current = {}
        return metrics


class Progress:
    """Prints one line an iteration, with the time it took, the time so far and the time left."""

    def __init__(
        self,
        iterations: int,
        enabled: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """iterations: of the whole run, counting those of earlier processes. enabled: only on process 0."""
        self._iterations = iterations
        self._enabled = enabled
        self._stream = stream
        self._clock = clock
        self._start = self._last = clock()
        self._durations: list[float] = []

    def line(self, iteration: int, **values: Any) -> None:
        """Reports that `iteration` (counted from 1) is done. values: shown by name, None left out."""
        now = self._clock()
        self._durations.append(now - self._last)
        self._last = now
        # The first iteration compiles, so it says little about the ones to come.
        typical = self._durations[1:] or self._durations
        left = (self._iterations - iteration) * sum(typical) / len(typical)
        shown = [f"{name} {_short(value)}" for name, value in values.items() if value is not None]
        width = len(str(self._iterations))
        times = f"{self._durations[-1]:.1f} s, {duration(now - self._start)} so far, about {duration(left)} left"
        self.message(f"[{iteration:>{width}}/{self._iterations}] " + "  ".join([*shown, times]))

    def message(self, text: str) -> None:
        """Prints any other line."""
        if self._enabled:
            print(text, file=self._stream or sys.stdout, flush=True)


class TurnProgress:
    """Prints how far rollouts are, turn by turn, for those that take long: on a terminal in one line that changes,
    elsewhere a line now and then.

    Call it as a rollout's `on_turn`. The estimate supposes that every running episode goes on to the step limit, so it
    is an upper bound that shrinks as episodes end.
    """

    def __init__(
        self,
        max_steps: int,
        rollouts: int = 1,
        *,
        every_s: float = 20.0,
        enabled: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """rollouts: how many will come, one after another; what comes after them counts anew."""
        self._max_steps, self._rollouts, self._enabled, self._clock = max_steps, rollouts, enabled, clock
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._every_s = 0.5 if self._terminal else every_s
        self._begin()

    def _begin(self) -> None:
        self._start = self._shown = self._clock()
        self._rollout, self._played = 0, 0  # rollouts begun, turns played in all of them
        self._live = self._first_live = 0

    def __call__(self, step: int, live: int) -> None:
        """step: turns that the running episodes have behind them; live: how many run."""
        if not live:
            return
        self._played += self._live
        if step == 0:
            if self._rollout == self._rollouts:  # the next ones
                self._begin()
            self._rollout, self._first_live = self._rollout + 1, live
        self._live = live
        now = self._clock()
        if not self._enabled or now - self._shown < self._every_s or not self._played:
            return
        self._shown = now
        turns_left = live * (self._max_steps - step)
        turns_left += (self._rollouts - self._rollout) * max(self._played // self._rollout, turns_left)
        left = (now - self._start) / self._played * turns_left
        which = f"rollout {self._rollout}/{self._rollouts}, " if self._rollouts > 1 else ""
        text = (
            f"{which}turn {step + 1}/{self._max_steps}, {live} of {self._first_live} episodes running, "
            f"{duration(now - self._start)} so far, at most {duration(left)} left"
        )
        self._write(f"\r\x1b[K{text}" if self._terminal else f"{text}\n")

    def close(self) -> None:
        """Clears the line on a terminal."""
        if self._terminal and self._enabled:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def duration(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def _short(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
