"""Take the picture with which other sites show a link to the book, in Chromium.

`python -m milestones.staff.maintain.figures_card` writes it: the race of the five milestones at its
end. No page of the book has a tag for it before the book has an address.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from slides.browser import MISSING, Browser, find

from ...chain import ROOT

CARD = ROOT / "milestones/book/static/card.png"
SIZE = {"width": 1200, "height": 630}  # the size that most sites ask for
PAGE = """<!DOCTYPE html><meta charset="utf-8">
<style>
  body {{ margin: 0; padding: 28px 60px; background: #fff; color: #1a1a1a }}
  body {{ font: 30px/1.3 sans-serif }}
  h1 {{ margin: 0; font-size: 56px }}
  p {{ margin: 0 0 14px }}
  img {{ display: block; height: 440px; margin: auto }}
</style>
<h1>LLM Ladder</h1>
<p>Five small engines serve a language model, and run in this book.</p>
<img src="{race}">
"""


def main() -> None:
    """Write the picture."""
    program = find()
    if program is None:
        raise SystemExit(MISSING)
    with tempfile.TemporaryDirectory() as folder, Browser(program) as browser:
        page = Path(folder) / "card.html"
        race = (ROOT / "milestones/docs/ladder.svg").as_uri()
        page.write_text(PAGE.format(race=race), encoding="utf-8")
        browser.ask("Emulation.setDeviceMetricsOverride", **SIZE, deviceScaleFactor=1, mobile=False)
        reduced = {"name": "prefers-reduced-motion", "value": "reduce"}  # the end of the race
        browser.ask("Emulation.setEmulatedMedia", features=[reduced])
        browser.ask("Page.navigate", url=page.as_uri())
        browser.evaluate("new Promise(done => setTimeout(() => done(1), 500))")
        browser.picture(CARD)


if __name__ == "__main__":
    main()
