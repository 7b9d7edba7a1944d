"""The rule-based player and annotator: strong enough to teach, honest about what they saw, never crashing."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.alfworld.domain import AlfworldDomain
from envs.alfworld.engine import make
from envs.alfworld.games import FAMILIES
from envs.alfworld.generate import make_game, make_tasks
from envs.alfworld.planner import LIGHT, PROCESS, TWO, Hint, Planner, annotate, kind, read_hint, skill_parts

GAMES = [task.source for task in make_tasks("train", 60)]


def play(game, seed=0, steps=12, **options) -> tuple[list[tuple[str, str]], bool]:
    """(command, observation) of each step, and whether the game was won."""
    player, world = Planner(game, random.Random(seed), **options), make(game)
    observation, command, taken = world.reset(), None, []
    while len(taken) < steps and not observation.won:
        player.note(command, observation.text)
        _, command = player.act(observation.admissible)
        assert command in observation.admissible
        observation = world.step(command)
        taken.append((command, observation.text))
    return taken, observation.won


def walk(game) -> list[tuple[str, str]]:
    world = make(game)
    world.reset()
    return [(command, world.step(command).text) for command in game["walkthrough"]]


def test_expert_wins():
    assert sum(play(game, seed)[1] for seed, game in enumerate(GAMES)) >= 48


def test_expert_wins_every_game_in_time():
    assert all(play(game, seed, steps=50)[1] for seed, game in enumerate(GAMES[:18]))


def test_forgetting_the_process_step_loses_exactly_those_families():
    for seed, game in enumerate(GAMES[:24]):
        steps, won = play(game, seed, steps=50, skip_process=True)
        verb = PROCESS.get(game["family"], ("none",))[0]
        assert won == (game["family"] not in PROCESS)
        assert not any(command.startswith(f"{verb} ") for command, _ in steps)


def test_known_place_is_searched_first_and_avoided_places_last():
    for seed, game in enumerate(GAMES):
        source = next(c for c in game["walkthrough"] if c.startswith("go to "))
        assert play(game, seed, steps=1, known=source[len("go to ") :])[0][0][0] == source
        places = {c[len("go to ") :] for c in make(game).reset().admissible if c.startswith("go to ")}
        allowed = next(place for place in sorted(places) if kind(place) != game["receptacle"])
        first = play(game, seed, steps=1, avoid=frozenset(places - {allowed}))[0][0][0]
        assert first == f"go to {allowed}"


def test_hints_help():
    steps = {True: 0, False: 0}
    for seed, game in enumerate(GAMES):
        known, avoid, _ = read_hint(annotate(game, walk(game), True)[1], game)
        for hinted in (True, False):
            taken, _ = play(game, seed, known=known if hinted else None, avoid=avoid if hinted else frozenset())
            steps[hinted] += len(taken)
    assert steps[True] < 0.85 * steps[False]


def test_thoughts_do_not_reveal_a_hint():
    """Two players see the same; one was told where the object is. They may act differently, they think the same."""
    for seed, game in enumerate(GAMES):
        known = read_hint(annotate(game, walk(game), True)[1], game).known
        assert known
        told, plain = Planner(game, random.Random(1), known=known), Planner(game, random.Random(2))
        avoiding = Planner(game, random.Random(3), avoid=frozenset({known}))
        rng, world, command = random.Random(seed), make(game), None
        observation = world.reset()
        for _ in range(12):
            for player in (told, plain, avoiding):
                player.note(command, observation.text)
            decisions = [player.act(observation.admissible) for player in (told, plain, avoiding)]
            assert len({thought for thought, _ in decisions}) == 1
            command = rng.choice([decision for _, decision in decisions])
            observation = world.step(command)
            if observation.won:
                break


# -- skills ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_skill_after_a_success_names_the_workflow(family):
    game = make_game(family, 11)
    source = next(c for c in game["walkthrough"] if c.startswith("go to "))[len("go to ") :]
    summary, skill = annotate(game, walk(game), won=True)
    assert summary == "success" and skill.startswith(f"{game['object']} is at {source} . take it ,")
    if family in PROCESS:
        verb, appliance = PROCESS[family]
        used = next(c for c in game["walkthrough"] if c.startswith(verb)).split(" with ")[1]
        assert kind(used) == appliance
        assert f"{verb} it with {used} , then move it to {game['receptacle']} 1 ." in skill
    elif family == LIGHT:
        assert skill.endswith("then use desklamp .")
    else:
        assert f"then move it to {game['receptacle']} 1 ." in skill
    assert ("repeat with the second" in skill) == (family == TWO)
    assert read_hint(skill, game) == Hint(source, frozenset(), workflow=family != "pick_and_place_simple")


def test_skill_after_a_failure_names_what_was_missing():
    """The whole workflow, and of what the episode has not done the first step as a reminder."""
    game = make_game("pick_heat_then_place_in_recep", 3)
    wanted, target, steps = game["object"], game["receptacle"], walk(game)
    take = next(i for i, (command, _) in enumerate(steps) if command.startswith("take "))
    heat = next(i for i, (command, _) in enumerate(steps) if command.startswith("heat "))
    assert annotate(game, steps[:take], won=False) == (
        "failure", f"{wanted} is at {steps[0][0][len('go to ') :]} . do not forget to take it , "
        f"heat it with microwave 1 , then move it to {target} 1 .",
    )  # fmt: skip
    skill = annotate(game, [*steps[: take + 1], *steps[heat + 1 :]], won=False)[1]
    assert skill.endswith(f"take it , do not forget to heat it with microwave 1 , then move it to {target} 1 .")
    heated = annotate(game, steps[: heat + 1], won=False)[1]
    assert heated.endswith(f"take it , {steps[heat][0].replace(wanted + ' 1', 'it')} , then move it to {target} 1 .")
    two = make_game(TWO, 3)
    assert annotate(two, walk(two)[:-1], won=False)[1].endswith(
        f"take it , then move it to {two['receptacle']} 1 . do not forget the second {two['object']} ."
    )
    light = make_game(LIGHT, 3)
    assert annotate(light, walk(light)[:-1], won=False)[1].endswith("do not forget to use desklamp .")


def test_skill_of_a_search_that_found_nothing_says_where_not_to_look():
    game = make_game("pick_and_place_simple", 5)
    source = next(c for c in game["walkthrough"] if c.startswith("go to "))
    world = make(game)
    elsewhere = [
        c
        for c in world.reset().admissible
        if c.startswith("go to ") and c != source and kind(c[len("go to ") :]) != game["receptacle"]
    ]
    steps = [step for step in ((c, world.step(c).text) for c in elsewhere) if "a " + game["object"] not in step[1]][:2]
    assert steps
    skill = annotate(game, steps, won=False)[1]
    visited = [command[len("go to ") :] for command, _ in steps]
    workflow = f"take it , then move it to {game['receptacle']} 1 ."
    assert skill == f"avoid {' , '.join(visited)} . look for {game['object']} elsewhere . {workflow}"
    assert read_hint(skill, game) == Hint(None, frozenset(visited))
    nothing = annotate(game, [("", "Nothing happens.")], won=False)[1]
    assert nothing == f"search for {game['object']} first . {workflow}"
    assert read_hint(nothing, game) == Hint()


def names_workflow(game: dict, skill: str) -> bool:
    """Whether a skill names all that a player of the game's family must do."""
    family = game["family"]
    verb, appliance = PROCESS.get(family, ("", ""))
    parts = ["take it ,", "use desklamp" if family == LIGHT else f"then move it to {game['receptacle']} 1 ."]
    parts += [f"{verb} it with {appliance} "] * (family in PROCESS)
    parts += [f"the second {game['object']} ."] * (family == TWO)
    return all(part in skill for part in parts)


def test_every_skill_names_object_and_workflow():
    """Of whatever part of an episode it is written: its start, all of it, or what is left if a step was forgotten."""
    for game in GAMES[:24]:
        steps = walk(game)
        beginnings = [steps[:count] for count in range(len(steps))]
        gaps = [[*steps[:i], *steps[i + 1 :]] for i in range(len(steps))]
        for part in (*beginnings, *gaps):
            summary, skill = annotate(game, part, won=False)
            assert summary == "failure" and game["object"] in skill and names_workflow(game, skill), skill
        assert names_workflow(game, annotate(game, steps, won=True)[1])


# -- what a skill tells ------------------------------------------------------------------------------------------------


def test_a_skill_about_something_else_tells_nothing():
    """What is said of another object or of another family's step is no hint, even where the words are alike."""
    skills = {family: annotate(game := make_game(family, 11), walk(game), True)[1] for family in FAMILIES}
    for family in FAMILIES:
        for other, skill in skills.items():
            game = {"family": family, "object": "spoon", "receptacle": "shelf"}
            assert "spoon" not in skill
            assert read_hint(skill, game) == Hint(workflow=family == other and family in (*PROCESS, LIGHT)), skill
    knife = {"family": TWO, "object": "knife", "receptacle": "shelf"}
    for skill in (
        "butterknife is at drawer 1 .", "avoid bed 1 . look for butterknife elsewhere .", "knife is at hand .",
        "repeat with the second butterknife .", "knife is at drawer", "", "knife",
    ):  # fmt: skip
        assert read_hint(skill, knife) == Hint(), skill
    assert read_hint("now . knife is at drawer 1 . repeat with the second knife .", knife) == Hint(
        "drawer 1", frozenset(), True
    )


def test_the_workflow_makes_a_forgetful_player_remember():
    """`Hint.workflow` is what a player that would skip the process step needs to know."""
    for seed, game in enumerate(GAMES[:12]):
        hint = read_hint(annotate(game, walk(game)[:1], won=False)[1], game)
        won = play(game, seed, steps=50, skip_process=not hint.workflow)[1]
        assert won and hint.workflow == (game["family"] != "pick_and_place_simple")


def test_parts_of_a_skill():
    """Together they are the skill; one tells where things are and the other what to do, and neither tells both."""
    domain = AlfworldDomain("compact")
    for game in GAMES[:24]:
        steps = walk(game)
        for part, won in (([], False), (steps[:1], False), (steps, True)):
            skill = annotate(game, part, won)[1]
            workflow, places = skill_parts(skill)
            assert sorted(f"{workflow} {places}".split()) == sorted(skill.split())
            whole = read_hint(skill, game)
            assert read_hint(workflow, game) == Hint(workflow=whole.workflow)
            assert read_hint(places, game) == whole._replace(workflow=False)
            assert names_workflow(game, workflow) and domain.skill_parts(skill) == (workflow, places)


@pytest.mark.parametrize(
    ("skill", "parts"),
    [
        ("", ("", "")),
        (" \n ", ("", "")),
        ("mug is at shelf 1 .", ("", "mug is at shelf 1 .")),
        ("search for mug first .", ("search for mug first .", "")),
        ("avoid bed 1 , bed 2 . look for mug elsewhere .", ("", "avoid bed 1 , bed 2 . look for mug elsewhere .")),
        ("take it ,  mug is at shelf 1 .  then go . ", ("then go .", "take it ,  mug is at shelf 1 .")),
        ("no full stop", ("no full stop", "")),
    ],
)
def test_parts_of_single_sentences(skill, parts):
    assert skill_parts(skill) == parts


def test_skills_of_own_failures_are_followed():
    """Whatever skill an episode leaves, a player that reads it never searches a place it is told to avoid first."""
    for seed, game in enumerate(GAMES):
        steps, won = play(game, seed, steps=3)
        known, avoid, _ = read_hint(annotate(game, steps, won)[1], game)
        first = play(game, seed + 1, steps=1, known=known, avoid=avoid)[0][0][0][len("go to ") :]
        assert first == known if known else first not in avoid


PIECES = st.sampled_from(
    ["go to ", "take ", "take x", "move ", "clean", "heat mug 1", "use desklamp", "mug 1", " from ", " with ", " to ",
     "shelf 1", "fridge 1", "", " ", "open", "\n", "examine", "1", "go to shelf 1", "mug 1 from shelf 1", "x" * 300]
)  # fmt: skip
COMMANDS = st.lists(PIECES, max_size=5).map("".join) | st.text(max_size=30)
OBSERVATIONS = st.sampled_from(
    ["Nothing happens.", "You arrive at shelf 1. On the shelf 1, you see a mug 1, and a desklamp 1.", "You clean", "",
     "You heat the mug 1 using the microwave 1.", "You pick up the mug 1 from the shelf 1.", "You open the fridge 1."]
) | st.text(max_size=40)  # fmt: skip


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    family=st.sampled_from(FAMILIES), steps=st.lists(st.tuples(COMMANDS, OBSERVATIONS), max_size=8), won=st.booleans()
)
def test_annotator_survives_anything(family, steps, won):
    game = {"family": family, "object": "mug", "receptacle": "shelf"}
    summary, skill = annotate(game, steps, won)
    assert summary == ("success" if won else "failure") and "mug" in skill and len(skill.split()) >= 3
    read_hint(skill, game)
    assert sorted(" ".join(skill_parts(skill)).split()) == sorted(skill.split())


@settings(max_examples=80, deadline=None, derandomize=True)
@given(index=st.integers(0, 11), commands=st.lists(COMMANDS, max_size=8), seed=st.integers(0, 99))
def test_player_survives_commands_that_were_not_its_own(index, commands, seed):
    game, rng = GAMES[index], random.Random(seed)
    player, world = Planner(game, rng), make(game)
    player.note(None, world.reset().text)
    for command in commands:
        chosen = command if rng.random() < 0.5 else rng.choice(world.step("look").admissible)
        observation = world.step(chosen)
        player.note(chosen, observation.text)
        if observation.won:
            return
        assert player.act(observation.admissible)[1] in observation.admissible


@settings(max_examples=80, deadline=None, derandomize=True)
@given(steps=st.lists(st.tuples(COMMANDS, OBSERVATIONS), max_size=8), index=st.integers(0, 11))
def test_player_survives_any_report(steps, index):
    player, admissible = Planner(GAMES[index], random.Random(0)), make(GAMES[index]).reset().admissible
    for command, observation in steps:
        player.note(command, observation)
        assert player.act(admissible)[1] in admissible


def test_skills_of_the_domain_come_from_dicts_and_files_alike(tmp_path):
    from tests import tiny

    tasks, paths = make_tasks("train", 12), tiny.write_games(tmp_path, "train", 12)
    domain = AlfworldDomain("compact")
    for task, path in zip(tasks, paths, strict=True):
        skill = domain.true_skill(task)
        assert skill == annotate(task.source, walk(task.source), True)[1]
        assert domain.true_skill(task._replace(source=str(path))) == skill
