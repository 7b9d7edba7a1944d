"""launch.annotate and launch.sft one after the other on generated games, with the shipped base model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.quickstart import ASSETS
from seed_jax.hindsight.parsing import explain
from seed_jax.runtime.logging import read_jsonl
from tests import xla
from tests.hindsight.test_client import Service, answer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = (
    f"--config.model.init={ASSETS / 'base'}", "--config.env.train_tasks=36", "--config.annotate.tasks=12",
    "--config.annotate.rollouts=2", "--config.rollout.tasks=6", "--config.rollout.prompt_bucket=160",
    "--config.rollout.batch=16", "--config.sft.epochs=1", "--config.sft.batch=12", "--config.sft.play_episodes=1",
    "--config.log.tensorboard=False",
)  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("home")


def launch(home: Path, program: str, *flags: str) -> subprocess.CompletedProcess[str]:
    settings = {"HOME": str(home), "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla.flags(2)}
    return subprocess.run(
        [sys.executable, "-m", f"launch.{program}", "--config=configs/quickstart.py", *SETTINGS, *flags],
        capture_output=True, text=True, env=os.environ | settings, cwd=ROOT, timeout=300,
    )  # fmt: skip


def test_from_rollouts_to_a_model(home):
    out = home / "data"
    for stage in ("rollouts", "skills", "dataset"):
        done = launch(home, "annotate", f"--stage={stage}", f"--out={out}")
        assert done.returncode == 0, done.stderr
    episodes, skills = (read_jsonl(out / name) for name in ("rollouts.jsonl", "skills.jsonl"))
    assert len({e["episode"] for e in episodes}) == 24 and len({e["task"] for e in episodes}) == 12
    assert {e["family"] for e in episodes} == {line["family"] for line in skills} and len(skills) == 24
    assert all(explain(line["answer"], 3)[1] == line["reason"] == "" for line in skills)
    report = json.loads((out / "report_rollouts.json").read_text())
    assert report["success_rate"] == sum(e["won"] for e in episodes) / 24 and report["missing"] == 0

    before = (out / "rollouts.jsonl").read_bytes()
    (out / "rollouts.jsonl").write_bytes(before[: len(before) * 2 // 3])
    assert launch(home, "annotate", "--stage=rollouts", f"--out={out}").returncode == 0
    again = (out / "rollouts.jsonl").read_bytes()
    assert again == before, "the episodes that were lost are played again as they were"

    trained = launch(home, "sft", f"--data={out}", f"--workdir={home / 'run'}")
    assert trained.returncode == 0, trained.stderr
    summary = json.loads((home / "run" / "summary.json").read_text())
    assert summary["last"]["val_loss_skill"] < summary["before"]["val_loss_skill"]
    meta = json.loads((out / "dataset.json").read_text())
    for record in (summary["before"], summary["last"]):
        assert record["episodes"] == record["games"] == len(meta["val_tasks"]) == 6
        assert record["skills_written"] == meta["val"]["skill"]
    assert (home / "run" / "best" / "model.safetensors").exists() and (home / "run" / "last" / "README.md").exists()


def test_a_served_policy_plays_and_another_service_writes(home):
    """Both over HTTP: 24 episodes and a skill about each, and nothing is asked or written twice."""
    out, reply = home / "served", "<think> look . </think> <action> look </action>"
    skill = {"episode_summary": "the agent looked around", "episode_skill": "go to every shelf before you look again"}

    def respond(body, _):
        text = body["messages"][-1]["content"]
        return 200, {}, answer(json.dumps(skill) if "write the skill" in text else reply)

    with Service(respond) as service:
        player = (f"--server={service.url}", "--served_model=player")
        writer = ("--config.annotate.writer=openai", f"--config.hindsight.api_url={service.url}")
        writer += ("--config.hindsight.api_model=writer",)
        played = launch(home, "annotate", "--stage=rollouts", f"--out={out}", *player)
        assert played.returncode == 0, played.stderr
        written = launch(home, "annotate", "--stage=skills", f"--out={out}", *writer)
        assert written.returncode == 0, written.stderr
        asked = len(service.requests)
        again = launch(home, "annotate", "--stage=skills", f"--out={out}", *writer)
        assert again.returncode == 0 and len(service.requests) == asked
    episodes, lines = (read_jsonl(out / name) for name in ("rollouts.jsonl", "skills.jsonl"))
    assert len({episode["episode"] for episode in episodes}) == len(lines) == 24
    assert {turn["command"] for episode in episodes for turn in episode["turns"]} == {"look"}
    assert {line["skill"] for line in lines} == {skill["episode_skill"]}


def test_the_policy_writes_about_its_own_episodes(home):
    """The base model cannot write skills: every line says why there is none, and nothing is trained on that."""
    out = home / "own"
    assert launch(home, "annotate", "--stage=rollouts", f"--out={out}").returncode == 0
    written = launch(home, "annotate", "--stage=skills", f"--out={out}", "--config.annotate.writer=policy")
    assert written.returncode == 0, written.stderr
    lines = read_jsonl(out / "skills.jsonl")
    assert len(lines) == 24 and all(line["skill"] is None and line["reason"] for line in lines)
    report = json.loads((out / "report_skills.json").read_text())
    assert report["parsed"] == 0 and sum(report["rejected"].values()) == 24
    assert launch(home, "annotate", "--stage=dataset", f"--out={out}").returncode == 0
    refused = launch(home, "sft", f"--data={out}", f"--workdir={home / 'none'}")
    assert refused.returncode == 2 and "was any skill usable?" in refused.stderr


def test_bad_input_is_one_clear_line(home, tmp_path):
    """The data is looked at before anything is loaded, the settings before anything is written."""
    missing = launch(home, "sft", f"--data={tmp_path}", f"--workdir={tmp_path / 'run'}")
    assert missing.returncode == 2 and "Traceback" not in missing.stderr
    assert "make the data set with launch.annotate --stage=dataset" in missing.stderr
    unnamed = launch(home, "annotate", "--stage=skills", f"--out={tmp_path}", "--config.annotate.writer=openai")
    assert unnamed.returncode == 2 and "Traceback" not in unnamed.stderr
    assert "name the service and its model" in unnamed.stderr
