"""Response text to ALFWorld command: shared golden cases, and copies of the important ones that always run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from envs.alfworld.actions import Action, parse


def test_golden_cases() -> None:
    folder = os.environ.get("SEED_JAX_GOLDEN", "")
    path = Path(folder) / "parsing.json"
    if not folder or not path.is_file():
        pytest.skip("SEED_JAX_GOLDEN does not name a folder with parsing.json")
    cases = json.loads(path.read_text(encoding="utf-8"))["projection"]["alfworld"]
    assert cases
    for case in cases:
        assert parse(case["text"]) == Action(case["want"]["action"], case["want"]["valid"]), case["text"]


@pytest.mark.parametrize(
    ("text", "command", "valid"),
    [
        ("<think>go</think><action>go to shelf 1</action>", "go to shelf 1", True),
        ("<think>go</think><action> Take Apple 1 from Table 2 </action>", "take apple 1 from table 2", True),
        ("<think>go</think><ACTION>Look</ACTION>", "look", True),
        ("<think>go</think><action>look</action><action>inventory</action>", "look", True),
        ("<think>go</think><action>open\nfridge 1</action>", "open\nfridge 1", True),
        # An action without proper thinking is executed but breaks the format.
        ("<action>look</action>", "look", False),
        ("<think>a<action>look</action>", "look", False),
        ("<THINK>x</THINK><action>look</action>", "look", False),
        ("<think>go</think><action>看</action>", "看", False),
        ("<think>去</think><action>look</action>", "look", False),
        # No usable block: nothing is guessed.
        ("<think>go</think>go to shelf 1", None, False),
        ("<think>go</think></action><action>look", None, False),
        ("<think>go</think><action></action>", None, False),
        ("<think>go</think><action> \n </action>", None, False),
        ("<think>go</think><action>look", None, False),
        ("", None, False),
    ],
)
def test_cases(text: str, command: str | None, valid: bool) -> None:
    assert parse(text) == Action(command, valid)


def test_closing_tag_before_the_block_is_ignored() -> None:
    assert parse("<think>x</think></action><action>look</action>") == Action("look", True)


def test_thinking_is_optional_on_request() -> None:
    assert parse("<action>look</action>", require_think=False) == Action("look", True)
    assert parse("<action>看</action>", require_think=False) == Action("看", False)
    assert parse("look", require_think=False) == Action(None, False)
