"""Choose the tests of a student's tree: those of its milestones, and the files they import."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from pathlib import Path

from ...chain import is_elective
from ..catalog import CatalogError, load, taught_engines
from ..outline import span_of
from .cut import tidy
from .imports import without_unused_imports

# The folders of `tests/` with tests of an engine. The others test the repository, the course, the
# server and the slides, and a student's tree has none of these.
FOLDERS = ("displays", "electives", "engine", "helpers", "invariants", "models")
# The player's test needs a browser, and runs of all milestones. Tests with a server are left out.
NOT_FOR_STUDENTS = ("displays/test_player.py", "helpers/browser.py", "helpers/serving.py")


def chosen_tests(root: Path, milestones: list[str], absent: set[str]) -> dict[str, bytes]:
    """Return the files of `tests/` for a tree with these milestones, by path from the root.

    Raises `CatalogError` if a graded test would not be among them.
    """
    found: dict[str, str] = {}
    tests = root / "tests"
    paths = [path for folder in FOLDERS for path in sorted((tests / folder).rglob("*.py"))]
    for path in (*sorted(tests.glob("*.py")), *paths):
        name = path.relative_to(tests).as_posix()
        if name not in NOT_FOR_STUDENTS:
            source = pruned(path.read_text(encoding="utf-8"), absent)
            if source is not None:
                found[f"tests/{name}"] = source
    graded = {
        test.partition("::")[0]
        for name in taught_engines(root) if name in milestones
        for exercise in load(name, root) for test in exercise.tests
    }  # fmt: skip
    for path in sorted((tests / "exercises").rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name in graded or not path.name.startswith("test_"):
            found[name] = path.read_text(encoding="utf-8")
    conftest = "tests/conftest.py"
    if conftest in found and absent:  # its examples name milestones
        found[conftest] = re.sub(naming(absent), milestones[-1], found[conftest])
    chosen = _closed(found, absent)
    if lost := sorted(graded - chosen.keys()):
        raise CatalogError(f"{lost} name one of {sorted(absent)}, or import tests that do")
    return {name: source.encode() for name, source in chosen.items()}


def naming(absent: set[str]) -> str:
    """Return a pattern that finds absent engines in a text.

    The name of an elective is an ordinary word, so it is found only in the name of its package.
    """
    packages = [rf"electives[./]{name}" if is_elective(name) else name for name in sorted(absent)]
    return "|".join(packages) or r"(?!)"


def pruned(source: str, absent: set[str]) -> str | None:
    """Return a file of tests without those of absent milestones, or None if none is left."""
    tree, lines = ast.parse(source), source.splitlines()
    for node in reversed(tree.body):
        if isinstance(node, ast.FunctionDef):
            for mark in reversed(node.decorator_list):
                if _names(mark, "since", absent):
                    span = span_of(node, lines)
                    del lines[span.first - 1 : span.last]
                    break
                if _names(mark, "before", absent):
                    del lines[mark.lineno - 1 : mark.end_lineno]
        elif isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node.targets[0]):
            if _names(node, "since", absent):
                return None
            for number in range(node.lineno - 1, node.end_lineno or node.lineno):
                pattern = rf',? *pytest\.mark\.before\("({"|".join(absent)})"\)'
                lines[number] = re.sub(pattern, "", lines[number]) if absent else lines[number]
    result = "\n".join(lines) + "\n"
    if result == source:
        return source
    result = without_unused_imports(source, tidy(result))
    return result if "def test" in result or "def test" not in source else None


def _names(node: ast.AST, mark: str, absent: set[str]) -> bool:
    """Return whether a decorator or list has a `since` or `before` of absent engines only."""
    return any(
        isinstance(call, ast.Call)
        and ast.unparse(call.func) == f"pytest.mark.{mark}"
        and all(isinstance(arg, ast.Constant) and arg.value in absent for arg in call.args)
        for call in ast.walk(node)
    )


def _closed(found: dict[str, str], absent: set[str]) -> dict[str, str]:
    """Remove files that name absent milestones or import missing files, and unused helpers."""
    gone = re.compile(naming(absent))
    found = {name: source for name, source in found.items() if not gone.search(source)}
    while True:
        needs = {name: _needed(source, found.keys()) for name, source in found.items()}
        used = {path for paths in needs.values() for path in paths}
        kept = {
            name: source
            for name, source in found.items()
            if needs[name] <= found.keys() and (_stands_alone(name) or name in used)
        }
        if len(kept) == len(found):
            return kept
        found = kept


def _stands_alone(name: str) -> bool:
    return name.rpartition("/")[2].startswith(("test_", "conftest", "__init__"))


def _needed(source: str, known: Collection[str]) -> set[str]:
    """Return the files of `tests/` that a file imports, or runs by name."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "tests":
            module = (node.module or "").replace(".", "/")
            if f"{module}/__init__.py" in known:
                found |= {f"{module}/{alias.name}.py" for alias in node.names}
            else:
                found.add(f"{module}.py")
        elif isinstance(node, ast.Constant) and re.fullmatch(r"tests(\.\w+)+", str(node.value)):
            found.add(f"{str(node.value).replace('.', '/')}.py")
    return found
