"""A page in headless Chromium, for tests. Without Chromium, a test is skipped.

With LADDER_BROWSER=1 in the environment, such a test fails instead.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slides.browser import MISSING, PATIENCE_SECONDS, Browser, find


def find_browser() -> str:
    if program := find():
        return program
    if os.environ.get("LADDER_BROWSER") == "1":
        pytest.fail(MISSING)
    pytest.skip(MISSING)


class Tab(Browser):
    """A page in the browser. `errors` are its uncaught exceptions and console errors."""

    def wait_until(self, expression: str) -> None:
        """Wait for an expression in the page that must become true."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"not true: {expression}; {self.errors}"
            time.sleep(0.05)

    def resize(self, width: int, height: int) -> None:
        """Set the size of the window in CSS pixels."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height,
                 deviceScaleFactor=1, mobile=False)  # fmt: skip

    def press(self, key: str) -> None:
        """Press a key, such as `ArrowLeft`, or a character."""
        text = {"text": key} if len(key) == 1 else {}
        self.ask("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.ask("Input.dispatchKeyEvent", type="keyUp", key=key)


@contextmanager
def tab(folder: Path, url: str) -> Iterator[Tab]:
    """Open a page. The browser keeps its downloads in the folder."""
    with Tab(find_browser()) as page:
        page.ask("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
        page.ask("Page.navigate", url=url)
        yield page
