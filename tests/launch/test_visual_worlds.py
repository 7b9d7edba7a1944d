"""Sokoban and EZPoints end to end: configs, panels, training of the text forms with the shipped model, pictures, and
what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from configs import ezpoints, sokoban
from launch import common, worlds
from launch.environment import DataError, open_environment, panel_tasks, record_games
from seed_jax import config as config_lib
from seed_jax import tokenizer as tok
from seed_jax.hindsight.sources import load_library
from seed_jax.models import hf
from seed_jax.runtime.logging import prepare_workdir, read_jsonl
from seed_jax.train.loop import train
from tests import tiny
from tests.hindsight.test_client import Service, answer
from tests.launch.test_launch_evaluate import run as run_evaluation
from tests.worlds import VISUAL, config_of, small

LEVELS = "#####\n#PXO#\n#___#\n#####\n\n#####\n#OXP#\n#___#\n#####\n"


@pytest.fixture
def seeing(tmp_path):
    """A model directory that says that it can see."""
    (tmp_path / "config.json").write_text(json.dumps(tiny.vision_spec(300).to_hf()))
    return tmp_path


def shorter(name: str, **env):
    """With fewer training rooms, which take a millisecond each."""
    return config_of(name, **({"train_tasks": 200} | env))


@pytest.mark.parametrize("name", VISUAL)
def test_configs_work(name):
    """And the oracle wins every game of both panels within the step limit."""
    config = shorter(name)
    config_lib.check(config)
    assert config_lib.warnings(config) == []
    with open_environment(config) as setup:
        other = panel_tasks(config, "seen")
        assert (
            len(setup.train_tasks) == 200
            and (len(setup.panel), len(other))
            == {
                "sokoban": (128, 128),
                "ezpoints": (70, 83),
            }[name]
        )
        config.hindsight.source = "static_library"
        library = load_library(config.hindsight)
        library.check({task.family for task in (*setup.train_tasks, *setup.panel, *other)}, "task_type")
        sources = [{json.dumps(task.source) for task in part} for part in (setup.train_tasks, setup.panel, other)]
        assert sources[0].isdisjoint(sources[1] | sources[2]) and sources[1].isdisjoint(sources[2])
        ids = [task.id for part in (setup.panel, other) for task in part]
        assert len(set(ids)) == len(ids) and [task.id for task in setup.panel] == sorted(t.id for t in setup.panel)
        for task in (*setup.panel, *other):
            _oracle_wins(setup.world, task)


def _oracle_wins(world, task):
    [last] = world.pool.open([0], [task])
    assert world.domain.goal(last.text) == task.goal and not last.won
    commands = world.domain.solution(task)
    for command in commands:
        assert command in last.admissible
        [last] = world.pool.step([0], [command])
    assert last.won and last.done and len(commands) <= world.max_steps
    assert len(world.domain.true_skill(task).split()) > 5


def test_panels_report_by_difficulty():
    """Training tasks have one family, so that the schedule keeps the distribution of rooms and deals."""
    rooms, cards = shorter("sokoban"), shorter("ezpoints")
    assert {task.family for task in panel_tasks(rooms)} == {"boxes_1_near", "boxes_1_middle", "boxes_1_far"}
    assert {task.family for task in panel_tasks(cards)} == {"ezpoints_add", "ezpoints_multiply"}
    assert {task.family for task in worlds.split_tasks(rooms, "train", 50)} == {"boxes_1"}
    assert {task.family for task in worlds.split_tasks(cards, "train", 50)} == {"ezpoints"}
    assert len(panel_tasks(rooms, games=150)) == 150 and panel_tasks(rooms, games=9) == panel_tasks(rooms)[:9]


def test_published_settings():
    box, points = sokoban.get_config(), ezpoints.get_config()
    assert (box.iterations, box.rollout.tasks, box.rollout.group, box.env.max_steps) == (150, 32, 8, 15)
    assert (points.iterations, points.rollout.tasks, points.rollout.group, points.env.max_steps) == (100, 16, 8, 8)
    assert (box.env.rows, box.env.columns, box.env.boxes, box.env.search_depth, box.env.tile_px) == (6, 6, 1, 30, 16)
    assert (box.hindsight.max_analysis_tokens, points.hindsight.max_analysis_tokens) == (24576, 16384)
    for config in (box, points):
        assert (config.rollout.max_prompt_tokens, config.rollout.max_response_tokens) == (1024, 512)
        assert (config.optim.lr, config.distill.coef, config.distill.beta, config.sft.lr) == (1e-6, 0.01, 5.0, 2e-6)
        assert (config.adv.penalty, config.loss.kl_coef, config.loss.entropy_coef) == (0.1, 0.01, 0.001)
        assert (config.adv.normalize, config.eval.every) == ("std", 5)
        assert (config.annotate.temperature, config.sft.epochs, config.sft.batch, config.sft.row_tokens) == (
            1.0,
            3,
            8,
            4096,
        )


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("sokoban", {"1": "up", "2": "down", "3": "left", "4": "right", "0": "still"}),
        ("ezpoints", {str(n): str(n) for n in range(1, 11)} | {"and": "+", "with": "*", "is": "="}),
    ],
)
def test_the_shipped_model_has_tokens_for_every_action(name, written):
    """Of the compact prompt: so that it can learn to act there."""
    config = shorter(name, prompt="compact")
    tokenizer = tok.load_tokenizer(config.model.init)
    with open_environment(config) as setup:
        for word, command in written.items():
            ids = tokenizer(f"<think> look </think> <action> {word} </action>", add_special_tokens=False)["input_ids"]
            assert tokenizer.unk_token_id not in ids and len(ids) == 6
            action = setup.world.domain.parse(tok.decode(tokenizer, ids))
            assert (action.command, action.valid) == (command, True)


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """What is compiled for one environment serves the other."""
    with tiny.one_device(tmp_path_factory.mktemp("xla")):
        yield


def tiny_run(name: str):
    """Two iterations at the size of the shipped model."""
    config = small(name)
    config.env.max_steps, config.env.train_tasks = 3, 40
    config.env.max_moves = 15 if name == "sokoban" else 0
    return config


@pytest.mark.slow
@pytest.mark.parametrize("name", VISUAL)
def test_the_shipped_model_trains_two_iterations(name, one_device, tmp_path):
    config = tiny_run(name)
    config_lib.check(config)
    with open_environment(config) as setup:
        prepare_workdir(tmp_path, config)
        record_games(config, setup, tmp_path)
        summary = train(config, setup, tmp_path)
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    measure = {"sokoban": "boxes_placed", "ezpoints": "finished"}[name]
    assert summary["iterations"] == 2 and [row["iteration"] for row in rows] == [1, 2]
    assert all(0 <= row[f"rollout/{measure}"] <= 1 and row["rollout/env_errors"] == 0 for row in rows)
    assert measure in summary["evaluations"][-1]["measures"]
    games = json.loads((tmp_path / "games.json").read_text())
    assert games["panel"]["count"] == 4 and set(games["train"]["games"].values()).isdisjoint(
        games["panel"]["games"].values()
    )


@pytest.mark.parametrize(
    ("name", "reply", "won"),
    [
        ("sokoban", "<think>t</think><action>left</action>", range(1, 9)),  # some rooms take one push
        ("ezpoints", '{"thoughts": "done", "action": "="}', range(1)),
    ],
)
def test_evaluation_of_a_served_model(name, reply, won, tmp_path, monkeypatch):
    monkeypatch.setattr(common, "prepare_process", lambda configs: None)
    (tmp_path / "toy.py").write_text(f"from configs.{name} import get_config\n")
    out = tmp_path / "result.json"
    with Service(lambda body, _: (200, {}, answer(reply))) as service:
        arguments = ("--served_model=m", "--games=40", "--temperatures=0", "--config.env.max_steps=3", f"--out={out}")
        more = ("--config.env.max_moves=15",)
        assert run_evaluation(tmp_path, f"--server={service.url}", *arguments, *more) == 0
        refused = (*arguments, "--config.env.observation=image")
        assert run_evaluation(tmp_path, f"--server={service.url}", *refused) == common.EXIT_BAD_INPUT
    [result] = json.loads(out.read_text())["results"]
    assert result["games"] == 40 and result["valid_rate"] == 1.0 and round(result["success_rate"] * 40) in won


# -- pictures


@pytest.mark.parametrize(("name", "side"), [("sokoban", 96), ("ezpoints", 300)])
def test_pictures_for_models_that_see(name, side, seeing):
    config = shorter(name, observation="image")
    config.model.init = str(seeing)
    with open_environment(config) as setup:
        [first] = setup.world.pool.open([0], setup.panel[:1])
        assert first.image.shape == (side, side, 3) and first.image.dtype == np.uint8
        prompt = setup.world.domain.prompt(setup.panel[0].goal, [], first.text, first.admissible, 2)
        assert prompt.count("<image>") == 1 and first.text not in prompt
        [after] = setup.world.pool.step([0], setup.world.domain.solution(setup.panel[0])[:1])
        assert not np.array_equal(after.image, first.image)


def test_larger_tiles(seeing):
    config = shorter("sokoban", observation="image", tile_px=28)
    config.model.init = str(seeing)
    with open_environment(config) as setup:
        assert setup.world.pool.open([0], setup.panel[:1])[0].image.shape == (168, 168, 3)


@pytest.mark.parametrize("name", VISUAL)
@pytest.mark.parametrize(
    ("tower", "message"),
    [
        (None, "model without vision; .*set env.observation = 'text'"),
        ({"patch_size": 16}, r"patch(_size)?=16"),
        ({"spatial_merge_size": 4}, "merge(_size)?=4"),
    ],
)
def test_models_that_cannot_see(name, tower, message, tmp_path):
    record = tiny.spec(300).to_hf() if tower is None else tiny.vision_spec(300).to_hf()
    if tower:
        record["vision_config"] |= tower
    (tmp_path / "config.json").write_text(json.dumps(record))
    config = shorter(name, observation="image")
    config.model.init = str(tmp_path)
    with open_environment(config) as setup, pytest.raises(ValueError, match=message):
        setup.world.read_size(hf.load_spec(tmp_path).vision)


# -- levels of one's own, and what is refused


def test_levels_of_a_folder(tmp_path):
    for split in ("train", "seen", "unseen"):
        (tmp_path / f"{split}.txt").write_text(LEVELS, encoding="utf-8")
    config = shorter("sokoban", data=str(tmp_path))
    config.rollout.tasks, config.eval.games = 2, 2
    with open_environment(config) as setup:
        assert [task.id for task in setup.panel] == ["unseen/00001", "unseen/00002"]
        assert [task.family for task in (*setup.train_tasks, *setup.panel)] == ["boxes_1"] * 2 + ["boxes_1_near"] * 2
        for task in setup.panel:
            _oracle_wins(setup.world, task)
    config.eval.games = 3
    with pytest.raises(DataError, match=r"eval\.games = 3, but .* has 2 playable games"), open_environment(config):
        pass


@pytest.mark.parametrize(
    ("name", "env", "message"),
    [
        ("sokoban", {"rows": 4}, "a room of 4 x 6 is too small"),
        ("sokoban", {"boxes": 6}, "6 boxes in a room of 6 x 6: there can be 1 to 5"),
        ("sokoban", {"min_moves": 16}, "solutions of 16 to 15 moves"),
        ("sokoban", {"rows": 5, "columns": 5, "train_tasks": 20, "min_moves": 14}, "give 0 rooms of 5 x 5"),
        ("sokoban", {"data": "/nowhere"}, r"/nowhere/train\.txt cannot be read"),
        ("sokoban", {"data": "official"}, "sokoban has no such data"),
        ("sokoban", {"prompt": "react"}, "env.prompt = 'react'"),
        ("sokoban", {"observation": "text_rich"}, "env.observation = 'text_rich'"),
        ("sokoban", {"prompt": "compact", "observation": "image"}, "pictures have the style 'released' only"),
        ("ezpoints", {"data": "/nowhere"}, "EZPoints deals its cards itself"),
        ("ezpoints", {"prompt": "react"}, "env.prompt = 'react'"),
        ("webshop", {"observation": "image"}, "WebShop has the forms"),
    ],
)
def test_bad_input(name, env, message):
    with pytest.raises(DataError, match=message), open_environment(shorter(name, **env)):
        pass


def test_tiles_that_are_too_small(seeing):
    config = shorter("sokoban", observation="image", tile_px=4)
    config.model.init = str(seeing)
    with pytest.raises(DataError, match=r"env\.tile_px = 4: a tile has 8 pixels or more"), open_environment(config):
        pass


def test_pictures_without_pillow(seeing, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    config = shorter("ezpoints", observation="image")
    config.model.init = str(seeing)
    with pytest.raises(DataError, match="pip install pillow"), open_environment(config):
        pass
