"""A small deterministic text game, with commands that misbehave in the ways real engines do."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

from envs.base import Obs


class ToyGame:
    """Every observation depends on the whole history, so a replay that skips anything shows."""

    def __init__(self, source: dict):
        if source.get("broken"):
            raise ValueError("no such game")
        time.sleep(source.get("seconds", 0))
        if "log" in source:
            with open(source["log"], "a") as file:
                file.write(f"{source['name']}\n")
        self._source = source
        self._state = ""

    def reset(self) -> Obs:
        self._state = f"start {self._source['name']}"
        return self._observe()

    def step(self, command: str) -> Obs:
        verb, _, argument = command.partition(" ")
        if verb == "raise":
            raise KeyError(argument)
        if verb == "kill" and not (argument and Path(argument).exists()):
            if argument:
                Path(argument).touch()  # only once: the replay finds the file
            os.kill(os.getpid(), signal.SIGKILL)
        if verb == "sleep":
            time.sleep(float(argument))
        if verb == "modules":
            return Obs(" ".join(sorted(sys.modules)), (), False, False)
        self._state = hashlib.sha256(f"{self._state}|{command}".encode()).hexdigest()
        return self._observe()

    def _observe(self) -> Obs:
        won = self._state.startswith("0")
        return Obs(self._state, ("look", self._state[:4]), won, won, 10.0 * won)


def make(source: dict) -> ToyGame:
    return ToyGame(source)
