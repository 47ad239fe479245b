"""Drive Chromium without a window, over a pipe: one process for all decks, and no web driver."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from typing_extensions import Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "microsoft-edge")
APPLICATIONS = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)
PATIENCE_SECONDS = 60
# The browser reads commands from file descriptor 3 and writes answers to 4. Our pipes have other
# numbers, so they are duplicated to these.
LAUNCH = """import fcntl, os, sys
ours = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
os.dup2(ours[0], 3), os.dup2(ours[1], 4)
os.execv(sys.argv[3], sys.argv[3:])"""
MISSING = "no Chromium or Chrome was found; on Debian or Ubuntu: apt-get install chromium"


def find() -> str | None:
    """Return the path of an installed browser, or None."""
    for name in (*NAMES, *APPLICATIONS):
        if found := shutil.which(name):
            return found
    return None


def install() -> str | None:
    """Install Chromium with apt-get as root and return its path. Otherwise return None."""
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        return None
    for command in (["update", "-qq"], ["install", "-y", "-qq", "chromium"]):
        if subprocess.run(["apt-get", *command], stdout=subprocess.DEVNULL).returncode != 0:
            return None
    return find()


class Browser:
    """A page of 1280 by 720 pixels. `errors` collects the errors of the console and of scripts."""

    def __init__(self, program: str) -> None:
        self.errors: list[str] = []
        self._number = 0
        self._profile = tempfile.TemporaryDirectory(prefix="slides-", ignore_cleanup_errors=True)
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        options = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-extensions",
            "--hide-scrollbars", "--disable-popup-blocking", "--no-first-run",
            "--disable-background-networking",
            "--force-color-profile=srgb", "--font-render-hinting=none", "--remote-debugging-pipe",
            f"--user-data-dir={self._profile.name}", "--window-size=1280,720", "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-SEc", LAUNCH, str(to_read), str(to_write), program, *options],
            pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self._rest = b""
        self._session: str | None = None
        pages = self.ask("Target.getTargets")["targetInfos"]
        target = next(page["targetId"] for page in pages if page["type"] == "page")
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=1280, height=720, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._to)  # The browser ends when its pipe is closed.
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._from)
        self._profile.cleanup()

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its answer. Raises `RuntimeError` if the answer is an error."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        while (answer := self._read()).get("id") != self._number:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return dict(answer["result"])

    def open(self, address: str) -> None:
        """Open an address and wait until its deck is ready."""
        self.errors.clear()
        self.ask("Page.navigate", url=address)
        self.evaluate(
            "new Promise(done => { const look = () => document.readyState === 'complete' &&"
            " window.Reveal && Reveal.isReady() ? document.fonts.ready.then(() => done(1))"
            " : setTimeout(look, 20); look(); })"
        )

    def evaluate(self, script: str) -> Any:
        """Evaluate an expression on the page and return its value. A promise is awaited."""
        done = self.ask(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in done:
            raise RuntimeError(str(done["exceptionDetails"])[:2000])
        return done["result"].get("value")

    def picture(self, path: Path) -> None:
        """Save a screenshot of the page as a PNG file."""
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))

    def pdf(self, path: Path) -> None:
        """Save the deck as a PDF file with one slide per page."""
        made = self.ask("Page.printToPDF", printBackground=True, preferCSSPageSize=True)
        path.write_bytes(base64.b64decode(made["data"]))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._from], [], [], PATIENCE_SECONDS)[0]:
                raise RuntimeError(f"the browser sent no answer for {PATIENCE_SECONDS} seconds")
            piece = os.read(self._from, 1 << 20)
            if not piece:
                raise RuntimeError("the browser has closed its pipe")
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"].get("exception", params))[:500])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(str([arg.get("value") for arg in params["args"]]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
