"""Find the source of the call that a test makes, for a student who does not read the test."""

from __future__ import annotations

import ast
from pathlib import Path

MIRRORED = {"==": "==", "!=": "!=", "<": ">", ">": "<", "<=": ">=", ">=": "<="}
SIGNS: dict[type[ast.cmpop], str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in",
}  # fmt: skip


def part_of_chain(
    test: ast.Compare, op: str, left: str, right: str
) -> tuple[ast.expr, str, str, str] | None:
    """Return the comparison of a chain that is false: what is called, sign, result, expected.

    pytest says which sign and which two values, but not at which place of `a == 8 == b`. Returns
    None if several places are possible.
    """
    sides = [test.left, *test.comparators]
    if len(test.ops) == 1:
        return test.left, op, left, right
    places = [
        place
        for place, sign in enumerate(test.ops)
        if SIGNS[type(sign)] == op
        and could_be(sides[place], left)
        and could_be(sides[place + 1], right)
    ]
    if len(places) != 1:
        return None
    first, second = sides[places[0]], sides[places[0] + 1]
    if isinstance(first, ast.Constant) and op in MIRRORED:
        return second, MIRRORED[op], right, left
    return first, op, left, right


def could_be(source: ast.expr, value: str) -> bool:
    """Return whether an expression may have a value. A constant has only its own."""
    return not isinstance(source, ast.Constant) or repr(source.value) == value


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
