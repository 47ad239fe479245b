"""Find the source of the call that a test makes, for a student who does not read the test."""

from __future__ import annotations

import ast
from pathlib import Path


def called_by(expression: ast.expr, path: Path, line: int) -> str | None:
    """Return the source of an expression. For a variable, return the last call that was assigned
    to it, or None if there is none."""
    if not isinstance(expression, ast.Name):
        return ast.unparse(expression)
    function = function_at(path, line)
    given = [
        value
        for node in (ast.walk(function) if function else ())
        if isinstance(node, ast.Assign) and node.lineno < line
        for target in node.targets
        if (value := value_for(expression.id, target, node.value)) is not None
    ]
    last = max(given, key=lambda value: value.lineno, default=None)
    return ast.unparse(last) if last is not None and calls(last) else None


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


def calls(node: ast.AST) -> bool:
    """Return whether a node contains a call."""
    return any(isinstance(inner, ast.Call) for inner in ast.walk(node))


def function_at(path: Path, line: int) -> ast.AST | None:
    """Return the innermost function of a file that contains a line."""
    around = [
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    return max(around, key=lambda node: node.lineno, default=None)
