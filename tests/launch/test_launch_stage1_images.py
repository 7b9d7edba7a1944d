"""launch.annotate and launch.sft on episodes of pictures: a service plays and writes, a tiny model that sees learns."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from seed_jax.models import hf
from seed_jax.runtime.logging import read_jsonl
from tests import tiny, xla
from tests.hindsight.test_client import Service, answer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("#PXO#\n#___#", "#___#\n#PXO#", "#OXP#\n#___#", "#___#\n#OXP#", "#_XO#\n#P__#", "#OX_#\n#__P#")
SIZE = (112, 140)  # cells of 28 pixels, 20 tokens
MOVE = "<think>push</think><action>right</action>"
SKILL = {"episode_summary": "it walked", "episode_skill": "stand behind the box"}
SETTINGS = (
    "--config.env.observation=image", "--config.env.tile_px=28", "--config.env.min_pixels=0",
    "--config.env.max_steps=3", "--config.env.train_tasks=6", "--config.rollout.tasks=3", "--config.eval.games=0",
    "--config.annotate.tasks=6", "--config.annotate.rollouts=2", "--config.annotate.val_fraction=0.34",
    "--config.annotate.writer=openai", "--config.hindsight.api_model=writer",
    "--config.hindsight.max_analysis_tokens=1200", "--config.hindsight.max_skill_tokens=120",
    "--config.rollout.max_prompt_tokens=600", "--config.rollout.max_response_tokens=12", "--config.rollout.batch=8",
    "--config.model.dtype=float32", "--config.sft.row_tokens=1400", "--config.sft.scored_tokens_per_row=400",
    "--config.sft.epochs=1", "--config.sft.batch=6", "--config.sft.lr=5e-3", "--config.sft.play_episodes=1",
    "--config.log.tensorboard=False",
)  # fmt: skip


class Teacher:
    """A chat service that sees: plays one move for ever, writes one skill, and keeps what it was shown."""

    def __init__(self):
        self.shown: list[tuple[str, list[np.ndarray]]] = []
        self.lock = threading.Lock()

    def __call__(self, body, _):
        parts = body["messages"][0]["content"]
        text = "".join(part.get("text", "<image>") for part in parts)
        images = [read(part["image_url"]["url"]) for part in parts if part["type"] == "image_url"]
        with self.lock:
            self.shown.append((text, images))
        return 200, {}, answer(json.dumps(SKILL) if "Analyze it" in text else MOVE)


def read(url: str) -> np.ndarray:
    with Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,")))) as image:
        return np.array(image)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("home")
    tiny.vision_model(home / "model")
    levels = home / "levels"
    levels.mkdir()
    for split in ("train", "seen", "unseen"):
        rooms = ROOMS if split == "train" else ROOMS[:1]
        (levels / f"{split}.txt").write_text("\n\n".join(f"#####\n{room}\n#####" for room in rooms) + "\n")
    return home


def launch(home: Path, program: str, *flags: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"HOME": str(home), "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    variables["XLA_FLAGS"] = xla.flags(2)
    where = (f"--config.model.init={home / 'model'}", f"--config.env.data={home / 'levels'}")
    return subprocess.run(
        [sys.executable, "-m", f"launch.{program}", "--config=configs/sokoban.py", *SETTINGS, *where, *flags],
        capture_output=True, text=True, env=variables, cwd=ROOT, timeout=600,
    )  # fmt: skip


@pytest.fixture(scope="module")
def data(home) -> tuple[Path, Teacher]:
    """The data set that a service has played and written."""
    out, teacher = home / "data", Teacher()
    with Service(teacher) as service:
        player = (f"--server={service.url}", "--served_model=player")
        writer = (f"--config.hindsight.api_url={service.url}",)
        for stage, flags in (("rollouts", player), ("skills", writer), ("dataset", ()), ("skills", writer)):
            before, done = len(teacher.shown), launch(home, "annotate", f"--stage={stage}", f"--out={out}", *flags)
            assert done.returncode == 0, done.stderr
        assert before == len(teacher.shown), "the second run of the stage asks nobody"
    return out, teacher


def test_the_service_sees_what_is_stored(data):
    out, teacher = data
    episodes, skills = (read_jsonl(out / name) for name in ("rollouts.jsonl", "skills.jsonl"))
    assert len(episodes) == len(skills) == 12 and 0 < sum(episode["won"] for episode in episodes) < 12
    turns = [turn for episode in episodes for turn in episode["turns"]]
    files = {path.name for path in (out / "images").iterdir()}
    assert {Path(turn["image"]).name for turn in turns} == files and len(files) < len(turns)
    played = [images for text, images in teacher.shown if "Analyze it" not in text]
    assert len(played) == len(turns) and all(len(images) == 1 and images[0].shape == (*SIZE, 3) for images in played)
    written = [(text, tuple(map(np.ndarray.tobytes, images))) for text, images in teacher.shown if "Analyze it" in text]
    for line in skills:
        stored = tuple(np.asarray(Image.open(out / name)).tobytes() for name in line["images"])
        assert (line["prompt"], stored) in written
        assert " # " not in line["prompt"], "the room is not told as text"


def test_a_model_that_sees_learns_from_it(home, data):
    out, _ = data
    done = launch(home, "sft", f"--data={out}", f"--workdir={home / 'run'}")
    assert done.returncode == 0, done.stderr
    summary = json.loads((home / "run" / "summary.json").read_text())
    assert summary["steps"] >= 2 and summary["last"]["val_loss"] < summary["before"]["val_loss"]
    assert summary["last"]["val_loss_skill"] < summary["before"]["val_loss_skill"]
    assert summary["last"]["skills_written"] > 0 and summary["last"]["episodes"] > 0
    spec, params = hf.load(home / "run" / "last")
    _, before = hf.load(home / "model")
    assert spec.vision and 'pipeline_tag: "image-text-to-text"' in (home / "run" / "last" / "README.md").read_text()
    moved = max(float(abs(a - b).max()) for a, b in zip(*map(leaves, (params, before)), strict=True))
    assert moved > 1e-4, "the tower was trained"


def leaves(params):
    import jax

    return jax.tree.leaves(params["vision"])


def test_the_model_plays_again_with_the_skills_in_its_prompts(home, data):
    """It sees the rooms, and reads what the service has written."""
    out = Path(shutil.copytree(data[0], home / "followed"))
    done = launch(home, "annotate", "--stage=following", f"--out={out}")
    assert done.returncode == 0 and "are of another player (server: " in done.stderr, done.stderr
    lines = read_jsonl(out / "followed.jsonl")
    turns = [turn for line in lines for turn in line["turns"]]
    assert len(lines) == 12 and {line["skill"] for line in lines} == {SKILL["episode_skill"]}
    assert all(turn["with_skill"] and (out / turn["image"]).exists() for turn in turns)
    report = json.loads((out / "report_following.json").read_text())
    assert report["turns_without_room"] == 0 and report["teacher"]["success_rate"] == sum(x["won"] for x in lines) / 12


def test_what_does_not_fit_together_is_one_line(home, data):
    out, _ = data
    refused = []
    for number, (flag, message) in enumerate(
        (
            ("--config.env.observation=text", "images and env.observation = 'text'"),
            ("--config.env.tile_px=42", "has 112 x 140 pixels, and the images of this config 168 x 224"),
            ("--config.sft.row_tokens=500", "of them of 3 images); raise it, or make the data with"),
        )
    ):
        refused.append(launch(home, "sft", f"--data={out}", f"--workdir={home / f'no{number}'}", flag))
        assert refused[-1].returncode == 2 and message in refused[-1].stderr
    served = ("--server=http://localhost:1/v1", "--served_model=player", "--config.model.init=")
    blind = launch(home, "annotate", "--stage=rollouts", f"--out={home / 'blind'}", *served)
    assert blind.returncode == 2 and "name the directory of the served model in model.init too" in blind.stderr
    assert not any("Traceback" in done.stderr for done in (*refused, blind))
