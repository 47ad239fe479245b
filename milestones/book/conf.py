"""The settings of Sphinx. `command.py` runs it on the folder that `staging.py` has filled."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from milestones.book.address import SITE, card  # noqa: E402


def commit() -> str:
    """Return the commit of this tree, or "" if it has no history."""
    done = subprocess.run(
        ["git", "rev-parse", "--short=7", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return done.stdout.strip()


project = "LLM Ladder"
extensions = ["myst_parser", "milestones.book.directive"]
exclude_patterns = ["repo"]
root_doc = "index"
html_baseurl = SITE
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = "LLM Ladder"
html_static_path = [str(Path(__file__).parent / "static")]
html_extra_path = [str(ROOT / "build/book/_extra")]
html_favicon = str(ROOT / "build/book/favicon.svg")
html_css_files = ["book.css", "theme.css"]
html_js_files = [("book.js", {"type": "module"})]
html_copy_source = html_show_sourcelink = False
html_permalinks = False
html_theme_options = {"navigation_with_keys": False}
copyright = f"commit {commit()}" if commit() else "the authors"
pygments_style, pygments_dark_style = "default", "github-dark"
nitpicky = True


def setup(app: Any) -> None:
    """Add the tags of the card to each page. Sphinx calls this."""
    app.connect("html-page-context", add_card)


def add_card(_app: Any, _page: str, _template: str, context: dict[str, Any], _tree: Any) -> None:
    """Add them to one page."""
    context["metatags"] = context.get("metatags", "") + card(SITE)
