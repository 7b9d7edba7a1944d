"""Prints why a process of many has died, after it has. A script of its own, on nothing but Python's library:

    python -I last_words.py PID PROCESS PROCESSES COORDINATOR

It is started by process PROCESS (with that PID) and waits for its end; one that ends in good order kills it first.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

_LOOK_EVERY_S = 0.2
_CONNECT_S = 5.0


def text(who: str, what: str) -> str:
    return (
        f"\nerror: {who} {what}. Nothing of the checkpoints is lost; start the same command on all hosts again, and it "
        "resumes after the last one."
    )


def reason(process: int, coordinator: str) -> str:
    """What has ended it, as far as one can tell from outside: JAX ends all when process 0 does not answer any more."""
    if process and not _answers(coordinator):
        return f"was ended by JAX, because process 0 ({coordinator}), through which the hosts meet, is gone"
    return "was killed or has crashed, and the others end with it"


def _answers(address: str) -> bool:
    host, port = address.rsplit(":", 1)
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S):
            return True
    except OSError:
        return False


def main(pid: str, process: str, processes: str, coordinator: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to the whole group; they are not for us
        signal.signal(number, signal.SIG_IGN)
    while os.getppid() == int(pid):
        time.sleep(_LOOK_EVERY_S)
    print(text(f"process {process} of {processes}", reason(int(process), coordinator)), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
