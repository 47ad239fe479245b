"""`python -m milestones.staff.maintain.names FOLDER`: the names that some documents use.

The course follows documents about vLLM and SGLang that are not a part of the repository. FOLDER has
them, as texts in Markdown. `milestones/docs/WHERE.md` says for each name of their code where it is
here, and a test compares its first table with the list that this script writes.

The rule: a word counts if it is code (in backticks, in a listing or in a diagram), and

- it has the form of a name: `snake_case`, `_private`, `CamelCase` or `UPPER_CASE`,
- or it is a single word that the code defines as a class, a function or a member of a class, calls
  as a method (`.condense()`) or as a class (`Req()`), or reads from an `Enum`
  (`CUDAGraphMode.FULL`).

It does not count if Python defines it, if listings use it only as a local variable, or if
`names_left_out.toml` has it. That file groups the words that are left out by the reason.
"""

from __future__ import annotations

import argparse
import builtins
import keyword
import re
from collections import deque
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from queue import Queue
from threading import Event

from rich.console import Console

from ...course.delta import ROOT, tomllib

PLACE = ROOT / "milestones/staff/maintain"
LIST, LEFT_OUT = PLACE / "names.txt", PLACE / "names_left_out.toml"

FENCE = re.compile(r"^ *```(\w*)\n(.*?)(?:^ *```|\Z)", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
TEXT = re.compile(r'"""(?:.|\n)*?"""|#.*|f?"[^"\n]*"|f?\'[^\'\n]*\'')  # of Python: not code
FORM = re.compile(
    r"\b_*[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)+\b"  # snake_case, UPPER_CASE
    r"|\b_[a-z]\w*[a-z]\b"
    r"|\b[A-Z]+[a-z]\w*[A-Z]\w*|\b[A-Z]{2,}[a-z]{2,}\w*"  # CamelCase, GPUWorker
)
CALLED = re.compile(r"\.([a-z]\w+)\(|\b([A-Z][a-z]\w+)\(")
CALLED_IN_DIAGRAM = re.compile(r"\b([a-z]\w+)\(")
DEFINED = re.compile(
    r"\bdef ([a-z]\w*)|\b[A-Z]\w+[a-z]\w*\.([A-Z][A-Z_]+)\b|^ *class (\w+)", re.MULTILINE
)
MEMBER = re.compile(r"^ *\+(?:(\w+)\(.*|[\w\[\], ]+ (\w+)(?:\(.*)?)$", re.MULTILINE)
# A word that stands here is more than a local variable: an attribute, what is called, a parameter
# with a value, a definition, a field or a parameter with a type.
BEYOND_LOCAL = re.compile(
    r"\.(\w+)|\b(\w+)[(=](?!=)|(?:class|def) (\w+)|^ +(\w+): [^=\n]*?(?:=.*)?,?$", re.MULTILINE
)
LOCAL = re.compile(
    r"^\s+(\w+)(?:, \w+)*(?:: [^=\n]+)? = |\bfor (\w+)|\bfor \w+, (\w+)", re.MULTILINE
)
OF_PYTHON = {
    *dir(builtins), *keyword.kwlist,
    *(name for kind in (list, dict, set, str, deque, Queue, Event, Enum) for name in dir(kind)),
}  # fmt: skip


def _words(pattern: re.Pattern[str], text: str) -> set[str]:
    """Return what the groups of a pattern found, or its whole matches if it has no groups."""
    found = pattern.findall(text)
    return {word for match in found for word in ([match] if isinstance(match, str) else match)} - {
        ""
    }


def names_of(text: str) -> tuple[set[str], set[str]]:
    """Return the names in the code of a document, and its words that are only local variables."""
    names: set[str] = set()
    locals_: set[str] = set()
    for span in INLINE.findall(FENCE.sub("", text)):
        names |= _words(FORM, span)
    for language, block in FENCE.findall(text):
        if language not in ("python", "bash"):
            for pattern in (FORM, MEMBER, DEFINED, CALLED_IN_DIAGRAM):
                names |= _words(pattern, block)
            continue
        code = TEXT.sub(" ", block)
        only_local = _words(LOCAL, code) - _words(BEYOND_LOCAL, code)
        locals_ |= only_local
        names |= _words(DEFINED, code) | _words(CALLED, code)
        names |= _words(FORM, code) - only_local
    return names, locals_ - names


def extract(documents: Iterable[str], left_out: Iterable[str]) -> list[str]:
    """Return the names of documents, sorted without regard to case and a leading underscore."""
    names = {name for text in documents for name in names_of(text)[0]}
    kept = names - OF_PYTHON - set(left_out)
    return sorted((name for name in kept if not name.startswith("__")), key=in_order)


def in_order(name: str) -> tuple[str, str]:
    """Return the key by which names are sorted."""
    return name.lstrip("_").lower(), name


def left_out() -> Iterator[str]:
    """Yield the words that are no names, although they have the form of one."""
    for words in tomllib.loads(LEFT_OUT.read_text(encoding="utf-8")).values():
        yield from words.split()


def main() -> None:
    """Write the list of names."""
    parser = argparse.ArgumentParser(description="Write the list of names that documents use.")
    parser.add_argument("folder", type=Path, help="the folder with the documents")
    folder = parser.parse_args().folder
    documents = [path.read_text(encoding="utf-8") for path in sorted(folder.iterdir())]
    names = extract(documents, left_out())
    LIST.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    Console().print(f"{LIST.relative_to(ROOT)}: {len(names)} names")


if __name__ == "__main__":
    main()
