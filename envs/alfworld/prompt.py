"""The ALFWorld acting prompt in three styles.

`released` is the wording of the published checkpoints, character for character, so that weights can be exchanged.
`compact` carries the same information in about a tenth of the tokens, for models small enough to train on a CPU.
`react` shows the episode as one transcript of actions and observations (in the manner of ReAct, arXiv 2210.03629), to
be continued by a thought and an action; the wording is ours, and earlier thoughts are not repeated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

STYLES = ("released", "compact", "react")
TASK_MARK = "Your task is to: "

# The first form ends its sixth line with a space, the later form does not. Both are kept as published.
_REASON = (
    "You should first reason step-by-step about the current situation. "
    "This reasoning process MUST be enclosed within <think> </think> tags."
)
_CHOOSE = (
    "Once you've finished your reasoning, you should choose an admissible action for current step "
    "and present it within <action> </action> tags."
)
_RELEASED_FIRST = f"""
You are an expert agent operating in the ALFRED Embodied Environment.
Your current observation is: {{observation}}
Your admissible actions of the current situation are: [{{actions}}].

Now it's your turn to take an action.
{_REASON}\x20
{_CHOOSE}
"""
_RELEASED_LATER = f"""
You are an expert agent operating in the ALFRED Embodied Environment. Your task is to: {{task}}
Prior to this step, you have already taken {{steps_taken}} step(s). Below are the most recent {{shown}} observations \
and the corresponding actions you took: {{history}}
You are now at step {{current_step}} and your current observation is: {{observation}}
Your admissible actions of the current situation are: [{{actions}}].

Now it's your turn to take an action.
{_REASON}
{_CHOOSE}
"""

_REACT = """\
Solve a household task by interleaving Thought, Action and Observation: a Thought reasons about what has been observed,
an Action is one of the admissible ones, and an Observation is what the environment answers.
Your task is to: {task}.

{transcript}
Admissible actions: {actions}.

Now it's your turn: write Thought {number} within <think> </think> tags, \
then Action {number} within <action> </action> tags."""

_BANNER = re.compile(r"\A\s*-=.*?=-\s*")
_TASK_SENTENCE = re.compile(re.escape(TASK_MARK) + r"[^\n]*")
_NO_COMMAND = "nothing"
_COMPACT_HIDDEN = ("help", "look", "inventory")

HistoryEntry = tuple[str, str, str]


def task_goal(reset_text: str) -> str:
    """The task in the reset text without its final period: "put a clean mug in coffeemachine".

    Raises:
        ValueError: the text holds no task sentence.
    """
    return _task_description(reset_text).split("\n", 1)[0].strip().removesuffix(".").rstrip()


def strip_banner(text: str) -> str:
    """The text without the game's "-= Welcome ... =-" line and the blank lines around it."""
    return _BANNER.sub("", text)


def build(
    style: str,
    *,
    goal: str,
    history: Sequence[HistoryEntry],
    observation: str,
    admissible: Sequence[str],
    step: int | None = None,
    history_length: int = 5,
    first_observation: str = "",
) -> str:
    """The user message for one environment step (before the chat template).

    Args:
        style: one of STYLES.
        goal: the task without its final period, as `task_goal` returns it.
        history: (observation before, command, result) of the commands already taken, oldest first; all of them or only
            the most recent. An empty command stands for a turn that named none.
        observation: the game's current text, unchanged (the reset text at the first step).
        admissible: the game's admissible commands, in the game's order.
        step: number of commands already taken, 0 at the first step; len(history) when left out.
        history_length: how many of the most recent commands are shown.
        first_observation: the reset text; when given, the released style copies the task sentence from it literally
            (its final period included) instead of restoring the period of `goal`.

    Raises:
        ValueError: unknown style, negative history_length, or a `step` that contradicts `history`.
    """
    if style not in STYLES:
        raise ValueError(f"prompt style is {style!r}; choose one of {', '.join(STYLES)}")
    if history_length < 0:
        raise ValueError(f"history_length is {history_length}; it must be 0 or more")
    steps_taken = len(history) if step is None else step
    if steps_taken < len(history) or (steps_taken and not history and history_length):
        raise ValueError(
            f"step is {steps_taken} with {len(history)} history entries; "
            "step counts the commands already taken (0 at the first step) and history must hold the most recent of them"
        )
    shown = list(history[max(0, len(history) - history_length) :])
    if style == "compact":
        return _compact(goal, shown, observation, admissible)
    if style == "react":
        return _react(goal, shown, observation, admissible, steps_taken)
    return _released(goal, shown, observation, admissible, steps_taken, first_observation)


def _released(
    goal: str,
    shown: list[HistoryEntry],
    observation: str,
    admissible: Sequence[str],
    steps_taken: int,
    first_observation: str,
) -> str:
    actions = "\n ".join(f"'{command}'" for command in admissible if command != "help")
    if steps_taken == 0:
        return _RELEASED_FIRST.format(observation=observation, actions=actions)
    task = _task_description(first_observation) if first_observation else goal.removesuffix(".") + "."
    first_number = steps_taken - len(shown) + 1
    history = "\n".join(
        f"[Observation {number}: '{before}', Action {number}: '{command or _NO_COMMAND}']"
        for number, (before, command, _) in enumerate(shown, start=first_number)
    )
    return _RELEASED_LATER.format(
        task=task,
        steps_taken=steps_taken,
        shown=len(shown),
        history=history,
        current_step=steps_taken + 1,
        observation=observation,
        actions=actions,
    )


def _compact(goal: str, shown: list[HistoryEntry], observation: str, admissible: Sequence[str]) -> str:
    # The last result is the current observation, which has its own line.
    items = [f"{command or _NO_COMMAND} => {_one_line(result)}" for _, command, result in shown[:-1]]
    items += [command or _NO_COMMAND for _, command, _ in shown[-1:]]
    offered = offered_commands(admissible)
    lines = (
        f"your task is to: {goal}",
        f"history: {' ; '.join(items) or 'none'}",
        f"now: {_seen(observation)}",
        f"actions: {' / '.join(offered) or 'none'}",
    )
    return "\n".join(lines)


def _react(goal: str, shown: list[HistoryEntry], observation: str, admissible: Sequence[str], steps_taken: int) -> str:
    first = steps_taken - len(shown) + 1
    transcript = [
        f"Observation {number}: {_seen(before)}\nAction {number}: {command or _NO_COMMAND}"
        for number, (before, command, _) in enumerate(shown, start=first)
    ]
    return _REACT.format(
        task=goal.removesuffix("."),
        transcript="\n".join([*transcript, f"Observation {steps_taken + 1}: {_seen(observation)}"]),
        actions=", ".join(command for command in admissible if command != "help"),
        number=steps_taken + 1,
    )


def offered_commands(admissible: Sequence[str]) -> list[str]:
    """The commands that the compact style offers: those that can bring a task forward."""
    return [c for c in admissible if c not in _COMPACT_HIDDEN and not c.startswith("examine ")]


def _task_description(reset_text: str) -> str:
    _, mark, after = reset_text.partition(TASK_MARK)
    if not mark or not after.strip():
        raise ValueError(f"no {TASK_MARK!r} sentence in {reset_text[:200]!r}; pass the text that reset() returned")
    return after.strip()


def _seen(observation: str) -> str:
    """An observation in one line, without banner and task."""
    return _one_line(_TASK_SENTENCE.sub("", strip_banner(observation)))


def _one_line(text: str) -> str:
    return " ".join(text.split())
