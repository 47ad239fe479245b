"""Find the lines of each symbol of a Python file, with its decorators and the comments above it.

The symbols are those of `DELTA.toml`: functions, methods, a class without its methods, and
`<module>` for all other lines.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

MODULE = "<module>"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Line:
    """A line of a file: its number, counted from 1, and its text without the line break."""

    number: int
    text: str


def outline(text: str) -> dict[str, list[Line]]:
    """Return the lines of each symbol, in the order of the file. The parts of a symbol are joined.

    Every line that is not blank belongs to exactly one symbol. Raises `SyntaxError`.
    """
    lines = text.splitlines()
    owner = [MODULE] * len(lines)
    for node in ast.parse(text).body:
        if isinstance(node, FUNCTIONS):
            _claim(owner, node, node.name, lines)
        elif isinstance(node, ast.ClassDef):
            _claim(owner, node, node.name, lines)
            for method in node.body:
                if isinstance(method, FUNCTIONS):
                    _claim(owner, method, f"{node.name}.{method.name}", lines)
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


def _claim(
    owner: list[str],
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef,
    name: str,
    lines: list[str],
) -> None:
    """Assign a node's lines, and those of the comment directly above, to a symbol."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    indent = " " * node.col_offset
    while first > 1 and lines[first - 2].startswith(f"{indent}#"):
        first -= 1
    last = node.end_lineno or node.lineno
    owner[first - 1 : last] = [name] * (last - first + 1)


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
