"""Look up the files and the symbols that a page of the project names as code."""

from __future__ import annotations

import ast
import builtins
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from milestones.chain import sources
from tests.conftest import ENGINES, MILESTONES, ROOT

SYMBOL = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
OURS = re.compile(r"`[\w.]+` in `[\w/]+\.py`(?: \((?P<since>from )?(?P<mark>\w+)\))?")
FENCED = re.compile(r"^```\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def spans(text: str) -> list[str]:
    """Return what stands in backticks."""
    return re.findall(r"`([^`\n]+)`", text)


def is_path(span: str) -> bool:
    return "/" in span or span.endswith(".py")


def path_of(span: str, milestone: str) -> Path:
    """Return the path of `scheduler.py` in an engine, or of `common/request.py` from the root."""
    if "/" in span:
        return ROOT / span
    return sources(milestone, ROOT).get(span, ROOT / milestone / span)


@functools.cache
def defined(path: Path) -> frozenset[str]:
    """Return the functions, classes, members of classes and constants that a file defines."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        names |= _bound(node)
        if isinstance(node, ast.ClassDef):
            members = {name for statement in node.body for name in _bound(statement)}
            members |= {
                part.attr
                for part in ast.walk(node)
                if isinstance(part, ast.Attribute)
                and isinstance(part.ctx, ast.Store)
                and ast.unparse(part.value) == "self"
            }
            names |= {f"{node.name}.{member}" for member in members}
    return frozenset(names)


def _bound(node: ast.stmt) -> set[str]:
    """Return the names that a statement binds in its own scope."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return {
        part.id for target in targets if target for part in ast.walk(target)
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
    }  # fmt: skip


def highest_milestone(*texts: str) -> str:
    """Return the highest milestone that the first of these texts names that names one at all.

    If no text names a milestone, it is the highest one of the project.
    """
    for text in texts:
        if found := re.findall(r"\bm\d(?=\b|_)", text):
            return next(name for name in MILESTONES if name.startswith(max(found)))
    return MILESTONES[-1]


def missing_in_block(block: str, milestone: str) -> Iterator[str]:
    """Yield the paths of a paragraph or a cell that do not exist, and its undefined symbols.

    One of the files that the same block names must define each symbol.
    """
    named = spans(block)
    paths = [path_of(span, milestone) for span in named if is_path(span)]
    yield from (f"{path} does not exist" for path in paths if not path.exists())
    files = [path for path in paths if path.is_file()]
    for span in named:
        if is_path(span) or not SYMBOL.fullmatch(span):
            continue
        if (ROOT / span).is_dir() or hasattr(builtins, span):  # a package, `None`, `ValueError`
            continue
        if not any(span in defined(path) for path in files):
            yield f"{span} is not in {[str(path.relative_to(ROOT)) for path in files]}"


def missing_in_diagram(diagram: str, milestone: str) -> Iterator[str]:
    """Yield the paths of a diagram that do not exist, and its undefined symbols.

    A line may begin with a file and one of its symbols. If the symbol stands further to the right
    than that of a line above, the file of that line must call it.
    """
    callers: list[tuple[int, Path]] = []
    for line in diagram.splitlines():
        for name in re.findall(r"[\w/]+\.py\b", line):
            if not path_of(name, milestone).is_file():
                yield f"{name} does not exist in {milestone}"
        call = re.match(r"(\S+\.py) +([A-Za-z_][\w.]*)", line)
        if call is None or not (path := path_of(call[1], milestone)).is_file():
            continue
        if call[2] not in defined(path):
            yield f"{call[2]} is not in {path.relative_to(ROOT)}"
        callers = [caller for caller in callers if caller[0] < call.start(2)]
        if callers:
            source = callers[-1][1]
            name = call[2].rpartition(".")[2]
            if not re.search(rf"\b{name}\b", source.read_text(encoding="utf-8")):
                yield f"{source.relative_to(ROOT)} does not call {call[2]}"
        callers.append((call.start(2), path))


def missing_in_page(text: str) -> Iterator[str]:
    """Yield all that is missing in a page. Its headings and blocks name the milestones."""
    for section in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
        heading, _, body = section.partition("\n") if section.startswith("#") else ("", "", section)
        for diagram in FENCED.findall(body):
            yield from missing_in_diagram(diagram, highest_milestone(heading))
        for block in re.split(r"\n\s*\n|\n(?=- |\|)", FENCED.sub("", body)):
            yield from missing_in_block(block, highest_milestone(block, heading))


def engines_of(ours: str) -> list[str]:
    """Return the engines that have the symbol of a cell, by its mark."""
    found = OURS.fullmatch(ours)
    assert found, f"write `symbol` in `file.py`, and perhaps (m2) or (from m3), not: {ours}"
    if found["mark"] in set(ENGINES) - set(MILESTONES):
        return [found["mark"]]
    if found["mark"] is None:
        return MILESTONES
    first = next(i for i, name in enumerate(MILESTONES) if name.startswith(found["mark"]))
    return MILESTONES[first:] if found["since"] else [MILESTONES[first]]


def wrong_in_ours(ours: str) -> Iterator[str]:
    """Yield what is wrong in a cell of a table: `symbol` in `file.py`, with its mark.

    The symbol must be in the engines of its mark, and in no other milestone.
    """
    symbol, file = spans(ours)
    having = engines_of(ours)
    for name in having:
        yield from missing_in_block(ours, name)
    for other in MILESTONES:
        path = path_of(file, other)
        if other not in having and path.exists() and symbol in defined(path):
            yield f"{other} has {symbol} as well"
