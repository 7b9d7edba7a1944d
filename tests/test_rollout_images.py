"""Rollouts of games with pictures: what is seen, how large it is, what a prompt may not hold."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from envs.base import Obs, Task
from seed_jax import images
from seed_jax import tokenizer as tok
from seed_jax.config import ConfigError
from seed_jax.rollout import World, play
from seed_jax.types import SamplingParams, Skill
from tests import tiny
from tests.pictured import tokenizer
from tests.scripted import ScriptedSampler

TASKS = [Task(f"room/{number}", "room", "go <image> home", number) for number in range(2)]


class Pictures:
    """Two steps; the picture of task n is n + 1 everywhere, in step 0, and ten more in step 1."""

    def __init__(self, sides=(96, 96)):
        self.sides, self.steps = sides, {}

    def open(self, slots, tasks):
        self.steps |= {slot: (task.source, 0) for slot, task in zip(slots, tasks, strict=True)}
        return [self._observe(slot) for slot in slots]

    def step(self, slots, commands):
        for slot in slots:
            self.steps[slot] = (self.steps[slot][0], self.steps[slot][1] + 1)
        return [self._observe(slot) for slot in slots]

    def _observe(self, slot):
        number, step = self.steps[slot]
        picture = np.full((self.sides[number], self.sides[number], 3), number + 1 + 10 * step, np.uint8)
        return Obs(f"text {step} <image> <|image_pad|>", ("<image>",), False, step == 2, image=picture)


class Words:
    """Everything that it is given stands in the prompt, but one place for an image."""

    def prompt(self, goal, history, observation, admissible, window):
        past = history[len(history) - window :] if window else []
        return f"<image> your task is to: {goal}\n{past} {observation} {admissible}"

    def parse(self, reply):
        return SimpleNamespace(command=reply.strip(), valid=True)


class Watching(ScriptedSampler):
    def submit(self, prompt, params, key, images=()) -> int:
        self.shown = [*getattr(self, "shown", []), (key[0], prompt, images)]
        return super().submit(prompt, params, key, images)


def rollout(sides=(96, 96), words=None, size=(96, 96), history=1, limit=400, **options):
    sampler = Watching(lambda path: "up")
    world = World(Words(), Pictures(sides), 3, history, size, 65536)
    found = play(
        sampler, words or tokenizer(), world, TASKS, group=1, params=SamplingParams(8), stream=1,
        max_prompt_tokens=limit, **options,
    )  # fmt: skip
    return found, sampler


def test_turns_hold_what_was_seen():
    episodes, sampler = rollout()
    assert len(sampler.shown) == 4
    for path, prompt, shown in sampler.shown:
        turn = episodes[path[1]].turns[path[2]]
        assert turn.image.shape == (252, 252, 3) and turn.image.dtype == np.uint8
        assert (turn.image == path[1] + 1 + 10 * path[2]).all()
        assert len(shown) == 1 and shown[0] is turn.image and prompt == turn.prompt_ids
        assert prompt.count(tokenizer().vision.image_token) == 81
        assert turn.prompt.count("<image>") == 1, "what stands for an image in other texts is escaped"
    assert "<image >" in episodes[0].turns[1].prompt and "text 0" in episodes[0].turns[1].prompt


def test_given_skills_come_with_images():
    asked = []

    class Given:
        hindsight = SimpleNamespace(max_skill_tokens=9)

        def give(self, episode, place, share):
            episode.given = Skill("", "s")

        def encode_texts(self, prompts, texts, images):
            asked.extend(images)
            return [[7, *ids] for ids in tok.encode_prompts(tokenizer(), prompts, images=images)]

    _, sampler = rollout(skills=Given(), share=1.0)
    assert len(asked) == 4 and all(one[0].shape == (252, 252, 3) for one in asked)
    assert all(prompt[0] == 7 and len(shown) == 1 for _, prompt, shown in sampler.shown)


@pytest.mark.parametrize("sides", [(96, 96), (300, 300), (168, 168), (90, 130)])
@pytest.mark.parametrize("pixels", [0, 65536])
def test_the_published_enlargement(sides, pixels):
    """An area below 256 x 256 grows to that, sides cut to whole pixels; then both become multiples of 28."""
    vision = tokenizer().vision
    image = np.random.default_rng(0).integers(0, 256, (*sides, 3), np.uint8)
    larger = Image.fromarray(image)
    if image.shape[0] * image.shape[1] < pixels:
        factor = (pixels / (sides[0] * sides[1])) ** 0.5
        larger = larger.resize((int(sides[1] * factor), int(sides[0] * factor)))
    whole = [round(side / 28) * 28 for side in larger.size]
    expected = np.asarray(larger if list(larger.size) == whole else larger.resize(whole, Image.Resampling.BICUBIC))
    found = images.fit(image, vision, pixels)
    assert np.array_equal(found, expected)
    assert World(None, None, 0, 0, sides, pixels).read_size(vision) == found.shape[:2]


def test_published_sizes():
    size = lambda side, pixels: World(None, None, 0, 0, (side, side), pixels).read_size(tokenizer().vision)  # noqa: E731
    assert [size(96, 65536), size(96, 0), size(168, 0), size(300, 65536)] == [
        (252, 252), (84, 84), (168, 168), (308, 308)
    ]  # fmt: skip


def test_a_long_prompt_names_its_parts():
    episodes, _ = rollout()
    longest = max(len(turn.prompt_ids) for episode in episodes for turn in episode.turns[:1])
    with pytest.raises(ValueError) as error:
        rollout(limit=longest - 1)
    assert f"{longest} tokens ({longest - 81} of text + 81 of its image) even without history" in str(error.value)
    assert f"raise rollout.max_prompt_tokens={longest - 1} to {longest} or more" in str(error.value)


def test_images_of_two_sizes():
    with pytest.raises(ValueError, match="room/1 shows an image of 64 x 64 pixels, not 96 x 96; all images of a run"):
        rollout(sides=(96, 64))
    with pytest.raises(ValueError, match="room/0 shows an image of 96 x 96 pixels, not none"):
        rollout(size=None)


def test_a_model_of_text():
    with pytest.raises(ConfigError, match=r"model\.init is a model without vision"):
        rollout(words=tiny.tokenizer())
