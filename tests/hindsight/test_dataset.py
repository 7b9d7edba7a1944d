"""The rows of stage 1: split by task, mixed with acting turns, the same whatever the order of the lines."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from envs.alfworld.generate import make_tasks
from seed_jax import tokenizer as tok
from seed_jax.hindsight import dataset
from seed_jax.hindsight.parsing import parse_skill
from seed_jax.hindsight.prompts import TEXT_PLACEMENTS, encode_with_skills
from seed_jax.hindsight.records import RecordError
from seed_jax.images import PLACEHOLDER
from tests import tiny

TASK = make_tasks("train", 1)[0]
FAMILIES = ("clean", "heat", "cool")


def lines(tasks: int = 30, rollouts: int = 4) -> tuple[list[dict], list[dict]]:
    """Lines of rollouts.jsonl and skills.jsonl; every second episode is won, every fifth skill unusable."""
    episodes, skills = [], []
    for task in range(tasks):
        for rollout in range(rollouts):
            number = task * rollouts + rollout
            common = {
                "episode": f"t{task}#{rollout}",
                "task": f"t{task}",
                "family": FAMILIES[task % 3],
                "won": rollout % 2 == 0,
            }
            turn = lambda n: {  # noqa: E731
                "prompt": f"prompt {number}.{n}",  # noqa: B023
                "response": f"reply {number}.{n}",  # noqa: B023
                "valid": n != 1,
                "admissible": n != 2,
            }
            episodes.append({**common, "turns": [turn(n) for n in range(6)]})
            usable = number % 5 != 0
            skills.append(
                {
                    **common,
                    "prompt": f"analyze {number}",
                    "summary": f'it said "{number}"',
                    "skill": "look first, then act" if usable else None,
                }
            )
    return episodes, skills


def build(episodes, skills, **changes):
    return dataset.build(episodes, skills, **({"fraction": 0.1, "acting": 1.0, "seed": 0} | changes))


def test_no_task_is_on_both_sides():
    train, val, meta = build(*lines())
    tasks = [{row["task"] for row in side} for side in (train, val)]
    assert tasks[0].isdisjoint(tasks[1]) and tasks[1] == set(meta["val_tasks"])
    assert Counter(int(task[1:]) % 3 for task in meta["val_tasks"]) == dict.fromkeys(range(3), 1), "one of each family"
    assert meta["train_tasks"] == 27 and meta["skills_left_out"] == 24


def test_the_order_of_the_lines_does_not_matter():
    episodes, skills = lines()
    first = build(episodes, skills)
    random.Random(1).shuffle(episodes)
    random.Random(2).shuffle(skills)
    assert build(episodes, skills) == first
    assert build(episodes, skills, seed=1)[2]["val_tasks"] != first[2]["val_tasks"]
    assert [row["kind"] for row in first[0]] != sorted(row["kind"] for row in first[0]), "kinds are mixed"


def test_acting_rows_are_useful_turns_of_won_episodes_one_for_each_skill():
    train, val, meta = build(*lines())
    for side, counts in ((train, meta["train"]), (val, meta["val"])):
        assert counts["act"] == counts["skill"] == len(side) / 2
        acting = [row for row in side if row["kind"] == "act"]
        assert all(row["won"] and row["turn"] not in (1, 2) for row in acting)
        families = Counter(row["family"] for row in acting)
        assert max(families.values()) - min(families.values()) <= 1
        assert len({(row["episode"], row["turn"]) for row in acting}) == len(acting)
    assert "act" not in build(*lines(), acting=0.0)[2]["train"]
    most = build(*lines(), acting=100.0)[2]
    assert most["train"]["act"] + most["val"]["act"] == 30 * 2 * 4, "all that there are"


def followed_lines(tasks: int = 30, rollouts: int = 4) -> list[dict]:
    """Lines of followed.jsonl: as the episodes, each with a skill; every turn 4 had no room for it."""
    return [
        record
        | {"skill": f"look at shelf {place} .", "turns": [t | {"with_skill": n != 4} for n, t in enumerate(turns)]}
        for place, record in enumerate(lines(tasks, rollouts)[0])
        for turns in [record["turns"]]
    ]


def test_following_rows_are_useful_turns_of_won_episodes_with_the_skill_in_the_prompt():
    episodes, skills = lines()
    rows = list(dataset.following_rows(followed_lines(), "compact", "user_prefix"))
    assert len(rows) == 60 * 3 and {row["turn"] for row in rows} == {0, 3, 5} and all(row["won"] for row in rows)
    assert rows[1]["prompt"] == "hint: look at shelf 0 .\nprompt 0.3" and rows[1]["response"] == "reply 0.3"
    train, val, meta = build(episodes, skills, followed=rows, following=0.5)
    before = build(episodes, skills)
    for side, old, counts in ((train, before[0], meta["train"]), (val, before[1], meta["val"])):
        assert counts["follow"] == round(0.5 * counts["skill"]) and counts["act"] == counts["skill"]
        assert [row for row in side if row["kind"] != "follow"] == old, "the other rows are what they were"
        families = Counter(row["family"] for row in side if row["kind"] == "follow")
        assert max(families.values()) - min(families.values()) <= 1
    assert {row["task"] for row in train}.isdisjoint(row["task"] for row in val)
    random.Random(1).shuffle(rows)
    assert build(episodes, skills, followed=rows, following=0.5) == (train, val, meta)
    most = build(episodes, skills, followed=rows, following=100.0)[2]
    assert most["train"]["follow"] + most["val"]["follow"] == 60 * 3, "all that there are"
    assert build(episodes, skills, followed=rows) == before, "none by default"


@pytest.mark.parametrize("style", ["compact", "released"])
@pytest.mark.parametrize("placement", TEXT_PLACEMENTS)
def test_the_prompt_of_a_following_row_is_the_teachers(style, placement):
    """Token by token."""
    prompt, words = f"Your task is to: {TASK.goal}\nyou see a mug 1 .", tiny.tokenizer()
    turn = {"prompt": prompt, "response": "look", "valid": True, "admissible": True, "with_skill": True}
    record = {"episode": "t#0", "task": "t", "family": "f", "won": True, "skill": "  take mug 1 .", "turns": [turn]}
    [row] = dataset.following_rows([record], style, placement)
    [ids] = tok.encode_prompts(words, [row["prompt"]])
    assert [ids] == encode_with_skills(words, [prompt], [record["skill"]], style, placement)
    assert ids != tok.encode_prompts(words, [prompt])[0]
    with pytest.raises(ValueError, match="placement 'system' is not in the user message"):
        list(dataset.following_rows([record], style, "system"))


def test_a_skill_beside_a_picture_cannot_stand_for_one():
    turn = {
        "prompt": f"see {PLACEHOLDER}",
        "response": "up",
        "valid": True,
        "admissible": True,
        "image": "images/a.png",
    }
    record = {"episode": "t#0", "task": "t", "family": "f", "won": True, "skill": f"go {PLACEHOLDER}"}
    [row] = dataset.following_rows([{**record, "turns": [turn | {"with_skill": True}]}], "compact", "after_task_line")
    assert row["prompt"].count(PLACEHOLDER) == 1 and row["images"] == ["images/a.png"]


def test_a_skill_row_is_what_the_parser_reads():
    train, _, _ = build(*lines())
    row = next(row for row in train if row["kind"] == "skill")
    skill = parse_skill(row["response"], min_words=3)
    assert skill.text == "look first, then act" and skill.summary == f'it said "{row["prompt"].split()[1]}"'


def test_files_are_read_as_written_and_changes_are_found(tmp_path):
    train, val, meta = build(*lines())
    dataset.write(tmp_path, train, val, meta)
    read = dataset.read(tmp_path)
    assert read[:2] == (train, val) and {**meta, "sha256": read[2]["sha256"]} == read[2]
    path = tmp_path / "train.jsonl"
    path.write_text(path.read_text().replace("reply", "answer", 1))
    with pytest.raises(RecordError, match=r"train\.jsonl is not the file that was written with it"):
        dataset.read(tmp_path)
    path.unlink()
    with pytest.raises(RecordError, match=r"train\.jsonl: No such file.*--stage=dataset"):
        dataset.read(tmp_path)
    (tmp_path / "dataset.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(RecordError, match="its format is 99"):
        dataset.read(tmp_path)


def test_missing_sources_name_the_stage_that_makes_them(tmp_path):
    with pytest.raises(RecordError, match=r"rollouts\.jsonl does not exist; make it with .*--stage=rollouts"):
        dataset.load_sources((tmp_path / "rollouts.jsonl", "rollouts"), (tmp_path / "skills.jsonl", "skills"))
