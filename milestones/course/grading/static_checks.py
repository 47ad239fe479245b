"""Refuse code that a solution never needs, and that could reach the processes that judge it.

A file is refused, with line and reason, if it uses something of this kind that the released file
does not use. This proves nothing, because a name can be computed while the program runs. It
removes the simple means. A student who wants to cheat must hide the others, and a person can see
that.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

MODULES = {
    "_pytest", "_thread", "atexit", "builtins", "cffi", "code", "ctypes", "faulthandler", "gc",
    "http", "hypothesis", "importlib", "inspect", "marshal", "milestones", "mmap",
    "multiprocessing", "pickle", "pkgutil", "pluggy", "pty", "pytest", "resource", "runpy",
    "signal", "site", "socket", "subprocess", "tests", "tracemalloc", "unittest", "urllib",
}  # fmt: skip
CALLS = {"__import__", "compile", "eval", "exec", "globals"}
ATTRIBUTES = {
    "__builtins__", "__closure__", "__code__", "__dict__", "__globals__", "__subclasses__",
    "cr_frame", "f_back", "f_builtins", "f_globals", "f_locals", "gi_frame", "tb_frame",
}  # fmt: skip
OF_MODULES = {
    "os": {"_exit", "abort", "fork", "forkpty", "kill", "killpg", "popen", "posix_spawn", "system"},
    "sys": {"_current_frames", "_getframe", "addaudithook", "modules", "setprofile", "settrace"},
    "threading": {"setprofile", "settrace"},
}
METHODS = {"__bool__", "__class__", "__eq__", "__getattribute__", "__instancecheck__", "__ne__"}
Finding = tuple[int, str, str]  # line, name, reason


def problems(text: str, released: str, allowed: Collection[str] = ()) -> list[str]:
    """Return the reasons to refuse a file, with lines. A file that does not parse has none."""
    try:
        found = sorted(set(_findings(ast.parse(text))))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []  # importing the file gives a better message
    had = {name for _, name, _ in _findings(ast.parse(released))}
    return [f"line {line}: {words}" for line, name, words in found if name not in {*had, *allowed}]


def _findings(tree: ast.Module) -> Iterator[Finding]:
    imported = {alias.asname or alias.name.split(".")[0] for alias in _aliases(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _import(node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from _import(node.lineno, node.module)
            for alias in node.names:
                yield from _attribute(node.lineno, node.module, alias.name)
        elif isinstance(node, ast.Attribute):
            yield from _attribute(node.lineno, _root(node.value), node.attr)
            if isinstance(node.ctx, (ast.Store, ast.Del)) and _root(node) in imported:
                name = ast.unparse(node)
                yield node.lineno, name, f"changes {name}, which belongs to another module"
        elif isinstance(node, ast.Name) and node.id in {*CALLS, "__builtins__"}:
            yield node.lineno, node.id, f"uses {node.id}"
        elif isinstance(node, ast.Call):
            yield from _changes(node, imported)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name in METHODS:
            yield node.lineno, node.name, f"defines {node.name}, which can change comparisons"


def _changes(node: ast.Call, imported: set[str]) -> Iterator[Finding]:
    """Find `setattr` and similar calls on an imported name, and attributes named by strings."""
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if name in ("setattr", "delattr", "vars") and node.args and _root(node.args[0]) in imported:
        target = ast.unparse(node.args[0])
        yield node.lineno, f"{name} {target}", f"uses {name}() on {target}, which was imported"
    if name == "getattr" and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
        yield from _attribute(node.lineno, _root(node.args[0]), str(node.args[1].value))


def _import(line: int, name: str) -> Iterator[Finding]:
    package = name.split(".")[0]
    if package in MODULES:
        yield line, package, f"imports {package}"


def _attribute(line: int, owner: str | None, name: str) -> Iterator[Finding]:
    if name in ATTRIBUTES or name in OF_MODULES.get(owner or "", ()):
        yield line, name, f"uses {name}"


def _aliases(tree: ast.Module) -> Iterator[ast.alias]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from node.names


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None
