"""A headless Chromium for tests, driven over its debugging pipe: no driver and no package beside the browser itself."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome", "google-chrome-stable", "chrome")
NEEDED = "needs Chromium (Debian: apt-get install chromium; or the variable CHROMIUM names its program)"
_TIMEOUT_S = 60.0


def find() -> str | None:
    named = os.environ.get("CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    program = find()
    assert program, NEEDED
    to_browser, from_browser = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = [
            "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-dev-shm-usage", "--disable-background-networking", "--hide-scrollbars",
            f"--user-data-dir={profile}",
        ]  # fmt: skip

        # The browser reads commands from 3 and writes answers to 4; bash puts the pipes there.
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser[0], from_browser[1])]
        process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs[0]} 4>&{theirs[1]}', "bash", program, *options, "about:blank"],
            pass_fds=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (to_browser[0], from_browser[1], *theirs):
            os.close(end)
        try:
            yield Browser(to_browser[1], from_browser[0])
        finally:
            os.close(to_browser[1])
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(from_browser[0])


class Browser:
    """One tab. `problems` collects console errors, warnings, exceptions and blocked content of the pages it opens."""

    def __init__(self, write: int, read: int):
        self._write, self._read, self._buffer, self._number = write, read, b"", 0
        self.problems: list[str] = []
        self._loaded = False
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready = select.select([self._read], [], [], _TIMEOUT_S)[0]
            part = os.read(self._read, 1 << 20) if ready else b""
            if not part:
                raise RuntimeError("the browser has gone" if ready else f"the browser is silent for {_TIMEOUT_S:.0f} s")
            self._buffer += part
        line, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.problems.append(params["exceptionDetails"].get("exception", {}).get("description", str(params)))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(str(params["args"]))
        elif method == "Page.javascriptDialogOpening":
            self.problems.append(f"a dialog: {params['message']}")
        elif method == "Network.requestWillBeSent" and not params["request"]["url"].startswith(("file:", "data:")):
            self.problems.append(f"a request to {params['request']['url'][:200]}")

    def view(self, width: int, height: int, dark: bool = False) -> None:
        """Size of the window (a phone's below 600 px) and colour scheme of the system."""
        phone = width < 600
        scale = 2 if phone else 1
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, path: Path, fragment: str = "") -> float:
        """Loads a file; returns the seconds until its scripts have run and the first episode, if any, is drawn."""
        self._navigate("about:blank")  # or a new fragment would not load the page again
        start = time.monotonic()
        self._navigate(path.resolve().as_uri() + fragment)
        self.wait("!document.getElementById('index') || document.body.dataset.ready !== undefined")
        return time.monotonic() - start

    def _navigate(self, url: str) -> None:
        self._loaded = False
        self.call("Page.navigate", url=url)
        while not self._loaded:
            self._message()

    def run(self, code: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{code}: {answer['exceptionDetails'].get('exception', {}).get('description')}")
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        end = time.monotonic() + _TIMEOUT_S
        while not self.run(condition):
            if time.monotonic() > end:
                raise AssertionError(f"never came true: {condition}")
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        """A real click in the middle of the first element that matches."""
        place = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return null; "
            "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect(); "
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        assert place, f"nothing matches {selector}"
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    def press(self, key: str) -> None:
        text = key if len(key) == 1 else None
        down = {"type": "keyDown", "key": key} | ({"text": text} if text else {})
        self.call("Input.dispatchKeyEvent", **down)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def screenshot(self, path: Path, whole: bool = True) -> Path:
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(picture["data"]))
        return path
