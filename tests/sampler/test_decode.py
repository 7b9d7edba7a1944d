"""The sampler against teacher-forced log-probs, against transformers, and against itself in other company."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from seed_jax.models.logprobs import token_logprobs
from seed_jax.models.spec import ModelSpec, init_params
from seed_jax.sampler.engine import Sampler
from seed_jax.sampler.sampling import sample
from seed_jax.types import SamplingParams

SPEC = ModelSpec(vocab_size=61, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=48)
EOS = 7


@pytest.fixture(scope="module")
def sampler():
    engine = Sampler(SPEC, EOS, seed=3, batch=8, prompt_bucket=16)
    engine.params = init_params(SPEC, jax.random.PRNGKey(0))
    return engine


def prompts(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(8, SPEC.vocab_size, n).tolist() for n in lengths]


def paths(count):
    return [(0, i, 0) for i in range(count)]


def test_sampled_logprobs_equal_teacher_forced_ones(sampler):
    asked = prompts([1, 5, 16, 17, 30])
    for prompt, reply in zip(asked, sampler.generate(asked, SamplingParams(12), paths(5)), strict=True):
        tokens = np.array([prompt + reply.tokens], np.int32)
        everywhere = np.ones_like(tokens)
        forced = token_logprobs(sampler.params, SPEC, tokens, everywhere, np.arange(tokens.shape[1])[None])
        np.testing.assert_allclose(reply.logprobs, np.asarray(forced)[0, len(prompt) :], atol=1e-4)


def test_greedy_equals_transformers(tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    from seed_jax.models import hf

    params = init_params(SPEC, jax.random.PRNGKey(5))
    hf.save(params, SPEC, tmp_path / "model", eos_token_id=EOS, pad_token_id=0)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    engine = Sampler(SPEC, EOS, seed=0, batch=4, prompt_bucket=16)
    engine.params = params
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


@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_sampling_frequencies_follow_the_distribution(temperature):
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    rows = 20_000
    keys = jax.random.split(jax.random.PRNGKey(0), rows)
    tokens, logprobs = sample(np.tile(logits, (rows, 1)), keys, np.int32(0), np.full(rows, temperature, np.float32))
    expected = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    observed = np.bincount(np.asarray(tokens), minlength=4) / rows
    np.testing.assert_allclose(observed, expected, atol=4 * np.sqrt(0.25 / rows))
    np.testing.assert_allclose(logprobs, logits[np.asarray(tokens)], atol=1e-5)


def test_bad_requests(sampler):
    with pytest.raises(ValueError, match="budget of at least 1"):
        sampler.generate(prompts([3]), SamplingParams(0), paths(1))
    with pytest.raises(ValueError, match="empty prompt"):
        sampler.generate([[]], SamplingParams(4), paths(1))
    with pytest.raises(RuntimeError, match="no weights"):
        Sampler(SPEC, EOS, seed=0).generate(prompts([3]), SamplingParams(4), paths(1))
    assert sampler.generate([], SamplingParams(4), []) == []
