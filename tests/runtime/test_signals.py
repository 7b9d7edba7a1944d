"""SIGTERM ends a process that hangs, after the time it is given."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

HANGS = """
import threading, time
from seed_jax.runtime.signals import stop_on_signals
stop = threading.Event()
with stop_on_signals(stop, {grace_s}):
    print("ready", flush=True)
    while {condition}:
        time.sleep(0.05)
print("left", flush=True)
"""


def run(grace_s: float, condition: str) -> tuple[int, str, str, float]:
    code = HANGS.format(grace_s=grace_s, condition=condition)
    process = subprocess.Popen([sys.executable, "-c", code], text=True, stdout=-1, stderr=-1)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err, time.monotonic() - began


def test_a_hanging_process_ends_after_its_grace():
    code, out, err, seconds = run(0.5, "True")
    assert code == 128 + signal.SIGTERM and out == "" and 0.4 < seconds < 20
    assert "not saved within 0 s of SIGTERM (checkpoint.grace_s); the last checkpoint remains" in err


def test_a_process_that_stops_in_time_is_left_alone():
    code, out, _, _ = run(30.0, "not stop.is_set()")
    assert (code, out) == (0, "left\n")
