"""WebShop and Search-QA end to end: configs, training with the shipped model, evaluation, and what is refused."""

from __future__ import annotations

import contextlib
import json
import threading

import pytest

from configs import search, webshop
from configs.quickstart import ASSETS
from envs.search import generate as encyclopedia
from envs.search import serve
from envs.search.retrieval import Bm25Retriever
from envs.webshop.catalogue import write_files
from envs.webshop.generate import make_files
from launch import common, worlds
from launch.environment import DataError, open_environment, panel_tasks, record_games
from seed_jax import config as config_lib
from seed_jax.hindsight.sources import load_library
from seed_jax.runtime.logging import prepare_workdir, read_jsonl
from seed_jax.train.loop import train
from tests import tiny
from tests.hindsight.test_client import Service, answer
from tests.launch.test_launch_evaluate import run as run_evaluation

CONFIGS = {"webshop": webshop, "search": search}


def config_of(name: str, **env):
    config = CONFIGS[name].get_config()
    config.model.init = str(ASSETS / "stage1")
    config.env.update(env)
    return config


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_work(name):
    config = config_of(name)
    config_lib.check(config)
    assert config_lib.warnings(config) == []
    for split in ("train", "seen", "unseen"):
        assert len(worlds.split_tasks(config, split, 0)) >= 128
    with open_environment(config) as setup:
        assert len(setup.train_tasks) > 1000 and len(setup.panel) >= 128
        library = load_library(_with_library(config).hindsight)
        library.check({task.family for task in (*setup.train_tasks, *setup.panel)}, "task_type")
        assert {task.id for task in setup.train_tasks}.isdisjoint(task.id for task in setup.panel)
        [first] = setup.world.pool.open([0], [setup.panel[0]])
        assert setup.world.domain.goal(first.text) == setup.panel[0].goal
        assert len(setup.world.domain.true_skill(setup.panel[0]).split()) > 5
        for command in setup.world.domain.solution(setup.panel[0]):
            [last] = setup.world.pool.step([0], [command])
        assert last.won


def _with_library(config):
    config.hindsight.source = "static_library"
    return config


def test_published_settings():
    shop, qa = webshop.get_config(), search.get_config()
    assert (shop.iterations, shop.rollout.tasks, shop.rollout.group) == (160, 16, 8)
    assert (shop.env.max_steps, shop.env.history, shop.adv.normalize) == (15, 2, "mean")
    assert (qa.iterations, qa.rollout.tasks, qa.rollout.group, qa.env.max_steps, qa.env.history) == (150, 128, 8, 4, 4)
    assert (qa.adv.penalty, qa.loss.kl_coef, qa.loss.entropy_coef, qa.adv.normalize) == (0.01, 0.001, 0.0, "std")
    for config in (shop, qa):
        assert (config.rollout.max_prompt_tokens, config.rollout.max_response_tokens) == (4096, 512)
        assert (config.optim.lr, config.distill.coef, config.distill.beta) == (1e-6, 0.01, 5.0)


def small(name: str):
    """At the size of the shipped model."""
    config = config_of(name, prompt="compact", max_steps=2, history=1, topk=1, block_chars=100)
    config.iterations = 2
    config.model.dtype, config.model.remat = "float32", "none"
    config.old_logprobs = "sampler"
    config.rollout.tasks, config.rollout.group, config.rollout.batch = 2, 2, 16
    config.rollout.max_prompt_tokens, config.rollout.max_response_tokens, config.rollout.prompt_bucket = 300, 16, 300
    config.hindsight.max_analysis_tokens, config.hindsight.max_skill_tokens = 300, 24
    config.hindsight.min_coverage_iterations = 0
    config.pack.row_tokens, config.pack.teacher_row_tokens = 360, 360
    config.pack.scored_tokens_per_row, config.pack.max_turns_per_row = 48, 3
    config.pack.rows_per_micro, config.pack.micros_per_mini = 8, 1
    config.mesh.fsdp = -1
    config.eval.games, config.eval.every, config.eval.temperatures = 4, 0, (0.0,)
    config.log.diagnostics_episodes, config.log.tensorboard = 2, False
    return config


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """What is compiled for one environment serves the other."""
    with tiny.one_device(tmp_path_factory.mktemp("xla")):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_the_shipped_model_trains_two_iterations(name, one_device, tmp_path):
    config = small(name)
    config_lib.check(config)
    with open_environment(config) as setup:
        prepare_workdir(tmp_path, config)
        record_games(config, setup, tmp_path)
        summary = train(config, setup, tmp_path)
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    measure = {"webshop": "score", "search": "sub_em"}[name]
    assert summary["iterations"] == 2 and [row["iteration"] for row in rows] == [1, 2]
    assert all(0 <= row[f"rollout/{measure}"] <= 1 and row["rollout/env_errors"] == 0 for row in rows)
    assert f"eval/{measure}" in rows[-1] and measure in summary["evaluations"][-1]["measures"]
    games = json.loads((tmp_path / "games.json").read_text())
    assert games["panel"]["count"] == 4 and set(games["train"]["games"]).isdisjoint(games["panel"]["games"])


@pytest.mark.parametrize(
    ("name", "reply", "measure"),
    [
        ("webshop", "<think>t</think><action>search[rain coat]</action>", "score"),
        ("search", "<think>t</think><answer>no</answer>", "sub_em"),
    ],
)
def test_evaluation_of_a_served_model(name, reply, measure, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(common, "prepare_process", lambda configs: None)
    (tmp_path / "toy.py").write_text(f"from configs.{name} import get_config\n")
    out = tmp_path / "result.json"
    with Service(lambda body, _: (200, {}, answer(reply))) as service:
        arguments = ("--served_model=m", "--games=40", "--temperatures=0", "--config.env.max_steps=2", f"--out={out}")
        assert run_evaluation(tmp_path, f"--server={service.url}", *arguments) == 0
    [result] = json.loads(out.read_text())["results"]
    assert result["games"] == 40 and result["valid_rate"] == 1.0
    assert measure in capsys.readouterr().out and set(result["measures"][measure]["family"]) == set(result["family"])
    won = result["success_rate"] * 40
    assert won == 0 if name == "webshop" else 0 < won < 10, "some answers are no"


def test_search_over_http():
    server = serve.Server(Bm25Retriever(encyclopedia.make().passages), port=0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with contextlib.closing(server):
        config = config_of("search", retriever="http", retriever_url=server.url)
        with open_environment(config) as setup:
            setup.world.pool.open([0], [setup.panel[0]])
            query = setup.panel[0].source["queries"][0]
            assert query in setup.world.pool.step([0], [f"<search>{query}</search>"])[0].text
        server.shutdown()
    with pytest.raises(DataError, match="there is no retrieval server"), open_environment(config):
        pass


def test_files_of_webshop(tmp_path):
    files = make_files()
    write_files(files, tmp_path)
    config, generated = config_of("webshop", data=str(tmp_path)), config_of("webshop")
    assert panel_tasks(config) == panel_tasks(generated)
    assert panel_tasks(config_of("webshop", data=str(tmp_path), goals="human"), games=0)[0].id.startswith("test/")
    (tmp_path / "nouns_1000.json").unlink()
    worlds._goods.cache_clear()
    with pytest.raises(DataError, match=r"python -m envs\.webshop\.prepare"), open_environment(config):
        pass


@pytest.mark.parametrize(
    ("name", "env", "message"),
    [
        ("webshop", {"data": "/nowhere"}, "holds no items_shuffle_1000.json"),
        ("search", {"data": "/nowhere"}, "holds no train.jsonl or train.parquet"),
        ("search", {"data": "official"}, "search has no such data"),
        ("search", {"retriever": "http"}, "retriever_url is empty"),
        ("webshop", {"prompt": "react"}, "env.prompt = 'react'"),
        ("search", {"prompt": "react"}, "env.prompt = 'react'"),
        ("search", {"retriever": "dense"}, "the directory of an encoder"),
    ],
)
def test_bad_input(name, env, message):
    with pytest.raises(DataError, match=message), open_environment(config_of(name, **env)):
        pass


def test_an_unknown_environment():
    config = config_of("webshop")
    config.env.name = "webshopping"
    with pytest.raises(DataError, match="supported: 'alfworld', 'webshop', 'search'"), open_environment(config):
        pass
