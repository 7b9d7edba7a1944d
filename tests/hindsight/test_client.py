"""The client for OpenAI-compatible services, against a server in this process."""

from __future__ import annotations

import http.server
import json
import threading

import pytest

from seed_jax.hindsight.client import KEY_VARIABLE, Client, ClientError

KEY = "sk-very-secret-0123"


def answer(text: object, finish: str = "stop") -> bytes:
    return json.dumps({"choices": [{"message": {"content": text}, "finish_reason": finish}]}).encode()


class Service:
    """Answers each request with what `reply(body, number)` gives: (status, headers, bytes)."""

    def __init__(self, reply):
        self.requests, lock = [], threading.Lock()
        requests = self.requests

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    number = len(requests)
                    requests.append((self.path, dict(self.headers), body))
                status, headers, content = reply(body, number)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, KEY)


def client(url: str, **changes) -> Client:
    return Client(url, "writer", **({"timeout_s": 5.0, "pause_s": 0.01} | changes))


def test_answers_come_in_the_order_of_the_prompts():
    with Service(lambda body, _: (200, {}, answer(body["messages"][0]["content"].upper()))) as service:
        prompts = [f"prompt {n}" for n in range(20)]
        assert client(service.url, workers=5).ask(prompts, 64) == [(prompt.upper(), "stop") for prompt in prompts]
    path, headers, body = service.requests[0]
    assert path == "/v1/chat/completions" and headers["Authorization"] == f"Bearer {KEY}"
    assert {name: body[name] for name in ("model", "max_tokens", "temperature")} == {
        "model": "writer", "max_tokens": 64, "temperature": 0.0,
    }  # fmt: skip


def test_cut_off_answers_say_so_and_no_text_is_empty():
    replies = [answer("half", "length"), answer(None)]
    with Service(lambda _, number: (200, {}, replies[number])) as service:
        assert client(service.url, workers=1).ask(["a", "b"], 8) == [("half", "length"), ("", "stop")]


@pytest.mark.parametrize("trouble", [(503, {}, b"busy"), (429, {}, b"{}"), (200, {}, b"<html>"), (200, {}, b"{}")])
def test_what_passes_is_tried_again(trouble):
    with Service(lambda _, number: trouble if number < 2 else (200, {}, answer("at last"))) as service:
        assert client(service.url).ask(["a"], 8) == [("at last", "stop")]
        assert len(service.requests) == 3


def test_what_does_not_pass_is_one_failed_answer():
    reply = lambda body, _: (200, {}, answer("fine")) if "good" in str(body) else (500, {}, b"")  # noqa: E731
    with Service(reply) as service:
        assert client(service.url, retries=2).ask(["good", "bad"], 8) == [("fine", "stop"), ("", "failed")]
        assert len(service.requests) == 4
    assert client(service.url, retries=1).ask(["closed"], 8) == [("", "failed")], "nobody listens any more"


def test_refused_key_is_an_error_that_does_not_show_it():
    message = json.dumps({"error": {"message": f"Incorrect key {KEY}.\nGet one."}}).encode()
    with Service(lambda *_: (401, {}, message)) as service, pytest.raises(ClientError) as error:
        client(service.url).ask(["a"], 8)
    assert "401 Incorrect key (key). Get one." in str(error.value) and KEY not in str(error.value)
    assert len(service.requests) == 1


def test_redirects_are_refused():
    with Service(lambda *_: (200, {}, answer("stolen"))) as other:
        reply = lambda *_: (307, {"Location": f"{other.url}/chat/completions"}, b"")  # noqa: E731
        with Service(reply) as service, pytest.raises(ClientError, match="refused the request: 307"):
            client(service.url).ask(["a"], 8)
    assert other.requests == []


def test_without_a_key_no_header(monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE)
    with Service(lambda *_: (200, {}, answer("x"))) as service:
        client(service.url).ask(["a"], 8)
    assert "Authorization" not in service.requests[0][1]


def test_key_stays_out_of_what_is_printed():
    assert KEY not in repr(client("https://example.org/v1"))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "must be an http or https address"),
        ("example.org/v1", "must be an http or https address"),
        ("file:///etc/passwd", "must be an http or https address"),
        ("http://example.org/v1", "would travel unencrypted to example.org; use https"),
        (f"https://user:{KEY}@example.org/v1", "must not hold a password"),
    ],
)
def test_urls_that_are_refused(url, message):
    with pytest.raises(ClientError, match=message) as error:
        client(url)
    assert KEY not in str(error.value)
