"""Runs with each source of skills: what the teacher reads, what the policy reads, what is recorded."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from configs import base
from seed_jax.hindsight.bank import load_bank
from seed_jax.hindsight.library import load_folder
from seed_jax.hindsight.sources import Skills
from seed_jax.runtime.logging import read_jsonl
from tests import tiny
from tests.hindsight.test_client import Service, answer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_device")]

LIBRARY = load_folder(base.SKILLS / "alfworld_compact")


def config(model_dir: Path, method: str = "seed", **hindsight):
    made = tiny.config(model_dir, method)
    made.iterations = 1
    made.log.diagnostics_episodes, made.log.tensorboard = 0, False
    made.eval.temperatures = (0.4,)
    for name, value in hindsight.items():
        made.hindsight[name] = value
    return made


def records(workdir: Path) -> tuple[dict, list[dict], list[dict]]:
    """(metrics of the only iteration, its episodes, all evaluations)."""
    (metrics,) = read_jsonl(workdir / "metrics.jsonl")
    return metrics, read_jsonl(workdir / "episodes.jsonl"), read_jsonl(workdir / "evaluations.jsonl")


def right(episode: dict) -> str:
    return LIBRARY.text(LIBRARY.names(episode["family"], "", "task_type"))


def test_static_library_teaches_every_turn(model_dir, tmp_path):
    made = config(model_dir, source="static_library")
    made.log.diagnostics_episodes = 6
    summary = tiny.run(made, tmp_path)
    metrics, episodes, evaluations = records(tmp_path)
    assert [episode["skill"] for episode in episodes] == [right(episode) for episode in episodes]
    assert metrics["skill/coverage/static_library"] == metrics["opd/coverage"] == 1.0
    assert metrics["skill/teacher_overflow"] == 0 and "skill/parse_rate" not in metrics and "skill/given" not in metrics
    assert metrics["opd/gap_mean"] != 0 and metrics["update/distill_loss"] != 0
    assert [evaluation["with_skills"] for evaluation in evaluations] == [False, False]
    assert any(cell["self"]["rows"] for cell in summary["skill_table"].values()), "the table knows the library's skills"


@pytest.mark.parametrize("placement", ["user_prefix", "system", "before_template"])
def test_bank_with_every_other_placement(model_dir, tmp_path, placement):
    made = config(model_dir, source="skill_bank", placement=placement)
    tiny.run(made, tmp_path)
    metrics, episodes, _ = records(tmp_path)
    assert metrics["skill/coverage/skill_bank"] == metrics["opd/coverage"] == 1.0
    bank = load_bank(base.SKILLS / "alfworld_compact")
    assert {e["skill"] for e in episodes} == {bank.text(bank.names(e["family"], "", "task_type")) for e in episodes}


def test_wrong_skills_and_placebos_differ_from_right_ones_in_the_teacher_only(model_dir, tmp_path):
    results = {}
    for control in ("none", "wrong_skill", "placebo"):
        tiny.run(config(model_dir, source="static_library", control=control), tmp_path / control)
        results[control] = records(tmp_path / control)
    texts = {control: [episode["skill"] for episode in results[control][1]] for control in results}
    for episode, wrong, empty in zip(results["none"][1], texts["wrong_skill"], texts["placebo"], strict=True):
        assert wrong != right(episode) and wrong in LIBRARY.skills.values()
        assert set(empty.split()) <= set("There is nothing special about this .".split())
    turns = [[episode["turns"] for episode in episodes] for _, episodes, _ in results.values()]
    assert turns[0] == turns[1] == turns[2], "the policy played before it was taught"
    assert len({metrics["opd/gap_mean"] for metrics, _, _ in results.values()}) == 3
    assert "skill/coverage/static_library+placebo" in results["placebo"][0]
    assert len({(tmp_path / control / "export" / "model.safetensors").read_bytes() for control in results}) == 3


def test_skills_in_the_policys_prompts(model_dir, tmp_path):
    """Half of each group plays with a skill and has no teacher; the panel is played without and with skills."""
    made = config(model_dir, source="static_library", at_rollout=0.5, at_eval="both")
    made.pack.row_tokens = 200
    summary = tiny.run(made, tmp_path)
    metrics, episodes, evaluations = records(tmp_path)
    for episode in episodes:
        reads = episode["index"] % 2 == 1
        assert episode["given_skill"] == (right(episode) if reads else None)
        assert episode["skill"] == (None if reads else right(episode))
    assert (
        metrics["skill/given"] == metrics["skill/coverage/static_library"] == 0.5
        and metrics["skill/given_overflow"] == 0
    )
    turns = [len(episode["turns"]) for episode in episodes]
    assert metrics["opd/coverage"] == pytest.approx(sum(turns[::2]) / sum(turns))
    assert [(e["iteration"], e["with_skills"]) for e in evaluations] == [(0, False), (0, True), (1, False), (1, True)]
    assert evaluations[1]["skill_coverage"] == 1.0 and evaluations[1]["given_overflow"] == 0
    assert metrics["eval/success_rate"] == summary["eval_after"] == evaluations[2]["success_rate"]
    assert metrics["eval/success_rate_t0.4_with_skills"] == evaluations[3]["success_rate"]


def test_grpo_with_skills_in_every_prompt(model_dir, tmp_path):
    made = config(model_dir, "grpo", source="static_library", at_rollout=1.0, at_eval="yes")
    made.pack.row_tokens = 200
    summary = tiny.run(made, tmp_path)
    metrics, episodes, evaluations = records(tmp_path)
    assert metrics["skill/given"] == 1.0 and not [
        name for name in metrics if name.startswith(("opd/", "skill/coverage"))
    ]
    assert all(episode["given_skill"] == right(episode) and episode["skill"] is None for episode in episodes)
    assert [evaluation["with_skills"] for evaluation in evaluations] == [True, True]
    assert summary["eval_after"] == evaluations[-1]["success_rate"]


def test_another_model_writes_the_skills(model_dir, tmp_path, monkeypatch):
    """The service answers for the won episodes only; its answers about lost ones cannot be parsed."""

    def reply(body: dict, _: int):
        (message,) = body["messages"]
        task = re.search("your task is to: (.*)", message["content"]).group(1)
        text = json.dumps({"episode_summary": "x", "episode_skill": f"look for {task.split()[-1]}"})
        return 200, {}, answer(text if "outcome: success" in message["content"] else "no idea")

    monkeypatch.delenv("SEED_JAX_API_KEY", raising=False)
    with Service(reply) as service:
        made = config(model_dir, source="external_hindsight", api_url=service.url, api_model="writer")
        tiny.run(made, tmp_path)
        assert len(service.requests) == 6 and {body["max_tokens"] for _, _, body in service.requests} == {40}
    metrics, episodes, _ = records(tmp_path)
    for episode in episodes:
        word = episode["goal"].split()[-1]
        assert episode["skill"] == (f"look for {word}" if episode["won"] else None)
        assert episode["skill_error"] == ("" if episode["won"] else "no_json")
    won = np.mean([episode["won"] for episode in episodes])
    assert 0 < won < 1, "otherwise this test shows little"
    assert metrics["skill/parse_rate"] == metrics["skill/coverage/external_hindsight"] == pytest.approx(won)


def test_library_without_a_family_of_the_run_is_an_error_before_training(model_dir, tmp_path):
    (tmp_path / "heat.md").write_text("use the microwave")
    (tmp_path / "mapping.json").write_text('{"skill_files": {"h": "heat.md"}, "task_to_skill": {"pick_heat": "h"}}')
    made = config(model_dir, source="static_library", library=str(tmp_path))
    with pytest.raises(ValueError, match="no skill for the task family look_at_obj_in_light, pick_and_place_simple"):
        tiny.run(made, tmp_path / "run")
    assert not (tmp_path / "run" / "evaluations.jsonl").exists()


def test_default_library_of_the_base_config_is_found():
    assert Path(base.get_config().hindsight.library).is_dir()
    config = base.get_config()
    config.hindsight.source = "static_library"
    assert Skills(config, tiny.tokenizer()).library.general
