"""The policy analyzes the episodes it has just finished: one request an episode, on the same sampler and the same
weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from seed_jax import tokenizer as tok
from seed_jax.hindsight.parsing import explain
from seed_jax.hindsight.prompts import analysis_prompt, insert_skill
from seed_jax.types import Episode, SamplingParams

# Request paths of the analyzer must not meet those of acting: same seed, other stream.
ANALYSIS_STREAM = 1 << 30
ANALYSIS_BUCKET = 96


class NoSkills(RuntimeError):
    """Not one episode got a skill for several iterations: the run would silently be GRPO."""


def analyze(sampler, tokenizer, episodes: Sequence[Episode], hindsight, style: str, iteration: int) -> Counter:
    """Writes `skill` or `skill_error` into every episode (greedy decoding) and returns counts.

    Counts: analyzed, parsed, elided (episodes of which the middle was left out), rejected/<reason>.
    """
    counts: Counter = Counter(analyzed=0, parsed=0, elided=0)
    played = [episode for episode in episodes if episode.turns and not episode.error]
    prompts = _fit(tokenizer, played, hindsight.max_analysis_tokens, style, counts)
    params = SamplingParams(max_tokens=hindsight.max_skill_tokens, temperature=0.0)
    paths = [(ANALYSIS_STREAM + iteration, episode.index, 0) for episode in played]
    for episode, completion in zip(
        played, sampler.generate(prompts, params, paths, prompt_bucket=ANALYSIS_BUCKET), strict=True
    ):
        text = tok.decode(tokenizer, completion.tokens)
        episode.skill, episode.skill_error = (
            explain(text, hindsight.min_words) if completion.finish == "stop" else (None, "unfinished")
        )
        counts["analyzed"] += 1
        counts["parsed"] += episode.skill is not None
        if episode.skill is None:
            counts[f"rejected/{episode.skill_error}"] += 1
    return counts


def _fit(tokenizer, episodes, max_tokens: int, style: str, counts: Counter) -> list[list[int]]:
    """Prompt ids; of a long episode the first and the last steps stay and as few middle ones as needed are left out."""
    prompts = tok.encode_prompts(tokenizer, [analysis_prompt(episode, style) for episode in episodes])
    for index, episode in enumerate(episodes):
        elide = 0
        while len(prompts[index]) > max_tokens:
            elide += 1
            if elide > len(episode.turns) - 2:
                raise ValueError(
                    f"episode {episode.task_id}: its first and last step alone exceed "
                    f"hindsight.max_analysis_tokens={max_tokens}; raise it"
                )
            prompts[index] = tok.encode_prompts(tokenizer, [analysis_prompt(episode, style, elide)])[0]
        counts["elided"] += elide > 0
    return prompts


def teacher_prompts(
    tokenizer, episodes: Sequence[Episode], style: str, max_tokens: int, counts: Counter
) -> dict[tuple[int, int], list[int]]:
    """(episode index, turn number) -> teacher prompt ids, for every turn of an episode with a skill.

    A turn whose prompt with the skill exceeds `max_tokens` gets none; `teacher_overflow` counts those turns.
    """
    keys = [(e, t) for e, episode in enumerate(episodes) if episode.skill for t in range(len(episode.turns))]
    texts = [insert_skill(episodes[e].turns[t].prompt, episodes[e].skill.text, style) for e, t in keys]
    encoded = dict(zip(keys, tok.encode_prompts(tokenizer, texts), strict=True))
    kept = {key: ids for key, ids in encoded.items() if len(ids) <= max_tokens}
    counts["teacher_overflow"] += len(encoded) - len(kept)
    return kept


def require_skills(counts: Counter, memory: dict, limit: int) -> None:
    """Raises NoSkills once `limit` iterations in a row (0 = never) brought no skill; `memory` carries the count."""
    memory["without_skills"] = 0 if counts["parsed"] else memory.get("without_skills", 0) + 1
    if limit and memory["without_skills"] >= limit:
        reasons = {name.removeprefix("rejected/"): n for name, n in counts.items() if name.startswith("rejected/")}
        raise NoSkills(
            f"no episode got a usable skill for {limit} iterations (hindsight.min_coverage_iterations); "
            f"rejected: {reasons}. The model cannot write skills: start from a checkpoint after hindsight-skill SFT, "
            "or set hindsight.source='none'."
        )
