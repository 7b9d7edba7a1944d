"""Continuous batching: nothing is lost, nothing depends on company or timing, bad requests are named."""

from __future__ import annotations

import gc
import resource
from collections import deque

import jax
import numpy as np
import pytest

from seed_jax.models.spec import ModelSpec, init_params
from seed_jax.sampler.engine import QueueFull, Sampler
from seed_jax.sampler.rooms import make_room
from seed_jax.types import SamplingParams

SPEC = ModelSpec(vocab_size=61, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=48)
EOS, OTHER_EOS = 7, 11
STEPS = 4
ROOMS = [make_room("short", 6, 24, 12, 8, STEPS), make_room("long", 2, 60, 20, 8, STEPS)]
PARAMS = init_params(SPEC, jax.random.PRNGKey(0))


def letters(tokens) -> str:
    return "".join(chr(ord("A") + token % 26) for token in tokens)


def make_sampler(**options) -> Sampler:
    arguments = {"seed": 3, "prompt_bucket": 8, "rooms": ROOMS, "steps": STEPS, "text": letters} | options
    sampler = Sampler(SPEC, (EOS, OTHER_EOS), **arguments)
    sampler.load(PARAMS)
    return sampler


@pytest.fixture(scope="module")
def sampler():
    return make_sampler()


def requests(count: int, seed: int = 0) -> list[tuple[list[int], SamplingParams, tuple]]:
    """(prompt, parameters, path): short and long, plain, filtered and greedy."""
    rng, made = np.random.default_rng(seed), []
    for number in range(count):
        long = rng.random() < 0.2
        prompt = rng.integers(0, SPEC.vocab_size, rng.integers(25, 61) if long else rng.integers(1, 25)).tolist()
        budget = int(rng.integers(1, 21 if long else 13))
        kind = rng.integers(4)
        params = [
            SamplingParams(budget),
            SamplingParams(budget, 1.0),
            SamplingParams(budget, 0.7, top_k=20, top_p=0.9, min_p=0.01),
            SamplingParams(budget, 0.0),
        ][kind]
        made.append((prompt, params, (seed, number, 0)))
    return made


def drain(sampler: Sampler) -> dict:
    done = {}
    while sampler.pending:
        for handle, completion in sampler.step():
            assert handle not in done
            done[handle] = completion
    return done


def serve(sampler: Sampler, asked, order, delays) -> list:
    """Submits in `order`; before request i the sampler makes delays[i] steps."""
    handles, done = {}, {}
    for number, delay in zip(order, delays, strict=True):
        for _ in range(delay):
            done |= dict(sampler.step())
        prompt, params, path = asked[number]
        handles[number] = sampler.submit(prompt, params, sampler.key(path))
    done |= drain(sampler)
    return [done[handles[number]] for number in range(len(asked))]


def test_replies_do_not_depend_on_order_delays_or_company(sampler):
    """Bit by bit: the log-probs too."""
    asked, rng = requests(40), np.random.default_rng(9)
    first = serve(sampler, asked, range(40), [0] * 40)
    assert len({reply.finish for reply in first}) == 2 and len({tuple(reply.tokens) for reply in first}) > 30
    for _ in range(2):
        again = serve(sampler, asked, rng.permutation(40), rng.integers(0, 3, 40))
        for one, other in zip(first, again, strict=True):
            assert one.tokens == other.tokens and one.finish == other.finish
            assert np.array_equal(one.logprobs, other.logprobs)
            assert np.array_equal(one.sampled_logprobs, other.sampled_logprobs)
    alone = serve(sampler, asked[:4], range(4), [0, 9, 9, 9])
    assert [reply.tokens for reply in alone] == [reply.tokens for reply in first[:4]]


def test_two_replicas_say_the_same(sampler):
    from seed_jax import sharding

    asked = requests(30, seed=1)
    two = make_sampler(mesh=sharding.make_mesh(jax.devices()[:2]))
    one = serve(sampler, asked, range(30), [0] * 30)
    other = serve(two, asked, range(30)[::-1], [1] * 30)
    assert [reply.tokens for reply in one] == [reply.tokens for reply in other]
    assert all(len(banks) == 2 for banks in two._banks.values())


def test_stop_tokens_budget_and_what_is_counted(sampler):
    before = sampler.stats.copy()
    asked = [(prompt, params._replace(temperature=2.0), path) for prompt, params, path in requests(60, seed=2)]
    replies = serve(sampler, asked, range(60), [0] * 60)
    for (_, params, _), reply in zip(asked, replies, strict=True):
        assert (reply.finish == "stop") == (reply.tokens[-1] in (EOS, OTHER_EOS))
        assert not {EOS, OTHER_EOS} & set(reply.tokens[:-1])
        assert len(reply.tokens) == len(reply.logprobs) == len(reply.sampled_logprobs) <= params.max_tokens
        assert reply.finish == "stop" or len(reply.tokens) == params.max_tokens
    assert {reply.tokens[-1] for reply in replies if reply.finish == "stop"} == {EOS, OTHER_EOS}
    stats = sampler.stats - before
    assert stats["requests"] == stats["completions"] == 60
    assert stats["new_tokens"] == sum(len(reply.tokens) for reply in replies)
    assert stats["length_stops"] == sum(reply.finish == "length" for reply in replies)
    assert stats["prompt_tokens"] == sum(len(prompt) for prompt, _, _ in asked)
    assert 0.3 < stats["new_tokens"] / stats["slot_steps"] <= 1


def test_stop_texts_cut_at_the_first_token_that_completes_them(sampler):
    asked = requests(40, seed=3)
    plain = serve(sampler, asked, range(40), [0] * 40)
    stop = ("A", "BC", letters(plain[0].tokens[1:3]))
    replies = serve(sampler, [(p, params._replace(stop=stop), path) for p, params, path in asked], range(40), [0] * 40)
    stopped = 0
    for free, reply in zip(plain, replies, strict=True):
        body = [token for token in free.tokens if token not in (EOS, OTHER_EOS)]
        ends = [n for n in range(1, len(body) + 1) if any(s in letters(body[:n]) for s in stop)]
        assert reply.tokens == (free.tokens[: ends[0]] if ends else free.tokens)
        assert len(reply.logprobs) == len(reply.tokens)
        assert np.array_equal(reply.logprobs, free.logprobs[: len(reply.tokens)])
        assert reply.finish == ("stop" if ends else free.finish)
        stopped += bool(ends)
    assert 5 < stopped < 40


def test_abort_of_waiting_and_running_requests(sampler):
    asked = requests(20, seed=4)
    handles = [
        sampler.submit(p, params._replace(max_tokens=12, stop=()), sampler.key(path)) for p, params, path in asked
    ]
    waiting = handles[-1]
    sampler.abort(waiting)
    done = dict(sampler.step())
    assert done[waiting].finish == "aborted" and done[waiting].tokens == [] and len(done[waiting].logprobs) == 0
    running = next(handle for handle in handles if handle not in done)
    sampler.abort(running)
    done |= drain(sampler)
    assert set(done) == set(handles)
    assert done[running].finish == "aborted" and len(done[running].tokens) == STEPS == len(done[running].logprobs)
    with pytest.raises(KeyError):
        sampler.abort(running)
    free = serve(sampler, asked[:1], [0], [0])[0]
    assert free.tokens[:STEPS] == done[running].tokens or running != handles[0]


def test_generate_leaves_completions_of_others_for_step(sampler):
    (prompt, params, path), *_ = requests(1, seed=5)
    other = sampler.submit(prompt, params, sampler.key(path))
    (reply,) = sampler.generate([[1, 2, 3]], SamplingParams(12), [(0, 0, 0)])
    assert reply.tokens and sampler.pending == 1
    assert [handle for handle, _ in sampler.step()] == [other] and sampler.pending == 0


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([1], SamplingParams(0), "max_tokens is 0; a request needs a budget of at least 1 token"),
        ([], SamplingParams(4), "an empty prompt"),
        ([1, 61], SamplingParams(4), "token ids 1 to 61; the vocabulary is 0 to 60"),
        ([1] * 61, SamplingParams(4), r"61 tokens with a budget of 4 fits no room .*short 24 \+ 12, long 60 \+ 20"),
        ([1], SamplingParams(21), "budget of 21 fits no room"),
        ([1], SamplingParams(4, -1.0), "temperature is -1.0"),
        ([1], SamplingParams(4, float("nan")), "temperature is nan"),
        ([1], SamplingParams(4, top_p=0.0), "top_p = 0.0 above 0"),
        ([1], SamplingParams(4, stop=("",)), "stop has an empty text"),
    ],
)
def test_bad_requests_are_refused_and_not_counted(sampler, prompt, params, message):
    before = sampler.stats["requests"]
    with pytest.raises(ValueError, match=message):
        sampler.submit(prompt, params, sampler.key((0, 0, 0)))
    assert sampler.stats["requests"] == before and sampler.pending == 0


def test_wrong_moments(sampler):
    with pytest.raises(RuntimeError, match=r"no weights yet: call sampler\.load"):
        Sampler(SPEC, EOS, seed=0).submit([1], SamplingParams(4), np.zeros(2, np.uint32))
    with pytest.raises(ValueError, match="stop texts need"):
        make_sampler(text=None).submit([1], SamplingParams(4, stop=("a",)), sampler.key((0, 0, 0)))
    small = make_sampler(max_queue=3)
    for number in range(3):
        small.submit([1], SamplingParams(4), small.key((0, number, 0)))
    with pytest.raises(QueueFull, match=r"3 requests wait for a slot, max_queue = 3; call step\(\)"):
        small.submit([1], SamplingParams(4), small.key((0, 3, 0)))
    with pytest.raises(RuntimeError, match="3 requests are under way"):
        small.load(PARAMS)
    small.abort_all()
    assert small.pending == 0 and len(small.generate([[1]] * 9, SamplingParams(4), [(0, i, 0) for i in range(9)])) == 9


def test_memory_is_given_back_for_an_update():
    sampler = make_sampler()
    prompt, params, path = requests(1)[0]
    before = sampler.generate([prompt], params, [path])
    sampler.submit(prompt, params, sampler.key(path))
    with pytest.raises(RuntimeError, match="1 requests are under way; they need the weights"):
        sampler.release()
    drain(sampler)
    gc.collect()
    held = sum(array.nbytes for array in jax.live_arrays())
    caches = sum(x.nbytes for banks in sampler._banks.values() for b in banks for x in jax.tree.leaves(b.cache))
    weights = sum(x.nbytes for x in jax.tree.leaves(sampler.weights[0]))
    sampler.release()
    gc.collect()
    assert held - sum(array.nbytes for array in jax.live_arrays()) >= caches + weights > 0
    with pytest.raises(RuntimeError, match="no weights yet"):
        sampler.submit(prompt, params, sampler.key(path))
    sampler.load(PARAMS)
    assert sampler.generate([prompt], params, [path])[0].tokens == before[0].tokens


def test_soak():
    """2,000 requests of random lengths, some aborted, some with stop texts: each answered once, memory flat."""
    sampler, rng = make_sampler(), np.random.default_rng(0)
    waiting, done, sizes = deque(requests(2000, seed=6)), {}, []
    handles, aborted = [], set()
    while waiting or sampler.pending:
        for _ in range(min(len(waiting), int(rng.integers(0, 9)))):
            prompt, params, path = waiting.popleft()
            stop = (letters(rng.integers(0, 26, 2)),) if rng.random() < 0.3 else ()
            handles.append(sampler.submit(prompt, params._replace(stop=stop), sampler.key(path)))
            if rng.random() < 0.05:
                open_now = [handle for handle in handles[-20:] if handle in sampler._live]
                chosen = open_now[rng.integers(len(open_now))]
                sampler.abort(chosen)
                aborted.add(chosen)
        for handle, completion in sampler.step():
            assert handle not in done
            done[handle] = completion
            if len(done) % 400 == 0:
                gc.collect()
                sizes.append((len(jax.live_arrays()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
    assert sorted(done) == handles and len(handles) == 2000
    assert {handle for handle, completion in done.items() if completion.finish == "aborted"} == aborted
    assert {completion.finish for completion in done.values()} == {"stop", "length", "aborted"}
    assert sampler.stats["requests"] == sampler.stats["completions"] == 2000 and not sampler._live
    arrays, resident = zip(*sizes, strict=True)
    assert len(set(arrays)) == 1, arrays
    assert resident[-1] - resident[0] < 30_000, f"KB resident: {resident}"
