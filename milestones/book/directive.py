"""Directives in a page.

{live} triangle      a figure
{made} FILE          HTML that the site has made: a file in the folder of the sources
{frame} PAGE         another page of the site in a frame; the text below is its title
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

from .figure import Control, Figure
from .figures import figure


class Live(Directive):
    """A figure that runs in the page."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the figure as HTML."""
        return [nodes.raw("", html_of(figure(self.arguments[0])), format="html")]


class Made(Directive):
    """HTML that was made with the sources."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the file as HTML."""
        path = Path(self.state.document.settings.env.srcdir) / self.arguments[0]
        return [nodes.raw("", path.read_text("utf-8"), format="html")]


class Frame(Directive):
    """Another page in a frame. The path is that from the top of the site."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the frame as HTML, with a link to the page."""
        up = "../" * self.state.document.settings.env.docname.count("/")
        address, title = escape(up + self.arguments[0]), escape(" ".join(self.content))
        kind = " slides" if address.endswith(".html") else ""
        html = (
            f'<figure class="frame{kind}">'
            f'<iframe src="{address}" title="{title}" loading="lazy"></iframe>'
            f'<figcaption><a href="{address}">{title}</a></figcaption></figure>'
        )
        return [nodes.raw("", html, format="html")]


def html_of(shown: Figure) -> str:
    """Return a figure as it is without scripts: its first drawing, and the answer in a fold."""
    first, asked = shown.shown({}), shown.shown(shown.asked)
    data = escape(json.dumps(shown.described()))
    controls = "".join(map(control_html, shown.controls))
    return f"""
<section class="live" id="figure-{shown.name}" data-figure="{data}" data-answer="{asked.answer}"
  aria-labelledby="figure-{shown.name}-title">
<p class="live-title" id="figure-{shown.name}-title">{escape(shown.title)}</p>
<p class="question">{escape(shown.question)}</p>
<form class="guess" hidden><label>Your guess
<input type="number" inputmode="numeric" required></label>
<button>Compare</button> <output></output></form>
<details class="answer"><summary>The answer</summary>
<div class="drawing" tabindex="0">{asked.svg}</div><p>{escape(asked.words)}</p></details>
<form class="controls" hidden>{controls}<button type="reset">Reset</button></form>
<div class="drawing now" tabindex="0">{first.svg}</div>
<p class="words" role="status">{escape(first.words)}</p>
</section>
"""


def control_html(control: Control) -> str:
    """Return a control with its label."""
    name, first = f'name="{control.name}"', escape(str(control.first))
    if control.kind == "text":
        rows = max(4, first.count("\n") + 2)
        field = f'<textarea {name} rows="{rows}" spellcheck="false">{first}</textarea>'
    elif control.kind == "select":
        options = "".join(
            f'<option value="{number}"{" selected" * (number == control.first)}>{escape(words)}'
            for number, words in enumerate(control.choices)
        )
        field = f"<select {name}>{options}</select>"
    elif control.kind == "checkbox":
        field = f'<input type="checkbox" {name}{" checked" * bool(control.first)}>'
    else:
        limits = f'min="{control.low}" max="{control.high}"'
        field = f'<input type="range" {name} value="{first}" {limits}><output>{first}</output>'
    return f"<label>{escape(control.label)} {field}</label> "


def setup(app: Any) -> dict[str, bool]:
    """Register the directive. Sphinx calls this."""
    app.add_directive("live", Live)
    app.add_directive("made", Made)
    app.add_directive("frame", Frame)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
