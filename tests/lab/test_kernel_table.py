"""What each kernel compiles to, for each kind of GPU, stands in a file and in SPEED.md."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

import pytest

from tests.helpers import kernel_table
from tests.helpers.compile_report import compile_report

pytest.importorskip("triton", reason="Triton is for Linux")
TABLE: dict[str, Any] = json.loads(kernel_table.FILE.read_text(encoding="utf-8"))
FEW_BYTES = 32  # of spilled registers: some shapes need eight registers more than there are


@pytest.mark.thorough("it compiles all kernels for seven kinds of GPU")
@pytest.mark.parametrize("module", kernel_table.MODULES)
def test_the_kernels_compile_to_what_the_file_says(
    module: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With the version of Triton that the file names. With another one, only spills count."""
    found = kernel_table.figures_of(compile_report(module, tmp_path_factory))
    assert found and all(figures[1] <= FEW_BYTES for figures in found.values())
    if version("triton") == TABLE["triton"]:
        assert found == {name: TABLE["kernels"].get(name) for name in found}


def test_the_page_shows_the_file() -> None:
    page = kernel_table.PAGE.read_text(encoding="utf-8")
    assert "\n".join(kernel_table.lines(TABLE["kernels"])) in page
    assert {name.split(",")[0] for name in TABLE["kernels"]} >= {
        "decode_kernel", "draw_kernel", "norm_rotary_kernel", "count_kernel",
    }  # fmt: skip
