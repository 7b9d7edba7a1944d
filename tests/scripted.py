"""A sampler without a model: `answer(path)` writes the text of each reply. It remembers what it was asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from seed_jax import tokenizer as tok
from seed_jax.types import Completion
from tests import tiny


class ScriptedSampler:
    """rounds: a list of (prompt, params, path, seed) for each call of `step` that had something to answer."""

    def __init__(self, answer: Callable[[tuple[int, int, int]], str], finish: str = "stop"):
        self.answer, self.finish = answer, finish
        self.rounds: list[list[tuple]] = []
        self.stats: Counter = Counter()
        self._waiting: dict[int, tuple] = {}

    @property
    def pending(self) -> int:
        return len(self._waiting)

    def key(self, path, seed=None):
        return path, seed

    def submit(self, prompt, params, key, images=()) -> int:
        handle = self.stats["requests"]
        self.stats["requests"] += 1
        self._waiting[handle] = (prompt, params, *key)
        return handle

    def step(self) -> list[tuple[int, Completion]]:
        asked, self._waiting = self._waiting, {}
        self.rounds.append(list(asked.values()))
        return [(handle, self._complete(path)) for handle, (_, _, path, _) in self._order(asked)]

    def abort_all(self) -> None:
        self._waiting = {}

    def _order(self, asked: dict[int, tuple]):
        return asked.items()

    def _complete(self, path) -> Completion:
        ids = tok.encode_response(tiny.tokenizer(), self.answer(path))
        return Completion(ids, -np.arange(len(ids), dtype=np.float32), self.finish)
