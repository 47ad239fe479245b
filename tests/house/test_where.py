"""WHERE.md has every name of the documents, and what it says about our names and defaults holds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import Field, fields
from typing import Any, NamedTuple

import pytest

from common import EngineConfig, SamplingParams
from milestones.serving.scale.settings import ScaleSettings
from milestones.serving.server.settings import ServerSettings
from milestones.staff.maintain.names import LIST, in_order, names_of
from tests.conftest import ROOT
from tests.helpers.documented_symbols import missing_in_page, spans, wrong_in_ours

DOCS = ROOT / "milestones/docs"
PAGE = (DOCS / "WHERE.md").read_text(encoding="utf-8")
NAMES = LIST.read_text(encoding="utf-8").split()
CLASSES = (EngineConfig, SamplingParams, ServerSettings, ScaleSettings)
NOT_HERE = ("not here", "not here yet")
NAME_CELL = re.compile(r"`\w+`( †)?(, `\w+`( †)?)*")
ENGINE = re.compile(r"(vLLM|SGLang|both|the lecture)( v0\.4)?(, (prefill|decode) apart)?: .+\.")
LESSON = "## What vLLM V1 keeps, and why we rebuild\n"


class Row(NamedTuple):
    """A row of the table of names."""

    names: str
    meaning: str
    ours: str
    reason: str


def table(heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading, without its header."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines[2:]]


def rows() -> list[Row]:
    return [Row(*cells) for cells in table("Names")]


def test_each_name_has_a_row_and_each_row_has_names() -> None:
    """`names.py` wrote the list of names."""
    named = [name for row in rows() for name in spans(row.names)]
    assert len(NAMES) > 400 and sorted(NAMES, key=in_order) == NAMES
    assert not set(NAMES) - set(named), "write a row for these names"
    assert not set(named) - set(NAMES), "no document has these names"
    assert len(set(named)) == len(named), "these names have two rows"


def test_the_rows_are_in_the_order_of_the_alphabet() -> None:
    first = [spans(row.names)[0] for row in rows()]
    assert sorted(first, key=in_order) == first


@pytest.mark.parametrize("row", rows(), ids=lambda row: spans(row.names)[0])
def test_a_row_of_the_names(row: Row) -> None:
    """The row says what the names are, and where they are here, or why they are not."""
    assert NAME_CELL.fullmatch(row.names), row.names
    assert ENGINE.fullmatch(row.meaning), f"say which engine has it, and what it is: {row.meaning}"
    assert not row.reason or row.reason.endswith((".", ").")), f"not a sentence: {row.reason}"
    if row.ours in NOT_HERE:
        assert row.reason, f"{row.names}: say why it is not here"
    else:
        assert not list(wrong_in_ours(row.ours))


def shown(default: Any) -> str:
    """Return a default as the table of settings writes it."""
    if default is None or default == ():
        return "none"
    return ("off", "on")[default] if isinstance(default, bool) else f"`{default}`"


def our_settings() -> Iterator[tuple[str, Field[Any]]]:
    for kind in CLASSES:
        yield from ((f"{kind.__name__}.{field.name}", field) for field in fields(kind))


def test_the_settings_have_our_names_and_our_defaults() -> None:
    """Each field of the four classes has a row, with its default."""
    cells = [row[0] for row in table("Settings") if row[0] != "no field"]
    assert cells == [f"`{name}`: {shown(field.default)}" for name, field in our_settings()]


def test_a_setting_that_is_not_ours_says_what_is_here_instead() -> None:
    others = [row for row in table("Settings") if row[0] == "no field"]
    assert others and all(row[3].endswith(".") and (row[1] or row[2]) for row in others)


def test_the_section_about_rebuilding_names_what_exists() -> None:
    section = PAGE.partition(LESSON)[2]
    known = set(NAMES) | {"PIECEWISE", "RequestState", "ScheduleBatch"}
    ours = "\n\n".join(
        block for block in section.split("\n\n") if any(".py" in span for span in spans(block))
    )
    for name in spans(section):
        if re.fullmatch(r"\w+", name) and name not in known:
            assert name in spans(ours), f"{name} is no name of vLLM in the table"
    assert ours and not list(missing_in_page(re.sub(r"`(?:Request|InputBatch)`", "", ours)))


def test_the_times_of_the_host_are_of_the_recorded_run() -> None:
    """`host-time --json milestones/docs/results/host_time.json` writes the run."""
    runs = json.loads((DOCS / "results/host_time.json").read_text(encoding="utf-8"))
    micros = {
        (run["milestone"][:2], run["num_running"], what): f"{run[what]:.0f}"
        for run in runs["microseconds"] for what in ("host", "gap") if run["pause_ms"] == 10
    }  # fmt: skip
    text = " ".join(PAGE.partition(LESSON)[2].split())
    found = re.findall(
        r"takes (\d+) µs for one running request, (\d+) µs for 16, and (\d+) µs for 256", text
    )
    assert found == [tuple(micros["m4", size, "host"] for size in (1, 16, 256))]
    assert f"is {micros['m5', 256, 'gap']} µs with 256 requests" in text
    assert f"m5's host ({micros['m5', 256, 'host']} µs)" in text


@pytest.mark.parametrize(
    ("document", "names"),
    [
        ("Set `max_num_seqs`, not `this`.", {"max_num_seqs"}),
        ("```python\ndef schedule(self):\n    last_token = 1\n```\n", {"schedule"}),
        ("```python\nself.rows_cpu.condense()  # not_a_name\n```\n", {"rows_cpu", "condense"}),
        ("```mermaid\nclass Queue {\n  +int num_seqs\n  +peek() int\n}\n```\n",
         {"Queue", "num_seqs", "peek"}),
        ("```python\nreturn CUDAGraphMode.FULL\n", {"CUDAGraphMode", "FULL"}),
        ("max_num_seqs is in no backticks.", set()),
    ],
)  # fmt: skip
def test_the_names_of_a_document(document: str, names: set[str]) -> None:
    assert names_of(document)[0] == names
