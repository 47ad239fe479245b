"""Record the tables of `measure` for the slides of electives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from milestones.course.student import measure_invariance
from milestones.course.student.measure_agents import by_policy
from milestones.course.student.measure_kv_quant import by_memory
from milestones.course.student.measure_vision import MODEL, by_way

from .record_ideas import TINY

Json = dict[str, Any]
Runs = dict[str, tuple[tuple[str, ...], Callable[..., Json]]]
POLICY_KEYS = ("again", "hits", "p50", "p95", "tail_again", "tail_hits", "tail_ttft")
ASKED = 16  # times


def policies(_name: str) -> Json:
    """Return a row for each policy, without host memory and with it."""
    rows = []
    for policy, *cells in by_policy("agents", TINY, (0.0, 0.5)):
        figures = [float(cell.rstrip("%")) for cell in cells]
        name = policy.replace(" + host", "_host")
        rows.append({"policy": name, **dict(zip(POLICY_KEYS, figures, strict=True))})
    return {"rows": rows}


def memory(_name: str) -> Json:
    """Return a row for each cache in the smallest memory of the handout's table."""
    rows = []
    for kilobytes, cache, pages, running, _, steps in by_memory("kv_quant", TINY, (32,)):
        rows.append({
            "cache": cache, "kilobytes": int(kilobytes), "pages": int(pages),
            "running": int(running), "steps": int(steps),
        })  # fmt: skip
    return {"rows": rows}


def images(_name: str) -> Json:
    """Return a row for each thing that the engine keeps, with questions about four images."""
    rows = []
    for number, way, encoded, computed, _, *times in by_way("vision", MODEL, (4,)):
        rows.append({
            "kept": way.replace(" ", "_"), "images": int(number), "encoded": int(encoded),
            "computed": int(computed), "all_ms": int(times[-1]),
        })  # fmt: skip
    return {"rows": rows}


def answers(_name: str) -> Json:
    """Return how many texts and log probabilities one prompt has, for each variant."""
    rows = [
        {"variant": name, "texts": int(texts), "logprobs": int(logprobs)}
        for name, texts, logprobs, *_ in measure_invariance.by_variant("invariance", TINY, (ASKED,))
    ]
    return {"asked": ASKED, "rows": rows}


# Another run is equal.
MEASURED: Runs = {
    "agents_policies": (("agents",), policies),
    "kv_quant_memory": (("kv_quant",), memory),
    "vision_images": (("vision",), images),
}
# The bits of a sum, and so the number of different ones, are those of a kind of CPU.
OF_THIS_MACHINE: Runs = {"invariance_answers": (("invariance",), answers)}
