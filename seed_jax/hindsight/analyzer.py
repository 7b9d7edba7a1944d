"""Finished episodes are analyzed, one request an episode: by the policy itself, on the same sampler and the same
weights, or by another model behind a client.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from seed_jax import tokenizer as tok
from seed_jax.hindsight.parsing import explain
from seed_jax.hindsight.prompts import Fitted, fit_analyses
from seed_jax.types import Completion, Episode, SamplingParams, Written

# Request paths of the analyzer must not meet those of acting: same seed, other stream.
ANALYSIS_STREAM = 1 << 30


class NoSkills(RuntimeError):
    """Not one turn got a skill for several iterations: the run would silently be GRPO."""


class Analysis:
    """Requests of one iteration about episodes that have ended, on the sampler that plays the others (greedy decoding).

    `take` writes `skill` or `skill_error` into the episode. counts: analyzed, parsed, elided (episodes of which the
    middle was left out), rejected/<reason>.
    """

    def __init__(self, sampler, tokenizer, hindsight, style: str, iteration: int):
        self.sampler, self.tokenizer, self.hindsight = sampler, tokenizer, hindsight
        self.style, self.stream = style, ANALYSIS_STREAM + iteration
        self.params = SamplingParams(hindsight.max_skill_tokens, temperature=0.0, stop_json=hindsight.stop_json)
        self.counts: Counter = Counter(analyzed=0, parsed=0, elided=0)
        self.asked: dict[int, Episode] = {}  # by identity
        self.waiting: dict[int, tuple[Episode, Fitted]] = {}

    def ask(self, *episodes: Episode) -> None:
        """Submits what can be analyzed and was not submitted before."""
        played = [episode for episode in _analyzable(episodes) if id(episode) not in self.asked]
        prompts = _fit(self.tokenizer, played, self.hindsight, self.style, self.counts)
        for episode, prompt in zip(played, prompts, strict=True):
            key = self.sampler.key((self.stream, episode.index, 0))
            self.waiting[self.sampler.submit(prompt.ids, self.params, key, prompt.images)] = episode, prompt
            self.asked[id(episode)] = episode

    def take(self, handle: int, completion: Completion) -> None:
        episode, prompt = self.waiting.pop(handle)
        episode.written = Written(prompt.ids, completion.tokens, completion.logprobs, prompt.images)
        text = tok.decode(self.tokenizer, completion.tokens)
        _take(episode, text, completion.finish, self.hindsight.min_words, self.counts)

    def finish(self) -> Counter:
        """Waits for all answers, and returns the counts."""
        while self.waiting:
            for handle, completion in self.sampler.step():
                self.take(handle, completion)
        return self.counts


def analyze(
    sampler,
    tokenizer,
    episodes: Sequence[Episode],
    hindsight,
    style: str,
    iteration: int,
    begun: Analysis | None = None,
) -> Counter:
    """Writes `skill` or `skill_error` into every episode and returns the counts of `Analysis`.

    begun: the analysis that was asked about some of the episodes while others were still played
    """
    analysis = Analysis(sampler, tokenizer, hindsight, style, iteration) if begun is None else begun
    analysis.ask(*episodes)
    return analysis.finish()


def analyze_elsewhere(client, tokenizer, episodes: Sequence[Episode], hindsight, style: str) -> Counter:
    """As `analyze`, by the model behind `client`; a request that failed for good counts as rejected/failed."""
    counts: Counter = Counter(analyzed=0, parsed=0, elided=0)
    played = _analyzable(episodes)
    prompts = _fit(tokenizer, played, hindsight, style, counts)
    texts, images = [prompt.text for prompt in prompts], [prompt.images for prompt in prompts]
    answers = client.ask(texts, hindsight.max_skill_tokens, images=images)
    for episode, (text, finish) in zip(played, answers, strict=True):
        _take(episode, text, finish, hindsight.min_words, counts)
    return counts


def _analyzable(episodes: Sequence[Episode]) -> list[Episode]:
    return [episode for episode in episodes if episode.turns and not episode.error]


def _take(episode: Episode, text: str, finish: str, min_words: int, counts: Counter) -> None:
    """Reads one answer. Only a finished one counts: a skill cut off by the token limit is not a skill."""
    reason = {"length": "unfinished", "failed": "failed"}.get(finish, "")
    episode.skill, episode.skill_error = (None, reason) if reason else explain(text, min_words)
    counts["analyzed"] += 1
    counts["parsed"] += episode.skill is not None
    if episode.skill is None:
        counts[f"rejected/{episode.skill_error}"] += 1


def _fit(tokenizer, episodes, hindsight, style: str, counts: Counter) -> list[Fitted]:
    steps = hindsight.step_skills * (hindsight.granularity != "episode")
    prompts = fit_analyses(tokenizer, episodes, style, hindsight.max_analysis_tokens, steps)
    counts["elided"] += sum(prompt.elided > 0 for prompt in prompts)
    return prompts


def require_skills(counts: Counter, memory: dict, limit: int) -> None:
    """Raises NoSkills once `limit` iterations in a row (0 = never) had no turn with a skill; `memory` keeps count."""
    memory["without_skills"] = 0 if counts["taught_turns"] else memory.get("without_skills", 0) + 1
    if limit and memory["without_skills"] >= limit:
        reasons = {name.removeprefix("rejected/"): n for name, n in counts.items() if name.startswith("rejected/")}
        raise NoSkills(
            f"no turn got a usable skill for {limit} iterations (hindsight.min_coverage_iterations); "
            f"rejected: {reasons}, turns without room for theirs: {counts['teacher_overflow']}. If the model cannot "
            "write skills, start from a checkpoint after hindsight-skill SFT; if they are too long, raise "
            "hindsight.max_skill_tokens; or set hindsight.source='none'."
        )
