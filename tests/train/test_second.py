"""Second attempts: who plays them, what they say of a skill, and runs that use all of it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from configs import quickstart
from envs.alfworld.domain import AlfworldDomain
from envs.alfworld.generate import make_tasks
from envs.base import EnvError
from envs.pool import make_pool
from seed_jax import config as config_lib
from seed_jax import tokenizer as tok
from seed_jax.hindsight.prompts import insert_skill
from seed_jax.hindsight.sources import Skills
from seed_jax.rollout import World
from seed_jax.runtime.logging import read_jsonl
from seed_jax.train import loop, second
from seed_jax.train.samples import batch_samples
from seed_jax.types import Episode, Skill, Turn, Written
from tests import tiny
from tests.scripted import ScriptedSampler


def shares(group: int, share: float) -> tuple[int, int]:
    return second.split_group(SimpleNamespace(group=group), SimpleNamespace(second_attempts=share))


@pytest.mark.parametrize(
    ("group", "share", "expected"),
    [
        (8, 0.0, (8, 0)),
        (8, 0.25, (6, 2)),
        (8, 0.01, (7, 1)),  # at least one
        (3, 0.34, (2, 1)),
        (4, 0.5, (2, 2)),
        (8, 0.9, (1, 7)),
        (2, 0.99, (0, 2)),  # which the rules of the config refuse
    ],
)
def test_split_of_a_group(group, share, expected):
    assert shares(group, share) == expected and sum(expected) == group


def turn(number: int = 0) -> Turn:
    prompt = f"your task is to: put a mug in desk\nhistory: none\nnow: you arrive at shelf {number + 1}\nactions: look"
    ids = tok.encode_prompts(tiny.tokenizer(), [prompt])[0]
    return Turn(prompt, ids, [5, 1], np.zeros(2), "", "", "look", True, True)


def attempt(group: int, index: int, won: bool = False, skill: str | None = None, **fields) -> Episode:
    given = {"turns": [turn()], **fields}
    return Episode(f"task {group}", "f", "put a mug in desk", group, index, won=won, reward=10.0 * won,
                   skill=None if skill is None else Skill("", skill), **given)  # fmt: skip


# -- who plays ---------------------------------------------------------------------------------------------------------


def test_the_skills_of_a_group_are_read_in_turn():
    """Two usable skills and three attempts; a group without skills has none; lost and empty episodes are left out."""
    episodes = [
        attempt(5, 10, True, "a"), attempt(5, 11, False, None), attempt(5, 12, False, "b"),
        attempt(2, 4, False, "c", error="crashed"), attempt(2, 5, False, "d", turns=[]), attempt(2, 6, False, None),
        attempt(3, 7, False, "e"),
    ]  # fmt: skip
    planned = second.plan(episodes, 3, first_number=100)
    assert [(e.group, e.index, e.attempt_of, e.given.text) for e in planned] == [
        (3, 109, 7, "e"), (3, 110, 7, "e"), (3, 111, 7, "e"), (5, 115, 10, "a"), (5, 116, 12, "b"), (5, 117, 10, "a"),
    ]  # fmt: skip
    for one in planned:
        assert (one.task_id, one.family, one.goal) == (f"task {one.group}", "f", "put a mug in desk")
        assert one.turns == [] and one.skill is None and not one.won and one.value == 0.0 and one.error is None
    assert second.plan([], 2, 0) == [] == second.plan(episodes, 0, 0)


def test_outcomes_do_not_choose_the_skills():
    won = [attempt(0, i, True, str(i)) for i in range(3)]
    lost = [dataclasses.replace(e, won=False, reward=0.0) for e in won]
    numbers = lambda episodes: [(e.attempt_of, e.given) for e in second.plan(episodes, 2, 3)]  # noqa: E731
    assert numbers(won) == numbers(lost) and [number for number, _ in numbers(won)] == [0, 1]


class CrashingPool:
    """The game of the last slot cannot be opened."""

    def __init__(self):
        self.pool = make_pool("envs.alfworld.engine:make")

    def open(self, slots, tasks):
        return [*self.pool.open(slots, tasks)[:-1], EnvError("no such game")]

    def step(self, slots, commands):
        return self.pool.step(slots, commands)


def scripted_run(pool=None, turns: int = 20):
    """A run whose policy walks the walkthrough if a skill tells it to, else looks around."""
    config = quickstart.get_config("seed")
    config.hindsight.second_attempts, config.rollout.group, config.rollout.tasks = 0.5, 4, 3
    tasks = make_tasks("train", 3)
    walks = {6 + 2 * g + n: tasks[g].source["walkthrough"] for g in range(3) for n in range(2)}
    say = lambda command: f"<think> </think> <action> {command} </action>"  # noqa: E731
    sampler = ScriptedSampler(lambda path: say((walks[path[1]] + ["look"] * 30)[path[2]] if path[1] % 2 else "look"))
    pool = pool or make_pool("envs.alfworld.engine:make")
    world = World(AlfworldDomain("compact"), pool, turns, 4)
    run = SimpleNamespace(
        config=config, sampler=sampler, tokenizer=tiny.tokenizer(), setup=SimpleNamespace(world=world),
        skills=Skills(config, tiny.tokenizer()), on_turn=lambda step, live: None,
    )  # fmt: skip
    return run, tasks


def first_attempts(tasks) -> list[Episode]:
    """Two of each task, the first of each with a skill, that of task 1 without."""
    return [
        Episode(task.id, task.family, task.goal, g, 2 * g + n, [turn()], skill=Skill("", f"look for {g}")
                if n == 0 and g != 1 else None)
        for g, task in enumerate(tasks)
        for n in range(2)
    ]  # fmt: skip


def test_second_attempts_are_games_of_the_same_tasks_with_keys_of_their_own():
    run, tasks = scripted_run()
    episodes, counts = first_attempts(tasks), Counter()
    played = second.play_seconds(run, episodes, tasks[::-1], 7, counts)
    assert [(e.task_id, e.group, e.index, e.attempt_of) for e in played] == [
        (tasks[0].id, 0, 6, 0), (tasks[0].id, 0, 7, 0), (tasks[2].id, 2, 10, 4), (tasks[2].id, 2, 11, 4),
    ]  # fmt: skip
    assert [e.won for e in played] == [False, True, False, True], "every second one follows the walkthrough"
    assert {path for asked in run.sampler.rounds[:1] for _, _, path, _ in asked} == {(7, i, 0) for i in (6, 7, 10, 11)}
    assert {seed for asked in run.sampler.rounds for *_, seed in asked} == {None}
    limits = (run.config.rollout.max_response_tokens, run.config.rollout.temperature)
    assert {params[:2] for asked in run.sampler.rounds for _, params, _, _ in asked} == {limits}
    for one in played:
        for step in one.turns:
            text = insert_skill(step.prompt, f"look for {one.group}", "compact")
            assert step.prompt_ids == tok.encode_prompts(tiny.tokenizer(), [text])[0]
    assert counts["second_without_skill"] == 2 and counts["given_overflow"] == counts["env_errors"] == 0
    assert all(e.value == 0.0 for e in episodes) and [e.given for e in episodes] == [None] * 6


def test_second_attempts_that_crash_do_not_count():
    run, tasks = scripted_run(CrashingPool())
    counts = Counter()
    played = second.play_seconds(run, first_attempts(tasks), tasks, 0, counts)
    assert [e.error for e in played] == [None, None, None, "no such game"] and counts["env_errors"] == 1
    episodes = first_attempts(tasks)
    second.set_values(episodes, played)  # 1 of 2 in group 0, 0 of 1 in group 2: differences .5 and 0
    assert [episodes[i].value for i in (0, 2, 4)] == pytest.approx([(2 * 0.5 + 2 * 0.25) / 4, 0.25, 2 * 0.25 / 3])


def test_without_any_skill_nothing_is_played():
    run, tasks = scripted_run()
    episodes, counts = [dataclasses.replace(e, skill=None) for e in first_attempts(tasks)], Counter()
    assert second.play_seconds(run, episodes, tasks, 0, counts) == [] and counts["second_without_skill"] == 6
    assert run.sampler.rounds == [] and second.metrics(episodes, [], counts) == {}


# -- what they say -----------------------------------------------------------------------------------------------------


def four_groups() -> tuple[list[Episode], list[Episode]]:
    """Success without and with a skill: 1 of 2 and 2 of 2; 0 of 2 and 0 of 1 (a lost game counts in neither); 1 of 2
    and never; never and 1 of 1."""
    firsts = [
        attempt(0, 0, True), attempt(0, 1), attempt(1, 2), attempt(1, 3), attempt(1, 4, True, error="crashed"),
        attempt(2, 5, True), attempt(2, 6), attempt(3, 7, True, error="crashed"),
    ]  # fmt: skip
    seconds = [
        attempt(0, 10, True, attempt_of=0), attempt(0, 11, True, attempt_of=1),
        attempt(1, 12, attempt_of=3), attempt(1, 13, True, attempt_of=3, error="crashed"),
        attempt(3, 14, True, attempt_of=7),
    ]  # fmt: skip
    return firsts, seconds


def test_values_by_hand():
    firsts, seconds = four_groups()
    second.set_values(firsts, seconds)
    mean = (0.5 + 0.0) / 2  # of the groups that have both
    expected = [(2 * 0.5 + 2 * mean) / 4, (1 * 0.0 + 2 * mean) / 3, mean, mean]
    assert [e.value for e in firsts] == pytest.approx([expected[e.group] for e in firsts], abs=1e-12)
    assert all(e.value == 0.0 for e in seconds)
    second.set_values(firsts, [])
    assert [e.value for e in firsts] == [0.0] * 8, "nothing was measured"


def test_a_value_may_be_negative_and_is_drawn_towards_the_mean():
    """One group whose skill is of no use among nine where it helps: many attempts are believed, few are not."""
    for count, pull in ((1, 2 / 3), (2, 1 / 2), (18, 1 / 10)):
        firsts = [attempt(g, g, g == 0) for g in range(10)]
        seconds = [attempt(g, 10, g != 0) for g in range(10) for _ in range(count)]
        second.set_values(firsts, seconds)
        mean = (9 * 1.0 - 1.0) / 10
        assert firsts[0].value == pytest.approx(-1.0 + pull * (mean + 1.0))
        assert firsts[1].value == pytest.approx(1.0 + pull * (mean - 1.0))


def test_values_are_those_of_all_hosts(monkeypatch):
    """Another host's groups move the mean, and with it the values; what is its own stays its own."""
    firsts, seconds = four_groups()
    monkeypatch.setattr(second.multihost, "gather_json", lambda mine: [mine, [1.0, 1.0]])
    second.set_values(firsts, seconds)
    mean = (0.5 + 0.0 + 1.0 + 1.0) / 4
    assert [firsts[i].value for i in (0, 2, 5)] == pytest.approx([(1 + 2 * mean) / 4, 2 * mean / 3, mean])


def test_value_of_single_skills_by_hand():
    firsts, seconds = four_groups()
    seconds.append(attempt(0, 15, False, attempt_of=1))
    assert second.skill_values(firsts, seconds) == {0: 0.5, 1: pytest.approx(0.0), 3: 0.0}
    assert second.skill_values(firsts, []) == second.skill_values([], seconds) == {}


def test_metrics_by_hand():
    firsts, seconds = four_groups()
    got = second.metrics(firsts, seconds, Counter(second_without_skill=3))
    assert got == {
        "second/success_rate": 0.5, "second/first_success_rate": 0.25, "second/margin": 0.25, "second/episodes": 5,
        "second/without_skill": 3,
    }  # fmt: skip
    assert second.metrics(firsts, [], Counter()) == second.metrics([], seconds, Counter()) == {}
    assert second.metrics(firsts, [attempt(0, 10, error="crashed")], Counter()) == {}


def test_groups_of_their_own():
    config = SimpleNamespace(rollout=SimpleNamespace(tasks=16))
    _, seconds = four_groups()
    copies = second.as_groups(seconds, config)
    assert [e.group for e in copies] == [16, 16, 17, 17, 19] and [e.group for e in seconds] == [0, 0, 1, 1, 3]
    for one, copy in zip(seconds, copies, strict=True):
        assert dataclasses.replace(copy, group=one.group) == one and copy.turns is one.turns


# -- rows of a batch ---------------------------------------------------------------------------------------------------


def rows_run(**changes):
    config = quickstart.get_config("seed")
    config.hindsight.second_attempts, config.rollout.group, config.rollout.tasks = 0.5, 4, 2
    config.update_from_flattened_dict(changes)
    words = tiny.tokenizer()
    return SimpleNamespace(config=config, tokenizer=words, skills=Skills(config, words), distills=True)


def with_analyses() -> tuple[list[Episode], list[Episode]]:
    """Two groups; of three analyzed first attempts two were read by second ones."""
    write = lambda i: Written([40 + i], [7, 1], np.zeros(2))  # noqa: E731
    firsts = [attempt(i // 2, i, i == 1, f"skill {i}", turns=[turn(i)], value=0.1 * i) for i in range(4)]
    for i in (0, 1, 2):
        firsts[i].written = write(i)
    seconds = [
        attempt(0, 4, True, attempt_of=0, given=firsts[0].skill, turns=[turn(5), turn(6)]),
        attempt(1, 5, False, attempt_of=2, given=firsts[2].skill, turns=[turn(7)]),
    ]
    return firsts, seconds


@pytest.mark.parametrize("trained", [False, True])
def test_second_attempts_are_rows_without_a_teacher(trained):
    run, (firsts, seconds) = rows_run(**{"hindsight.train_second": trained}), with_analyses()
    samples = batch_samples(run, firsts, 0, Counter(), seconds=seconds)
    mine = [s for s in samples if s.episode >= 4]
    assert sorted((s.episode, s.group, s.reward) for s in mine) == [(4, 2, 10.0), (4, 2, 10.0), (5, 3, 0.0)] * trained
    assert all(s.given and s.teacher_prompt is None and s.value == 0.0 and not s.generated for s in mine)
    own = sorted((s for s in samples if s.episode < 4), key=lambda s: s.episode)
    assert [(s.episode, s.group, s.value, s.given) for s in own] == [(i, i // 2, 0.1 * i, False) for i in range(4)]
    for s, first in zip(own, firsts, strict=True):
        text = insert_skill(first.turns[0].prompt, first.skill.text, "compact")
        assert s.teacher_prompt == tok.encode_prompts(tiny.tokenizer(), [text])[0]
    assert len(samples) == 4 + 3 * trained


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ("gap", {0: 0.0, 1: 0.0, 2: 0.0}),  # every skill is rewarded by its gap, whether or not it was read
        ("second_attempts", {0: 1.0 - 0.5, 2: 0.0 - 0.0}),
    ],
)
def test_analyses_that_are_trained(reward, expected):
    run = rows_run(**{"loss.gen_coef": 0.1, "loss.gen_reward": reward})
    firsts, seconds = with_analyses()
    written = lambda seconds: {  # noqa: E731
        s.episode: s.value
        for s in batch_samples(run, firsts, 0, Counter(), firsts, seconds=seconds)
        if s.generated and s.prompt == [40 + s.episode] and s.teacher_prompt is None and s.group == s.episode // 2
    }
    assert written(seconds) == expected
    assert written([]) == (expected if reward == "gap" else {}), "no second attempt has read them"


# -- runs --------------------------------------------------------------------------------------------------------------


def run_config(model_dir):
    """Two first and two second attempts at each of three tasks; every use of them."""
    config = tiny.config(model_dir)
    config.rollout.group, config.hindsight.second_attempts = 4, 0.5
    config.hindsight.train_second = True
    config.distill.value, config.loss.gen_reward, config.loss.gen_coef = "second_attempts", "second_attempts", 0.1
    config.pack.row_tokens = 328  # an analysis and its answer
    config.log.diagnostics_episodes = 0
    config.log.tensorboard = False
    config_lib.check(config)
    return config


@pytest.fixture(scope="module")
def whole(model_dir, tmp_path_factory, planner_skills):
    """(workdir, samples of each iteration) of a run."""
    workdir, packed, pack = tmp_path_factory.mktemp("second"), [], loop.pack
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "pack", lambda samples, *rest: packed.append(samples) or pack(samples, *rest))
        tiny.run(run_config(model_dir), workdir)
    return workdir, packed


def played(workdir, iteration: int) -> tuple[list[dict], list[dict]]:
    """(first, second attempts) of an iteration in episodes.jsonl."""
    mine = [episode for episode in read_jsonl(workdir / "episodes.jsonl") if episode["iteration"] == iteration]
    return [e for e in mine if e["attempt_of"] is None], [e for e in mine if e["attempt_of"] is not None]


def success(episodes, group=None) -> float:
    return float(np.mean([e["won"] for e in episodes if group in (None, e["group"])]))


@pytest.mark.slow
def test_an_iteration_plays_as_many_episodes_as_without(whole):
    workdir, _ = whole
    for iteration, record in enumerate(read_jsonl(workdir / "metrics.jsonl"), start=1):
        firsts, seconds = played(workdir, iteration)
        assert [(e["group"], e["index"]) for e in firsts] == [(i // 2, i) for i in range(6)]
        assert [(e["group"], e["index"]) for e in seconds] == [(i // 2, 6 + i) for i in range(6)]
        assert [e["attempt_of"] for e in seconds] == [1, 1, 2, 2, 4, 5]  # those with a skill: see tiny.write_skills
        assert all(e["given_skill"] is None for e in firsts) and all(e["skill"] is None for e in seconds)
        for e in seconds:
            first = firsts[e["attempt_of"]]
            assert e["given_skill"] == first["skill"] and e["task"] == first["task"] and e["goal"] == first["goal"]
        assert record["rollout/success_rate"] == pytest.approx(success(firsts))
        assert record["rollout/turns"] == sum(len(e["turns"]) for e in firsts)
        assert record["second/first_success_rate"] == pytest.approx(success(firsts))
        assert record["second/success_rate"] == pytest.approx(success(seconds))
        assert record["second/margin"] == pytest.approx(success(seconds) - success(firsts))
        assert record["second/episodes"] == 6 and record["second/without_skill"] == 0
        assert record["time/second_attempts_s"] > 0 and record["update/skipped_steps"] == 0
        taught = sum(len(e["turns"]) for e in firsts if e["skill"])
        assert record["opd/coverage"] == pytest.approx(taught / sum(len(e["turns"]) for e in (*firsts, *seconds)))
        everything = sum(len(words(e)) for e in (*firsts, *seconds))
        assert record["rollout/generated_tokens"] > everything, "the analyses are tokens too"


def words(episode: dict) -> list[int]:
    return [i for turn in episode["turns"] for i in tok.encode_response(tiny.tokenizer(), turn["response"])]


@pytest.mark.slow
def test_what_the_update_learns_from(whole):
    """Values, groups and rewards of every row, from nothing but the outcomes in episodes.jsonl."""
    workdir, packed = whole
    assert any(e["won"] for e in read_jsonl(workdir / "episodes.jsonl")), "otherwise this test shows little"
    for iteration, samples in enumerate(packed, start=1):
        firsts, seconds = played(workdir, iteration)
        differences = [success(seconds, g) - success(firsts, g) for g in range(3)]
        values = [(2 * d + 2 * np.mean(differences)) / 4 for d in differences]
        turns = [s for s in samples if not s.generated]
        for s in turns:
            of = (firsts + seconds)[s.episode]
            assert s.reward == of["reward"] and s.given == (s.episode >= 6)
            assert s.group == of["group"] + 3 * (s.episode >= 6)
            assert s.value == pytest.approx(0.0 if s.episode >= 6 else values[s.group], abs=1e-12)
            assert (s.teacher_prompt is not None) == (of["skill"] is not None)
        assert Counter(s.episode for s in turns) == {e["index"]: len(e["turns"]) for e in (*firsts, *seconds)}
        for s in (written := [s for s in samples if s.generated]):
            read = [e["won"] for e in seconds if e["attempt_of"] == s.episode]
            assert s.value == pytest.approx(np.mean(read) - success(firsts, s.group))
        assert [s.episode for s in sorted(written, key=lambda s: s.episode)] == [1, 2, 4, 5]


@pytest.mark.slow
@pytest.mark.parametrize(("stream", "step"), [(1, 0), (0, 1)])
def test_a_run_stopped_in_its_second_attempts_equals_a_whole_one(model_dir, tmp_path, whole, stream, step):
    config, original = run_config(model_dir), second.play

    def play(*arguments, stream: int, on_turn, **options):
        def on_turn_or_signal(number, live):
            if (stream, number) == wanted:
                on_turn.__self__.stop.set()  # what the signal handler does
            on_turn(number, live)

        return original(*arguments, stream=stream, on_turn=on_turn_or_signal, **options)

    wanted = (stream, step)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(second, "play", play)
        with pytest.raises(loop.Interrupted):
            tiny.run(config, tmp_path)
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == stream
    tiny.run(config, tmp_path)
    result, expected = tiny.outcome(tmp_path, 2), tiny.outcome(whole[0], 2)
    for part in expected:
        assert result[part] == expected[part], part
