"""The client for OpenAI-compatible services, against a server in this process."""

from __future__ import annotations

import base64
import datetime
import email.utils
import http.server
import io
import json
import threading
import time

import numpy as np
import pytest
from PIL import Image

from seed_jax.hindsight import client as client_lib
from seed_jax.hindsight.client import KEY_VARIABLE, Client, ClientError, pause, retry_after

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
                if "Content-Length" not in headers:
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


def test_a_service_says_when_to_come_back():
    times = []

    def reply(_, number):
        times.append(time.monotonic())
        return (429, {"Retry-After": "1"}, b"{}") if number == 0 else (200, {}, answer("now"))

    with Service(reply) as service:
        assert client(service.url).ask(["a"], 8) == [("now", "stop")]
    assert 1.0 <= times[1] - times[0] < 3.0


def test_pauses_double_with_jitter_and_end_at_a_minute():
    for attempt in range(4):
        waits = {pause(attempt, 1.0) for _ in range(50)}
        assert len(waits) > 10 and 0.5 * 2**attempt <= min(waits) and max(waits) <= 1.5 * 2**attempt
    assert pause(20, 1.0) == pause(0, 1.0, 1e9) == 60.0
    soon = email.utils.format_datetime(datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=30))
    assert 25 < retry_after({"Retry-After": soon}) <= 30
    for text in (None, "soon", "-5", "Mon, 01 Jan 2001 00:00:00 GMT"):
        assert retry_after({"Retry-After": text} if text else {}) == 0.0


def test_a_damaged_cache_file_is_asked_anew(tmp_path):
    with Service(lambda _, number: (200, {}, answer(f"answer {number}"))) as service:
        keeping = client(service.url, cache=tmp_path)
        assert keeping.ask(["a"], 8) == keeping.ask(["a"], 8) == [("answer 0", "stop")]
        assert keeping.ask(["a"], 9) == [("answer 1", "stop")], "another request"
        for path in tmp_path.rglob("*.json"):
            path.write_text(path.read_text()[:10])
        assert keeping.ask(["a"], 8) == [("answer 2", "stop")]


def test_a_key_in_an_answer_goes_no_further(tmp_path):
    with Service(lambda *_: (200, {}, answer(f"you sent {KEY}"))) as service:
        assert client(service.url, cache=tmp_path).ask(["a"], 8) == [("you sent (key)", "stop")]
    assert all(KEY not in path.read_text() for path in tmp_path.rglob("*.json"))


def test_an_error_stops_what_waits():
    """After a refusal that no retry mends, requests that were not sent yet stay unsent."""
    reply = lambda _, number: (401, {}, b"{}") if number == 0 else (200, {}, answer("x"))  # noqa: E731
    with Service(reply) as service:
        with pytest.raises(ClientError, match="401"):
            client(service.url, workers=1).ask([f"prompt {n}" for n in range(200)], 8)
        assert len(service.requests) < 50


# -- images ------------------------------------------------------------------------------------------------------------


def picture(seed: int, height: int = 28, width: int = 56) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)


def shown(part: dict) -> np.ndarray:
    """The image in a part of a message, read without the code under test."""
    assert part["type"] == "image_url"
    kind, data = part["image_url"]["url"].split(",")
    assert kind == "data:image/png;base64"
    with Image.open(io.BytesIO(base64.b64decode(data, validate=True))) as image:
        assert (image.format, image.mode) == ("PNG", "RGB")
        return np.array(image)


def test_images_arrive_in_the_order_of_their_places():
    images = [picture(0), picture(1, 84, 28), picture(0)]
    prompts = ["first <image> then <image>\nlast<image>", "text <image> alone", "<image>"]
    with Service(lambda *_: (200, {}, answer("seen"))) as service:
        found = client(service.url, workers=1).ask(prompts, 8, images=[images, [], [images[1]]])
        assert found == [("seen", "stop")] * 3
        contents = [body["messages"][0]["content"] for _, _, body in service.requests]
    assert [part["type"] for part in contents[0]] == ["text", "image_url", "text", "image_url", "text", "image_url"]
    assert [part["text"] for part in contents[0][::2]] == ["first ", " then ", "\nlast"]
    for part, image in zip(contents[0][1::2], images, strict=True):
        np.testing.assert_array_equal(shown(part), image)
    assert contents[1] == prompts[1], "a prompt without images is a text as ever"
    [only] = contents[2]
    np.testing.assert_array_equal(shown(only), images[1])


def test_a_wrong_number_of_images_is_never_sent():
    with Service(lambda *_: (200, {}, answer("seen"))) as service:
        for prompt, count in (("one <image>", 2), ("<image> and <image>", 1), ("none", 1)):
            message = rf"a prompt has {prompt.count('<image>')} places for images \(<image>\) and {count} images"
            with pytest.raises(ValueError, match=message):
                client(service.url).ask(["<image>", prompt], 8, images=[[picture(0)], [picture(0)] * count])
        assert service.requests == []


def test_a_service_that_does_not_see_is_one_line_with_the_remedy():
    message = json.dumps({"error": {"message": "writer is not a multimodal model"}}).encode()
    with Service(lambda *_: (400, {}, message)) as service:
        with pytest.raises(ClientError, match=r"refused the request: 400 writer is not a multimodal") as error:
            client(service.url).ask(["<image><image>"], 8, images=[[picture(0), picture(1)]])
        assert "The request has 2 images: writer must be a model that sees" in str(error.value)
        assert "--limit-mm-per-prompt" in str(error.value) and "env.observation = 'text'" in str(error.value)
        assert "\n" not in str(error.value)
        with pytest.raises(ClientError) as error:
            client(service.url).ask(["text"], 8)
        assert "images" not in str(error.value)


def test_requests_that_no_service_takes_are_not_sent(monkeypatch):
    monkeypatch.setattr(client_lib, "_MAX_REQUEST_BYTES", 4000)
    with Service(lambda *_: (200, {}, answer("seen"))) as service:
        assert client(service.url).ask(["x" * 5000], 8) == [("seen", "stop")], "text is not counted"
        with pytest.raises(ClientError, match=r"1 images has \d+ bytes, more than the 4000 .* lower hindsight\.max_an"):
            client(service.url).ask(["<image>"], 8, images=[[picture(0)]])
        assert len(service.requests) == 1


def test_the_cache_tells_images_apart(tmp_path):
    with Service(lambda _, number: (200, {}, answer(f"answer {number}"))) as service:
        ask = lambda image: client(service.url, cache=tmp_path).ask(["<image>"], 8, images=[[image]])  # noqa: E731
        assert ask(picture(0)) == ask(picture(0)) == [("answer 0", "stop")]
        changed = picture(0)
        changed[0, 0, 0] ^= 1
        assert ask(changed) == [("answer 1", "stop")] and ask(picture(0)) == [("answer 0", "stop")]
