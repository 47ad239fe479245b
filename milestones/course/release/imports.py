"""Remove the imports of a file that nothing in it uses any more."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator

WIDTH = 100
ANNOTATION = r"[\w.\[\], |]+"  # a string that may be an annotation, or an entry of __all__
EMPTY_BLOCK = re.compile(r"^if TYPE_CHECKING:\n(?=\S|\n*\Z|\n+\S)", re.MULTILINE)


def without_unused_imports(before: str, after: str, wanted: Collection[str] = ()) -> str:
    """Return `after` without the imports that only `before` used.

    Names in `wanted` stay, because other files import them from here.
    """
    unused = names_used(before) - names_used(after) - set(wanted)
    lines = after.splitlines()
    for node in reversed([*imports(ast.parse(after).body)]):
        kept = [alias for alias in node.names if bound_name(alias) not in unused]
        if len(kept) < len(node.names):
            node.names = kept
            lines[node.lineno - 1 : node.end_lineno] = written(node) if kept else []
    result = EMPTY_BLOCK.sub("", "\n".join(lines) + "\n")
    # A removed block may have been the last to use a name.
    return result if result == after else without_unused_imports(before, result, wanted)


def names_wanted(module: str, others: str) -> set[str]:
    """Return the names that a text imports from a module (by its last name) or has in quotes."""
    found = set(re.findall(r"""["'](?:[\w.]+\.)?(\w+)["']""", others))
    for names in re.findall(rf"from [\w.]*\.{module} import (\([^)]*\)|.*)", others):
        found |= set(re.findall(r"\w+", names))
    return found


def names_used(source: str) -> set[str]:
    """Return the names that the code of a file uses, also in strings (annotations, `__all__`)."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Constant) and re.fullmatch(ANNOTATION, str(node.value)):
            found |= set(re.findall(r"\w+", str(node.value)))
    return found


def imports(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports at a file's top level, also those inside an `if`."""
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            if getattr(node, "module", None) != "__future__":
                yield node
        elif isinstance(node, ast.If):
            yield from imports([*node.body, *node.orelse])


def bound_name(alias: ast.alias) -> str:
    """Return the name that an import binds."""
    return alias.asname or alias.name.partition(".")[0]


def written(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Return an import as lines of source."""
    indent = " " * node.col_offset
    line = indent + ast.unparse(node)
    if len(line) <= WIDTH:
        return [line]
    head = line.partition(" import ")[0]
    names = [ast.unparse(alias) for alias in node.names]
    return [f"{head} import (", *(f"{indent}    {name}," for name in names), f"{indent})"]
