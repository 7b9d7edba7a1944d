"""The skill table against a direct computation, and the span of a command in a reply."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from envs.alfworld.domain import AlfworldDomain
from envs.alfworld.engine import make
from envs.alfworld.generate import make_tasks
from seed_jax import tokenizer as tok
from seed_jax.diagnostics import SOURCES, command_span, format_table, skill_table
from seed_jax.hindsight.prompts import insert_skill
from seed_jax.models.logprobs import token_logprobs
from seed_jax.models.spec import init_params
from seed_jax.train import scoring
from seed_jax.train.packing import Shape
from seed_jax.types import Episode, Skill, Turn
from tests import tiny

TASKS = make_tasks("seen", 6)
DOMAIN = AlfworldDomain("compact")
SHAPE = Shape(row_tokens=220, scored_tokens=60, turns=4)


@pytest.fixture(scope="module")
def model():
    spec = tiny.spec(len(tiny.tokenizer()))
    return spec, jax.tree.map(lambda x: 4.0 * x, init_params(spec, jax.random.PRNGKey(3)))


def logprobs(model, prompt_ids, response_ids) -> np.ndarray:
    tokens = np.array([[*prompt_ids, *response_ids]], np.int32)
    padded = np.zeros((1, 300), np.int32)
    padded[0, : tokens.size] = tokens
    segments = (np.arange(300) < tokens.size).astype(np.int32)[None]
    forced = np.asarray(score(model[1], padded, segments, spec=model[0]))[0]
    return forced[len(prompt_ids) : tokens.size]


def score(params, tokens, segments, *, spec):
    return _score(params, tokens, segments, np.arange(300)[None], spec)


_score = jax.jit(lambda params, *rest: token_logprobs(params, rest[3], *rest[:3]), static_argnums=4)


def scorer(model, shape: Shape):
    spec, params = model
    return lambda samples: scoring.score(params, spec, samples, shape)


def scripted(task, index: int, model, replies) -> Episode:
    """An episode of the given replies ("{}" stands for the command of the walkthrough), scored by the model."""
    game = make(task.source)
    observation, words = game.reset(), tiny.tokenizer()
    episode = Episode(task.id, task.family, task.goal, index, index)
    for reply, command in zip(replies, task.source["walkthrough"], strict=False):
        text = reply.format(command)
        action = DOMAIN.parse(text)
        history = [(turn.observation, turn.command or "", turn.result) for turn in episode.turns]
        prompt = DOMAIN.prompt(task.goal, history, observation.text, observation.admissible, 4)
        prompt_ids, response_ids = tok.encode_prompts(words, [prompt])[0], tok.encode_response(words, text)
        before, observation = observation, game.step(action.command or "")
        episode.turns.append(
            Turn(
                prompt, prompt_ids, response_ids, logprobs(model, prompt_ids, response_ids), before.text, text,
                action.command, action.valid, action.command in before.admissible, observation.text,
            )
        )  # fmt: skip
    episode.won = observation.won
    return episode


WALK = ["<think> search for mug . </think> <action> {} </action>"] * 8


def make_episodes(model) -> list[Episode]:
    lost = ["<think> now . </think> <action> open it </action>", "no action at all", WALK[0], WALK[0]]
    episodes = [scripted(task, i, model, lost if i % 3 == 0 else WALK) for i, task in enumerate(TASKS)]
    for episode in episodes[::2]:
        episode.skill = Skill("success", "search for mug first .")
    return episodes


@pytest.mark.optimized  # 1e-4 for the sum over a command: 1.4e-4 without optimized sums
def test_table_equals_a_direct_computation(model):
    episodes = make_episodes(model)
    true_skills = [DOMAIN.true_skill(task) for task in TASKS]
    row_class = lambda episode, turn: DOMAIN.row_class(TASKS[episode.index], episode, turn)  # noqa: E731
    table = skill_table(
        scorer(model, SHAPE), tiny.tokenizer(), episodes, true_skills, row_class, "compact", SHAPE.row_tokens
    )
    expected: dict = {}
    for i, episode in enumerate(episodes):
        others = [*range(i + 1, len(episodes)), *range(i)]
        wrong = next(true_skills[j] for j in others if episodes[j].goal != episode.goal)
        skills = {"true": true_skills[i], "self": episode.skill.text if episode.skill else None, "wrong": wrong}
        for t, turn in enumerate(episode.turns):
            name = row_class(episode, t)
            start, end = turn.response.find("<action>"), turn.response.find("</action>")
            if name is None or start < 0:
                continue
            before = len(tok.encode_response(tiny.tokenizer(), turn.response[: start + 8])) - 1
            inside = len(tok.encode_response(tiny.tokenizer(), turn.response[:end])) - 1
            for source, skill in skills.items():
                if skill:
                    ids = tok.encode_prompts(tiny.tokenizer(), [insert_skill(turn.prompt, skill, "compact")])[0]
                    gap = logprobs(model, ids, turn.response_ids) - turn.logprobs
                    expected.setdefault(name, {s: [] for s in SOURCES})[source].append(
                        (gap.sum(), gap[before:inside].sum())
                    )
    longest = max(len(turn.response_ids) for episode in episodes for turn in episode.turns)
    assert list(table) == sorted(expected)
    assert {"success: search, right place", "success: clean/cool/heat", "failure: invalid action"} <= set(table)
    for name, cells in table.items():
        assert set(cells) == set(SOURCES)
        for source, cell in cells.items():
            gaps = expected[name][source]
            assert cell["rows"] == len(gaps)
            if gaps:
                reply, command = np.array(gaps).T
                assert cell["gap"] == pytest.approx(reply.mean(), abs=1e-4 * longest)  # 1e-4 a token
                assert cell["command_gap"] == pytest.approx(command.mean(), abs=1e-4)
                assert cell["positive"] == pytest.approx((reply > 0).mean())
    assert sum(cell["self"]["rows"] for cell in table.values()) < sum(c["true"]["rows"] for c in table.values())
    assert max(abs(c["true"]["gap"]) for c in table.values()) > 1e-3

    text = format_table(table)
    assert len(text.splitlines()) == 1 + len(table) and all(f"{source} skill" in text for source in SOURCES)


def test_row_that_does_not_fit_with_its_skill_is_left_out(model):
    episodes = make_episodes(model)[1:2]
    longest = max(len(turn.prompt_ids) + len(turn.response_ids) for turn in episodes[0].turns)
    table = skill_table(
        scorer(model, Shape(longest, 60, 4)), tiny.tokenizer(), episodes, [DOMAIN.true_skill(TASKS[1])],
        lambda episode, turn: "any", "compact", longest,
    )  # fmt: skip
    assert 0 < table["any"]["true"]["rows"] < len(episodes[0].turns)
    assert table["any"]["wrong"]["rows"] == 0, "there is no other task"
    assert "-" in format_table(table)


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("<think> now . </think> <action> go to shelf 1 </action>", "go to shelf 1"),
        ("<action> look </action> <action> help </action>", "look"),
        ("</action> <action> look </action>", "look"),
        ("<action> go to shelf 1", None),
        ("look </action>", None),
        ("look", None),
        ("", None),
    ],
)
def test_command_span(text, command):
    words = tiny.tokenizer()
    ids = tok.encode_response(words, text)
    span = command_span(words, ids)
    assert tok.decode(words, ids[span]) == (command or "")
    assert (DOMAIN.parse(text).command or "") == (command or "")
