"""Stopping a run on request: Ctrl-C, or the SIGTERM of a preempted machine."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator


class Interrupted(Exception):
    """A signal asked the run to stop; nothing of the current iteration has reached the weights yet."""


@contextlib.contextmanager
def stop_on_signals(stop: threading.Event, grace_s: float = 0.0) -> Iterator[None]:
    """While this is open, Ctrl-C and SIGTERM set `stop`; a second one acts at once.

    grace_s: seconds after a SIGTERM when the process ends even if this is still open (0 = never): who sends it will not
    wait either, and a host that hangs must not keep the others. Python notices a signal between two calls into JAX.
    """
    limit = threading.Timer(grace_s, _give_up, (grace_s,))
    limit.daemon = True

    def ask(number, _):
        stop.set()
        if number == signal.SIGTERM and grace_s:
            limit.start()
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        print("\nstopping: the weights are saved in a moment (once more to stop at once)", file=sys.stderr, flush=True)

    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        limit.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def _give_up(grace_s: float) -> None:
    print(
        f"error: not saved within {grace_s:.0f} s of SIGTERM (checkpoint.grace_s); the last checkpoint remains",
        file=sys.stderr,
        flush=True,
    )
    os._exit(128 + signal.SIGTERM)
