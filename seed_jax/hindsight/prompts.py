"""The analysis prompt (episode -> hindsight skill) and the insertion of a skill into an action prompt.

Two wordings of each: "released" for instruction-tuned models, "compact" for the small quickstart model. Both ask
for the same JSON object with the keys `episode_summary` and `episode_skill`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from seed_jax import tokenizer as tok
from seed_jax.types import Episode

STYLES = ("released", "compact")
PLACEMENTS = ("after_task_line", "user_prefix", "before_template", "system")

_TASK_LINE = re.compile(
    r"^.*(your task is to:|your current task is:|your task is:|your question:|your goal is(?: to)?).*$",
    re.IGNORECASE | re.MULTILINE,
)
_TURN_LINE = re.compile(r"^Now it's your turn", re.MULTILINE)
_HEADING = {  # of a skill somebody wrote about an episode, and of one from a library
    ("hindsight", "released"): (
        "**Hindsight skill for this episode**\n"
        "A lesson from an earlier attempt at this task; use it where it applies:\n[{skill}]"
    ),
    ("library", "released"): "**Skills for this kind of task**\nUse them where they apply:\n{skill}",
    ("hindsight", "compact"): "hint: {skill}",
    ("library", "compact"): "hint: {skill}",
}
_ELIDED = "({count} steps left out)"


def skill_block(skill: str, style: str, heading: str = "hindsight") -> str:
    """A skill under its heading ("hindsight" or "library"); "" for an empty skill."""
    return _HEADING[heading, style].format(skill=skill.strip()) if skill.strip() else ""


def insert_skill(prompt: str, skill: str, style: str, heading: str = "hindsight") -> str:
    """The teacher's prompt: `skill` under a heading, right after the line that states the task.

    Without such a line it goes before the "Now it's your turn" line, and without that to the end (positions: arXiv
    2607.14777 code). An empty skill changes nothing.
    """
    block = skill_block(skill, style, heading)
    if not block:
        return prompt
    gap = _gap(style)
    if match := _TASK_LINE.search(prompt):
        head, tail = prompt[: match.end()], prompt[match.end() :]
        return f"{head.rstrip()}{gap}{block}{gap}{tail.lstrip()}"
    if match := _TURN_LINE.search(prompt):
        return f"{prompt[: match.start()].rstrip()}{gap}{block}{gap}{prompt[match.start() :]}"
    return f"{prompt.rstrip()}{gap}{block}"


def encode_with_skills(
    tokenizer,
    prompts: Sequence[str],
    skills: Sequence[str],
    style: str,
    placement: str = "after_task_line",
    heading: str = "hindsight",
) -> list[list[int]]:
    """Each prompt with its skill -> token ids. An empty skill gives the ids of the bare prompt, whatever the placement.

    after_task_line: as `insert_skill`; user_prefix: at the head of the user message; system: as the system message
    (some chat templates have a default one, which it replaces); before_template: before the whole rendered chat.
    """
    if placement == "after_task_line":
        pairs = zip(prompts, skills, strict=True)
        return tok.encode_prompts(tokenizer, [insert_skill(prompt, skill, style, heading) for prompt, skill in pairs])
    blocks, gap = [skill_block(skill, style, heading) for skill in skills], _gap(style)
    heads = [block and block + gap for block in blocks]
    if placement == "user_prefix":
        joined = [head + (prompt.lstrip() if head else prompt) for head, prompt in zip(heads, prompts, strict=True)]
        return tok.encode_prompts(tokenizer, joined)
    if placement == "before_template":
        return tok.encode_prompts(tokenizer, prompts, before=heads)
    if placement == "system":
        return tok.encode_prompts(tokenizer, prompts, systems=blocks)
    raise ValueError(f"placement {placement!r} is unknown; use one of {', '.join(PLACEMENTS)}")


def _gap(style: str) -> str:
    return "\n" if style == "compact" else "\n\n"


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
