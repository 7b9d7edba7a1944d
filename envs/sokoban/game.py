"""One Sokoban episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envs.base import Obs
from envs.sokoban import draw
from envs.sokoban.actions import WORDS
from envs.sokoban.room import ACTIONS, Room, read_level

STEP_REWARD, BOX_REWARD, SOLVED_REWARD = -0.1, 1.0, 10.0


class SokobanGame:
    """A game (envs/base.py) of one room.

    A move costs 0.1, also where the way is blocked; a box that reaches a target earns 1 and loses it when it leaves;
    the last one earns 10 more. It ends when all boxes are on targets, or after `max_steps` moves. What is no direction
    costs 0.1, and does not count as a move.
    """

    def __init__(self, room: Room, max_steps: int, form: str = "table", tile_px: int = 0, strict: bool = False):
        """form: of the text, "table" or "digits". tile_px: size of a cell in the picture; 0 = no pictures.
        strict: a step after the end is an error, and otherwise ignored."""
        self.start, self.max_steps, self.form = room, max_steps, form
        self.tile_px, self.strict = tile_px, strict
        self.reset()

    def reset(self) -> Obs:
        self.room, self.moves, self.turns, self.effective = self.start, 0, 0, 0
        return self._observe(0.0)

    @property
    def done(self) -> bool:
        return self.room.solved or self.moves >= self.max_steps

    def step(self, command: str) -> Obs:
        if self.done:
            if self.strict:
                raise ValueError("the episode is over; reset() starts it again")
            return self._observe(0.0)
        self.turns += 1
        if command not in ACTIONS:
            return self._observe(STEP_REWARD)
        self.moves += 1
        before, self.room = self.room, self.room.moved(command)
        self.effective += self.room != before
        reward = STEP_REWARD + BOX_REWARD * (self.room.placed - before.placed)
        return self._observe(reward + SOLVED_REWARD * self.room.solved)

    def _observe(self, reward: float) -> Obs:
        room = self.room
        return Obs(
            room.digits() if self.form == "digits" else room.table(),
            WORDS,
            won=room.solved,
            done=self.done,
            reward=reward,
            measures=(
                ("boxes_placed", room.placed / len(room.boxes)),
                ("effective_moves", self.effective / max(1, self.turns)),
            ),
            image=draw.picture(room, self.tile_px) if self.tile_px else None,
        )


def make(source: Mapping[str, Any], max_steps: int, **settings: Any) -> SokobanGame:
    """The game of a task's `source`: {"level": level text, ...}."""
    return SokobanGame(read_level(source["level"]), max_steps, **settings)
