"""A hub id is fetched through the local cache of the Hugging Face Hub; without a network the error says what to do."""

from __future__ import annotations

import shutil

import huggingface_hub
import jax
import numpy as np
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects

from seed_jax.models import hf
from seed_jax.models.spec import ModelSpec, init_params

SPEC = ModelSpec(vocab_size=31, d_model=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, d_ff=24)


@pytest.fixture
def params():
    return init_params(SPEC, jax.random.key(0))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def fill(cache, params) -> None:
    """What a download leaves in the cache."""
    repo, commit = cache / "models--org--tiny", "0123456789" * 4
    hf.save(params, SPEC, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)


def test_cached_model(cache, params):
    fill(cache, params)
    assert hf.resolve("org/tiny").parts[-4] == "hub"
    spec, loaded = hf.load("org/tiny")
    assert spec == SPEC
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_a_directory_of_that_name_comes_first(cache, params, tmp_path, monkeypatch):
    fill(cache, params)
    monkeypatch.chdir(tmp_path)
    hf.save(jax.tree.map(lambda leaf: leaf + 1, params), SPEC, "org/tiny")
    np.testing.assert_array_equal(hf.load("org/tiny")[1]["embed"], params["embed"] + 1)
    shutil.rmtree("org")
    np.testing.assert_array_equal(hf.load("org/tiny")[1]["embed"], params["embed"])


def test_without_a_network_the_error_names_the_model_and_the_remedy(cache):
    with pytest.raises(FileNotFoundError) as error:
        hf.load("Qwen/Qwen2.5-0.5B-Instruct")
    message = str(error.value)
    assert "no directory Qwen/Qwen2.5-0.5B-Instruct" in message
    assert "hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir DIR" in message
    assert "LocalEntryNotFoundError" in message and "\n" not in message


@pytest.mark.parametrize("name", ["/org/tiny", "./org/tiny", "tiny", "org/tiny/main", "-org/tiny", "~/org"])
def test_only_two_plain_names_are_a_hub_id(name, cache, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(FileNotFoundError, match="does not exist"):
        hf.load(name)


def test_only_the_files_of_a_model_are_fetched(monkeypatch, tmp_path):
    asked = {}

    def download(repo, allow_patterns):
        asked[repo] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hf.resolve("org/other") == tmp_path
    wanted = {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt",
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json",
        "chat_template.jinja",
    }  # fmt: skip
    other = {".gitattributes", "README.md", "LICENSE", "pytorch_model.bin", "model.onnx", "tf_model.h5", "modeling.py"}
    assert set(filter_repo_objects(sorted(wanted | other), allow_patterns=asked["org/other"])) == wanted
