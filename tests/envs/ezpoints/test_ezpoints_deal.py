"""Deals against the published distribution, splits, and the value of formulas."""

from __future__ import annotations

import ast
import hashlib
import itertools
import random
from collections import Counter

import pytest

from envs.ezpoints import deal as cards
from envs.ezpoints.deal import Card, DealError
from envs.ezpoints.formula import value
from envs.ezpoints.game import EzpointsGame

PUBLISHED = {  # share of each pair of values
    (2, 10): 0.375,
    (5, 7): 0.167,
    (3, 9): 0.125,
    (4, 8): 0.125,
    (2, 6): 0.083,
    (3, 4): 0.083,
    (6, 6): 0.042,
}


def test_deals_are_distributed_as_published():
    dealt = [cards.deal(seed) for seed in range(20_000)]
    pairs = Counter(tuple(sorted(card.value for card in two)) for two in dealt)
    assert set(pairs) == set(PUBLISHED)
    for pair, share in PUBLISHED.items():
        assert pairs[pair] / len(dealt) == pytest.approx(share, abs=0.012)
    assert Counter(card.suit for two in dealt for card in two).most_common()[-1][1] > 9_500
    assert {card.rank for two in dealt for card in two} == set(cards.RANKS[1:]), "no ace"
    assert Counter(two[0].rank for two in dealt)["J"] == pytest.approx(20_000 / 24, rel=0.15), "in both orders"


def test_a_seed_alone_decides():
    before = [cards.deal(seed) for seed in range(50)]
    random.seed(3)
    state = random.getstate()
    assert [cards.deal(seed) for seed in range(50)] == before and random.getstate() == state
    assert hashlib.sha256(repr(before).encode()).hexdigest()[:16] == "2894edfa5502aaa1"


def test_no_deal_of_a_panel_occurs_in_training():
    """In neither order. Every pair of values occurs in every split, and all 304 deals in one."""
    panels = {split: cards.panel(split) for split in cards.SEEDS}
    every = [two for panel in panels.values() for two in panel]
    assert len(every) == len(set(every)) == 304 and (len(panels["seen"]), len(panels["unseen"])) == (83, 70)
    unordered = [{frozenset(two) for two in panel} for panel in panels.values()]
    assert all(a.isdisjoint(b) for a, b in itertools.combinations(unordered, 2))
    for panel in panels.values():
        assert {tuple(sorted(card.value for card in two)) for two in panel} == set(PUBLISHED)
    drawn = [two for _, two in cards.draws("train", 2000)]
    assert set(drawn) == set(panels["train"]) and len(drawn) == 2000
    assert [seed for seed, _ in cards.draws("train", 5)] == sorted(seed for seed, _ in cards.draws("train", 5))


def test_an_oracle_wins_every_deal():
    """In four actions, and in this order alone: no other operator does."""
    for split in cards.SEEDS:
        for two in cards.panel(split):
            game = EzpointsGame(two)
            results = [game.step(action) for action in cards.solution(two)]
            assert [step.reward for step in results] == [0, 0, 0, 10] and results[-1].won and results[-1].done
            wrong = [{"+": "*", "*": "+"}.get(action, action) for action in cards.solution(two)]
            lost = EzpointsGame(two)
            assert not any(lost.step(action).won for action in wrong)


@pytest.mark.parametrize(
    ("symbols", "expected"),
    [
        ("5 + 7", 12),
        ("2 * 6", 12),
        ("5 7", 57),
        ("1 0 + 2", 12),
        ("2 + 3 * 4", 14),
        ("3 * 4 + 2 * 5", 22),
        ("10", 10),
        ("", None),
        ("5 +", None),
        ("* 5", None),
        ("5 + + 7", None),
        ("2 * * 6", None),
        ("+ 5", None),
        ("5 =", None),
    ],
)
def test_values_of_formulas(symbols, expected):
    assert value(symbols.split()) == expected


def test_every_short_formula_has_the_value_that_python_gives_it():
    """Where Python reads it without signs and powers."""
    for length in range(1, 6):
        for symbols in itertools.product(("2", "10", "+", "*"), repeat=length):
            assert value(symbols) == python_value("".join(symbols)), symbols


def python_value(text: str) -> int | None:
    def walk(node: ast.expr) -> int:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
            a, b = walk(node.left), walk(node.right)
            return a + b if isinstance(node.op, ast.Add) else a * b
        raise SyntaxError(type(node))

    try:
        return walk(ast.parse(text, mode="eval").body)
    except SyntaxError:
        return None


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([["11", "hearts"], ["2", "clubs"]], "is no card; a card is a rank of A, 2"),
        ([["J", "stars"], ["2", "clubs"]], "is no card"),
        ([["J", "hearts"]], "1 cards; a deal has two"),
        ([["J", "hearts"], ["3", "clubs"]], r"10 and 3 do not give 12 by \+ or \*"),
    ],
)
def test_cards_that_nobody_can_play_with(source, message):
    with pytest.raises(DealError, match=message):
        cards.read_cards(source)


def test_more_deals_than_seeds():
    with pytest.raises(DealError, match=r"the seeds of the train split give .* deals, but 70000 are wanted"):
        cards.draws("train", 70_000)


def test_values_and_operators():
    assert [Card(rank, "clubs").value for rank in cards.RANKS] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 10, 10]
    assert cards.operator((Card("Q", "clubs"), Card("2", "clubs"))) == "+"
    assert cards.operator((Card("6", "clubs"), Card("2", "clubs"))) == "*"
