"""Headless Chromium, driven through its debugging pipe. Without Chromium, a test is skipped.

With LADDER_BROWSER=1 in the environment, such a test fails instead.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 60.0  # seconds: a test fails after them
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-extensions")
# Chromium reads commands from file 3, and writes answers to file 4.
STARTER = """
import os, sys
from fcntl import F_DUPFD, fcntl
reads, writes = (fcntl(int(number), F_DUPFD, 10) for number in sys.argv[1:3])
os.dup2(reads, 3)
os.dup2(writes, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_browser() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    reason = "no Chromium on PATH; on Debian or Ubuntu: apt-get install chromium"
    if os.environ.get("LADDER_BROWSER") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


class Tab:
    """A page in the browser. `problems` are its uncaught exceptions and console errors."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self.problems: list[str] = []
        self._to, self._from = to_browser, from_browser
        self._buffer = b""
        self._number = 0
        self._session: dict[str, str] = {}
        targets = self.call("Target.getTargets")["targetInfos"]
        (page,) = [target for target in targets if target["type"] == "page"]
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Call a method of the debugging protocol, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page. A promise is awaited."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, f"{expression}: {result}"
        return result["result"].get("value")

    def wait_until(self, expression: str) -> None:
        """Wait for an expression in the page that must become true."""
        deadline = time.monotonic() + PATIENCE
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"not true: {expression}; {self.problems}"
            time.sleep(0.05)

    def resize(self, width: int, height: int, scheme: str = "light") -> None:
        """Set the size of the window in CSS pixels, and the colour scheme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=False)  # fmt: skip
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write a picture of the window, or of the whole page."""
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(picture["data"]))

    def press(self, key: str) -> None:
        """Press a key, such as `ArrowLeft`, or a character."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def _read(self) -> dict[str, Any]:
        """Return the next message, and keep what it says about problems."""
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], PATIENCE)
            assert ready, "the browser does not answer"
            data = os.read(self._from, 1 << 16)
            assert data, "the browser has ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])
        elif message.get("method") == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.problems.append(str(params["args"]))
        return message


@contextmanager
def tab(folder: Path, url: str) -> Iterator[Tab]:
    """Open a page. The browser keeps its files and its downloads in the folder."""
    (reads, ours), (theirs, writes) = os.pipe(), os.pipe()
    starter = [sys.executable, "-c", STARTER, str(reads), str(writes)]
    command = [find_browser(), *OPTIONS, f"--user-data-dir={folder / 'profile'}",
               "--remote-debugging-pipe", "about:blank"]  # fmt: skip
    process = subprocess.Popen(
        [*starter, *command], pass_fds=(reads, writes), stderr=subprocess.DEVNULL
    )
    os.close(reads)
    os.close(writes)
    try:
        page = Tab(ours, theirs)
        page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
        page.call("Page.navigate", url=url)
        yield page
    finally:
        process.terminate()
        process.wait(PATIENCE)
        os.close(ours)
        os.close(theirs)
