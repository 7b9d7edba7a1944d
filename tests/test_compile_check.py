"""The compile check on toy models: its programs compile for a real slice, its figures follow from the sizes, what does
not fit and what cannot work is said in a line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from configs import alfworld
from launch import shipped_table, slice_check
from seed_jax import aot, compile_check
from seed_jax.models import published
from seed_jax.models.spec import ModelSpec, init_params
from seed_jax.models.transformer import hidden_states

ROOT = Path(__file__).resolve().parents[1]
needs_libtpu = pytest.mark.skipif(aot.missing() is not None, reason=str(aot.missing()))

LAYERS, WIDTH, FFN, VOCAB, HEADS, KV_HEADS, HEAD = 2, 256, 512, 1024, 4, 2, 128
TOY = {
    "model_type": "qwen2", "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": FFN,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
}  # fmt: skip
SMALL = (
    "pack.row_tokens=512", "pack.teacher_row_tokens=1024", "pack.scored_tokens_per_row=128", "sft.row_tokens=512",
    "sft.scored_tokens_per_row=128", "rollout.batch=32", "rollout.analysis_batch=4", "rollout.max_prompt_tokens=256",
    "rollout.max_response_tokens=64", "hindsight.max_analysis_tokens=1024", "rollout.tasks=2", "rollout.group=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    # head_dim is not d_model / num_heads here, which Qwen2's config cannot say; Qwen3's can.
    (directory / "config.json").write_text(json.dumps(TOY | {"model_type": "qwen3", "head_dim": HEAD}))
    return directory


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: libtpu is loaded once a process, and must not see the tests' eight devices."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "launch.compile_check", *flags],
        capture_output=True, text=True, env=environment, cwd=ROOT, timeout=600,
    )  # fmt: skip


@pytest.mark.slow
@needs_libtpu
def test_every_program_of_a_run_compiles_for_a_slice(model):
    """v5e:4x4 has four hosts: training over 16 chips, decoding on two chips of one host."""
    small = [f"--config.{setting}" for setting in (*SMALL, "mesh.decode_tensor=2")]
    done = run(f"--model={model}", "--topology=v5e:4x4", "--json", *small)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found.pop("fits") is True
    assert list(found) == list(compile_check.NAMES)
    layer = WIDTH * HEAD * (2 * HEADS + 2 * KV_HEADS) + 3 * WIDTH * FFN
    params = VOCAB * WIDTH + LAYERS * layer
    # float32 master and two moments, bfloat16 reference; one row of a batch on each chip is 4 x 32 kB and a little
    update = found["update"]
    assert 14 * params / 16 < update["args_gb"] * 1e9 < 14 * params / 16 + 1.5e6
    assert update["settings"] == {"pack.rows_per_micro": 64, "pack.micros_per_mini": 1}
    assert update["rows_per_chip"] == 4
    assert 12 * params / 16 < found["sft"]["args_gb"] * 1e9 < 12 * params / 16 + 1.5e6
    assert found["reshard"]["output_gb"] * 1e9 == pytest.approx(2 * params / 2, rel=0.1)
    # Forward passes of a mini-batch: student twice and in the gradient, 4 (with full remat, whose last product is left
    # out), teacher once with rows of twice the length. Attention: causal half; 3.5 times the forward pass in backward.
    rows = 4
    matrices = 2 * LAYERS * layer * rows * (512 * 6 + 1024)
    down = 2 * LAYERS * WIDTH * FFN * rows * 512
    head = 2 * WIDTH * VOCAB * rows * 128 * (3 + 4)
    pairs = rows * 2 * 2 * HEADS * HEAD * LAYERS * (512**2 / 2 * 7.5 + 1024**2 / 2)
    assert update["flops"] == pytest.approx((matrices - down + head + pairs) * update["mini_batches"], rel=0.1)
    # A decode call of eight steps, four slots a replica: two flops a weight, token and step (one chip has half of them)
    decode = 8 * 4 * 2 * params / 2
    assert decode < found["decode"]["flops"] < 2 * decode


@pytest.mark.slow
@needs_libtpu
def test_a_copy_of_the_model_on_all_chips_of_a_host(model):
    """On v5e:4x4 these are chips 0, 1, 4 and 5, for which libtpu compiles nothing that does not span the slice.
    With the paged cache and its attention kernel likewise."""
    programs = "--programs=decode,decode_paged"
    done = run(f"--model={model}", "--topology=v5e:4x4", programs, "--config.mesh.decode_tensor=4")
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("decode")] == ["decode", "decode_paged"]
    assert lines[-1] == "fits"


@pytest.mark.slow
@needs_libtpu
def test_what_is_too_large_says_what_to_change(model):
    done = run(f"--model={model}", "--topology=v5e:2x2", "--programs=decode", "--config.rollout.batch=60000")
    assert done.returncode == 1, done.stderr[-2000:]
    assert "does not fit" in done.stdout
    assert "--config.mesh.decode_tensor=2" in done.stdout
    assert "rollout.batch" in done.stdout


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--topology=v5e:3x5",), "topology 'v5e:3x5' cannot be compiled for"),
        (("--topology=v5e:4x4", "--config.mesh.fsdp=3"), "does not use 16 devices"),
        (("--topology=v5e:4x4", "--config.mesh.decode_tensor=8"), "mesh.decode_tensor"),
        (("--topology=v5e:4x4", "--strict"), "--config.pack.rows_per_micro=64 --config.pack.micros_per_mini=1"),
    ],
)
def test_what_the_slice_cannot_do(flags, message):
    done = run(*flags)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("topology", ["v9:4x4", "v5e", "v5e:4x", "v5e:0x4", "4x4", ""])
def test_an_unknown_topology_names_the_known(topology):
    with pytest.raises(aot.TopologyError, match="v5e, v5p, v6e") as error:
        aot.chip(topology)
    assert repr(topology) in str(error.value)


def test_without_libtpu_the_package_is_named(monkeypatch):
    monkeypatch.setattr(aot, "missing", lambda: "libtpu is not installed; pip install -r requirements-tpu-check.txt")
    with pytest.raises(aot.TopologyError, match="requirements-tpu-check"):
        slice_check.make_plan(alfworld.get_config("seed"), "v5e:4x4")


def test_models_by_name_and_by_directory(model):
    assert slice_check.find_spec("Qwen/Qwen2.5-3B-Instruct") == published.spec("qwen2.5-3b")
    assert slice_check.find_spec(str(model)).head_dim == HEAD
    with pytest.raises(ValueError, match="'gpt' is neither one of qwen"):
        slice_check.find_spec("gpt")


@pytest.mark.parametrize(
    ("name", "billions", "cache_kib"), [("qwen2.5-3b", 3.09, 36), ("qwen2.5-7b", 7.62, 56), ("qwen3-1.7b", 1.72, 112)]
)
def test_published_sizes(name, billions, cache_kib):
    """Parameters as the model cards give them (the tied projection counted once); bfloat16 cache of a token."""
    spec = published.spec(name)
    assert spec.num_params / 1e9 == pytest.approx(billions, abs=0.006)
    assert 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 2 == cache_kib * 1024


@pytest.mark.parametrize(
    ("fsdp", "rows_per_chip", "expected"),
    [
        (8, 0, {}),  # the config's 8 rows, 8 times
        (16, 0, {"pack.rows_per_micro": 64, "pack.micros_per_mini": 1}),
        (3, 0, {"pack.rows_per_micro": 3, "pack.micros_per_mini": 21}),
        (64, 0, {"pack.rows_per_micro": 64, "pack.micros_per_mini": 1}),
        (256, 0, {"pack.rows_per_micro": 256, "pack.micros_per_mini": 1}),
        (16, 2, {"pack.rows_per_micro": 32, "pack.micros_per_mini": 2}),
        (256, 4, {"pack.rows_per_micro": 1024, "pack.micros_per_mini": 1}),
    ],
)
def test_rows_are_split_so_that_the_mini_batch_stays(fsdp, rows_per_chip, expected):
    assert compile_check.split_rows(alfworld.get_config("seed"), fsdp, rows_per_chip) == expected


def test_the_shipped_page_has_what_was_compiled():
    report = compile_check.Report(
        "update", 2.7e9, 0.0, 4e9, 0.0, 16e9, 9e15, 2e13, {"all-gather": 2e11}, 3.0, 90.0, 45.7, "compute"
    )
    case = {"update": report.as_json() | {"settings": {}, "rows_per_chip": 4.0, "mini_batches": 9}}
    page = shipped_table.page({"qwen2.5-3b v5e:4x4": case})
    assert "| update | 2.70 | 0.00 | 4.00 | 0.00 | 6.70 of 16 | yes | 9e+03 | 2e+04 | 200 | 45.7 s | compute |" in page
    assert page.count("## ") == 1


def test_a_frozen_copy_scores_as_the_original():
    """With the compute dtype of the model: matrices are rounded before they are used in either case."""
    from seed_jax.train.state import frozen

    spec = ModelSpec(
        vocab_size=61, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=48, qkv_bias=True,
        tie_embeddings=False,
    )  # fmt: skip
    params = jax.tree.map(lambda x: x + 0.123, init_params(spec, jax.random.key(0)))
    copy = frozen(params, "bfloat16")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(copy)} == {"bfloat16", "float32"}
    assert sum(x.nbytes for x in jax.tree.leaves(copy)) < 0.54 * sum(x.nbytes for x in jax.tree.leaves(params))
    tokens = jnp.arange(40, dtype=jnp.int32).reshape(2, 20)
    ones, places = jnp.ones_like(tokens), jnp.broadcast_to(jnp.arange(20), tokens.shape)
    run = jax.jit(lambda p: hidden_states(p, spec, tokens, ones, places, dtype=jnp.bfloat16))
    assert (run(params) == run(copy)).all()
