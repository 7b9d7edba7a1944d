"""Sizes of published models by name, so that programs can be compiled for them without their weights.

Each is the part of the model's config.json on the Hugging Face Hub that decides shapes.
"""

from __future__ import annotations

from seed_jax.models.spec import ModelSpec

_QWEN25 = {"model_type": "qwen2", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
_QWEN3 = {"model_type": "qwen3", "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6}

_QWEN25_VL = {
    "model_type": "qwen2_5_vl", "max_position_embeddings": 128000, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}  # fmt: skip
_VISION = {
    "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}  # fmt: skip

CONFIGS = {
    "qwen2.5-3b": _QWEN25 | {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "qwen2.5-7b": _QWEN25 | {
        "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
    },
    "qwen2.5-vl-3b": _QWEN25_VL | {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 2, "tie_word_embeddings": True,
        "vision_config": _VISION | {"out_hidden_size": 2048},
    },
    "qwen2.5-vl-7b": _QWEN25_VL | {
        "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
        "vision_config": _VISION | {"out_hidden_size": 3584},
    },
    "qwen3-1.7b": _QWEN3 | {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    },
}  # fmt: skip


def spec(name: str) -> ModelSpec:
    """The model of that name, in any case and with an organisation before it or an ending of its kind behind it
    ("Qwen/Qwen2.5-3B-Instruct"). Raises KeyError for one that is not in the table."""
    short = name.rsplit("/", 1)[-1].lower()
    for known, config in CONFIGS.items():
        if short == known or short.removeprefix(known) in ("-instruct", "-base"):
            return ModelSpec.from_hf(config)
    raise KeyError(name)
