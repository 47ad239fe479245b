"""Take the pictures of the player, light and dark, in Chromium.

`python -m milestones.staff.maintain.figures_player` runs the demo of the highest milestone in
virtual time, and takes the pictures of one of its steps.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from slides.browser import MISSING, Browser, find

from ...chain import ROOT, course_place, milestones

MILESTONE = milestones()[-1]
SIZE = {"width": 1440, "height": 960}
STEP = 45  # many requests, and a tree with several readers


def file_of(scheme: str) -> Path:
    """Return the file of a picture. scheme: light or dark."""
    return ROOT / course_place(MILESTONE) / f"player-{scheme}.png"


def main() -> None:
    """Run the demo, and write both pictures."""
    program = find()
    if program is None:
        raise SystemExit(MISSING)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "run.html"
        command = [sys.executable, "-m", f"{MILESTONE}.demo", "--plain", "--player", str(page)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        photograph(page, program)


def photograph(page: Path, program: str) -> None:
    """Write the pictures of a player's page."""
    with Browser(program) as browser:
        browser.ask("Emulation.setDeviceMetricsOverride", **SIZE, deviceScaleFactor=1, mobile=False)
        for scheme in ("light", "dark"):
            feature = {"name": "prefers-color-scheme", "value": scheme}
            browser.ask("Emulation.setEmulatedMedia", features=[feature])
            browser.ask("Page.navigate", url=f"{page.as_uri()}#step={STEP}")
            loaded = "new Promise(done => setTimeout(() => done(1), 500))"
            browser.evaluate(loaded)
            browser.picture(file_of(scheme))


if __name__ == "__main__":
    main()
