"""A checkpoint becomes a Hugging Face directory with a card that says where the weights come from, or a clear error."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import yaml
from markdown_it import MarkdownIt

from seed_jax import config as config_lib
from seed_jax import tokenizer as tok
from seed_jax.models import hf
from seed_jax.runtime.checkpoint import Checkpointer, CheckpointError
from seed_jax.runtime.logging import append_jsonl, prepare_workdir
from seed_jax.sampler.engine import Sampler
from seed_jax.train import card as model_card
from seed_jax.train import export
from seed_jax.train.state import as_tree, init_state, make_optimizer
from seed_jax.types import SamplingParams
from tests import tiny


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """What a run leaves: checkpoints after iterations 1 and 2, of which the second one was evaluated."""
    home = tmp_path_factory.mktemp("home")
    model_dir = tiny.save_model(home / "models" / "tiny")
    config = tiny.config(model_dir)
    workdir = home / "run"
    prepare_workdir(workdir, config)
    spec, initial = hf.load(model_dir)
    state = init_state(initial, make_optimizer(0.9, 0.95, 1e-8, 0.0, 1.0), keep_reference=True)
    params = {}
    with Checkpointer(workdir / "checkpoints") as checkpoints:
        for step in (1, 2):
            params[step] = jax.tree.map(lambda leaf, step=step: leaf * (1 + 0.1 * step), initial)
            checkpoints.save(step, as_tree(state.replace(params=params[step])), {"memory": {}})
    (workdir / "checkpoints" / "3.orbax-checkpoint-tmp-7").mkdir()
    for iteration, rate in ((0, 0.25), (2, 0.75)):
        for temperature in (0.0, 0.4):
            result = {"games": 8, "success_rate": rate, "standard_error": 0.125, "macro_success_rate": rate / 2}
            append_jsonl(workdir / "evaluations.jsonl", {"iteration": iteration, "temperature": temperature, **result})
    return SimpleNamespace(workdir=workdir, model_dir=model_dir, config=config, spec=spec, params=params)


@pytest.fixture
def copied(finished, tmp_path):
    """The run in a place where it may be damaged."""
    workdir = tmp_path / "copied"
    shutil.copytree(finished.workdir, workdir)
    return workdir


def contents(directory: Path) -> dict:
    return {
        str(path.relative_to(directory)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in directory.rglob("*")
    }


def assert_same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


# -- what is exported --------------------------------------------------------------------------------------------------


def test_the_newest_checkpoint_by_default_and_any_other_by_its_step(finished, tmp_path):
    done = export.export_checkpoint(finished.workdir, tmp_path / "newest")
    assert done == (tmp_path / "newest", 2, finished.spec.num_params)
    export.export_checkpoint(finished.workdir / "checkpoints", tmp_path / "first", step=1)
    for name, step in (("newest", 2), ("first", 1)):
        spec, params = hf.load(tmp_path / name)
        assert spec == finished.spec
        assert_same(params, finished.params[step])


def test_the_run_is_only_read(finished, tmp_path):
    before = contents(finished.workdir)
    export.export_checkpoint(finished.workdir, tmp_path / "out")
    assert contents(finished.workdir) == before


def test_files_and_record(finished, tmp_path):
    out = export.export_checkpoint(finished.workdir, tmp_path / "out").directory
    tokenizer_files = {path.name for path in finished.model_dir.iterdir()} & set(hf.TOKENIZER_FILES)
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= tokenizer_files
    expected = {"config.json", "generation_config.json", "model.safetensors", "README.md", "seed_jax.json"}
    assert {path.name for path in out.iterdir()} == expected | tokenizer_files
    for name in tokenizer_files:
        assert (out / name).read_bytes() == (finished.model_dir / name).read_bytes()
    record = json.loads((out / "seed_jax.json").read_text())
    assert record.pop("files") == sorted(expected | tokenizer_files)
    assert record == {
        "method": "seed", "iterations": 2, "base_model": "models/tiny",
        "config_hash": config_lib.config_hash(finished.config),
    }  # fmt: skip


def test_import_export_import_is_bitwise(finished, tmp_path):
    out = export.export_checkpoint(finished.workdir, tmp_path / "out", max_shard_bytes=20_000).directory
    spec, params = hf.load(out)
    again = hf.save(params, spec, tmp_path / "again", max_shard_bytes=20_000)
    shards = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(shards) > 3 and shards == sorted(path.name for path in again.glob("*.safetensors"))
    for name in [*shards, hf.INDEX_FILE]:
        assert (out / name).read_bytes() == (again / name).read_bytes()
    assert_same(hf.load(again)[1], finished.params[2])


@pytest.mark.slow
def test_transformers_speaks_the_same_greedy_text(finished, tmp_path, capsys):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = export.export_checkpoint(finished.workdir, tmp_path / "out", dtype="bfloat16", max_shard_bytes=9_000)
    model, report = AutoModelForCausalLM.from_pretrained(out.directory, dtype=torch.float32, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = AutoTokenizer.from_pretrained(out.directory)
    sampler = Sampler(finished.spec, tokenizer.eos_token_id, seed=0, batch=4, prompt_bucket=32)
    sampler.load(jax.tree.map(lambda leaf: leaf.astype("bfloat16").astype("float32"), finished.params[2]))
    prompts = tok.encode_prompts(tokenizer, [f"your task is to: put some mug on shelf {n}" for n in (1, 2, 3)])
    for prompt, reply in zip(prompts, sampler.generate(prompts, SamplingParams(24, 0.0), [(0, 0, 0)] * 3), strict=True):
        theirs = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=24, do_sample=False
        )
        expected = tokenizer.decode(theirs[0, len(prompt) :], skip_special_tokens=True)
        assert tok.decode(tokenizer, reply.tokens) == expected and expected
    (example,) = re.findall(r"```python\n(.*?)```", (out.directory / "README.md").read_text(), re.DOTALL)
    (tmp_path / "example.py").write_text(example.replace('"DIR"', repr(str(out.directory))))
    runpy.run_path(tmp_path / "example.py")
    assert capsys.readouterr().out.strip(), "the card's own lines print a reply"


def test_token_ids_keep_the_ends_of_the_base_model_and_drop_its_sampling(finished, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(finished.model_dir, base)
    end = tok.load_tokenizer(base).eos_token_id
    stated = {"eos_token_id": [9, end], "bos_token_id": 4, "temperature": 0.7, "repetition_penalty": 1.05}
    (base / "generation_config.json").write_text(json.dumps(stated))
    out = export.export_checkpoint(finished.workdir, tmp_path / "out", base_model=str(base)).directory
    for name in ("config.json", "generation_config.json"):
        content = json.loads((out / name).read_text())
        assert content["eos_token_id"] == [end, 9] and content["bos_token_id"] == 4
        assert not {"temperature", "repetition_penalty"} & set(content)
    assert export.token_ids(finished.model_dir)["eos_token_id"] == end


# -- the card ----------------------------------------------------------------------------------------------------------


def card(directory: Path) -> tuple[dict, str]:
    _, header, body = (directory / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(header), body


def test_card_of_an_evaluated_checkpoint(finished, tmp_path):
    header, body = card(export.export_checkpoint(finished.workdir, tmp_path / "out").directory)
    assert header == {
        "library_name": "transformers", "pipeline_tag": "text-generation",
        "tags": ["reinforcement-learning", "text-agents", "seed-jax"],
    }  # fmt: skip
    assert "| base model | `models/tiny` |" in body
    assert "| method | `seed`, 2 iterations |" in body
    assert f"`{config_lib.config_hash(finished.config)}`" in body
    assert "8 held-out games (`seen`)" in body
    assert "| 0 | 0.250 ± 0.125 | 0.750 ± 0.125 | 0.375 |" in body and "| 0.4 | 0.250" in body
    assert str(finished.model_dir.parent) not in body, "paths of this machine are nobody's business"


def test_card_says_how_it_was_trained_and_what_is_not_known(finished, tmp_path, copied):
    config = finished.config
    _, body = card(export.export_checkpoint(copied, tmp_path / "out").directory)
    assert "| training games | `generated`, split `train`; hashes not recorded |" in body
    games = {part: {"count": n, "sha256": part * 9, "games": {}} for part, n in (("train", 12), ("panel", 6))}
    (copied / "games.json").write_text(json.dumps(games))
    _, body = card(export.export_checkpoint(copied, tmp_path / "out").directory)
    assert f"| training games | `generated`, split `train`, 12 games, sha256 `{'train' * 9}` |" in body
    assert f"| evaluation games | `generated`, split `seen`, 6 games, sha256 `{'panel' * 9}` |" in body
    assert "`distill.coef=0.01`" in body and "`hindsight.source=self_hindsight`" in body
    assert f"| seeds | training {config.seed}, evaluation {config.eval.seed} |" in body
    assert "| episodes | 3 tasks x 2 episodes an iteration, at temperature 1 |" in body
    assert "No skill is read at inference" in body and "evaluation at 0 and 0.4 (0 = greedy)" in body
    assert f"max_new_tokens={config.rollout.max_response_tokens}" in body
    (copied / "games.json").write_text("{")
    with pytest.raises(ValueError, match=r"games\.json is damaged .*remove it to export without the hashes"):
        export.export_checkpoint(copied, tmp_path / "out")


def test_card_of_a_method_without_skills_and_of_one_that_reads_them(finished, tmp_path, copied):
    stored = json.loads((copied / "config.json").read_text())
    stored["hindsight"]["source"] = stored["distill"]["kind"] = "none"
    (copied / "config.json").write_text(json.dumps(stored))
    _, body = card(export.export_checkpoint(copied, tmp_path / "out").directory)
    assert "`distill.kind=none`, `optim.lr" in body and "distill.coef" not in body and "hindsight.placement" not in body
    stored["hindsight"] |= {"source": "static_library", "at_rollout": 0.5, "at_eval": "both"}
    (copied / "config.json").write_text(json.dumps(stored))
    result = {"games": 8, "success_rate": 1.0, "standard_error": 0.0, "macro_success_rate": 1.0, "with_skills": True}
    append_jsonl(copied / "evaluations.jsonl", {"iteration": 2, "temperature": 0.0, **result})
    _, body = card(export.export_checkpoint(copied, tmp_path / "out").directory)
    assert "`hindsight.at_rollout` = 0.5, `hindsight.at_eval` = both" in body
    assert "| 0 | 0.250 ± 0.125 | 0.750 ± 0.125 | 0.375 |" in body
    assert "| 0, skills in the prompt | not recorded | 1.000 ± 0.000 | 1.000 |" in body


@pytest.mark.parametrize("name", [
    'a"b: [x', "<script>alert(1)</script>", "a | b", "`` ` ``", "---\nlicense: mit", "![x](y) **b** # c",
    "$header ${x}", "\u202eleft\u2028next", "'\\",
])  # fmt: skip
def test_names_of_others_stay_names(name):
    """Read by a YAML and a Markdown parser that are not ours."""
    assert yaml.safe_load(model_card.header(tiny.spec(50), name))["base_model"] == model_card.line(name)
    shown = model_card.line(name)
    assert "\n" not in shown and "\u202e" not in shown
    parser = MarkdownIt("commonmark").enable("table")
    row = parser.parse(model_card.table({"base model": model_card.code(name), "next": "x"}))
    cells = [token.children for token in row if token.type == "inline" and token.children]
    assert [[(c.type, c.content) for c in cell] for cell in cells] == [
        [("text", "base model")], [("code_inline", shown)], [("text", "next")], [("text", "x")],
    ]  # fmt: skip
    (title,) = [token.children for token in parser.parse(f"# {model_card.plain(name)}") if token.type == "inline"]
    assert {child.type for child in title} <= {"text", "text_special"}
    assert "".join(child.content for child in title) == shown


def test_card_of_a_checkpoint_that_was_not_evaluated(finished, tmp_path):
    _, body = card(export.export_checkpoint(finished.workdir, tmp_path / "out", step=1).directory)
    assert "those after iteration 1, were not evaluated" in body and "0.250" not in body


def test_card_names_a_base_model_of_the_hub(finished, tmp_path):
    cached = tmp_path / "hub" / "models--Qwen--Qwen2.5-0.5B-Instruct" / "snapshots" / "abc"
    shutil.copytree(finished.model_dir, cached)
    header, body = card(export.export_checkpoint(finished.workdir, tmp_path / "out", base_model=str(cached)).directory)
    assert header["base_model"] == "Qwen/Qwen2.5-0.5B-Instruct"
    assert "# Qwen/Qwen2.5-0.5B-Instruct trained with seed" in body


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_source_that_is_no_run(finished, tmp_path, copied):
    with pytest.raises(FileNotFoundError, match=r"nowhere does not exist; give the workdir"):
        export.export_checkpoint(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(FileNotFoundError, match=r"tiny has no directory checkpoints"):
        export.export_checkpoint(finished.model_dir, tmp_path / "out")
    (copied / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"copied has no config\.json"):
        export.export_checkpoint(copied / "checkpoints", tmp_path / "out")
    shutil.copy(finished.model_dir / "config.json", copied)
    with pytest.raises(RuntimeError, match=r"is not the config of a run; --checkpoint must name"):
        export.export_checkpoint(copied, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_steps_that_are_not_there(tmp_path, copied):
    with pytest.raises(CheckpointError, match="has no step 7; there are 1, 2"):
        export.export_checkpoint(copied, tmp_path / "out", step=7)
    for step in ("1", "2"):
        shutil.rmtree(copied / "checkpoints" / step)
    with pytest.raises(CheckpointError, match="holds no finished checkpoint"):
        export.export_checkpoint(copied, tmp_path / "out")
    assert [path.name for path in (copied / "checkpoints").iterdir()] == ["3.orbax-checkpoint-tmp-7"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # from reads that were given up
def test_damaged_checkpoint_is_no_older_one_in_disguise(tmp_path, copied):
    """Training goes on from the last good one; an export of other weights than asked for would only mislead."""
    data = max((copied / "checkpoints" / "2").rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)
    content = bytearray(data.read_bytes())
    for position in range(250, len(content), 500):  # one bit at a time, so that weights are hit, not only moments
        content[position] ^= 1
    data.write_bytes(content)
    before = contents(copied)
    with pytest.raises(CheckpointError, match=r"checkpoints/2 cannot be read \(.*; other steps: 1$"):
        export.export_checkpoint(copied, tmp_path / "out")
    assert contents(copied) == before and not (tmp_path / "out").exists()
    export.export_checkpoint(copied, tmp_path / "out", step=1)


def test_base_model_that_has_moved(finished, tmp_path, copied):
    moved = tmp_path / "elsewhere"
    shutil.copytree(finished.model_dir, moved)
    stored = json.loads((copied / "config.json").read_text())
    stored["model"]["init"] = str(tmp_path / "gone")
    (copied / "config.json").write_text(json.dumps(stored))
    with pytest.raises(FileNotFoundError, match=r"gone does not exist .*name its new place with --base_model"):
        export.export_checkpoint(copied, tmp_path / "out")
    export.export_checkpoint(copied, tmp_path / "out", base_model=str(moved))
    assert_same(hf.load(tmp_path / "out")[1], finished.params[2])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("intermediate_size", 50, "not compatible"),
        ("tie_word_embeddings", False, "lacks .*lm_head"),
        ("model_type", "qwen2", "lacks .*k_bias"),
    ],
)
def test_base_model_of_another_shape(finished, tmp_path, field, value, message):
    base = tmp_path / "base"
    shutil.copytree(finished.model_dir, base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(CheckpointError, match=message):
        export.export_checkpoint(finished.workdir, tmp_path / "out", base_model=str(base))
    assert not (tmp_path / "out").exists()


def test_places_that_are_no_earlier_export(finished, tmp_path, copied):
    before = contents(copied)
    for out in (copied, copied / "checkpoints", copied / "checkpoints" / "2", finished.model_dir.parent, tmp_path):
        with pytest.raises(FileExistsError, match=r"holds other files and no seed_jax\.json"):
            export.export_checkpoint(copied, out)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="is a file; give a directory"):
        export.export_checkpoint(copied, tmp_path / "file")
    assert contents(copied) == before
    export.export_checkpoint(copied, copied / "export", step=1)
    export.export_checkpoint(copied, copied / "export", step=2)
    assert_same(hf.load(copied / "export")[1], finished.params[2])


def test_card_of_a_model_that_sees():
    seeing = tiny.vision_spec(50)
    assert yaml.safe_load(model_card.header(seeing, None))["pipeline_tag"] == "image-text-to-text"
    lines = model_card.use(seeing, 12, "")
    compile(lines, "card", "exec")
    assert "AutoModelForImageTextToText" in lines and "max_new_tokens=12" in lines
