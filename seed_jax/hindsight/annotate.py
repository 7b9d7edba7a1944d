"""Episodes -> skills for stage 1, by a chat service, by the policy or by rules; what cannot be used keeps its reason.

Every episode gets one line: the prompt that the policy will learn to answer, the answer, and the skill in it or the
reason why there is none. Reasons are those of parsing.py and

- filtered: the service refuses to answer
- too_long: the policy could not write it in the tokens that it has for a skill
- leak: the skill names an object or place of its game by number, and such skills are not wanted

An episode whose request failed for good gets no line: the next run asks again.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from seed_jax import tokenizer as tok
from seed_jax.evaluate import rate
from seed_jax.hindsight.client import Answer, Client
from seed_jax.hindsight.parsing import explain
from seed_jax.hindsight.prompts import Fitted, Images
from seed_jax.hindsight.records import image_name, skill_answer
from seed_jax.images import escape
from seed_jax.types import Episode, SamplingParams, Skill

# Paths of these requests must not meet those of acting, of a run's analysis or of an evaluation.
WRITER_STREAM = (1 << 30) + (1 << 29)
_CHUNK = 64  # episodes that the policy is asked about before their lines are written
_NAMED = re.compile(r"\b[A-Za-z]+ \d+\b")
_BAD_ANSWER_CHARS = 2000  # of an unusable answer that is sent back

# What is sent back with an unusable answer, by reason; the rest are about JSON.
_COMPLAINTS = {
    "no_skill": "the object has no key episode_skill",
    "not_text": "the value of episode_skill is not a text",
    "template": "episode_skill holds a placeholder instead of a statement",
    "too_short": "episode_skill is too short to be of use",
    "unfinished": "the JSON object does not end",
    "too_long": "the object is too long: one short sentence each is enough",
    "leak": "episode_skill names an object or place by its number, which differs in every game",
}

# Asks about prompts, each with its images: (index, answer) as they come, each index once.
Ask = Callable[[Sequence[str], Sequence[Images]], Iterator[tuple[int, Answer]]]


class Rules(NamedTuple):
    """What a usable skill is. leaks: "keep" | "reject"; too_long: whether a skill is."""

    min_words: int
    leaks: str = "keep"
    too_long: Callable[[Skill], bool] = lambda skill: False


def judge(answer: Answer, episode: Episode | None, rules: Rules) -> tuple[Skill | None, str]:
    """(skill, "") or (None, reason). episode: which one the answer is about, needed for leaks."""
    if answer.finish in ("filtered", "failed"):
        return None, answer.finish
    skill, reason = explain(answer.text, rules.min_words)
    if answer.finish == "length":  # what looks whole may have been about to go on
        return None, "unfinished"
    if skill and rules.too_long(skill):
        return None, "too_long"
    if skill and rules.leaks == "reject" and named_instances(skill.text, episode):
        return None, "leak"
    return skill, reason


def named_instances(skill: str, episode: Episode) -> list[str]:
    """Names with a number ("shelf 1") of the skill that also stand in what the episode's player has read."""
    read = " ".join(f"{turn.observation} {turn.result}" for turn in episode.turns).lower()
    return [name for name in dict.fromkeys(_NAMED.findall(skill.lower())) if re.search(rf"\b{name}\b", read)]


def annotate(
    records: Sequence[dict[str, Any]],
    episodes: Sequence[Episode],
    prompts: Sequence[Fitted],
    ask: Ask,
    *,
    rules: Rules,
    asks: int,
) -> Iterator[dict[str, Any]]:
    """One line for skills.jsonl for each episode that was answered, as answers come.

    records: the episodes' lines in rollouts.jsonl; asks: requests about an episode with no usable skill yet
    """
    waiting = list(range(len(episodes)))
    texts = {index: prompts[index].text for index in waiting}
    spent: dict[int, Counter] = defaultdict(Counter)
    for round_number in range(asks):
        again = []
        for place, answer in ask([texts[index] for index in waiting], [prompts[index].images for index in waiting]):
            index = waiting[place]
            spent[index] += Counter(
                prompt_tokens=answer.prompt_tokens,
                completion_tokens=answer.completion_tokens,
                requests=answer.attempts,
                cached=answer.attempts == 0,
            )
            skill, reason = judge(answer, episodes[index], rules)
            if reason == "failed":
                continue
            if skill is None and reason != "filtered" and round_number + 1 < asks:
                said = escape(answer.text) if prompts[index].images else answer.text
                texts[index] = complaint(prompts[index].text, said, reason)
                again.append(index)
                continue
            yield _line(records[index], prompts[index], answer, skill, reason, spent[index])
        waiting = sorted(again)


def complaint(prompt: str, answer: str, reason: str) -> str:
    """The prompt of another request after an answer without a usable skill."""
    said = _COMPLAINTS.get(reason, "it holds no JSON object")
    return (
        f"{prompt}\n\nAn earlier answer to this could not be used: {said}. It ended with:\n"
        f"{answer[-_BAD_ANSWER_CHARS:]}\n\n"
        'Answer with the JSON object alone: {"episode_summary": "<text>", "episode_skill": "<text>"}'
    )


def _line(record, prompt: Fitted, answer: Answer, skill: Skill | None, reason: str, spent: Counter) -> dict[str, Any]:
    return {
        **{name: record[name] for name in ("episode", "task", "family", "won")},
        "prompt": prompt.text,
        **({"images": [image_name(image) for image in prompt.images]} if prompt.images else {}),
        "elided": prompt.elided,
        "answer": answer.text,
        "finish": answer.finish,
        "summary": skill.summary if skill else None,
        "skill": skill.text if skill else None,
        "reason": reason,
        **{name: spent[name] for name in ("prompt_tokens", "completion_tokens", "requests", "cached")},
    }


# -- who writes --------------------------------------------------------------------------------------------------------


def by_service(client: Client, max_tokens: int) -> Ask:
    return lambda prompts, images: client.stream(prompts, max_tokens, reasoning=True, images=images)


def by_policy(sampler, tokenizer, max_tokens: int) -> Ask:
    """The model itself, greedy."""

    def ask(prompts: Sequence[str], images: Sequence[Images]) -> Iterator[tuple[int, Answer]]:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        for start in range(0, len(prompts), _CHUNK):
            seen = images[start : start + _CHUNK]
            ids = tok.encode_prompts(tokenizer, prompts[start : start + _CHUNK], images=seen)
            paths = [(WRITER_STREAM, start + place, 0) for place in range(len(ids))]
            for place, completion in enumerate(sampler.generate(ids, params, paths, images=seen)):
                text, length = tok.decode(tokenizer, completion.tokens), len(completion.tokens)
                yield start + place, Answer(text, completion.finish, len(ids[place]), length)

    return ask


def by_rules(write: Callable[[int], Skill]) -> Ask:
    """write: number of an episode -> its skill."""
    return lambda prompts, _: ((i, Answer(skill_answer(write(i)), "stop", attempts=0)) for i in range(len(prompts)))


# -- report ------------------------------------------------------------------------------------------------------------


def report(lines: Sequence[dict[str, Any]], played: int, usd: tuple[float, float] = (0.0, 0.0)) -> dict[str, Any]:
    """What skills.jsonl holds. played: episodes to write about; usd: price of a million prompt and completion tokens.

    Standard errors are those of a sample of tasks, since episodes of one task are alike.
    """
    parsed = np.array([line["skill"] is not None for line in lines], float)
    value, error = rate(parsed, [line["task"] for line in lines])
    words = {
        outcome: [len(line["skill"].split()) for line in lines if line["skill"] and line["won"] == (outcome == "won")]
        for outcome in ("won", "lost")
    }
    totals = {name: sum(line[name] for line in lines) for name in ("prompt_tokens", "completion_tokens", "requests")}
    cost = (totals["prompt_tokens"] * usd[0] + totals["completion_tokens"] * usd[1]) / 1e6
    return {
        "episodes": played,
        "answered": len(lines),
        "without_answer": played - len(lines),
        "parsed": int(parsed.sum()),
        "parse_rate": value,
        "parse_rate_standard_error": error,
        "rejected": dict(sorted(Counter(line["reason"] for line in lines if line["reason"]).items())),
        "elided": sum(line["elided"] > 0 for line in lines),
        "words": {outcome: _quantiles(counts) for outcome, counts in words.items()},
        **totals,
        "cached": sum(bool(line["cached"]) for line in lines),
        "usd": cost if any(usd) else None,
    }


def _quantiles(counts: Sequence[int]) -> dict[str, float]:
    if not counts:
        return {"count": 0}
    low, middle, high = np.percentile(counts, [5, 50, 95])
    return {"count": len(counts), "mean": float(np.mean(counts)), "p5": low, "median": middle, "p95": high}
