"""TextWorld's engine with cached translations: the same answers as the package's own, and ours against both."""

from __future__ import annotations

import functools
import gc
import importlib.util
import json
import logging
import multiprocessing
import os
import signal
import sys

import pytest

from envs.alfworld import engine, games, generate, parity
from envs.alfworld.games import FAMILIES
from envs.alfworld.native import NativeGame
from envs.alfworld.problem import CorruptGame
from envs.base import Task
from envs.pool import make_pool

if not all(importlib.util.find_spec(name) for name in ("alfworld", "textworld", "fast_downward")):
    pytest.skip("plays TextWorld's engine: pip install alfworld", allow_module_level=True)

from envs.alfworld import textworld_games, translation
from envs.alfworld.textworld_texts import GrammarError, expression

PIP_STEPS = 12  # of each walk on the package's own engine, which takes 50 ms for one in an official game


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    """No test reads or leaves a translation in the user's directory."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(translation.CACHE_VARIABLE, str(folder))
        yield folder


@functools.cache
def kitchen() -> dict:
    return generate.make_game("pick_cool_then_place_in_recep", 3, "small")


def as_file(root, game: dict, change=lambda grammar: grammar):
    path = generate.write_game(game, root)
    data = json.loads(path.read_text())
    data["grammar"] = change(data["grammar"])
    path.write_text(json.dumps(data))
    return path


# -- equal answers -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_cached_equals_the_package_on_generated_games(family):
    game = generate.make_game(family, 29, "small", "unseen")
    answers, differences = parity.compare_game(game, ("textworld", "pip"), 25, seed=7)
    assert not differences, differences[0]
    assert answers > 25 + len(game["walkthrough"])


@pytest.mark.slow
def test_all_three_agree_on_official_games(official):
    """Ours against TextWorld's on 60 games, and TextWorld's with cached translations against the package's on two."""
    assert official.counts["train"] == 3553 and official.counts["valid_seen"] == 140
    assert len(official.files) == 60
    answers = 0
    for seed, path in enumerate(official.files):
        assert engine.engine_for(path) == "native"
        count, differences = parity.compare_game(path, ("native", "textworld"), 50, seed)
        assert not differences, differences[0]
        answers += count
    assert answers > 60 * 50
    for seed, path in enumerate(official.files[7::30]):
        _, differences = parity.compare_game(path, ("textworld", "pip"), PIP_STEPS, 100 + seed)
        assert not differences, differences[0]


def test_a_difference_is_found_and_described():
    class Other(NativeGame):
        def _look(self):
            return super()._look() + "!"

    game = kitchen()
    one = engine.make(game)
    other = engine.make(game)
    other.__class__ = Other
    count, found = parity.walk("game", one, other, parity.follow(["inventory", "go to fridge 1", "look", "help"]), 4)
    assert count == 4 and found.commands == ["inventory", "go to fridge 1", "look"]
    assert "the answers differ in text" in str(found) and "nothing.!" in str(found)


def test_reset_starts_over():
    game = engine.make(kitchen(), "textworld")
    first = game.reset()
    for _ in range(2):
        played = [game.step(command) for command in game.walkthrough]
        assert played[-1].won and played[-1].reward == 10.0
        assert game.step("look").reward == 0.0
        assert game.reset() == first
    assert game.step(None) == first._replace(text="Nothing happens.")


def test_a_finished_games_library_serves_the_next():
    engine.make(kitchen(), "textworld")  # the parser keeps what called it last alive, and later games need no parser
    game = engine.make(kitchen(), "textworld")
    library = game._state.downward_lib
    del game
    gc.collect()
    following = engine.make(kitchen(), "textworld")
    assert following._state.downward_lib is library


# -- which engine ------------------------------------------------------------------------------------------------------


def test_auto_takes_ours_for_the_texts_it_knows_and_textworlds_for_others(tmp_path):
    known = as_file(tmp_path / "known", kitchen())
    assert isinstance(engine.make(known, "auto"), NativeGame) and isinstance(engine.make(kitchen(), "auto"), NativeGame)
    other = as_file(tmp_path / "other", kitchen(), lambda g: g.replace("You arrive at", "You have come to"))
    game = engine.make(other, "auto")
    assert isinstance(game, textworld_games.CachedGame) and engine.engine_for(other) == "textworld"
    assert game.reset() == engine.make(known).reset()
    assert game.step("go to fridge 1").text.startswith("You have come to fridge 1.")
    assert parity.compare_game(other, ("textworld", "pip"), 8, 0)[1] == []
    [listed] = games.list_games(tmp_path / "other", "train")
    assert listed.path == other


def test_a_grammar_with_an_unusual_task_is_parsed_whole(tmp_path):
    path = as_file(tmp_path, kitchen(), lambda g: g.replace('{"rhs": "Your', '{"rhs": "#help.feedback#Your'))
    odd = as_file(tmp_path / "odd", {**kitchen(), "goal": "find {r.name or r.id}"})
    assert not textworld_games._TASK_RULE.findall(json.loads(odd.read_text())["grammar"])
    assert engine.make(path, "textworld").reset().text == engine.make(path, "pip").reset().text


# -- game files are data, not programs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').getcwd()",
        "o.__class__",
        "o.name.upper()",
        "o.name[0]",
        "1 + 1",
        "o.name if o else ''",
        "o.name +",
    ],
)
def test_expressions_that_do_more_than_name_things_are_refused(text):
    with pytest.raises(GrammarError, match="more than names"):
        expression(text)


def test_code_in_a_grammar_is_not_run(tmp_path):
    bad = '{o.indefinite + open("%s", "w").name | holds(a:agent, o:object)}' % (tmp_path / "written")
    change = lambda g: g.replace("{o.indefinite + ' ' + o.name | holds(a:agent, o:object)}", bad.replace('"', "'"))  # noqa: E731
    path = as_file(tmp_path, kitchen(), change)
    game = engine.make(path, "auto")
    game.reset()
    take = next(i for i, command in enumerate(game.walkthrough) if command.startswith("take "))
    for command in game.walkthrough[: take + 1]:
        game.step(command)
    with pytest.raises(GrammarError):
        game.step("inventory")
    assert not (tmp_path / "written").exists()


# -- the cache ---------------------------------------------------------------------------------------------------------


def test_translations_are_kept_and_damaged_ones_made_anew(tmp_path, caplog):
    texts = engine.packaged_texts("x")["pddl_domain"], kitchen()["pddl_problem"]
    arguments = list(sys.argv)
    made = translation.translated(*texts, tmp_path)
    assert sys.argv == arguments
    [path] = tmp_path.iterdir()
    again = translation.translated(*texts, tmp_path)
    assert json.loads(json.dumps(translation._packed(made))) == json.loads(json.dumps(translation._packed(again)))
    assert caplog.records == []
    content = path.read_bytes()
    path.write_bytes(content[:-9])
    with caplog.at_level(logging.WARNING):
        assert translation.translated(*texts, tmp_path).sas == made.sas
    assert "is made anew" in caplog.text and path.read_bytes() == content
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_without_a_directory_that_can_be_written(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    texts = engine.packaged_texts("x")["pddl_domain"], generate.make_game(FAMILIES[0], 1, "tiny")["pddl_problem"]
    with caplog.at_level(logging.WARNING):
        assert translation.translated(*texts, tmp_path / "file" / "below").sas
    assert "set SEED_JAX_CACHE" in caplog.text


def test_damaged_problem_is_named():
    game = kitchen()
    for name in ("textworld", "pip"):
        with pytest.raises(CorruptGame, match="TextWorld cannot load it"):
            engine.make(
                {**game, "pddl_problem": game["pddl_problem"].replace("(openable Fridge", "(openable x", 1)}, name
            )
        with pytest.raises(CorruptGame, match="TextWorld cannot load it"):
            engine.make({**game, "pddl_problem": game["pddl_problem"][:200]}, name)


# -- in worker processes -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_worker_killed_between_two_commands_loses_nothing():
    tasks = [Task(str(i), "", "", generate.make_game(family, 5, "tiny")) for i, family in enumerate(FAMILIES)]
    slots, rows = list(range(len(tasks))), []
    for workers in (0, 2):
        name = "textworld" if workers else "native"
        pool = make_pool(functools.partial(engine.make, engine=name), workers=workers)
        try:
            row = [pool.open(slots, tasks)]
            for step in range(3):
                if workers and step == 1:
                    os.kill(min(child.pid for child in multiprocessing.active_children()), signal.SIGKILL)
                row.append(pool.step(slots, [task.source["walkthrough"][step] for task in tasks]))
            rows.append(row)
            assert pool.stats()["restarts"] == bool(workers) and pool.stats()["errors"] == 0
        finally:
            pool.close()
    assert rows[0] == rows[1]
