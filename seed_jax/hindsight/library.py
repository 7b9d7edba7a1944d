"""Skills that were written beforehand: a folder of markdown files, or a bank in the JSON form of SkillRL.

A folder holds markdown files and `mapping.json`:

    {"skill_files":   {"general": "general.md", "heat": "heat.md"},       name -> file; "general" goes to every task
     "task_to_skill": {"pick_heat_then_place_in_recep": "heat"},          task type -> name
     "task_keywords": {"pick_heat_then_place_in_recep": ["heat", "hot"]}}    task type -> words; optional

A bank (arXiv 2602.08234) is one JSON object with `general_skills`, `task_specific_skills` (or `query_type_skills`) and
`common_mistakes`; `task_to_skill` and `task_keywords` are read as above where it has them. Both become a `Library`.

Which skill a task gets (`Library.names`):
    task_type            by the task's family; by the keywords of its goal where the family is not known
    keyword              every task type with a keyword in the goal; none: only what is general
    keyword_full_prompt  the same over the whole prompt, anew at every turn (what the published baselines do)
    all                  everything
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAPPING_FILE = "mapping.json"
GENERAL = "general"
RETRIEVALS = ("task_type", "keyword", "keyword_full_prompt", "all")


class SkillError(ValueError):
    """A library cannot be used, or does not fit the run; the message names the file or field and the remedy."""


@dataclass(frozen=True)
class Library:
    """Skills by name, and which tasks they are for. `general` goes before every skill, `closing` after it."""

    path: Path
    skills: Mapping[str, str]  # name -> text, in file order
    task_to_skill: Mapping[str, str]  # task type -> name
    keywords: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # task type -> words, lower case
    general: str = ""
    closing: str = ""

    def task_type(self, family: str) -> str | None:
        """The task type of a family: itself, else the first that is part of its name, else the first whose words are.

        The last rule finds `pick_and_place` for `pick_two_obj_and_place`.
        """
        if family in self.task_to_skill:
            return family
        inside = [name for name in self.task_to_skill if name in family]
        words = set(family.split("_"))
        inside += [name for name in self.task_to_skill if words.issuperset(name.split("_"))]
        return inside[0] if inside else None

    def by_keywords(self, text: str) -> list[str]:
        """Names of all task types with a keyword in the text, each once, in file order."""
        text = text.lower()
        found = [self.task_to_skill[kind] for kind, words in self.keywords.items() if any(w in text for w in words)]
        return list(dict.fromkeys(found))

    def names(self, family: str, goal: str, retrieval: str) -> list[str]:
        """The skills for one task; [] if it gets what is general only."""
        if retrieval == "all":
            return list(self.skills)
        kind = self.task_type(family) if retrieval == "task_type" else None
        return self.by_keywords(goal) if kind is None else [self.task_to_skill[kind]]

    def text(self, names: Iterable[str]) -> str:
        """What goes into a prompt: general part, the named skills, closing part, with blank lines between."""
        return "\n\n".join(
            part for part in (self.general, *(self.skills[name] for name in names), self.closing) if part
        )

    def other(self, names: Sequence[str]) -> str | None:
        """Another task's skill: the next one in file order (from the start behind the last), None if there is none."""
        order = list(self.skills)
        start = order.index(names[-1]) + 1 if names else 0
        mine = {self.skills[name] for name in names}
        candidates = [name for name in order[start:] + order[:start] if self.skills[name] not in mine]
        return candidates[0] if candidates else None

    def check(self, families: Iterable[str], retrieval: str) -> None:
        """Raises SkillError if the retrieval cannot work for tasks of these families."""
        if retrieval.startswith("keyword") and not self.keywords:
            raise SkillError(
                f"{self.path} has no task_keywords, which hindsight.retrieval = {retrieval!r} needs; "
                "add them, or set hindsight.retrieval = 'task_type'"
            )
        unknown = sorted({family for family in families if self.task_type(family) is None})
        if retrieval == "task_type" and self.skills and unknown:
            raise SkillError(
                f"{self.path} has no skill for the task family {', '.join(unknown)} "
                f"(it has: {', '.join(self.task_to_skill)}); add it to task_to_skill, or set hindsight.retrieval"
            )


def load_folder(path: str | Path) -> Library:
    """The library in a folder of markdown files with a mapping."""
    folder = Path(path)
    if not folder.is_dir():
        raise SkillError(f"hindsight.library = {str(path)!r}: there is no such folder")
    mapping_file = _mapping_file(folder)
    mapping = read_object(mapping_file)
    files = text_table(mapping, "skill_files", mapping_file)
    if not files:
        raise SkillError(f"{mapping_file} names no skill_files (a table of name -> markdown file)")
    texts = {name: _read_markdown(folder, file, mapping_file) for name, file in files.items()}
    general = texts.pop(GENERAL, "")
    task_to_skill = text_table(mapping, "task_to_skill", mapping_file)
    check_names(task_to_skill, texts, mapping_file)
    return Library(folder, texts, task_to_skill, read_keywords(mapping, task_to_skill, mapping_file), general)


def _mapping_file(folder: Path) -> Path:
    """`mapping.json`, or the folder's only JSON file under another name."""
    named, found = folder / MAPPING_FILE, sorted(folder.glob("*.json"))
    if named not in found and len(found) != 1:
        raise SkillError(f"{folder} holds no {MAPPING_FILE} (which says what skill is for which task)")
    return named if named in found else found[0]


def read_object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SkillError(f"{path} cannot be read ({error.strerror or error})") from error
    except ValueError as error:  # JSON and UTF-8 errors
        raise SkillError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(data, dict):
        raise SkillError(f"{path} must hold a JSON object, holds a {type(data).__name__}")
    return data


def text_table(data: Mapping[str, Any], key: str, path: Path) -> dict[str, str]:
    table = data.get(key, {})
    if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
        raise SkillError(f"{path}: {key} must be a table of texts")
    return table


def _read_markdown(folder: Path, file: str, mapping_file: Path) -> str:
    path = folder / file
    if not path.resolve().is_relative_to(folder.resolve()):
        raise SkillError(f"{mapping_file}: the file {file!r} is outside of the folder")
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise SkillError(f"{path}, named in {mapping_file.name}, cannot be read ({error})") from error
    if not text:
        raise SkillError(f"{path} is empty; write a skill in it or take it out of {mapping_file.name}")
    return text


def check_names(task_to_skill: Mapping[str, str], skills: Mapping[str, str], path: Path) -> None:
    if not task_to_skill:
        raise SkillError(f"{path} has no task_to_skill (a table of task type -> skill name)")
    for kind, name in task_to_skill.items():
        if name not in skills:
            raise SkillError(
                f"{path}: task_to_skill names {name!r} for {kind!r}; there is: {', '.join(skills) or 'none'}"
            )


def read_keywords(data: Mapping[str, Any], task_to_skill: Mapping[str, str], path: Path) -> dict[str, tuple[str, ...]]:
    table = data.get("task_keywords", {})
    if not isinstance(table, dict):
        raise SkillError(f"{path}: task_keywords must be a table of task type -> list of words")
    for kind, words in table.items():
        if kind not in task_to_skill:
            raise SkillError(f"{path}: task_keywords has {kind!r}, which task_to_skill lacks")
        if not isinstance(words, list) or not all(isinstance(word, str) and word for word in words):
            raise SkillError(f"{path}: task_keywords of {kind!r} must be a list of words")
    return {kind: tuple(word.lower() for word in words) for kind, words in table.items()}
