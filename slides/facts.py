"""Numbers for slides: `{{ladder.engines.m2_continuous.batch.tokens_per_second | .1f}}`.

The first name is a file of results or a recorded run, and the rest is the path to an entry of it. A
list of numbers stands for its median. Expressions can use arithmetic. `python -m milestones bench
--json` writes `milestones/docs/results/ladder.json`; `slides/data/` has the recorded runs.
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
RESULTS = ROOT / "milestones" / "docs" / "results"
# The worked examples that a build also writes as pages of the player: `slides/workloads.py`. They
# are the same three requests on each milestone, and a retraction. The handouts link to their steps.
RUN_PAGES = ("m1_example", "m2_example", "m3_retract", "m4_example", "m5_example")
OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def recorded(name: str) -> Any:
    """Return a measured result if there is one of this name, otherwise a recorded run."""
    if (RESULTS / f"{name}.json").exists():
        return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    file = file_of(name)
    runs = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if name not in runs:
        raise BuildError(
            f"there is no {name}.json in milestones/docs/results/, and no {name} in {file.name}"
        )
    return runs[name]


def file_of(name: str) -> Path:
    """Return the file of a recorded run: `m2.json` for `m2_example`, and `run_m2_example` too.

    The runs of all electives are in `electives.json`.
    """
    deck = name.removeprefix("run_").partition("_")[0]
    return DATA / f"{deck if re.fullmatch('m[0-9]', deck) else 'electives'}.json"


@functools.cache
def data(name: str) -> Any:
    """Return what `recorded` returns. Raises `BuildError` if it was recorded from other code."""
    content = recorded(name)
    if "fingerprint" in content and fingerprint(content["sources"]) != content["fingerprint"]:
        raise BuildError(
            f"{name} is stale: the code that it was recorded from has changed. "
            f"Run `python -m slides record {name}` and check the slides that show it."
        )
    return content


def value(expression: str) -> Any:
    """Return the value of an expression."""
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
    raise TypeError(f"slides cannot evaluate {ast.unparse(node)}")


def _entry(found: Any, key: Any) -> Any:
    """Return an entry by key or number, or a record by its fields: `"name=m4_radix rows=16"`."""
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
    """Return the text with a number in place of each expression in double braces."""

    def fill(match: re.Match[str]) -> str:
        expression, _, form = match[1].partition("|")
        found = value(expression)
        if isinstance(found, (dict, list)):
            raise BuildError(f"{{{{{expression}}}}} is not a number")
        return format(found, form.strip())

    return re.sub(r"\{\{(.*?)\}\}", fill, text)
