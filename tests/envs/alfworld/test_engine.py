"""The native engine against TextWorld's, and its answers to damaged games and odd commands."""

from __future__ import annotations

import importlib.util
import json
import pickle
import random
import sys

import pytest

from envs.alfworld import engine, generate, parity, translation
from envs.alfworld.games import FAMILIES
from envs.alfworld.problem import CorruptGame, display_names, parse_problem

HAS_TEXTWORLD = all(importlib.util.find_spec(name) for name in ("alfworld", "textworld", "fast_downward"))
needs_textworld = pytest.mark.skipif(not HAS_TEXTWORLD, reason="plays TextWorld's engine: pip install alfworld")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(translation.CACHE_VARIABLE, str(tmp_path / "cache"))


# What generated games lack: receptacles sharing a place, a knife, something to slice, an object that holds another,
# a lamp in a closed drawer, a receptacle open from the start, an id without "_bar_".
ODD_ROOM = """
(define (problem odd) (:domain alfred)
 (:objects agent1 - agent  here there loc_bar_desk - location
   Drawer_bar_1 Shelf_bar_1 Shelf_bar_2 Sink_bar_1_bar_SinkBasin Microwave_bar_1 Fridge_bar_1 - receptacle
   Apple_bar_1 Apple_bar_2 Knife_bar_1 Bowl_bar_1 Egg_bar_1 DeskLamp_bar_1 Trinket - object
   DrawerType ShelfType SinkBasinType MicrowaveType FridgeType - rtype
   AppleType KnifeType ButterKnifeType BowlType EggType DeskLampType TrinketType - otype)
 (:init (atLocation agent1 here)
   (receptacleType Drawer_bar_1 DrawerType)
   (receptacleType Shelf_bar_1 ShelfType) (receptacleType Shelf_bar_2 ShelfType)
   (receptacleType Sink_bar_1_bar_SinkBasin SinkBasinType) (receptacleType Microwave_bar_1 MicrowaveType)
   (receptacleType Fridge_bar_1 FridgeType) (openable Fridge_bar_1) (opened Fridge_bar_1)
   (openable Drawer_bar_1) (openable Microwave_bar_1)
   (receptacleAtLocation Drawer_bar_1 loc_bar_desk) (receptacleAtLocation Shelf_bar_1 loc_bar_desk)
   (receptacleAtLocation Shelf_bar_2 there) (receptacleAtLocation Sink_bar_1_bar_SinkBasin there)
   (receptacleAtLocation Microwave_bar_1 there) (receptacleAtLocation Fridge_bar_1 there)
   (objectType Apple_bar_1 AppleType) (objectType Apple_bar_2 AppleType) (objectType Knife_bar_1 KnifeType)
   (objectType Bowl_bar_1 BowlType) (objectType Egg_bar_1 EggType) (objectType DeskLamp_bar_1 DeskLampType)
   (objectType Trinket TrinketType)
   (inReceptacle Apple_bar_1 Shelf_bar_1) (inReceptacle Apple_bar_2 Fridge_bar_1) (inReceptacle Knife_bar_1 Shelf_bar_2)
   (inReceptacle Bowl_bar_1 Shelf_bar_1) (inReceptacle Egg_bar_1 Shelf_bar_1) (inReceptacle DeskLamp_bar_1 Drawer_bar_1)
   (inReceptacle Trinket Drawer_bar_1)
   (objectAtLocation Apple_bar_1 loc_bar_desk) (objectAtLocation Apple_bar_2 there) (objectAtLocation Knife_bar_1 there)
   (objectAtLocation Bowl_bar_1 loc_bar_desk) (objectAtLocation Egg_bar_1 loc_bar_desk)
   (pickupable Apple_bar_1) (pickupable Apple_bar_2) (pickupable Knife_bar_1) (pickupable Bowl_bar_1)
   (pickupable Egg_bar_1) (pickupable Trinket) (toggleable DeskLamp_bar_1)
   (sliceable Apple_bar_1) (sliceable Apple_bar_2)
   (isReceptacleObject Bowl_bar_1) (inReceptacleObject Egg_bar_1 Bowl_bar_1)
   (cleanable Apple_bar_1) (heatable Apple_bar_1) (coolable Apple_bar_1) (cleanable Knife_bar_1) (coolable Egg_bar_1)
   (canContain ShelfType AppleType) (canContain ShelfType KnifeType) (canContain DrawerType KnifeType)
   (canContain ShelfType BowlType) (canContain FridgeType AppleType) (canContain MicrowaveType AppleType)
   (canContain DrawerType AppleType) (canContain ShelfType EggType))
 (:goal (exists (?r - receptacle) (exists (?o - object) (and (coolable ?o) (isCool ?o) (objectType ?o AppleType)
   (receptacleType ?r DrawerType) (inReceptacle ?o ?r))))))
"""
ODD_GAME = {"id": "odd", "goal": "put a cool apple in drawer", "pddl_problem": ODD_ROOM, "walkthrough": None}


def assert_same_play(source: dict, player: parity.Player, steps: int, other: str = "pip") -> None:
    """Both engines must give the same Obs (text, admissible commands, won, done, reward) at every step."""
    answers, difference = parity.walk(source["id"], engine.make(source), engine.make(source, other), player, steps)
    assert difference is None, difference
    assert answers == steps + 1


@needs_textworld
@pytest.mark.slow
@pytest.mark.parametrize("size", ["tiny", "mini", "small"])
@pytest.mark.parametrize("family", FAMILIES)
def test_parity_with_textworld(family: str, size: str):
    game = generate.make_game(family, 11 + FAMILIES.index(family), size, "train" if size == "mini" else "unseen")
    other = "pip" if size == "tiny" else "textworld"  # which equal each other: test_textworld.py
    assert_same_play(game, parity.random_player(FAMILIES.index(family)), 40, other)
    plan = game["walkthrough"]
    assert_same_play(game, parity.follow(plan), len(plan), other)


@needs_textworld
@pytest.mark.slow
@pytest.mark.parametrize("other", ["pip", "textworld"])
def test_parity_with_textworld_in_an_odd_room(other):
    assert_same_play(ODD_GAME, parity.random_player(5), 80, other)
    plan = ["go to shelf 2", "open drawer 1", "use desklamp 1", "look", "take apple 2 from shelf 2", "examine apple 2"]
    plan += [
        "move apple 2 to drawer 1",
        "look",
        "take apple 2 from drawer 1",
        "go to fridge 1",
        "heat apple 2 with microwave 1",
    ]
    plan += ["examine apple 2", "cool apple 2 with fridge 1", "examine apple 2", "clean apple 2 with sinkbasin 1"]
    plan += ["examine apple 2", "move apple 2 to shelf 1", "take knife 1 from shelf 1", "slice apple 2 with knife 1"]
    plan += [
        "move knife 1 to shelf 1",
        "take apple 2 from shelf 1",
        "examine apple 2",
        "inventory",
        "look",
        "close fridge 1",
    ]
    plan += ["go to drawer 1", "move apple 2 to drawer 1", "look", "take bowl 1 from shelf 2", "examine bowl 1"]
    plan += ["take trinket  from drawer 1", "help"]
    assert_same_play(ODD_GAME, parity.follow(plan), len(plan), other)


def kitchen() -> dict:
    return generate.make_game("pick_cool_then_place_in_recep", 3)


def test_winning_pays_once_and_reset_starts_over():
    game = engine.make(kitchen())
    first = game.reset()
    assert game.goal in first.text and first.text.endswith(f"Your task is to: {game.goal}.")
    for _ in range(2):
        observations = [game.step(command) for command in game.walkthrough]
        assert [obs.reward for obs in observations] == [0.0] * (len(observations) - 1) + [10.0]
        assert [obs.won for obs in observations] == [obs.done for obs in observations]
        assert observations[-1].won
        after = game.step("look")
        assert after.won and after.reward == 0.0
        assert game.reset() == first


def test_admissible_commands_are_sorted_unique_and_carried_out():
    game = engine.make(kitchen())
    obs, rng = game.reset(), random.Random(0)
    for _ in range(60):
        assert list(obs.admissible) == sorted(set(obs.admissible))
        obs = game.step(rng.choice(obs.admissible))
        assert obs.text != "Nothing happens."


@pytest.mark.parametrize(
    "command", [*[c for c in parity.ODD_COMMANDS if c.strip() != "look"], None, 3, b"look", ["look"], "x" * 5000]
)
def test_inadmissible_commands_change_nothing(command):
    game, twin = engine.make(kitchen()), engine.make(kitchen())
    before = game.reset()
    twin.reset()
    obs = game.step(command)
    assert obs == before._replace(text="Nothing happens.", reward=0.0)
    for step in game.walkthrough:
        assert game.step(step) == twin.step(step)


def test_closed_receptacles_hide_and_hands_hold_one_object():
    game = engine.make(ODD_GAME)
    game.reset()
    obs = game.step("go to drawer 1")
    assert obs.text == "You arrive at drawer 1. The drawer 1 is closed."
    assert not any(command.startswith("take trinket") for command in obs.admissible)
    assert "use desklamp 1" in obs.admissible  # a closed door does not hide a switch in the real engine
    obs = game.step("take apple 2 from shelf 2")
    assert not any(command.startswith("take ") for command in obs.admissible)


def test_heat_and_cool_undo_each_other():
    game = engine.make(ODD_GAME)
    game.reset()
    for command in ("go to shelf 2", "take apple 2 from shelf 2", "go to fridge 1", "cool apple 2 with fridge 1"):
        game.step(command)
    assert game.step("examine apple 2").text == "This is a cold apple 2."
    game.step("heat apple 2 with microwave 1")
    assert game.step("examine apple 2").text == "This is a hot apple 2."
    for command in ("go to drawer 1", "open drawer 1"):
        game.step(command)
    assert not game.step("move apple 2 to drawer 1").won  # hot, not cool


def test_numbers_are_handed_out_from_the_highest_down():
    ids = {"cup_bar_1", "cup_bar_7", "cup_bar_9", "sink_bar_3_bar_sinkbasin", "sink_bar_3", "thing"}
    assert display_names(ids) == {
        "cup_bar_1": "cup 3", "cup_bar_7": "cup 2", "cup_bar_9": "cup 1",
        "sink_bar_3": "sink 1", "sink_bar_3_bar_sinkbasin": "sinkbasin 1", "thing": "thing ",
    }  # fmt: skip


DAMAGE = {
    "cut off": (lambda text: text[: text.index("(:goal") + 40], "cut off"),
    "empty": (lambda text: "", "(:objects"),
    "no goal": (lambda text: text.replace("(:goal", "(:aim"), "(:goal"),
    "unknown predicate": (lambda text: text.replace("(pickupable ", "(grabbable ", 1), "grabbable"),
    "undeclared name": (lambda text: text.replace("(openable ", "(openable ghost_", 1), "ghost_"),
    "ill-typed fact": (lambda text: text.replace("(openable fridge", "(openable apple", 1), "openable apple"),
    "stray text": (lambda text: text.replace("(:init", "(:init stray", 1), "outside of parentheses"),
    "untyped object": (lambda text: text.replace("(:objects", "(:objects a b -", 1), "(:objects"),
    "no agent place": (lambda text: text.replace("(atlocation agent1 here)", "", 1), "atLocation"),
    "other goal": (lambda text: text.replace("(coolable ?o)", "(sliceable ?o)", 1), "none of ALFWorld's six"),
    "absent object": (lambda text: text.replace("(objecttype ?o appletype)", "(objecttype ?o cattype)"), "cattype"),
    "absent place": (
        lambda text: text.replace("(receptacletype ?r drawertype)", "(receptacletype ?r bathtype)"),
        "bathtype",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_problems_are_named(name: str):
    damage, reason = DAMAGE[name]
    parse_problem(ODD_ROOM)
    text = damage(ODD_ROOM.lower())
    assert text != ODD_ROOM.lower()
    with pytest.raises(CorruptGame) as caught:
        engine.make({**ODD_GAME, "pddl_problem": text})
    assert caught.value.path == "odd" and reason in caught.value.reason


def test_corrupt_game_crosses_processes():
    error = pickle.loads(pickle.dumps(CorruptGame("a/game.tw-pddl", "is cut off")))
    assert (error.path, error.reason, str(error)) == ("a/game.tw-pddl", "is cut off", "a/game.tw-pddl: is cut off")


def test_a_dict_without_problem_is_refused():
    with pytest.raises(CorruptGame, match="pddl_problem"):
        engine.make({"id": "x", "goal": "put a cup on shelf"})


def test_comments_and_a_superfluous_parenthesis_are_accepted():
    text = (
        ODD_ROOM.replace("(:init", "; a remark (with a parenthesis\n (:init") + ")"
    )  # official files close one too many
    assert parse_problem(text) == parse_problem(ODD_ROOM)


def test_games_survive_json():
    game = kitchen()
    assert engine.make(json.loads(json.dumps(game))).reset() == engine.make(game).reset()


def test_unknown_engine():
    with pytest.raises(ValueError, match=r"'jericho'.*native, textworld"):
        engine.make(kitchen(), "jericho")


def test_missing_textworld_says_how_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "textworld", None)
    monkeypatch.setattr(engine, "packaged_texts", lambda goal: {"pddl_domain": "", "grammar": ""})
    with pytest.raises(ImportError, match="pip install alfworld"):
        engine.make(kitchen(), "textworld")


@needs_textworld
def test_textworld_errors_name_the_game():
    with pytest.raises(CorruptGame, match="odd: TextWorld cannot load it"):
        engine.make({**ODD_GAME, "pddl_problem": ODD_ROOM[:900]}, "textworld")
