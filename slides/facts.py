"""Numbers for slides: `{{ladder.engines.m2_continuous.batch.tokens_per_second | .1f}}`.

A name is a file of recorded numbers, what follows leads into it; a list of numbers stands for its
median. Arithmetic works. `ladder` is what `python -m milestones bench --json` has written to
`milestones/results/ladder.json`; the others are in `slides/data/`.
"""

from __future__ import annotations

import ast
import functools
import json
import operator
import re
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from .freshness import fingerprint
from .sources import ROOT, BuildError

DATA = ROOT / "slides" / "data"
RESULTS = ROOT / "milestones" / "results"
OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def place_of(name: str) -> Path:
    """The file that a name stands for: a measured result first, a recorded run otherwise."""
    for folder in (RESULTS, DATA):
        if (folder / f"{name}.json").exists():
            return folder / f"{name}.json"
    raise BuildError(f"there is no {name}.json in milestones/results/ or slides/data/")


@functools.cache
def data(name: str) -> Any:
    """A file of recorded numbers. Raises `BuildError` if it was recorded from other code."""
    path = place_of(name)
    content = json.loads(path.read_text(encoding="utf-8"))
    if "fingerprint" in content and fingerprint(content["sources"]) != content["fingerprint"]:
        raise BuildError(
            f"{path.relative_to(ROOT)} is stale: the code it was recorded from has changed. "
            f"Run `python -m slides record {name}` and look at what it shows."
        )
    return content


def value(expression: str) -> Any:
    """What an expression comes to."""
    try:
        return _number(_evaluate(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, LookupError, TypeError, StopIteration, ZeroDivisionError) as error:
        raise BuildError(f"{{{{{expression}}}}}: {error!r}") from error


def _evaluate(node: ast.AST) -> Any:
    if isinstance(node, ast.Name):
        return data(node.id)
    if isinstance(node, ast.Attribute):
        return _evaluate(node.value)[node.attr]
    if isinstance(node, ast.Subscript):
        return _entry(_evaluate(node.value), _evaluate(node.slice))
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.BinOp):
        left, right = (_number(_evaluate(side)) for side in (node.left, node.right))
        return OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len":
        return len(_evaluate(node.args[0]))
    raise TypeError(f"{ast.unparse(node)} is not for slides")


def _entry(found: Any, key: Any) -> Any:
    """An entry by key or number; one of many records by its fields: `"name=m4_radix rows=16"`."""
    if isinstance(found, list) and isinstance(key, str):
        wanted = dict(pair.split("=") for pair in key.split())
        fits = (r for r in found if all(str(r[name]) == x for name, x in wanted.items()))
        return next(fits)
    return found[key]


def _number(found: Any) -> Any:
    is_numbers = (
        isinstance(found, list) and found and all(isinstance(x, (int, float)) for x in found)
    )
    return median(found) if is_numbers else found


def filled(text: str) -> str:
    """A text with its numbers in it."""

    def fill(match: re.Match[str]) -> str:
        expression, _, form = match[1].partition("|")
        found = value(expression)
        if isinstance(found, (dict, list)):
            raise BuildError(f"{{{{{expression}}}}} is no number")
        return format(found, form.strip())

    return re.sub(r"\{\{(.*?)\}\}", fill, text)
