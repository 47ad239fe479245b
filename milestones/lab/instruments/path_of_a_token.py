"""Count the files and functions that one decode token crosses.

    python -m milestones.lab.instruments.path_of_a_token

One request on a tiny model, its sixth step, default options, the host's thread. The fast path
(`common/fast`) is counted apart, because it replaces what a milestone's page shows.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from common import EngineConfig, SamplingParams

from ...chain import ROOT, load, milestones

STEP = 6


def crossed(milestone: str) -> dict[str, set[str]]:
    """Return the functions that the step calls, by file: paths relative to the project."""
    with load(milestone).LLMEngine(EngineConfig(model="tiny-llama", device="cpu")) as engine:
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=STEP + 4, ignore_eos=True))
        for _ in range(STEP - 1):
            engine.step()
        found: dict[str, set[str]] = defaultdict(set)

        def note(frame: FrameType, event: str, arg: Any) -> None:
            path = Path(frame.f_code.co_filename)
            if event == "call" and path.is_relative_to(ROOT):
                # Python 3.10 knows only the last part of a function's name.
                name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
                found[path.relative_to(ROOT).as_posix()].add(name)

        sys.setprofile(note)
        try:
            engine.step()
        finally:
            sys.setprofile(None)
    return {path: names for path, names in found.items() if not path.startswith(".")}


def main() -> None:
    """Print the counts of each milestone, and the names."""
    console = Console(soft_wrap=True)
    for milestone in milestones():
        found = crossed(milestone)
        fast = {path: names for path, names in found.items() if path.startswith("common/fast/")}
        plain = {path: names for path, names in found.items() if path not in fast}
        functions, fast_functions = (sum(map(len, part.values())) for part in (plain, fast))
        console.print(
            f"{milestone}: {len(plain)} files, {functions} functions; "
            f"fast path: {len(fast)} more files, {fast_functions} functions"
        )
        for path, names in sorted(plain.items()):
            console.print(f"    {path}: {', '.join(sorted(names))}")


if __name__ == "__main__":
    main()
