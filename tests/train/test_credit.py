"""Returns, anchors and spans of turns."""

from __future__ import annotations

import numpy as np
import pytest

from configs import base
from seed_jax import tokenizer as tok
from seed_jax.spans import name_mask, numbered_names, span_mask, tag_span
from seed_jax.train.credit import anchors, histories, step_returns, turn_credit
from seed_jax.types import Episode, Skill, Turn
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


def test_numbered_names():
    text = "Mug 1 is at Shelf 12 . take it , heat it with microwave 1 , then mug or shelf , 3 x2"
    assert numbered_names(text) == {"mug 1", "shelf 12", "microwave 1"}
    assert numbered_names("") == numbered_names("mug is at shelf") == set()


def masked(ids, mask) -> list[str]:
    """The text of each run of tokens that the mask selects."""
    words, runs = tiny.tokenizer(), []
    for place, kept in enumerate(mask):
        if kept:
            runs.append([ids[place]] if not (place and mask[place - 1]) else [*runs.pop(), ids[place]])
    return [tok.decode(words, run).strip() for run in runs]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"shelf 1"}, ["shelf 1", "shelf 1"]),
        ({"mug 1"}, ["mug 1"]),
        ({"mug 1", "shelf 1", "bed 9"}, ["shelf 1", "mug 1", "shelf 1"]),
        ({"shelf 11", "shelf", "1"}, []),
        (set(), []),
    ],
)
def test_tokens_that_spell_a_name(names, expected):
    ids = tok.encode_response(tiny.tokenizer(), REPLY)
    mask = name_mask(tiny.tokenizer(), ids, names)
    assert mask.shape == (len(ids),) and mask.dtype == bool and masked(ids, mask) == expected


def test_names_of_many_tokens_and_other_cases():
    """With a tokenizer of single bytes, every one of a name's characters is a token; what stands beside it is none."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bytewise = PreTrainedTokenizerFast(tokenizer_object=core)
    text = "é🚀 go to Shelf 12, not shelf 1 or bookshelf 12"
    mask = name_mask(bytewise, bytewise(text)["input_ids"], {"shelf 12"})
    expected = np.zeros(len(text.encode()), bool)
    start = text.encode().index(b"Shelf 12")
    expected[start : start + len("Shelf 12")] = True
    np.testing.assert_array_equal(mask, expected)


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


def test_places_that_only_the_skill_knows_are_hidden_until_a_command_has_named_them():
    config, words = base.get_config(), tiny.tokenizer()
    config.distill.hide_places = True
    say = lambda command: f"<think> go to shelf 1 </think> <action> {command} </action>"  # noqa: E731
    commands = ["go to shelf 2", "go to shelf 1", "take mug 1 from shelf 1"]
    turns = [turn("kitchen", response=say(command)) for command in commands]
    for one, command in zip(turns, commands, strict=True):
        one.command = command
    turns.insert(2, turn("kitchen", response="shelf 1 bed 1"))  # not a command, which is None
    taught = Episode("t", "f", "g", 0, 0, turns, skill=Skill("", "mug 1 is at shelf 1 .", ((2, "look at bed 1"),)))
    bare = Episode("t", "f", "g", 0, 1, turns)
    credit = turn_credit(config, words, [taught, bare])
    hidden = [masked(turns[t].response_ids, ~credit[0, t]["span"]) for t in range(4)]
    assert hidden == [
        ["shelf 1"],  # of the thought alone: shelf 2 is no secret
        ["shelf 1", "shelf 1"],  # the thought, and the command that names it first
        ["bed 1"],  # the skill of this turn tells this alone
        ["mug 1"],  # which no command has named, while shelf 1 was visited
    ]
    assert [credit[1, t]["span"] for t in range(4)] == [None] * 4, "no skill, no secret"

    config.distill.span = "action"
    credit = turn_credit(config, words, [taught, bare])
    shown = [masked(turns[t].response_ids, credit[0, t]["span"]) for t in (0, 1, 3)]
    assert shown[0] == ["go to shelf 2"] and shown[1] == ["go to"] and "mug 1" not in " ".join(shown[2])
    for t in range(4):
        np.testing.assert_array_equal(credit[1, t]["span"], span_mask(words, turns[t].response_ids, "action"))
    taught.skill = Skill("", None)
    credit = turn_credit(config, words, [taught])
    np.testing.assert_array_equal(credit[0, 0]["span"], span_mask(words, turns[0].response_ids, "action"))
