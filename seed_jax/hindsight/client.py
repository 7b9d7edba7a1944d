"""A client for chat services that speak the OpenAI protocol (vLLM, SGLang, hosted models): for skills by another model,
and for the evaluation of a served one.

Requests are in flight side by side, up to a limit, and answers come as they finish. What may pass (rate limits, server
errors, time-outs, answers cut off or damaged) is tried again after a pause that doubles, with jitter, or after as long
as the service asks for.

A prompt with images is sent as parts, text and PNG data in the order of their places in it.

The key comes from the environment, goes into one header of requests to the configured URL and nowhere else: redirects
are refused (they could carry it to another host) and errors name the status and the service's own message only.
"""

from __future__ import annotations

import contextlib
import email.utils
import hashlib
import http.client
import json
import os
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from seed_jax import png
from seed_jax.images import PLACEHOLDER, check_places

KEY_VARIABLE = "SEED_JAX_API_KEY"
_RETRY_STATUS = frozenset({408, 409, 429, 500, 502, 503, 504})
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_MAX_ANSWER_BYTES = 4_000_000
_MAX_REQUEST_BYTES = 50_000_000  # what hosted models take
_MAX_PAUSE_S = 60.0  # between two attempts, whatever the service asks for
_FILTERED = "content_filter"  # what the protocol calls it, as a reason to finish and as an error code

_IMAGE_REMEDY = (
    ". The request has {images} images: {model} must be a model that sees, and the service must take so many in a "
    "request (vLLM: --limit-mm-per-prompt); or set env.observation = 'text'"
)


class ClientError(RuntimeError):
    """The service cannot be used at all: refused key, wrong URL or model. What may pass is retried and counted."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_):
        return None


class Answer(NamedTuple):
    """finish: "stop", "length", "filtered" (the service refuses to answer this), or "failed" (all attempts failed).

    Tokens are as the service counts them, 0 if it does not say. attempts: requests sent; 0: it was in the cache.
    """

    text: str
    finish: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    attempts: int = 1


class _Passing(Exception):
    """An attempt failed in a way that may pass. wait_s: how long the service wants to be left alone."""

    def __init__(self, wait_s: float = 0.0):
        super().__init__()
        self.wait_s = wait_s


@dataclass(frozen=True)
class Client:
    """url: the base URL up to and with "/v1"; timeout_s: for one attempt; workers: requests in flight; retries: further
    attempts at a request that failed in passing; source: where the user has set the url (for messages); cache: a
    directory that keeps answers by request."""

    url: str
    model: str
    timeout_s: float = 120.0
    workers: int = 16
    retries: int = 3
    pause_s: float = 1.0  # before the first retry; doubles each time, and is scattered by a half
    source: str = "hindsight.api_url"
    key: str = field(default_factory=lambda: os.environ.get(KEY_VARIABLE, ""), repr=False)
    cache: Path | None = None

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ClientError(f"{self.source} = {self.url!r}: must be an http or https address, as in http://HOST/v1")
        if parts.username or parts.password:
            raise ClientError(f"{self.source} must not hold a password; put the key into {KEY_VARIABLE}")
        if parts.scheme == "http" and self.key and parts.hostname not in _LOCAL_HOSTS:
            raise ClientError(f"{KEY_VARIABLE} would travel unencrypted to {parts.hostname}; use https, or unset it")

    def ask(
        self,
        prompts: Sequence[str],
        max_tokens: int,
        fields: Sequence[dict[str, Any]] | None = None,
        reasoning: bool = False,
        images: Sequence[Sequence[np.ndarray]] | None = None,
    ) -> list[tuple[str, str]]:
        """(answer, finish) for each prompt, in order; finish as in `Answer`. Arguments and errors as for `stream`."""
        done = dict(self.stream(prompts, max_tokens, fields, reasoning, images))
        return [(done[index].text, done[index].finish) for index in range(len(prompts))]

    def stream(
        self,
        prompts: Sequence[str],
        max_tokens: int,
        fields: Sequence[dict[str, Any]] | None = None,
        reasoning: bool = False,
        images: Sequence[Sequence[np.ndarray]] | None = None,
    ) -> Iterator[tuple[int, Answer]]:
        """(index of the prompt, answer) as they come; every prompt gets exactly one.

        fields: further fields of each request, such as {"temperature": 0.4}; without any it is greedy.
        reasoning: what a service reports apart as the model's thoughts is put before the answer, in <think> tags.
        images: those of each prompt, in the order of their places (images.PLACEHOLDER) in its text.
        Raises ClientError if the service refuses a request in a way that no retry can mend.
        """
        images = images or [()] * len(prompts)
        for prompt, seen in zip(prompts, images, strict=True):
            if seen:
                check_places(prompt, seen)

        def one(prompt: str, seen: Sequence[np.ndarray], extra: dict[str, Any]) -> Answer:
            body = {
                "model": self.model,
                "messages": [{"role": "user", "content": content_parts(prompt, seen) if seen else prompt}],
                "max_tokens": max_tokens,
                "temperature": 0.0,
                **extra,
            }
            return self._one(body, len(seen), reasoning, stop)

        stop = threading.Event()
        pool = ThreadPoolExecutor(self.workers)
        requests = zip(prompts, images, fields or [{}] * len(prompts), strict=True)
        try:
            index_of = {pool.submit(one, *request): index for index, request in enumerate(requests)}
            for future in as_completed(index_of):
                yield index_of[future], future.result()
        finally:  # after an error or an interruption nothing more is sent
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)

    def _one(self, body: dict[str, Any], images: int, reasoning: bool, stop: threading.Event) -> Answer:
        place = self._cache_file(body, reasoning)
        kept = _read_cached(place) if place else None
        if kept is not None:
            return kept
        for attempt in range(self.retries + 1):
            try:
                answer = self._post(body, images, reasoning)._replace(attempts=attempt + 1)
            except _Passing as passing:
                if attempt < self.retries and stop.wait(pause(attempt, self.pause_s, passing.wait_s)):
                    break
                continue
            if place:
                _write_cached(place, answer)
            return answer
        return Answer("", "failed", attempts=self.retries + 1)

    def _post(self, body: dict[str, Any], images: int, reasoning: bool) -> Answer:
        """One attempt; raises _Passing if another may succeed."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        content = json.dumps(body).encode()
        if images and len(content) > _MAX_REQUEST_BYTES:
            raise ClientError(
                f"a request with {images} images has {len(content)} bytes, more than the {_MAX_REQUEST_BYTES} that a "
                "service takes; lower hindsight.max_analysis_tokens, so that longer episodes lose steps of their middle"
            )
        request = urllib.request.Request(self.url.rstrip("/") + "/chat/completions", content, headers, method="POST")
        try:
            with urllib.request.build_opener(_NoRedirect).open(request, timeout=self.timeout_s) as response:
                raw = _read_body(response, time.monotonic() + self.timeout_s)
            # A service that shows the request in its answer must not bring the key into files.
            return _read_answer(raw.replace(self.key.encode(), b"(key)") if self.key else raw, reasoning)
        except urllib.error.HTTPError as error:
            with error:
                if error.code in _RETRY_STATUS:
                    raise _Passing(retry_after(error.headers)) from None
                message, code = _message(error)
            if code == _FILTERED:
                return Answer("", "filtered")
            message = message.replace(self.key, "(key)") if self.key else message
            remedy = _IMAGE_REMEDY.format(images=images, model=self.model) if images else ""
            raise ClientError(f"{self.url} refused the request: {error.code} {message}{remedy}") from None
        except (OSError, http.client.HTTPException):  # no connection, time-out, cut off
            raise _Passing from None

    def _cache_file(self, body: dict[str, Any], reasoning: bool) -> Path | None:
        if self.cache is None:
            return None
        request = json.dumps([self.url.rstrip("/"), reasoning, body], sort_keys=True)
        name = hashlib.sha256(request.encode()).hexdigest()
        return self.cache / name[:2] / f"{name[2:]}.json"


def content_parts(prompt: str, images: Sequence[np.ndarray]) -> list[dict[str, Any]]:
    """A message of text and images, in the order of the prompt; empty texts are left out."""
    first, *others = prompt.split(PLACEHOLDER)
    parts: list[dict[str, Any]] = [{"type": "text", "text": first}]
    for image, text in zip(images, others, strict=True):
        parts.append({"type": "image_url", "image_url": {"url": png.data_uri(image)}})
        parts.append({"type": "text", "text": text})
    return [part for part in parts if part.get("text") != ""]


def pause(attempt: int, first_s: float, asked_s: float = 0.0) -> float:
    """Seconds before the attempt after number `attempt`: doubling from `first_s`, scattered by a half so that requests
    that failed together do not return together; never less than the service has asked for, at most a minute."""
    return min(_MAX_PAUSE_S, asked_s + first_s * 2**attempt * random.uniform(0.5, 1.5))


def retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that a Retry-After header asks for, as a number or as a date (RFC 9110, 10.2.3); 0 without one."""
    text = (headers.get("Retry-After") or "").strip()
    try:
        return max(0.0, float(text)) if text.replace(".", "", 1).isdigit() else max(0.0, _date(text) - time.time())
    except (TypeError, ValueError, OverflowError):
        return 0.0


def _date(text: str) -> float:
    return email.utils.parsedate_to_datetime(text).timestamp()


def _read_body(response: http.client.HTTPResponse, deadline: float) -> bytes:
    """The whole body. The socket's time-out holds for each piece only, so a trickle is cut off here."""
    pieces, size = [], 0
    while piece := response.read1(1 << 16):
        pieces.append(piece)
        size += len(piece)
        if size > _MAX_ANSWER_BYTES or time.monotonic() > deadline:
            raise _Passing
    stated = response.headers.get("Content-Length", "")
    if stated.isdigit() and size < int(stated):
        raise _Passing
    return b"".join(pieces)


def _read_answer(raw: bytes, reasoning: bool) -> Answer:
    try:
        reply = json.loads(raw)
        choice, usage = reply["choices"][0], reply.get("usage")
        message, finish = choice["message"], choice.get("finish_reason")
        if finish == _FILTERED:
            return Answer("", "filtered", *_tokens(usage))
        text, thoughts = message["content"], message.get("reasoning_content") or message.get("reasoning")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):  # a proxy's page instead of an answer
        raise _Passing from None
    text = text if isinstance(text, str) else ""
    if reasoning and isinstance(thoughts, str):
        text = f"<think>{thoughts}</think>{text}"
    return Answer(text, "length" if finish == "length" else "stop", *_tokens(usage))


def _tokens(usage: Any) -> tuple[int, int]:
    count = lambda name: usage.get(name) if isinstance(usage, dict) else 0  # noqa: E731
    counts = [count(name) for name in ("prompt_tokens", "completion_tokens")]
    return tuple(value if isinstance(value, int) and value > 0 else 0 for value in counts)


def _message(error: urllib.error.HTTPError) -> tuple[str, str]:
    """(the service's own words about a refused request, in short, its code for the error)."""
    try:
        reply = json.loads(error.read(10_000))["error"]
        return " ".join(str(reply["message"]).split())[:300], str(reply.get("code"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, http.client.HTTPException):
        return str(error.reason), ""


def _read_cached(place: Path) -> Answer | None:
    try:
        return Answer(**json.loads(place.read_text(encoding="utf-8")))._replace(attempts=0)
    except (OSError, ValueError, TypeError):  # absent, or damaged: asked anew
        return None


def _write_cached(place: Path, answer: Answer) -> None:
    """All or nothing, also if two threads have asked the same."""
    partial = place.with_name(f"{place.name}.{threading.get_ident()}.partial")
    with contextlib.suppress(OSError):  # a full disk costs the cache, not the answer
        place.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(answer._asdict()), encoding="utf-8")
        partial.replace(place)
