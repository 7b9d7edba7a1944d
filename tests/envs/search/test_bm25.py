"""Our BM25 against the package bm25s, and the analysis against Lucene's rules."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from envs.search.bm25 import K1, Analyzer, B, Index, content_hash
from envs.search.generate import make


def test_analysis():
    words = Analyzer()
    assert words("The dogs' owner's running, and THE flies!") == ["dog", "owner", "run", "fli"]
    assert words("It is not in the U.S.A or on Mars’s 3.14") == ["u.s.a", "mar", "3.14"]
    assert words("Röntgen x-ray") == ["röntgen", "x", "rai"] and words("") == words("the a") == []


def test_scores_equal_those_of_the_package():
    bm25s = pytest.importorskip("bm25s")
    texts = [f"{passage.title} {passage.text}" for passage in make().passages[:300]]
    texts += ["", "town town town river"]
    analyze, index = Analyzer(), Index.build(texts)
    other = bm25s.BM25(method="lucene", k1=K1, b=B, backend="numpy")
    other.index([analyze(text) for text in texts], show_progress=False)
    rng = random.Random(0)
    for _ in range(40):
        query = " ".join(rng.sample(rng.choice(texts).split() or ["town"], 1)) + " born in town town unknownword"
        known = [word for word in analyze(query) if word in index.vocabulary]
        np.testing.assert_allclose(index.scores(query), other.get_scores(known), rtol=1e-5, atol=1e-6)


def test_best_first_and_ties_in_order():
    index = Index.build(["red shoe", "blue shoe", "green shoe", "hat", "shoe shoe"])
    assert [n for n, _ in index.top("shoe", 10)] == [4, 0, 1, 2]
    assert [n for n, _ in index.top("shoe", 2)] == [4, 0] and index.top("shoe", 0) == []
    assert index.top("nothing", 5) == index.top("", 5) == []
    empty = Index.build([])
    assert empty.top("shoe", 3) == []


def test_a_stored_index_is_of_its_texts(tmp_path):
    texts, path = ["red shoe", "café"], tmp_path / "index.npz"
    Index.build(texts).save(path, content_hash(texts))
    loaded = Index.load(path, content_hash(texts))
    assert loaded.top("cafés", 3) == Index.build(texts).top("cafés", 3) != []
    assert Index.load(path, content_hash(["other"])) is None and Index.load(tmp_path / "none", "x") is None
    path.write_bytes(b"damaged")
    assert Index.load(path, content_hash(texts)) is None


def test_nothing_here_imports_jax():
    names = "envs.search.game, envs.search.http, envs.search.serve, envs.search.prepare, envs.webshop.session"
    code = f"import sys, {names}, envs.webshop.prepare; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3]).returncode == 0
