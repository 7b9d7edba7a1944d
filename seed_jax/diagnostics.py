"""The skill table: does a skill raise the teacher's log-prob of the right decisions, and does a wrong skill not?

Averages over all tokens say nothing (over the student's own samples the mean gap is minus a KL divergence), so the
gap is reported by kind of decision, summed over the tokens of the whole reply, where a policy that thinks first
decides in its thought, and over those of the command alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from seed_jax import images
from seed_jax.hindsight.prompts import encode_with_skills
from seed_jax.spans import tag_span
from seed_jax.train.packing import Sample
from seed_jax.types import Episode, Skill

SOURCES = ("true", "self", "wrong")


def command_span(tokenizer, response_ids: Sequence[int]) -> slice:
    """The response tokens between the action tags; empty if there is no action block."""
    return tag_span(tokenizer, response_ids, "action")


def skill_table(
    score: Callable[[Sequence[Sample]], Sequence[np.ndarray]],
    tokenizer,
    episodes: Sequence[Episode],
    true_skills: Sequence[str],
    row_class: Callable[[Episode, int], str | None],
    style: str,
    row_tokens: int,
    encode: Callable[[Sequence[str], Sequence[Skill], Any], list[list[int]]] | None = None,
) -> dict[str, dict]:
    """{row class: {source: {"gap", "positive", "command_gap", "rows"}}} for the sources true, self and wrong.

    gap: mean over rows of teacher minus student log-prob of the reply, in nats; positive: share of rows where it is
        above 0; command_gap: the same mean over the command's tokens alone.

    score: log-probs of the response tokens of samples, [n] each; called once, also if there are no episodes
    episodes: played at temperature 1 with the student's prompt, `skill` filled in by the analyzer; true_skills: one
        an episode;
    wrong: the true skill of another task (the next episode with another goal); row_tokens: what prompt, skill and reply
        may take together, longer ones are left out.
    encode: how prompts, skills and images become ids (`Skills.encode`); default: a hindsight skill after the task line.
    """
    if encode is None:
        texts = lambda skills: [skill.text for skill in skills]  # noqa: E731
        encode = lambda prompts, skills, images: encode_with_skills(  # noqa: E731
            tokenizer, prompts, texts(skills), style, images=images
        )
    cases, rows = [], []
    for index, episode in enumerate(episodes):
        other = next(
            (
                j % len(episodes)
                for j in range(index + 1, index + len(episodes))
                if episodes[j % len(episodes)].goal != episode.goal
            ),
            None,
        )
        skills = {
            "true": true_skills[index],
            "self": episode.skill.text if episode.skill else None,
            "wrong": true_skills[other] if other is not None else None,
        }
        for t, turn in enumerate(episode.turns):
            name, span = row_class(episode, t), command_span(tokenizer, turn.response_ids)
            if name is None or span.stop == 0:
                continue
            for source, skill in skills.items():
                if skill is not None:
                    cases.append((name, source, turn, span))
                    rows.append((turn.prompt, Skill("", skill)))
    shown = [images.shown([turn]) for _, _, turn, _ in cases]
    prompts = encode([prompt for prompt, _ in rows], [skill for _, skill in rows], shown if any(shown) else None)
    fitting = [i for i, p in enumerate(prompts) if len(p) + len(cases[i][2].response_ids) <= row_tokens]
    samples = [Sample(prompts[i], cases[i][2].response_ids, images=shown[i]) for i in fitting]
    gaps: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for i, teacher in zip(fitting, score(samples), strict=True):
        name, source, turn, span = cases[i]
        gap = teacher - turn.logprobs
        gaps[name][source].append((float(gap.sum()), float(gap[span].sum())))
    return {name: {source: _summary(gaps[name][source]) for source in SOURCES} for name in sorted(gaps)}


def _summary(values: list[tuple[float, float]]) -> dict:
    if not values:
        return {"gap": None, "positive": None, "command_gap": None, "rows": 0}
    reply, command = np.array(values).T
    return {
        "gap": float(reply.mean()),
        "positive": float((reply > 0).mean()),
        "command_gap": float(command.mean()),
        "rows": len(values),
    }


def format_table(table: dict[str, dict]) -> str:
    """The skill table as text, one row class a line: gap of the reply (of the command in brackets)."""

    def cell(source: dict) -> str:
        return "-" if source["gap"] is None else f"{source['gap']:+.2f} ({source['command_gap']:+.2f})"

    lines = [f"{'decision':<34}{'rows':>6}" + "".join(f"{source + ' skill':>17}" for source in SOURCES)]
    for name, cells in table.items():
        lines.append(f"{name:<34}{cells['true']['rows']:>6}" + "".join(f"{cell(cells[s]):>17}" for s in SOURCES))
    return "\n".join(lines)
