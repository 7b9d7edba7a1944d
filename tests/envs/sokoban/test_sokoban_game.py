"""Rewards and ends of an episode, replies, and prompts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from envs.base import Task
from envs.sokoban.actions import Action, parse
from envs.sokoban.domain import GOAL, SokobanDomain
from envs.sokoban.game import SokobanGame, make
from envs.sokoban.room import read_level

TWO_BOXES = "######\n#PXO_#\n#X___#\n#O___#\n######"


def game(level: str = TWO_BOXES, max_steps: int = 15, **settings) -> SokobanGame:
    return SokobanGame(read_level(level), max_steps, **settings)


def rewards(played: SokobanGame, *commands: str) -> list[float]:
    return [round(played.step(command).reward, 6) for command in commands]


def test_rewards():
    """A box on its target +1, off it -1, the last one +10 more, every step -0.1."""
    played = game()
    assert rewards(played, "right", "right", "left", "left") == [0.9, -1.1, -0.1, -0.1]
    played = game()
    assert rewards(played, "right", "left", "down") == [0.9, -0.1, 10.9]
    assert played.room.solved and played.done


def test_what_is_no_direction_costs_and_does_not_count():
    played = game(max_steps=2)
    for command in ("still", "", "jump", "0", "UP", None, 3):
        last = played.step(command)
        assert last.reward == -0.1 and not last.done and last.text == played.start.table()
    assert not played.step("up").done
    assert played.step("up").done and not played.room.solved, "blocked moves count"
    assert dict(played.step("up").measures)["effective_moves"] == 0


def test_after_the_end():
    played = game(max_steps=1)
    assert played.step("right").done
    again = played.step("left")
    assert again.done and again.reward == 0 and again.text == played.room.table()
    strict = game(max_steps=1, strict=True)
    strict.step("right")
    with pytest.raises(ValueError, match="the episode is over"):
        strict.step("left")
    assert not strict.reset().done and strict.room == strict.start


def test_observations_and_measures():
    played = make({"level": TWO_BOXES, "moves": 9}, max_steps=9, form="digits")
    first = played.reset()
    assert first.text.startswith("0 0 0 0 0 0 / 0 5 4 2 1 0 /") and first.image is None
    assert "up" in first.admissible and "still" in first.admissible and None not in first.admissible
    last = played.step("right")
    assert dict(last.measures) == {"boxes_placed": 0.5, "effective_moves": 1.0} and not last.won
    assert game().reset() == game().reset(), "text observations can be compared"


# -- replies


def golden(name: str) -> list[dict]:
    folder = os.environ.get("SEED_JAX_GOLDEN", "")
    path = Path(folder) / "parsing.json"
    if not folder or not path.is_file():
        pytest.skip("SEED_JAX_GOLDEN does not name a folder with parsing.json")
    return json.loads(path.read_text(encoding="utf-8"))["projection"][name]


def test_golden_replies():
    """Strict reading against what is wanted, lenient reading against what the reference does."""
    numbers = {None: 0, "up": 1, "down": 2, "left": 3, "right": 4, "still": 0}
    for case in golden("sokoban"):
        assert parse(case["text"]) == Action(case["want"]["action"], case["want"]["valid"]), case
        action = parse(case["text"], compat=True)
        assert {"action": numbers[action.command], "valid": action.valid} == case["reference"], case


@pytest.mark.parametrize(
    ("inside", "strict", "compat"),
    [
        ("up", "up", "up"),
        ("move LEFT", "left", "left"),
        ("left then up", None, "up"),
        ("upper left", "left", "up"),
        ("up, up", "up", "up"),
        ("still", "still", "still"),
        ("stand still and look right", None, "right"),
        ("jump", None, None),
        ("2", None, None),
        ("", None, None),
    ],
)
def test_replies(inside, strict, compat):
    reply = f"<think>go</think><action>{inside}</action>"
    assert parse(reply) == Action(strict, strict is not None)
    assert parse(reply, compat=True) == Action(compat, compat is not None)
    assert parse(reply.replace("think", "b")) == Action(strict, False)
    assert parse(reply.replace("think", "b"), require_think=False) == Action(strict, strict is not None)


def test_other_replies():
    assert parse("<think>t</think><ACTION>Down</Action><action>up</action>") == Action("down", True)
    for reply in ("", "up", "<think>t</think>down", "<think>t</think><action>up", "</action>up<action>"):
        assert parse(reply) == Action(None, False) == parse(reply, compat=True)
    assert parse("<think>上</think><action>up</action>").valid, "any script may be thought in"
    assert parse("<think> </think><action> 3 </action>", numbers=True) == Action("left", True)
    assert parse("<think> </think><action> 0 </action>", numbers=True) == Action("still", True)
    assert not parse("<think> </think><action> 34 </action>", numbers=True).valid


# -- prompts


def test_text_prompts():
    domain, played = SokobanDomain("released"), game()
    first, second = played.reset(), played.step("right")
    prompt = domain.prompt(GOAL, [], first.text, first.admissible, 2)
    assert f"Your task is to: {GOAL}.\n" in prompt and first.text in prompt and "step(s)" not in prompt
    assert prompt.count("Now it's your turn") == 1 and "<image>" not in prompt
    history = [(first.text, "right", second.text), (second.text, "", second.text)]
    later = domain.prompt(GOAL, history, second.text, second.admissible, 1)
    assert "You have taken 2 step(s)" in later and "now at step 3" in later
    assert f"[Observation 2:\n{second.text}\nAction 2: 'nothing']" in later and first.text not in later
    assert domain.prompt(GOAL, history, second.text, (), 0).count(second.text) == 1


def test_the_prompt_of_a_picture_is_always_the_same():
    domain = SokobanDomain("released", "image")
    prompts = {domain.prompt(GOAL, [("<image>", "up", "<image>")] * n, "<image>", (), 2) for n in range(3)}
    [prompt] = prompts
    assert prompt.count("<image>") == 1 and "step(s)" not in prompt
    words = " ".join(prompt.split())
    for words_of in ("small green alien with two antennae and black eyes", "yellow crate with an orange X", "diamond"):
        assert words_of in words


def test_compact_prompt():
    domain = SokobanDomain("compact")
    lines = domain.prompt(GOAL, [("", "right", ""), ("", "", "")], "0 5 / 0 0", (), 4).split("\n")
    assert lines == [f"your task is to: {GOAL}", "history: 4 ; nothing", "now: 0 5 / 0 0", "actions: 1 / 2 / 3 / 4"]
    assert domain.prompt(GOAL, [], "0", (), 4).split("\n")[1] == "history: none"
    assert domain.parse("<think> </think> <action> 1 </action>") == Action("up", True)


def test_what_is_told_about_a_task():
    domain, task = SokobanDomain("released"), Task("a", "boxes_2", GOAL, {"level": TWO_BOXES})
    assert domain.solution(task) == ["down", "up", "right"]
    assert domain.true_skill(task) == "The room is solved by these moves: down, then up, then right."
    turns = [
        SimpleNamespace(command=c, observation="a", result=r) for c, r in (("up", "a"), ("up", "b"), ("still", "a"))
    ]
    told = [domain.row_class(task, SimpleNamespace(won=False, turns=turns), i) for i in range(3)]
    assert told == ["failure: blocked", "failure: move", "failure: no move"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("react",), "env.prompt = 'react': Sokoban has the prompt styles"),
        (("released", "text_rich"), "env.observation = 'text_rich': Sokoban shows 'text' or an 'image'"),
        (("compact", "image"), "pictures have the style 'released' only"),
    ],
)
def test_styles_that_do_not_exist(arguments, message):
    with pytest.raises(ValueError, match=message):
        SokobanDomain(*arguments)
