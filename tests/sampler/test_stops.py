"""Ends of a reply that only its text shows."""

from __future__ import annotations

import json

import pytest

from seed_jax.sampler.stops import cut, ended, json_closed
from seed_jax.types import SamplingParams

OBJECTS = [{}, {"a": 1}, {"a": {"b": {}}, "c": [{}]}, {"brace": '}{"', "back": "\\", "quote": '\\"}'}]


@pytest.mark.parametrize("value", OBJECTS, ids=str)
def test_an_object_is_closed_exactly_at_its_last_brace(value):
    text = "Here it is: " + json.dumps(value)
    assert [json_closed(text[:n]) for n in range(len(text) + 1)] == [False] * len(text) + [True]
    assert json_closed(text + ' and {"another')


def test_no_object():
    assert not json_closed("}") and not json_closed("") and not json_closed('{"a": "}')


def test_stop_texts():
    params = SamplingParams(9, stop=("</action>", "END"))
    assert ended("<action> look </action> and", params) and ended("THE END", params)
    assert not ended("<action> look <action>", params)
    assert not ended("anything", SamplingParams(9))


@pytest.mark.parametrize("new", [1, 2, 4, 8])
def test_the_fewest_tokens_that_hold_the_stop(new):
    """A token is two letters here; the stop text begins and ends inside of tokens."""
    pieces = ["ab", "c<", "st", "op", ">d", "ef", "gh", "ij"]
    decode = lambda tokens: "".join(pieces[t] for t in tokens)  # noqa: E731
    params = SamplingParams(9, stop=("<stop>",))
    kept, have = None, []
    while kept is None and len(have) < 8:  # as the engine asks: after every `new` tokens
        have += range(len(have), len(have) + new)
        kept = cut(decode, have, new, params)
    assert kept == 5 <= len(have)
