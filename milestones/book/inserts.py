"""What the site puts in the place of a comment in a chapter: tables that are made from the course.

<!-- road of m3 -->         the chapters as steps of a ladder, and which of them this one is
<!-- exercises of m3 -->    its exercises, with links to their pages
<!-- stops of m3 -->        the stops of the difference to the milestone below
<!-- names of m3 -->        its rows of WHERE.md: names of vLLM and SGLang
"""

from __future__ import annotations

import posixpath
import re

from ..chain import ROOT, milestones, short
from . import diff_pages, exercise_pages
from .staging import CHAPTERS, Staging

WHERE = "milestones/docs/WHERE.md"
COMMENT = re.compile(r"<!-- (road|exercises|stops|names) of (m\d) -->")
ROW = re.compile(r"^\| (?P<name>.*?) \| (?P<meaning>.*?) \| (?P<ours>.*?) \| (?P<other>.*?) ?\|$")
OF_FIRST = re.compile(r"^`[\w.]+` in `(engine|scheduler|model_runner|schedule_batch)\.py`$")


def fill(staging: Staging) -> None:
    """Fill the chapters, which stand at the top of the site."""
    tables = {
        "road": road, "exercises": exercise_pages.listed, "stops": diff_pages.listed,
        "names": names_of,
    }  # fmt: skip
    for chapter in sorted(staging.folder.glob("*.md")):
        staging.change(
            chapter.name,
            lambda text: COMMENT.sub(lambda found: tables[found[1]](found[2]), text),
        )


def road(milestone: str) -> str:
    """Return links to the chapters of all milestones. milestone: that of this chapter."""
    steps = []
    for name in map(short, milestones()):
        title = (ROOT / CHAPTERS / f"{name}.md").read_text("utf-8").partition("\n")[0]
        here = ' aria-current="step"' if name == milestone else ""
        steps.append(f'<li><a href="{name}.html"{here}>{title.removeprefix("# ")}</a></li>')
    return f'<nav class="road" aria-label="The chapters"><ol>{"".join(steps)}</ol></nav>'


def names_of(milestone: str) -> str:
    """Return the names of vLLM and SGLang for what a milestone adds, in a fold."""
    text = (ROOT / WHERE).read_text("utf-8").replace("](#", f"]({WHERE}#")
    text = re.sub(r"\]\((?=\w+\.md)", f"]({posixpath.dirname(WHERE)}/", text)
    names = text.partition("## Names\n")[2].partition("\n## ")[0]
    rows = [found for line in names.splitlines() if (found := ROW.match(line))]
    mine = [row for row in rows if added_by(row["ours"]) == milestone]
    body = "\n".join(
        f"| {row['name']} | {row['meaning']} | {row['ours'].partition(' (')[0]} | {row['other']} |"
        for row in mine
    )
    return (
        f"<details><summary>{len(mine)} names of their code</summary>\n\n"
        f"| name | in vLLM or SGLang | here | difference |\n|---|---|---|---|\n{body}\n\n</details>"
    )


def added_by(ours: str) -> str:
    """Return the milestone that adds a symbol, as a row of WHERE.md marks it; "" for others."""
    if found := re.search(r" \((?:from )?(m\d)\)$", ours):
        return found[1]
    return "m1" if OF_FIRST.match(ours) else ""
