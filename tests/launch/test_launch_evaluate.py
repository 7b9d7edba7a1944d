"""launch.evaluate: what it writes for a run, an export and a served model, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from absl import flags

from configs.base import SKILLS
from configs.quickstart import ASSETS
from envs.alfworld.domain import AlfworldDomain
from envs.alfworld.generate import make_tasks
from launch import common, evaluate
from launch.environment import DataError, open_environment, record_games
from seed_jax import sharding, teacher
from seed_jax import tokenizer as tok
from seed_jax.hindsight.library import load_folder
from seed_jax.models import hf
from seed_jax.report.paired import compare
from seed_jax.runtime.checkpoint import Checkpointer
from seed_jax.runtime.logging import prepare_workdir
from seed_jax.train.export import export_checkpoint
from seed_jax.train.state import as_tree, init_state, make_optimizer
from seed_jax.types import Skill
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


def run(home: Path, *arguments: str, method: str = "", config: str = "toy.py") -> int:
    command = ["evaluate", f"--config={home / config}{method}", *map(str, arguments)]
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
        (["--checkpoint={stage1}", "--skill_part=places"], "--skill_part=places needs --skills, such as --skills=self"),
        (
            ["--server=http://localhost/v1", "--served_model=m", "--skills=self"],
            "a served model is evaluated without skills; set hindsight.at_eval = 'no', leave out --skills",
        ),
        (
            ["--checkpoint={stage1}", "--skills=library", "--config.hindsight.library={home}/nowhere"],
            "nowhere': there is no such folder",
        ),
    ],
)
def test_bad_input_is_told_in_one_line(home, capsys, arguments, message):
    assert run(home, *[argument.format(home=home, stage1=ASSETS / "stage1") for argument in arguments]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("error: ") and message in told.err and told.out == ""


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
    assert run(home, *arguments, "--skills=true", "--json") == 2
    told = capsys.readouterr()
    assert told.out == "" and "1 of 6 panel games are not those of the run" in told.err
    with pytest.raises(DataError, match="the panel games are not those that the run"):
        start_run(workdir, **data)


# -- with skills -------------------------------------------------------------------------------------------------------

GAMES = make_tasks("unseen", 6)
SHORT = ("--split=unseen", "--games=6", "--temperatures=0", "--config.env.max_steps=6")


def measured(home, capsys, *arguments: str, model: str = "stage1") -> dict:
    """The result, which is all that stands on stdout."""
    assert run(home, f"--checkpoint={ASSETS / model}", *arguments, f"--out={home / 'skills.json'}", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads((home / "skills.json").read_text())
    return result


def test_the_teacher_plays_the_same_games_as_the_student(home, capsys):
    same = ("--split=unseen", "--games=6", "--temperatures=0,1", "--repeats=2")
    bare = measured(home, capsys, *same)
    assert "teacher" not in bare
    result = measured(home, capsys, *same, "--skills=self")
    assert result["results"] == bare["results"], "the bare games are those of an evaluation without --skills"
    assert [part["temperature"] for part in result["temperatures"]] == [0.0, 1.0]
    assert {name: result[name] for name in result["temperatures"][0]} == result["temperatures"][0], "the headline"
    for part, of_bare in zip(result["temperatures"], bare["results"], strict=True):
        won = [outcome["won"] for outcome in of_bare["outcomes"]]
        assert part["student"] == {name: of_bare[name] for name in ("success_rate", "standard_error")}
        for whole in (part, part["first_lost"], part["first_won"], *part["family"].values()):
            rates = [whole[name]["success_rate"] for name in ("student", "teacher", "margin")]
            assert rates[2] == pytest.approx(rates[1] - rates[0])
            assert all(whole[name]["standard_error"] >= 0 for name in ("student", "teacher", "margin"))
        for parts in ((part["first_lost"], part["first_won"]), part["family"].values()):
            assert sum(p["episodes"] for p in parts) == part["episodes"] == 12
            total = sum(p["episodes"] * p["teacher"]["success_rate"] for p in parts)
            assert total == pytest.approx(12 * part["teacher"]["success_rate"])
        assert part["first_won"]["episodes"] == sum(won) and part["games"] == 6
        assert part["family"].keys() == of_bare["family"].keys()
        low, high = part["margin"]["interval"]
        assert -1 <= low <= part["margin"]["success_rate"] <= high <= 1
        assert part["skills"] == "self" and part["part"] == "all" and part["turns_without_room"] == 0
        assert 0 < part["coverage"] == part["parse_rate"] <= 1
        assert {example["task"] for example in part["examples"]} <= {task.id for task in GAMES}


def test_the_table_of_the_teacher(home, capsys):
    out = f"--out={home / 'table.json'}"
    assert run(home, f"--checkpoint={ASSETS / 'stage1'}", *SHORT, "--skills=true", "--skill_part=workflow", out) == 0
    table = capsys.readouterr().out
    result = json.loads((home / "table.json").read_text())
    assert "skills: true, workflow only, T=0, 6 games, 1.000 of them with a skill\n" in table
    assert f"teacher {result['teacher']['success_rate']:.3f} ± " in table and f"written: {home / 'table.json'}" in table
    behind = "distillation has nothing to give here" in table
    assert behind == (result["margin"]["interval"][0] <= 0)


def test_without_a_skill_the_teacher_is_the_student(home, capsys):
    """The base model writes none: the second games are the first ones again, with the same keys."""
    result = measured(home, capsys, *SHORT, "--temperatures=1", "--skills=self", model="base")
    assert result["coverage"] == result["parse_rate"] == 0.0 and result["examples"] == []
    assert result["student"] == result["teacher"] and result["margin"]["interval"] == [0.0, 0.0]


@pytest.mark.parametrize("kind", teacher.KINDS)
def test_every_kind_of_skill(home, capsys, monkeypatch, kind):
    """What the policy writes is what the environment knows, so that it can be told what each kind makes of it."""
    domain, by_id = AlfworldDomain("compact"), {task.id: task for task in GAMES}
    library, words = load_folder(SKILLS / "alfworld_compact"), tok.load_tokenizer(ASSETS / "stage1")
    tokens = lambda text: len(words(text, add_special_tokens=False)["input_ids"])  # noqa: E731
    write, true = teacher.write_skills, {task.id: domain.true_skill(task) for task in GAMES}

    def true_skills(player, episodes):
        counts = write(player, episodes)
        for episode in episodes:
            episode.skill = Skill("", true[episode.task_id])
        return counts

    monkeypatch.setattr(teacher, "write_skills", true_skills)
    for place, part in enumerate(teacher.PARTS):
        result = measured(home, capsys, *SHORT, f"--skills={kind}", f"--skill_part={part}")
        assert result["skills"] == kind and result["part"] == part
        cut = {game: text if part == "all" else domain.skill_parts(text)[place - 1] for game, text in true.items()}
        given = {example["task"]: example["skill"] for example in result["examples"]}
        assert len(given) == round(result["coverage"] * 6) and result["turns_without_room"] == 0
        assert ("parse_rate" in result) == (kind in ("self", "wrong", "placebo"))
        if kind in ("true", "self"):
            assert given == {game: text for game, text in cut.items() if text}
        elif kind == "wrong":
            assert len(given) == sum(map(bool, cut.values()))
            for game, text in given.items():
                assert by_id[game].goal not in {by_id[of].goal for of, told in cut.items() if told == text}
        elif kind == "placebo":
            assert given.keys() == {game for game, text in cut.items() if text}
            for game, text in given.items():
                assert text.startswith("There is nothing") and 0 <= tokens(text) - tokens(cut[game]) <= 4
        else:
            told = [library.text(library.names(task.family, task.goal, "task_type")) for task in GAMES]
            told = [text if part == "all" else domain.skill_parts(text)[place - 1] for text in told]
            assert given == {task.id: text for task, text in zip(GAMES, told, strict=True) if text}


def test_what_an_environment_cannot_tell(home, capsys, monkeypatch):
    (home / "qa.py").write_text("from tests.worlds import small\nget_config = lambda: small('search')\n")
    there = (f"--checkpoint={ASSETS / 'stage1'}", "--games=2", "--json", f"--out={home / 'none.json'}")
    monkeypatch.delattr(AlfworldDomain, "true_skill")
    for config, flag, message in (
        ("toy.py", "--skills=true", "--skills=true: the environment 'alfworld' does not tell what would solve a task"),
        ("qa.py", "--skill_part=places", "--skill_part=places: the environment 'search' does not tell workflow and"),
    ):
        assert run(home, *there, "--skills=true", flag, config=config) == 2
        told = capsys.readouterr()
        assert told.out == "" and told.err.startswith(f"error: {message}") and told.err.count("\n") == 1
