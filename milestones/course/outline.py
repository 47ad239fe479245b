"""Find the symbols of a Python file, and their lines with the decorators and comments above them.

The symbols are those of `DELTA.toml`: functions, methods, a class without its methods, and
`<module>` for all other lines.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

MODULE = "<module>"
Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


@dataclass(frozen=True)
class Line:
    """A line of a file: its number, counted from 1, and its text without the line break."""

    number: int
    text: str


@dataclass(frozen=True)
class Span:
    """Lines of a file, counted from 1, including both ends."""

    first: int
    last: int


def definitions(tree: ast.Module) -> Iterator[tuple[str, Definition]]:
    """Yield the functions, classes and methods of a file by name, a class before its methods.

    A property and its setter share a name.
    """
    for node in tree.body:
        if isinstance(node, Definition):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, Function):
                    yield f"{node.name}.{method.name}", method


def span_of(node: ast.stmt, lines: list[str]) -> Span:
    """Return the lines of a definition, with its decorators and the comments directly above."""
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
    while first > 1 and lines[first - 2].startswith(f"{' ' * node.col_offset}#"):
        first -= 1
    return Span(first, node.end_lineno or node.lineno)


def outline(text: str) -> dict[str, list[Line]]:
    """Return the lines of each symbol, in the order of the file. The parts of a symbol are joined.

    Every line that is not blank belongs to exactly one symbol. Raises `SyntaxError`.
    """
    lines = text.splitlines()
    owner = [MODULE] * len(lines)
    for name, node in definitions(ast.parse(text)):
        span = span_of(node, lines)
        owner[span.first - 1 : span.last] = [name] * (span.last - span.first + 1)
    found: dict[str, list[Line]] = {}
    for number, (name, line) in enumerate(zip(owner, lines, strict=True), start=1):
        found.setdefault(name, []).append(Line(number, line))
    return {name: kept for name, part in found.items() if (kept := _trimmed(part))}


def symbol_at(text: str, number: int) -> str:
    """Return the symbol of a line (counted from 1); `<module>` in a file that does not parse."""
    try:
        for name, lines in outline(text).items():
            if any(line.number == number for line in lines):
                return name
    except SyntaxError:
        pass
    return MODULE


def _trimmed(lines: list[Line]) -> list[Line]:
    """Remove blank lines at both ends, and keep one between two parts that do not touch."""
    kept: list[Line] = []
    gap = False
    for line in lines:
        if not line.text.strip():
            gap = bool(kept)
            blank = line
            continue
        if gap:
            kept.append(blank)
        gap = False
        kept.append(line)
    return kept
