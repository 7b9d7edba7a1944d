"""The teacher as a player: numbers by hand and by NumPy, which skill it gets, and that it plays the same games."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from configs import base, quickstart
from envs.alfworld.domain import AlfworldDomain
from envs.alfworld.generate import make_tasks
from envs.base import EnvError
from envs.pool import make_pool
from seed_jax import teacher
from seed_jax import tokenizer as tok
from seed_jax.evaluate import EVAL_STREAM, REPEAT_STRIDE, PanelError, evaluate
from seed_jax.hindsight.library import load_folder
from seed_jax.hindsight.prompts import insert_skill
from seed_jax.hindsight.sources import Skills
from seed_jax.rollout import World
from seed_jax.types import Episode, Skill
from tests import tiny
from tests.scripted import ScriptedSampler

# -- numbers -----------------------------------------------------------------------------------------------------------

FAMILIES = ("heat", "cool", "heat", "heat", "cool", "cool")
WITHOUT = np.array([1, 0, 0, 1, 0, 0])
WITH = np.array([1, 1, 0, 0, 1, 0])


def episodes(won, games=None, given=True) -> list[Episode]:
    games = range(len(won)) if games is None else games
    return [
        Episode(f"game {game}", FAMILIES[game], "", index, index, won=bool(w), given=Skill("", "x") if given else None)
        for index, (w, game) in enumerate(zip(won, games, strict=True))
    ]


def plain(values) -> dict:
    """Mean and its standard error over games that come once."""
    values = np.asarray(values, float)
    error = values.std() / math.sqrt(len(values))
    return {"success_rate": pytest.approx(values.mean()), "standard_error": pytest.approx(error)}


def test_comparison_by_hand():
    readers = episodes(WITH)
    readers[5].given = None
    got = teacher.compare(episodes(WITHOUT, given=False), readers)
    assert (got["episodes"], got["games"], got["coverage"]) == (6, 6, pytest.approx(5 / 6))
    assert got["student"] == plain(WITHOUT) and got["teacher"] == plain(WITH)
    margin = {name: got["margin"][name] for name in ("success_rate", "standard_error")}
    assert margin == plain(WITH - WITHOUT) and margin["success_rate"] == pytest.approx(1 / 6)
    assert (got["margin"]["better_on"], got["margin"]["worse_on"]) == (2, 1)
    low, high = got["margin"]["interval"]
    assert -0.5 < low < 1 / 6 < high < 0.9 and 0 < got["margin"]["p_value"] <= 1
    for name, where in (("first_lost", [1, 2, 4, 5]), ("first_won", [0, 3])):
        part = got[name]
        assert part["episodes"] == len(where)
        assert [part["student"], part["teacher"], part["margin"]] == [
            plain(WITHOUT[where]), plain(WITH[where]), plain((WITH - WITHOUT)[where]),
        ]  # fmt: skip
    assert got["first_lost"]["teacher"]["success_rate"] == 0.5 == got["first_won"]["teacher"]["success_rate"]
    assert list(got["family"]) == ["cool", "heat"]
    for family, where in (("heat", [0, 2, 3]), ("cool", [1, 4, 5])):
        assert got["family"][family] == {
            "episodes": 3, "student": plain(WITHOUT[where]), "teacher": plain(WITH[where]),
            "margin": plain((WITH - WITHOUT)[where]),
        }  # fmt: skip
    assert json.loads(json.dumps(got)) == got


def test_pairs_are_found_by_their_numbers():
    want = teacher.compare(episodes(WITHOUT), episodes(WITH))
    assert teacher.compare(episodes(WITHOUT)[::-1], [episodes(WITH)[i] for i in (3, 0, 5, 1, 4, 2)]) == want


def test_equal_margins_leave_no_doubt():
    got = teacher.compare(episodes([0, 0, 0]), episodes([1, 1, 1]))
    assert got["margin"]["interval"] == [1.0, 1.0] and got["margin"]["standard_error"] == 0
    assert got["first_won"]["episodes"] == 0 and got["first_lost"]["episodes"] == 3
    got = teacher.compare(episodes(WITHOUT), episodes(WITHOUT))
    assert got["margin"]["interval"] == [0.0, 0.0] and got["margin"]["success_rate"] == 0


def test_games_that_come_twice_are_not_independent():
    games = [0, 1, 2] * 2
    got = teacher.compare(episodes(WITHOUT, games), episodes(WITH, games))
    differences = (WITH - WITHOUT).reshape(2, 3).mean(0)
    assert (got["episodes"], got["games"]) == (6, 3)
    assert got["margin"]["standard_error"] == pytest.approx(differences.std() / math.sqrt(3))


def test_other_games_cannot_be_compared():
    with pytest.raises(ValueError, match="1 games are in one evaluation only"):
        teacher.compare(episodes(WITHOUT), episodes(WITH)[:5])
    with pytest.raises(ValueError, match="2 games are in one evaluation only"):
        teacher.compare(episodes([1, 0], [0, 1]), episodes([1, 0], [0, 2]))


def measured(own: dict, wrong: dict | None = None) -> dict:
    return {"self": own, "wrong": wrong}


def test_metrics_and_words_by_hand():
    own = teacher.compare(episodes(WITHOUT), episodes(WITH))
    own["margin"]["interval"] = [-0.25, 0.5]
    metrics = teacher.teacher_metrics(measured(own, teacher.compare(episodes(WITHOUT), episodes([1, 0, 0, 1, 1, 1]))))
    assert metrics == {
        "teacher/student_success": pytest.approx(2 / 6),
        "teacher/success_self": pytest.approx(3 / 6),
        "teacher/margin": pytest.approx(1 / 6),
        "teacher/margin_low": -0.25,
        "teacher/margin_high": 0.5,
        "teacher/coverage": 1.0,
        "teacher/first_lost": 0.5,
        "teacher/first_won": 0.5,
        "teacher/success_wrong": pytest.approx(4 / 6),
    }
    line = "  the teacher on 6 of these games: 0.500 with its skill, 0.333 without, margin +0.167 [-0.250, +0.500]"
    warning = (
        "with its skill the policy wins +0.167 [-0.250, +0.500] more of these games than without: distillation has "
        "nothing to give here"
    )
    assert teacher.told(measured(own)) == f"{line}\n  warning: {warning}"
    assert teacher.nothing_to_give(own["margin"]) == warning
    own["margin"]["interval"] = [0.01, 0.5]
    assert teacher.nothing_to_give(own["margin"]) is None
    assert teacher.told(measured(own, own)).endswith("[+0.010, +0.500]; 0.500 with wrong skills")
    own["margin"]["interval"] = [0.0, 0.5]
    assert teacher.nothing_to_give(own["margin"]), "an interval from zero does not say that it is ahead"


def test_a_student_that_wins_nothing_has_no_won_games_to_report():
    metrics = teacher.teacher_metrics(measured(teacher.compare(episodes([0, 0]), episodes([1, 0]))))
    assert "teacher/first_won" not in metrics and metrics["teacher/first_lost"] == 0.5
    assert "teacher/success_wrong" not in metrics


@pytest.mark.parametrize(
    ("families", "count", "expected"),
    [
        ("aabbb", 3, [0, 2, 1]),  # the first of each, then the second of each
        ("aabbb", 5, [0, 2, 1, 3, 4]),
        ("aabbb", 9, [0, 2, 1, 3, 4]),
        ("aabbb", 0, []),
        ("abcabc", 3, [0, 1, 2]),
        ("", 3, []),
    ],
)
def test_games_of_every_family_as_many(families, count, expected):
    assert teacher.in_turn(families, count) == expected


# -- which skill -------------------------------------------------------------------------------------------------------

TASKS = make_tasks("seen", 6)
BY_ID = {task.id: task for task in TASKS}
LIBRARY = load_folder(base.SKILLS / "alfworld_compact")


def say(command: str) -> str:
    return f"<think> </think> <action> {command} </action>"


def player(answer=lambda path: say("look"), source: str = "self_hindsight", pool=None, **changes) -> teacher.Player:
    config = quickstart.get_config("seed")
    config.hindsight.source = source
    skills = Skills(config, tiny.tokenizer())
    world = World(AlfworldDomain("compact"), pool or make_pool("envs.alfworld.engine:make"), 12, 4)
    made = teacher.Player(ScriptedSampler(answer), tiny.tokenizer(), world, skills, 0.4, 9, 20, 140)
    return made._replace(**changes)


def written() -> list[Episode]:
    """A bare episode of each task; the third has no skill."""
    made = [Episode(task.id, task.family, task.goal, i, i) for i, task in enumerate(TASKS)]
    for i, episode in enumerate(made):
        episode.skill = None if i == 2 else Skill("what happened", f"lesson {i} .", ((1, f"step {i}"),))
    return made


def texts(skills) -> list[str | None]:
    return [skill and skill.text for skill in skills]


def test_a_skill_of_every_kind():
    assert len({task.family for task in TASKS}) == 6 and len({task.goal for task in TASKS}) == 6
    own, before = written(), written()
    chosen = lambda kind, **options: teacher.chosen_skills(kind, player(**options), own, BY_ID)  # noqa: E731
    assert chosen("self") == [episode.skill for episode in before]
    domain = AlfworldDomain("compact")
    assert texts(chosen("true")) == [domain.true_skill(task) for task in TASKS]
    assert texts(chosen("wrong")) == ["lesson 1 .", "lesson 3 .", None, "lesson 4 .", "lesson 5 .", "lesson 0 ."]
    placebos = chosen("placebo")
    length = lambda text: len(tiny.tokenizer()(text, add_special_tokens=False)["input_ids"])  # noqa: E731
    assert placebos[2] is None
    for episode, placebo in zip(before, placebos, strict=True):
        if placebo:
            assert placebo.text.startswith("There") and length(placebo.text) == length(episode.skill.text)
    right = [LIBRARY.text(LIBRARY.names(task.family, "", "task_type")) for task in TASKS]
    assert texts(chosen("library", source="static_library")) == right
    assert own == before, "the caller's episodes stay as they are"


def test_copies_know_nothing_that_was_written():
    own = written()
    own[0].skill_error, own[1].written = "too_short", object()
    for one, copy in zip(own, teacher.copies(own), strict=True):
        assert (copy.skill, copy.skill_error, copy.written) == (None, None, None)
        assert (copy.task_id, copy.index, copy.won) == (one.task_id, one.index, one.won)
    assert own[0].skill is not None and own[0].skill_error == "too_short" and own[1].written is not None


def test_parts_of_a_skill():
    domain = AlfworldDomain("compact")
    skill = Skill("s", "mug is at shelf 1 . take it , heat it with microwave 1 .")
    part = lambda skill, name: teacher.only_part(skill, name, domain)  # noqa: E731
    assert part(skill, "all") is skill and part(None, "all") is part(None, "places") is None
    assert part(skill, "workflow") == Skill("s", "take it , heat it with microwave 1 .")
    assert part(skill, "places") == Skill("s", "mug is at shelf 1 .")
    assert part(Skill("", "take it ."), "places") is part(Skill("", "mug is at shelf 1 ."), "workflow") is None
    assert part(Skill("", None), "workflow") is part(Skill("", ""), "places") is None
    with pytest.raises(ValueError):
        part(skill, "summary")


# -- the same games ----------------------------------------------------------------------------------------------------


def walk(path) -> str:
    """Solves the games with odd numbers."""
    _, index, turn = path
    steps = TASKS[index].source["walkthrough"]
    return say(steps[turn] if index % 2 and turn < len(steps) else "look")


def test_the_same_games_with_the_same_keys_and_a_skill_in_the_prompt():
    own, skills = written(), [Skill("", "search the shelf ."), None, *[Skill("", "x")] * 4]
    bare = player(walk)
    result = evaluate(
        bare.sampler, bare.tokenizer, bare.world, TASKS, temperature=0.4, max_tokens=20, max_prompt_tokens=140, seed=9,
    )  # fmt: skip
    reader = player(walk)
    played = teacher.play_again(reader, own, skills, BY_ID)
    assert [(e.task_id, e.index, e.group, e.given) for e in played] == [
        (e.task_id, e.index, e.group, skill) for e, skill in zip(own, skills, strict=True)
    ]
    assert [e.won for e in played] == [False, True] * 3 == [e.won for e in result.own]
    key = lambda asked: (asked[2], asked[3], asked[1])  # noqa: E731  path, seed, sampling
    assert [sorted(map(key, asked)) for asked in reader.sampler.rounds] == [
        sorted(map(key, asked)) for asked in bare.sampler.rounds
    ]
    for plain, one, skill in zip(result.own, played, skills, strict=True):
        for old, turn in zip(plain.turns, one.turns, strict=True):
            text = insert_skill(old.prompt, skill.text, "compact") if skill else old.prompt
            assert turn.prompt == old.prompt and turn.prompt_ids == tok.encode_prompts(tiny.tokenizer(), [text])[0]
    assert all(not e.turns for e in own), "the first episodes stay as they are"


def test_a_repeat_has_a_stream_of_its_own():
    reader = player(walk)
    teacher.play_again(reader, written()[:1], [None], BY_ID, repeat=3)
    assert {path[0] for asked in reader.sampler.rounds for _, _, path, _ in asked} == {EVAL_STREAM + 3 * REPEAT_STRIDE}


def test_a_game_that_fails_is_an_error():
    class Broken:
        def open(self, slots, tasks):
            return [*make_pool("envs.alfworld.engine:make").open(slots, tasks)[:-1], EnvError("no such game")]

        def step(self, slots, commands):
            return [EnvError("crashed") for _ in slots]

    with pytest.raises(PanelError, match=r"6 of 6 games failed, first seen/mini/.*: crashed"):
        teacher.play_again(player(pool=Broken()), written(), [None] * 6, BY_ID)
    with pytest.raises(ValueError):
        teacher.play_again(player(), written(), [None] * 5, BY_ID)


def test_the_policy_writes_about_its_own_episodes():
    def answer(path):
        stream, index, _ = path
        if stream < 1 << 30:
            return say("look")
        skill = f"search for mug {index} first ." if index != 4 else ""
        return json.dumps({"episode_summary": "failure", "episode_skill": skill})

    writer = player(answer)
    own = teacher.play_again(writer, written(), [None] * 6, BY_ID)
    counts = teacher.write_skills(writer, own)
    assert counts["analyzed"] == 6 and counts["parsed"] == 5 and own[4].skill is None and own[4].skill_error
    assert [tok.decode(tiny.tokenizer(), [i]) for i in own[0].written.tokens[:1]]
    assert all(f"mug {e.index}" in e.skill.text for e in own if e.index != 4)


# -- in training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"eval.teacher_games": 0}, False),
        ({"distills": False}, False),
        ({"hindsight.source": "ground_truth"}, True),
        ({"hindsight.source": "peer_success"}, False),  # of one episode there are no others
        ({"hindsight.source": "group_reflection"}, False),
        ({"hindsight.source": "static_library"}, True),
        ({"hindsight.source": "static_library", "hindsight.at_eval": "both"}, True),
        ({"hindsight.source": "static_library", "hindsight.at_eval": "yes"}, False),  # no bare games
    ],
)
def test_when_a_run_measures_its_teacher(changes, expected):
    changes = dict(changes)
    distills, config = changes.pop("distills", True), quickstart.get_config("seed")
    config.update_from_flattened_dict(changes)
    skills = Skills(config, tiny.tokenizer(), solve=lambda task_id: [])
    assert teacher.measures(SimpleNamespace(config=config, distills=distills, skills=skills)) == expected


@pytest.mark.parametrize("control", ["none", "wrong_skill", "placebo", "true_skill"])
def test_what_is_measured_in_training(control):
    """Two games of the panel, with what the policy wrote about them or its control, and with wrong skills once."""
    config = quickstart.get_config("seed")
    config.hindsight.control, config.eval.teacher_games = control, 2
    answers = json.dumps({"episode_summary": "failure", "episode_skill": "search for mug first ."})
    made = player(lambda path: answers if path[0] >= 1 << 30 else walk(path))
    domain = made.world.domain
    skills = Skills(config, tiny.tokenizer(), truth=lambda task_id: domain.true_skill(BY_ID[task_id]))
    run = SimpleNamespace(
        config=config, sampler=made.sampler, tokenizer=made.tokenizer, skills=skills, on_turn=made.on_turn,
        setup=SimpleNamespace(world=made.world, panel=TASKS),
    )  # fmt: skip
    bare = teacher.play_again(made, written(), [None] * 6, BY_ID)
    before = [(e.won, len(e.turns), e.skill) for e in bare]
    made.sampler.rounds.clear()
    got = teacher.measure(run, bare, 0.4)
    assert [(e.won, len(e.turns), e.skill) for e in bare] == before
    assert (got["wrong"] is not None) == (control == "none") and got["self"]["coverage"] == 1.0
    assert got["self"]["games"] == 2 and got["self"]["student"]["success_rate"] == 0.5
    assert got["self"]["margin"]["success_rate"] == 0.0, "this policy does not listen"
    games = [asked for asked in made.sampler.rounds if asked[0][2] == (EVAL_STREAM, 0, 0)]
    assert [len(asked) for asked in games] == [2] * (1 + (control == "none"))
    read = tok.decode(tiny.tokenizer(), games[0][0][0]).lower()
    told = {"placebo": "there is nothing", "true_skill": domain.true_skill(TASKS[0])}
    assert told.get(control, "search for mug first .") in read
