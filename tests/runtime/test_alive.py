"""Hosts that die, stop or fail: all others end in time and say why. Real processes that do nothing but meet."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from seed_jax.runtime import last_words
from seed_jax.runtime.alive import EXIT_LOST_HOST

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 10
# What happens to which process of two -> how the other one ends: code, within how many seconds, with which words.
ENDS = {
    "process 0 is killed": (0, signal.SIGKILL, -signal.SIGABRT, 5, "was ended by JAX, because process 0 (127.0.0.1:"),
    "process 0 hangs": (0, signal.SIGSTOP, EXIT_LOST_HOST, 25, "nothing was heard of process 0"),
    "process 1 is killed": (1, signal.SIGKILL, EXIT_LOST_HOST, 15, "process 1 is not heard of any more, and here: "),
    "process 1 hangs": (1, signal.SIGSTOP, EXIT_LOST_HOST, 25, f"nothing was heard of process 1 for {TIMEOUT_S} s"),
    "process 1 fails": (1, signal.SIGUSR1, EXIT_LOST_HOST, 15, "process 1 failed: RuntimeError: the games are gone"),
}


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def start(address: str, process: int) -> subprocess.Popen:
    command = [sys.executable, ROOT / "tests/runtime/toy_host.py", address, "2", str(process), str(TIMEOUT_S)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    return subprocess.Popen(command, env=environment, text=True, stdout=-1, stderr=subprocess.STDOUT)


@pytest.fixture(scope="module")
def ends():
    """{what happened: (exit code of the other, seconds until then, what it printed)}; all pairs run at once."""
    pairs, found = {what: [start(address, p) for p in range(2)] for what in ENDS for address in [free_address()]}, {}
    try:
        for pair in pairs.values():
            for host in pair:
                while (line := host.stdout.readline()) != "here\n":
                    assert line, "it ended before the hosts had met"
        time.sleep(2.5)  # until each has heard of the other
        for what, pair in pairs.items():
            victim, number, *_ = ENDS[what]
            pair[victim].send_signal(number)
        began = time.monotonic()
        for what in sorted(ENDS, key=lambda what: ENDS[what][3]):
            other = pairs[what][1 - ENDS[what][0]]
            output, _ = other.communicate(timeout=60)
            found[what] = other.returncode, time.monotonic() - began, output
        yield found
    finally:
        for host in (host for pair in pairs.values() for host in pair):
            host.kill()
            host.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("what", ENDS)
def test_the_other_process_ends_in_time_and_says_why(ends, what):
    code, seconds, output = ends[what]
    assert (code, seconds < ENDS[what][3]) == (ENDS[what][2], True), (seconds, output)
    message = output.strip().splitlines()[-1]
    assert message.startswith(f"error: process {1 - ENDS[what][0]} of 2 ") and ENDS[what][4] in message
    assert message.endswith("start the same command on all hosts again, and it resumes after the last one.")


def test_last_words_name_process_0_only_if_it_is_gone():
    with socket.socket() as there:
        there.bind(("127.0.0.1", 0))
        there.listen()
        address = f"127.0.0.1:{there.getsockname()[1]}"
        assert last_words.reason(1, address).startswith("was killed or has crashed")
    assert f"because process 0 ({address}), through which the hosts meet, is gone" in last_words.reason(1, address)
    assert last_words.reason(0, address).startswith("was killed or has crashed")
