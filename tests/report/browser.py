"""Headless Chromium for tests, driven by its debugging protocol over two pipes; needs no package and no port."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (Debian: apt-get install chromium)")
WAIT_S = 30.0


class Browser:
    """One tab. events: what the browser reported, newest last."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._numbers = itertools.count(1)
        self._rest = b""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    _session: str | None = None

    def call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        session = {"sessionId": self._session} if self._session else {}
        text = json.dumps({"id": number, "method": method, "params": params, **session})
        os.write(self._write, text.encode() + b"\0")
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            message = self._message()
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)
        raise AssertionError(f"no answer to {method}")

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._read, 1 << 16)
            assert more, "the browser has gone"
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        return found

    def open(self, url: str) -> None:
        """Load a page and wait for it."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def js(self, expression: str) -> Any:
        """Evaluate an expression in the page. Raises AssertionError if it throws."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Return the value of an expression as soon as it is true."""
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            if value := self.js(expression):
                return value
            time.sleep(0.05)
        raise AssertionError(f"never true: {expression}")

    def hover(self, selector: str) -> None:
        """Move the mouse to the middle of an element."""
        place = self.js(
            f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView(); "
            "const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for step in (5, 0):
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=place[0] - step, y=place[1])

    def screenshot(self, path: Path) -> bytes:
        """The page as PNG, also written to `path`."""
        found = base64.b64decode(self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"])
        path.write_bytes(found)
        return found

    def problems(self) -> list[str]:
        """Return script errors and policy violations since the page was opened."""
        self.js("1")  # events before the answer are read
        return [
            json.dumps(event["params"])
            for event in self.events
            if event.get("method") == "Runtime.exceptionThrown"
            or (event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error")
        ]

    def requested(self) -> list[str]:
        """Return the addresses that the page has requested."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start a browser with a profile in `folder`; it ends with the block."""
    assert CHROMIUM
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()

    def as_three_and_four() -> None:
        os.dup2(os.dup(to_read), 63), os.dup2(os.dup(from_write), 64)  # first out of the way of each other
        os.dup2(63, 3), os.dup2(64, 4)

    process = subprocess.Popen(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--window-size=1200,1600", f"--user-data-dir={folder}", "--remote-debugging-pipe",
        ],
        preexec_fn=as_three_and_four, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(to_read), os.close(from_write)
    try:
        yield Browser(from_read, to_write)
    finally:
        os.close(to_write), os.close(from_read)
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
