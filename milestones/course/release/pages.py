"""Change the pages of a student's tree: they must not refer to what the tree does not have."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection

FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
TEST = re.compile(r"`(tests/[\w/]+\.py)`")
# A page quotes code in a block of Python. Its first line names the file.
QUOTATION = re.compile(
    r"^(?P<start>```python\n# (?P<file>\S+\.py)\b.*\n)(?:.*\n)+?```$", re.MULTILINE
)
BLOCK = re.compile(r"(\n\s*\n|\n(?=- |\|))")  # between paragraphs, bullets and rows of tables
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z`*])")


def fitting(path: str, text: str, files: Collection[str], cut_files: Collection[str]) -> str:
    """Return a page for a tree with these files, of which some have bodies that were cut."""
    text = without_quotations(without_run_pages(text), cut_files)
    return without_dead_links(path, without_absent_tests(text, files), files)


def without_run_pages(text: str) -> str:
    """Remove the paragraphs about pages that `make slides` builds: the tree has no slides."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(paragraph for paragraph in paragraphs if "`make slides`" not in paragraph)


def without_quotations(text: str, cut_files: Collection[str]) -> str:
    """Remove quoted code if bodies of its file were cut: it may be a solution."""

    def mended(match: re.Match[str]) -> str:
        return f"{match['start']}...\n```" if match["file"] in cut_files else match[0]

    return QUOTATION.sub(mended, text)


def without_absent_tests(text: str, files: Collection[str]) -> str:
    """Remove what names a test that is not in the tree: a sentence, or an item of a table's list.

    Blocks of code stay as they are.
    """
    parts = FENCED.split(text)
    for i in range(0, len(parts), 2):
        blocks = BLOCK.split(parts[i])
        for j in range(0, len(blocks), 2):
            absent = [name for name in TEST.findall(blocks[j]) if name not in files]
            if absent and (left := _without_names(blocks[j], absent)) != blocks[j]:
                blocks[j] = left
                if not left and j:
                    blocks[j - 1] = ""  # the gap before a block that is gone
        parts[i] = "".join(blocks)
    return "".join(parts)


def _without_names(block: str, names: list[str]) -> str:
    """Return a paragraph, a bullet or a row without sentences or items that name some tests."""
    if block.startswith("|"):
        cells = []
        for cell in block.split("|"):
            if TEST.search(cell):
                items = cell.strip().split(", ")
                kept = ", ".join(item for item in items if item.strip("`") not in names)
                cell = f" {kept} "
            cells.append(cell)
        return "|".join(cells)
    sentences = SENTENCE.split(block.removeprefix("- "))
    kept = [s for s in sentences if not any(f"`{name}`" in s for name in names)]
    if len(kept) == len(sentences):
        return block
    return ("- " if block.startswith("- ") and kept else "") + " ".join(kept)


def without_dead_links(path: str, text: str, files: Collection[str]) -> str:
    """Replace each link to a file that is not in the tree by the text of the link."""
    folders = {folder for name in files for folder in folders_of(name)}

    def mended(match: re.Match[str]) -> str:
        target = match["target"]
        there = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        known = not target or "://" in target or there in files or there in folders
        return match[0] if known else match["text"]

    return re.sub(r"!?\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]*)(#[^)]*)?\)", mended, text)


def folders_of(name: str) -> set[str]:
    """Return the folders of a file, up to the root."""
    parts = name.split("/")[:-1]
    return {"/".join(parts[: i + 1]) for i in range(len(parts))} | {"."}
