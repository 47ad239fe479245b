"""A page for each bug of the museum: what was seen, the run in the player, and the question."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from common.tracing.player import page_of as player_page

from ..chain import short
from ..course.museum.exhibit import Exhibit, Json, exhibits
from ..course.student.failure_words import INVARIANTS
from .staging import Staging

FOLDER = "museum"
INDEX = "museum.md"
COMMENT = "<!-- exhibits -->"  # in the index


def lay_out(staging: Staging) -> None:
    """Write the pages, their runs, and the list of them."""
    for exhibit in exhibits():
        run = player_page(exhibit.recorded()["trace"])
        staging.write(f"_extra/{run_of(exhibit)}", run)
        form = staging.html(form_of(exhibit))
        text = "\n\n".join(blocks(exhibit, form))
        staging.write(f"{FOLDER}/{exhibit.id}.md", text)
    staging.change(INDEX, lambda text: text.replace(COMMENT, listed()))


def run_of(exhibit: Exhibit) -> str:
    """Return the path of the player's page with the run."""
    return f"{FOLDER}/run_{exhibit.id}.html"


def listed() -> str:
    """Return the exhibits as a table."""
    rows = ["| exhibit | engine | seen in |", "|---|---|---|"]
    for one in exhibits():
        rows.append(
            f"| [{one.title}]({FOLDER}/{one.id}.md) | {short(one.engine)} | {one.upstream} |"
        )
    return "\n".join(rows)


def blocks(exhibit: Exhibit, form: str) -> Iterator[str]:
    """Yield the parts of a page."""
    run = exhibit.recorded()
    yield f"# {exhibit.title}"
    yield f"*{exhibit.upstream}, rebuilt in {short(exhibit.engine)}.* {exhibit.seen}"
    yield "## The requests"
    yield requests_of(exhibit)
    yield "## The run"
    size = exhibit.workload["config"]["page_size"]
    yield f"A page has {size} tokens. {exhibit.look}"
    yield f"```{{frame}} {run_of(exhibit)}#step=1\nThe recorded run, from step 1\n```"
    if run["ended"]:
        yield f"The run ended with `{run['ended']}`."
    yield "The answers:"
    yield answers_of(run)
    yield "## Your diagnosis"
    yield "Which is the first step after which an invariant is broken, and which one?"
    yield form
    yield '<details class="answer"><summary>The answer</summary>'
    yield (
        f"Step {exhibit.step}, {exhibit.invariant}: {name_of(exhibit.invariant)}. "
        f"The check says: `{run['fault']['message']}`"
    )
    yield exhibit.answer
    yield f"The change of {exhibit.engine}:"
    yield f"```diff\n{exhibit.patch.read_text('utf-8').strip()}\n```"
    yield f"**The code that is right:** {exhibit.here}"
    yield f"[The thread of the other project]({exhibit.link})"
    yield "</details>\n"


def requests_of(exhibit: Exhibit) -> str:
    """Return the requests as a table, and when the cache is flushed."""
    rows = ["| | arrives | output | prompt |", "|---|---|---|---|"]
    for request in exhibit.workload["requests"]:
        when = f"before step {request['before']}" if "before" in request else "at the start"
        prompt = request["prompt"].replace("|", "\\|")
        rows.append(f"| {request['id']} | {when} | {request['max_tokens']} tokens | `{prompt}` |")
    if "reset_before" in exhibit.workload:
        rows.append(f"\nThe cache is flushed before step {exhibit.workload['reset_before']}.")
    return "\n".join(rows)


def answers_of(run: Json) -> str:
    """Return what each request got, and the right answer where it is another one."""
    rows = ["| | | answer | right answer |", "|---|---|---|---|"]
    for name, text in run["answers"].items():
        right = run["right"][name]
        same = text == right
        rows.append(
            f"| {name} | {'right' if same else 'wrong'} | `{text!r}` "
            f"| {'' if same else f'`{right!r}`'} |"
        )
    return "\n".join(rows)


def form_of(exhibit: Exhibit) -> str:
    """Return the form in which a visitor says step and invariant."""
    options = "".join(
        f'<option value="I{number}">I{number} {escape(name)}</option>'
        for number, (name, _) in INVARIANTS.items()
    )
    return (
        f'<form class="diagnosis" id="{exhibit.id}" hidden data-step="{exhibit.step}" '
        f'data-invariant="{exhibit.invariant}">'
        '<label>Step <input type="number" name="step" min="1" max="99" required></label>'
        f'<label>Invariant <select name="invariant">{options}</select></label>'
        '<button>Check</button> <output role="status"></output></form>'
    )


def name_of(invariant: str) -> str:
    """Return the name of an invariant: "Nothing leaks" for I3."""
    return INVARIANTS[int(invariant[1:])][0]
