"""The analysis prompt (episode -> hindsight skill) and the insertion of a skill into an action prompt.

Two wordings of each: "released" for instruction-tuned models, "compact" for the small quickstart model. Both ask
for the same JSON
object with the keys `episode_summary` and `episode_skill`.
"""

from __future__ import annotations

import re

from seed_jax.types import Episode

STYLES = ("released", "compact")

_TASK_LINE = re.compile(
    r"^.*(your task is to:|your current task is:|your task is:|your question:|your goal is(?: to)?).*$",
    re.IGNORECASE | re.MULTILINE,
)
_TURN_LINE = re.compile(r"^Now it's your turn", re.MULTILINE)
_HEADING = {
    "released": (
        "**Hindsight skill for this episode**\n"
        "A lesson from an earlier attempt at this task; use it where it applies:\n[{skill}]"
    ),
    "compact": "hint: {skill}",
}
_ELIDED = "({count} steps left out)"


def insert_skill(prompt: str, skill: str, style: str) -> str:
    """The teacher's prompt: `skill` under a heading, right after the line that states the task.

    Without such a line it goes before the "Now it's your turn" line, and without that to the end (positions: arXiv
    2607.14777 code).
    """
    block = _HEADING[style].format(skill=skill.strip())
    gap = "\n" if style == "compact" else "\n\n"
    if match := _TASK_LINE.search(prompt):
        head, tail = prompt[: match.end()], prompt[match.end() :]
        return f"{head.rstrip()}{gap}{block}{gap}{tail.lstrip()}"
    if match := _TURN_LINE.search(prompt):
        return f"{prompt[: match.start()].rstrip()}{gap}{block}{gap}{prompt[match.start() :]}"
    return f"{prompt.rstrip()}{gap}{block}"


def analysis_prompt(episode: Episode, style: str, elide: int = 0) -> str:
    """What the analyzer reads about a finished episode. `elide` middle steps are left out, and the text says so."""
    if style not in STYLES:
        raise ValueError(f"prompt style {style!r} is unknown; use one of {', '.join(STYLES)}")
    outcome = "success" if episode.won else "failure"
    steps = [_step_text(number, turn, style) for number, turn in enumerate(episode.turns, 1)]
    if elide:
        first = (len(steps) - elide + 1) // 2
        steps[first : first + elide] = [_ELIDED.format(count=elide)]
    if style == "compact":
        return "\n".join([f"your task is to: {episode.goal}", f"outcome: {outcome}", *steps, "write the skill"])
    lesson = {
        True: "a reusable workflow: in which order to act, and how to decide at each point",
        False: "what to avoid: the mistake that cost the episode, and the signs by which to notice it early",
    }[episode.won]
    return "\n".join(
        [
            "Below is an episode that an agent has just finished. Analyze it and answer with one JSON object,",
            "and nothing else.",
            "The object has exactly two keys:",
            "1. episode_summary: what happened, in one or two sentences.",
            f"2. episode_skill: {lesson}.",
            "   One short statement addressed to the agent, useful the next time it meets this task.",
            'Format: {"episode_summary": "<text>", "episode_skill": "<text>"}',
            "",
            f"Task: {episode.goal}",
            f"Outcome: {outcome}",
            "Episode:",
            *steps,
        ]
    )


def _step_text(number: int, turn, style: str) -> str:
    if style == "compact":
        return f"{turn.command or 'nothing'} => {' '.join(turn.result.split())} ;"
    return (
        f"Step {number}\nObservation: {turn.observation}\nResponse: {turn.response}\n"
        f"Action valid: {'true' if turn.valid else 'false'}"
    )
