"""launch.evaluate: what it writes for a run, an export and a served model, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from absl import flags

from launch import common
from seed_jax.report.paired import compare
from tests import tiny
from tests.hindsight.test_client import Service, answer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A run of one iteration and a config file for it; what is compiled for one evaluation serves the others."""
    home = tmp_path_factory.mktemp("home")
    tiny.save_model(home / "model", steps=30)
    (home / "toy.py").write_text(
        "from pathlib import Path\n"
        "from tests import tiny\n"
        "def get_config(method='seed'):\n"
        f"    config = tiny.config(Path({str(home / 'model')!r}), method)\n"
        "    config.iterations = 1\n"
        "    config.rollout.prompt_bucket = 224\n"
        "    config.rollout.max_prompt_tokens = 224\n"
        "    config.log.diagnostics_episodes = 0\n"
        "    config.log.tensorboard = False\n"
        "    return config\n"
    )
    with tiny.one_device(home / "xla"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "prepare_process", lambda configs: None)  # this process is prepared for all tests
        yield home


@pytest.fixture(scope="module")
def workdir(home) -> Path:
    sys.path.insert(0, str(home))
    import toy

    config = toy.get_config()
    common.run(config, home / "run")
    return home / "run"


def run(home: Path, *arguments: str, method: str = "") -> int:
    from launch import evaluate

    command = ["evaluate", f"--config={home / 'toy.py'}{method}", *map(str, arguments)]
    before = sys.argv
    sys.argv = command  # ml_collections reads the overrides from here
    try:
        flags.FLAGS.unparse_flags()
        for name in (
            "checkpoint",
            "server",
            "served_model",
            "split",
            "games",
            "temperatures",
            "out",
            "episodes",
            "compare",
        ):
            flags.FLAGS[name].unparse()
        flags.FLAGS.reference_style, flags.FLAGS.repeats = False, 1
        flags.FLAGS(command)
        return evaluate.main(None)
    finally:
        sys.argv = before


def test_a_run_and_its_export_give_the_same_result(home, workdir, tmp_path, capsys):
    games = json.loads((workdir / "games.json").read_text())
    assert games["train"]["count"] == 12 and games["panel"]["count"] == 6 and games["panel"]["split"] == "seen"
    common_flags = ("--games=6", "--split=seen", "--repeats=2", "--temperatures=0,1")
    assert run(home, f"--checkpoint={workdir}", *common_flags, f"--episodes={tmp_path / 'episodes.jsonl'}") == 0
    table = capsys.readouterr().out
    mine = json.loads((workdir / "evaluation_seen.json").read_text())
    assert mine["policy"] == {"checkpoint": str(workdir), "iteration": 1, "method": "seed", "seed": 0}
    assert mine["panel"]["sha256"] == games["panel"]["sha256"] and mine["panel"]["trained_on"] == 0
    assert [(r["temperature"], r["games"], r["episodes"]) for r in mine["results"]] == [(0.0, 6, 12), (1.0, 6, 12)]
    greedy, sampled = mine["results"]
    assert [o["won"] for o in greedy["outcomes"][:6]] == [o["won"] for o in greedy["outcomes"][6:]]
    assert [o["steps"] for o in sampled["outcomes"]] and len(
        (tmp_path / "episodes.jsonl").read_text().splitlines()
    ) == 24
    for word in ("seen: 6 games, 2 episodes each", "t 0", "t 1", "mean over families", "pick_and_place_simple (2)"):
        assert word in table, word
    # The run's own evaluation of its panel after the last iteration is the first repeat of the same games and keys.
    own = [json.loads(line) for line in (workdir / "evaluations.jsonl").read_text().splitlines()]
    [last] = [e for e in own if e["iteration"] == 1 and e["temperature"] == 0.0]
    assert last["success_rate"] == sum(o["won"] for o in greedy["outcomes"][:6]) / 6

    out = tmp_path / "export.json"
    arguments = (*common_flags, f"--out={out}", f"--compare={workdir / 'evaluation_seen.json'}")
    assert run(home, f"--checkpoint={workdir / 'export'}", *arguments) == 0
    exported = json.loads(out.read_text())
    assert exported["results"] == mine["results"]
    assert exported["comparison"]["results"] == compare(exported, mine)
    assert "better on 0, worse on 0 of 6 games" in capsys.readouterr().out


def test_a_served_model_on_the_panel_of_the_reference(home, tmp_path, capsys):
    out = tmp_path / "served.json"
    with Service(lambda body, _: (200, {}, answer("<think>t</think><action>look</action>"))) as service:
        flag = f"--server={service.url}"
        assert (
            run(home, flag, "--served_model=m", "--split=unseen", "--reference_style", "--games=10", f"--out={out}")
            == 0
        )
        assert len(service.requests) == 128 * 3
    result = json.loads(out.read_text())
    assert result["policy"] == {"server": service.url, "model": "m"}
    assert result["panel"]["draws"] == 128 and result["panel"]["games"] == 10
    [only] = result["results"]
    assert only["temperature"] == 0.4 and only["episodes"] == 128 and only["games"] == 10
    assert only["valid_rate"] == only["admissible_rate"] == 1.0 and only["success_rate"] == 0.0 and only["steps"] == 3
    assert "128 draws of 10 games" in capsys.readouterr().out


def test_methods_that_are_only_evaluated(home, workdir, tmp_path):
    out = tmp_path / "prompted.json"
    arguments = (f"--checkpoint={workdir / 'export'}", "--games=6", "--temperatures=0", f"--out={out}")
    assert run(home, *arguments, "--config.hindsight.max_skill_tokens=150", method=":skill_prompt") == 0
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
        (["--checkpoint={home}/model", "--temperatures=hot"], "--temperatures=hot: must be numbers"),
        (["--checkpoint={home}/model", "--temperatures=-1"], "eval.temperatures = [-1.0]"),
        (["--checkpoint={home}/model", "--compare={home}/none.json"], "none.json: No such file"),
        (
            ["--checkpoint={home}/model", "--compare={home}/model/config.json"],
            "is not a result that launch.evaluate wrote",
        ),
        (["--checkpoint={home}/model", "--out={home}/toy.py/x.json"], "cannot write --out"),
        (["--checkpoint={home}/model", "--config.env.data={home}/nowhere"], "nowhere/valid_seen is not a directory"),
        (["--checkpoint={home}/model", "--config.env.max_steps=0"], "env.max_steps = 0"),
    ],
)
def test_bad_input_is_told_in_one_line(home, capsys, arguments, message):
    assert run(home, *[argument.format(home=home) for argument in arguments]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ") and message in errors


def test_games_that_have_changed_since_the_run(home, tmp_path, capsys):
    sys.path.insert(0, str(home))
    import toy

    tiny.write_games(tmp_path / "games", "train", 12)
    panel = tiny.write_games(tmp_path / "games", "seen", 6)
    config = toy.get_config()
    config.env.data = str(tmp_path / "games")
    common.run(config, tmp_path / "run")
    arguments = (f"--checkpoint={tmp_path / 'run'}", f"--config.env.data={tmp_path / 'games'}", "--temperatures=0")
    assert run(home, *arguments, "--split=train", "--games=4") == 0
    assert "the policy was trained on 4 of these 4 games" in capsys.readouterr().err
    content = json.loads(panel[2].read_text())
    panel[2].write_text(json.dumps({**content, "walkthrough": []}))
    assert run(home, *arguments) == 2
    assert "1 of 6 panel games are not those of the run" in capsys.readouterr().err
    with pytest.raises(common.DataError, match="the panel games are not those that the run"):
        common.run(config, tmp_path / "run")
