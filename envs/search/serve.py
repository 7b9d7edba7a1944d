"""A retrieval server: the same retriever as in training, for other processes or machines.

python -m envs.search.serve --data=generated|DIR [--port=8000] [--retriever=bm25|dense --model=DIR]

DIR holds corpus.jsonl (envs/search/data.py). It answers both protocols of envs/search/http.py, and only to this
machine unless --host says otherwise; there is no access control. Requests that arrive together are answered by one
search.
"""

from __future__ import annotations

import argparse
import importlib
import json
import queue
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from envs.search import generate
from envs.search.retrieval import (
    Bm25Retriever,
    CorpusError,
    DenseRetriever,
    Hit,
    Retriever,
    documents,
    load_corpus,
    read_faiss,
)

MAX_BODY = 1 << 20  # bytes of a request
MAX_QUERIES, MAX_QUERY, MAX_TOPK = 1024, 4096, 100  # queries in a request, characters of one, hits of one
DEFAULT_TOPK = 3
BATCH = 1024  # queries in one search
SOCKET_TIMEOUT_S = 30.0  # for a client that stops in the middle of a request
ENCODER = "seed_jax.encoder:load"  # of a dense retriever; loaded by name, because nothing in envs needs JAX


class Batcher:
    """One thread searches; whatever waits when it is free is searched at once."""

    def __init__(self, retriever: Retriever):
        self._retriever = retriever
        self._waiting: queue.SimpleQueue[tuple[list[str], int, Future] | None] = queue.SimpleQueue()
        self.searches = 0
        self._thread = threading.Thread(target=self._run, daemon=True, name="search")
        self._thread.start()

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        future: Future = Future()
        self._waiting.put((queries, k, future))
        return future.result()

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (request := self._waiting.get()) is not None:
            batch, count = [request], len(request[0])
            while count < BATCH and not self._waiting.empty():
                another = self._waiting.get()
                if another is None:
                    self._waiting.put(None)
                    break
                batch.append(another)
                count += len(another[0])
            self._answer(batch)

    def _answer(self, batch: Sequence[tuple[list[str], int, Future]]) -> None:
        """One search with the largest k; each request gets as many hits as it asked for."""
        self.searches += 1
        try:
            found = iter(
                self._retriever.search([q for queries, _, _ in batch for q in queries], max(k for _, k, _ in batch))
            )
            for queries, k, future in batch:
                future.set_result([next(found)[:k] for _ in queries])
        except Exception as error:  # told to every client that waits, and the server lives on
            for _, _, future in batch:
                if not future.done():
                    future.set_exception(error)


class BadRequest(ValueError):
    """Told to the client with status 400."""


def read_request(body: bytes) -> tuple[list[str], int, bool]:
    """(queries, topk, with scores) of either protocol. Raises BadRequest."""
    try:
        request = json.loads(body)
    except ValueError as error:
        raise BadRequest(f"the request is not valid JSON ({error})") from error
    if not isinstance(request, dict) or ("query" in request) == ("queries" in request):
        raise BadRequest('the request must be an object with either "query" (a text) or "queries" (a list of texts)')
    queries = [request["query"]] if "query" in request else request["queries"]
    if not isinstance(queries, list) or len(queries) > MAX_QUERIES:
        raise BadRequest(f"queries must be a list of at most {MAX_QUERIES} texts")
    if not all(isinstance(query, str) and len(query) <= MAX_QUERY for query in queries):
        raise BadRequest(f"every query must be a text of at most {MAX_QUERY} characters")
    topk = request.get("topk") or DEFAULT_TOPK
    if not isinstance(topk, int) or isinstance(topk, bool) or not 0 < topk <= MAX_TOPK:
        raise BadRequest(f"topk must be a whole number from 1 to {MAX_TOPK}, or null")
    return queries, topk, bool(request.get("return_scores", False))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = SOCKET_TIMEOUT_S
    server: Server

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(200, self.server.description)
        else:
            self._send(404, {"error": "there is POST /retrieve and GET /health"})

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY:
            self.close_connection = True  # the body is not read
            return self._send(413, {"error": f"a request must say its length, at most {MAX_BODY} bytes"})
        body = self.rfile.read(int(length))
        if self.path != "/retrieve":
            return self._send(404, {"error": "there is POST /retrieve and GET /health"})
        try:
            queries, topk, scores = read_request(body)
            hits = self.server.batcher.search(queries, topk) if queries else []
        except BadRequest as error:
            return self._send(400, {"error": str(error)})
        except Exception as error:
            return self._send(500, {"error": f"{type(error).__name__}: {error}"})
        return self._send(200, {"result": [documents(found, scores) for found in hits]})

    def _send(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing: a line a request is too much."""


class Server(ThreadingHTTPServer):
    """serve_forever() answers; close() ends it and its search thread."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, retriever: Retriever, host: str = "127.0.0.1", port: int = 8000):
        super().__init__((host, port), _Handler)
        self.batcher, self.description = Batcher(retriever), retriever.describe()

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]}:{self.server_address[1]}"

    def close(self) -> None:
        self.server_close()
        self.batcher.close()


def build(data: str, method: str, model: str = "", index: str = "") -> Retriever:
    """The retriever over a corpus: "generated", or a folder with corpus.jsonl.

    index: bm25: file to keep the index in; dense: an existing file of faiss
    """
    if data == "generated":
        passages, name = generate.make().passages, f"generated-{generate.VERSION}"
    else:
        passages, name = load_corpus(Path(data) / "corpus.jsonl"), Path(data).name
    if method == "bm25":
        return Bm25Retriever(passages, name, index or None)
    if not model:
        raise CorpusError("a dense retriever needs an encoder: name a directory in Hugging Face format")
    module, function = ENCODER.split(":")
    ready = read_faiss(index) if index else None
    return DenseRetriever(passages, getattr(importlib.import_module(module), function)(model), name, index=ready)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="generated", help="'generated', or a folder with corpus.jsonl")
    parser.add_argument("--retriever", choices=("bm25", "dense"), default="bm25")
    parser.add_argument("--model", default="", help="dense: directory of the encoder")
    parser.add_argument("--index", default="", help="bm25: file that keeps the index; dense: ready index of faiss")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; default: this machine alone")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args(arguments)
    try:
        retriever = build(options.data, options.retriever, options.model, options.index)
        server = Server(retriever, options.host, options.port)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{server.url}: {server.description}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
