"""What a run shows while it works: on a terminal a live view of three lines, elsewhere plain lines; process 0 only."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from seed_jax.runtime import usage
from seed_jax.runtime.logging import PhaseTimer, Progress, TurnProgress, duration

_BAR = 20  # characters


class Reporters(NamedTuple):
    """progress: lines and messages; turns: a rollout's `on_turn`; timer: phases; view: a context in which the live
    view, if there is one, is on the screen; begin: told how many iterations earlier processes have done."""

    progress: Any
    turns: Any
    timer: PhaseTimer
    view: contextlib.AbstractContextManager
    begin: Callable[[int], None]


def reporters(iterations: int, max_steps: int) -> Reporters:
    """For a run of `iterations` whose episodes have at most `max_steps` turns."""
    memory = lambda: (told := usage.memory_gb()) and told[0]  # noqa: E731
    first = jax.process_index() == 0
    if first and sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        live = LiveView(iterations, max_steps)
        return Reporters(live, live, PhaseTimer(memory=memory, on_phase=live.phase), live, live.begin)
    turns = TurnProgress(max_steps, every_s=60.0, enabled=first)
    progress, nothing = Progress(iterations, enabled=first), contextlib.nullcontext()
    return Reporters(progress, turns, PhaseTimer(memory=memory), nothing, lambda done: None)


class LiveView:
    """Phase, figures of the last iteration, turns of the running rollout, time left. Lines that are printed meanwhile
    scroll by above it; it disappears at the end.

    Stands in for `Progress` (line, message) and `TurnProgress` (a call, close).
    """

    def __init__(self, iterations: int, max_steps: int, console: Any = None, clock: Callable = time.perf_counter):
        from rich.live import Live

        self._iterations, self._max_steps, self._clock = iterations, max_steps, clock
        self._start = self._last = self._phase_start = clock()
        self._done = 0
        self._seconds: list[float] = []  # of each iteration
        self._phase, self._turn, self._values = "start", "", {}
        self._live = Live(self, console=console, refresh_per_second=4, transient=True)
        self._lines = Progress(iterations, stream=_Above(self._live.console), clock=clock)

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def begin(self, done: int) -> None:
        self._done = done

    def phase(self, name: str) -> None:
        self._phase, self._phase_start, self._turn = name, self._clock(), ""

    def line(self, iteration: int, **values: Any) -> None:
        now = self._clock()
        self._seconds.append(now - self._last)
        self._last, self._done = now, iteration
        self._values |= {name: value for name, value in values.items() if value is not None}
        self._lines.line(iteration, **values)

    def message(self, text: str) -> None:
        self._lines.message(text)

    def __call__(self, step: int, live: int) -> None:
        if live:
            self._turn = f"turn {step + 1}/{self._max_steps}, {live} running"

    def close(self) -> None:
        self._turn = ""

    def __rich__(self) -> Any:
        """Drawn anew four times a second."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        now = self._clock()
        number = min(self._done + 1, self._iterations)
        top = Table.grid(padding=(0, 2))
        for _ in range(4):
            top.add_column(no_wrap=True)
        bar = ProgressBar(total=self._iterations, completed=self._done, width=_BAR)
        phase = f"{self._phase} {duration(now - self._phase_start)}"
        top.add_row(Text(f"iteration {number}/{self._iterations}", style="bold"), bar, Text(phase), Text(self._turn))
        shown = "  ".join(f"{name} {_short(value)}" for name, value in self._values.items())
        figures = Text(shown, no_wrap=True, overflow="ellipsis")
        times = Text(f"{duration(now - self._start)} so far{self._left(now)}", style="dim")
        return Group(top, *([figures] if self._values else []), times)

    def _left(self, now: float) -> str:
        if not self._seconds:
            return ""
        typical = self._seconds[1:] or self._seconds  # the first iteration compiles
        left = (self._iterations - self._done) * sum(typical) / len(typical) - (now - self._last)
        return f", about {duration(max(0.0, left))} left"


class _Above(io.TextIOBase):
    """A stream whose lines go above the live view, whole: a command that is told can be copied."""

    def __init__(self, console: Any):
        self._console, self._text = console, ""

    def write(self, text: str) -> int:
        *lines, self._text = (self._text + text).split("\n")
        for line in lines:
            self._console.print(line, soft_wrap=True, markup=False, highlight=False, emoji=False)
        return len(text)


class Countdown:
    """Time so far and left of work in `total` parts of about equal size, `done` of which were there before."""

    def __init__(self, total: int, done: int = 0, clock: Callable[[], float] = time.perf_counter):
        self._total, self._first, self._clock = total, done, clock
        self._start = self._said = clock()

    def due(self, every_s: float) -> bool:
        """Whether so many seconds have passed since this was last true."""
        now = self._clock()
        if now - self._said < every_s:
            return False
        self._said = now
        return True

    def text(self, done: int) -> str:
        spent = self._clock() - self._start
        left = spent / max(1, done - self._first) * (self._total - done)
        return f"{duration(spent)} so far, about {duration(left)} left"


def _short(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
