"""Stage 1, following: episodes with the skill in the prompt, rows of those that won, and a model that learns from them.

A tiny model plays games that are won by reaching any place (tiny.EasyPool); the environment's rules write the skills.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from seed_jax import tokenizer as tok
from seed_jax.hindsight.prompts import insert_skill
from seed_jax.runtime.logging import read_jsonl
from tests import documented, tiny

pytestmark = pytest.mark.slow

CONFIG = """
import contextlib

from launch import stage1_episodes
from launch.environment import open_world
from tests import tiny


@contextlib.contextmanager
def easy(config, samples):
    with open_world(config, samples) as world:
        yield world._replace(pool=tiny.EasyPool(world.pool))


stage1_episodes.open_world = easy


def get_config():
    config = tiny.config("model")
    config.env.max_steps = 4
    config.rollout.tasks, config.rollout.prompt_bucket = 5, 192
    config.annotate.tasks, config.annotate.rollouts = 12, 2
    config.sft.epochs, config.sft.batch, config.sft.play_episodes = 1, 16, 0
    config.log.tensorboard = False
    return config
"""


class Home:
    """A directory with a config, a model and the files of stage 1 in data/."""

    def __init__(self, directory: Path, runner: documented.Runner):
        self.directory, self.runner, self.data = directory, runner, directory / "data"

    def launch(self, program: str, *flags: str) -> documented.Result:
        return self.runner.run(["-m", f"launch.{program}", "--config=toy.py", *flags])

    def stage(self, name: str, *flags: str, out: str = "data") -> documented.Result:
        return self.launch("annotate", f"--stage={name}", f"--out={out}", *flags)

    def report(self, stage: str) -> dict:
        return json.loads((self.data / f"report_{stage}.json").read_text())

    def copy(self, name: str, *left_out: str) -> Path:
        return Path(shutil.copytree(self.data, self.directory / name, ignore=lambda *_: left_out))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    directory = tmp_path_factory.mktemp("home")
    tiny.save_model(directory / "model", steps=60)
    (directory / "toy.py").write_text(CONFIG)
    with documented.runner(directory) as runner:
        home = Home(directory, runner)
        for stage in ("rollouts", "skills", "following"):
            done = home.stage(stage)
            assert done.code == 0, done.output
        yield home


def test_every_skill_is_read_once_and_the_report_pairs_both_episodes(home):
    bare, skills, followed = (read_jsonl(home.data / f"{name}.jsonl") for name in ("rollouts", "skills", "followed"))
    assert len(followed) == len(bare) == 24
    skill_of = {line["episode"]: line["skill"] for line in skills}
    wins = [{line["episode"]: line["won"] for line in lines} for lines in (bare, followed)]
    words = tiny.tokenizer()
    for line in followed:
        assert line["skill"] == skill_of[line["episode"]] and line["episode"].startswith(f"{line['task']}#")
        for turn in line["turns"]:
            assert line["skill"] not in turn["prompt"], "the prompt is the bare one"
            [ids] = tok.encode_prompts(words, [insert_skill(turn["prompt"], line["skill"], "compact")])
            assert turn["with_skill"] == (len(ids) <= 140 + 40)
    assert {turn["with_skill"] for line in followed for turn in line["turns"]} >= {True}
    replies = [[turn["response"] for line in lines for turn in line["turns"]] for lines in (bare, followed)]
    assert replies[0] != replies[1]
    report = home.report("following")
    before, after = (np.array([won[name] for name in sorted(won)], float) for won in wins)
    assert report["student"]["success_rate"] == before.mean() and 0 < after.mean() < 1
    assert report["teacher"]["success_rate"] == after.mean()
    assert report["margin"]["success_rate"] == pytest.approx((after - before).mean())
    assert report["margin"]["interval"][0] <= report["margin"]["success_rate"] <= report["margin"]["interval"][1]
    assert report["first_lost"]["episodes"] == (before == 0).sum()
    assert (report["missing"], report["without_usable_skill"], report["same_player"]) == (0, 0, True)
    assert report["episodes"] == 24 and report["games"] == 12


def test_what_is_missing_is_played_as_it_was_and_a_changed_skill_anew(home):
    out = home.copy("resumed")
    before = (out / "followed.jsonl").read_bytes()
    (out / "followed.jsonl").write_bytes(before[: len(before) // 2])
    done = home.stage("following", out="resumed")
    assert done.code == 0 and "wave 3/3: 24 episodes of 24" in done.output, done.output
    assert (out / "followed.jsonl").read_bytes() == before
    assert "wave" not in home.stage("following", out="resumed").output, "nothing is left to play"

    lines = read_jsonl(out / "skills.jsonl")
    lines[0]["skill"], lines[1]["skill"] = "look at shelf 1 .", None
    (out / "skills.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert home.stage("following", out="resumed").code == 0
    again = read_jsonl(out / "followed.jsonl")
    assert len(again) == 25 and again[-1]["skill"] == "look at shelf 1 ."
    report = json.loads((out / "report_following.json").read_text())
    assert report["episodes"] == 23 and report["without_usable_skill"] == 1


def test_rows_of_won_episodes_teach_a_model(home):
    assert home.stage("dataset").code == 0
    without = [row for side in ("train", "val") for row in read_jsonl(home.data / f"{side}.jsonl")]
    assert {row["kind"] for row in without} == {"skill", "act"}
    done = home.stage("dataset", "--config.annotate.following=50")
    assert done.code == 0 and "following rows where annotate.following asks for" in done.output, done.output
    followed = {line["episode"]: line for line in read_jsonl(home.data / "followed.jsonl")}
    rows = [row for side in ("train", "val") for row in read_jsonl(home.data / f"{side}.jsonl")]
    assert [row for row in rows if row["kind"] != "follow"] == without
    rows = [row for row in rows if row["kind"] == "follow"]
    useful = {
        (name, number)
        for name, line in followed.items()
        for number, turn in enumerate(line["turns"])
        if line["won"] and turn["valid"] and turn["admissible"] and turn["with_skill"]
    }
    assert {(row["episode"], row["turn"]) for row in rows} == useful and len(rows) == len(useful) > 0
    for row in rows:
        line = followed[row["episode"]]
        turn = line["turns"][row["turn"]]
        assert row["prompt"] == insert_skill(turn["prompt"], line["skill"], "compact")
        assert row["response"] == turn["response"]

    trained = home.launch("sft", "--data=data", "--workdir=run")
    assert trained.code == 0, trained.output
    summary = json.loads((home.directory / "run" / "summary.json").read_text())
    meta = json.loads((home.data / "dataset.json").read_text())
    counts = meta["val"]
    assert counts.keys() == {"skill", "act", "follow"}
    for record in (summary["before"], summary["last"]):  # a mean over examples, whatever their kind
        mixed = sum(count * record[f"val_loss_{kind}"] for kind, count in counts.items()) / sum(counts.values())
        assert record["val_loss"] == pytest.approx(mixed, rel=1e-5)
    assert summary["last"]["val_loss"] < summary["before"]["val_loss"]
    assert f"{meta['train']['follow']} follow rows" in (home.directory / "run" / "best" / "README.md").read_text()


def test_another_player_is_no_comparison(home):
    out = home.copy("other", "followed.jsonl", "report_following.json")
    settings = json.loads((out / "settings.json").read_text())
    del settings["following"]
    (out / "settings.json").write_text(json.dumps(settings))
    shutil.copytree(home.directory / "model", home.directory / "model2")
    done = home.stage("following", "--config.model.init=model2", out="other")
    assert done.code == 0 and "of another player (model.init: 'model' -> 'model2')" in done.output, done.output
    report = json.loads((out / "report_following.json").read_text())
    assert "margin" not in report and "student" not in report["family"].popitem()[1]
    assert report["same_player"] is False and report["teacher"] == home.report("following")["teacher"]


@pytest.mark.parametrize(
    ("stage", "flags", "message"),
    [
        ("following", ["--server=http://localhost/v1", "--served_model=m"], "--server with --stage=following"),
        ("following", ["--config.env.max_steps=5"], "are of other games (there -> yours): env.max_steps: 4 -> 5; use"),
        ("following", ["--config.hindsight.placement=user_prefix"], "was begun with other settings"),
        ("following", ["--out=nothing"], "rollouts.jsonl does not exist; make it with launch.annotate --stage="),
        ("following", ["--out=unwritten"], "skills.jsonl does not exist; make it with launch.annotate --stage=skills"),
        ("following", ["--out=useless"], "skills.jsonl has no usable skill for the tasks of this config"),
        ("dataset", ["--config.annotate.following=-1"], "annotate.following = -1.0: must be a number, 0 or more"),
        (
            "dataset",
            ["--config.annotate.following=1", "--out=unplayed"],
            "followed.jsonl does not exist; make it with launch.annotate --stage=following",
        ),
        (
            "dataset",
            ["--config.annotate.following=1", "--config.hindsight.placement=system"],
            "hindsight.placement = 'system': a row of the data has its skill in the user message; set the second to",
        ),
        (
            "dataset",
            ["--config.annotate.following=1", "--config.hindsight.placement=user_prefix"],
            "hindsight.placement = 'user_prefix': the episodes of data/followed.jsonl were played with",
        ),
    ],
)
def test_bad_input_is_told_in_one_line(home, stage, flags, message):
    for name, left_out in (("unwritten", "skills.jsonl"), ("unplayed", "followed.jsonl"), ("useless", "skills.jsonl")):
        if f"--out={name}" in flags:
            out = home.copy(name, left_out)
            if name == "useless":
                lines = read_jsonl(home.data / "skills.jsonl")
                (out / "skills.jsonl").write_text("".join(json.dumps(x | {"skill": None}) + "\n" for x in lines))
    done = home.stage(stage, *flags)
    assert done.code == 2 and message in done.output and "Traceback" not in done.output, done.output
    assert done.output.startswith("error: ")
