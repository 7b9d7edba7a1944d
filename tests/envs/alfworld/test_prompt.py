"""The acting prompt: both released forms and the compact form, pinned literally."""

from __future__ import annotations

import pytest

from envs.alfworld.prompt import build, strip_banner, task_goal

RESET = (
    "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly around you, you see a "
    "cabinet 1, and a desk 1.\n\nYour task is to: put a clean mug in desk."
)
GOAL = "put a clean mug in desk"
ADMISSIBLE = ("examine mug 1", "go to cabinet 1", "go to desk 1", "help", "inventory", "look")

RELEASED_FIRST = (
    "\n"
    "You are an expert agent operating in the ALFRED Embodied Environment.\n"
    "Your current observation is: -= Welcome to TextWorld, ALFRED! =-\n"
    "\n"
    "You are in the middle of a room. Looking quickly around you, you see a cabinet 1, and a desk 1.\n"
    "\n"
    "Your task is to: put a clean mug in desk.\n"
    "Your admissible actions of the current situation are: ['examine mug 1'\n"
    " 'go to cabinet 1'\n"
    " 'go to desk 1'\n"
    " 'inventory'\n"
    " 'look'].\n"
    "\n"
    "Now it's your turn to take an action.\n"
    "You should first reason step-by-step about the current situation. This reasoning process MUST be enclosed within "
    "<think> </think> tags. \n"
    "Once you've finished your reasoning, you should choose an admissible action for current step and present it "
    "within <action> </action> tags.\n"
)
RELEASED_LATER = (
    "\n"
    "You are an expert agent operating in the ALFRED Embodied Environment. Your task is to: put a clean mug in desk.\n"
    "Prior to this step, you have already taken 3 step(s). Below are the most recent 2 observations and the "
    "corresponding actions you took: [Observation 2: 'You arrive at cabinet 1.', Action 2: 'open cabinet 1']\n"
    "[Observation 3: 'You open the cabinet 1.', Action 3: 'go to desk 1']\n"
    "You are now at step 4 and your current observation is: You arrive at desk 1. On it, you see nothing.\n"
    "Your admissible actions of the current situation are: ['go to cabinet 1'\n"
    " 'look'].\n"
    "\n"
    "Now it's your turn to take an action.\n"
    "You should first reason step-by-step about the current situation. This reasoning process MUST be enclosed within "
    "<think> </think> tags.\n"
    "Once you've finished your reasoning, you should choose an admissible action for current step and present it "
    "within <action> </action> tags.\n"
)
NOW = "You arrive at desk 1. On it, you see nothing."
HISTORY = [
    (RESET, "go to cabinet 1", "You arrive at cabinet 1."),
    ("You arrive at cabinet 1.", "open cabinet 1", "You open the cabinet 1."),
    ("You open the cabinet 1.", "go to desk 1", NOW),
]


def later(style: str, **changes: object) -> str:
    admissible = ("go to cabinet 1", "help", "look")
    arguments: dict = {"goal": GOAL, "history": HISTORY, "observation": NOW, "admissible": admissible}
    return build(style, **(arguments | changes))


def test_released_first_form() -> None:
    assert build("released", goal=GOAL, history=[], observation=RESET, admissible=ADMISSIBLE, step=0) == RELEASED_FIRST


def test_released_later_form() -> None:
    assert later("released", step=3, history_length=2) == RELEASED_LATER
    assert later("released", history_length=2) == RELEASED_LATER, "step defaults to the length of the history"


def test_released_copies_the_task_sentence_when_given() -> None:
    assert later("released", history_length=2, first_observation=RESET) == RELEASED_LATER
    unusual = later("released", first_observation="Your task is to: look around, then stop!  \n")
    assert "Environment. Your task is to: look around, then stop!\nPrior" in unusual


def test_released_numbers_a_windowed_history_over_the_episode() -> None:
    assert later("released", history=HISTORY[1:], step=3, history_length=2) == RELEASED_LATER


def test_released_counts_only_what_is_shown() -> None:
    text = later("released")
    assert "the most recent 3 observations" in text
    assert f"[Observation 1: '{RESET}', Action 1: 'go to cabinet 1']" in text


def test_text_with_braces_is_not_a_format_string() -> None:
    assert "you see {0} and {goal}" in later("released", observation="you see {0} and {goal}")


def test_compact_first_step() -> None:
    text = build("compact", goal=GOAL, history=[], observation=RESET, admissible=ADMISSIBLE, step=0)
    assert text == (
        "your task is to: put a clean mug in desk\n"
        "history: none\n"
        "now: You are in the middle of a room. Looking quickly around you, you see a cabinet 1, and a desk 1.\n"
        "actions: go to cabinet 1 / go to desk 1"
    )


def test_compact_later_step() -> None:
    text = later("compact", history_length=2)
    assert text == (
        "your task is to: put a clean mug in desk\n"
        "history: open cabinet 1 => You open the cabinet 1. ; go to desk 1\n"
        "now: You arrive at desk 1. On it, you see nothing.\n"
        "actions: go to cabinet 1"
    )


def test_a_turn_without_a_command_shows_as_nothing() -> None:
    history = [("a", "", "Nothing happens."), ("Nothing happens.", "", "Nothing happens.")]
    assert "history: nothing => Nothing happens. ; nothing\n" in later("compact", history=history)
    assert "Action 1: 'nothing'" in later("released", history=history)


def test_no_history_shown() -> None:
    assert "history: none\n" in later("compact", history_length=0)
    assert "the most recent 0 observations" in later("released", history_length=0)


def test_no_actions() -> None:
    assert later("compact", admissible=("help", "look")).endswith("actions: none")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"style": "terse"}, "prompt style is 'terse'; choose one of released, compact"),
        ({"history_length": -1}, "history_length is -1"),
        ({"step": 2}, "step is 2 with 3 history entries"),
        ({"history": [], "step": 1}, "step is 1 with 0 history entries"),
    ],
)
def test_bad_arguments(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        later(changes.pop("style", "compact"), **changes)


def test_task_goal() -> None:
    assert task_goal(RESET) == GOAL
    assert task_goal("Your task is to:  find two pens. \n") == "find two pens"
    assert task_goal("Your task is to: look at pen\n\nYou see a desk.") == "look at pen"


@pytest.mark.parametrize("text", ["You are in a room.", "Your task is to: ", ""])
def test_task_goal_missing(text: str) -> None:
    with pytest.raises(ValueError, match="Your task is to"):
        task_goal(text)


def test_strip_banner() -> None:
    assert strip_banner(RESET).startswith("You are in the middle")
    assert strip_banner(NOW) == NOW
    assert strip_banner("a -= b =- c") == "a -= b =- c", "only at the start"


def test_react_is_one_transcript() -> None:
    first = build("react", goal=GOAL, history=[], observation=RESET, admissible=ADMISSIBLE)
    assert first.startswith("Solve a household task by interleaving Thought, Action and Observation")
    assert f"Your task is to: {GOAL}.\n\nObservation 1: You are in the middle of a room." in first
    assert first.count("Your task is to: ") == 1 and "Welcome" not in first
    assert "Admissible actions: examine mug 1, go to cabinet 1, go to desk 1, inventory, look.\n" in first
    assert "write Thought 1 within <think> </think> tags, then Action 1 within <action> </action> tags." in first
    text = build("react", goal=GOAL, history=HISTORY, observation=NOW, admissible=ADMISSIBLE, history_length=2)
    assert (
        "\n\nObservation 2: You arrive at cabinet 1.\nAction 2: open cabinet 1\n"
        "Observation 3: You open the cabinet 1.\nAction 3: go to desk 1\n"
        f"Observation 4: {NOW}\nAdmissible actions: "
    ) in text
    assert "Observation 1:" not in text and "Thought 4" in text
