"""Write what the compilers report of each kernel, for each kind of GPU, into a file and SPEED.md.

    python -m tests.helpers.kernel_table

A test compares the file with what the pinned version of Triton compiles.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

from milestones.chain import ROOT
from milestones.recording import write_block
from tests.helpers.process import run_python

MODULES = ("m3_paged.kernels", "common.fast.passes.triton_kernels", "common.sampling.draw_kernels")
FILE = ROOT / "milestones/docs/results/kernels.json"
PAGE = ROOT / "milestones/docs/SPEED.md"
NAMES = {75: "T4", 80: "A100", 86: "RTX 30", 89: "L4", 90: "H100", 100: "B200", 120: "RTX 50"}
SHOWN = ("decode_kernel", "prefill_kernel")


def figures_of(report: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the figures of the kernels of a module, by a name of each variant.

    They are: registers, bytes of spilled registers, bytes of shared memory, layouts of warps.
    """
    found: dict[str, list[Any]] = {}
    for entry in report:
        shape = f"head_dim {entry['dim']}" if "dim" in entry else f"group {entry['group']}"
        name = f"{entry['kernel']}, sm_{entry['capability']}, {entry['dtype']}, {shape}"
        while name in found:  # the same kernel with other constants
            name += "+"
        warps = sorted(set(entry["warps"]))
        found[name] = [entry["registers"], entry["spill_stores"], entry["shared"], warps]
    return found


def lines(table: dict[str, list[Any]]) -> list[str]:
    """Return a table of the attention kernels in 16 bits, with heads of 128 numbers."""
    rows = ["| kernel | " + " | ".join(f"{NAMES[cc]}, {cc / 10}" for cc in NAMES) + " |"]
    rows.append("|---" * (1 + len(NAMES)) + "|")
    for kernel in SHOWN:
        cells = []
        for capability in NAMES:
            figures = table[f"{kernel}, sm_{capability}, fp16, head_dim 128"]
            cells.append(f"{figures[0]}, {figures[2] / 1024:.0f} KiB")
        rows.append(f"| `{kernel}` | " + " | ".join(cells) + " |")
    return rows


def main() -> None:
    """Compile all kernels, and write the file and the page."""
    table = dict[str, list[Any]]()
    for module in MODULES:
        text = run_python("-m", "tests.helpers.compile_kernels", module, TRITON_INTERPRET=None)
        table |= figures_of(json.loads(text))
    rows = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(figures)}" for name, figures in table.items()
    )
    head = f'{{\n"triton": "{version("triton")}",\n"kernels": {{\n'
    FILE.write_text(f"{head}{rows}\n}}\n}}\n", encoding="utf-8")
    write_block(PAGE, "kernels", lines(table))


if __name__ == "__main__":
    main()
