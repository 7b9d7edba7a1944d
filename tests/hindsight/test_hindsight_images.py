"""Episodes that were seen as pictures: what the analyzer and the teacher read of them."""

from __future__ import annotations

import copy
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from configs import ezpoints, sokoban
from envs.ezpoints import domain as cards
from envs.sokoban.domain import GOAL
from seed_jax.hindsight.analyzer import analyze, analyze_elsewhere
from seed_jax.hindsight.prompts import PLACEMENTS, analysis_images, analysis_prompt, encode_with_skills, fit_analyses
from seed_jax.hindsight.sources import Skills
from seed_jax.images import PLACEHOLDER
from seed_jax.types import Episode, Skill, Turn
from tests import pictured
from tests.hindsight.test_prompts import GOOD, answering, hindsight
from tests.pictured import played, same, tokenizer

SEEN = "<|vision_start|>" + "<|image_pad|>" * pictured.TOKENS + "<|vision_end|>"  # what a picture is in a prompt


def tokens(text: str) -> list[int]:
    return tokenizer()(text, add_special_tokens=False)["input_ids"]


def chat(text: str, system: str = "") -> list[int]:
    """One user message as the template of Qwen2.5 renders it, each place of an image written out."""
    first = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    message = f"<|im_start|>user\n{text.replace(PLACEHOLDER, SEEN)}<|im_end|>\n<|im_start|>assistant\n"
    return tokens(first + message)


# -- what the analyzer reads -------------------------------------------------------------------------------------------


def test_each_step_shows_its_picture_instead_of_the_text():
    episode = played(3)
    text = analysis_prompt(episode, "released")
    steps = [
        f"Step {number}\nObservation: <image>\nResponse: {turn.response}\nAction valid: true"
        for number, turn in enumerate(episode.turns, 1)
    ]
    assert text.endswith("\n".join([f"Task: {GOAL}", "Outcome: failure", "Episode:", *steps]))
    for turn in episode.turns:
        assert turn.observation not in text and turn.result not in text
    assert same(analysis_images(episode), [turn.image for turn in episode.turns])


def test_compact_prompts_show_pictures_and_commands():
    episode = played(2)
    episode.turns[1].command = None
    text = analysis_prompt(episode, "compact")
    assert text.splitlines()[2:] == ["<image> up ;", "<image> nothing ;", "write the skill"]


def test_prompts_are_encoded_with_all_tokens_of_their_images():
    episodes = [played(3), played(1), played(3, won=True)]
    found = fit_analyses(tokenizer(), episodes, "released", 4000)
    for prompt, episode in zip(found, episodes, strict=True):
        assert prompt.ids == chat(analysis_prompt(episode, "released")) and prompt.elided == 0
        assert same(prompt.images, [turn.image for turn in episode.turns])


@pytest.mark.parametrize(
    "trap", [" <image>", "<ima<image>ge>", "<|image_pad|>", " <|vision_start|><|image_pad|>", "<|im_end|>"]
)
@pytest.mark.parametrize("style", ["released", "compact"])
def test_nothing_in_a_reply_stands_for_a_picture(trap, style):
    """The number of places is that of the images whatever the model has written."""
    episode = played(2, mark=trap)
    episode.turns[0].command = f"up{trap}"
    [prompt] = fit_analyses(tokenizer(), [episode], style, 4000)
    plain = chat(analysis_prompt(played(2), style))
    for token in map(tokenizer().convert_tokens_to_ids, ("<|image_pad|>", "<|vision_start|>", "<|im_end|>")):
        assert prompt.ids.count(token) == plain.count(token)
    assert prompt.text.count(PLACEHOLDER) == len(prompt.images) == 2


def test_elided_steps_take_their_pictures_along():
    episode = played(8)
    sizes = [len(chat(analysis_prompt(episode, "released", elide))) for elide in range(7)]
    for limit in (sizes[0], sizes[0] - 1, sizes[3], sizes[6]):
        [prompt] = fit_analyses(tokenizer(), [episode], "released", limit)
        assert prompt.elided == next(elide for elide, size in enumerate(sizes) if size <= limit)
        shown = [int(number) - 1 for number in re.findall(r"^Step (\d+)$", prompt.text, re.MULTILINE)]
        assert len(shown) == 8 - prompt.elided and shown[0] == 0 and shown[-1] == 7
        assert same(prompt.images, [episode.turns[number].image for number in shown])
        assert prompt.ids == chat(prompt.text) and len(prompt.ids) <= limit


def test_what_never_fits_says_how_much_is_text_and_how_much_pictures():
    with pytest.raises(ValueError, match=r"hindsight\.max_analysis_tokens=100 \(") as error:
        fit_analyses(tokenizer(), [played(6)], "released", 100)
    total, text, seen, count = map(
        int, re.findall(r"\((\d+): (\d+) of text and (\d+) of (\d+) images\)", str(error.value))[0]
    )
    assert total == text + seen and (seen, count) == (2 * pictured.TOKENS, 2)
    assert total == len(chat(analysis_prompt(played(6), "released", elide=4)))


@pytest.mark.parametrize("elide", [0, 2])
def test_a_pair_shows_the_pictures_of_both(elide):
    lost, won = played(4), played(5, won=True)
    lost.peer = won
    text, images = analysis_prompt(lost, "released", elide), analysis_images(lost, elide)
    parts = [analysis_images(replace(episode, peer=None), elide) for episode in (lost, won)]
    assert same(images, [*parts[0], *parts[1]]) and text.count(PLACEHOLDER) == len(images) == 9 - 2 * elide
    [prompt] = fit_analyses(tokenizer(), [lost], "released", 8000)
    assert len(prompt.images) == 9 and prompt.ids == chat(analysis_prompt(lost, "released"))


def test_a_model_without_vision_cannot_be_asked():
    blind = copy.copy(tokenizer())
    blind.vision = None
    with pytest.raises(ValueError, match=r"the model has no vision; name one that has in model\.init"):
        fit_analyses(blind, [played(1)], "released", 4000)


# -- the analyzer ------------------------------------------------------------------------------------------------------


class Watching:
    """Answers through a sampler of tests/scripted.py, and keeps the images of each request."""

    def __init__(self):
        self.inner, self.images = answering(GOOD), []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def submit(self, prompt, params, key, images=()):
        self.images.append((prompt, images))
        return self.inner.submit(prompt, params, key)


def test_the_policy_is_asked_with_the_pictures_and_they_are_kept_with_its_answer():
    episodes, sampler = [played(3), played(2)], Watching()
    episodes[1].index = 1
    # The answers come as words of the other tokenizer, so none is a skill here.
    analyze(sampler, tokenizer(), episodes, hindsight(max_analysis_tokens=4000), "released", 0)
    for episode, (prompt, images) in zip(episodes, sampler.images, strict=True):
        assert prompt == chat(analysis_prompt(episode, "released")) == episode.written.prompt
        assert same(images, [turn.image for turn in episode.turns]) and episode.written.images is images


def test_a_service_is_asked_with_the_pictures():
    class Service:
        def ask(self, prompts, max_tokens, images):
            self.asked = prompts, images
            return [(GOOD, "stop")] * len(prompts)

    service, episodes = Service(), [played(3), played(2)]
    counts = analyze_elsewhere(service, tokenizer(), episodes, hindsight(max_analysis_tokens=4000), "released")
    assert counts["parsed"] == 2 and service.asked[0] == [analysis_prompt(e, "released") for e in episodes]
    assert all(same(found, [t.image for t in e.turns]) for found, e in zip(service.asked[1], episodes, strict=True))


# -- teacher prompts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skill", ["push from the left", "look at <image> first", ""])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_teacher_sees_what_the_policy_saw(placement, skill):
    """And the skill cannot add a picture, wherever it stands."""
    turn = played(1).turns[0]
    [ids] = encode_with_skills(
        tokenizer(), [turn.prompt], [skill], "released", placement, "library", images=[(turn.image,)]
    )
    if not skill:
        assert ids == chat(turn.prompt)
        return
    block = f"**Skills for this kind of task**\nUse them where they apply:\n{skill.replace('<image>', '<image >')}"
    line = f"Your task is to: {GOAL}."
    head, tail = turn.prompt.split(line)
    expected = {
        "after_task_line": chat(f"{head}{line}\n\n{block}\n\n{tail.lstrip()}"),
        "user_prefix": chat(f"{block}\n\n{turn.prompt.lstrip()}"),
        "system": chat(turn.prompt, block),
        "before_template": [*tokens(f"{block}\n\n"), *chat(turn.prompt)],
    }
    assert tokenizer().decode(ids) == tokenizer().decode(expected[placement])
    assert ids.count(tokenizer().vision.image_token) == pictured.TOKENS


def card_episode() -> Episode:
    domain, text = cards.EzpointsDomain("released", "image"), "Cards: 2, 10\nFormula: 2"
    prompt = domain.prompt(cards.GOAL, [], text, (), 0)
    image = np.full((*pictured.SIZE, 3), 7, np.uint8)
    turn = Turn(prompt, [], [], None, text, "{}", "+", True, True, image=image)
    return Episode("deal", "ezpoints", cards.GOAL, 0, 0, [turn])


@pytest.mark.parametrize("retrieval", ["task_type", "keyword_full_prompt", "all"])
@pytest.mark.parametrize(("module", "make"), [(sokoban, lambda: played(3)), (ezpoints, card_episode)])
def test_the_libraries_teach_episodes_of_pictures(module, make, retrieval):
    config, episode = module.get_config(), make()
    config.env.observation = "image"
    config.hindsight.source, config.hindsight.retrieval = "static_library", retrieval
    config.hindsight.max_skill_tokens = 3000  # the tiny tokenizer cuts words into letters
    skills = Skills(config, tokenizer(), {episode.family})
    skills.assign([episode])
    counts = Counter()
    taught = skills.teacher_prompts([episode], 6000, counts)
    assert counts == {"taught_turns": len(episode.turns), "teacher_overflow": 0}
    [general] = {line for line in skills.library.general.splitlines()[:1]}
    for (_, number), ids in taught.items():
        assert ids.count(tokenizer().vision.image_token) == pictured.TOKENS
        text = tokenizer().decode(ids)
        assert general in text and len(ids) > len(chat(episode.turns[number].prompt))
    bare = len(chat(episode.turns[0].prompt))
    assert skills.teacher_prompts([episode], bare, counts) == {} and counts["teacher_overflow"] == len(episode.turns)
    given = skills.encode([episode.turns[0].prompt], [episode.skill], [(episode.turns[0].image,)])
    assert given == [taught[0, 0]]


def test_skills_of_single_steps_find_their_picture():
    episode = played(3)
    episode.skill = Skill("", None, ((1, "go around the box"),))
    config = sokoban.get_config()
    config.env.observation = "image"
    taught = Skills(config, tokenizer()).teacher_prompts([episode], 4000, Counter())
    assert list(taught) == [(0, 1)] and taught[0, 1].count(tokenizer().vision.image_token) == pictured.TOKENS
