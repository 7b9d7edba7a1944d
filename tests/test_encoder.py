"""The encoder in plain JAX against transformers, on a small random BERT."""

from __future__ import annotations

import json

import numpy as np
import pytest

from seed_jax.encoder import E5_PREFIXES, PASSAGE_TOKENS, EncoderError, load

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"query passage : who painted the mona lisa a town on river".split()]
TEXTS = ["who painted the mona lisa", "a town", "the river " * 150]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=256,
    )  # fmt: skip
    model = BertModel(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.3)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder, model, tokenizer


def expected(model, tokenizer, text: str) -> np.ndarray:
    import torch

    ids = tokenizer.encode(text).ids
    ids = ids if len(ids) <= PASSAGE_TOKENS else [*ids[: PASSAGE_TOKENS - 1], ids[-1]]
    with torch.no_grad():
        mean = model(torch.tensor([ids])).last_hidden_state[0].mean(0).numpy()
    return mean / np.linalg.norm(mean)


def test_equals_transformers(directory):
    folder, model, tokenizer = directory
    found = load(folder)(TEXTS, False)
    want = np.stack([expected(model, tokenizer, text) for text in TEXTS])
    np.testing.assert_allclose(found, want, atol=1e-5)
    assert found.dtype == np.float32 and load(folder)([], True).shape == (0, 32)


def test_prefixes(directory):
    folder, _, _ = directory
    plain, prefixed = load(folder), load(folder, E5_PREFIXES)
    np.testing.assert_allclose(prefixed(["a town"], True), plain(["query: a town"], True), atol=1e-6)
    np.testing.assert_allclose(prefixed(["a town"], False), plain(["passage: a town"], False), atol=1e-6)


def test_what_is_no_encoder(directory, tmp_path):
    with pytest.raises(EncoderError, match="holds no encoder"):
        load(tmp_path)
    folder, _, _ = directory
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "xlm-roberta"}))
    with pytest.raises(EncoderError, match="xlm-roberta"):
        load(tmp_path)
