"""Stopping a run on request: Ctrl-C, or the SIGTERM of a preempted machine."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator


class Interrupted(Exception):
    """A signal asked the run to stop; nothing of the current iteration has reached the weights yet."""


@contextlib.contextmanager
def stop_on_signals(stop: threading.Event) -> Iterator[None]:
    """While this is open, Ctrl-C and SIGTERM set `stop`; a second one acts at once."""

    def ask(number, _):
        stop.set()
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        print("\nstopping: the weights are saved in a moment (once more to stop at once)", file=sys.stderr, flush=True)

    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
