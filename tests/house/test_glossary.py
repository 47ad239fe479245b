"""GLOSSARY.md, ARCHITECTURE.md and the handouts name files and symbols that exist."""

from __future__ import annotations

import ast
import re
from typing import NamedTuple

import pytest

from milestones.chain import course_place
from tests.conftest import ROOT
from tests.helpers.documented_symbols import (
    is_path,
    missing_in_page,
    spans,
    wrong_in_ours,
)

GLOSSARY = (ROOT / "milestones/docs/GLOSSARY.md").read_text(encoding="utf-8")
HEADER = ["ours", "meaning", "vLLM", "SGLang"]
THEIRS = re.compile(
    r"(`[\w.]+`(?:, `[\w.]+`)* in `[\w/]+\.py`(?:, (?=`))?)+(?: \(v[\d.]+\)|[,:] .+)?"
)
FOREIGN = re.compile(r"(?:vllm|python/sglang/srt)/")  # a handout gives whole paths
TITLE = "## Where this is in vLLM and SGLang\n"


class Row(NamedTuple):
    """A row of a table of the glossary."""

    ours: str
    meaning: str
    vllm: str
    sglang: str


def rows() -> list[Row]:
    lines = [line for line in GLOSSARY.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [Row(*c) for c in cells if c != HEADER and set(c) != {"---"}]


@pytest.mark.parametrize("row", rows(), ids=lambda row: spans(row.ours)[0])
def test_a_row_of_the_glossary(row: Row) -> None:
    """Our symbol exists in the milestones of its mark and in no other; the row has a meaning."""
    assert row.meaning.endswith("."), f"{row.ours} has no meaning"
    for cell in (row.vllm, row.sglang):
        assert not cell or THEIRS.fullmatch(cell), f"write `symbol` in `file.py`, not: {cell}"
    assert not list(wrong_in_ours(row.ours))


def test_a_name_has_one_row() -> None:
    names = [tuple(spans(row.ours)) for row in rows()]
    assert len(names) >= 45 and len(set(names)) == len(names)


def test_the_architecture_is_that_of_the_code() -> None:
    assert not list(missing_in_page((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")))


def statements(source: str) -> str:
    """Return code without docstrings, comments and indentation."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return "\n".join(line.strip() for line in ast.unparse(tree).splitlines())


def test_the_architecture_quotes_the_code() -> None:
    """The first line of each quotation names its file."""
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^```python\n# (\S+\.py)\b.*\n((?:.*\n)+?)```$", page, flags=re.MULTILINE)
    assert quoted
    for file, code in quoted:
        source = (ROOT / file).read_text(encoding="utf-8")
        assert statements(code) in statements(source), f"this is not in {file}:\n{code}"


def test_a_handout_says_where_to_read_on(milestone: str) -> None:
    """Its last section names the releases of the glossary, and files that the glossary names."""
    handout = (ROOT / course_place(milestone) / "README.md").read_text(encoding="utf-8")
    section = handout.partition(TITLE)[2]
    assert section and "\n#" not in section, "this is the last section of a handout"
    releases, *bullets = re.split(r"^- ", section, flags=re.MULTILINE)
    last, _, link = bullets.pop().partition("\n\n")
    assert "/GLOSSARY.md)" in link and 3 <= len(bullets) + 1 <= 6
    assert all(release in GLOSSARY for release in re.findall(r"v\d+\.\d+\.\d+", releases))
    known = {span for row in rows() for span in spans(row.vllm + row.sglang) if is_path(span)}
    for bullet in [*bullets, last]:
        files = {FOREIGN.sub("", span) for span in spans(bullet) if FOREIGN.match(span)}
        assert files and files <= known, f"not in the glossary: {files - known or bullet}"


@pytest.mark.parametrize(
    "page",
    [
        "`Scheduler.plan` in `scheduler.py`",
        "`Scheduler.schedule` in `engine.py`",
        "`schedular.py`",
        "# The engine m3_paged\n\n`policy.py`",
        "```\nscheduler.py   Scheduler.plan   chooses\n```",
        "```\nengine.py ──> planner.py\n```",
        "```\nengine.py   EngineCore.step\npolicy.py     SchedulePolicy.order\n```",
    ],
)
def test_a_wrong_name_is_found(page: str) -> None:
    assert len(list(missing_in_page(page))) == 1


@pytest.mark.parametrize(
    "page",
    [
        "`Scheduler.schedule` and `Scheduler.waiting` in `scheduler.py` raise `ValueError`",
        "# The engine m4_radix\n\nIn m2, `Move` is in `kv_cache.py`",
        "```\nengine.py      EngineCore.step\nscheduler.py     Scheduler.schedule   chooses\n```",
    ],
)
def test_a_right_name_passes(page: str) -> None:
    assert not list(missing_in_page(page))
