"""A retriever behind HTTP: Search-R1's protocol (`queries`, a batch) or SEED's (`query`, one at a time).

POST /retrieve  {"queries": [text, ...], "topk": int, "return_scores": true} -> {"result": [[hit, ...], ...]}
POST /retrieve  {"query": text, "topk": int, "return_scores": true}          -> {"result": [[hit, ...]]}
hit = {"document": {"id"?, "contents" or "title" and "text"}, "score": number}, or the document alone.
GET  /health    {"corpus", "size", "method", "version"}; servers without it are taken as they are.
"""

from __future__ import annotations

import http.client
import json
import logging
import threading
import time
import urllib.parse
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from envs.base import EnvError
from envs.search.retrieval import CorpusError, Hit, passage_of

START_TIMEOUT_S = 5.0
TIMEOUT_S = 30.0
RETRY_BUDGET_S = 60.0  # of one search, waits included
WAITS_S = (1.0, 2.0, 4.0, 8.0, 10.0)  # the last one again and again
RETRIED = (500, 502, 503, 504)
SHOWN = 200  # characters of an answer in an error
MAX_ANSWER = 64 << 20  # bytes
START_HINT = "start one with: python -m envs.search.serve --data=DIR --port=8000"

_log = logging.getLogger(__name__)


class ServerError(ValueError):
    """The server cannot be used as it is; told at the start."""


class _Refused(Exception):
    """An answer that another try would not change."""


class HttpRetriever:
    """Queries go to the servers in turn; each thread keeps its connections open."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout_s: float = TIMEOUT_S,
        budget_s: float = RETRY_BUDGET_S,
        workers: int = 16,
        sleep: Callable[[float], None] = time.sleep,
    ):
        """Asks every server how it is and which protocol it speaks. Raises ServerError within seconds."""
        if not urls:
            raise ServerError("env.retriever_url is empty; name the server, such as http://127.0.0.1:8000")
        self.urls = [_checked_url(url) for url in urls]
        self._timeout_s, self._budget_s, self._sleep = timeout_s, budget_s, sleep
        self._local = threading.local()
        self._workers = ThreadPoolExecutor(workers, thread_name_prefix="retrieve")
        self._health = [self._greet(url) for url in self.urls]
        self._batched = [self._dialect(url) for url in self.urls]
        if len({json.dumps(health, sort_keys=True) for health in self._health if health}) > 1:
            raise ServerError(f"the servers {', '.join(self.urls)} hold different corpora: {self._health}")

    def describe(self) -> dict[str, Any]:
        known = next((health for health in self._health if health), {})
        return {"corpus": "", "size": 0, "version": "", **known, "method": f"http ({known.get('method', 'unknown')})"}

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """An EnvError takes the place of the hits of a query whose server stays down."""
        jobs: list[tuple[int, list[int]]] = []
        for server in range(len(self.urls)):
            mine = list(range(server, len(queries), len(self.urls)))
            jobs += [(server, mine)] if self._batched[server] else [(server, [place]) for place in mine]
        found: list[Any] = [None] * len(queries)
        answers = self._workers.map(
            lambda job: self._ask(job[0], [queries[place] for place in job[1]], k), [job for job in jobs if job[1]]
        )
        for (_, places), hits in zip([job for job in jobs if job[1]], answers, strict=True):
            for place, own in zip(places, hits, strict=True):
                found[place] = own
        return found

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _ask(self, server: int, queries: list[str], k: int) -> list[Any]:
        url, start, tries = self.urls[server], time.monotonic(), 0
        while True:
            try:
                return self._retrieve(url, queries, k, self._batched[server], self._timeout_s)
            except _Refused as error:
                return [EnvError(f"retrieval at {url}: {error}")] * len(queries)
            except (OSError, http.client.HTTPException) as error:
                wait = WAITS_S[min(tries, len(WAITS_S) - 1)]
                if time.monotonic() - start + wait > self._budget_s:
                    message = f"retrieval at {url} failed for {self._budget_s:g} s: {_told(error)}"
                    return [EnvError(message)] * len(queries)
                _log.warning("retrieval at %s: %s; the rollout waits %g s", url, _told(error), wait)
                tries += 1
                self._sleep(wait)

    def _greet(self, url: str) -> dict[str, Any]:
        try:
            status, body = self._request(url, "GET", "/health", None, START_TIMEOUT_S)
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"there is no retrieval server at {url} ({_told(error)}); {START_HINT}") from error
        try:
            health = json.loads(body) if status == 200 else {}
        except ValueError:
            health = {}
        return health if isinstance(health, dict) else {}

    def _dialect(self, url: str) -> bool:
        """Whether it takes batches. Tries both protocols once."""
        errors = []
        for batched in (True, False):
            try:
                self._retrieve(url, ["test"], 1, batched, START_TIMEOUT_S)
                return batched
            except (OSError, http.client.HTTPException, _Refused) as error:
                errors.append(f"{'queries' if batched else 'query'}: {_told(error)}")
        raise ServerError(f"{url}/retrieve speaks neither of the two protocols ({'; '.join(errors)}); {START_HINT}")

    def _retrieve(self, url: str, queries: list[str], k: int, batched: bool, timeout_s: float) -> list[list[Hit]]:
        asked = {"queries": queries} if batched else {"query": queries[0]}
        body = json.dumps({**asked, "topk": k, "return_scores": True}).encode()
        status, answer = self._request(url, "POST", "/retrieve", body, timeout_s)
        if status in RETRIED:
            raise OSError(f"HTTP {status}: {_start(answer)}")
        if status != 200:
            raise _Refused(f"HTTP {status}: {_start(answer)}")
        try:
            hits = [[_hit(hit) for hit in row] for row in json.loads(answer)["result"]]
        except (ValueError, KeyError, TypeError) as error:  # CorpusError is a ValueError
            raise _Refused(f"the answer is not of the protocol ({error}): {_start(answer)}") from error
        if len(hits) != len(queries):
            raise _Refused(f"{len(hits)} answers to {len(queries)} queries")
        return hits

    def _request(self, url: str, method: str, path: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        """One request on this thread's connection to the server; once more if a kept connection has been closed."""
        connections = self._local.__dict__.setdefault("connections", {})
        parts = urllib.parse.urlsplit(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        for attempt in range(2):
            kept = connections.pop(url, None)
            connection = kept or kind(parts.hostname, parts.port, timeout=timeout_s)
            try:
                headers = {"Content-Type": "application/json"} if body else {}
                connection.request(method, f"{parts.path}{path}", body, headers)
                response = connection.getresponse()
                answer = response.read(MAX_ANSWER)
            except (OSError, http.client.HTTPException):
                connection.close()
                if kept is None or attempt:
                    raise
                continue
            connections[url] = connection
            return response.status, answer
        raise AssertionError("not reached")


def _hit(entry: dict[str, Any]) -> Hit:
    if not isinstance(entry, dict):
        raise CorpusError(f"a hit must be a JSON object, not {str(entry)[:80]!r}")
    document = entry.get("document", entry)
    return Hit(passage_of(document), float(entry.get("score", 0.0)))


def _checked_url(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ServerError(f"env.retriever_url: {url!r} must be an http(s) address, such as http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/retrieve")


def _start(answer: bytes) -> str:
    return answer[:SHOWN].decode(errors="replace")


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
