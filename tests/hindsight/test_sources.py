"""Who gets which skill: libraries, controls, shares of a group, and what is counted."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from configs import base, quickstart
from envs.alfworld.games import FAMILIES
from seed_jax import tokenizer as tok
from seed_jax.hindsight.library import SkillError, load_folder
from seed_jax.hindsight.prompts import encode_with_skills, insert_skill
from seed_jax.hindsight.sources import Skills, load_library, placebo, reads_skill, swap_skills
from seed_jax.types import Episode, Skill, Turn
from tests import tiny

LIBRARY = load_folder(base.SKILLS / "alfworld_compact")
PICK, LIGHT, CLEAN, HEAT, COOL, TWO = FAMILIES


def skills(source: str = "static_library", families=FAMILIES, **changes) -> Skills:
    config = quickstart.get_config()
    config.hindsight.source = source
    for name, value in changes.items():
        config.hindsight[name] = value
    return Skills(config, tiny.tokenizer(), families)


def episode(goal: str, family: str = HEAT, turns: int = 2, skill: str | None = None, index: int = 0) -> Episode:
    made = []
    for t in range(turns):
        prompt = f"your task is to: {goal}\nhistory: none\nnow: you arrive at shelf {t + 1}\nactions: go to desk 1"
        ids = tok.encode_prompts(tiny.tokenizer(), [prompt])[0]
        made.append(Turn(prompt, ids, [5, 1], np.zeros(2), "", "", "look", True, True))
    return Episode("id", family, goal, index, index, made, skill=Skill("s", skill) if skill else None)


def length(text: str) -> int:
    return len(tiny.tokenizer()(text, add_special_tokens=False)["input_ids"])


# -- libraries ---------------------------------------------------------------------------------------------------------


def test_every_played_episode_gets_the_skill_of_its_family():
    played = [episode("put a hot mug in desk"), episode("put a cool mug in desk", COOL), episode("look", PICK)]
    lost, empty = episode("x"), episode("x", turns=0)
    lost.error = "crashed"
    assert skills().assign([*played, lost, empty]) == Counter()
    assert [e.skill.text for e in played] == [LIBRARY.text([name]) for name in ("heat", "cool", "pick_and_place")]
    assert lost.skill is None is empty.skill and all(e.skill_error == "" for e in played)


def test_library_is_asked_once_an_episode():
    source, asked = skills(), []
    text = type(source.library).text
    source.library = type(
        "Counting", (type(source.library),), {"text": lambda self, n: asked.append(n) or text(self, n)}
    )(**vars(source.library))
    one = episode("put a hot mug in desk", turns=5)
    source.assign([one])
    source.teacher_prompts([one], 999, Counter())
    assert asked == [["heat"]]


def test_keywords_of_the_goal_and_of_the_whole_prompt():
    """The goal names heating; the prompt of the second turn mentions something cool as well."""
    one = episode("put a hot mug in desk")
    one.turns[1].prompt += "\nyou see a cool apple 1"
    by_goal, by_prompt = skills(retrieval="keyword"), skills(retrieval="keyword_full_prompt")
    put_hot = LIBRARY.text(["pick_and_place", "heat"])
    for source, texts in (
        (by_goal, [put_hot, put_hot]),
        (by_prompt, [put_hot, LIBRARY.text(["pick_and_place", "heat", "cool"])]),
    ):
        source.assign([one])
        prompts = source.teacher_prompts([one], 999, Counter())
        expected = encode_with_skills(
            tiny.tokenizer(), [t.prompt for t in one.turns], texts, "compact", heading="library"
        )
        assert [prompts[0, 0], prompts[0, 1]] == expected


def test_task_without_a_skill_is_counted_as_not_covered():
    source = skills(retrieval="keyword", families=())
    one, other = episode("dance"), episode("put a hot mug in desk")
    source.assign([one, other])
    assert one.skill is None and one.skill_error == "none_for_task" and other.skill
    metrics = source.metrics([one, other], Counter(teacher_overflow=3), teaches=True)
    assert metrics == {"skill/coverage/static_library": 0.5, "skill/teacher_overflow": 3}


def test_library_that_does_not_fit_is_refused_at_the_start():
    with pytest.raises(
        SkillError, match=r"the skill clean takes 14 tokens, hindsight\.max_skill_tokens = 13; raise it"
    ):
        skills(max_skill_tokens=13)
    skills(max_skill_tokens=13, families=(PICK, TWO))  # the long ones are for other families
    with pytest.raises(SkillError, match="clean takes 14"):
        skills(max_skill_tokens=13, families=(PICK, TWO), control="wrong_skill")  # which may hand out any
    with pytest.raises(SkillError, match=r"the skill pick_and_place \+ look_at_obj_in_light \+ .* takes \d\d tokens"):
        skills(retrieval="all")
    with pytest.raises(SkillError, match="no skill for the task family dance"):
        skills(families=("dance",))


def test_bank_and_folder_are_told_apart():
    config = quickstart.get_config()
    config.hindsight.source = "skill_bank"
    assert load_library(config.hindsight).skills["heat"].startswith("## Heat\n- ")
    config.hindsight.source = "static_library"
    assert load_library(config.hindsight).skills["heat"] == LIBRARY.skills["heat"]
    config.hindsight.library = str(base.SKILLS / "alfworld" / "bank.json")
    with pytest.raises(SkillError, match="there is no such folder"):
        load_library(config.hindsight)
    config.hindsight.source = "self_hindsight"
    assert load_library(config.hindsight) is None


# -- controls ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_skill_of_a_library_is_another_familys_and_always_the_same(family):
    found = {skills(control="wrong_skill").find(episode("put a mug", family)).text for _ in range(3)}
    right = skills().find(episode("put a mug", family)).text
    assert len(found) == 1 and right not in found and found < set(LIBRARY.skills.values())


def test_wrong_skill_of_written_ones_comes_from_the_next_other_task():
    goals = ["a", "a", "b", "c", "a", "b"]
    texts = ["a0", "a1", "b2", None, "a4", "b5"]
    episodes = [episode(goal, skill=text) for goal, text in zip(goals, texts, strict=True)]
    skills("self_hindsight", control="wrong_skill").assign(episodes)
    assert [e.skill and e.skill.text for e in episodes] == ["b2", "b2", "a4", None, "b5", "a0"]
    same = [episode("a", skill="x"), episode("a", skill="y")]
    swap_skills(same)
    assert [e.skill for e in same] == [None, None] and same[0].skill_error == "no_other_task"


def test_wrong_skill_is_another_familys_if_there_is_one():
    """In order: the next of another family, even behind nearer ones of the same; else the next with another goal."""
    goals, families = "abcdea", (HEAT, HEAT, COOL, HEAT, HEAT, HEAT)
    episodes = [episode(goal, families[i], skill=f"{goal}{i}") for i, goal in enumerate(goals)]
    swap_skills(episodes)
    assert [e.skill.text for e in episodes] == ["c2", "c2", "d3", "c2", "c2", "c2"]
    unwritten = [episode("a", HEAT, skill="a0"), episode("b", COOL), episode("c", HEAT, skill="c2"), episode("a", COOL)]
    swap_skills(unwritten)
    assert [e.skill and e.skill.text for e in unwritten] == ["c2", None, "a0", None], "a family without skills"
    alike = [episode("a", HEAT, skill="a0"), episode("a", COOL, skill="a1")]
    swap_skills(alike)
    assert [(e.skill, e.skill_error) for e in alike] == [(None, "no_other_task")] * 2, "the goal must be another too"


def test_placebo_of_every_text_of_a_skill():
    source = skills("self_hindsight")
    skill = Skill("what happened", "mug is at shelf 1 .", ((0, "take it ,"), (2, "go to desk 1 . then look")))
    empty = source.placebo_of(skill)
    assert empty.summary == "what happened" and [turn for turn, _ in empty.steps] == [0, 2]
    texts = lambda skill: (skill.text, *dict(skill.steps).values())  # noqa: E731
    for text, filler in zip(texts(skill), texts(empty), strict=True):
        assert filler.startswith("There") and "mug" not in filler and length(filler) == length(text)
    assert source.placebo_of(Skill("", None)) == Skill("", None) and source.placebo_of(Skill("", "")).text == ""


def test_true_skill_is_what_the_environment_knows_for_those_that_have_one():
    truth = {"id": "mug is at shelf 9 .", "other": "egg is at fridge 1 ."}.__getitem__
    config = quickstart.get_config()
    config.hindsight.source, config.hindsight.control = "self_hindsight", "true_skill"
    source = Skills(config, tiny.tokenizer(), truth=truth)
    one, bare, other = episode("a", skill="wrong"), episode("b"), episode("c", skill="wrong too")
    one.skill, other.task_id = one.skill._replace(steps=((1, "a step"),)), "other"
    source.assign([one, bare, other])
    assert [one.skill, bare.skill, other.skill] == [Skill("", truth("id")), None, Skill("", truth("other"))]
    assert source.label == "self_hindsight+true_skill"


def test_true_skill_needs_an_environment_that_knows_it():
    with pytest.raises(SkillError, match=r"control = 'true_skill': the environment 'alfworld' does not tell what"):
        skills("self_hindsight", control="true_skill")


def test_placebo_has_the_length_and_none_of_the_words():
    for source in (skills(control="placebo"), skills("self_hindsight", control="placebo")):
        one = episode("put a hot mug in desk", skill="mug is at shelf 1 . take it , then move it to desk 1 .")
        written = one.skill.text
        source.assign([one])
        assert one.skill.text.startswith("There is nothing special about this .")
        original = LIBRARY.text(["heat"]) if source.library else written
        assert length(one.skill.text) == length(original)
    words = set(one.skill.text.lower().split()) - {"."}
    assert words == {"there", "is", "nothing", "special", "about", "this"}


@pytest.mark.parametrize("target", [0, 1, 7, 8, 100])
def test_placebo_is_as_long_as_its_words_allow(target):
    count = lambda text: target if text == "skill" else 3 * len(text.split())  # noqa: E731
    assert len(placebo("skill", count).split()) == max(1, -(-target // 3))


# -- who reads one while playing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "readers"), [(0.0, 0), (0.25, 2), (0.5, 4), (0.3, 2), (1.0, 8)])
def test_share_of_a_group(share, readers):
    assert sum(reads_skill(place, share) for place in range(8)) == readers
    if share == 0.5:
        assert [reads_skill(place, share) for place in range(4)] == [False, True, False, True]


def test_an_episode_played_with_a_skill_has_no_teacher():
    source = skills(at_rollout=0.5)
    first, second = episode("put a hot mug in desk"), episode("put a hot mug in desk", index=1)
    for place, one in enumerate((first, second)):
        source.give(one, place, 0.5)
    assert first.given is None and second.given.text == LIBRARY.text(["heat"])
    source.assign([first, second])
    assert first.skill and second.skill is None
    counts: Counter = Counter()
    assert set(source.teacher_prompts([first, second], 999, counts)) == {(0, 0), (0, 1)}
    metrics = source.metrics([first, second], counts, teaches=True)
    assert metrics == {
        "skill/coverage/static_library": 0.5,
        "skill/teacher_overflow": 0,
        "skill/given": 0.5,
        "skill/given_overflow": 0,
    }
    assert source.metrics([first, second], counts, teaches=False) == {"skill/given": 0.5, "skill/given_overflow": 0}


def test_no_source_no_metrics():
    assert skills("none").metrics([episode("a")], Counter(), teaches=False) == {}
    one = episode("a", skill="look for mug")
    assert skills("self_hindsight", control="placebo").metrics([one], Counter(), True) == {
        "skill/coverage/self_hindsight+placebo": 1.0, "skill/teacher_overflow": 0,
    }  # fmt: skip


# -- teacher prompts ---------------------------------------------------------------------------------------------------


def test_teacher_prompts_and_overflow():
    taught, bare = episode("put a mug in desk", skill="mug is at shelf 1 ."), episode("put a mug in desk")
    taught.turns[1].prompt += "\nyou see a mug 1, a mug 2, and a mug 3."
    source, counts = skills("self_hindsight"), Counter()
    every = source.teacher_prompts([bare, taught], 999, counts)
    assert set(every) == {(1, 0), (1, 1)} and counts == Counter(taught_turns=2, teacher_overflow=0)
    for (_, turn), ids in every.items():
        text = insert_skill(taught.turns[turn].prompt, taught.skill.text, "compact")
        assert ids == tok.encode_prompts(tiny.tokenizer(), [text])[0]
    limit = len(every[1, 0])
    assert len(every[1, 1]) > limit
    kept = source.teacher_prompts([bare, taught], limit, counts)
    assert kept == {(1, 0): every[1, 0]}
    assert counts == Counter(taught_turns=3, teacher_overflow=1)
    assert source.teacher_prompts([bare], 999, counts) == {}


@pytest.mark.parametrize("placement", ["user_prefix", "system", "before_template"])
def test_placement_of_the_config(placement):
    one = episode("put a hot mug in desk", turns=1)
    source = skills(placement=placement)
    source.assign([one])
    (ids,) = source.teacher_prompts([one], 999, Counter()).values()
    assert ids == encode_with_skills(
        tiny.tokenizer(), [one.turns[0].prompt], [LIBRARY.text(["heat"])], "compact", placement, "library"
    )[0]  # fmt: skip
