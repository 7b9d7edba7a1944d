"""Returns, anchors and spans of turns."""

from __future__ import annotations

import numpy as np
import pytest

from configs import base
from seed_jax import tokenizer as tok
from seed_jax.spans import span_mask, tag_span
from seed_jax.train.credit import anchors, histories, step_returns, turn_credit
from seed_jax.types import Episode, Turn
from tests import tiny


def turn(observation: str, reward: float = 0.0, response: str = "") -> Turn:
    ids = tok.encode_response(tiny.tokenizer(), response)
    return Turn("", [1], ids, np.zeros(len(ids)), observation, response, None, True, True, reward=reward)


def test_returns_are_discounted():
    assert step_returns([turn("a"), turn("b", 1.0), turn("c", 10.0)], 0.5) == [3.0, 6.0, 10.0]
    assert step_returns([], 0.5) == []


def episodes() -> list[Episode]:
    first = Episode("t", "f", "g", 0, 0, [turn("you see a mug 1"), turn("kitchen"), turn("you see a mug 1")])
    second = Episode("t", "f", "g", 0, 1, [turn("kitchen"), turn("you see a mug 2")])
    other_task = Episode("t", "f", "g", 1, 2, [turn("bathroom"), turn("kitchen")])
    return [first, second, other_task]


def test_equal_observations_of_a_group_share_an_anchor():
    got = anchors(episodes(), 1.0)
    assert [got[0, t] for t in range(3)] == [0, 1, 0]
    assert [got[1, t] for t in range(2)] == [1, 2]
    assert [got[2, t] for t in range(2)] == [0, 1]


def test_similar_observations_share_an_anchor():
    got = anchors(episodes(), 0.9)
    assert got[1, 1] == got[0, 0] == 0 and got[1, 0] == got[0, 1] == 1
    assert anchors(episodes(), 0.99) == anchors(episodes(), 1.0)


def test_histories_are_equal_where_the_last_observations_are():
    def observed(*texts: str, group: int = 0) -> Episode:
        return Episode("t", "f", "g", group, 0, [turn(text) for text in texts])

    played = [observed("a", "b", "c", "b"), observed("x", "b", "c"), observed("b", "c"), observed("b", "c", group=1)]
    got = histories(played, anchors(played, 1.0), 3)
    same = lambda one, other: [a == b for a, b in zip(got[one], got[other], strict=True)]  # noqa: E731
    assert same((0, 1), (1, 1)) == [True, False, False]  # b after a, b after x
    assert same((0, 2), (1, 2)) == [True, True, False]  # a b c, x b c
    assert same((0, 1), (0, 3)) == [True, False, False]  # b after a, b after c
    assert same((0, 2), (2, 1)) == [True, True, False]  # the last episode starts with b c
    texts = {key: tuple(t.observation for t in played[key[0]].turns[: key[1] + 1]) for key in got}
    for one in got:
        for other in got:
            if played[one[0]].group == played[other[0]].group:
                ends = [texts[one][-k:] == texts[other][-k:] for k in (1, 2, 3)]
                assert same(one, other) == ends, (one, other)
    assert len(got) == 11 and all(len(numbers) == 3 for numbers in got.values())


REPLY = "<think> go to shelf 1 </think> <action> take mug 1 from shelf 1 </action>"


@pytest.mark.parametrize(("span", "expected"), [("action", "take mug 1 from shelf 1"), ("thought", "go to shelf 1")])
def test_spans(span, expected):
    words = tiny.tokenizer()
    ids = tok.encode_response(words, REPLY)
    mask = span_mask(words, ids, span)
    assert tok.decode(words, [i for i, kept in zip(ids, mask, strict=True) if kept]).strip() == expected


@pytest.mark.parametrize("text", ["", "<action> go to shelf 1", "go to shelf 1 </action>", "</action> <action>"])
def test_without_a_whole_block_the_span_is_empty(text):
    words = tiny.tokenizer()
    assert tag_span(words, tok.encode_response(words, text), "action") == slice(0, 0)


def test_unknown_span():
    with pytest.raises(ValueError, match="span is 'plan'; choose one of all, action, thought"):
        span_mask(tiny.tokenizer(), [1], "plan")
    assert span_mask(tiny.tokenizer(), [1], "all") is None


def test_only_what_a_method_uses_is_computed():
    config = base.get_config()
    assert not turn_credit(config, tiny.tokenizer(), episodes())
    config.adv.kind, config.adv.gamma = "gigpo", 0.5
    played = episodes()
    played[0].turns[2].reward = 8.0
    credit = turn_credit(config, tiny.tokenizer(), played)
    assert credit[0, 0] == {"step_return": 2.0, "anchor": 0} and credit[0, 1] == {"step_return": 4.0, "anchor": 1}
    config.adv.kind, config.distill.span = "grpo", "action"
    played[1].turns[0] = turn("kitchen", response=REPLY)
    credit = turn_credit(config, tiny.tokenizer(), played)
    assert set(credit[1, 0]) == {"span"} and credit[1, 0]["span"].sum() > 0 and credit[0, 0]["span"].sum() == 0
    config.adv.kind, config.distill.span, config.env.history = "hgpo", "all", 2
    credit = turn_credit(config, tiny.tokenizer(), episodes())
    assert credit[0, 0]["anchor"] == (0, 0, 0) and credit[0, 2]["anchor"] == (0, 2, 2)
