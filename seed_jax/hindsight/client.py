"""A client for chat services that speak the OpenAI protocol (vLLM, SGLang, hosted models): for skills by another model,
and for the evaluation of a served one.

The key comes from the environment, goes into one header of requests to the configured URL and nowhere else: redirects
are refused (they could carry it to another host) and errors name the status and the service's own message only.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

KEY_VARIABLE = "SEED_JAX_API_KEY"
_RETRY_STATUS = frozenset({408, 409, 429, 500, 502, 503, 504})
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_MAX_ANSWER_BYTES = 4_000_000


class ClientError(RuntimeError):
    """The service cannot be used at all: refused key, wrong URL or model. What may pass is retried and counted."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_):
        return None


@dataclass(frozen=True)
class Client:
    """url: the base URL up to and with "/v1"; retries: further attempts at a request that failed in passing; source:
    where the user has set the url (for messages)."""

    url: str
    model: str
    timeout_s: float = 120.0
    workers: int = 16
    retries: int = 3
    pause_s: float = 1.0  # before the first retry; doubles each time
    source: str = "hindsight.api_url"
    key: str = field(default_factory=lambda: os.environ.get(KEY_VARIABLE, ""), repr=False)

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
    ) -> list[tuple[str, str]]:
        """(answer, finish) for each prompt, in order; finish is "stop", "length", or "failed" (all attempts failed).

        fields: further fields of each request, such as {"temperature": 0.4}; without any it is greedy.
        reasoning: what a service reports apart as the model's thoughts is put before the answer, in <think> tags.
        Raises ClientError if the service refuses a request in a way that no retry can mend.
        """
        bodies = [
            {
                "model": self.model,
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": max_tokens,
                "temperature": 0.0,
                **extra,
            }
            for prompt, extra in zip(prompts, fields or [{}] * len(prompts), strict=True)
        ]
        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(lambda body: self._one(body, reasoning), bodies))

    def _one(self, body: dict[str, Any], reasoning: bool) -> tuple[str, str]:
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(self.pause_s * 2 ** (attempt - 1))
            answer = self._post(body, reasoning)
            if answer is not None:
                return answer
        return "", "failed"

    def _post(self, body: dict[str, Any], reasoning: bool) -> tuple[str, str] | None:
        """One attempt; None if another may succeed."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        request = urllib.request.Request(
            self.url.rstrip("/") + "/chat/completions", json.dumps(body).encode(), headers, method="POST"
        )
        try:
            with urllib.request.build_opener(_NoRedirect).open(request, timeout=self.timeout_s) as response:
                return _read_answer(response.read(_MAX_ANSWER_BYTES), reasoning)
        except urllib.error.HTTPError as error:
            if error.code in _RETRY_STATUS:
                return None
            message = _message(error).replace(self.key, "(key)") if self.key else _message(error)
            raise ClientError(f"{self.url} refused the request: {error.code} {message}") from None
        except (OSError, http.client.HTTPException):  # no connection, time-out, cut off
            return None


def _read_answer(raw: bytes, reasoning: bool) -> tuple[str, str] | None:
    try:
        choice = json.loads(raw)["choices"][0]
        message, finish = choice["message"], choice.get("finish_reason")
        text, thoughts = message["content"], message.get("reasoning_content") or message.get("reasoning")
    except (ValueError, KeyError, IndexError, TypeError):  # a proxy's page instead of an answer
        return None
    text = text if isinstance(text, str) else ""
    if reasoning and isinstance(thoughts, str):
        text = f"<think>{thoughts}</think>{text}"
    return text, ("length" if finish == "length" else "stop")


def _message(error: urllib.error.HTTPError) -> str:
    """The service's own words about a refused request, in short."""
    try:
        reply = json.loads(error.read(10_000))["error"]["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return str(error.reason)
    return " ".join(str(reply).split())[:300]
