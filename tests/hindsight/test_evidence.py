"""Skills that nobody writes, skills for groups and for single turns: who reads what."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from configs import quickstart
from envs.alfworld.domain import AlfworldDomain
from envs.alfworld.engine import make
from envs.alfworld.generate import make_tasks
from seed_jax import tokenizer as tok
from seed_jax.hindsight.evidence import SOURCES, give_evidence, solver, truth
from seed_jax.hindsight.library import SkillError
from seed_jax.hindsight.prompts import insert_skill
from seed_jax.hindsight.sources import Skills, contrasts
from seed_jax.types import Episode, Skill, Turn
from tests import tiny


def skills(source: str, solve=None, **changes) -> Skills:
    config = quickstart.get_config()
    config.hindsight.source = source
    for name, value in changes.items():
        config.hindsight[name] = value
    return Skills(config, tiny.tokenizer(), (), solve)


def turn(command: str, result: str, admissible: bool = True) -> Turn:
    prompt = "your task is to: put a mug in desk\nhistory: none\nnow: you arrive at shelf 1\nactions: go to desk 1"
    ids = tok.encode_prompts(tiny.tokenizer(), [prompt])[0]
    return Turn(prompt, ids, [5, 1], np.zeros(2), "", "", command, True, admissible, result)


def group() -> list[Episode]:
    """Lost, won, lost to an error, won, and a group that only lost."""
    commands = [["go to shelf 1", "look"], ["go to desk 1", "dance"], ["look"], ["take mug 1"], ["go to shelf 2"]]
    episodes = [
        Episode("id", "f", "put a mug in desk", int(i == 4), i, [turn(c, f"after {c}", c != "dance") for c in names])
        for i, names in enumerate(commands)
    ]
    episodes[1].won = episodes[2].won = episodes[3].won = True
    episodes[2].error = "crashed"
    return episodes


def test_a_successful_peer_is_another_episode_of_the_group():
    episodes = group()
    skills("peer_success").assign(episodes)
    texts = [episode.skill and episode.skill.text for episode in episodes]
    assert texts == ["go to desk 1", "take mug 1", None, "go to desk 1", None]
    assert [e.skill_error for e in episodes] == ["", "", None, "", "no_successful_peer"]
    assert not any(e.skill.steps for e in episodes if e.skill)
    give_evidence("peer_success", episodes, "released")
    assert episodes[0].skill.text == "Another attempt succeeded with these actions: go to desk 1."


def test_feedback_belongs_to_its_turn():
    episodes = group()
    episodes[0].turns[1].result = " Nothing\nhappens. "
    skills("env_feedback").assign(episodes)
    assert episodes[0].skill == Skill("", None, ((0, "after go to shelf 1"), (1, "Nothing happens.")))
    episodes[0].turns[0].result = ""
    skills("env_feedback").assign(episodes)
    assert episodes[0].skill.at(0) is None and episodes[0].skill.at(1) == "Nothing happens."
    give_evidence("env_feedback", episodes, "released")
    assert episodes[0].skill.at(1) == "The environment will answer: Nothing happens."


def test_peer_and_feedback_stand_together():
    episodes = group()
    skills("peer_feedback").assign(episodes)
    assert episodes[0].skill.at(0) == "go to desk 1\nafter go to shelf 1"
    assert episodes[4].skill.at(0) == "after go to shelf 2", "without a peer, the feedback alone"


def test_only_turns_with_a_text_have_a_teacher():
    episodes, source, counts = group(), skills("env_feedback"), Counter()
    episodes[0].turns[0].result = ""
    source.assign(episodes)
    prompts = source.teacher_prompts(episodes[:1], 999, counts)
    (ids,) = prompts.values()
    assert list(prompts) == [(0, 1)] and counts["taught_turns"] == 1
    text = insert_skill(episodes[0].turns[1].prompt, "after look", "compact", "evidence")
    assert ids == tok.encode_prompts(tiny.tokenizer(), [text])[0]


def test_the_solution_wins_the_game():
    tasks = make_tasks("train", 3)
    solve = solver(AlfworldDomain("compact"), tasks)
    for task in tasks:
        game, commands = make(task.source), solve(task.id)
        assert not game.reset().won
        assert [game.step(command).won for command in commands][-1]
        one = Episode(task.id, task.family, task.goal, 0, 0, [turn("look", "x")])
        skills("ground_truth", solve).assign([one])
        assert one.skill == Skill("", " , ".join(commands))


def test_the_true_skill_names_where_the_walkthrough_finds_the_object():
    tasks = make_tasks("train", 12)
    true = truth(AlfworldDomain("compact"), tasks)
    for task in tasks:
        take = next(command for command in task.source["walkthrough"] if command.startswith("take "))
        assert true(task.id).startswith(f"{task.source['object']} is at {take.split(' from ')[1]} .")
    with pytest.raises(KeyError):
        true("no such task")
    assert truth(object(), tasks) is None


def test_an_environment_without_solutions_is_an_error():
    assert solver(object(), []) is None
    with pytest.raises(SkillError, match=r"hindsight\.source = 'ground_truth': the environment 'alfworld' does not"):
        skills("ground_truth")
    one = group()[0]
    skills("ground_truth", lambda task_id: []).assign([one])
    assert one.skill is None and one.skill_error == "no_solution"


@pytest.mark.parametrize("source", SOURCES)
def test_controls_replace_evidence(source):
    episodes = group()
    episodes[3].goal = "another"
    lookup = lambda task_id: ["look"]  # noqa: E731
    skills(source, lookup, control="placebo").assign(episodes)
    texts = [text for e in episodes if e.skill for text in (e.skill.text, *dict(e.skill.steps).values()) if text]
    assert texts and all(set(text.split()) <= set("There is nothing special about this .".split()) for text in texts)
    plain, swapped = group(), group()
    for episodes, control in ((plain, "none"), (swapped, "wrong_skill")):
        episodes[3].goal = "another"
        skills(source, lookup, control=control).assign(episodes)
    assert swapped[0].skill == plain[3].skill and swapped[3].skill == (plain[4].skill or plain[0].skill)


# -- what the analyzer writes ------------------------------------------------------------------------------------------

WRITTEN = Skill("s", "search the shelf first", tuple((t, f"lesson for turn {t}") for t in range(1, 4)))


@pytest.mark.parametrize(
    ("granularity", "texts"),
    [
        ("episode", [WRITTEN.text] * 3),
        ("step", [None, "lesson for turn 1", "lesson for turn 2"]),
        ("episode_step", [WRITTEN.text, "lesson for turn 1", "lesson for turn 2"]),
    ],
)
def test_granularity(granularity, texts):
    one = Episode("id", "f", "g", 0, 0, [turn("look", "x")] * 3, skill=WRITTEN)
    source = skills("self_hindsight", granularity=granularity, step_skills=2)
    source.assign([one])
    assert [one.skill.at(t) for t in range(3)] == texts
    assert len(source.teacher_prompts([one], 999, Counter())) == sum(text is not None for text in texts)
    without = Episode("id", "f", "g", 0, 0, [turn("look", "x")], skill=Skill("s", "only this one"))
    source.assign([without])
    assert (without.skill is None) == (granularity == "step")


def test_a_reflection_is_about_both_outcomes_and_for_the_whole_group():
    episodes, source = group(), skills("group_reflection")
    (pair,) = source.to_analyze(episodes)
    assert (pair.index, pair.peer.index) == (0, 1) and pair is not episodes[0]
    pair.skill, pair.skill_error = Skill("s", "do this , avoid that"), ""
    source.assign(episodes, [pair])
    assert [e.skill and e.skill.text for e in episodes] == ["do this , avoid that"] * 2 + [None, pair.skill.text, None]
    assert episodes[4].skill_error == "no_contrast"
    assert contrasts(episodes[4:]) == [] and skills("peer_success").to_analyze(episodes) == []
    assert skills("self_hindsight").to_analyze(episodes) == episodes


# -- two views ---------------------------------------------------------------------------------------------------------


def test_readers_are_taught_by_the_bare_prompt():
    source = skills("static_library", at_rollout=0.5, teach_readers=True, retrieval="keyword")
    plain, reader = (Episode("id", "f", "put a hot mug in desk", 0, i, [turn("look", "x")]) for i in (0, 1))
    for place, one in enumerate((plain, reader)):
        source.give(one, place, 0.5)
    source.assign([plain, reader])
    prompts = source.teacher_prompts([plain, reader], 999, Counter())
    assert prompts[1, 0] == reader.turns[0].prompt_ids and len(prompts[0, 0]) > len(prompts[1, 0])
    assert plain.given is None and reader.given.text == plain.skill.text
