"""launch.evaluate: what it writes for a run, an export and a served model, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from absl import flags

from configs.quickstart import ASSETS
from launch import common, evaluate
from launch.environment import DataError, open_environment, record_games
from seed_jax import sharding
from seed_jax.models import hf
from seed_jax.report.paired import compare
from seed_jax.runtime.checkpoint import Checkpointer
from seed_jax.runtime.logging import prepare_workdir
from seed_jax.train.export import export_checkpoint
from seed_jax.train.state import as_tree, init_state, make_optimizer
from tests import tiny
from tests.hindsight.test_client import Service, answer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A config file for the shipped model; what is compiled for one evaluation serves the others."""
    home = tmp_path_factory.mktemp("home")
    (home / "toy.py").write_text(
        "from configs import quickstart\n"
        "def get_config(method='seed'):\n"
        "    config = quickstart.get_config(method)\n"
        "    config.env.train_tasks = 12\n"
        "    config.rollout.tasks = 6\n"
        "    config.rollout.batch = 16\n"
        "    config.rollout.prompt_bucket = 192\n"  # one shape, with a skill or without
        "    config.eval.games = 6\n"
        "    return config\n"
    )
    with tiny.one_device(home / "xla"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "prepare_process", lambda configs: None)  # this process is prepared for all tests
        patch.syspath_prepend(home)
        yield home


def start_run(workdir: Path, **env) -> Path:
    """What a run leaves when it stops before its first update."""
    import toy

    config = toy.get_config()
    config.env.update(env)
    prepare_workdir(workdir, config)
    with open_environment(config) as setup:
        record_games(config, setup, workdir)
    mesh = sharding.make_mesh(fsdp=1, tensor=1)
    _, params = hf.load(Path(config.model.init), mesh)
    with Checkpointer(workdir / "checkpoints") as checkpoints:
        state = init_state(params, make_optimizer(0.9, 0.95, 1e-8, 0.0, 1.0), keep_reference=False)
        checkpoints.save(7, as_tree(state), {"memory": {}})
    return workdir


@pytest.fixture(scope="module")
def workdir(home) -> Path:
    return start_run(home / "run")


def run(home: Path, *arguments: str, method: str = "") -> int:
    command = ["evaluate", f"--config={home / 'toy.py'}{method}", *map(str, arguments)]
    before = sys.argv
    sys.argv = command  # ml_collections reads the overrides from here
    try:
        for name in [name for name in flags.FLAGS if name.startswith("config.")]:  # overrides of an earlier command
            delattr(flags.FLAGS, name)
        flags.FLAGS.unparse_flags()
        for name in flags.FLAGS.flags_by_module_dict()[evaluate.__name__]:
            name.unparse()
        flags.FLAGS(command)
        return evaluate.main(None)
    finally:
        sys.argv = before


def test_a_run_and_its_export_give_the_same_result(home, workdir, tmp_path, capsys):
    games = json.loads((workdir / "games.json").read_text())
    assert games["train"]["count"] == 12 and games["panel"]["count"] == 6 and games["panel"]["split"] == "seen"
    same = ("--games=6", "--split=seen", "--repeats=2", "--temperatures=0,1")
    assert run(home, f"--checkpoint={workdir}", *same, f"--episodes={tmp_path / 'episodes.jsonl'}") == 0
    table = capsys.readouterr().out
    mine = json.loads((workdir / "evaluation_seen.json").read_text())
    assert mine["policy"] == {"checkpoint": str(workdir), "iteration": 7, "method": "seed", "seed": 0}
    assert mine["panel"]["sha256"] == games["panel"]["sha256"] and mine["panel"]["trained_on"] == 0
    assert [(r["temperature"], r["games"], r["episodes"]) for r in mine["results"]] == [(0.0, 6, 12), (1.0, 6, 12)]
    greedy, sampled = ([(o["won"], o["steps"]) for o in result["outcomes"]] for result in mine["results"])
    assert greedy[:6] == greedy[6:] and sampled[:6] != sampled[6:]  # repeats differ in their keys
    assert 0 < sum(won for won, _ in greedy) < 12 and mine["results"][0]["admissible_rate"] > 0.7
    assert len((tmp_path / "episodes.jsonl").read_text().splitlines()) == 24
    for word in ("seen: 6 games, 2 episodes each", "t 0", "t 1", "mean over families", "pick_and_place_simple (2)"):
        assert word in table, word

    export_checkpoint(workdir, tmp_path / "export")
    out = tmp_path / "export.json"
    arguments = (*same, f"--out={out}", f"--compare={workdir / 'evaluation_seen.json'}")
    assert run(home, f"--checkpoint={tmp_path / 'export'}", *arguments) == 0
    exported = json.loads(out.read_text())
    assert exported["results"] == mine["results"]
    assert exported["comparison"]["results"] == compare(exported, mine)
    assert "better on 0, worse on 0 of 6 games" in capsys.readouterr().out


def test_a_served_model_on_the_panel_of_the_reference(home, tmp_path, capsys):
    out = tmp_path / "served.json"
    with Service(lambda body, _: (200, {}, answer("<think>t</think><action>look</action>"))) as service:
        flag = f"--server={service.url}"
        assert (
            run(
                home,
                flag,
                "--served_model=m",
                "--split=unseen",
                "--reference_style",
                "--games=10",
                "--config.env.max_steps=2",
                f"--out={out}",
            )
            == 0
        )
        assert len(service.requests) == 128 * 2
    result = json.loads(out.read_text())
    assert result["policy"] == {"server": service.url, "model": "m"}
    assert result["panel"]["draws"] == 128 and result["panel"]["games"] == 10
    [only] = result["results"]
    assert only["temperature"] == 0.4 and only["episodes"] == 128 and only["games"] == 10
    assert only["valid_rate"] == only["admissible_rate"] == 1.0 and only["success_rate"] == 0.0 and only["steps"] == 2
    assert "128 draws of 10 games" in capsys.readouterr().out


def test_methods_that_are_only_evaluated(home, tmp_path):
    out = tmp_path / "prompted.json"
    arguments = (f"--checkpoint={ASSETS / 'stage1'}", "--games=6", "--temperatures=0", f"--out={out}")
    assert run(home, *arguments, method=":skill_prompt") == 0
    [result] = json.loads(out.read_text())["results"]
    assert result["with_skills"] and result["skill_coverage"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either --checkpoint=DIR, or --server=URL"),
        (["--checkpoint=x", "--server=http://localhost/v1"], "either --checkpoint=DIR, or --server=URL"),
        (["--server=http://localhost/v1"], "--served_model=NAME"),
        (["--server=ftp://localhost", "--served_model=m"], "--server = 'ftp://localhost': must be an http"),
        (["--checkpoint={home}/nowhere"], "does not exist"),
        (["--checkpoint={stage1}", "--temperatures=hot"], "--temperatures=hot: must be numbers"),
        (["--checkpoint={stage1}", "--temperatures=-1"], "eval.temperatures = [-1.0]"),
        (["--checkpoint={stage1}", "--compare={home}/none.json"], "none.json: No such file"),
        (
            ["--checkpoint={stage1}", "--compare={stage1}/config.json"],
            "is not a result that launch.evaluate wrote",
        ),
        (["--checkpoint={stage1}", "--out={home}/toy.py/x.json"], "cannot write --out"),
        (["--checkpoint={stage1}", "--config.env.data={home}/nowhere"], "nowhere/valid_seen is not a directory"),
        (["--checkpoint={stage1}", "--config.env.max_steps=0"], "env.max_steps = 0"),
    ],
)
def test_bad_input_is_told_in_one_line(home, capsys, arguments, message):
    assert run(home, *[argument.format(home=home, stage1=ASSETS / "stage1") for argument in arguments]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ") and message in errors


def test_games_that_have_changed_since_the_run(home, tmp_path, capsys):
    tiny.write_games(tmp_path / "games", "train", 12)
    panel = tiny.write_games(tmp_path / "games", "seen", 6)
    data = {"data": str(tmp_path / "games"), "engine": "native"}
    workdir = start_run(tmp_path / "run", **data)
    arguments = (f"--checkpoint={workdir}", *(f"--config.env.{k}={v}" for k, v in data.items()), "--temperatures=0")
    assert run(home, *arguments, "--split=train", "--games=4", "--config.env.max_steps=1") == 0
    errors = capsys.readouterr().err
    assert "the policy was trained on 4 of these 4 games" in errors
    assert "not as in the run (its value -> yours): env.max_steps: 12 -> 1" in errors
    content = json.loads(panel[2].read_text())
    panel[2].write_text(json.dumps({**content, "walkthrough": []}))
    assert run(home, *arguments) == 2
    assert "1 of 6 panel games are not those of the run" in capsys.readouterr().err
    with pytest.raises(DataError, match="the panel games are not those that the run"):
        start_run(workdir, **data)
