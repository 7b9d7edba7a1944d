"""One of several processes that only meet, over and over: python toy_host.py ADDRESS PROCESSES PROCESS TIMEOUT_S.
SIGUSR1 makes it fail."""

from __future__ import annotations

import signal
import sys
import threading
import traceback

from seed_jax.runtime import alive, multihost


def fail(*_):
    raise RuntimeError("the games are gone")


def main(address: str, processes: str, process: str, timeout_s: str) -> int:
    signal.signal(signal.SIGUSR1, fail)
    multihost.start(address, int(processes), int(process), timeout_s=float(timeout_s))
    stop = threading.Event()
    try:
        with alive.watching(stop, float(timeout_s)):
            print("here", flush=True)
            while not multihost.agree_any(False):
                stop.wait(0.1)
    except Exception:
        traceback.print_exc()
        return multihost.leave(1)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
