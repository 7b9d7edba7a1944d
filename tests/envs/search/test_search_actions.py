"""Replies -> actions, against the table of examples and cases of our own."""

from __future__ import annotations

import pytest

from envs.search.actions import MAX_QUERY, Offered, clean_query, parse

# The wanted column of shared examples: (reply, command, valid).
EXAMPLES = [
    ("<think>a</think><search>who wrote it</search>", "<search>who wrote it</search>", True),
    ("<answer>Paris</answer>", "<answer>Paris</answer>", True),
    ("<search>a</search><answer>b</answer>", "<search>a</search>", False),
    ("<search>a</search><search>b</search>", "<search>a</search>", False),
    ("<SEARCH> A </SEARCH>", "<search>A</search>", True),
    ("I think Paris", None, False),
    ("<search>unfinished", None, False),
    ("<answer>x</answer> and then </answer>", "<answer>x</answer>", True),
    (
        "<think>use <search> tag</think><search>q</search>",
        "<search>tag</think><search>q</search>",
        False,
    ),
    ("<search></search>", None, False),
    ("<search>multi\nline</search>", "<search>multi\nline</search>", True),
    # of our own
    ("", None, False),
    ("<answer> \n </answer>", None, False),
    ("<answer>a</answer><search>b</search>", "<search>b</search>", False),
    ("<answer>a</answer><answer>b</answer>", "<answer>a</answer>", False),
    ("<Answer>Röntgen</aNSWER>", "<answer>Röntgen</answer>", True),
    ("<search>a</answer>", None, False),
    ("<answer>a <answer></answer>", "<answer>a <answer></answer>", False),
]


@pytest.mark.parametrize(("reply", "command", "valid"), EXAMPLES)
def test_replies(reply, command, valid):
    action = parse(reply)
    assert (action.command, action.valid) == (command, valid)
    assert (action.kind is None) == (command is None) == (action.content is None)


def test_kind_and_content():
    assert parse("<search> the  moon </search>")[:2] == ("search", "the  moon")
    assert parse("<answer>42</answer>") == ("answer", "42", True)


def test_queries_lose_tags_and_length():
    assert clean_query("tag</think><search>q") == "tag q"
    assert clean_query("  two\n words ") == "two words"
    assert clean_query("<search></search>") == ""
    assert clean_query("5 < 7 and 9 > 8") == "5 < 7 and 9 > 8"
    assert len(clean_query("ab " * 400)) <= MAX_QUERY


def test_what_is_offered():
    offered = Offered(("<search>your query</search>",))
    assert "<search>anything</search>" in offered and "<answer>x</answer>" in offered
    assert "anything" not in offered and None not in offered and "<search> </search>" not in offered
