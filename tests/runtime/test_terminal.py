"""The live view of a terminal, and plain lines where there is none."""

from __future__ import annotations

import contextlib
import io

import pytest
from rich.console import Console

from seed_jax.runtime import terminal
from seed_jax.runtime.terminal import Countdown, LiveView


def drawn(view: LiveView) -> list[str]:
    console = Console(file=io.StringIO(), width=120, color_system=None)
    console.print(view)
    return console.file.getvalue().splitlines()


@pytest.fixture
def now():
    return [0.0]


def test_view_shows_phase_turn_figures_and_time_left(now):
    console = Console(file=io.StringIO(), width=80)
    view = LiveView(10, 30, console=console, clock=lambda: now[0])
    assert drawn(view)[0].split() == ["iteration", "1/10", "start", "0:00"]  # the bar is empty
    assert drawn(view)[-1].strip() == "0:00 so far"
    view.phase("rollout")
    now[0] = 65.0
    view(4, 100)
    assert "rollout 1:05" in drawn(view)[0] and "turn 5/30, 100 running" in drawn(view)[0]
    view.phase("update")
    assert "turn" not in drawn(view)[0]
    now[0] = 100.0
    view.line(1, success=0.25, held_out=None, episodes=1280)
    now[0] = 110.0
    view.line(2, success=0.5)
    now[0] = 114.0
    # ten seconds for each of the eight that are left, four of them gone; the first iteration compiled
    assert drawn(view)[-1].strip() == "1:54 so far, about 1:16 left"
    assert drawn(view)[-2].strip() == "success 0.500  episodes 1,280"
    assert "iteration 3/10" in drawn(view)[0]
    lines = console.file.getvalue().splitlines()  # the log is the same as without a terminal
    assert lines[0].startswith("[ 1/10] success 0.250  episodes 1280  100.0 s") and len(lines) == 2


def test_view_of_a_resumed_run_and_after_the_last_iteration(now):
    view = LiveView(5, 30, console=Console(file=io.StringIO()), clock=lambda: now[0])
    view.begin(3)
    assert "iteration 4/5" in drawn(view)[0]
    view.line(5)
    assert "iteration 5/5" in drawn(view)[0]


def test_on_a_terminal_lines_scroll_above_the_view_which_goes_at_the_end(now):
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    view = LiveView(2, 30, console=console, clock=lambda: now[0])
    with view:
        view.phase("rollout")
        view.message(f"[bold]run[/] {'x' * 200} --out=1\nsecond")
    text = console.file.getvalue()
    assert f"[bold]run[/] {'x' * 200} --out=1\n" in text and "second\n" in text  # neither broken nor interpreted
    assert "iteration 1/2" in text
    assert text.endswith("\x1b[2K") or "\x1b[2K" in text.rsplit("iteration", 1)[1]  # the last view was erased


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("tty, term, process, live", [
    (True, "xterm", 0, True), (True, "dumb", 0, False), (False, "xterm", 0, False), (True, "xterm", 1, False),
])  # fmt: skip
def test_live_only_on_a_terminal_of_the_first_process(monkeypatch, tty, term, process, live):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(terminal.jax, "process_index", lambda: process)
    out = Terminal() if tty else io.StringIO()
    with contextlib.redirect_stdout(out):
        shown = terminal.reporters(3, 10)
        assert isinstance(shown.progress, LiveView) == live
        shown.begin(1)
        shown.progress.message("hello")
        with shown.timer("update"):
            pass
    assert ("hello" in out.getvalue()) == (process == 0)


def test_countdown(now):
    left = Countdown(110, done=10, clock=lambda: now[0])
    assert left.text(10) == "0:00 so far, about 0:00 left"
    now[0] = 60.0
    assert left.text(30) == "1:00 so far, about 4:00 left"  # twenty of a hundred
    assert left.due(10.0) and not left.due(10.0)
