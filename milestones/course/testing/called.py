"""Read in the source of a test what the test calls, so that `check` can say it in words."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

Node = TypeVar("Node", ast.stmt, ast.FunctionDef)


def statement_at(path: Path, line: int) -> ast.stmt | None:
    """Return the innermost statement of a file that contains a line."""
    return next(nodes_at(path, line, ast.stmt), None)


def nodes_at(path: Path, line: int, kind: type[Node]) -> Iterator[Node]:
    """Yield the nodes of a kind that contain a line of a file, the innermost one first."""
    around = [
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, kind) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    yield from sorted(around, key=lambda node: (-node.lineno, node.end_lineno or 0))


def called_by(expression: ast.expr, path: Path, line: int) -> str | None:
    """Return the source of an expression.

    For a variable, return the last call that was assigned to it, or None if there is none.
    """
    if not isinstance(expression, ast.Name):
        return ast.unparse(expression)
    function = next(nodes_at(path, line, ast.FunctionDef), None)
    given = [
        value
        for node in (ast.walk(function) if function else ())
        if isinstance(node, ast.Assign) and node.lineno < line
        for target in node.targets
        if (value := value_for(expression.id, target, node.value)) is not None
    ]
    last = max(given, key=lambda value: value.lineno, default=None)
    has_call = last and any(isinstance(inner, ast.Call) for inner in ast.walk(last))
    return ast.unparse(last) if last and has_call else None


def value_for(name: str, target: ast.expr, value: ast.expr) -> ast.expr | None:
    """Return what a variable is assigned, or None if this assignment does not set it."""
    if isinstance(target, ast.Name):
        return value if target.id == name else None
    if not isinstance(target, (ast.Tuple, ast.List)):
        return None
    parts = value.elts if isinstance(value, ast.Tuple) else []
    if len(parts) != len(target.elts):
        parts = [value] * len(target.elts)
    found = (value_for(name, *pair) for pair in zip(target.elts, parts, strict=True))
    return next((part for part in found if part is not None), None)
