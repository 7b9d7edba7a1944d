"""The analysis prompt (episode -> hindsight skill) and the insertion of a skill into an action prompt.

Two wordings of each: "released" for instruction-tuned models, "compact" for the small quickstart model. Both ask
for the same JSON object with the keys `episode_summary` and `episode_skill`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from seed_jax import tokenizer as tok
from seed_jax.images import PLACEHOLDER, escape, shown, tokens_of
from seed_jax.types import Episode, Turn

Images = Sequence[np.ndarray]  # of one prompt, in the order of their places in its text

STYLES = ("released", "compact", "react")
PLACEMENTS = ("after_task_line", "user_prefix", "before_template", "system")
TEXT_PLACEMENTS = PLACEMENTS[:2]  # where a skill is part of the user message

_TASK_LINE = re.compile(
    r"^.*(your task is to:|your current task is:|your task is:|your question:|your goal is(?: to)?).*$",
    re.IGNORECASE | re.MULTILINE,
)
_TURN_LINE = re.compile(r"^Now it's your turn", re.MULTILINE)
_HEADING = {  # of a skill somebody wrote about an episode, of one from a library, and of what was observed
    ("hindsight", "released"): (
        "**Hindsight skill for this episode**\n"
        "A lesson from an earlier attempt at this task; use it where it applies:\n[{skill}]"
    ),
    ("library", "released"): "**Skills for this kind of task**\nUse them where they apply:\n{skill}",
    ("hindsight", "compact"): "hint: {skill}",
    ("library", "compact"): "hint: {skill}",
    ("evidence", "released"): "**What is known afterwards**\n{skill}",
    ("evidence", "compact"): "hint: {skill}",
}
_LESSONS = {  # outcome of the episode, None for a pair -> (what the prompt shows, what it asks for)
    True: (
        "is an episode that an agent has just finished",
        "a reusable workflow: in which order to act, and how to decide at each point",
    ),
    False: (
        "is an episode that an agent has just finished",
        "what to avoid: the mistake that cost the episode, and the signs by which to notice it early",
    ),
    None: (
        "is a failed and a successful attempt of an agent at the same task",
        "what made the difference, as DO: what to do, and AVOID: what not to do",
    ),
}
_ELIDED = "({count} steps left out)"


def skill_block(skill: str, style: str, heading: str = "hindsight") -> str:
    """A skill under its heading ("hindsight", "library" or "evidence"); "" for an empty skill."""
    wording = "compact" if style == "compact" else "released"
    return _HEADING[heading, wording].format(skill=skill.strip()) if skill.strip() else ""


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


def prompt_with_skill(
    prompt: str, skill: str, style: str, placement: str = "after_task_line", heading: str = "hindsight"
) -> str:
    """The user message of a teacher; placement: one of TEXT_PLACEMENTS. An empty skill changes nothing."""
    if placement not in TEXT_PLACEMENTS:
        raise ValueError(f"placement {placement!r} is not in the user message; that is {' or '.join(TEXT_PLACEMENTS)}")
    if placement == "after_task_line":
        return insert_skill(prompt, skill, style, heading)
    block = skill_block(skill, style, heading)
    return f"{block}{_gap(style)}{prompt.lstrip()}" if block else prompt


def encode_with_skills(
    tokenizer,
    prompts: Sequence[str],
    skills: Sequence[str],
    style: str,
    placement: str = "after_task_line",
    heading: str = "hindsight",
    images: Sequence[Images] | None = None,
) -> list[list[int]]:
    """Each prompt with its skill -> token ids. An empty skill gives the ids of the bare prompt, whatever the placement.
    images: those of each prompt; a skill has none.

    after_task_line: as `insert_skill`; user_prefix: at the head of the user message; system: as the system message
    (some chat templates have a default one, which it replaces); before_template: before the whole rendered chat.
    """
    if images is not None and any(images):
        skills = [escape(skill) for skill in skills]
    if placement in TEXT_PLACEMENTS:
        pairs = zip(prompts, skills, strict=True)
        inserted = [prompt_with_skill(prompt, skill, style, placement, heading) for prompt, skill in pairs]
        return tok.encode_prompts(tokenizer, inserted, images=images)
    blocks = [skill_block(skill, style, heading) for skill in skills]
    if placement == "before_template":
        heads = [block and block + _gap(style) for block in blocks]
        return tok.encode_prompts(tokenizer, prompts, before=heads, images=images)
    if placement == "system":
        return tok.encode_prompts(tokenizer, prompts, systems=blocks, images=images)
    raise ValueError(f"placement {placement!r} is unknown; use one of {', '.join(PLACEMENTS)}")


def _gap(style: str) -> str:
    return "\n" if style == "compact" else "\n\n"


def analysis_images(episode: Episode, elide: int = 0) -> tuple[np.ndarray, ...]:
    """The images of the steps that `analysis_prompt` shows, in the order of their places in its text."""
    kept = []
    for told in (episode, episode.peer):
        if told:
            gone = _left_out(len(told.turns), elide)
            kept += [*told.turns[: gone.start], *told.turns[gone.stop :]]
    return shown(kept)


def analysis_prompt(episode: Episode, style: str, elide: int = 0, steps: int = 0) -> str:
    """What the analyzer reads about a finished episode, or about it and its `peer`, a lost and a won one of a group.

    elide: so many middle steps of an episode are left out, and the text says so; steps: lessons for single steps that
    are asked for at most. A step with an image shows its place instead of the text that says the same.
    """
    if style not in STYLES:
        raise ValueError(f"prompt style {style!r} is unknown; use one of {', '.join(STYLES)}")
    told = [line for e in (episode, episode.peer) if e for line in _told(e, style, elide)]
    if style == "compact":
        wanted = f"write the skill and those of {steps} steps" if steps else "write the skill"
        return "\n".join([f"your task is to: {episode.goal}", *told, wanted])
    subject, lesson = _LESSONS[None if episode.peer else episode.won]
    shape, keys = '{"episode_summary": "<text>", "episode_skill": "<text>"', "two keys"
    more = []
    if steps:
        shape, keys = f'{shape}, "step_skills": [{{"step": <number>, "skill": "<text>"}}]', "three keys"
        more = [f"3. step_skills: for up to {steps} decisive steps, what to do there; [] if there are none."]
    return "\n".join(
        [
            f"Below {subject}. Analyze it and answer with one JSON object,",
            "and nothing else.",
            f"The object has exactly {keys}:",
            "1. episode_summary: what happened, in one or two sentences.",
            f"2. episode_skill: {lesson}.",
            "   One short statement addressed to the agent, useful the next time it meets this task.",
            *more,
            f"Format: {shape}}}",
            "",
            f"Task: {episode.goal}",
            *told,
        ]
    )


class Fitted(NamedTuple):
    """An analysis prompt and its images; elided: steps left out of the middle of the episode."""

    text: str
    ids: list[int]
    elided: int
    images: tuple[np.ndarray, ...] = ()


def fit_analyses(tokenizer, episodes: Sequence[Episode], style: str, max_tokens: int, steps: int = 0) -> list[Fitted]:
    """The analysis prompt of each episode in at most `max_tokens` tokens: first and last steps stay, as few as needed
    of the middle go, and the text says how many. Raises ValueError if even two steps are too long."""
    return [
        prompt if len(prompt.ids) <= max_tokens else _elided(tokenizer, episode, style, max_tokens, steps)
        for prompt, episode in zip(_fitted(tokenizer, episodes, style, 0, steps), episodes, strict=True)
    ]


def _fitted(tokenizer, episodes: Sequence[Episode], style: str, elide: int, steps: int) -> list[Fitted]:
    texts = [analysis_prompt(episode, style, elide, steps) for episode in episodes]
    images = [analysis_images(episode, elide) for episode in episodes]
    encoded = tok.encode_prompts(tokenizer, texts, images=images)
    return list(map(Fitted, texts, encoded, [elide] * len(texts), images))


def _elided(tokenizer, episode: Episode, style: str, max_tokens: int, steps: int) -> Fitted:
    def without(elide: int) -> Fitted:
        return _fitted(tokenizer, [episode], style, elide, steps)[0]

    low, high = 0, max(len(e.turns) for e in (episode, episode.peer) if e) - 2  # too few, and the most that can go
    best = without(high) if high > 0 else None
    if best is None or len(best.ids) > max_tokens:
        needed = best or without(0)
        parts = f" ({_parts(tokenizer, needed)})" if needed.images else ""
        raise ValueError(
            f"episode of {episode.task_id}: its first and last step alone exceed "
            f"hindsight.max_analysis_tokens={max_tokens}{parts}; raise it"
        )
    while high - low > 1:
        middle = without((low + high) // 2)
        if len(middle.ids) <= max_tokens:
            best, high = middle, middle.elided
        else:
            low = middle.elided
    return best


def _told(episode: Episode, style: str, elide: int) -> list[str]:
    """Outcome and steps of one episode."""
    steps = [_step_text(number, turn, style) for number, turn in enumerate(episode.turns, 1)]
    if gone := _left_out(len(steps), elide):
        steps[gone.start : gone.stop] = [_ELIDED.format(count=len(gone))]
    outcome = "success" if episode.won else "failure"
    return [f"outcome: {outcome}", *steps] if style == "compact" else [f"Outcome: {outcome}", "Episode:", *steps]


def _left_out(count: int, elide: int) -> range:
    """Which of `count` steps go if `elide` are to: those in the middle; the first and the last stay."""
    elide = max(0, min(elide, count - 2))
    first = (count - elide + 1) // 2
    return range(first, first + elide)


def _step_text(number: int, turn: Turn, style: str) -> str:
    seen = turn.image is not None
    if style == "compact":
        command = turn.command or "nothing"
        return f"{PLACEHOLDER} {escape(command)} ;" if seen else f"{command} => {' '.join(turn.result.split())} ;"
    observation, response = (PLACEHOLDER, escape(turn.response)) if seen else (turn.observation, turn.response)
    return (
        f"Step {number}\nObservation: {observation}\nResponse: {response}\n"
        f"Action valid: {'true' if turn.valid else 'false'}"
    )


def _parts(tokenizer, prompt: Fitted) -> str:
    of_images = sum(tokens_of(image, tokenizer.vision) for image in prompt.images)
    return f"{len(prompt.ids)}: {len(prompt.ids) - of_images} of text and {of_images} of {len(prompt.images)} images"
