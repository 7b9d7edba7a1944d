"""Hosts that tell each other that they live: one that dies, fails or falls silent ends all others, with a message.

How it is noticed:
  * a host that fails says so, in the key-value store of jax.distributed (`watching`);
  * one that says nothing for `timeout_s` is given up by the others; after a few seconds already where a collective has
    failed meanwhile;
  * when process 0 dies, JAX ends all others at once with SIGABRT, because that store lived there. No Python code runs
    any more by then (jaxlib 0.10 cannot call a `missed_heartbeat_callback` in Python: std::bad_cast), so a small
    process that outlives this one prints what happened (`leave_last_words`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from seed_jax.runtime import last_words
from seed_jax.runtime.signals import Interrupted

EXIT_LOST_HOST = 75  # EX_TEMPFAIL: the same command, started again on all hosts, resumes
LOOK_EVERY_S = 1.0
_SILENT_S = 5.0  # a host that has not been heard of for so long after an error here has probably caused it
_KEYS = "seed_jax"  # where the hosts leave notes for each other
_speaker: subprocess.Popen | None = None  # of the last words


def many() -> bool:
    """Whether there are other hosts."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def leads() -> bool:
    """Whether this is the process that writes files and prints."""
    return jax.process_index() == 0


@contextlib.contextmanager
def watching(stop: threading.Event, timeout_s: float) -> Iterator[None]:
    """While this is open, hosts tell each other that they live and when one was asked to stop.

    `stop`, set on one host, is set on all of them about a second later. A host that fails, or is not heard of for
    `timeout_s` seconds, ends all others with a message and EXIT_LOST_HOST, also those that wait for it in a collective.
    """
    if not many():
        yield
        return
    done = threading.Event()
    heard: dict[int, tuple[str, float]] = {}  # other process -> its last note and when it changed
    thread = threading.Thread(target=_watch, args=(stop, done, timeout_s, heard), daemon=True, name="hosts")
    thread.start()
    try:
        yield
    except Interrupted:
        raise
    except BaseException as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if isinstance(error, Exception) and (lost := _silent(heard)):
            # A collective fails, with errors of several types, where a host is lost in the middle of it.
            _give_up(f"process {lost[0]} is not heard of any more, and here: {reason}")
        _note("failed", reason)
        raise
    finally:
        done.set()
        thread.join()
        _note("alive", "done")


def _client() -> Any:
    from jax._src import distributed  # its key-value store has no public name

    return distributed.global_state.client


def _note(what: str, value: str) -> None:
    _client().key_value_set(f"{_KEYS}/{what}/{jax.process_index()}", value, allow_overwrite=True)


def _silent(heard: dict[int, tuple[str, float]]) -> list[int]:
    """The processes of which nothing is heard in the next seconds; returns as soon as there is none.

    What is read in the first second may have been written before the error.
    """
    began = time.monotonic()
    alive_at = began + 1.5 * LOOK_EVERY_S
    while True:
        waited_for = [process for process, (note, at) in heard.items() if note != "done" and at < alive_at]
        if not waited_for or time.monotonic() - began > _SILENT_S:
            return waited_for
        time.sleep(0.1)


def _watch(stop: threading.Event, done: threading.Event, timeout_s: float, heard: dict[int, tuple[str, float]]) -> None:
    me, beat, told = jax.process_index(), 0, False
    reached = time.monotonic()
    while not done.wait(LOOK_EVERY_S):
        now, beat = time.monotonic(), beat + 1
        try:
            with _limit(timeout_s - (now - reached)):
                _note("alive", str(beat))
                if stop.is_set() and not told:
                    _note("stop", "asked")
                    told = True
                notes = {key.split("/", 1)[1]: value for key, value in _client().key_value_dir_get(f"{_KEYS}/")}
            reached = now
        except jax.errors.JaxRuntimeError:
            continue  # until the limit is over
        if any(key.startswith("stop/") for key in notes):
            stop.set()
        for process in range(jax.process_count()):
            if process == me:
                continue
            if f"failed/{process}" in notes:
                _give_up(f"process {process} failed: {notes[f'failed/{process}']}")
            note = notes.get(f"alive/{process}", "")
            if heard.get(process, ("?", 0.0))[0] != note:
                heard[process] = note, now
            elif note != "done" and now - heard[process][1] > timeout_s:
                _give_up(f"nothing was heard of process {process} for {timeout_s:.0f} s")


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Gives up if process 0 has not answered by then: a call into its store has no time limit of its own, and hangs
    where that host has vanished or was stopped."""
    reason = "nothing was heard of process 0, through which the hosts meet, within mesh.host_timeout_s"
    timer = threading.Timer(max(0.0, seconds), _give_up, (reason,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _give_up(reason: str) -> None:
    who = f"process {jax.process_index()} of {jax.process_count()}"
    print(last_words.text(who, f"stops: {reason}"), file=sys.stderr, flush=True)
    take_last_words_back()
    time.sleep(3 * LOOK_EVERY_S * leads())  # the others read from process 0 what happened, and say it too
    os._exit(EXIT_LOST_HOST)  # other threads may hang in a collective for ever


# -- the end that nobody sees coming -----------------------------------------------------------------------------------


def leave_last_words() -> None:
    """Starts the small process that speaks if this one ends without `take_last_words_back`; a normal end calls that."""
    global _speaker
    from jax._src import distributed

    who = [str(os.getpid()), str(jax.process_index()), str(jax.process_count())]
    command = [sys.executable, "-I", str(Path(last_words.__file__)), *who, distributed.global_state.coordinator_address]
    _speaker = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    atexit.register(take_last_words_back)


def take_last_words_back() -> None:
    global _speaker
    if _speaker is not None:
        _speaker.kill()
        _speaker.wait()
        _speaker = None
