"""WebShop and Search-QA end to end: configs, training with the shipped model, evaluation, and what is refused."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading

import pytest

from configs import search, webshop
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
from tests.worlds import CONFIGS, config_of, small


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


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """What is compiled for one environment serves the other."""
    with tiny.one_device(tmp_path_factory.mktemp("xla")):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_the_shipped_model_trains_two_iterations(name, one_device, tmp_path, monkeypatch):
    config = small(name)
    config_lib.check(config)
    with open_environment(config) as setup:
        prepare_workdir(tmp_path, config)
        record_games(config, setup, tmp_path)
        summary = train(config, setup, tmp_path)
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    measure = {"webshop": "score", "search": "sub_em"}[name]
    _evaluate_checkpoint(config, name, tmp_path, monkeypatch)
    assert summary["iterations"] == 2 and [row["iteration"] for row in rows] == [1, 2]
    assert all(0 <= row[f"rollout/{measure}"] <= 1 and row["rollout/env_errors"] == 0 for row in rows)
    assert f"eval/{measure}" in rows[-1] and measure in summary["evaluations"][-1]["measures"]
    games = json.loads((tmp_path / "games.json").read_text())
    assert games["panel"]["count"] == 4 and set(games["train"]["games"]).isdisjoint(games["panel"]["games"])


def _evaluate_checkpoint(config, name, workdir, monkeypatch):
    """launch.evaluate on the run: the panel that training saw, and the same verdicts."""
    monkeypatch.setattr(common, "prepare_process", lambda configs: None)  # this process is prepared for all tests
    toy = f"from tests.worlds import small\n\nget_config = lambda: small({name!r})\n"
    (workdir / "toy.py").write_text(toy)
    assert run_evaluation(workdir, f"--checkpoint={workdir}", "--split=unseen") == 0
    [result] = json.loads((workdir / "evaluation_unseen.json").read_text())["results"]
    trained = read_jsonl(workdir / "evaluations.jsonl")[-1]
    assert {key: result[key] for key in ("games", "success_rate", "measures")} == {
        key: trained[key] for key in ("games", "success_rate", "measures")
    }


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


@pytest.mark.slow
def test_a_retriever_that_is_down_ends_the_run_in_one_line(tmp_path):
    """The policy searches at every turn, and the searches fail."""
    (tmp_path / "toy.py").write_text(
        "from envs.base import EnvError\n"
        "from envs.search import actions, domain, retrieval\n"
        "from tests.worlds import small\n"
        "domain.SearchDomain.parse = lambda self, text: actions.Action('search', 'where', True)\n"
        "retrieval.Bm25Retriever.search = lambda self, queries, k: [EnvError('no answer')] * len(queries)\n"
        "get_config = lambda: small('search')\n"
    )
    command = [sys.executable, "-m", "launch.train", f"--config={tmp_path / 'toy.py'}", f"--workdir={tmp_path / 'run'}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == common.EXIT_FAILED
    assert "Traceback" not in ended.stderr
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and "more than 5%" in last and "Last error: no answer" in last


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
