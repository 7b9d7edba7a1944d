"""The HTTP retriever against our server, against servers of the two protocols, and against broken ones."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from envs.base import EnvError
from envs.search import serve
from envs.search.http import HttpRetriever, ServerError
from envs.search.retrieval import Bm25Retriever, CorpusError, DenseRetriever, Passage, passage_of, read_faiss

PASSAGES = [Passage(str(n), f"Title {n}", f"text about word{n} and all") for n in range(20)]


@contextlib.contextmanager
def running(server):
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        getattr(server, "close", server.server_close)()


@pytest.fixture(scope="module")
def server():
    with running(serve.Server(Bm25Retriever(PASSAGES, "toy"), port=0)) as server:
        yield server


def fake(answer):
    """A server; answer(path, body) -> (status, JSON-able or bytes)."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def reply(self, body):
            status, content = answer(self.path, body)
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            self.reply(None)

        def do_POST(self):
            self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def log_message(self, *_):
            pass

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


def url(server):
    return f"http://127.0.0.1:{server.server_address[1]}"


def post(server, content, path="/retrieve", headers=None):
    parts = urllib.parse.urlsplit(url(server))
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=5)
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    connection.request("POST", path, body, headers or {})
    response = connection.getresponse()
    result = response.status, json.loads(response.read())
    connection.close()
    return result


def test_http_gives_what_the_retriever_gives(server):
    assert server.url.startswith("http://127.0.0.1:"), "loopback unless told otherwise"
    client, local = HttpRetriever([server.url]), Bm25Retriever(PASSAGES, "toy")
    queries = ["word3", "all text", "nothing here"]
    found = client.search(queries, 3)
    assert found == local.search(queries, 3) and found[2] == [] and client.search([], 3) == []
    assert client.describe() == {**local.describe(), "method": "http (bm25)"}


def test_two_servers_share_the_queries(server):
    with running(serve.Server(Bm25Retriever(PASSAGES, "toy"), port=0)) as other:
        queries = [f"word{n}" for n in range(9)]
        found = HttpRetriever([server.url, other.url]).search(queries, 1)
        assert [hits[0].passage.title for hits in found] == [f"Title {n}" for n in range(9)]
        assert other.batcher.searches >= 2
    smaller = serve.Server(Bm25Retriever(PASSAGES[:3], "toy"), port=0)
    with running(smaller) as other, pytest.raises(ServerError, match="different corpora"):
        HttpRetriever([server.url, other.url])


def test_both_request_forms(server):
    status, answer = post(server, {"query": "word4", "topk": None})
    document = {"id": "4", "contents": '"Title 4"\ntext about word4 and all', "title": "Title 4"}
    assert status == 200 and answer["result"][0][0].items() >= document.items() and len(answer["result"][0]) == 1
    status, answer = post(server, {"queries": ["word4", "all"], "topk": 2, "return_scores": True})
    assert [len(hits) for hits in answer["result"]] == [1, 2] and answer["result"][0][0]["score"] > 0
    assert len(post(server, {"query": "all", "topk": 0})[1]["result"][0]) == 3
    assert post(server, {"queries": []}) == (200, {"result": []})


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        (b"{", 400, "not valid JSON"),
        ({}, 400, "either"),
        ({"query": "a", "queries": ["a"]}, 400, "either"),
        ({"queries": "a"}, 400, "list"),
        ({"queries": ["a"] * 1025}, 400, "1024"),
        ({"query": "a" * 5000}, 400, "4096"),
        ({"query": 3}, 400, "text"),
        ({"query": "a", "topk": 101}, 400, "topk"),
        ({"query": "a", "topk": "3"}, 400, "topk"),
    ],
)
def test_bad_requests(server, content, status, message):
    got, answer = post(server, content)
    assert got == status and message in answer["error"]


def test_a_large_request_is_not_read(server):
    status, answer = post(server, b"", headers={"Content-Length": str(2 << 20)})
    assert status == 413 and "1048576" in answer["error"]
    assert post(server, {"query": "a"}, path="/other")[0] == 404


def test_waiting_requests_are_searched_together():
    """The first request is searched alone; the seven that come meanwhile are searched together."""
    begun, gate = threading.Event(), threading.Event()

    class Slow(Bm25Retriever):
        def search(self, queries, k):
            begun.set()
            assert gate.wait(60)
            return super().search(queries, k)

    batcher = serve.Batcher(Slow(PASSAGES))
    with ThreadPoolExecutor(8) as threads:
        ask = lambda n: threads.submit(batcher.search, [f"word{n}", "all"], n % 3 + 1)  # noqa: E731
        jobs = [ask(0)]
        assert begun.wait(60)
        jobs += [ask(n) for n in range(1, 8)]
        deadline = time.monotonic() + 60
        while batcher._waiting.qsize() < 7 and time.monotonic() < deadline:
            time.sleep(0.01)
        gate.set()
        results = [job.result(60) for job in jobs]
    assert batcher.searches == 2 and [len(all_) for _, all_ in results] == [n % 3 + 1 for n in range(8)]
    assert all(hits[0].passage.id == str(n) for n, (hits, _) in enumerate(results))
    batcher.close()


def test_a_failing_search_is_told_and_the_server_lives():
    class Broken(Bm25Retriever):
        def search(self, queries, k):
            if "bad" in queries:
                raise RuntimeError("disk")
            return super().search(queries, k)

    with running(serve.Server(Broken(PASSAGES), port=0)) as server:
        assert post(server, {"query": "bad"}) == (500, {"error": "RuntimeError: disk"})
        assert post(server, {"query": "word1"})[0] == 200


def seed_dialect(path, body):
    if path == "/health":
        return 404, {}
    if "query" not in body:
        return 422, {"detail": "field required: query"}
    return 200, {"result": [[{"document": {"contents": f'"T"\n{body["query"]}'}, "score": 1.5}]]}


def test_a_server_of_single_queries():
    with running(fake(seed_dialect)) as server:
        client = HttpRetriever([url(server) + "/retrieve"])
        found = client.search(["a", "b"], 3)
        assert [hits[0].passage.text for hits in found] == ["a", "b"] and found[0][0].score == 1.5
        assert found[0][0].passage.title == "T" and client.describe()["method"] == "http (unknown)"


def test_no_server_and_wrong_servers_are_told_at_the_start():
    with running(fake(lambda *_: (200, {}))) as server:
        gone = url(server)
        with pytest.raises(ServerError, match="neither of the two protocols"):
            HttpRetriever([gone])
    with pytest.raises(ServerError, match=r"no retrieval server at .*python -m envs\.search\.serve"):
        HttpRetriever([gone])
    for address in ("ftp://x", "nonsense", ""):
        with pytest.raises(ServerError, match="retriever_url"):
            HttpRetriever([address])
    with pytest.raises(ServerError, match="empty"):
        HttpRetriever([])


def flaky(failures):
    """Answers `failures` retrievals after the first one with an error."""
    state = {"calls": 0}

    def answer(path, body):
        if path == "/health":
            return 404, {}
        state["calls"] += 1
        if 1 < state["calls"] <= 1 + len(failures):
            return failures[state["calls"] - 2]
        return 200, {"result": [[{"contents": f'"T"\n{query}'}] for query in body["queries"]]}

    return state, answer


def test_a_pause_outlasts_a_server_that_is_down_for_a_while():
    waits, (state, answer) = [], flaky([(503, {}), (500, {})])
    with running(fake(answer)) as server:
        client = HttpRetriever([url(server)], sleep=waits.append)
        assert client.search(["a"], 1)[0][0].passage.text == "a"
    assert waits == [1.0, 2.0] and state["calls"] == 4


def test_after_the_budget_or_a_refusal_it_is_an_env_error():
    _, answer = flaky([(503, {})] * 99)
    with running(fake(answer)) as server:
        client = HttpRetriever([url(server)], budget_s=5, sleep=lambda _: None)
        client._budget_s = 0.5
        [error, _] = client.search(["a", "b"], 1)
        assert isinstance(error, EnvError) and "503" in str(error)
    for bad in ((400, {"error": "no"}), (200, b"not json"), (200, {"result": []}), (200, {"result": [[{"id": 1}]]})):
        state, answer = flaky([bad])
        with running(fake(answer)) as server:
            waits = []
            [error] = HttpRetriever([url(server)], sleep=waits.append).search(["a"], 1)
            assert isinstance(error, EnvError) and waits == [] and state["calls"] == 2


def test_dense_retrieval_is_exact():
    vectors = np.random.default_rng(0).normal(size=(20, 8)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    encode = lambda texts, is_query: np.stack([vectors[int(text)] for text in texts])  # noqa: E731
    retriever = DenseRetriever(PASSAGES, encode, vectors=vectors)
    for place, hits in enumerate(retriever.search([str(n) for n in range(20)], 4)):
        want = np.argsort(-(vectors @ vectors[place]))[:4]
        assert [hit.passage.id for hit in hits] == [str(n) for n in want] and abs(hits[0].score - 1) < 1e-5
    with pytest.raises(CorpusError, match="19 vectors, the corpus 20"):
        DenseRetriever(PASSAGES, encode, vectors=vectors[1:])


def test_a_ready_index_of_faiss(tmp_path):
    faiss = pytest.importorskip("faiss")
    vectors = np.random.default_rng(1).normal(size=(20, 8)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    index, file = faiss.IndexFlatIP(8), str(tmp_path / "e5_Flat.index")
    index.add(vectors)
    faiss.write_index(index, file)

    def encode(texts, is_query):
        """Only queries may be encoded, and one passage to learn its size."""
        assert is_query or len(texts) == 1
        return np.stack([vectors[int(text) if is_query else 0] for text in texts])

    retriever = DenseRetriever(PASSAGES, encode, index=read_faiss(file))
    for place, hits in enumerate(retriever.search([str(n) for n in range(20)], 3)):
        assert [int(hit.passage.id) for hit in hits] == list(np.argsort(-(vectors @ vectors[place]))[:3])
    with pytest.raises(CorpusError, match="20 vectors, the corpus 19"):
        DenseRetriever(PASSAGES[1:], encode, index=read_faiss(file))
    with pytest.raises(CorpusError, match="vectors of 8 numbers, the encoder gives 4"):
        DenseRetriever(PASSAGES, lambda texts, is_query: np.zeros((len(texts), 4)), index=read_faiss(file))
    (tmp_path / "cut.index").write_bytes((tmp_path / "e5_Flat.index").read_bytes()[:40])
    with pytest.raises(CorpusError, match="not an index that faiss can read"):
        read_faiss(tmp_path / "cut.index")
    with pytest.raises(CorpusError, match=r"none\.index does not exist.*hf download"):
        read_faiss(tmp_path / "none.index")


def test_forms_of_passages():
    assert passage_of({"id": 7, "contents": '"A b"\nc\nd'}) == Passage("7", "A b", "c\nd")
    assert passage_of({"title": "A", "text": "b"}, 3) == Passage("3", "A", "b")
    for bad in ({}, {"contents": 3}, [], None):
        with pytest.raises(CorpusError):
            passage_of(bad)
    assert passage_of({"contents": PASSAGES[0].contents}).title == "Title 0"


def test_the_server_command(tmp_path, capsys):
    assert serve.main(["--data", str(tmp_path)]) == 2
    assert "corpus.jsonl does not exist" in capsys.readouterr().err
    assert serve.build("generated", "bm25").describe()["size"] > 2000
    assert serve.main(["--retriever=dense"]) == 2 and "encoder" in capsys.readouterr().err
