"""Sampler x environment pool -> episodes. Turn by turn: every live episode is prompted, decoded and stepped;
finished ones drop out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from seed_jax import tokenizer as tok
from seed_jax.types import Episode, SamplingParams, Turn


class Domain(Protocol):
    """What the rollout needs to know about an environment (see envs/alfworld/domain.py)."""

    def goal(self, first_observation: str) -> str: ...

    def prompt(
        self, goal: str, history: list[tuple[str, str, str]], observation: str, admissible: Sequence[str], window: int
    ) -> str: ...

    def parse(self, reply: str) -> Any: ...


class World(NamedTuple):
    """The environment side of a run: prompts and parsing, the process pool, and the step limit of an episode."""

    domain: Domain
    pool: Any
    max_steps: int
    history: int


def prefetch(world: World, tasks: Sequence[Any], group: int) -> None:
    """Tells the pool which games the next `play` of these tasks will open; returns at once."""
    slots = [task for task in tasks for _ in range(group)]
    world.pool.prefetch(list(range(len(slots))), slots)


def play(
    sampler,
    tokenizer,
    world: World,
    tasks: Sequence[Any],
    *,
    group: int,
    params: SamplingParams,
    stream: int,
    max_prompt_tokens: int,
    seed: int | None = None,
    counts: Counter | None = None,
    skills: Any = None,
    share: float = 0.0,
    on_turn: Callable[[int, int], None] = lambda step, live: None,
) -> list[Episode]:
    """Plays every task `group` times. Episode i belongs to task i // group and is sampled with the keys (stream, i,
    turn).

    skills: the run's `Skills`, with which `share` of every group's episodes are played; each episode's skill is found
    once and stays in `given`. An episode whose environment fails for good carries `error` and no further turns.
    Counts: prompt_truncated, given_overflow, env_errors.
    """
    counts = Counter() if counts is None else counts
    slots = [task for task in tasks for _ in range(group)]
    observations = world.pool.open(list(range(len(slots))), slots)
    episodes, current = [], {}
    for index, (task, observation) in enumerate(zip(slots, observations, strict=True)):
        episode = Episode(task_id=task.id, family=task.family, goal=task.goal, group=index // group, index=index)
        episodes.append(episode)
        if share:
            skills.give(episode, index % group, share)
        _arrive(episode, observation, current, counts)
    for step in range(world.max_steps):
        live = sorted(current)
        if not live:
            break
        on_turn(step, len(live))
        prompts, ids = _prompts(tokenizer, world, episodes, current, live, max_prompt_tokens, counts)
        _insert_given(skills, [episodes[index] for index in live], prompts, ids, max_prompt_tokens, counts)
        replies = sampler.generate(ids, params, [(stream, index, step) for index in live], seed=seed)
        commands = []
        for index, prompt, prompt_ids, reply in zip(live, prompts, ids, replies, strict=True):
            turn = _turn(tokenizer, world.domain, current[index], prompt, prompt_ids, reply)
            episodes[index].turns.append(turn)
            commands.append(turn.command or "")
        for index, observation in zip(live, world.pool.step(live, commands), strict=True):
            episodes[index].turns[-1].result = getattr(observation, "text", "")
            _arrive(episodes[index], observation, current, counts)
    return episodes


def _arrive(episode: Episode, observation, current: dict, counts: Counter) -> None:
    """Takes in what the environment answered: the episode goes on, is over, or is lost."""
    current.pop(episode.index, None)
    if isinstance(observation, Exception):
        episode.error = str(observation)
        counts["env_errors"] += 1
        return
    episode.reward += observation.reward
    if episode.turns:
        episode.turns[-1].reward = observation.reward
    episode.won = observation.won
    if not observation.done:
        current[episode.index] = observation


def _prompts(tokenizer, world: World, episodes, current, live, max_tokens: int, counts: Counter):
    """Prompt texts and ids of the live episodes; a prompt over `max_tokens` loses its oldest turns first."""

    def render(index: int, window: int) -> str:
        episode, observation = episodes[index], current[index]
        history = [(turn.observation, turn.command or "", turn.result) for turn in episode.turns]
        return world.domain.prompt(episode.goal, history, observation.text, observation.admissible, window)

    texts = [render(index, world.history) for index in live]
    ids = tok.encode_prompts(tokenizer, texts)
    for row, index in enumerate(live):
        window = world.history
        counts["prompt_truncated"] += len(ids[row]) > max_tokens
        while len(ids[row]) > max_tokens:
            if window == 0:
                raise ValueError(
                    f"task {episodes[index].task_id}: the prompt has {len(ids[row])} tokens even without history; "
                    f"raise rollout.max_prompt_tokens={max_tokens}"
                )
            window -= 1
            texts[row] = render(index, window)
            ids[row] = tok.encode_prompts(tokenizer, [texts[row]])[0]
    return texts, ids


def _insert_given(skills, episodes, prompts, ids: list[list[int]], max_tokens: int, counts: Counter) -> None:
    """Replaces the ids of turns whose episode has a given skill. One that does not fit is left out and counted."""
    rows = [row for row, episode in enumerate(episodes) if episode.given]
    if not rows:
        return
    limit = max_tokens + skills.hindsight.max_skill_tokens
    encoded = skills.encode([prompts[row] for row in rows], [episodes[row].given for row in rows])
    for row, longer in zip(rows, encoded, strict=True):
        if len(longer) <= limit:
            ids[row] = longer
        else:
            counts["given_overflow"] += 1


def _turn(tokenizer, domain: Domain, observation, prompt: str, prompt_ids: list[int], reply) -> Turn:
    text = tok.decode(tokenizer, reply.tokens)
    action = domain.parse(text)
    return Turn(
        prompt=prompt,
        prompt_ids=prompt_ids,
        response_ids=reply.tokens,
        logprobs=reply.logprobs,
        observation=observation.text,
        response=text,
        command=action.command,
        valid=action.valid,
        admissible=action.command in observation.admissible,
    )
