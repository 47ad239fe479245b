"""`StepModel`: the seconds of a decode step and of a prefill, as they were measured.

`steps.json` has those of one machine, and its name. `python -m milestones scale steps` makes it
from the results of `python -m milestones curves` and `bench`, which measure on a quiet machine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

MEASURED = Path(__file__).with_name("steps.json")
RESULTS = Path(__file__).parents[2] / "docs" / "results"
ENGINE = "m5_overlap"
LARGEST_PREFILL = 1024  # tokens: the last point of the line
Points = Sequence[tuple[float, float]]  # a size and its seconds, in order of sizes


@dataclass(frozen=True)
class StepModel:
    """Seconds of steps, linear between two measured sizes and beyond the last one.

    decode: by the number of requests that decode together. prefill: by the number of tokens of one
    prompt that are computed.
    """

    machine: str
    decode: Points
    prefill: Points

    def decode_seconds(self, num_requests: int) -> float:
        """Return the seconds of a decode step of that many requests."""
        return interpolated(self.decode, num_requests)

    def prefill_seconds(self, num_tokens: float) -> float:
        """Return the seconds of a prefill of that many tokens."""
        return interpolated(self.prefill, num_tokens)


def interpolated(points: Points, size: float) -> float:
    """Return the value at `size`, on the line through the two points around it.

    Below the first point, the value is that of the first point: a step has a least time.
    """
    if size <= points[0][0] or len(points) == 1:
        return points[0][1]
    upper = next((i for i, point in enumerate(points) if point[0] >= size), len(points) - 1)
    (x0, y0), (x1, y1) = points[upper - 1], points[upper]
    return y0 + (y1 - y0) * (size - x0) / (x1 - x0)


def load_steps(path: Path = MEASURED) -> StepModel:
    """Read a step model. Raises `OSError` or `ValueError` if the file is not one."""
    document = json.loads(path.read_text(encoding="utf-8"))
    points = {
        name: tuple((float(size), float(seconds)) for size, seconds in document[name])
        for name in ("decode", "prefill")
    }
    return StepModel(str(document["machine"]), points["decode"], points["prefill"])


def measured_steps() -> dict[str, Any]:
    """Return the document of `steps.json`, from the recorded results.

    decode: as `curves` measured it. prefill: of each workload of `bench`, the seconds that its
    decode steps do not explain, over its prefill tokens; the median of the workloads.
    """
    curves = json.loads((RESULTS / "curves.json").read_text(encoding="utf-8"))
    ladder = json.loads((RESULTS / "ladder.json").read_text(encoding="utf-8"))
    assert curves["machine"] == ladder["machine"], "the two results are of different machines"
    decode = [(size, ms / 1000) for size, ms in curves["milliseconds"]["running"]]
    per_token = []
    for result in ladder["engines"][ENGINE].values():
        steps, rows = result["stats"]["num_steps"], result["stats"]["decode_tokens"]
        decoding = steps * interpolated(decode, rows / steps)
        per_token.append((median(result["seconds"]) - decoding) / result["stats"]["prefill_tokens"])
    least = decode[0][1]
    prefill = [(1, least), (LARGEST_PREFILL, least + LARGEST_PREFILL * median(per_token))]
    return {
        "machine": ladder["machine"],
        "engine": f"{ENGINE}, SmolLM2-135M",
        "decode": [[size, round(seconds, 6)] for size, seconds in decode],
        "prefill": [[size, round(seconds, 6)] for size, seconds in prefill],
    }
