from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

from seed_jax.models.spec import ModelSpec, init_params, iterate, logical_axes, weights

QWEN25_05B = {
    "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "hidden_act": "silu", "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "max_window_layers": 21,
    "tie_word_embeddings": True, "use_sliding_window": False,
}  # fmt: skip
QWEN3_06B = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-06, "rope_theta": 1000000, "rope_scaling": None,
    "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False, "attention_bias": False,
}  # fmt: skip
SMOLLM2_135M = {
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_act": "silu", "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05, "rope_theta": 100000, "rope_scaling": None, "tie_word_embeddings": True,
    "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "published"),
    [(QWEN25_05B, 494_032_768), (QWEN3_06B, 596_049_920), (SMOLLM2_135M, 134_515_008)],
    ids=["qwen2.5-0.5b", "qwen3-0.6b", "smollm2-135m"],
)
def test_published_configs_have_the_published_number_of_parameters(config, published):
    spec = ModelSpec.from_hf(config)
    assert spec.num_params == published
    assert ModelSpec.from_hf(json.loads(json.dumps(spec.to_hf()))) == spec


def test_both_spellings_of_the_rope_base():
    old = ModelSpec.from_hf(QWEN25_05B)
    new = {key: value for key, value in QWEN25_05B.items() if key != "rope_theta"}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 1000000.0}
    assert ModelSpec.from_hf(new) == old
    assert old.rope_theta == 1e6


@pytest.mark.parametrize("name", ["Qwen2Config", "Qwen3Config", "LlamaConfig"])
def test_config_that_transformers_writes(name):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, name)(
        vocab_size=99, hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, rope_parameters={"rope_type": "default", "rope_theta": 5e5}, max_position_embeddings=77,
    )  # fmt: skip
    spec = ModelSpec.from_hf(json.loads(config.to_json_string()))
    assert (spec.vocab_size, spec.d_model, spec.d_ff, spec.num_layers) == (99, 64, 80, 2)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (8, 2, getattr(config, "head_dim", 8))
    assert (spec.rope_theta, spec.max_position, spec.tie_embeddings) == (5e5, 77, False)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "mistral"),
        ("model_type", None),
        ("num_experts", 8),
        ("num_local_experts", 4),
        ("use_sliding_window", True),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("rope_scaling", {"rope_type": "dynamic", "factor": 4.0}),
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}),
        ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}),
        ("hidden_act", "gelu"),
        ("quantization_config", {"quant_method": "awq"}),
        ("hidden_size", None),
        ("vocab_size", "many"),
        ("num_hidden_layers", 0),
        ("num_key_value_heads", 4),
    ],
)
def test_unsupported_config_names_the_field(field, value):
    ours = {"num_hidden_layers": "num_layers", "num_key_value_heads": "num_kv_heads"}.get(field, field)
    with pytest.raises(ValueError, match=ours):
        ModelSpec.from_hf({**QWEN25_05B, field: value})


@pytest.mark.parametrize(("field", "value"), [("attention_bias", True), ("mlp_bias", True), ("pretraining_tp", 2)])
def test_unsupported_llama_config_names_the_field(field, value):
    with pytest.raises(ValueError, match=field):
        ModelSpec.from_hf({**SMOLLM2_135M, field: value})


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gpt2"}, {"num_kv_heads": 3}, {"head_dim": 7}, {"head_dim": 16}, {"qkv_bias": False},
        {"qk_norm": True}, {"rope_theta": 0.0}, {"vocab_size": 0},
    ],
    ids=str,
)  # fmt: skip
def test_impossible_spec_names_the_field(change):
    good = {"vocab_size": 50, "d_model": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    good["d_ff"] = 64
    ModelSpec(**good)
    with pytest.raises(ValueError, match=next(iter(change))):
        ModelSpec(**{**good, **change})


def test_parameters_follow_the_table(spec):
    params = init_params(spec, jax.random.key(1))
    table, axes = weights(spec), logical_axes(spec)
    assert jax.tree.structure(params) == jax.tree.structure(table, is_leaf=lambda node: hasattr(node, "hf_name"))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == spec.num_params
    for path, weight in iterate(table):
        leaf, leaf_axes = params, axes
        for step in path.split("/"):
            leaf, leaf_axes = leaf[step], leaf_axes[step]
        assert leaf.shape == weight.shape and len(leaf_axes) == leaf.ndim
        if weight.std is None:
            np.testing.assert_array_equal(leaf, weight.fill)
        else:
            # Standard error of a sample standard deviation is std / sqrt(2 n); four of them.
            assert abs(np.std(leaf) / weight.std - 1) < 4 / np.sqrt(2 * leaf.size)


def test_spec_is_a_static_argument(spec):
    assert hash(spec) == hash(dataclasses.replace(spec))
    assert jax.jit(lambda s, x: x + s.d_model, static_argnums=0)(spec, 1) == spec.d_model + 1
