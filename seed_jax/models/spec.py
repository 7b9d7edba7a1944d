"""What a model is: its sizes (`ModelSpec`) and its one table of weights (`weights`).

The initializer, the sharding and the Hugging Face name of every tensor derive from that table; nothing else in the
project lists weights. Supported: the dense decoder block that Qwen2.5, Qwen3 and Llama share (RMSNorm, rotary
positions, grouped-query attention, gated SiLU feed-forward), with Qwen2's QKV bias and Qwen3's QK-norm as options, and
Qwen2.5-VL, which is Qwen2.5 with a vision tower.

Glossary: V vocab, D model, H heads, K kv heads, F ffn, L layers, hd head dim.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from seed_jax.models import rope, vision_weights
from seed_jax.models import weight as weight_lib
from seed_jax.models.vision_spec import VisionSpec
from seed_jax.models.weight import Weight

ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
}
MODEL_TYPES = tuple(ARCHITECTURES)
_WITH_BIAS = ("qwen2", "qwen2_5_vl")  # the same decoder

# A config.json may leave out what equals the class default of `transformers`; these are those defaults.
_DEFAULT_HEAD_DIM = {"qwen3": 128}
_DEFAULT_MAX_POSITION = {"llama": 2048}
_DEFAULT_VISION = {"rms_norm_eps": 1e-5, "rope_theta": 1e6}
_EMBED_STD = 0.02


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """Sizes and switches of one decoder-only transformer. Hashable, so it can be a static argument of `jax.jit`.

    head_dim: size of one attention head; need not be d_model / num_heads (Qwen3)
    rope_theta: base wavelength of the rotary embedding
    rms_eps: epsilon inside the square root of RMSNorm
    tie_embeddings: the output projection is the embedding table
    qkv_bias: bias on the query, key and value projections (Qwen2)
    qk_norm: RMSNorm over each query and key head before the rotation (Qwen3)
    max_position: largest context the weights were trained for, in tokens; written to config.json, never enforced here
    rope_scaling: stretching of the rotary embedding to longer contexts; None for none
    vision: the vision tower; None for a model of text alone
    rope_sections: rotated pairs of a head that read the frame, the row and the column of a position (M-RoPE, arXiv
        2409.12191); () if a position is one number
    """

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    rope_theta: float = 10_000.0
    rms_eps: float = 1e-6
    tie_embeddings: bool = True
    qkv_bias: bool = True
    qk_norm: bool = False
    model_type: str = "qwen2"
    max_position: int = 32768
    rope_scaling: rope.RopeScaling | None = None
    vision: VisionSpec | None = None
    rope_sections: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.model_type not in MODEL_TYPES:
            raise ValueError(f"model_type={self.model_type!r} is not supported; use one of {', '.join(MODEL_TYPES)}")
        for name in ("vocab_size", "d_model", "num_layers", "num_heads", "num_kv_heads", "head_dim", "d_ff"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; "
                "each key/value head serves the same number of query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; the rotary embedding rotates pairs, so use an even one")
        if self.rope_theta <= 0 or self.rms_eps < 0:
            raise ValueError(f"rope_theta={self.rope_theta} must be positive and rms_eps={self.rms_eps} not negative")
        self._check_family()

    def _check_family(self) -> None:
        """The `transformers` class of each family fixes bias and QK-norm; a mismatch could not be exported."""
        if self.qkv_bias != (self.model_type in _WITH_BIAS):
            raise ValueError(f"qkv_bias={self.qkv_bias} does not exist in model_type={self.model_type!r}")
        if self.qk_norm != (self.model_type == "qwen3"):
            raise ValueError(f"qk_norm={self.qk_norm} does not exist in model_type={self.model_type!r}")
        if self.model_type in _WITH_BIAS and self.head_dim * self.num_heads != self.d_model:
            raise ValueError(
                f"head_dim={self.head_dim} times num_heads={self.num_heads} is not d_model={self.d_model}; "
                "only qwen3 and llama allow a free head_dim"
            )
        if self.model_type == "llama" and self.d_model % self.num_heads:
            raise ValueError(
                f"d_model={self.d_model} is not a multiple of num_heads={self.num_heads}, as llama requires"
            )
        if (self.vision is not None) != (self.model_type == "qwen2_5_vl"):
            raise ValueError(f"vision={self.vision} does not exist in model_type={self.model_type!r}")
        if (self.vision is None and self.rope_sections) or (
            self.vision is not None and (len(self.rope_sections) != 3 or 2 * sum(self.rope_sections) != self.head_dim)
        ):
            raise ValueError(
                f"rope_sections={self.rope_sections} (mrope_section in a config) must be three numbers whose sum is "
                f"half of head_dim={self.head_dim} for a model that sees, and () for others"
            )

    @property
    def queries_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def num_params(self) -> int:
        """Number of parameters; a tied output projection is not counted twice."""
        return sum(math.prod(weight.shape) for _, weight in iterate(weights(self)))

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelSpec:
        """The spec that a parsed Hugging Face config.json describes.

        Raises ValueError naming the field for everything this model does not compute: an unknown model_type, mixture
        of experts, a sliding window in use, an unusual rope scaling, an activation other than SiLU, unusual biases.
        """
        model_type = config.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ValueError(
                f"config field model_type={model_type!r} is not supported; use one of {', '.join(MODEL_TYPES)}"
            )
        sections, vision = (), None
        if model_type == "qwen2_5_vl":
            # Flat on the hub, the part of text by itself since transformers 4.52.
            tied = config.get("tie_word_embeddings")
            text = {**_DEFAULT_VISION, **config, **(config.get("text_config") or {})}
            vision = VisionSpec.from_hf(config, _required(text, "hidden_size"))
            config, sections = rope.split_sections(text)
            config["tie_word_embeddings"] = tied or config.get("tie_word_embeddings")
        _refuse_unsupported(config, model_type)
        heads = _required(config, "num_attention_heads")
        d_model = _required(config, "hidden_size")
        kv_heads = config.get("num_key_value_heads") or heads
        max_position = int(config.get("max_position_embeddings", _DEFAULT_MAX_POSITION.get(model_type, 32768)))
        rope_theta, rope_scaling = rope.from_config(config, max_position)
        return cls(
            vocab_size=_required(config, "vocab_size"),
            d_model=d_model,
            num_layers=_required(config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=config.get("head_dim") or _DEFAULT_HEAD_DIM.get(model_type) or d_model // heads,
            d_ff=_required(config, "intermediate_size"),
            rope_theta=rope_theta,
            rms_eps=float(config.get("rms_norm_eps", 1e-6)),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=model_type in _WITH_BIAS,
            qk_norm=model_type == "qwen3",
            model_type=model_type,
            max_position=max_position,
            rope_scaling=rope_scaling,
            vision=vision,
            rope_sections=sections,
        )

    def to_hf(self) -> dict[str, Any]:
        """The config.json of this model."""
        config = {
            "architectures": [ARCHITECTURES[self.model_type]],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.d_model,
            "intermediate_size": self.d_ff,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position,
            "initializer_range": _EMBED_STD,
            "rms_norm_eps": self.rms_eps,
            "tie_word_embeddings": self.tie_embeddings,
            **rope.to_config(self.rope_theta, self.rope_scaling, self.rope_sections),
            "attention_dropout": 0.0,
            "use_cache": True,
        }
        if self.model_type == "llama":
            config |= {"attention_bias": False, "mlp_bias": False}
        else:
            config |= {"use_sliding_window": False}
        if self.model_type == "qwen3":
            config |= {"attention_bias": False}
        if self.model_type not in _WITH_BIAS:
            config |= {"head_dim": self.head_dim}
        if self.vision is not None:
            config |= self.vision.to_hf(self.d_model)
        return config


def _required(config: Mapping[str, Any], field: str) -> int:
    value = config.get(field)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"config field {field}={value!r} must be an integer")
    return value


def _refuse_unsupported(config: Mapping[str, Any], model_type: str) -> None:
    for field in ("num_experts", "num_local_experts", "n_routed_experts"):
        if config.get(field):
            raise ValueError(
                f"config field {field}={config[field]} is mixture of experts; only dense models are supported"
            )
    layer_types = config.get("layer_types") or []
    if config.get("use_sliding_window") or any(kind != "full_attention" for kind in layer_types):
        field = "use_sliding_window" if config.get("use_sliding_window") else "layer_types"
        raise ValueError(
            f"config field {field}={config[field]} turns on a sliding window; only full attention is supported"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"config field hidden_act={config['hidden_act']!r} is not supported; only 'silu' is")
    for field in ("attention_bias", "mlp_bias"):
        if model_type not in _WITH_BIAS and config.get(field):
            raise ValueError(f"config field {field}=true is not supported for {model_type}; only models without it are")
    if config.get("pretraining_tp", 1) not in (None, 1):
        raise ValueError(f"config field pretraining_tp={config['pretraining_tp']} is not supported; only 1 is")
    if config.get("quantization_config"):
        raise ValueError("config field quantization_config is not supported; load an unquantized checkpoint")


def weights(spec: ModelSpec) -> dict[str, Any]:
    """The table {"embed", "layers": {...}, "final_norm", ["lm_head"], ["vision"]}; parameters have the same tree.

    Matrices are initialized with std 1/sqrt(fan_in); the two that write to the residual stream are also divided by
    sqrt(2 L), so its variance does not grow with depth (GPT-2, section 2.3).
    """
    d_model, d_ff, head_dim = spec.d_model, spec.d_ff, spec.head_dim
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    residual = 1.0 / math.sqrt(2 * spec.num_layers)

    def matrix(name: str, ins: dict[str, int], outs: dict[str, int], scale: float = 1.0) -> Weight:
        return weight_lib.matrix(f"model.layers.{{layer}}.{name}.weight", ins, outs, spec.num_layers, scale)

    def vector(name: str, dims: dict[str, int], fill: float) -> Weight:
        return weight_lib.vector(f"model.layers.{{layer}}.{name}", dims, fill, spec.num_layers)

    embed, ffn = {"embed": d_model}, {"ffn": d_ff}
    query, key = {"heads": heads, "head_dim": head_dim}, {"kv_heads": kv_heads, "head_dim": head_dim}
    layers = {
        "attn_norm": vector("input_layernorm.weight", embed, 1.0),
        "q": matrix("self_attn.q_proj", embed, query),
        "k": matrix("self_attn.k_proj", embed, key),
        "v": matrix("self_attn.v_proj", embed, key),
        "o": matrix("self_attn.o_proj", query, embed, residual),
        "mlp_norm": vector("post_attention_layernorm.weight", embed, 1.0),
        "gate": matrix("mlp.gate_proj", embed, ffn),
        "up": matrix("mlp.up_proj", embed, ffn),
        "down": matrix("mlp.down_proj", ffn, embed, residual),
    }
    if spec.qkv_bias:
        layers["q_bias"] = vector("self_attn.q_proj.bias", query, 0.0)
        layers["k_bias"] = vector("self_attn.k_proj.bias", key, 0.0)
        layers["v_bias"] = vector("self_attn.v_proj.bias", key, 0.0)
    if spec.qk_norm:
        layers["q_norm"] = vector("self_attn.q_norm.weight", {"head_dim": head_dim}, 1.0)
        layers["k_norm"] = vector("self_attn.k_norm.weight", {"head_dim": head_dim}, 1.0)

    table = (spec.vocab_size, d_model)
    tree = {
        "embed": Weight(table, ("vocab", "embed"), "model.embed_tokens.weight", table, std=_EMBED_STD),
        "layers": layers,
        "final_norm": Weight((d_model,), ("embed",), "model.norm.weight", (d_model,), fill=1.0),
    }
    if not spec.tie_embeddings:
        # Rows are tokens, as in the embedding: one `unembed` serves both.
        tree["lm_head"] = Weight(table, ("vocab", "embed"), "lm_head.weight", table, std=_EMBED_STD)
    if spec.vision is not None:
        tree["vision"] = vision_weights.weights(spec.vision, d_model)
    return tree


def map_weights(function: Any, spec: ModelSpec, *trees: Any) -> dict[str, Any]:
    """`function(weight, *leaves)` over the weight table and parameter-shaped trees."""
    return jax.tree.map(function, weights(spec), *trees, is_leaf=lambda node: isinstance(node, Weight))


def iterate(tree: Any) -> Iterator[tuple[str, Weight]]:
    """(path, weight) pairs of a weight table, in a fixed order; the path is "layers/q" style."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, Weight))
    for path, weight in leaves:
        yield "/".join(str(step.key) for step in path), weight


def logical_axes(spec: ModelSpec) -> dict[str, Any]:
    """Tree of tuples of logical axis names, one per parameter."""
    return map_weights(lambda weight: weight.axes, spec)


def init_params(spec: ModelSpec, key: jax.Array, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Random parameters. Each tensor's key depends only on its position in the table."""
    keys = iter(jax.random.split(key, sum(1 for _ in iterate(weights(spec)))))

    def make(weight: Weight) -> jax.Array:
        tensor_key = next(keys)
        if weight.std is None:
            return jnp.full(weight.shape, weight.fill, dtype)
        return (weight.std * jax.random.normal(tensor_key, weight.shape, jnp.float32)).astype(dtype)

    return map_weights(make, spec)
