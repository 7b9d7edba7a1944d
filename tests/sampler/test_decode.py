"""The sampler against teacher-forced log-probs, against transformers, and against itself in other company."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from seed_jax import sharding
from seed_jax.models.logprobs import token_logprobs
from seed_jax.models.spec import ModelSpec, init_params
from seed_jax.sampler import rooms
from seed_jax.sampler.engine import Sampler
from seed_jax.types import SamplingParams

SPEC = ModelSpec(vocab_size=61, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=48)
EOS = 7
PARAMS = init_params(SPEC, jax.random.PRNGKey(0))


@pytest.fixture(scope="module")
def sampler():
    engine = Sampler(SPEC, EOS, seed=3, batch=8, prompt_bucket=16)
    engine.load(PARAMS)
    return engine


def prompts(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(8, SPEC.vocab_size, n).tolist() for n in lengths]


def paths(count):
    return [(0, i, 0) for i in range(count)]


def check_teacher_forced(sampler, params, asked, budget=12, atol=1e-4) -> float:
    """Log-probs while decoding against those of the training model over the whole sequence; the largest difference."""
    worst = 0.0
    width = max(map(len, asked)) + budget  # one shape, so that the training model compiles once
    for prompt, reply in zip(asked, sampler.generate(asked, SamplingParams(budget), paths(len(asked))), strict=True):
        tokens = np.zeros((1, width), np.int32)
        length = len(prompt) + len(reply.tokens)
        tokens[0, :length] = prompt + reply.tokens
        inside = (np.arange(width) < length)[None].astype(np.int32)
        forced = np.asarray(token_logprobs(params, sampler.spec, tokens, inside, np.arange(width)[None]))
        worst = max(worst, np.abs(reply.logprobs - forced[0, len(prompt) : length]).max())
    assert worst < atol
    return worst


def test_sampled_logprobs_equal_teacher_forced_ones(sampler):
    check_teacher_forced(sampler, PARAMS, prompts([1, 2, 5, 16, 17, 18, 30]))


def test_long_prompts_are_prefilled_in_pieces(monkeypatch):
    """Up to five pieces, whose windows grow to 16, 32 and the whole slot."""
    monkeypatch.setattr(rooms, "PIECE", 16)
    assert list(rooms.pieces(70, 8, 96)) == [(16, 0), (16, 16), (16, 32), (16, 64), (16, 64)]
    assert list(rooms.pieces(16, 8, 96)) == [(16, 0)] and list(rooms.pieces(9, 8, 96)) == [(16, 0)]
    assert list(rooms.pieces(0, 8, 96)) == []
    room = rooms.make_room("long", 3, 71, 8, 8, 4)
    assert room.columns == 88
    engine = Sampler(SPEC, EOS, seed=0, prompt_bucket=8, rooms=[room], steps=4)
    engine.load(PARAMS)
    check_teacher_forced(engine, PARAMS, prompts([71, 33, 16, 17, 18, 50, 70]), budget=8)


FAMILIES = {
    "qwen3": {"model_type": "qwen3", "qkv_bias": False, "qk_norm": True, "head_dim": 16},
    "llama": {"model_type": "llama", "qkv_bias": False, "tie_embeddings": False},
}


def shaken(shape: ModelSpec, seed: int = 1):
    """Random parameters whose biases and norms are not what they are initialized to."""
    params = init_params(shape, jax.random.PRNGKey(seed))
    keys = iter(jax.random.split(jax.random.PRNGKey(seed + 1), 99))
    return jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(next(keys), leaf.shape), params)


@pytest.mark.parametrize(("family", "tensor"), [("qwen2", 1), ("qwen2", 4), ("qwen3", 2), ("llama", 1)])
def test_families_joined_and_split_over_devices(family: str, tensor: int):
    """qwen2 has biases. With `tensor` devices to a replica every product is split by heads, ffn or vocabulary; four
    devices for two kv heads keep two copies of each."""
    shape = dataclasses.replace(SPEC, vocab_size=64, **FAMILIES.get(family, {}))
    params = shaken(shape)
    mesh = sharding.make_mesh(jax.devices()[: 2 * tensor], tensor=tensor)
    engine = Sampler(shape, EOS, seed=0, batch=4, prompt_bucket=32, mesh=mesh, steps=4)
    engine.load(sharding.reshard(params, shape, mesh, "train"))
    assert len(engine.weights) == 2 and ("qkv" in engine.weights[0]["layers"][0]) == (tensor == 1)
    check_teacher_forced(engine, params, prompts([3, 20, 9, 14, 7], seed=4))


def test_bfloat16_noise():
    """What a bfloat16 sampler's log-probs differ from those of a float32 trainer: noise, not bias."""
    engine = Sampler(SPEC, EOS, seed=0, batch=8, prompt_bucket=16, dtype="bfloat16")
    engine.load(PARAMS)
    assert engine.weights[0]["embed"].dtype == "bfloat16"
    worst = check_teacher_forced(engine, PARAMS, prompts([5, 17, 30]), atol=0.1)
    assert worst > 1e-4


def test_greedy_equals_transformers(tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    from seed_jax.models import hf

    params = init_params(SPEC, jax.random.PRNGKey(5))
    hf.save(params, SPEC, tmp_path / "model", eos_token_id=EOS, pad_token_id=0)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    engine = Sampler(SPEC, EOS, seed=0, batch=4, prompt_bucket=16)
    engine.load(params)
    asked = prompts([3, 9, 20, 31, 40], seed=2)
    for prompt, reply in zip(asked, engine.generate(asked, SamplingParams(24, 0.0), paths(5)), strict=True):
        out = reference.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=24, do_sample=False
        )
        assert reply.tokens == out[0, len(prompt) :].tolist()


def test_a_reply_depends_on_its_own_request_only(sampler):
    asked = prompts([4, 9, 12, 3, 20, 28, 7, 15, 2, 11])
    together = sampler.generate(asked, SamplingParams(10), paths(10))
    order = np.random.default_rng(1).permutation(10)
    shuffled = sampler.generate([asked[i] for i in order], SamplingParams(10), [paths(10)[i] for i in order])
    alone = [sampler.generate([asked[i]], SamplingParams(10), [paths(10)[i]])[0] for i in range(10)]
    for position, i in enumerate(order):
        assert together[i].tokens == shuffled[position].tokens == alone[i].tokens


def test_keys_differ_between_streams_episodes_turns_and_seeds(sampler):
    prompt = prompts([6])
    reply = lambda path, seed=3: tuple(sampler.generate(prompt, SamplingParams(16), [path], seed=seed)[0].tokens)  # noqa: E731
    base = reply((1, 1, 1))
    assert base == reply((1, 1, 1))
    assert len({base, reply((2, 1, 1)), reply((1, 2, 1)), reply((1, 1, 2)), reply((1, 1, 1), seed=4)}) == 5


def test_stop_and_length(sampler):
    replies = sampler.generate(prompts([5] * 40), SamplingParams(30, 2.0), [(0, i, 0) for i in range(40)])
    assert {reply.finish for reply in replies} == {"stop", "length"}
    for reply in replies:
        assert (reply.finish == "stop") == (reply.tokens[-1] == EOS)
        assert EOS not in reply.tokens[:-1]
        assert len(reply.tokens) == len(reply.logprobs) <= 30
