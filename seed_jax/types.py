"""The records that phases exchange. Plain data: no behaviour, no device arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


class SamplingParams(NamedTuple):
    """How one request is decoded.

    temperature: 0 is greedy; top_k, top_p, min_p: filters, applied in this order after the temperature, off by default
    stop: texts that end the reply once they are in it; stop_json: so does the brace that closes its first JSON object
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_json: bool = False


class Completion(NamedTuple):
    """What the sampler returns for one request.

    tokens: sampled ids, the end token included when it was reached, [n]
    logprobs: log-probability of each sampled token at temperature 1 and without filters, [n]
    finish: "stop" (end token or stop text), "length" (budget exhausted) or "aborted"
    sampled_logprobs: log-probabilities in the distribution that was sampled, filters and temperature applied, [n]
    """

    tokens: list[int]
    logprobs: np.ndarray
    finish: str
    sampled_logprobs: np.ndarray | None = None


class Skill(NamedTuple):
    """A hindsight skill: what happened, and the lesson that goes into the teacher prompt.

    steps: lessons for single turns, (number of the turn from 0, text), which go there instead of `text`. A text of ""
    leaves the teacher with the bare prompt, None without any; then only the turns in `steps` have a teacher.
    """

    summary: str
    text: str | None
    steps: tuple[tuple[int, str], ...] = ()

    def at(self, turn: int) -> str | None:
        """What the teacher reads at a turn."""
        return dict(self.steps).get(turn, self.text)


class Written(NamedTuple):
    """What the policy wrote as the analyzer: prompt and answer, the log-probs of the answer's tokens, and the images of
    the prompt."""

    prompt: list[int]
    tokens: list[int]
    logprobs: np.ndarray
    images: tuple[np.ndarray, ...] = ()


@dataclass
class Turn:
    """One environment step: what the policy read, what it wrote, what came of it.

    prompt: without any skill; prompt_ids: what the policy read, the episode's `given` skill included
    """

    prompt: str
    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: np.ndarray
    observation: str
    response: str
    command: str | None
    valid: bool
    admissible: bool
    result: str = ""
    reward: float = 0.0  # of this step alone
    image: np.ndarray | None = None  # what the policy saw, uint8 [height, width, 3], at the size that the model reads


@dataclass
class Episode:
    """One played task. `group` numbers the task inside its batch; episodes of a group share the task.

    skill: what the teacher reads; skill_error: why there is none; given: what the policy read itself while it played;
    written: the policy's own analysis; peer: an episode of the group with which it is compared there; attempt_of: of a
    second attempt, the `index` of the episode whose skill it was given; value: by how much second attempts won more
    often than first ones, see train/second.py
    """

    task_id: str
    family: str
    goal: str
    group: int
    index: int
    turns: list[Turn] = field(default_factory=list)
    reward: float = 0.0
    won: bool = False
    measures: dict[str, float] = field(default_factory=dict)  # what else the environment reports, by name
    error: str | None = None
    skill: Skill | None = None
    skill_error: str | None = None
    given: Skill | None = None
    written: Written | None = None
    peer: Episode | None = None
    attempt_of: int | None = None
    value: float = 0.0
