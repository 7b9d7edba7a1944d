"""Generated games: deterministic, winnable, with habits to learn, and disjoint between splits."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections import Counter

import pytest

from envs.alfworld import engine, games, generate, household
from envs.alfworld.games import FAMILIES

HAS_ALFWORLD = importlib.util.find_spec("alfworld") is not None
needs_alfworld = pytest.mark.skipif(
    not HAS_ALFWORLD, reason="needs the packaged domain and grammar: pip install alfworld"
)

TYPES = {kind.lower(): kind for kind in household.RECEPTACLES_FOR}


def contents_at_start(game: dict) -> dict[str, list[str]]:
    """Receptacle name -> object names, found by visiting and opening every receptacle."""
    play = engine.make(game)
    found = {}
    for command in play.reset().admissible:
        if command.startswith("go to "):
            name = command.removeprefix("go to ")
            text = play.step(command).text
            if "is closed" in text:
                text = play.step(f"open {name}").text
            listed = text.split("you see ")[1].rstrip(".").replace("and a ", "a ").split(", ")
            found[name] = [item.removeprefix("a ") for item in listed if item != "nothing"]
    return found


def kind(name: str) -> str:
    return name.split(" ")[0]


def test_the_same_arguments_give_the_same_game():
    for family in FAMILIES:
        game = generate.make_game(family, 5)
        assert game == generate.make_game(family, 5)
        assert game["pddl_problem"] != generate.make_game(family, 6)["pddl_problem"]
        assert game == json.loads(json.dumps(game))


def test_determinism_does_not_depend_on_the_hash_seed():
    code = "from envs.alfworld import generate as g; import hashlib, json;"
    code += "print(hashlib.sha256(json.dumps([t.source for t in g.make_tasks('seen', 24)]).encode()).hexdigest())"
    digests = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1 and digests.pop().strip()


def test_generating_and_playing_imports_neither_alfworld_nor_jax():
    code = "import sys; from envs.alfworld import engine, generate;"
    code += "engine.make(generate.make_tasks('train', 1)[0].source).reset();"
    code += "print([name for name in ('alfworld', 'textworld', 'jax', 'seed_jax') if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("split", generate.FIRST_SEED)
@pytest.mark.parametrize("size", generate.SIZES)
def test_walkthroughs_win(split: str, size: str):
    for task in generate.make_tasks(split, 60, size):
        game = engine.make(task.source)
        assert not game.reset().won
        observations = [game.step(command) for command in game.walkthrough]
        assert all(obs.text != "Nothing happens." for obs in observations)
        assert [obs.won for obs in observations] == [False] * (len(observations) - 1) + [True]


def test_tasks_are_balanced_and_prefix_stable():
    tasks = generate.make_tasks("train", 62)
    counts = Counter(task.family for task in tasks)
    assert set(counts) == set(FAMILIES) and max(counts.values()) - min(counts.values()) <= 1
    assert tasks[:20] == generate.make_tasks("train", 20)
    assert all(task.goal == task.source["goal"] and task.id == task.source["id"] for task in tasks)


def test_splits_are_disjoint_and_unseen_holds_a_style_out():
    tasks = {split: generate.make_tasks(split, 120) for split in generate.FIRST_SEED}
    problems = {split: {task.source["pddl_problem"].split("(:objects")[1] for task in tasks[split]} for split in tasks}
    ids = [task.id for some in tasks.values() for task in some]
    assert len(ids) == len(set(ids))
    styles = {split: {task.source["style"] for task in tasks[split]} for split in tasks}
    assert styles["train"] == styles["seen"] and not styles["train"] & styles["unseen"]
    for one, other in (("train", "seen"), ("train", "unseen"), ("seen", "unseen")):
        assert not problems[one] & problems[other]


@pytest.mark.parametrize("split", generate.FIRST_SEED)
def test_the_target_starts_away_from_its_destination_and_appliance(split: str):
    for task in generate.make_tasks(split, 90):
        game = task.source
        holders = [kind(r) for r, items in contents_at_start(game).items() if game["object"] in map(kind, items)]
        assert holders and game["receptacle"] not in holders
        first = next(command for command in game["walkthrough"] if command.startswith("take "))
        appliance = (
            generate.PROCESSES[game["family"]].appliance.lower() if game["family"] in generate.PROCESSES else None
        )
        assert kind(first.split(" from ")[1]) != appliance


def test_mini_rooms_have_the_promised_size():
    rooms = [contents_at_start(task.source) for task in generate.make_tasks("train", 240)]
    assert 5.4 <= sum(map(len, rooms)) / len(rooms) <= 6.0
    for room in rooms:
        assert max(Counter(map(kind, room)).values()) <= 4
        assert (
            max(Counter(kind(item) for items in room.values() for item in items).values()) <= household.MAX_SAME_OBJECT
        )


@pytest.mark.parametrize("split", generate.FIRST_SEED)
def test_habits_hold_three_times_in_four(split: str):
    """Where a habitual place of the target is in the room, the target is in such a place with probability ~0.75."""
    present = hits = total = 0
    for task in generate.make_tasks(split, 600):
        game = task.source
        process = generate.PROCESSES.get(game["family"])
        habitual = {place.lower() for place in household.HABITS[TYPES[game["object"]]]} - {game["receptacle"]}
        habitual -= {process.appliance.lower()} if process else set()
        room = {kind(c.removeprefix("go to ")) for c in engine.make(game).reset().admissible if c.startswith("go to ")}
        start = next(kind(c.split(" from ")[1]) for c in game["walkthrough"] if c.startswith("take "))
        total += 1
        if habitual & room:
            present += 1
            hits += start in habitual
    assert present / total > 0.9
    assert 0.70 < hits / present < 0.80  # 600 games: standard error 0.018


def test_both_sentences_of_a_family_occur_and_name_object_and_receptacle():
    for family in FAMILIES:
        made = [generate.make_game(family, seed) for seed in range(20)]
        words = {game["goal"].replace(game["object"], "X").replace(game["receptacle"], "Y") for game in made}
        assert words == {s.format(object="X", receptacle="Y") for s in generate.SENTENCES[family]}


def test_the_number_of_a_receptacle_does_not_tell_where_the_target_is():
    """Among several receptacles of the target's type, the highest number is no more likely than chance."""
    chance = highest = 0.0
    for task in generate.make_tasks("train", 900):
        start = next(c.split(" from ")[1] for c in task.source["walkthrough"] if c.startswith("take "))
        names = [
            c.removeprefix("go to ") for c in engine.make(task.source).reset().admissible if c.startswith("go to ")
        ]
        same = sorted(name for name in names if kind(name) == kind(start))
        if len(same) > 1:
            chance += 1 / len(same)
            highest += start == same[-1]
    assert abs(highest - chance) < 4 * chance**0.5 and chance > 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"family": "pick_three"}, "family 'pick_three'"),
        ({"size": "huge"}, "size 'huge'"),
        ({"split": "test"}, "split 'test'"),
    ],
)
def test_bad_arguments(arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        generate.make_game(**{"family": FAMILIES[0], "seed": 1, **arguments})


@pytest.mark.parametrize(("split", "count"), [("train", 0), ("train", -3), ("train", 10**9), ("dev", 6)])
def test_bad_task_requests(split: str, count: int):
    with pytest.raises(ValueError):
        generate.make_tasks(split, count)


@needs_alfworld
def test_written_games_are_played_by_both_engines(tmp_path, capsys):
    generate.main(["--out", str(tmp_path), "--games", "6", "--size", "tiny", "--split", "unseen"])
    assert "wrote 6 games" in capsys.readouterr().out
    listed = games.list_games(tmp_path, "unseen")
    assert sorted(game.family for game in listed) == sorted(FAMILIES)
    expected = {task.goal for task in generate.make_tasks("unseen", 6, "tiny")}
    assert {game.goal for game in listed} == expected
    data = games.load_json(listed[0].path)
    assert set(data) == set(games.GAME_KEYS) and data["solvable"] is True
    engines = [engine.make(listed[0].path), engine.make(str(listed[0].path), "textworld")]
    assert engines[0].reset() == engines[1].reset()
    for command in engines[0].walkthrough:
        assert engines[0].step(command) == engines[1].step(command)
    assert engines[0].step("look").won


@needs_alfworld
def test_all_splits_at_once_and_requests_that_cannot_be_met(tmp_path, capsys):
    generate.main([f"--out={tmp_path}", "--games=7", "--size=tiny", "--split=all"])
    for split in generate.FIRST_SEED:
        listed = games.list_games(tmp_path, split)
        assert len(listed) == 7 and all(engine.engine_for(game.path) == "native" for game in listed)
    (tmp_path / "file").write_text("")
    for arguments, message in (
        (["--games=0"], "count must be between"),
        ([f"--out={tmp_path / 'file'}"], "Not a directory"),
    ):
        with pytest.raises(SystemExit):
            generate.main([f"--out={tmp_path}", "--games=1", *arguments])
        assert message in capsys.readouterr().err


@needs_alfworld
def test_write_game_is_repeatable(tmp_path):
    game = generate.make_game(FAMILIES[0], 4)
    path = generate.write_game(game, tmp_path)
    text = path.read_text()
    assert generate.write_game(game, tmp_path) == path and path.read_text() == text
    assert path.relative_to(tmp_path).parts[0] == "train" and path.parent.parent.name == game["directory"]
