"""Cuts the solutions of exercises out of a rung's sources.

The body of each symbol becomes a `NotImplementedError` that names the exercise and its section of
the handout; the signature, the decorators, the docstring and what stands above stay. Then what only
those bodies needed goes:

- imports that nothing in the file uses any more;
- private helpers (`_name`: functions, methods, classes, constants) that only cut bodies used,
  unless the student is told of them: the handout, a hint, a test, a docstring or comment that
  stays names them. A public name is the rung's interface, and stays; so does a public constant,
  which is a parameter that no student could guess.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .imports import names_wanted, without_unused_imports
from .record import Exercise, RecordError

Function = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Cut:
    """The files of a rung that a cut changes, by path from the root, and the helpers that went."""

    files: dict[str, str]
    removed: tuple[str, ...]  # "m1_single/engine.py:LLMEngine._helper"


@dataclass(frozen=True)
class Span:
    """Lines of a file, from 1, both ends included."""

    first: int
    last: int


def cut(milestone: str, exercises: Iterable[Exercise], root: Path, told: str = "") -> Cut:
    """Cut the solutions of `exercises`; `told` is all that the student reads beside the sources."""
    folder = root / milestone
    before = {
        f"{milestone}/{path.relative_to(folder).as_posix()}": path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("*.py"))
    }
    files, owned = dict(before), set()
    for exercise in exercises:
        for symbol in exercise.symbols:
            name, _, qualified = symbol.partition(":")
            path = f"{milestone}/{name}"
            owned.add((path, qualified))
            files[path] = without_body(files[path], qualified, message(exercise, qualified), path)
    lost = words("\n".join(removed_lines(before[path], files[path]) for path in files))
    removed = tuple(_helpers_to_remove(files, lost, owned, told))
    for path, qualified in reversed(removed):
        files[path] = without_symbol(files[path], qualified)
    for path in files:
        if files[path] != before[path]:
            others = "\n".join([told, *(text for name, text in files.items() if name != path)])
            kept = names_wanted(Path(path).stem, others)
            files[path] = without_unused_imports(before[path], tidy(files[path]), kept)
            ast.parse(files[path], path)
    changed = {path: text for path, text in files.items() if text != before[path]}
    return Cut(changed, tuple(f"{path}:{name}" for path, name in removed))


def message(exercise: Exercise, symbol: str) -> tuple[str, str]:
    """The text of the error, in two parts."""
    return f"{exercise.id}: {symbol} is yours to write; see ", exercise.section


def without_body(source: str, symbol: str, parts: tuple[str, str], path: str = "") -> str:
    """A source with the body of a function or method replaced by a `NotImplementedError`."""
    nodes = [node for name, node in functions(ast.parse(source)) if name == symbol]
    if not nodes:
        raise RecordError(f"{path} has no function {symbol}")
    lines = source.splitlines()
    for node in reversed(nodes):
        span, indent = body_span(node, lines), " " * (node.col_offset + 4)
        head = "".join(lines[span.first - 1 : span.first])[: node.body[0].col_offset].rstrip()
        raised = [
            f"{indent}raise NotImplementedError(",
            *(f'{indent}    "{part}"' for part in parts),
            f"{indent})",
        ]
        inline = node.body[0].lineno == span.first and head.endswith(":")
        lines[span.first - 1 : span.last] = [head, *raised] if inline else raised
    return "\n".join(lines) + "\n"


def still_cut(exercise: Exercise, root: Path) -> tuple[str, ...]:
    """The functions of an exercise that still raise the error which a release put there."""
    found = []
    for symbol in exercise.symbols:
        file, _, name = symbol.partition(":")
        try:
            tree = ast.parse((root / exercise.milestone / file).read_text(encoding="utf-8"))
        except (OSError, SyntaxError):  # gone, or being written just now
            continue
        nodes = [node for other, node in functions(tree) if other == name]
        if any(f"NotImplementedError('{exercise.id}: " in ast.unparse(node) for node in nodes):
            found.append(name)
    return tuple(found)


def body_span(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> Span:
    """A function's lines after its signature and docstring, the comments at both ends included."""
    body = node.body
    first, last = body[0].lineno, node.end_lineno or node.lineno
    if ast.get_docstring(node) is not None:
        first = (body[0].end_lineno or first) + 1
    else:
        while re.match(r"\s*(#|$)", lines[first - 2]):
            first -= 1
    while first < last and not lines[first - 1].strip():
        first += 1
    while last < len(lines) and re.match(rf"\s{{{node.col_offset + 1},}}#", lines[last]):
        last += 1
    return Span(first, max(last, first - 1))


def functions(
    tree: ast.Module,
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """The functions and methods of a file with their names; a property and its setter share one."""
    for node in tree.body:
        if isinstance(node, Function):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, Function):
                    yield f"{node.name}.{method.name}", method


def helpers(source: str) -> Iterator[tuple[str, Span]]:
    """The private symbols of a file and their lines, with the comments right above them."""
    tree, lines = ast.parse(source), source.splitlines()
    named: list[tuple[str, ast.stmt]] = list(functions(tree))
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            named.append((node.name, node))
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            named += [(target.id, node) for target in targets[:1] if isinstance(target, ast.Name)]
    for name, node in named:
        if re.match(r"_(?!_)", name.rpartition(".")[2]):
            yield name, span_of(node, lines)


def span_of(node: ast.stmt, lines: list[str]) -> Span:
    """The lines of a definition, its decorators and the comments right above included."""
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
    while first > 1 and lines[first - 2].strip().startswith("#"):
        first -= 1
    return Span(first, node.end_lineno or node.lineno)


def _helpers_to_remove(
    files: dict[str, str], lost: set[str], owned: set[tuple[str, str]], told: str
) -> list[tuple[str, str]]:
    """The helpers of which nothing that stays makes any mention."""
    candidates: dict[tuple[str, str], str] = {}
    rest = [told]
    for path, source in files.items():
        lines = source.splitlines()
        for name, span in helpers(source):
            if name.rpartition(".")[2] in lost and (path, name) not in owned:
                candidates[path, name] = "\n".join(lines[span.first - 1 : span.last])
                lines[span.first - 1 : span.last] = [""] * (span.last - span.first + 1)
        rest.append("\n".join(lines))
    alive = words("\n".join(rest))
    while True:
        kept = [key for key in candidates if key[1].rpartition(".")[2] in alive]
        if not kept:
            return list(candidates)
        for key in kept:
            alive |= words(candidates.pop(key))


def without_symbol(source: str, symbol: str) -> str:
    """A source without a private symbol."""
    lines = source.splitlines()
    for name, span in reversed([*helpers(source)]):
        if name == symbol:
            del lines[span.first - 1 : span.last]
    return "\n".join(lines) + "\n"


def removed_lines(before: str, after: str) -> str:
    """The lines of a text that another one has no more, or not as often."""
    left = after.splitlines()
    gone = []
    for line in before.splitlines():
        if line in left:
            left.remove(line)
        else:
            gone.append(line)
    return "\n".join(gone)


def words(text: str) -> set[str]:
    """The identifiers in a text, comments included."""
    return set(re.findall(r"[A-Za-z_]\w*", text))


def tidy(source: str) -> str:
    """No more empty lines than the style has: two between definitions, one within a class."""
    source = re.sub(r"\n{3,}(?=[ \t]+\S)", "\n\n", source)
    return re.sub(r"\n{4,}", "\n\n\n", source).rstrip("\n") + "\n"
