"""What answers a query: passages and the retrievers over them, behind one method `search(queries, k)`."""

from __future__ import annotations

import gzip
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from envs.search.bm25 import Index, content_hash

CORPUS_HELP = (
    "Get the published corpus with: hf download PeterJinGo/wiki-18-corpus wiki-18.jsonl.gz --repo-type dataset "
    "--local-dir DIR; gunzip -c DIR/wiki-18.jsonl.gz > DIR/corpus.jsonl (14 GB; its dense index, "
    "PeterJinGo/wiki-18-e5-index, part_aa and part_ab to be concatenated, takes 65 GB more and is for a server); "
    "or set env.data='generated'"
)
BUILD_AHEAD = 64  # passages that are encoded in one call

_log = logging.getLogger(__name__)


class CorpusError(ValueError):
    """A corpus or index cannot be used; the message names the file and the remedy."""


class Passage(NamedTuple):
    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """The form in which retrieval servers exchange passages: the title in quotes, then the text."""
        return f'"{self.title}"\n{self.text}'


class Hit(NamedTuple):
    passage: Passage
    score: float


class Retriever(Protocol):
    """A batch of queries -> for each at most k hits, best first."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]: ...

    def describe(self) -> dict[str, Any]:
        """{"corpus", "size", "method", "version"}: what a client compares at the start."""
        ...


def passage_of(document: dict[str, Any], number: int | str = "") -> Passage:
    """A passage from `{"id"?, "contents": "\\"Title\\"\\ntext"}` or `{"id"?, "title", "text"}`. Raises CorpusError."""
    if not isinstance(document, dict):
        raise CorpusError(f"a passage must be a JSON object, not {str(document)[:80]!r}")
    title, text = document.get("title"), document.get("text")
    if not isinstance(text, str):
        contents = document.get("contents")
        if not isinstance(contents, str):
            raise CorpusError(f"passage {str(document)[:80]!r} has neither 'contents' nor 'text'")
        head, _, text = contents.partition("\n")
        title = head.strip().strip('"') if title is None else title
    return Passage(str(document.get("id", number)), str(title or ""), text)


def load_corpus(path: str | Path) -> list[Passage]:
    """The passages of a JSON-lines file (also .gz)."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise CorpusError(f"the corpus {path} does not exist. {CORPUS_HELP}")
    passages = []
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if line.strip():
                try:
                    passages.append(passage_of(json.loads(line), number))
                except ValueError as error:  # JSON errors, and CorpusError
                    raise CorpusError(f"{path}, line {number + 1}: {error}") from error
    if not passages:
        raise CorpusError(f"the corpus {path} is empty")
    return passages


class Bm25Retriever:
    """In this process, no model, under a millisecond a query for ten thousand passages."""

    def __init__(self, passages: Sequence[Passage], name: str = "", store: str | Path | None = None):
        """store: file that keeps the index between processes; it is built again when the passages have changed."""
        self.passages, self.name = list(passages), name
        texts = [f"{passage.title} {passage.text}" for passage in self.passages]
        self.version = content_hash(texts)
        self.index = Index.load(store, self.version) if store else None
        if self.index is None:
            if store and Path(store).exists():
                _log.warning("the index %s is of other passages and is built again", store)
            self.index = Index.build(texts)
            if store:
                self.index.save(store, self.version)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        return [[Hit(self.passages[n], score) for n, score in self.index.top(query, k)] for query in queries]

    def describe(self) -> dict[str, Any]:
        return {"corpus": self.name, "size": len(self.passages), "method": "bm25", "version": self.version}


class DenseRetriever:
    """By inner product of embeddings. The encoder is given, so that nothing here needs JAX (`seed_jax/encoder.py`).

    encode: (texts, is_query) -> (len(texts), D) float32, normalised. vectors: those of the passages, if they are
    known. With faiss installed its flat index does the search, else NumPy; both are exact. index: a faiss index of the
    passages in their order (see `read_faiss`), which takes the place of the vectors.
    """

    def __init__(
        self,
        passages: Sequence[Passage],
        encode: Callable[[list[str], bool], np.ndarray],
        name: str = "",
        vectors: np.ndarray | None = None,
        index: Any = None,
    ):
        self.passages, self.encode, self.name, self.vectors = list(passages), encode, name, None
        texts = [passage.contents for passage in self.passages]
        self.version = content_hash(texts)
        if index is not None:
            _check_size(index.ntotal, len(texts))
            size = encode(texts[:1], False).shape[1]
            if index.d != size:
                raise CorpusError(
                    f"the index holds vectors of {index.d} numbers, the encoder gives {size}: the index was made with "
                    "another encoder; name that one"
                )
            self._flat = index
            return
        if vectors is None:
            vectors = np.concatenate(
                [encode(texts[i : i + BUILD_AHEAD], False) for i in range(0, len(texts), BUILD_AHEAD)]
            )
        _check_size(len(vectors), len(texts))
        self.vectors = np.ascontiguousarray(vectors, np.float32)
        self._flat = _faiss_index(self.vectors)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        if not queries:
            return []
        wanted = self.encode(list(queries), True).astype(np.float32)
        k = min(k, len(self.passages))
        if self._flat is not None:
            scores, order = self._flat.search(wanted, k)
        else:
            every = wanted @ self.vectors.T
            order = np.argsort(-every, axis=1, kind="stable")[:, :k]
            scores = np.take_along_axis(every, order, axis=1)
        return [
            [Hit(self.passages[n], float(s)) for n, s in zip(row, row_scores, strict=True)]
            for row, row_scores in zip(order, scores, strict=True)
        ]

    def describe(self) -> dict[str, Any]:
        return {"corpus": self.name, "size": len(self.passages), "method": "dense", "version": self.version}


def _check_size(vectors: int, passages: int) -> None:
    if vectors != passages:
        raise CorpusError(
            f"the index holds {vectors} vectors, the corpus {passages} passages: they do not belong together; "
            "take both from one release or leave the index out"
        )


def read_faiss(path: str | Path) -> Any:
    """A faiss index from a file, such as the published e5_Flat.index; it is mapped into memory where faiss can."""
    if not Path(path).is_file():
        raise CorpusError(f"the index {path} does not exist. {CORPUS_HELP}")
    try:
        import faiss
    except ImportError:
        raise CorpusError(f"the index {path} needs faiss: pip install faiss-cpu") from None
    try:
        return faiss.read_index(str(path), faiss.IO_FLAG_MMAP)
    except RuntimeError as error:  # what faiss raises for anything wrong with a file
        reason = str(error).strip().splitlines()[-1]
        raise CorpusError(f"{path} is not an index that faiss can read: {reason}") from None


def _faiss_index(vectors: np.ndarray):
    try:
        import faiss
    except ImportError:
        return None
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    return index


class Cached:
    """Remembers answers: the episodes of a group often ask the same. The oldest of `size` queries is forgotten."""

    def __init__(self, retriever: Retriever, size: int = 20_000):
        self.retriever, self._size = retriever, size
        self._known: OrderedDict[tuple[str, int], list[Hit]] = OrderedDict()
        self.asked = self.passed_on = 0

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        new = list(dict.fromkeys(query for query in queries if (query, k) not in self._known))
        answers = dict(zip(new, self.retriever.search(new, k), strict=True)) if new else {}
        self.asked, self.passed_on = self.asked + len(queries), self.passed_on + len(new)
        found = []
        for query in queries:
            hits = answers[query] if query in answers else self._known[query, k]
            if not isinstance(hits, Exception):  # a server that was down may be up again
                self._known[query, k] = hits
                self._known.move_to_end((query, k))
            found.append(hits)
        while len(self._known) > self._size:
            self._known.popitem(last=False)
        return found

    def describe(self) -> dict[str, Any]:
        return self.retriever.describe()


def documents(hits: Iterable[Hit], scores: bool) -> list[dict[str, Any]]:
    """Hits as servers send them."""
    plain = [
        {"id": hit.passage.id, "contents": hit.passage.contents, "title": hit.passage.title, "text": hit.passage.text}
        for hit in hits
    ]
    if not scores:
        return plain
    return [{"document": document, "score": float(hit.score)} for document, hit in zip(plain, hits, strict=True)]
