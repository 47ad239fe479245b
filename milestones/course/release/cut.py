"""Cut the solutions of exercises out of a milestone's sources.

The body of each symbol becomes a `NotImplementedError` that names the exercise and its section of
the handout. The signature, the decorators, the docstring and the comments above stay. Code that
only those bodies used is removed too:

- imports that the file does not use any more;
- private helpers (`_name`: functions, methods, classes, constants) that only cut bodies used. A
  helper stays if the student reads its name: in the handout, a hint, a test, or a docstring or
  comment that stays. A public name is part of the milestone's interface, and stays. A public
  constant also stays, because a student could not guess its value.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ...chain import place
from ..catalog import CatalogError
from ..exercise import Exercise
from ..outline import Function, Span, definitions, span_of
from .imports import names_wanted, without_unused_imports


@dataclass(frozen=True)
class Cut:
    """The files that a cut changes, by path from the root, and the names of the removed helpers."""

    files: dict[str, str]
    removed: tuple[str, ...]  # "m1_single/engine.py:LLMEngine._helper"


def cut(milestone: str, exercises: Iterable[Exercise], root: Path, told: str = "") -> Cut:
    """Cut the solutions of `exercises`. `told` is all that the student reads besides sources."""
    own = place(milestone)
    folder = root / own
    before = {
        f"{own}/{path.relative_to(folder).as_posix()}": path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("*.py"))
    }
    files, owned = dict(before), set()
    for exercise in exercises:
        for symbol in exercise.symbols:
            name, _, qualified = symbol.partition(":")
            path = f"{own}/{name}"
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
    """Return the text of the error, in two parts."""
    return f"{exercise.id}: {symbol} is yours to write; see ", exercise.section


def without_body(source: str, symbol: str, parts: tuple[str, str], path: str = "") -> str:
    """Replace the body of a function or method in a source by a `NotImplementedError`."""
    nodes = [node for name, node in functions(ast.parse(source)) if name == symbol]
    if not nodes:
        raise CatalogError(f"{path} has no function {symbol}")
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
    """Return the functions of an exercise that still raise the error of the release."""
    found = []
    for symbol in exercise.symbols:
        file, _, name = symbol.partition(":")
        try:
            tree = ast.parse((root / place(exercise.milestone) / file).read_text(encoding="utf-8"))
        except (OSError, SyntaxError):  # the file is missing, or is being edited
            continue
        nodes = [node for other, node in functions(tree) if other == name]
        if any(f"NotImplementedError('{exercise.id}: " in ast.unparse(node) for node in nodes):
            found.append(name)
    return tuple(found)


def body_span(node: Function, lines: list[str]) -> Span:
    """Return the lines of a function's body without its docstring, with comments at both ends."""
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


def functions(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    """Yield the functions and methods of a file by name. A property and its setter share a name."""
    for name, node in definitions(tree):
        if not isinstance(node, ast.ClassDef):
            yield name, node


def helpers(source: str) -> Iterator[tuple[str, Span]]:
    """Yield the private symbols of a file and their lines, with the comments directly above."""
    tree, lines = ast.parse(source), source.splitlines()
    named: list[tuple[str, ast.stmt]] = [*definitions(tree)]
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            named += [(target.id, node) for target in targets[:1] if isinstance(target, ast.Name)]
    for name, node in named:
        if re.match(r"_(?!_)", name.rpartition(".")[2]):
            yield name, span_of(node, lines)


def _helpers_to_remove(
    files: dict[str, str], lost: set[str], owned: set[tuple[str, str]], told: str
) -> list[tuple[str, str]]:
    """Return the helpers that no remaining text mentions."""
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
    """Return a source without one of its private symbols."""
    lines = source.splitlines()
    for name, span in reversed([*helpers(source)]):
        if name == symbol:
            del lines[span.first - 1 : span.last]
    return "\n".join(lines) + "\n"


def removed_lines(before: str, after: str) -> str:
    """Return the lines of `before` that are not in `after`, or are there less often."""
    left = after.splitlines()
    gone = []
    for line in before.splitlines():
        if line in left:
            left.remove(line)
        else:
            gone.append(line)
    return "\n".join(gone)


def words(text: str) -> set[str]:
    """Return the identifiers in a text, including those in comments."""
    return set(re.findall(r"[A-Za-z_]\w*", text))


def tidy(source: str) -> str:
    """Reduce empty lines to the style's number: two between definitions, one inside a class."""
    source = re.sub(r"\n{3,}(?=[ \t]+\S)", "\n\n", source)
    return re.sub(r"\n{4,}", "\n\n\n", source).rstrip("\n") + "\n"
