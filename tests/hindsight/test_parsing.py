"""The analyst's answer to a skill: shared golden cases, copies of the important ones, and hostile input."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from seed_jax.hindsight.parsing import REASONS, explain, parse_skill
from seed_jax.types import Skill

GOOD = '{"episode_summary": "s", "episode_skill": "look in cabinets first"}'


def test_golden_cases() -> None:
    folder = os.environ.get("SEED_JAX_GOLDEN", "")
    path = Path(folder) / "parsing.json"
    if not folder or not path.is_file():
        pytest.skip("SEED_JAX_GOLDEN does not name a folder with parsing.json")
    cases = json.loads(path.read_text(encoding="utf-8"))["analysis"]
    assert cases
    for case in cases:
        want = case["want"] and Skill(case["want"]["episode_summary"], case["want"]["episode_skill"])
        # The golden skills are single words, which min_words would reject.
        assert parse_skill(case["text"], min_words=1) == want, case["text"]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (GOOD, Skill("s", "look in cabinets first")),
        ('Sure! {"episode_summary": "x", "episode_skill": " a b c "} hope it helps', Skill("x", "a b c")),
        ('```json\n{"episode_skill": "from the fence"}\n```', Skill("", "from the fence")),
        ('{"episode_skill": "not in it"} ```\n{"episode_skill": "in the fence"}\n```', Skill("", "in the fence")),
        ('```json\n{"episode_skill": "an open fence"}', Skill("", "an open fence")),
        ('{"episode_skill": "trailing comma ok", }', Skill("", "trailing comma ok")),
        ('{"episode_skill": "keeps a, } inside",}', Skill("", "keeps a, } inside")),
        ("{'episode_summary': 's', 'episode_skill': 'say \"go\" don\\'t wait'}", Skill("s", 'say "go" don\'t wait')),
        ("{'ok': True, 'other': None, 'episode_skill': 'python words stay True'}", Skill("", "python words stay True")),
        ('{"a": 1} {"episode_skill": "the second object"}', Skill("", "the second object")),
        ('{"outer": [{"episode_skill": "a nested one"}]}', Skill("", "a nested one")),
        ('{"a": {"episode_skill": "inner of three"}, "episode_skill": "outer of three"}', Skill("", "outer of three")),
        ('{"episode_summary": "line\nbreak", "episode_skill": "it is ok"}', Skill("line\nbreak", "it is ok")),
        ('{"episode_summary": 7, "episode_skill": "number as summary"}', Skill("", "number as summary")),
        ('{"episode_skill": "He said \\"go\\" {fast}"}', Skill("", 'He said "go" {fast}')),
        ('{"episode_skill": "lone \\ud83d surrogate here"}', Skill("", "lone ? surrogate here")),
        ('don\'t {use} braces: {"episode_skill": "after some prose"}', Skill("", "after some prose")),
    ],
)
def test_accepted(text: str, want: Skill) -> None:
    assert explain(text) == (want, "")
    assert parse_skill(text) == want


def test_skills_of_single_steps() -> None:
    steps = [
        {"step": 3, "skill": " open the fridge first "},
        {"step": 1, "skill": "go to the desk"},
        {"step": 3, "skill": "a second one for it"},
        {"step": 0, "skill": "steps count from one"},
        {"step": True, "skill": "not a number at all"},
        {"step": 2, "skill": "None"},
        {"step": 4, "skill": 5},
        "not an object",
    ]
    answer = {"episode_skill": "look in cabinets first", "step_skills": steps}
    skill = parse_skill(json.dumps(answer), min_words=3)
    assert skill == Skill("", "look in cabinets first", ((2, "open the fridge first"), (0, "go to the desk")))
    assert [skill.at(turn) for turn in (0, 1, 2)] == ["go to the desk", skill.text, "open the fridge first"]
    assert parse_skill(json.dumps({**answer, "step_skills": "none"})).steps == ()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no_json"),
        ("[]", "no_json"),
        ("no json here", "no_json"),
        ('{"episode_summary": "s", "episode_skill": "trunc', "unfinished"),
        ('{"meta": {"a": 1}, "episode_skill": "trunc', "unfinished"),
        ('{x} and {"episode_skill": "trunc', "unfinished"),
        ('{"episode_summary": "only"}', "no_skill"),
        ('{"Episode_Skill": "wrong case of key"}', "no_skill"),
        ('{"episode_skill": null}', "not_text"),
        ('{"episode_skill": ["a", "b"]}', "not_text"),
        ('{"episode_skill": 3}', "not_text"),
        ('{"episode_skill": {"text": "an inner object"}}', "not_text"),
        ('{"episode_skill": "string"}', "template"),
        ('{"episode_skill": "None"}', "template"),
        ('{"episode_skill": "..."}', "template"),
        ('{"episode_skill": "<one short statement>"}', "template"),
        ('{"episode_skill": "two words"}', "too_short"),
        ('{"episode_skill": "  "}', "too_short"),
        ("{'episode_skill': __import__('os')}", "no_json"),
    ],
)
def test_rejected_with_a_reason(text: str, reason: str) -> None:
    assert explain(text, min_words=3) == (None, reason)
    assert reason in REASONS
    assert parse_skill(text, min_words=3) is None


def test_min_words() -> None:
    assert parse_skill('{"episode_skill": "two words"}', min_words=2) == Skill("", "two words")
    assert explain('{"episode_skill": ""}', min_words=0) == (None, "too_short"), "blank is never a skill"
    assert explain(GOOD, min_words=5) == (None, "too_short")


@pytest.mark.parametrize(
    "text",
    [
        '{"a":' * 20_000,
        "{" * 20_000,
        "[" * 20_000 + "{",
        "{'" * 20_000,
        '{"a": ' + "9" * 5_000 + "}",
        "```" * 5_000,
        '{"a": 1}' * 5_000,
    ],
)
def test_hostile_answers_are_rejected_quickly(text: str) -> None:
    start = time.process_time()
    assert parse_skill(text, min_words=3) is None
    assert time.process_time() - start < 5.0
