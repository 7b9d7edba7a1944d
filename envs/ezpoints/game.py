"""One EZPoints episode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from envs.base import Obs
from envs.ezpoints import draw, formula
from envs.ezpoints.actions import ACTIONS, EQUALS, NUMBERS
from envs.ezpoints.deal import GOAL_VALUE, Deal, read_cards

MAX_SYMBOLS = 5  # of a formula; one more ends the episode
WON_REWARD = 10.0


class EzpointsGame:
    """A game (envs/base.py) of one deal.

    A number is written only as often as the cards have it, an operator anywhere. `=` ends the episode: 10 if the
    formula uses both numbers and gives 12, else 0. So does a sixth symbol, with 0. What is no action changes nothing.
    """

    def __init__(self, cards: Deal, pictures: bool = False, font: str = "", strict: bool = False):
        """font: file of the font in pictures; "" = Pillow's own. strict: a step after the end is an error, and
        otherwise ignored."""
        self.cards, self.pictures, self.font, self.strict = cards, pictures, font, strict
        self.reset()

    def reset(self) -> Obs:
        self.symbols: list[str] = []
        self.won = self.done = False
        return self._observe()

    def step(self, command: str) -> Obs:
        if self.done:
            if self.strict:
                raise ValueError("the episode is over; reset() starts it again")
            return self._observe()
        if command not in ACTIONS or not self._allowed(command):
            return self._observe()
        self.symbols.append(command)
        self.done = command == EQUALS or len(self.symbols) > MAX_SYMBOLS
        if command == EQUALS:
            self.won = not self._left() and formula.value(self.symbols[:-1]) == GOAL_VALUE
        return self._observe(WON_REWARD if self.won else 0.0)

    def _left(self) -> Counter[str]:
        """Numbers on the cards that the formula does not use yet."""
        return Counter(str(card.value) for card in self.cards) - Counter(self.symbols)

    def _allowed(self, command: str) -> bool:
        return command not in NUMBERS or command in self._left()

    def _observe(self, reward: float = 0.0) -> Obs:
        shown = ", ".join(f"{card.rank} of {card.suit}" for card in self.cards)
        return Obs(
            f"Cards: {shown}\nFormula: {' '.join(self.symbols) or 'empty'}",
            tuple(action for action in ACTIONS if self._allowed(action)),
            won=self.won,
            done=self.done,
            reward=reward,
            measures=(("finished", float(EQUALS in self.symbols)),),
            image=draw.picture(self.cards, self.symbols, self.font) if self.pictures else None,
        )


def make(source: Mapping[str, Any], **settings: Any) -> EzpointsGame:
    """The game of a task's `source`: {"cards": [[rank, suit], [rank, suit]]}."""
    return EzpointsGame(read_cards(source["cards"]), **settings)
