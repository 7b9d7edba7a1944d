"""Configs, processors and checkpoints of Qwen2.5-VL, in the forms of the hub and of transformers."""

from __future__ import annotations

import copy
import dataclasses
import json

import jax
import numpy as np
import pytest

from seed_jax import tokenizer as tok
from seed_jax.models import hf, published, transformer
from seed_jax.models.spec import ModelSpec, init_params, iterate, weights
from seed_jax.models.vision_spec import VisionSpec
from seed_jax.sharding import make_mesh
from tests import tiny
from tests.models import seeing
from tests.models.seeing import SPEC

# The config.json of Qwen2.5-VL-3B-Instruct on the hub, without what decides nothing here.
HUB_3B = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "vision_start_token_id": 151652, "vision_end_token_id": 151653, "vision_token_id": 151654,
    "image_token_id": 151655, "video_token_id": 151656, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 128000, "max_window_layers": 70,
    "model_type": "qwen2_5_vl", "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    "vision_config": {
        "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
        "in_chans": 3, "out_hidden_size": 2048, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
        "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}  # fmt: skip


def changed(path: str, value) -> dict:
    """HUB_3B with one field replaced, or removed (value ...)."""
    config = copy.deepcopy(HUB_3B)
    *parents, field = path.split(".")
    inner = config
    for name in parents:
        inner = inner[name]
    inner[field] = value
    if value is ...:
        del inner[field]
    return config


def test_config_of_the_hub():
    spec = ModelSpec.from_hf(HUB_3B)
    assert (spec.rope_sections, spec.rope_scaling, spec.rope_theta, spec.rms_eps) == ((16, 24, 24), None, 1e6, 1e-6)
    assert spec.qkv_bias and spec.tie_embeddings and spec.max_position == 128000
    tower = VisionSpec(
        depth=32, d_model=1280, num_heads=16, d_ff=3420, image_token=151655, start_token=151652, end_token=151653
    )
    assert spec.vision == tower and tower.full_layers == (7, 15, 23, 31) and tower.window == 112
    assert spec == published.spec("Qwen/Qwen2.5-VL-3B-Instruct")
    assert ModelSpec.from_hf(json.loads(json.dumps(spec.to_hf()))) == spec


@pytest.mark.parametrize(("name", "parameters"), [("qwen2.5-vl-3b", 3_754_622_976), ("qwen2.5-vl-7b", 8_292_166_656)])
def test_published_sizes(name, parameters):
    spec = published.spec(name)
    assert spec.num_params == parameters
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.Qwen2_5_VLForConditionalGeneration(transformers.Qwen2_5_VLConfig.from_dict(spec.to_hf()))
    model.tie_weights()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_config_of_transformers():
    """The nested form that transformers 5 writes means the same as the flat one that it reads."""
    transformers = pytest.importorskip("transformers")
    spec = ModelSpec.from_hf(HUB_3B)
    for config in (HUB_3B, spec.to_hf(), seeing.SPEC.to_hf()):
        nested = json.loads(transformers.Qwen2_5_VLConfig.from_dict(copy.deepcopy(config)).to_json_string())
        assert "hidden_size" not in nested and nested["text_config"]["rope_parameters"]["mrope_section"]
        assert ModelSpec.from_hf(nested) == ModelSpec.from_hf(config)


def test_fields_that_equal_the_defaults_of_transformers_may_be_missing():
    for path in ("vision_config.depth", "vision_config.num_heads", "vision_config.fullatt_block_indexes",
                 "image_token_id", "vision_start_token_id", "rope_theta", "rope_scaling"):  # fmt: skip
        assert ModelSpec.from_hf(changed(path, ...)) == ModelSpec.from_hf(HUB_3B), path
    assert ModelSpec.from_hf(changed("rms_norm_eps", ...)).rms_eps == 1e-5


def test_a_longer_context_keeps_its_sections():
    stretched = {"type": "yarn", "mrope_section": [16, 24, 24], "factor": 4, "original_max_position_embeddings": 32768}
    spec = ModelSpec.from_hf(changed("rope_scaling", stretched))
    assert (spec.rope_scaling.kind, spec.rope_scaling.factor, spec.rope_sections) == ("yarn", 4.0, (16, 24, 24))
    assert ModelSpec.from_hf(json.loads(json.dumps(spec.to_hf()))) == spec


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("model_type", "qwen2_vl", r"model_type='qwen2_vl' is not supported; use one of .*qwen2_5_vl"),
        ("vision_config", ..., r"vision_config=None must describe the vision tower"),
        ("vision_config.patch_size", 16, r"vision_config\.patch_size=16 is not supported; only 14 is"),
        ("vision_config.spatial_merge_size", 4, r"vision_config\.spatial_merge_size=4 .*only 2 is"),
        ("vision_config.temporal_patch_size", 1, r"vision_config\.temporal_patch_size=1 .*only 2 is"),
        ("vision_config.in_chans", 1, r"vision_config\.in_chans=1 .*only 3 is"),
        ("vision_config.hidden_act", "gelu", r"vision_config\.hidden_act='gelu' .*only 'silu' is"),
        ("vision_config.rope_parameters", {"rope_type": "axial", "rope_theta": 5.0}, r"rope_theta=5\.0 is not"),
        ("vision_config.out_hidden_size", 3584, r"out_hidden_size=3584 is not .*hidden_size=2048"),
        ("vision_config.hidden_size", "wide", r"vision_config\.hidden_size='wide' must be an integer"),
        ("vision_config.num_heads", 33, r"d_model=1280 over num_heads=33 is no multiple of 4"),
        ("vision_config.window_size", 100, r"window=100 pixels must be a multiple of a cell of 28"),
        ("image_token_id", None, r"image_token_id=None must be an integer"),
        ("rope_scaling", {"type": "mrope", "mrope_section": [16, 24, 16]}, r"\(16, 24, 16\) .*head_dim=128"),
        ("rope_scaling", {"type": "mrope", "mrope_section": [64]}, r"\(64,\) .*must be three numbers"),
        ("rope_scaling", {"type": "mrope", "mrope_section": "16"}, r"mrope_section='16' must be a list"),
        ("hidden_act", "gelu", r"hidden_act='gelu'"),
        ("use_sliding_window", True, r"use_sliding_window"),
    ],
)
def test_unsupported_config_names_the_field(path, value, message):
    with pytest.raises(ValueError, match=message):
        ModelSpec.from_hf(changed(path, value))


def test_impossible_specs():
    with pytest.raises(ValueError, match=r"vision=VisionSpec.* does not exist in model_type='qwen2'"):
        dataclasses.replace(SPEC, model_type="qwen2")
    with pytest.raises(ValueError, match=r"vision=None does not exist in model_type='qwen2_5_vl'"):
        dataclasses.replace(SPEC, vision=None)
    with pytest.raises(ValueError, match=r"rope_sections=\(1, 1, 2\).*and \(\) for others"):
        dataclasses.replace(SPEC, vision=None, model_type="qwen2")
    with pytest.raises(ValueError, match=r"max_pixels=3000 is less than min_pixels=3136"):
        dataclasses.replace(SPEC.vision, max_pixels=3000)


# -- the image processor -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("processor", "limits"),
    [
        ({"min_pixels": 6272, "max_pixels": 78400, "patch_size": 14, "merge_size": 2}, (6272, 78400)),
        ({"size": {"shortest_edge": 6272, "longest_edge": 78400}}, (6272, 78400)),
        ({"size": {"min_pixels": 6272, "max_pixels": 78400}, "min_pixels": 3136, "max_pixels": None}, (3136, 78400)),
        ({"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}, (3136, 1003520)),
    ],
    ids=["old", "new", "oldest", "none"],
)
def test_limits_of_the_processor(tmp_path, processor, limits):
    out = hf.save(seeing.make_params(), SPEC, tmp_path / "model")
    (out / "preprocessor_config.json").write_text(json.dumps(processor))
    vision = hf.load_spec(out).vision
    assert (vision.min_pixels, vision.max_pixels) == limits
    (out / "preprocessor_config.json").unlink()
    (out / "processor_config.json").write_text(json.dumps({"image_processor": processor}))
    assert hf.load_spec(out).vision == vision


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        ({"patch_size": 16}, r"patch_size=16 is not supported; only patches of 14 pixels, 2 x 2"),
        ({"merge_size": 1}, r"merge_size=1 is not supported"),
        ({"temporal_patch_size": 1}, r"temporal_patch_size=1 is not supported"),
        ({"image_mean": [0.5, 0.5, 0.5]}, r"image_mean=\[0\.5, 0\.5, 0\.5\] is not supported; only that of CLIP"),
        ({"image_std": [0.5]}, r"image_std=\[0\.5\] is not supported"),
        ({"max_pixels": "many"}, r"max_pixels='many' must be an integer"),
        ({"size": {"longest_edge": 100}}, r"max_pixels=100 is less than min_pixels=3136"),
    ],
)
def test_another_processor_is_refused(tmp_path, processor, message):
    out = hf.save(seeing.make_params(), SPEC, tmp_path / "model")
    (out / "preprocessor_config.json").write_text(json.dumps(processor))
    with pytest.raises(ValueError, match=rf"preprocessor_config\.json: .*{message}"):
        hf.load(out)
    (out / "preprocessor_config.json").write_text("{")
    with pytest.raises(hf.CheckpointError, match=r"preprocessor_config\.json is not valid JSON"):
        hf.load(out)


def test_exports_keep_the_processor(tmp_path):
    """What the base model's directory says is copied; without one, the export says what its spec says."""
    small = dataclasses.replace(SPEC, vision=dataclasses.replace(SPEC.vision, min_pixels=784, max_pixels=784 * 9))
    params = seeing.make_params()
    out = hf.save(params, small, tmp_path / "one")
    assert hf.load_spec(out) == small
    transformers = pytest.importorskip("transformers")
    if hasattr(transformers, "Qwen2VLImageProcessorPil"):
        assert transformers.Qwen2VLImageProcessorPil.from_pretrained(out).size.longest_edge == 784 * 9
    base = tmp_path / "base"
    base.mkdir()
    (base / "tokenizer.json").write_text("{}")
    for name in hf.PROCESSOR_FILES:
        (base / name).write_text('{"min_pixels": 1568}')
    copied = hf.save(params, small, tmp_path / "two", base)
    assert {path.name for path in copied.iterdir()} > set(hf.PROCESSOR_FILES)
    assert hf.load_spec(copied).vision.min_pixels == 1568


# -- weights -----------------------------------------------------------------------------------------------------------


def assert_same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.fixture(scope="module")
def torch_model(tmp_path_factory):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    return seeing.torch_model(tmp_path_factory.mktemp("seeing") / "model")


@pytest.mark.parametrize("original", [True, False], ids=["hub layout", "transformers layout"])
def test_checkpoint_that_transformers_wrote(torch_model, tmp_path, original):
    torch_model.save_pretrained(tmp_path / "theirs", save_original_format=original, max_shard_size="60KB")
    index = json.loads((tmp_path / "theirs" / hf.INDEX_FILE).read_text())["weight_map"]
    assert ("visual.merger.ln_q.weight" if original else "model.visual.merger.ln_q.weight") in index
    spec, params = hf.load(tmp_path / "theirs")
    assert spec == SPEC
    assert_same(params, seeing.make_params())


def test_sharded_round_trip_is_bitwise(tmp_path):
    params = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), seeing.make_params())
    out = hf.save(params, SPEC, tmp_path / "model", dtype="bfloat16", max_shard_bytes=50_000)
    spec, again = hf.load(out, dtype="bfloat16")
    assert spec == SPEC and (out / hf.INDEX_FILE).is_file()
    assert_same(again, params)


def test_load_onto_a_mesh(tmp_path):
    """Every device reads its part of fused and of five-dimensional weights."""
    mesh = make_mesh(fsdp=4, tensor=2)
    _, loaded = hf.load(hf.save(seeing.make_params(), SPEC, tmp_path / "model"), mesh)
    assert_same(loaded, seeing.make_params())
    tower = loaded["vision"]
    assert tower["layers"]["qkv"].addressable_shards[0].data.shape == (7, 8, 3, 1, 16)
    assert tower["patch"].addressable_shards[0].data.shape == (14, 14, 2, 3, 8)


def test_missing_tensor_of_the_tower(tmp_path):
    deeper = dataclasses.replace(SPEC, vision=dataclasses.replace(SPEC.vision, depth=8))
    out = hf.save(seeing.make_params(), SPEC, tmp_path / "model")
    (out / "config.json").write_text(json.dumps(deeper.to_hf()))
    with pytest.raises(hf.CheckpointError, match=r"lacks 12 tensor\(s\).*visual\.blocks\.7\.attn"):
        hf.load(out)


def test_initial_weights_follow_the_table():
    params = jax.jit(init_params, static_argnums=0)(SPEC, jax.random.key(1))
    for path, weight in iterate(weights(SPEC)["vision"]):
        leaf = params["vision"]
        for step in path.split("/"):
            leaf = leaf[step]
        assert leaf.shape == weight.shape
        if weight.std is None:
            np.testing.assert_array_equal(leaf, weight.fill)
        else:
            assert abs(np.std(leaf) / weight.std - 1) < 4 / np.sqrt(2 * leaf.size)


# -- the tiny model of the end-to-end tests ----------------------------------------------------------------------------


def test_tiny_model_reads_a_prompt_with_an_image(tmp_path):
    out = tiny.vision_model(tmp_path / "model")
    spec, params = hf.load(out)
    tokenizer = tok.load_tokenizer(out, vision=spec.vision)
    image = seeing.random_images(56, 84)
    (ids,) = tok.encode_prompts(tokenizer, ["look: <image> !"], images=[[image]])
    assert tokenizer.decode(ids) == (
        f"<|im_start|>user\nlook: <|vision_start|>{'<|image_pad|>' * 6}<|vision_end|> !<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tok.decode(tokenizer, tok.encode_response(tokenizer, "<action>Push_ö</action>")) == "<action>Push_ö</action>"
    tokens = np.array(ids, np.int32)[None]
    positions = np.arange(len(ids))[None]
    hidden = transformer.hidden_states(params, spec, tokens, np.ones_like(tokens), positions, images=image[None, None])
    assert np.isfinite(hidden).all()
