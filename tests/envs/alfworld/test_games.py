"""Reading game directories, and what happens to damaged files."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from envs.alfworld import engine, games, generate, manifest
from envs.alfworld.problem import CorruptGame

GRAMMAR = """grammar :: {{"task": [{{"rhs": "Your task is to: {goal}."}}]}};
action PutObject {{
    template :: "{verb} {{o}} to {{r}}";
}}
"""


def file_content(game: dict, verb: str = "move") -> dict:
    return {
        "pddl_domain": "(define (domain alfred))",
        "grammar": GRAMMAR.format(goal=game["goal"], verb=verb),
        "pddl_problem": game["pddl_problem"],
        "solvable": True,
        "walkthrough": game["walkthrough"],
    }


def write(root: Path, directory: str, trial: str, text: str, split: str = "train") -> Path:
    path = root / split / directory / trial / games.GAME_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def fill(root: Path, count: int, split: str = "train") -> list[Path]:
    made = [task.source for task in generate.make_tasks("train", count, "tiny")]
    return [write(root, g["directory"], f"trial_{g['seed']}", json.dumps(file_content(g)), split) for g in made]


def test_lists_every_game_once_in_path_order(tmp_path):
    paths = fill(tmp_path, 18)
    listed = games.list_games(tmp_path, "train")
    assert [game.path for game in listed] == sorted(paths)
    assert {game.family for game in listed} == set(games.FAMILIES)
    goals = {task.goal for task in generate.make_tasks("train", 18, "tiny")}
    assert {game.goal for game in listed} == goals
    for game in listed:
        play = engine.make(game.path)
        play.reset()
        assert play.goal == game.goal and play.step(play.walkthrough[0]).text != "Nothing happens."


@pytest.mark.parametrize(("alias", "directory"), [("seen", "valid_seen"), ("unseen", "valid_unseen")])
def test_split_aliases(tmp_path, alias: str, directory: str):
    fill(tmp_path, 6, directory)
    assert games.list_games(tmp_path, alias) == games.list_games(str(tmp_path), directory)


def test_sliced_movable_and_unsolvable_games_are_left_out(tmp_path):
    [path] = fill(tmp_path, 1)
    content = json.loads(path.read_text())
    write(tmp_path, "pick_and_place_simple-AppleSliced-None-Fridge-1", "trial_1", json.dumps(content))
    write(tmp_path, "pick_and_place_with_movable_recep-Apple-Bowl-Fridge-1", "trial_1", json.dumps(content))
    write(tmp_path, "pick_and_place_simple-Apple-None-Fridge-1", "trial_1", json.dumps({**content, "solvable": False}))
    (tmp_path / "train" / "notes.txt").write_text("not a directory")
    (tmp_path / "train" / "pick_and_place_simple-Apple-None-Fridge-2" / "trial_without_game").mkdir(parents=True)
    assert [game.path for game in games.list_games(tmp_path, "train")] == [path]


def test_tasks_are_stable_small_and_playable(tmp_path):
    fill(tmp_path, 6)
    tasks, skipped = games.load_tasks(tmp_path, "train", strict=True)
    assert skipped == [] and len({task.id for task in tasks}) == 6
    assert all(task.id.startswith("train/") and str(tmp_path) not in task.id for task in tasks)
    assert all(engine.make(task.source).goal == task.goal for task in tasks)


@pytest.mark.parametrize("missing", ["root", "split", "games"])
def test_missing_data_says_how_to_get_it(tmp_path, missing: str):
    if missing == "split":
        fill(tmp_path, 1)
    elif missing == "games":
        (tmp_path / "valid_seen" / "pick_and_place_simple-Apple-None-Fridge-1").mkdir(parents=True)
    root = tmp_path / "nowhere" if missing == "root" else tmp_path
    with pytest.raises(FileNotFoundError) as caught:
        games.list_games(root, "seen")
    message = str(caught.value)
    assert str(root / "valid_seen") in message and "json_2.1.2_tw-pddl.zip" in message and "generated games" in message


def test_the_variable_names_the_games_and_what_they_were_unpacked_into(tmp_path, monkeypatch):
    monkeypatch.delenv(games.DATA_VARIABLE, raising=False)
    with pytest.raises(
        FileNotFoundError, match=r"ALFWORLD_DATA is not set\. Download the games with: export ALFWORLD_DATA="
    ):
        games.list_games(None, "train")
    paths = fill(tmp_path / "json_2.1.1", 6)
    monkeypatch.setenv(games.DATA_VARIABLE, str(tmp_path))
    listed = games.list_games(None, "train")
    assert [game.path for game in listed] == sorted(paths)
    assert games.list_games(tmp_path, "train") == games.list_games(tmp_path / "json_2.1.1", "train") == listed
    assert {task.id.split("/")[0] for task in games.load_tasks(None, "train")[0]} == {"train"}


def test_fractions_are_nested_and_fair_to_families(tmp_path):
    tasks = [task for task in generate.make_tasks("train", 90, "tiny") if task.family != games.FAMILIES[0]]
    tasks += generate.make_tasks("train", 12, "tiny")[::6]  # two games of the first family
    for seed in (0, 1):
        subsets = [games.fraction_of(tasks, share, seed) for share in (0.2, 0.4, 0.6, 0.8, 1.0)]
        assert subsets[-1] == tasks
        for smaller, larger in pairwise(subsets):
            assert {task.id for task in smaller} < {task.id for task in larger}
        for share, subset in zip((3, 6, 9, 12, 15), subsets, strict=True):
            counts = [sum(task.family == family for task in subset) for family in games.FAMILIES]
            assert counts[1:] == [share] * 5 and counts[0] == (1 if share < 9 else 2)
            assert [task for task in tasks if task in subset] == subset
    assert games.fraction_of(tasks, 0.2, 0) != games.fraction_of(tasks, 0.2, 1)
    assert games.fraction_of(tasks[::-1], 0.2, 0) == games.fraction_of(tasks, 0.2, 0)[::-1]


def test_a_manifest_knows_content_not_places(tmp_path):
    for place in ("one", "other"):
        fill(tmp_path / place, 6)
    one, other = (manifest.of_games(games.load_tasks(tmp_path / place, "train")[0]) for place in ("one", "other"))
    assert one == other and one["count"] == len(one["games"]) == 6
    path = games.list_games(tmp_path / "other", "train")[2].path
    path.write_text(path.read_text() + " ")
    changed = manifest.of_games(games.load_tasks(tmp_path / "other", "train")[0])
    assert changed["sha256"] != one["sha256"] and changed["games"].keys() == one["games"].keys()
    with pytest.raises(manifest.ManifestError, match="1 of 6 games are not those of the run, first train/"):
        manifest.check_same(one, changed, "games")
    fewer = manifest.of_games(games.load_tasks(tmp_path / "one", "train")[0][:4])
    assert manifest.check_same(one, fewer, "games") == 4 and fewer["sha256"] != one["sha256"]
    generated = generate.make_tasks("seen", 6)
    assert manifest.of_games(generated) == manifest.of_games(generate.make_tasks("seen", 6))
    assert manifest.of_games(generated)["sha256"] != manifest.of_games(generate.make_tasks("seen", 6, "tiny"))["sha256"]


def test_unknown_split(tmp_path):
    with pytest.raises(ValueError, match=r"'dev'.*valid_unseen"):
        games.list_games(tmp_path, "dev")


def without(key: str):
    return lambda content: json.dumps({name: value for name, value in content.items() if name != key})


DAMAGE = {
    "truncated JSON": (lambda content: json.dumps(content)[:-40], "not valid JSON"),
    "empty file": (lambda content: "", "not valid JSON"),
    "not an object": (lambda content: "[1, 2]", "holds a list"),
    "no problem": (without("pddl_problem"), "'pddl_problem'"),
    "no grammar": (without("grammar"), "'grammar'"),
    "no walkthrough key": (without("walkthrough"), "'walkthrough'"),
    "grammar is a number": (lambda content: json.dumps({**content, "grammar": 3}), "'grammar' must be text"),
    "broken PDDL": (lambda content: json.dumps({**content, "pddl_problem": content["pddl_problem"][:-30]}), "cut off"),
    "no task": (lambda content: json.dumps({**content, "grammar": "action look {}"}), "task sentence"),
    "before 0.4": (
        lambda content: json.dumps(
            {**content, "grammar": content["grammar"].replace('"move {o} to', '"put {o} in/on')}
        ),
        "before 0.4",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files_are_named_skipped_once_and_refused_when_strict(tmp_path, name: str):
    damage, reason = DAMAGE[name]
    good = fill(tmp_path, 4)
    bad = good[2]
    bad.write_text(damage(json.loads(bad.read_text())))
    with pytest.raises(CorruptGame) as caught:
        games.list_games(tmp_path, "train")
    assert caught.value.path == str(bad) and reason in caught.value.reason and str(bad) in str(caught.value)
    with pytest.raises(CorruptGame):
        games.load_tasks(tmp_path, "train", strict=True)
    tasks, skipped = games.load_tasks(tmp_path, "train")
    assert len(tasks) == 3 and [error.path for error in skipped] == [str(bad)]
    if name != "broken PDDL":  # load_json reads the file, the PDDL is the engine's business
        with pytest.raises(CorruptGame):
            games.load_json(bad)
    with pytest.raises(CorruptGame):
        engine.make(bad)


def test_many_damaged_files_stop_a_training_run(tmp_path):
    paths = fill(tmp_path, 12)
    for path in paths[:2]:
        path.write_text("{")
    with pytest.raises(CorruptGame, match="1 more of the 12 files of train"):
        games.load_tasks(tmp_path, "train")


def test_unknown_family_directory(tmp_path):
    [path] = fill(tmp_path, 1)
    write(tmp_path, "juggle-Apple-None-Fridge-1", "trial_1", path.read_text())
    with pytest.raises(CorruptGame, match="'juggle'"):
        games.list_games(tmp_path, "train")


def test_unreadable_file(tmp_path):
    with pytest.raises(CorruptGame, match="cannot be read"):
        games.load_json(tmp_path / "absent.tw-pddl")


def test_not_utf8(tmp_path):
    path = tmp_path / "game.tw-pddl"
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(CorruptGame, match="not valid JSON"):
        games.load_json(path)
