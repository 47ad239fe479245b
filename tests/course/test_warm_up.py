"""The first kernels of m3.6 do what the handout says of them, as they are and changed."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from milestones.course.catalog import find
from milestones.course.student.section import sections_of
from tests.conftest import ROOT

pytest.importorskip("triton", reason="Triton is for Linux")
SOURCE = (ROOT / "milestones/m3_paged/warm_up_kernels.py").read_text(encoding="utf-8")
BLOCK = "[0 1 2 3 4 5 6 7] [ True  True  True  True  True  True False False]"


def printed(
    folder: Path, capsys: pytest.CaptureFixture[str], *changes: tuple[str, str]
) -> list[str]:
    text = SOURCE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "kernels.py").write_text(text, encoding="utf-8")
    runpy.run_path(str(folder / "kernels.py"), run_name="__main__")
    return capsys.readouterr().out.splitlines()


def test_both_kernels_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [[*range(first, first + 6)] for first in (0, 6, 12)]
    expected = [f"rows   {rows}", "behind [-1, -1]", "slots  [6, 7, 2, 3, 4, -1, -1, -1]"]
    assert printed(tmp_path, capsys) == expected


def test_what_the_changes_of_the_handout_print(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = "    tl.store(target + row * length + column, values, mask=inside)"
    shown = printed(tmp_path, capsys, (store, f"    print(column, inside)\n{store}"))
    assert shown[:3] == [BLOCK] * 3
    changes = ("column, mask=inside, other=0.0", "column"), ("values, mask=inside)", "values)")
    assert printed(tmp_path, capsys, *changes)[1] == "behind [99, 99]"
    assert "[2, 3, 6, 7, 4, -1" in printed(tmp_path, capsys, ("[3, 1, 2]", "[1, 3, 2]"))[2]
    [section] = sections_of("m3.6")
    answer = " ".join(next(piece.text for piece in section.pieces if piece.fold).split())
    assert "becomes `[99, 99]`" in answer and "2, 3, 6, 7 and 4" in answer
    assert find("m3.6").part("Predict", ROOT)[1] != answer, "it is no prediction of the exercise"
