"""Sampler x environment pool -> episodes. Every episode goes at its own pace: its next prompt is submitted as soon as
its environment has answered, its command is sent as soon as the reply is complete."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from seed_jax import images as images_lib
from seed_jax import tokenizer as tok
from seed_jax.config import ConfigError
from seed_jax.models.vision_spec import VisionSpec
from seed_jax.types import Episode, SamplingParams, Turn


class Domain(Protocol):
    """What the rollout needs to know about an environment (see envs/alfworld/domain.py)."""

    def goal(self, first_observation: str) -> str: ...

    def prompt(
        self, goal: str, history: list[tuple[str, str, str]], observation: str, admissible: Sequence[str], window: int
    ) -> str: ...

    def parse(self, reply: str) -> Any: ...


class World(NamedTuple):
    """The environment side of a run: prompts and parsing, the process pool, and the step limit of an episode.

    image_size: height and width of the images that the games draw, all alike; None: they draw none
    min_pixels: an image with fewer is enlarged before it is fitted to the model
    """

    domain: Domain
    pool: Any
    max_steps: int
    history: int
    image_size: tuple[int, int] | None = None
    min_pixels: int = 0

    def read_size(self, vision: VisionSpec | None) -> tuple[int, int] | None:
        """Height and width of the images as a model with `vision` reads them; None if there are none. Raises
        ConfigError for a model that cannot see them."""
        if self.image_size is None:
            return None
        if vision is None:
            raise ConfigError(
                "env.observation = 'image', but model.init is a model without vision; name another in model.init, or "
                "set env.observation = 'text'"
            )
        return images_lib.fitted_size(*images_lib.enlarged_size(*self.image_size, self.min_pixels), vision)


def prefetch(world: World, tasks: Sequence[Any], group: int) -> None:
    """Tells the pool which games the next `play` of these tasks will open; returns at once."""
    slots = [task for task in tasks for _ in range(group)]
    world.pool.prefetch(list(range(len(slots))), slots)


class PromptError(ValueError):
    """The first prompt of a game is longer than the config allows."""


class Answers:
    """What the environments have answered. A pool with `begin`, `send` and `poll` is asked without waiting; one that
    runs its games here (`open` and `step` only) answers at once, and its answers are kept until they are polled."""

    def __init__(self, pool: Any):
        self.pool, self.asynchronous = pool, hasattr(pool, "poll")
        self.owed, self.seconds = 0, 0.0
        self._ready: list[tuple[int, Any]] = []

    def begin(self, slots: Sequence[int], tasks: Sequence[Any]) -> None:
        self._ask("begin", "open", slots, tasks)

    def send(self, slots: Sequence[int], commands: Sequence[str]) -> None:
        self._ask("send", "step", slots, commands)

    def poll(self, wait: bool) -> list[tuple[int, Any]]:
        """(slot, observation or error), by slot; if `wait`, at least one as long as one is owed."""
        if self.asynchronous and self.owed:
            with self._timed():
                self._ready = self.pool.poll(wait)
        ready, self._ready = sorted(self._ready, key=lambda answer: answer[0]), []
        self.owed -= len(ready)
        return ready

    def _ask(self, ask: str, ask_and_wait: str, slots: Sequence[int], what: Sequence[Any]) -> None:
        self.owed += len(slots)
        with self._timed():
            if self.asynchronous:
                getattr(self.pool, ask)(slots, what)
            else:
                self._ready += zip(slots, getattr(self.pool, ask_and_wait)(slots, what), strict=True)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start


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
    first: int = 0,
    seed: int | None = None,
    counts: Counter | None = None,
    skills: Any = None,
    share: float = 0.0,
    episodes: Sequence[Episode] | None = None,
    analysis: Any = None,
    on_turn: Callable[[int, int], None] = lambda step, live: None,
) -> list[Episode]:
    """Plays every task `group` times. Episode i belongs to task i // group and is sampled with the keys (stream, i,
    turn), so it does not depend on when the environments answer.

    first: number of the first of these tasks among those of all hosts; i counts the episodes of all hosts.

    skills: the run's `Skills`, with which `share` of every group's episodes are played; each episode's skill is found
    once and stays in `given`. An episode whose environment fails for good carries `error` and no further turns. One
    whose next prompt is longer than `max_prompt_tokens` even without history ends as it stands.
    episodes: what is played, if the caller has made it (numbers, groups, given skills): one episode a task, `group` 1.
    analysis: an `Analysis`, asked about each episode as it ends, while others are still played; its answers that are
    not in by the end stay with it.
    on_turn(turn, episodes under way) is called when the first episode comes to a turn.
    Counts: prompt_truncated, prompt_overflow, given_overflow, env_errors; and of the sampler and the clock: new_tokens,
    slot_steps, env_wait_s (in calls of the pool), play_s.
    """
    counts = Counter() if counts is None else counts
    slots = [task for task in tasks for _ in range(group)]
    episodes = _unplayed(slots, first, group, skills, share) if episodes is None else list(episodes)
    world.read_size(getattr(tokenizer, "vision", None))  # raises for a model that cannot see what there is
    start, before = time.perf_counter(), Counter(sampler.stats)
    answers, current, reached = Answers(world.pool), {}, -1
    asked: dict[int, tuple[int, str, list[int]]] = {}  # handle -> episode, prompt and its ids
    try:
        answers.begin(list(range(len(slots))), slots)
        while answers.owed or asked:
            answered = answers.poll(wait=not sampler.pending)
            for index, observation in answered:
                if _arrive(index, episodes[index], observation, current, counts, world.max_steps):
                    current[index] = _seen(current[index], episodes[index], world, tokenizer)
            arrived = [index for index, _ in answered if index in current]
            arrived, prompts, ids = _prompts(tokenizer, world, episodes, current, arrived, max_prompt_tokens, counts)
            for index, _ in answered if analysis is not None else ():
                if index not in current:
                    analysis.ask(episodes[index])
            shown = [images_lib.shown([current[index]]) for index in arrived]
            live = [episodes[index] for index in arrived]
            _insert_given(skills, live, prompts, ids, shown, max_prompt_tokens, counts)
            for index, prompt, prompt_ids, seen in zip(arrived, prompts, ids, shown, strict=True):
                key = sampler.key((stream, episodes[index].index, len(episodes[index].turns)), seed)
                asked[sampler.submit(prompt_ids, params, key, seen)] = (index, prompt, prompt_ids)
            furthest = max((len(episodes[index].turns) for index in current), default=-1)
            if furthest > reached:
                reached = furthest
                on_turn(furthest, len(current))
            moved = {}
            for handle, reply in sampler.step() if sampler.pending else ():
                if handle in asked:
                    index, prompt, prompt_ids = asked.pop(handle)
                    turn = _turn(tokenizer, world.domain, current[index], prompt, prompt_ids, reply)
                    episodes[index].turns.append(turn)
                    moved[index] = turn.command or ""
                else:
                    analysis.take(handle, reply)
            if moved:
                answers.send(sorted(moved), [moved[index] for index in sorted(moved)])
    except BaseException:
        sampler.abort_all()
        raise
    counts.update({name: sampler.stats[name] - before[name] for name in ("new_tokens", "slot_steps")})
    counts.update({"env_wait_s": answers.seconds, "play_s": time.perf_counter() - start})
    return episodes


def _unplayed(slots: Sequence[Any], first: int, group: int, skills, share: float) -> list[Episode]:
    """An episode for each slot, those of the share with the skill that they are played with."""
    episodes = [
        Episode(task_id=task.id, family=task.family, goal=task.goal, group=index // group, index=index)
        for index, task in enumerate(slots, start=first * group)
    ]
    if share:
        for episode in episodes:
            skills.give(episode, episode.index % group, share)
    return episodes


def _arrive(place: int, episode: Episode, observation, current: dict, counts: Counter, max_steps: int) -> bool:
    """Takes in what the environment answered; returns whether the episode goes on. If not it is over, or lost."""
    current.pop(place, None)
    if isinstance(observation, Exception):
        episode.error = str(observation)
        counts["env_errors"] += 1
        return False
    episode.reward += observation.reward
    if episode.turns:
        episode.turns[-1].result = observation.text
        episode.turns[-1].reward = observation.reward
    episode.won = observation.won
    episode.measures = dict(observation.measures)
    if observation.done or len(episode.turns) == max_steps:
        return False
    current[place] = observation
    return True


def _seen(observation, episode: Episode, world: World, tokenizer):
    """The observation with its image, if it has one, as the model reads it."""
    if observation.image is None:
        return observation
    if observation.image.shape[:2] != world.image_size:
        sizes = [" x ".join(map(str, size or ("none",))) for size in (observation.image.shape[:2], world.image_size)]
        raise ValueError(
            f"task {episode.task_id} shows an image of {sizes[0]} pixels, not {sizes[1]}; all images of a run have "
            "one size (image_size of its World), so put rooms of one size into env.data"
        )
    return observation._replace(image=images_lib.fit(observation.image, tokenizer.vision, world.min_pixels))


def _prompts(tokenizer, world: World, episodes, current: dict, live, max_tokens: int, counts: Counter):
    """(those of the live episodes that go on, their prompt texts and ids). A prompt over `max_tokens` loses its oldest
    turns; where it is too long without any, its episode leaves `current`. Raises PromptError if it is the first one,
    for which no policy is to blame."""

    def render(index: int, window: int) -> str:
        episode, observation = episodes[index], current[index]
        clean = (lambda text: text) if observation.image is None else images_lib.escape
        history = [tuple(map(clean, (turn.observation, turn.command or "", turn.result))) for turn in episode.turns]
        admissible = tuple(map(clean, observation.admissible))
        return world.domain.prompt(clean(episode.goal), history, clean(observation.text), admissible, window)

    def encode(live: Sequence[int], texts: Sequence[str]) -> list[list[int]]:
        return tok.encode_prompts(tokenizer, texts, images=[images_lib.shown([current[index]]) for index in live])

    texts = [render(index, world.history) for index in live]
    ids = encode(live, texts)
    for row, index in enumerate(live):
        window = world.history
        while len(ids[row]) > max_tokens and (window or not episodes[index].turns):
            if window == 0:
                seen = ""
                if shown := images_lib.shown([current[index]]):
                    cells = sum(images_lib.tokens_of(image, tokenizer.vision) for image in shown)
                    seen = f" ({len(ids[row]) - cells} of text + {cells} of its image)"
                raise PromptError(
                    f"task {episodes[index].task_id}: the prompt has {len(ids[row])} tokens{seen} even without "
                    f"history; raise rollout.max_prompt_tokens={max_tokens} to {len(ids[row])} or more"
                )
            window -= 1
            texts[row] = render(index, window)
            [ids[row]] = encode([index], [texts[row]])
        counts["prompt_truncated"] += window < world.history and len(ids[row]) <= max_tokens
    fitting = [row for row, prompt_ids in enumerate(ids) if len(prompt_ids) <= max_tokens]
    counts["prompt_overflow"] += len(ids) - len(fitting)
    for index in set(live) - {live[row] for row in fitting}:
        del current[index]
    return [live[row] for row in fitting], [texts[row] for row in fitting], [ids[row] for row in fitting]


def _insert_given(skills, episodes, prompts, ids: list[list[int]], shown, max_tokens: int, counts: Counter) -> None:
    """Replaces the ids of turns whose episode has a given skill. One that does not fit is left out and counted.

    shown: the images of each prompt
    """
    rows = [row for row, episode in enumerate(episodes) if episode.given]
    if not rows:
        return
    limit = max_tokens + skills.hindsight.max_skill_tokens
    images = [shown[row] for row in rows] if any(shown) else None
    texts = [episodes[row].given.at(len(episodes[row].turns)) or "" for row in rows]
    encoded = skills.encode_texts([prompts[row] for row in rows], texts, images)
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
        image=observation.image,
    )
