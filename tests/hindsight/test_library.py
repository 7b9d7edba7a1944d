"""Libraries of skills: what a task gets, the shipped ones, and what is wrong with a broken one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs import base
from envs.alfworld.games import FAMILIES
from envs.alfworld.generate import SENTENCES
from seed_jax.hindsight.bank import CATEGORY_KEYS, load_bank, read_bank
from seed_jax.hindsight.library import Library, SkillError, load_folder
from seed_jax.hindsight.prompts import skill_block
from tests import tiny

PICK, LIGHT, CLEAN, HEAT, COOL, TWO = FAMILIES
LIBRARIES = {
    "alfworld": load_folder(base.SKILLS / "alfworld"),
    "alfworld_compact": load_folder(base.SKILLS / "alfworld_compact"),
    "alfworld_bank": load_bank(base.SKILLS / "alfworld"),
    "alfworld_compact_bank": load_bank(base.SKILLS / "alfworld_compact" / "bank.json"),
}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A library with two skills and a general part."""
    write(
        tmp_path, {"general": "g.md", "heat": "heat.md", "cool": "cool.md"}, {"pick_heat": "heat", "pick_cool": "cool"}
    )
    for name, text in (("g.md", "look twice\n"), ("heat.md", "use fire\n"), ("cool.md", "use ice\n")):
        (tmp_path / name).write_text(text)
    return tmp_path


def write(folder: Path, files: object, tasks: object, **more: object) -> None:
    (folder / "mapping.json").write_text(json.dumps({"skill_files": files, "task_to_skill": tasks, **more}))


# -- what a task gets --------------------------------------------------------------------------------------------------


def test_text_is_the_general_part_a_blank_line_and_the_skill(folder):
    library = load_folder(folder)
    assert library.text(library.names("pick_heat", "", "task_type")) == "look twice\n\nuse fire"
    assert library.text(library.names("", "", "all")) == "look twice\n\nuse fire\n\nuse ice"
    assert library.text([]) == "look twice"


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("pick_heat", "pick_heat"),
        ("valid/pick_heat-Mug-None-Shelf-12/trial_3", "pick_heat"),  # a game's path, as published baselines ask
        ("pick_one_and_cool", "pick_cool"),  # all words of the type
        ("pick_clean", None),
    ],
)
def test_task_type_of_a_family(folder, family, expected):
    assert load_folder(folder).task_type(family) == expected


def test_first_task_type_in_file_order_wins():
    library = Library(Path(), {"a": "A", "b": "B"}, {"heat": "a", "pick_heat": "b"})
    assert library.task_type("pick_heat") == "pick_heat" and library.task_type("then_pick_heat") == "heat"


@pytest.mark.parametrize(
    ("goal", "expected"),
    [
        ("put a hot mug in cabinet", ["heat"]),
        ("HEAT some egg and put it in cool place", ["heat", "cool"]),
        ("put a mug on shelf", []),
    ],
)
def test_keywords_find_every_matching_task_type_once(folder, goal, expected):
    keywords = {"pick_heat": ["heat", "Hot "], "pick_cool": ["cool"]}
    write(
        folder,
        {"heat": "heat.md", "cool": "cool.md"},
        {"pick_heat": "heat", "pick_cool": "cool"},
        task_keywords=keywords,
    )
    library = load_folder(folder)
    assert library.names("pick_heat", goal, "keyword") == expected
    assert library.names("pick_heat", goal, "task_type") == ["heat"]
    assert library.names("unheard_of", goal, "task_type") == expected, "an unknown family goes by its goal"


def test_another_tasks_skill_is_the_next_in_order_and_says_something_else():
    library = Library(Path(), {"a": "A", "b": "A", "c": "C"}, {"x": "a"}, general="G")
    assert [library.other(names) for names in (["a"], ["b"], ["c"], [], ["a", "c"])] == ["c", "c", "a", "a", None]
    assert Library(Path(), {"a": "A"}, {"x": "a"}).other(["a"]) is None


# -- what ships --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LIBRARIES)
def test_shipped_libraries_know_every_family_by_name_and_by_goal(name):
    library = LIBRARIES[name]
    library.check(FAMILIES, "task_type")
    own = {CLEAN: "clean", HEAT: "heat", COOL: "cool", LIGHT: "look_at_obj_in_light", PICK: "pick_and_place"}
    own[TWO] = "pick_and_place" if name == "alfworld_bank" else "pick_two"
    for family, sentences in SENTENCES.items():
        assert library.names(family, "", "task_type") == [own[family]]
        for sentence in sentences:
            found = library.names(
                "", sentence.format(object="mug", receptacle="desklamp" if family == LIGHT else "shelf"), "keyword"
            )
            assert own[family] in found
            assert not set(found) & {"clean", "heat", "cool", "look_at_obj_in_light", "pick_two"} - {own[family]}
        assert library.other([own[family]]) not in (None, own[family])


def test_compact_library_is_in_the_vocabulary_and_within_the_quickstarts_budget():
    words = tiny.tokenizer()
    for library in (LIBRARIES["alfworld_compact"], LIBRARIES["alfworld_compact_bank"]):
        assert library.general == "" == library.closing
        for text in library.skills.values():
            ids = words(skill_block(text, "compact", "library"), add_special_tokens=False)["input_ids"]
            assert 5 < len(ids) <= 40
            content = text.split("\n- ")[-1]  # the heading of a bank's category has words of its own
            assert words.unk_token_id not in words(content, add_special_tokens=False)["input_ids"], content


def test_english_library_fits_the_default_budget():
    """256 tokens; an English word of such text takes 1.1 to 1.3 tokens of a large vocabulary."""
    for library in (LIBRARIES["alfworld"], LIBRARIES["alfworld_bank"]):
        for name in library.skills:
            assert len(library.text([name]).split()) < 180


# -- banks -------------------------------------------------------------------------------------------------------------


def skill(number: int, **more: object) -> dict:
    return {"skill_id": f"s{number}", "title": f"T{number}", "principle": f"do {number}"} | more


def bank_data(key: str = CATEGORY_KEYS[0]) -> dict:
    return {
        "general_skills": [skill(n, extra=n) for n in range(8)] + [skill(50, skill_id="dyn_001")],
        key: {"heat": [skill(10, when_to_apply="it is cold"), skill(11)], "multi hop": [skill(12)], "none": []},
        "common_mistakes": [
            {"mistake_id": f"m{n}", "description": f"bad {n}.", "why_it_happens": "?", "how_to_avoid": f"good {n}."}
            for n in range(6)
        ],
        "metadata": {"source": "x", "heat": {"success": 1, "failure": 2}},
        "other": [1],
    }


@pytest.mark.parametrize("key", CATEGORY_KEYS)
def test_bank_round_trip_in_both_spellings(tmp_path, key):
    path = tmp_path / "bank.json"
    path.write_text(json.dumps(bank_data(key)))
    bank = read_bank(path)
    assert bank.category_key == key and bank.as_json() == bank_data(key)
    path.write_text(json.dumps(bank.as_json()))
    assert read_bank(path) == bank


@pytest.mark.parametrize("key", CATEGORY_KEYS)
def test_bank_text_is_six_general_and_added_ones_the_category_and_five_mistakes(tmp_path, key):
    path = tmp_path / "bank.json"
    path.write_text(json.dumps(bank_data(key)))
    library = load_bank(path)
    assert library.text(library.names("pick_heat_then_place", "", "task_type")).splitlines() == [
        "## General principles",
        *(f"- T{n}: do {n}" for n in range(6)),
        "- T50: do 50",
        "",
        "## Heat",
        "- T10: do 10 (when: it is cold)",
        "- T11: do 11",
        "",
        "## Mistakes",
        *(f"- bad {n}. Instead: good {n}." for n in range(5)),
    ]  # fmt: skip
    assert list(library.skills) == ["heat", "multi hop"]


def test_bank_with_missing_lists(tmp_path):
    path = tmp_path / "bank.json"
    path.write_text(json.dumps({"general_skills": [skill(1)]}))
    library = load_bank(path)
    library.check(FAMILIES, "task_type")
    assert library.text(library.names(HEAT, "heat it", "task_type")) == "## General principles\n- T1: do 1"
    path.write_text(json.dumps({"query_type_skills": {"compare": [skill(1)]}}))
    assert load_bank(path).text(["compare"]) == "## Compare\n- T1: do 1"


def test_bank_category_by_words_of_the_family(tmp_path):
    path = tmp_path / "bank.json"
    names = ("pick_and_place", "look_at_obj_in_light", "clean", "heat", "cool", "examine")
    path.write_text(json.dumps({"task_specific_skills": {name: [skill(n)] for n, name in enumerate(names)}}))
    library = load_bank(path)
    assert [library.names(family, "", "task_type") for family in FAMILIES] == [
        ["pick_and_place"], ["look_at_obj_in_light"], ["clean"], ["heat"], ["cool"], ["pick_and_place"],
    ]  # fmt: skip
    with pytest.raises(SkillError, match=r"no task_keywords, which hindsight\.retrieval = 'keyword' needs"):
        library.check(FAMILIES, "keyword")


# -- what is wrong with a broken one -----------------------------------------------------------------------------------


def test_unknown_family_names_what_there_is(folder):
    with pytest.raises(
        SkillError, match=r"no skill for the task family dance, sing \(it has: pick_heat, pick_cool\); add"
    ):
        load_folder(folder).check(["sing", "pick_heat", "dance"], "task_type")
    load_folder(folder).check(["sing"], "all")


def test_missing_folder_and_missing_mapping(tmp_path):
    with pytest.raises(SkillError, match=r"hindsight\.library = '.*nowhere': there is no such folder"):
        load_folder(tmp_path / "nowhere")
    with pytest.raises(SkillError, match=r"holds no mapping\.json"):
        load_folder(tmp_path)
    with pytest.raises(SkillError, match=r"there is no file .*bank\.json \(a bank is one JSON file\)"):
        load_bank(tmp_path)


def test_mapping_under_another_name(folder):
    (folder / "mapping.json").rename(folder / "alfworld_skills.json")
    assert list(load_folder(folder).skills) == ["heat", "cool"]
    (folder / "second.json").write_text("{}")
    with pytest.raises(SkillError, match=r"holds no mapping\.json"):
        load_folder(folder)


@pytest.mark.parametrize(
    ("files", "tasks", "more", "message"),
    [
        ({}, {"a": "b"}, {}, "names no skill_files"),
        (["heat.md"], {"a": "b"}, {}, "skill_files must be a table of texts"),
        ({"heat": 3}, {"a": "b"}, {}, "skill_files must be a table of texts"),
        ({"heat": "fire.md"}, {"a": "heat"}, {}, r"fire\.md, named in mapping\.json, cannot be read"),
        ({"heat": "empty.md"}, {"a": "heat"}, {}, r"empty\.md is empty; write a skill in it"),
        ({"heat": "../secret.md"}, {"a": "heat"}, {}, r"the file '\.\./secret\.md' is outside of the folder"),
        ({"heat": "heat.md"}, {}, {}, "has no task_to_skill"),
        ({"heat": "heat.md"}, {"a": "cool"}, {}, "task_to_skill names 'cool' for 'a'; there is: heat"),
        ({"heat": "heat.md"}, {"a": "heat"}, {"task_keywords": {"b": ["x"]}}, "task_keywords has 'b', which task_to"),
        ({"heat": "heat.md"}, {"a": "heat"}, {"task_keywords": {"a": "x"}}, "task_keywords of 'a' must be a list"),
        ({"heat": "heat.md"}, {"a": "heat"}, {"task_keywords": {"a": [""]}}, "task_keywords of 'a' must be a list"),
        ({"heat": "heat.md"}, {"a": "heat"}, {"task_keywords": []}, "task_keywords must be a table"),
    ],
)
def test_broken_mapping(folder, files, tasks, more, message):
    (folder / "empty.md").write_text(" \n")
    (folder.parent / "secret.md").write_text("do not read")
    write(folder, files, tasks, **more)
    with pytest.raises(SkillError, match=message):
        load_folder(folder)


@pytest.mark.parametrize("load", [load_folder, load_bank])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not valid JSON"),
        (b'{"a": ', "is not valid JSON"),
        (b"\xff", "is not valid JSON"),
        (b"[1]", "must hold a JSON object, holds a list"),
    ],
)
def test_bad_json(tmp_path, load, content, message):
    (tmp_path / "mapping.json").write_bytes(content)
    with pytest.raises(SkillError, match=message):
        load(tmp_path if load is load_folder else tmp_path / "mapping.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_type_skills": {}}, "has both task_specific_skills and query_type_skills; keep one"),
        ({"task_specific_skills": []}, "task_specific_skills must be a table"),
        ({"task_specific_skills": {"heat": {}}}, r"task_specific_skills\['heat'\] must be a list of objects"),
        ({"general_skills": [{"title": "x"}]}, r"general_skills\[0\] needs a text 'principle'"),
        ({"general_skills": ["x"]}, "general_skills must be a list of objects"),
        ({"common_mistakes": [{"description": " "}]}, r"common_mistakes\[0\] needs a text 'description'"),
        ({"general_skills": [skill(10)]}, "the id 's10' occurs twice"),
        ({"task_to_skill": {"a": "dance"}}, "task_to_skill names 'dance' for 'a'; there is: heat, multi hop"),
        ({"general_skills": [], "task_specific_skills": {"heat": []}, "common_mistakes": []}, "holds no skill"),
    ],
)
def test_broken_bank(tmp_path, change, message):
    path = tmp_path / "bank.json"
    path.write_text(json.dumps(bank_data() | change))
    with pytest.raises(SkillError, match=message):
        load_bank(path)
