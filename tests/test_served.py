"""A policy behind a chat service plays a panel like one of our own."""

from __future__ import annotations

import json

import pytest

from envs.alfworld.domain import AlfworldDomain
from envs.alfworld.generate import make_tasks
from envs.pool import make_pool
from seed_jax import tokenizer as tok
from seed_jax.evaluate import evaluate
from seed_jax.hindsight.client import Client, ClientError
from seed_jax.rollout import World
from seed_jax.served import CharacterTokenizer, ServedSampler
from seed_jax.types import SamplingParams
from tests import pictured
from tests.hindsight.test_client import Service, answer, shown

PANEL = make_tasks("unseen", 6)
OPTIONS = {"max_tokens": 64, "max_prompt_tokens": 10**9, "seed": 3}


def walkthrough_of(prompt: str) -> str:
    """The reply of a player that knows every game by its task and place."""
    [task] = [task for task in PANEL if f"{task.goal}." in prompt]
    taken = prompt.split("already taken ")[1].split(" step")[0] if "already taken" in prompt else 0
    return f"<action>{task.source['walkthrough'][int(taken)]}</action>"


def play(reply, temperature=0.4, client_options=(), **options):
    world = World(AlfworldDomain("released"), make_pool("envs.alfworld.engine:make"), 10, 5)
    with Service(reply) as service:
        client = Client(service.url, "policy", timeout_s=5.0, pause_s=0.01, **dict(client_options))
        result, _, _ = evaluate(
            ServedSampler(client), CharacterTokenizer(), world, PANEL, temperature=temperature, **OPTIONS, **options
        )
    return result, [body for _, _, body in service.requests]


def test_a_served_policy_wins_the_games_it_knows():
    assert len({task.goal for task in PANEL}) == 6
    thought = {"reasoning_content": "so be it"}

    def reply(body, _):
        text = walkthrough_of(body["messages"][0]["content"])
        message = {"choices": [{"message": {"content": text, **thought}, "finish_reason": "stop"}]}
        return 200, {}, json.dumps(message).encode()

    result, bodies = play(reply)
    assert result["success_rate"] == result["valid_rate"] == result["admissible_rate"] == 1.0
    assert len(bodies) == sum(len(task.source["walkthrough"]) for task in PANEL)
    assert all((b["model"], b["max_tokens"], b["temperature"], b["top_p"]) == ("policy", 64, 0.4, 1.0) for b in bodies)
    assert all(len(b["messages"]) == 1 and b["messages"][0]["role"] == "user" for b in bodies)
    seeds = {b["seed"] for b in bodies}
    assert len(seeds) == len(bodies) and all(0 <= seed < 2**31 for seed in seeds)
    assert {b["seed"] for b in play(reply)[1]} == seeds
    assert not seeds & {b["seed"] for b in play(reply, repeats=2)[1][len(bodies) :]}


def test_thoughts_that_are_missing_make_a_reply_invalid():
    result, _ = play(lambda body, _: (200, {}, answer(walkthrough_of(body["messages"][0]["content"]))))
    assert result["success_rate"] == 1.0 and result["valid_rate"] == 0.0


def test_a_served_policy_sees_pictures():
    episodes = [pictured.played(2), pictured.played(1, won=True)]
    turns = [turn for episode in episodes for turn in episode.turns]
    tokenizer, images = CharacterTokenizer(pictured.tokenizer().vision), [(turn.image,) for turn in turns]
    ids = tok.encode_prompts(tokenizer, [turn.prompt for turn in turns], images=images)
    for turn, prompt in zip(turns, ids, strict=True):
        assert len(prompt) == len(turn.prompt.replace("<image>", "")) + 2 + pictured.TOKENS
    with Service(lambda *_: (200, {}, answer("up"))) as service:
        sampler = ServedSampler(Client(service.url, "policy", workers=1))
        for number, (prompt, seen) in enumerate(zip(ids, images, strict=True)):
            sampler.submit(prompt, SamplingParams(8), sampler.key((0, number, 0)), seen)
        assert [tokenizer.decode(reply.tokens) for _, reply in sampler.step()] == ["up"] * 3
        contents = [body["messages"][0]["content"] for _, _, body in service.requests]
    for turn, (before, picture, after) in zip(turns, contents, strict=True):
        assert before["text"] + "<image>" + after["text"] == turn.prompt
        assert (shown(picture) == turn.image).all()
    [plain] = tok.encode_prompts(tokenizer, ["look at <image>"])
    assert tokenizer.decode(plain) == "look at <image>", "text is text"


def test_a_service_that_does_not_answer_is_an_error():
    with pytest.raises(ClientError, match="left 6 of 6 requests without an answer, each after 2 attempts"):
        play(lambda body, _: (503, {}, b"busy"), client_options={"retries": 1})
    with pytest.raises(ClientError, match="refused the request: 404"):
        play(lambda body, _: (404, {}, b"{}"))
