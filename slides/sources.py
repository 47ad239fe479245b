"""Code for slides. It is taken from the sources by symbol and trimmed by commands of the slide.

A symbol is `file.py:Class.method` or `file.py:function`, in a folder. The slide writes its trimming
commands below the symbol, one per line. The build fails if the code lacks the text of a command:

    docstring            show the docstring, which is left out otherwise
    cut: first .. last   replace these lines by an ellipsis (`cut: line` for one line)
    drop: first .. last  leave these lines out
    from: line           begin at this line
    bare: line           leave out the comment at the end of this line
    mark: first .. last  highlight these lines and dim the others
"""

from __future__ import annotations

import ast
import difflib
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from milestones.course.catalog import CatalogError, find_mutant

ROOT = Path(__file__).resolve().parent.parent
ELLIPSIS = "…"
QUOTES = '"' * 3  # of a docstring
NEXT = re.compile(r"\s*(async def |def |class |@)")  # where another definition begins


class BuildError(Exception):
    """A deck cannot be built. The message names the slide and says what to do."""


@dataclass
class Line:
    """A line of code: `kind` is `same`, `mark`, `dim`, `add` or `del`."""

    text: str
    kind: str = "same"


def definition(place: str) -> tuple[ast.AST, list[str]]:
    """Return the syntax tree of a symbol and the lines of its file. Raises `BuildError`."""
    file, _, name = place.partition(":")
    path = ROOT / file
    if not path.exists():
        raise BuildError(f"{file} is gone (the slide shows {place})")
    lines = path.read_text(encoding="utf-8").splitlines()
    body: list[ast.stmt] = ast.parse("\n".join(lines)).body
    node: ast.AST | None = None
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
        node = next((n for n in body if isinstance(n, kinds) and n.name == part), None)
        if node is None:
            raise BuildError(f"{place}: there is no {part!r} any more")
        body = node.body
    assert node is not None
    return node, lines


def code_of(place: str, keep_docstring: bool = False) -> list[str]:
    """Return the lines of a symbol with decorators, without its docstring and its indentation."""
    node, lines = definition(place)
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])  # type: ignore[attr-defined]
    numbers = set(range(first, node.end_lineno + 1))  # type: ignore[attr-defined]
    doc = node.body[0]  # type: ignore[attr-defined]
    if not keep_docstring and ast.get_docstring(node) is not None:  # type: ignore[arg-type]
        numbers -= set(range(doc.lineno, doc.end_lineno + 1))
    text = "\n".join(lines[n - 1] for n in sorted(numbers))
    return textwrap.dedent(text).splitlines()


def trimmed(place: str, commands: str) -> list[Line]:
    """Return the lines of a symbol after the trimming commands of a slide."""
    orders = [line.strip() for line in commands.splitlines() if line.strip()]
    code = [Line(text) for text in code_of(place, "docstring" in orders)]
    for order in orders:
        if order != "docstring":
            verb, _, what = order.partition(":")
            code = _apply(place, code, verb.strip(), what.strip())
    while code and not code[0].text.strip():
        code.pop(0)
    margin = min(_margin(line.text) for line in code if line.text.strip())
    for line in code:
        line.text = line.text[margin:]
    if any(line.kind == "mark" for line in code):
        for line in code:
            line.kind = "mark" if line.kind == "mark" else "dim"
    return code


def _apply(place: str, code: list[Line], verb: str, what: str) -> list[Line]:
    first, _, last = (part.strip() for part in what.partition(" .. "))
    begin = _find(place, code, first, 0)
    end = _find(place, code, last, begin) if last else begin
    if verb == "mark":
        for line in code[begin : end + 1]:
            line.kind = "mark"
        return code
    if verb == "bare":
        code[begin].text = code[begin].text.partition("  #")[0]
        return code
    if verb == "from":
        return [Line(_indent(code[begin].text) + ELLIPSIS), *code[begin:]] if begin else code
    if verb in ("cut", "drop"):
        dots = [Line(_indent(code[begin].text) + ELLIPSIS)] if verb == "cut" else []
        return [*code[:begin], *dots, *code[end + 1 :]]
    raise BuildError(f"{place}: {verb!r} is not a command; slides/sources.py lists the commands")


def _find(place: str, code: list[Line], text: str, start: int) -> int:
    found = [n for n, line in enumerate(code) if n >= start and text in line.text]
    if not text or not found:
        raise BuildError(f"{place}: no line has {text!r} any more")
    return found[0]


def _indent(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]


def difference(below: str, above: str, commands: str = "") -> list[Line]:
    """Return how a symbol changes between two milestones: removed lines, then added lines."""
    old, new = ([line.text for line in trimmed(place, "")] for place in (below, above))
    result: list[Line] = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, old, new, False).get_opcodes():
        if kind == "equal":
            result += [Line(text) for text in old[a:b]]
        else:
            result += [Line(text, "del") for text in old[a:b]]
            result += [Line(text, "add") for text in new[c:d]]
    for order in filter(None, map(str.strip, commands.splitlines())):
        verb, _, what = order.partition(":")
        result = _apply(above, result, verb.strip(), what.strip())
    return result


def mutant_lines(engine: str, name: str) -> list[Line]:
    """Return the changed lines of a mutant of the course, and those around them.

    Left out are a docstring before the change, and the next function after it.
    """
    try:
        _, _, hunk = find_mutant(engine, name, ROOT).patch.partition("\n@@ ")
    except CatalogError as error:
        raise BuildError(str(error)) from error
    rows = hunk.splitlines()[1:]
    changed = [number for number, row in enumerate(rows) if row[:1] in ("+", "-")]
    quotes = [number for number, row in enumerate(rows[: changed[0]]) if QUOTES in row]
    following = [n for n, row in enumerate(rows) if n > changed[-1] and NEXT.match(row[1:])]
    rows = rows[quotes[-1] + 1 if quotes else 0 : following[0] if following else None]
    while not rows[-1][1:].strip():
        rows.pop()
    margin = min(_margin(row[1:]) for row in rows if row[1:].strip())
    kinds = {"-": "del", "+": "add"}
    return [Line(row[1 + margin :], kinds.get(row[:1], "same")) for row in rows]


def _margin(text: str) -> int:
    return len(text) - len(text.lstrip())


def as_html(code: list[Line], caption: str = "", morph: str = "") -> str:
    """Return highlighted lines as HTML.

    morph: a prefix for the names of lines. A line moves to the line of that name on the next slide.
    Raises `BuildError` if the code begins or ends inside a docstring: all of it would be coloured
    as a string.
    """
    if sum(line.text.count(QUOTES) for line in code if line.kind != "del") % 2:
        raise BuildError(f"{caption}: the code begins or ends inside a docstring")
    formatter = HtmlFormatter(nowrap=True, classprefix="t-")
    text = "\n".join(line.text for line in code) + "\n"
    rows = highlight(text, PythonLexer(stripnl=False), formatter).splitlines()
    seen: dict[str, int] = {}
    parts = []
    for line, row in zip(code, rows, strict=True):
        key = line.text.strip()
        seen[key] = seen.get(key, 0) + 1
        name = f' data-id="{morph}{abs(hash_of(key)):x}-{seen[key]}"' if morph and key else ""
        sign = {"add": "+", "del": "-"}.get(line.kind, " ")
        signs = f'<i aria-hidden="true">{sign}</i>' if _is_diff(code) else ""
        parts.append(f'<span class="line {line.kind}"{name}>{signs}{row or " "}</span>')
    size = font_size([line.text for line in code])
    title = f"<figcaption>{caption}</figcaption>" if caption else ""
    inner = f'<pre><code style="--size: {size}">{"".join(parts)}</code></pre>'
    return f'<figure class="code">{title}{inner}</figure>'


def font_size(lines: list[str], width: float = 1090, height: float = 430) -> int:
    """Return the largest size, from 20 to 24 pixels, at which the code fits beside some text."""
    widest = max(map(len, lines))
    return int(max(20, min(24, width / (0.602 * widest), height / (1.34 * len(lines)))))


def _is_diff(code: list[Line]) -> bool:
    return any(line.kind in ("add", "del") for line in code)


def hash_of(text: str) -> int:
    """Return a hash that is the same in every process, unlike `hash`."""
    return int.from_bytes(text.encode(), "big") % 1_000_003
