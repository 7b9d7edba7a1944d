"""Skill banks in the JSON form of SkillRL (arXiv 2602.08234), which other projects' skill folders use as well.

{"general_skills":       [{"skill_id", "title", "principle", "when_to_apply"}, ...],
 "task_specific_skills": {category: [the same records]},                 or "query_type_skills"
 "common_mistakes":      [{"mistake_id", "description", "why_it_happens", "how_to_avoid"}, ...],
 "metadata": ...}

A missing list is empty; keys that are not listed here are kept. The text for a task is what SkillRL's template mode
shows: the first general skills and those added later (ids "dyn_..."), all of the category, the first mistakes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from seed_jax.hindsight.library import Library, SkillError, check_names, read_keywords, read_object, text_table

CATEGORY_KEYS = ("task_specific_skills", "query_type_skills")
GENERAL_SHOWN, MISTAKES_SHOWN = 6, 5
BANK_FILE = "bank.json"

Record = dict[str, Any]


class Bank(NamedTuple):
    """A bank's records as they are in the file; `rest` holds every other key, `category_key` the spelling it uses."""

    general: list[Record]
    categories: dict[str, list[Record]]
    mistakes: list[Record]
    rest: dict[str, Any]
    category_key: str = CATEGORY_KEYS[0]

    def as_json(self) -> dict[str, Any]:
        return {
            "general_skills": self.general,
            self.category_key: self.categories,
            "common_mistakes": self.mistakes,
            **self.rest,
        }


def read_bank(path: str | Path) -> Bank:
    """Reads and checks a bank: a file, or `bank.json` in a folder. Raises SkillError."""
    path = _file(path)
    if not path.is_file():
        raise SkillError(f"hindsight.library: there is no file {path} (a bank is one JSON file)")
    data = read_object(path)
    spelled = [key for key in CATEGORY_KEYS if key in data]
    if len(spelled) == 2:
        raise SkillError(f"{path} has both {spelled[0]} and {spelled[1]}; keep one")
    key = spelled[0] if spelled else CATEGORY_KEYS[0]
    categories = data.get(key, {})
    if not isinstance(categories, dict):
        raise SkillError(f"{path}: {key} must be a table of category -> list of skills")
    bank = Bank(
        _records(data.get("general_skills", []), "general_skills", ("title", "principle"), path),
        {
            name: _records(records, f"{key}[{name!r}]", ("title", "principle"), path)
            for name, records in categories.items()
        },
        _records(data.get("common_mistakes", []), "common_mistakes", ("description", "how_to_avoid"), path),
        {name: value for name, value in data.items() if name not in ("general_skills", "common_mistakes", key)},
        key,
    )
    _check_ids(bank, path)
    if not any((bank.general, *bank.categories.values(), bank.mistakes)):
        raise SkillError(f"{path} holds no skill")
    return bank


def load_bank(path: str | Path) -> Library:
    """The bank as a library: one skill a category."""
    path, bank = _file(path), read_bank(path)
    skills = {name: _skill_section(name, records) for name, records in bank.categories.items() if records}
    task_to_skill = text_table(bank.rest, "task_to_skill", path) or {name: name for name in skills}
    if skills:
        check_names(task_to_skill, skills, path)
    return Library(
        path,
        skills,
        task_to_skill,
        read_keywords(bank.rest, task_to_skill, path),
        _general_section(bank.general),
        _mistake_section(bank.mistakes),
    )


def _file(path: str | Path) -> Path:
    return Path(path) / BANK_FILE if Path(path).is_dir() else Path(path)


def _records(value: Any, where: str, needed: tuple[str, ...], path: Path) -> list[Record]:
    if not isinstance(value, list) or not all(isinstance(record, dict) for record in value):
        raise SkillError(f"{path}: {where} must be a list of objects")
    for number, record in enumerate(value):
        for key in needed:
            if not isinstance(record.get(key), str) or not record[key].strip():
                raise SkillError(f"{path}: {where}[{number}] needs a text {key!r}")
    return value


def _check_ids(bank: Bank, path: Path) -> None:
    seen: set[str] = set()
    records = itertools.chain(bank.general, *bank.categories.values(), bank.mistakes)
    for record in records:
        identifier = record.get("skill_id", record.get("mistake_id"))
        if identifier is not None and identifier in seen:
            raise SkillError(f"{path}: the id {identifier!r} occurs twice")
        seen.add(identifier)


def _line(text: str) -> str:
    return " ".join(text.split())


def _general_section(records: list[Record]) -> str:
    shown = [r for i, r in enumerate(records) if i < GENERAL_SHOWN or str(r.get("skill_id")).startswith("dyn_")]
    lines = [f"- {_line(r['title'])}: {_line(r['principle'])}" for r in shown]
    return "\n".join(["## General principles", *lines]) if lines else ""


def _skill_section(name: str, records: list[Record]) -> str:
    return "\n".join([f"## {name.replace('_', ' ').capitalize()}", *map(_skill_line, records)])


def _skill_line(record: Mapping[str, Any]) -> str:
    when = record.get("when_to_apply")
    condition = f" (when: {_line(when)})" if isinstance(when, str) and when.strip() else ""
    return f"- {_line(record['title'])}: {_line(record['principle'])}{condition}"


def _mistake_section(records: list[Record]) -> str:
    lines = [f"- {_line(r['description'])} Instead: {_line(r['how_to_avoid'])}" for r in records[:MISTAKES_SHOWN]]
    return "\n".join(["## Mistakes", *lines]) if lines else ""
