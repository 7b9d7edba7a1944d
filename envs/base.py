"""The records and the protocol that every text environment shares."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol


class EnvError(RuntimeError):
    """An episode was lost for good: its game raised, hung, or killed its worker process too often."""


class Obs(NamedTuple):
    """What a game answers to a reset or a command."""

    text: str  # what the player reads
    admissible: tuple[str, ...]  # commands the game would accept now
    won: bool  # the goal holds; the only source of success rates
    done: bool  # the game takes no further command (a step limit belongs to the rollout driver, not to the game)
    reward: float = 0.0  # reward of this step
    measures: tuple[tuple[str, float], ...] = ()  # what else is reported of an episode that ends here, by name
    image: Any = None  # what the player sees, a uint8 array (height, width, 3), where the game was asked to draw


class Task(NamedTuple):
    """One playable task. Everything in it must be picklable, because worker processes build the game from it."""

    id: str  # unique and stable: seeds and frozen evaluation panels are keyed by it
    family: str  # group for stratified sampling and per-family success rates
    goal: str  # the task sentence, without the final period
    source: Any  # what the game factory needs: a path, or a small JSON-able dict


class Game(Protocol):
    """One game in the driver or in a worker. It must be deterministic: the same commands give the same observations."""

    def reset(self) -> Obs: ...

    def step(self, command: str) -> Obs: ...
