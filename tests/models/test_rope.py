from __future__ import annotations

import json

import numpy as np
import pytest

from seed_jax.models import rope, transformer
from seed_jax.models.rope import RopeScaling
from seed_jax.models.spec import ModelSpec

CONFIG = {
    "model_type": "llama", "vocab_size": 99, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 4096,
    "rope_theta": 5e5,
}  # fmt: skip
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn, whole context": {"rope_type": "yarn", "factor": 2.0},
    "yarn, every field": {
        "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256, "beta_fast": 20.0,
        "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False,
    },
    "yarn, stated magnitude": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "attention_factor": 1.25
    },
}  # fmt: skip


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("section", ["rope_scaling", "rope_parameters"])
def test_frequencies_match_transformers(scaling, section):
    """Both spellings, against the functions that transformers' models call."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = {**CONFIG, section: {**scaling, "rope_theta": 3e5} if section == "rope_parameters" else dict(scaling)}
    spec = ModelSpec.from_hf(config)
    theirs = transformers.LlamaConfig(**json.loads(json.dumps(config)))
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)
    assert spec.rope_theta == theirs.rope_parameters["rope_theta"]
    np.testing.assert_allclose(
        rope.inverse_frequencies(spec.head_dim, spec.rope_theta, spec.rope_scaling), rotary.inv_freq.numpy(), rtol=1e-6
    )
    np.testing.assert_allclose(rope.magnitude(spec.rope_scaling), rotary.attention_scaling, rtol=1e-7)


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_cosines_and_sines_match_transformers(scaling):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = {**CONFIG, "rope_scaling": dict(scaling)}
    spec = ModelSpec.from_hf(config)
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(transformers.LlamaConfig(**config))
    positions = np.arange(0, 4096, 57)[None]
    for ours, theirs in zip(
        transformer.rope_table(spec, positions), rotary(torch.zeros(1), torch.tensor(positions)), strict=True
    ):
        # Positions of thousands of radians, in float32.
        np.testing.assert_allclose(ours, theirs.numpy()[..., : spec.head_dim // 2], atol=1e-3)


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_config_round_trip(scaling):
    spec = ModelSpec.from_hf({**CONFIG, "rope_scaling": scaling})
    written = json.loads(json.dumps(spec.to_hf()))
    assert ModelSpec.from_hf(written) == spec
    for section in ("rope_scaling", "rope_parameters"):  # each spelling says everything
        alone = {key: value for key, value in written.items() if key != section}
        assert ModelSpec.from_hf(alone) == spec
    assert hash(spec) == hash(ModelSpec.from_hf(written))


def test_transformers_reads_what_we_write():
    transformers = pytest.importorskip("transformers")
    spec = ModelSpec.from_hf({**CONFIG, "rope_scaling": SCALINGS["llama3"]})
    theirs = transformers.LlamaConfig(**spec.to_hf())
    assert theirs.rope_parameters == {**SCALINGS["llama3"], "rope_theta": 5e5}


def test_fields_beside_the_section():
    """`type` is the old name of `rope_type`; an original context beside the section wins, as in transformers."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    spec = ModelSpec.from_hf({**CONFIG, "rope_scaling": scaling, "original_max_position_embeddings": 2048})
    assert spec.rope_scaling == RopeScaling("yarn", 4.0, original_max_position=2048)
    ignored = ModelSpec.from_hf({**CONFIG, "rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0}})
    assert ignored.rope_scaling == RopeScaling("linear", 2.0)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, r"rope_scaling\.rope_type='dynamic'.*default, linear, llama3, yarn"),
        ({"type": "longrope", "short_factor": [1.0]}, r"rope_type='longrope'.*default, linear, llama3, yarn"),
        ({"rope_type": "linear"}, r"rope_scaling\.factor is missing"),
        ({"rope_type": "linear", "factor": "2"}, r"rope_scaling\.factor='2' must be a number"),
        ({"rope_type": "linear", "factor": 0.5}, r"rope_scaling: factor=0\.5"),
        ({"rope_type": "yarn", "factor": float("inf")}, r"rope_scaling\.factor=inf"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_slow": 40}, r"beta_slow=40\.0"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, r"high_freq_factor is missing"),
        ({"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}, r"low_freq_factor=4\.0"),
        ({"rope_type": "default", "mrope_section": [16, 24, 24]}, r"mrope_section=\[16, 24, 24\].*no field but"),
        ({"rope_type": "yarn", "factor": 2.0, "betafast": 3}, r"betafast=3.*'yarn' reads factor, original_max_pos"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5.*rope_scaling"),
    ],
    ids=lambda value: value.get("rope_type", "longrope") if isinstance(value, dict) else "",
)
def test_unsupported_scaling_names_the_field(scaling, message):
    with pytest.raises(ValueError, match=message):
        ModelSpec.from_hf({**CONFIG, "rope_scaling": scaling})


def test_impossible_scaling():
    with pytest.raises(ValueError, match=r"'ntk'.*default, linear, llama3, yarn"):
        RopeScaling("ntk", 2.0)
    with pytest.raises(ValueError, match="original_max_position=0"):
        RopeScaling("llama3", 8.0)
