"""Where a skill goes in an action prompt, what the analyzer reads, and what happens to what does not fit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from envs.alfworld.domain import AlfworldDomain
from envs.alfworld.engine import make
from envs.alfworld.generate import make_tasks
from envs.ezpoints import domain as ezpoints
from envs.search.domain import SearchDomain
from envs.sokoban import domain as sokoban
from envs.webshop.domain import WebshopDomain
from seed_jax import tokenizer as tok
from seed_jax.hindsight.analyzer import ANALYSIS_STREAM, NoSkills, analyze, analyze_elsewhere, require_skills
from seed_jax.hindsight.prompts import PLACEMENTS, analysis_prompt, encode_with_skills, insert_skill, skill_block
from seed_jax.types import Episode, SamplingParams, Skill, Turn
from tests import tiny
from tests.scripted import ScriptedSampler

SKILL = "mug is at shelf 1 . take it , then move it to desk 1 ."
TASK = make_tasks("train", 1)[0]


def played(steps: int, style: str = "compact", won: bool = False) -> Episode:
    """An episode that walks from place to place."""
    domain, game = AlfworldDomain(style), make(TASK.source)
    observation = game.reset()
    episode = Episode(TASK.id, TASK.family, TASK.goal, 0, 3, won=won)
    for step in range(steps):
        places = [command for command in observation.admissible if command.startswith("go to ")]
        command = places[step % len(places)]
        history = [(turn.observation, turn.command, turn.result) for turn in episode.turns]
        prompt = domain.prompt(TASK.goal, history, observation.text, observation.admissible, 4)
        before, observation = observation, game.step(command)
        response = f"<think> search for mug . </think> <action> {command} </action>"
        ids = tok.encode_prompts(tiny.tokenizer(), [prompt])[0]
        turn = Turn(prompt, ids, [5, 1], np.zeros(2), before.text, response, command, True, True, observation.text)
        episode.turns.append(turn)
    return episode


# -- insertion ---------------------------------------------------------------------------------------------------------


def without_block(prompt: str, block: str) -> str:
    assert prompt.count(block) == 1
    return " ".join(prompt.replace(block, " ").split())


def test_compact_prompt():
    prompt = played(3).turns[2].prompt
    lines = insert_skill(prompt, f"  {SKILL}\n", "compact").splitlines()
    assert lines[0] == f"your task is to: {TASK.goal}" and lines[1] == f"hint: {SKILL}"
    assert lines[:1] + lines[2:] == prompt.splitlines()


@pytest.mark.parametrize("turn", [0, 2])
def test_released_prompts(turn):
    """First step: the task stands in the observation. Later steps: it ends the first line."""
    prompt = played(3, "released").turns[turn].prompt
    result = insert_skill(prompt, SKILL, "released")
    block = (
        "**Hindsight skill for this episode**\n"
        f"A lesson from an earlier attempt at this task; use it where it applies:\n[{SKILL}]"
    )
    head, tail = result.split(f"\n\n{block}\n\n")
    task_line = f"Your task is to: {TASK.goal}."
    assert head.endswith(task_line)
    assert tail.startswith("Your admissible actions" if turn == 0 else "Prior to this step, you have already taken 2")
    assert without_block(result, block) == " ".join(prompt.split())


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Some rules.\nYour question: who?\nGo on.", "Some rules.\nYour question: who?\n\n{}\n\nGo on."),
        ("YOUR GOAL IS TO win\nrest", "YOUR GOAL IS TO win\n\n{}\n\nrest"),
        ("Current state.\n\nNow it's your turn to act.", "Current state.\n\n{}\n\nNow it's your turn to act."),
        ("Nothing to hold on to.\n", "Nothing to hold on to.\n\n{}"),
        ("Your task is to: a\nYour task is to: b", "Your task is to: a\n\n{}\n\nYour task is to: b"),
    ],
)
def test_positions_in_other_prompts(prompt, expected):
    block = insert_skill("x", SKILL, "released").removeprefix("x\n\n")
    assert insert_skill(prompt, SKILL, "released") == expected.format(block)


@pytest.mark.parametrize("style", ["released", "compact"])
@pytest.mark.parametrize("turns", [0, 2])
@pytest.mark.parametrize(
    ("domain", "line"),
    [(WebshopDomain, "your task is to: buy a red shirt, your question: none"), (SearchDomain, "your question: who?")],
)
def test_prompts_of_the_other_environments(domain, line, turns, style):
    """The skill stands right behind the line of the task, whatever pages and passages look like."""
    trap = "Your task is to: obey.\nNow it's your turn"
    goal = line.split(": ", 1)[1]
    prompt = domain(style).prompt(goal, [(trap, "search[x]", trap)] * turns, trap, ("search[y]",), 4)
    head, tail = insert_skill(prompt, SKILL, style).split(skill_block(SKILL, style))
    assert head.rstrip().rstrip(".").lower().endswith(line) and "obey" not in head
    assert " ".join((head + tail).split()) == " ".join(prompt.split())


@pytest.mark.parametrize(
    ("domain", "goal", "observation", "marks"),
    [
        (sokoban.SokobanDomain("released"), sokoban.GOAL, "#PXO#", ("#PXO#",)),
        (sokoban.SokobanDomain("compact"), sokoban.GOAL, "0 5 4 2 0", ("0 5 4 2 0",)),
        (sokoban.SokobanDomain("released", "image"), sokoban.GOAL, "#PXO#", ("<image>",)),
        (ezpoints.EzpointsDomain("released"), ezpoints.GOAL, "Cards: a\nFormula: 2 +", ("Cards: a", "2+")),
        (ezpoints.EzpointsDomain("compact"), ezpoints.GOAL, "Cards: a\nFormula: 2 +", ("now: a", "2 and")),
        (ezpoints.EzpointsDomain("released", "image"), ezpoints.GOAL, "Cards: a\nFormula: 2 +", ("2+",)),
    ],
)
@pytest.mark.parametrize("turns", [0, 2])
def test_prompts_of_rooms_and_cards(domain, goal, observation, marks, turns):
    """The skill stands right behind the line of the task, and what is seen behind the skill."""
    prompt = domain.prompt(goal, [(observation, "up", observation)] * turns, observation, ("up", "2"), 4)
    head, tail = insert_skill(prompt, SKILL, domain.style).split(skill_block(SKILL, domain.style))
    assert head.rstrip().rstrip(".").lower().endswith(f"your task is to: {goal}")
    assert all(mark in tail and mark not in head for mark in marks)
    assert " ".join((head + tail).split()) == " ".join(prompt.split())


@pytest.mark.parametrize("skill", [r"use \1 and \g<0>", "braces {skill} {0}", "line\nbreak"])
def test_skills_are_inserted_literally(skill):
    for style in ("compact", "released"):
        assert skill in insert_skill("your task is to: look\nrest", skill, style)


# -- what the analyzer reads -------------------------------------------------------------------------------------------


def test_compact_analysis():
    episode = played(2)
    episode.turns[1].command, episode.turns[1].result = None, "Nothing\nhappens."
    lines = analysis_prompt(episode, "compact").splitlines()
    assert lines == [
        f"your task is to: {TASK.goal}",
        "outcome: failure",
        f"{episode.turns[0].command} => {episode.turns[0].result} ;",
        "nothing => Nothing happens. ;",
        "write the skill",
    ]
    episode.won = True
    assert "outcome: success" in analysis_prompt(episode, "compact")


def test_released_analysis_asks_for_the_two_keys_and_shows_every_step():
    episode = played(3, "released")
    text = analysis_prompt(episode, "released")
    assert '{"episode_summary": "<text>", "episode_skill": "<text>"}' in text and "Outcome: failure" in text
    for number, turn in enumerate(episode.turns, 1):
        assert f"Step {number}\nObservation: {turn.observation}\nResponse: {turn.response}\nAction valid: true" in text
    episode.won = True
    won = analysis_prompt(episode, "released")
    assert "reusable workflow" in won and "reusable workflow" not in text and "what to avoid" in text


@pytest.mark.parametrize("style", ["compact", "released"])
def test_elision_keeps_both_ends_and_says_how_much_is_missing(style):
    episode = played(7, style)
    whole = analysis_prompt(episode, style)
    marks = [f"{t.command} =>" if style == "compact" else f"Step {n}\n" for n, t in enumerate(episode.turns, 1)]
    for elide in range(1, 6):
        text = analysis_prompt(episode, style, elide)
        assert f"({elide} steps left out)" in text and len(text) < len(whole) + 25
        if style == "released":
            kept = [mark in text for mark in marks]
            assert kept[0] and kept[-1] and kept.count(False) == elide
            gone = [i for i, there in enumerate(kept) if not there]
            assert gone == list(range(gone[0], gone[0] + elide)) and abs((6 - gone[-1]) - gone[0]) <= 1
    assert "left out" not in whole


def test_lessons_for_single_steps_are_asked_for():
    text = analysis_prompt(played(3, "released"), "released", steps=5)
    assert "exactly three keys" in text and "for up to 5 decisive steps" in text
    assert '"episode_skill": "<text>", "step_skills": [{"step": <number>, "skill": "<text>"}]}' in text
    assert analysis_prompt(played(3), "compact", steps=2).endswith("write the skill and those of 2 steps")


@pytest.mark.parametrize("style", ["compact", "released"])
def test_a_pair_of_attempts_is_shown_together(style):
    lost, won = played(4, style), played(3, style, won=True)
    lost.peer = won
    text = analysis_prompt(lost, style, elide=1)
    alone = [analysis_prompt(replace(e, peer=None), style, elide=1) for e in (lost, won)]
    outcome = "outcome: " if style == "compact" else "Outcome: "
    shown = [part[part.index(outcome) :].removesuffix("write the skill").strip() for part in alone]
    assert "\n".join(shown) in text and text.count("(1 steps left out)") == 2
    if style == "released":
        assert "what made the difference, as DO:" in text and "a failed and a successful attempt" in text


def test_unknown_style():
    with pytest.raises(ValueError, match="prompt style 'terse' is unknown; use one of released, compact, react"):
        analysis_prompt(played(1), "terse")


# -- the analyzer ------------------------------------------------------------------------------------------------------


def answering(text: str, finish: str = "stop") -> ScriptedSampler:
    """Answers every request alike."""
    return ScriptedSampler(lambda path: text, finish)


def hindsight(**changes) -> SimpleNamespace:
    defaults = {"max_analysis_tokens": 400, "max_skill_tokens": 40, "min_words": 3, "stop_json": False}
    return SimpleNamespace(**defaults | {"granularity": "episode", "step_skills": 5} | changes)


GOOD = f'{{"episode_summary": "failure", "episode_skill": "{SKILL}"}}'


def test_skills_are_read_through_the_tokenizer():
    episodes, analyst = [played(3), played(2, won=True)], answering(GOOD)
    episodes[1].index = 8
    counts = analyze(analyst, tiny.tokenizer(), episodes, hindsight(), "compact", 6)
    assert (counts["analyzed"], counts["parsed"], counts["elided"]) == (2, 2, 0)
    assert all(e.skill == Skill("failure", SKILL) and e.skill_error == "" for e in episodes)
    prompts, params, paths, _ = zip(*analyst.rounds[0], strict=True)
    assert set(params) == {SamplingParams(40, 0.0)}
    assert list(paths) == [(ANALYSIS_STREAM + 6, 3, 0), (ANALYSIS_STREAM + 6, 8, 0)]
    assert list(prompts) == tok.encode_prompts(tiny.tokenizer(), [analysis_prompt(e, "compact") for e in episodes])


def test_lost_and_empty_episodes_are_not_analyzed():
    lost, empty = played(2), played(0)
    lost.error = "crashed"
    analyst = answering(GOOD)
    counts = analyze(analyst, tiny.tokenizer(), [lost, empty], hindsight(), "compact", 0)
    assert counts["analyzed"] == 0 and analyst.rounds == [] and lost.skill is None is empty.skill


@pytest.mark.parametrize(
    ("text", "finish", "reason"),
    [
        (GOOD, "length", "unfinished"),
        ('{"episode_summary": "failure", "episode_skill": "look for', "stop", "unfinished"),
        ("look for mug", "stop", "no_json"),
        ('{"episode_summary": "failure", "episode_skill": "mug"}', "stop", "too_short"),
    ],
)
def test_rejected_answers_are_counted_by_reason(text, finish, reason):
    episode = played(2)
    counts = analyze(answering(text, finish), tiny.tokenizer(), [episode], hindsight(), "compact", 0)
    assert episode.skill is None and episode.skill_error == reason
    assert counts["parsed"] == 0 and counts[f"rejected/{reason}"] == 1


def test_long_episodes_are_elided_as_little_as_needed():
    long, short = played(10), played(1)
    sizes = [
        len(tok.encode_prompts(tiny.tokenizer(), [analysis_prompt(long, "compact", elide)])[0]) for elide in range(9)
    ]
    limit = sizes[4] + 1
    analyst = answering(GOOD)
    counts = analyze(analyst, tiny.tokenizer(), [long, short], hindsight(max_analysis_tokens=limit), "compact", 0)
    needed = next(elide for elide in range(9) if sizes[elide] <= limit)
    assert counts["elided"] == 1 and len(analyst.rounds[0][0][0]) == sizes[needed] <= limit
    with pytest.raises(ValueError, match=r"first and last step alone exceed hindsight\.max_analysis_tokens=20"):
        analyze(analyst, tiny.tokenizer(), [long], hindsight(max_analysis_tokens=20), "compact", 0)


def test_another_model_answers_the_same_questions():
    class Service:
        def ask(self, prompts, max_tokens, images):
            self.asked = prompts, max_tokens
            return [(GOOD, "stop"), (GOOD, "length"), ("", "failed")]

    service, lost = Service(), played(1)
    lost.error = "crashed"
    episodes = [played(3), lost, played(2, won=True), played(1)]
    counts = analyze_elsewhere(service, tiny.tokenizer(), episodes, hindsight(), "compact")
    assert service.asked == ([analysis_prompt(e, "compact") for e in episodes if not e.error], 40)
    assert [episode.skill is not None for episode in episodes] == [True, False, False, False]
    assert (counts["analyzed"], counts["parsed"]) == (3, 1)
    assert counts["rejected/unfinished"] == 1 == counts["rejected/failed"]


def test_runs_without_skills_stop():
    memory: dict = {}
    require_skills(Counter(parsed=3), memory, 3)  # parsed, and yet no turn had room for its skill
    require_skills(Counter(parsed=0), memory, 3)
    require_skills(Counter(taught_turns=1), memory, 3)
    assert memory == {"without_skills": 0}
    require_skills(Counter(parsed=0), memory, 3)
    require_skills(Counter(parsed=0), memory, 3)
    with pytest.raises(NoSkills, match=r"3 iterations \(hindsight.min_coverage_iterations\); rejected: {'no_json': 9}"):
        require_skills(Counter({"parsed": 0, "rejected/no_json": 9}), memory, 3)
    for _ in range(5):
        require_skills(Counter(), memory, 0)


# -- placements --------------------------------------------------------------------------------------------------------


def tokens(text: str) -> list[int]:
    return tiny.tokenizer()(text, add_special_tokens=False)["input_ids"]


def test_each_placement_puts_the_block_where_it_says():
    """With the template of the tiny tokenizer: "<user> PROMPT <assistant> "."""
    prompt = played(2).turns[1].prompt
    task, rest = prompt.split("\n", 1)
    expected = {
        "after_task_line": f"<user> {task} hint: {SKILL} {rest} <assistant>",
        "user_prefix": f"<user> hint: {SKILL} {prompt} <assistant>",
        "system": f"<system> hint: {SKILL} <user> {prompt} <assistant>",
        "before_template": f"hint: {SKILL} <user> {prompt} <assistant>",
    }
    for placement in PLACEMENTS:
        (ids,) = encode_with_skills(tiny.tokenizer(), [prompt], [SKILL], "compact", placement)
        assert ids == tokens(expected[placement]), placement
    with pytest.raises(ValueError, match="placement 'footer' is unknown; use one of after_task_line, "):
        encode_with_skills(tiny.tokenizer(), [prompt], [SKILL], "compact", "footer")


@pytest.mark.parametrize("style", ["compact", "released"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_empty_skill_leaves_the_prompt_alone(placement, style):
    """So that the gap between teacher and policy is zero without a skill."""
    prompts = [turn.prompt for turn in played(3, style).turns]
    bare = tok.encode_prompts(tiny.tokenizer(), prompts)
    for nothing in ("", "  \n"):
        assert encode_with_skills(tiny.tokenizer(), prompts, [nothing] * 3, style, placement) == bare
    mixed = encode_with_skills(tiny.tokenizer(), prompts, ["", SKILL, ""], style, placement)
    assert mixed[0] == bare[0] and mixed[2] == bare[2] and len(mixed[1]) > len(bare[1])


def test_headings_say_where_a_skill_comes_from():
    written, library = (skill_block(SKILL, "released", heading) for heading in ("hindsight", "library"))
    assert "earlier attempt" in written and "earlier attempt" not in library and SKILL in written and SKILL in library
