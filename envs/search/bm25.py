"""BM25 with Lucene's settings and English analysis, in NumPy. Shared by WebShop and Search-QA.

Written here because the package bm25s computes something with JAX when it is imported, which would take a device in
every process that searches; the scores equal its method "lucene" (tests/envs/search/test_bm25.py).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import Stemmer

K1, B = 0.9, 0.4
FORMAT = 1  # of a stored index
STOP_WORDS = frozenset(
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this "
    "to was will with".split()
)
_TOKEN = re.compile(r"\w+(?:['’.]\w+)*")
_POSSESSIVE = re.compile(r"['’]s$")


class Analyzer:
    """Text -> terms: words, possessive 's cut, lower case, stop words dropped, Porter stems."""

    def __init__(self):
        self._stemmer = Stemmer.Stemmer("porter")

    def __call__(self, text: str) -> list[str]:
        words = (_POSSESSIVE.sub("", word) for word in _TOKEN.findall(text.lower()))
        return self._stemmer.stemWords([word for word in words if word not in STOP_WORDS])


class Index:
    """Scores of all documents for a query are sums of columns that are computed once.

    Term t occupies `postings[starts[t]:starts[t + 1]]` (documents) and the same slice of `weights`.
    """

    def __init__(self, vocabulary: dict[str, int], starts, postings, weights, documents: int):
        self.vocabulary, self.documents = vocabulary, documents
        self._starts, self._postings, self._weights = starts, postings, weights
        self._analyze = Analyzer()

    @classmethod
    def build(cls, texts: Sequence[str]) -> Index:
        analyze, vocabulary = Analyzer(), {}
        terms, documents, counts, lengths = [], [], [], []
        for number, text in enumerate(texts):
            words = analyze(text)
            lengths.append(len(words))
            for word, count in Counter(words).items():
                terms.append(vocabulary.setdefault(word, len(vocabulary)))
                documents.append(number)
                counts.append(count)
        terms, documents = np.asarray(terms, np.int64), np.asarray(documents, np.int32)
        counts, lengths = np.asarray(counts, np.float64), np.asarray(lengths, np.float64)
        order = np.argsort(terms, kind="stable")  # documents of a term stay in ascending order
        frequency = np.bincount(terms, minlength=len(vocabulary))
        starts = np.concatenate([[0], np.cumsum(frequency)]).astype(np.int64)
        rarity = np.log(1 + (len(texts) - frequency + 0.5) / (frequency + 0.5))
        average = max(lengths.mean(), 1e-9) if len(lengths) else 1.0
        saturation = counts / (counts + K1 * (1 - B + B * lengths[documents] / average))
        weights = (rarity[terms] * saturation)[order].astype(np.float32)
        return cls(vocabulary, starts, documents[order], weights, len(texts))

    def scores(self, query: str) -> np.ndarray:
        """(documents,) float32; a term that comes twice counts twice."""
        total = np.zeros(self.documents, np.float32)
        for word in self._analyze(query):
            term = self.vocabulary.get(word)
            if term is not None:
                part = slice(self._starts[term], self._starts[term + 1])
                total[self._postings[part]] += self._weights[part]  # a document is in a term's postings once
        return total

    def top(self, query: str, k: int) -> list[tuple[int, float]]:
        """The k best (document, score), best first, equal scores in document order; only documents with a term."""
        scores = self.scores(query)
        found = np.flatnonzero(scores > 0)
        if len(found) > k > 0:
            threshold = np.partition(scores[found], len(found) - k)[len(found) - k]
            found = found[scores[found] >= threshold]
        order = found[np.argsort(-scores[found], kind="stable")][:k]
        return [(int(document), float(scores[document])) for document in order]

    def save(self, path: str | Path, content: str) -> None:
        """content: the hash of the texts, see `content_hash`."""
        words = np.frombuffer("\n".join(self.vocabulary).encode(), np.uint8)
        meta = np.frombuffer(json.dumps([FORMAT, content, self.documents]).encode(), np.uint8)
        arrays = {"starts": self._starts, "postings": self._postings, "weights": self._weights}
        partial = Path(path).with_suffix(".partial.npz")
        np.savez(partial, words=words, meta=meta, **arrays)
        partial.replace(path)

    @classmethod
    def load(cls, path: str | Path, content: str) -> Index | None:
        """The stored index, or None if there is none or it is of other texts."""
        try:
            with np.load(path, allow_pickle=False) as stored:
                kind, of, documents = json.loads(stored["meta"].tobytes())
                if (kind, of) != (FORMAT, content):
                    return None
                words = stored["words"].tobytes().decode()
                vocabulary = {word: number for number, word in enumerate(words.split("\n") if words else [])}
                return cls(vocabulary, stored["starts"], stored["postings"], stored["weights"], documents)
        except (OSError, KeyError, ValueError):
            return None


def content_hash(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:16]
