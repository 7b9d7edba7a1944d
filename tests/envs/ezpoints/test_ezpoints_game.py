"""Steps and ends of an episode, replies, and prompts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from envs.base import Task
from envs.ezpoints.actions import ACTIONS, Action, parse, parse_block
from envs.ezpoints.deal import Card
from envs.ezpoints.domain import GOAL, EzpointsDomain
from envs.ezpoints.game import EzpointsGame, make

SOURCE = {"cards": [["2", "hearts"], ["J", "spades"]]}


def played(*commands: str, source: dict = SOURCE):
    """(game, last observation)"""
    game = make(source)
    last = game.reset()
    for command in commands:
        last = game.step(command)
    return game, last


@pytest.mark.parametrize(
    ("commands", "formula", "reward"),
    [
        ("2 + 10 =", "2 + 10 =", 10),
        ("10 + 2 =", "10 + 2 =", 10),
        ("2 * 10 =", "2 * 10 =", 0),  # 20
        ("2 + 2 =", "2 + =", 0),  # the second 2 is on no card, and the rest no formula
        ("2 10 =", "2 10 =", 0),  # 210
        ("2 + + 10 =", "2 + + 10 =", 0),
        ("=", "=", 0),
        ("2 + 7 10 =", "2 + 10 =", 10),  # a number that is on no card changes nothing
        ("* 2 + 10 =", "* 2 + 10 =", 0),
    ],
)
def test_formulas(commands, formula, reward):
    game, last = played(*commands.split())
    assert last.text == f"Cards: 2 of hearts, J of spades\nFormula: {formula}"
    assert last.done and (last.reward, last.won) == (reward, reward == 10) and game.symbols == formula.split()


def test_twelve_with_one_number_is_not_enough():
    _, last = played("6", "+", "6", "=", source={"cards": [["6", "hearts"], ["6", "spades"]]})
    assert last.won
    game = EzpointsGame((Card("2", "hearts"), Card("10", "spades")))
    game.symbols = ["1", "2"]  # cannot be written, and would be worth 12
    assert not game.step("=").won


def test_a_sixth_symbol_loses():
    game, last = played("2", "+", "10", "+", "+")
    assert not last.done and len(game.symbols) == 5
    last = game.step("*")
    assert last.done and not last.won and last.reward == 0
    assert dict(last.measures) == {"finished": 0.0}


def test_what_is_no_action_changes_nothing():
    game, first = played()
    for command in ("", "11", "12", "0", "-", "/", "J", "==", None, 2, "+ "):
        assert game.step(command) == first
    assert "3" not in first.admissible and first.admissible == ("2", "10", "+", "*", "=")


def test_after_the_end():
    game, last = played("=")
    again = game.step("2")
    assert again.done and again.reward == 0 and again.text == last.text
    strict = make(SOURCE, strict=True)
    strict.step("=")
    with pytest.raises(ValueError, match="the episode is over"):
        strict.step("2")
    assert not strict.reset().done


# -- replies


def golden(name: str) -> list[dict]:
    folder = os.environ.get("SEED_JAX_GOLDEN", "")
    path = Path(folder) / "parsing.json"
    if not folder or not path.is_file():
        pytest.skip("SEED_JAX_GOLDEN does not name a folder with parsing.json")
    return json.loads(path.read_text(encoding="utf-8"))["projection"][name]


def test_golden_replies():
    """Strict reading against what is wanted, lenient reading against what the reference does."""
    for case in golden("ezpoints"):
        assert parse(case["text"]) == Action(case["want"]["action"], case["want"]["valid"]), case
        action = parse(case["text"], compat=True)
        number = ACTIONS.index(action.command) if action.command else -1
        assert {"action": number, "valid": action.valid} == case["reference"], case


@pytest.mark.parametrize(
    ("reply", "strict", "compat"),
    [
        ('{"thoughts": "x", "action": "7"}', "7", "7"),
        ('{"action": "5", "thoughts": "5 + 7"}', "5", None),
        ('{"action": 10}', "10", "10"),
        ('```json\n{"thoughts": "a\nb", "action": " * "}\n```', "*", "*"),
        ('I take {this}: {"action": "="} now', "=", "="),
        ('{"action": "2"} {"action": "2"}', "2", "2"),
        ('{"action": "2"} {"action": "3"}', None, None),
        ('{"action": "plus"}', None, None),
        ('{"action": null}', None, None),
        ('{"action": true}', None, None),
        ('{"action": ["2"]}', None, "2"),
        ('{"action": "2"', None, "2"),
        ('{"action": "110"}', None, None),
        ("the formula is complete: =", None, "="),
        ("", None, None),
        ("[" * 3000 + '{"a":' * 3000, None, None),
    ],
)
def test_replies(reply, strict, compat):
    assert parse(reply) == Action(strict, strict is not None)
    assert parse(reply, compat=True) == Action(compat, compat is not None)


def test_replies_to_the_compact_prompt():
    for word, symbol in (("and", "+"), ("with", "*"), ("is", "="), ("10", "10"), ("+", "+"), (" IS ", "=")):
        assert parse_block(f"<think> </think> <action>{word}</action>") == Action(symbol, True)
    for reply in ("and", "<action>and 2</action>", "<action></action>", '{"action": "2"}'):
        assert parse_block(reply) == Action(None, False)


# -- prompts


def test_prompts():
    _, seen = played("2", "+")
    text = EzpointsDomain("released").prompt(GOAL, [], seen.text, seen.admissible, 0)
    assert "Cards: 2 of hearts, J of spades." in text and "formula so far: 2+\n" in text
    assert "<image>" not in text and text.count(f"Your task is to: {GOAL}.\n") == 1
    image = EzpointsDomain("released", "image").prompt(GOAL, [], seen.text, seen.admissible, 0)
    assert image.startswith("<image>") and image.count("<image>") == 1 and "formula so far: 2+\n" in image
    assert "hearts" not in image and ", ".join(ACTIONS) in image, "nothing tells what is on the cards"
    for prompt in (text, image):
        assert '{"thoughts": "' in prompt and '"action": "' in prompt


def test_compact_prompt():
    domain = EzpointsDomain("compact")
    _, seen = played("2", "+")
    lines = domain.prompt(GOAL, [], seen.text, seen.admissible, 0).split("\n")
    assert lines == [
        f"your task is to: {GOAL}",
        "history: 2 and",
        "now: 2 , J",
        "actions: 10 / and / with / is",
    ]
    assert "history: none" in domain.prompt(GOAL, [], played()[1].text, (), 0)
    assert domain.parse("<action>is</action>").command == "="


def test_what_is_told_about_a_task():
    domain, task = EzpointsDomain("released"), Task("a", "ezpoints", GOAL, SOURCE)
    assert domain.solution(task) == ["2", "+", "10", "="]
    assert domain.true_skill(task) == "The formula for these cards is 2 + 10 =: write it symbol by symbol."
    turns = [SimpleNamespace(command=command) for command in ("2", "*", "=", None)]
    told = [domain.row_class(task, SimpleNamespace(won=True, turns=turns), i) for i in range(4)]
    assert told == ["success: number", "success: operator", "success: end", "success: invalid action"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("react",), "env.prompt = 'react': EZPoints has the prompt styles"),
        (("released", "video"), "env.observation = 'video': EZPoints shows 'text' or an 'image'"),
        (("compact", "image"), "pictures have the style 'released' only"),
    ],
)
def test_styles_that_do_not_exist(arguments, message):
    with pytest.raises(ValueError, match=message):
        EzpointsDomain(*arguments)
