"""Rollouts with scripted replies on real games: what is recorded, what is counted, when an episode ends."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from configs import quickstart
from envs.alfworld.domain import AlfworldDomain
from envs.alfworld.generate import make_tasks
from envs.base import EnvError
from envs.pool import make_pool
from seed_jax import tokenizer as tok
from seed_jax.rollout import World, play
from seed_jax.types import Episode, SamplingParams, Skill
from tests import tiny
from tests.scripted import ScriptedSampler

TASKS = make_tasks("train", 3)


def say(command: str) -> str:
    return f"<think> search for mug . </think> <action> {command} </action>"


def follow(tasks, group=1):
    """Replies that walk the walkthrough of each episode's task, and look around after its end."""

    def reply(episode: int, turn: int) -> str:
        walkthrough = tasks[episode // group].source["walkthrough"]
        return say(walkthrough[turn] if turn < len(walkthrough) else "look")

    return reply


def world(pool=None, style="compact", max_steps=12, history=4) -> World:
    return World(AlfworldDomain(style), pool or make_pool("envs.alfworld.engine:make"), max_steps, history)


def rollout(reply, tasks=TASKS, **options):
    sampler, counts = ScriptedSampler(lambda path: reply(path[1], path[2])), Counter()
    arguments = {
        "group": 1,
        "params": SamplingParams(24),
        "stream": 5,
        "max_prompt_tokens": 400,
        "counts": counts,
        **options,
    }
    where = arguments.pop("world", world())
    return play(sampler, tiny.tokenizer(), where, tasks, **arguments), sampler, counts


def test_walkthroughs_win_and_finished_episodes_drop_out():
    seen = []
    episodes, sampler, counts = rollout(
        follow(TASKS, group=2), group=2, on_turn=lambda step, live: seen.append((step, live))
    )
    lengths = [len(task.source["walkthrough"]) for task in TASKS for _ in range(2)]
    assert len(set(lengths)) > 1, "episodes of different length are what this test is about"
    for index, episode in enumerate(episodes):
        task = TASKS[index // 2]
        assert (episode.task_id, episode.family, episode.goal) == (task.id, task.family, task.goal)
        assert (episode.index, episode.group) == (index, index // 2)
        assert episode.won and episode.reward == 10.0 and episode.error is None
        assert [turn.command for turn in episode.turns] == task.source["walkthrough"]
        assert all(turn.valid and turn.admissible for turn in episode.turns)
    assert seen == [(step, sum(n > step for n in lengths)) for step in range(max(lengths))]
    for step, asked in enumerate(sampler.rounds):
        assert [path for _, _, path, _ in asked] == [(5, index, step) for index in range(6) if lengths[index] > step]
    assert counts["env_errors"] == counts["prompt_truncated"] == 0


def test_a_turn_holds_what_was_read_and_written():
    (episode,), sampler, _ = rollout(follow(TASKS), TASKS[:1], seed=77, params=SamplingParams(24, 0.4))
    first, second = episode.turns[:2]
    assert [request[1:] for (request,) in sampler.rounds] == [
        (SamplingParams(24, 0.4), (5, 0, step), 77) for step in range(len(sampler.rounds))
    ]
    assert first.prompt_ids == sampler.rounds[0][0][0]
    assert first.prompt_ids == tok.encode_prompts(tiny.tokenizer(), [first.prompt])[0]
    assert first.response_ids[-1] == tiny.tokenizer().eos_token_id
    np.testing.assert_array_equal(first.logprobs, -np.arange(len(first.response_ids)))
    assert first.response == say(first.command)
    assert TASKS[0].goal in first.observation and first.result == second.observation
    assert first.prompt.splitlines()[0] == f"your task is to: {TASKS[0].goal}"
    assert f"history: {first.command}\n" in second.prompt


def test_step_limit_ends_an_episode_as_lost():
    episodes, sampler, _ = rollout(lambda episode, turn: say("look"), world=world(max_steps=2))
    assert all(not e.won and e.reward == 0 and len(e.turns) == 2 and e.error is None for e in episodes)
    assert len(sampler.rounds) == 2


@pytest.mark.parametrize(
    ("reply", "command", "valid"),
    [
        ("go to", None, False),
        ("<action> </action>", None, False),
        ("<action> look </action>", "look", False),  # no thought
        (say("go to mug 6"), "go to mug 6", True),
    ],
)
def test_invalid_replies(reply, command, valid):
    (episode,), _, _ = rollout(lambda *_: reply, TASKS[:1], world=world(max_steps=2))
    first, second = episode.turns
    assert (first.command, first.valid, first.admissible) == (command, valid, command == "look")
    if command != "look":
        assert first.result == "Nothing happens." and second.observation == "Nothing happens."
    assert f"history: {command or 'nothing'}\n" in second.prompt


def test_same_format_without_thoughts_if_none_are_required():
    without = World(AlfworldDomain("compact", require_think=False), make_pool("envs.alfworld.engine:make"), 1, 4)
    (episode,), _, _ = rollout(lambda *_: "<action> look </action>", TASKS[:1], world=without)
    assert episode.turns[0].valid


@pytest.mark.parametrize("style", ["compact", "released"])
def test_long_prompts_lose_their_oldest_turns(style):
    places = [c for c in make_pool("envs.alfworld.engine:make").open([0], TASKS[:1])[0].admissible if "go to" in c]
    reply = lambda episode, turn: say(places[turn % len(places)])  # noqa: E731
    where = world(style=style, max_steps=6, history=4)
    (free,), _, _ = rollout(reply, TASKS[:1], world=where, max_prompt_tokens=9999)
    sizes = [len(turn.prompt_ids) for turn in free.turns]
    limit = max(sizes) - 5
    assert limit > sizes[0] and any(size > limit for size in sizes)
    (cut,), _, counts = rollout(reply, TASKS[:1], world=where, max_prompt_tokens=limit)
    assert counts["prompt_truncated"] == sum(size > limit for size in sizes)
    for whole, turn, size in zip(free.turns, cut.turns, sizes, strict=True):
        assert len(turn.prompt_ids) <= limit
        assert turn.prompt_ids == tok.encode_prompts(tiny.tokenizer(), [turn.prompt])[0]
        assert (turn.prompt == whole.prompt) == (size <= limit)
        assert free.goal in turn.prompt and turn.observation == whole.observation


def test_oldest_history_goes_first():
    commands = ["look", "inventory", "help", "look"]
    (free,), _, _ = rollout(lambda e, t: say(commands[t]), TASKS[:1], world=world(max_steps=4))
    history = free.turns[3].prompt.splitlines()[1]
    assert history.index("look") < history.index("inventory") < history.index("help")
    (cut,), _, _ = rollout(
        lambda e, t: say(commands[t]),
        TASKS[:1],
        world=world(max_steps=4),
        max_prompt_tokens=len(free.turns[3].prompt_ids) - 1,
    )
    shorter = cut.turns[3].prompt.splitlines()[1]
    assert "look =>" not in shorter and "help" in shorter


def test_an_episode_whose_prompt_is_too_long_ends_there_and_the_others_go_on():
    """The policy asks for the list of commands, which is longer than the quickstart's prompts may be."""
    asked = []
    walk = follow(TASKS)
    episodes, _, counts = rollout(
        lambda episode, turn: say("help") if (episode, turn) == (1, 1) else walk(episode, turn),
        max_prompt_tokens=quickstart.get_config().rollout.max_prompt_tokens,
        analysis=SimpleNamespace(ask=lambda episode: asked.append(episode.index)),
    )
    assert [episode.won for episode in episodes] == [True, False, True]
    assert counts["prompt_overflow"] == 1 and counts["prompt_truncated"] == 0
    ended = episodes[1]
    assert [turn.command for turn in ended.turns] == [TASKS[1].source["walkthrough"][0], "help"]
    assert ended.turns[1].result.startswith("Available commands") and ended.error is None and ended.reward == 0
    assert sorted(asked) == [0, 1, 2] and asked[0] == 1


def test_budget_below_a_bare_prompt_is_an_error_that_names_the_field():
    with pytest.raises(ValueError, match=r"task train/.*even without history; raise rollout\.max_prompt_tokens=20"):
        rollout(follow(TASKS), max_prompt_tokens=20)


class Failing:
    """Answers with errors: slot 0 cannot be opened, slot 2 fails at its second command."""

    def __init__(self):
        self.pool, self.asked = make_pool("envs.alfworld.engine:make"), []

    def open(self, slots, tasks):
        return [EnvError("no such game"), *self.pool.open(slots, tasks)[1:]]

    def step(self, slots, commands):
        self.asked.append(list(slots))
        results = self.pool.step(slots, commands)
        return [
            EnvError("crashed") if len(self.asked) == 2 and s == 2 else r for s, r in zip(slots, results, strict=True)
        ]


def test_lost_episodes_are_marked_and_the_others_go_on():
    pool = Failing()
    episodes, _, counts = rollout(follow(TASKS), world=world(pool))
    assert [episode.error for episode in episodes] == ["no such game", None, "crashed"]
    assert [episode.won for episode in episodes] == [False, True, False]
    assert episodes[0].turns == [] and len(episodes[2].turns) == 2 and episodes[2].turns[-1].result == ""
    assert counts["env_errors"] == 2
    assert pool.asked[:3] == [[1, 2], [1, 2], [1]]


# -- skills in the policy's own prompts --------------------------------------------------------------------------------


class Given:
    """Gives every second episode of a group the same skill; `limit` tokens may be added to a prompt."""

    def __init__(self, limit: int):
        self.hindsight, self.asked, self.texts = SimpleNamespace(max_skill_tokens=limit), [], []

    def give(self, episode, place, share):
        self.asked.append((episode.index, place, share))
        if place % 2:
            episode.given = Skill("", "look for mug")

    def encode_texts(self, prompts, texts, images=None):
        self.texts += texts
        return [[7, 7, *ids] for ids in tok.encode_prompts(tiny.tokenizer(), prompts)]


def test_given_skills_are_in_the_ids_and_not_in_the_text():
    plain, _, _ = rollout(follow(TASKS, 2), TASKS[:2], group=2)
    given = Given(9)
    episodes, _, counts = rollout(follow(TASKS, 2), TASKS[:2], group=2, skills=given, share=0.5)
    assert given.asked == [(0, 0, 0.5), (1, 1, 0.5), (2, 0, 0.5), (3, 1, 0.5)], "once an episode"
    assert set(given.texts) == {"look for mug"}
    assert [episode.given is not None for episode in episodes] == [False, True, False, True]
    assert counts["given_overflow"] == 0
    for before, episode in zip(plain, episodes, strict=True):
        for old, turn in zip(before.turns, episode.turns, strict=True):
            assert turn.prompt == old.prompt
            assert turn.prompt_ids == ([7, 7, *old.prompt_ids] if episode.given else old.prompt_ids)


def test_given_skill_without_room_is_left_out_and_counted():
    plain, _, _ = rollout(follow(TASKS), TASKS[:1])
    longest = max(len(turn.prompt_ids) for turn in plain[0].turns)
    episodes, _, counts = rollout(
        follow(TASKS, 2), TASKS[:1], group=2, skills=Given(1), share=1.0, max_prompt_tokens=longest
    )
    sizes = [len(turn.prompt_ids) for turn in plain[0].turns]
    assert [len(turn.prompt_ids) for turn in episodes[1].turns] == [
        size + 2 if size + 2 <= longest + 1 else size for size in sizes
    ]
    assert counts["given_overflow"] == sum(size + 2 > longest + 1 for size in sizes) > 0


def test_episodes_that_the_caller_has_made_keep_their_numbers_and_skills():
    """The keys follow the number of the episode, the prompt its own skill: of the turn, of the episode, or none."""
    steps = Skill("", "look for mug", ((1, "go to shelf 1"),))
    made = [
        Episode(task.id, task.family, task.goal, group=group, index=number, given=skill, attempt_of=3)
        for task, group, number, skill in zip(TASKS, (4, 4, 9), (31, 7, 12), (steps, None, Skill("", "x")), strict=True)
    ]
    plain, _, _ = rollout(follow(TASKS))
    tasks_of = dict(zip((31, 7, 12), TASKS, strict=True))
    reply = lambda index, turn: follow([tasks_of[index]])(0, turn)  # noqa: E731
    given = Given(9)
    episodes, sampler, counts = rollout(reply, episodes=made, skills=given)
    assert all(played is one for played, one in zip(episodes, made, strict=True)) and given.asked == []
    assert [(e.group, e.index, e.attempt_of) for e in episodes] == [(4, 31, 3), (4, 7, 3), (9, 12, 3)]
    assert [path for _, _, path, _ in sampler.rounds[0]] == [(5, 31, 0), (5, 7, 0), (5, 12, 0)]
    assert all(episode.won for episode in episodes) and counts["given_overflow"] == 0
    for before, episode in zip(plain, episodes, strict=True):
        assert [turn.prompt for turn in episode.turns] == [turn.prompt for turn in before.turns]
        for old, turn in zip(before.turns, episode.turns, strict=True):
            assert turn.prompt_ids == ([7, 7, *old.prompt_ids] if episode.given else old.prompt_ids)
    lengths = [len(episode.turns) for episode in episodes]
    assert given.texts[:4] == ["look for mug", "x", "go to shelf 1", "x"]
    assert sorted(given.texts) == sorted(["go to shelf 1", *["look for mug"] * (lengths[0] - 1), *["x"] * lengths[2]])


def test_playing_nothing():
    assert rollout(follow(TASKS), [], episodes=[])[0] == []


# -- at each one's own pace --------------------------------------------------------------------------------------------


class SlowPool:
    """Answers in an order of its own: `poll` returns some of what is owed, drawn with `seed`, the rest later."""

    def __init__(self, seed: int):
        self.pool, self.rng = make_pool("envs.alfworld.engine:make"), np.random.default_rng(seed)
        self.ready, self.waited = [], 0

    def begin(self, slots, tasks):
        self.ready = list(zip(slots, self.pool.open(slots, tasks), strict=True))

    def send(self, slots, commands):
        self.ready += zip(slots, self.pool.step(slots, commands), strict=True)

    def poll(self, wait):
        self.waited += wait
        count = int(self.rng.integers(wait, len(self.ready) + 1))
        chosen = set(self.rng.permutation(len(self.ready))[:count].tolist())
        answers = [answer for number, answer in enumerate(self.ready) if number in chosen]
        self.ready = [answer for number, answer in enumerate(self.ready) if number not in chosen]
        return answers


class Unhurried(ScriptedSampler):
    """Finishes some of what it was asked, the last request first."""

    def step(self):
        later = {handle: asked for handle, asked in list(self._waiting.items())[: len(self._waiting) // 2]}
        self._waiting = {handle: asked for handle, asked in self._waiting.items() if handle not in later}
        done = super().step()[::-1]
        self._waiting = later
        return done


class Notes:
    """An analysis: remembers how many episodes were under way when each was asked about."""

    def __init__(self, sampler):
        self.sampler, self.asked, self.taken = sampler, {}, []

    def ask(self, episode):
        handle = self.sampler.submit([1], SamplingParams(9), self.sampler.key((99, episode.index, 0)))
        self.asked[handle] = (episode.index, len(episode.turns), episode.won)

    def take(self, handle, completion):
        self.taken.append(self.asked[handle][0])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_answers_in_any_order_give_the_same_episodes(seed):
    expected, _, _ = rollout(follow(TASKS, 2), group=2)
    pool, sampler, counts = SlowPool(seed), Unhurried(lambda path: follow(TASKS, 2)(path[1], path[2])), Counter()
    live = []
    episodes = play(
        sampler, tiny.tokenizer(), world(pool), TASKS, group=2, params=SamplingParams(24), stream=5,
        max_prompt_tokens=400, counts=counts, on_turn=lambda step, under_way: live.append((step, under_way)),
    )  # fmt: skip
    for one, other in zip(expected, episodes, strict=True):
        assert [(t.prompt_ids, t.response_ids, t.result, t.reward) for t in one.turns] == [
            (t.prompt_ids, t.response_ids, t.result, t.reward) for t in other.turns
        ]
        assert (one.won, one.reward) == (other.won, other.reward)
    turns = [[turn for _, _, (_, _, turn), _ in asked] for asked in sampler.rounds]
    assert any(len(set(asked)) > 1 for asked in turns), "episodes were in lock-step"
    assert counts["env_wait_s"] > 0 and counts["play_s"] > counts["env_wait_s"]


def test_episodes_are_analyzed_while_others_are_played():
    reply = follow(TASKS, 2)
    sampler = ScriptedSampler(lambda path: reply(path[1], path[2]) if path[0] == 5 else "look")
    notes = Notes(sampler)
    episodes = play(
        sampler, tiny.tokenizer(), world(), TASKS, group=2, params=SamplingParams(24), stream=5, max_prompt_tokens=400,
        analysis=notes,
    )  # fmt: skip
    assert sorted(notes.asked.values()) == [(e.index, len(e.turns), e.won) for e in episodes]
    mixed = [{path[0] for _, _, path, _ in asked} for asked in sampler.rounds]
    assert {5, 99} in mixed
    assert len(notes.taken) > 0 and len(notes.taken) + sampler.pending == 6


def test_a_stop_leaves_nothing_in_the_sampler():
    class Stop(Exception):
        pass

    def stop(step, live):
        if step == 2:
            raise Stop

    reply = follow(TASKS)
    sampler = ScriptedSampler(lambda path: reply(path[1], path[2]))
    with pytest.raises(Stop):
        play(
            sampler, tiny.tokenizer(), world(), TASKS, group=1, params=SamplingParams(24), stream=5,
            max_prompt_tokens=400, on_turn=stop,
        )  # fmt: skip
    assert sampler.pending == 0
