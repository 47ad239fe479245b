"""The pages of the exercises that a reader can do in a tab, and the links that lead to them.

A page has the section of the handout, and below "Run" an editor. It lies beside the handout, so the
links of the section stay right. Without scripts, it shows the file to write.
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import partial
from html import escape
from pathlib import Path

from ..chain import course_place, find_engine
from ..course.catalog import load
from ..course.exercise import Exercise
from ..course.student.section import sections_of
from .exercise_files import ExerciseFiles, exercises
from .staging import Staging

EDITOR = "<!-- the editor -->"
RUN = re.compile(r"\*\*Run\.\*\*.*?\n\n", re.DOTALL)


def lay_out(staging: Staging, files: ExerciseFiles) -> None:
    """Write the pages, and link them in the handouts."""
    for exercise in exercises():
        handout = f"{course_place(exercise.milestone)}/README.md"
        text = staging.linked(page_text(exercise), handout)
        editor = staging.html(html_of(exercise, files))
        staging.write(page_of(exercise), text.replace(EDITOR, editor))
        staging.change(handout, partial(with_link, exercise))


def with_link(exercise: Exercise, handout: str) -> str:
    """Return a handout with a link to the page of an exercise, below its heading."""
    heading = f"## {exercise.id}: {exercise.title}\n"
    link = f"[Write it in the browser]({Path(page_of(exercise)).name})"
    return handout.replace(heading, f"{heading}\n{link}\n")


def page_of(exercise: Exercise) -> str:
    """Return the path of a page in the sources of the site."""
    return f"{course_place(exercise.milestone)}/{exercise.id.replace('.', '_')}.md"


def page_text(exercise: Exercise) -> str:
    """Return the text of a page: the section of the handout, with an editor."""
    [section] = sections_of(exercise.id)
    text, found = RUN.subn(lambda run: f"{run[0]}{EDITOR}\n\n", section.text, count=1)
    assert found, f"the section of {exercise.id} has no paragraph **Run.**"
    back = f"All exercises of the milestone are in [its handout](README.md#{exercise.anchor})."
    front = "---\nnosearch: true\n---\n"  # the handout has the same words
    return f"{front}\n# {exercise.id}: {exercise.title}\n{text}\n{back}\n"


def listed(name: str) -> str:
    """Return the exercises of a milestone as a table, with links for a page at the top."""
    milestone = find_engine(name)
    rows = ["| exercise | what you build | points | where |", "|---|---|---|---|"]
    for exercise in load(milestone):
        here = exercise in exercises()
        link, where = (page_of(exercise), "in this book") if here else (exercise.section, "handout")
        rows.append(
            f"| [{exercise.id} {exercise.title}]({link}) | {exercise.summary} "
            f"| {exercise.points} | {where} |"
        )
    return "\n".join(rows)


def html_of(exercise: Exercise, files: ExerciseFiles) -> str:
    """Return the editor of an exercise."""
    texts = {source: files.start(source) for source in exercise.sources}
    about = {
        "id": exercise.id,
        "milestone": exercise.milestone,
        "symbols": [re.split("[.:]", symbol)[-1] for symbol in exercise.symbols],
        "versions": {source: version_of(text) for source, text in texts.items()},
    }
    functions = ", ".join(f'<code class="literal">{name}</code>' for name in about["symbols"])
    blocks = "".join(
        f'<details class="start"><summary>{escape(source)}, as you get it</summary>'
        f'<pre data-file="{escape(source)}">{escape(text)}</pre></details>'
        for source, text in texts.items()
    )
    return f"""
<section class="exercise" id="editor" data-exercise="{escape(json.dumps(about))}"
  aria-labelledby="editor-title">
<p class="live-title" id="editor-title">Write it here</p>
<p>Write {functions}. <em>Check</em> runs the tests of the course in this tab. Your text stays in
this browser. Esc, then Tab leaves the editor; Ctrl-Enter checks.</p>
{blocks}
<div class="work" hidden>
<div class="renewal" hidden></div>
<div class="files" role="group" aria-label="files"></div>
<div class="editor"></div>
<div class="buttons"><button type="button" class="check">Check</button>
<button type="button" class="reset">Start this exercise again</button>
<button type="button" class="export">Save my work as a zip</button></div>
<p class="status" role="status"></p>
<div class="report" role="region" aria-label="the result of the check" aria-live="polite"></div>
</div>
<noscript><p>The editor needs JavaScript. All else on this page does not.</p></noscript>
</section>
"""


def version_of(text: str) -> str:
    """Return a short name for the version of a file."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]
