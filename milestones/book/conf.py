"""The settings of Sphinx. `command.py` runs it on the folder that `staging.py` has filled."""

from __future__ import annotations

import subprocess
import sys
from html import escape
from pathlib import Path
from textwrap import shorten
from typing import Any

from docutils import nodes

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from milestones.book.address import SITE, card  # noqa: E402


def commit() -> str:
    """Return the commit of this tree in words, or "" if it has no history."""
    done = subprocess.run(
        ["git", "rev-parse", "--short=7", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return f"commit {found}" if (found := done.stdout.strip()) else ""


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
html_css_files = ["book.css", "theme.css"]
html_js_files = [("book.js", {"type": "module"})]
html_copy_source = html_show_sourcelink = False
html_permalinks = False
html_theme_options = {"navigation_with_keys": False}
copyright = ", ".join(["the authors", *filter(None, [commit()])])
pygments_style, pygments_dark_style = "default", "github-dark"
nitpicky = True


def setup(app: Any) -> None:
    """Add tags to each page. Sphinx calls this."""
    app.connect("html-page-context", add_tags)


def add_tags(_app: Any, _page: str, _template: str, context: dict[str, Any], tree: Any) -> None:
    """Add the description of a page, for search engines, and the tags of the card."""
    context["metatags"] = context.get("metatags", "") + description(tree) + card(SITE)


def description(tree: nodes.document | None) -> str:
    """Return the tag with the first paragraph of a page; "" if it has none."""
    paragraphs = tree.findall(nodes.paragraph) if tree else ()
    texts = (" ".join(paragraph.astext().split()) for paragraph in paragraphs)
    text = next((text for text in texts if len(text) > 40), "")
    words = escape(shorten(text, 155, placeholder=" …"))
    return f'<meta name="description" content="{words}">' if words else ""
