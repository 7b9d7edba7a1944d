"""Deals of two cards, each a function of its seed alone, and their splits.

The two values give 12 by `+` or by `*`. There are only 304 deals (7 pairs of values, with faces, suits and order), so
splits share pairs of values, but no two cards: no deal of one split is in another, not even in the other order.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from typing import NamedTuple

GOAL_VALUE = 12
RANKS = ("A", "2", "3", "4", "5", "6", "7", "8", "9", "10", "J", "Q", "K")
SUITS = ("clubs", "diamonds", "hearts", "spades")
SEEDS = {"train": (0, 2**16 - 1), "seen": (2**16, 2**31), "unseen": (2**31, 2**32 - 1)}
_FACTORS = (2, 3, 4, 6)  # first values for which a product is possible
_SHARES = 4  # one of so many deals is "seen", one "unseen", the rest for training


class Card(NamedTuple):
    rank: str  # one of RANKS
    suit: str  # one of SUITS

    @property
    def value(self) -> int:
        return min(RANKS.index(self.rank) + 1, 10)


Deal = tuple[Card, Card]


class DealError(ValueError):
    """Cards that nobody can play with, or too few deals."""


def deal(seed: int) -> Deal:
    """Two cards: the first rank is uniform in 2 to K, the second value its complement to 12 (or, half of the time where
    it can be, the other factor of 12); suits and order are uniform."""
    rng = random.Random(seed)
    first = Card(rng.choice(RANKS[1:]), rng.choice(SUITS))
    product = first.value in _FACTORS and rng.random() < 0.5
    other = GOAL_VALUE // first.value if product else GOAL_VALUE - first.value
    cards = (first, Card(RANKS[other - 1], rng.choice(SUITS)))
    return cards if rng.random() < 0.5 else (cards[1], cards[0])


def operator(cards: Deal) -> str:
    """The one that gives 12; "+" if both do. Raises DealError if none does."""
    first, second = (card.value for card in cards)
    if not makes_twelve(cards):
        raise DealError(f"{first} and {second} do not give {GOAL_VALUE} by + or *")
    return "+" if first + second == GOAL_VALUE else "*"


def solution(cards: Deal) -> list[str]:
    """Four actions that win."""
    return [str(cards[0].value), operator(cards), str(cards[1].value), "="]


def split_of(cards: Deal) -> str:
    """The only split that these two cards may be in."""
    name = " ".join(sorted(f"{card.rank} {card.suit}" for card in cards))
    number = hashlib.sha256(name.encode()).digest()[0] % _SHARES
    return {0: "seen", 1: "unseen"}.get(number, "train")


def draws(split: str, count: int) -> list[tuple[int, Deal]]:
    """The first `count` (seed, deal) of a split, repeated as often as the game deals them. Raises DealError."""
    start, stop = SEEDS[split]
    found = ((seed, cards) for seed in range(start, stop) if split_of(cards := deal(seed)) == split)
    drawn = list(itertools.islice(found, count))
    if len(drawn) < count:
        raise DealError(f"the seeds of the {split} split give {len(drawn)} deals, but {count} are wanted; lower it")
    return drawn


def panel(split: str) -> list[Deal]:
    """Every deal of a split once, in a fixed order."""
    faces = itertools.product(RANKS, SUITS, RANKS, SUITS)
    every = ((Card(a, suit), Card(b, other)) for a, suit, b, other in faces)
    return [cards for cards in every if makes_twelve(cards) and split_of(cards) == split]


def makes_twelve(cards: Deal) -> bool:
    first, second = (card.value for card in cards)
    return GOAL_VALUE in (first + second, first * second)


def read_cards(source: list[list[str]]) -> Deal:
    """From a task's list of [rank, suit]. Raises DealError."""
    cards = []
    for entry in source:
        if len(entry) != 2 or entry[0] not in RANKS or entry[1] not in SUITS:
            raise DealError(f"{entry!r} is no card; a card is a rank of {', '.join(RANKS)} and a suit of {SUITS}")
        cards.append(Card(*entry))
    if len(cards) != 2:
        raise DealError(f"{len(cards)} cards; a deal has two")
    operator((cards[0], cards[1]))
    return cards[0], cards[1]
