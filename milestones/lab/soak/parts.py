"""Failures as data, and the parts of a step that can fail.

`PARTS` is the only place of the soak that names what engines have inside. A place counts from its
engine on, in all engines above it; None: from there on, no engine has the part. `a.b.call` is a
method of the engine's object `a.b`. `file:name` is a function or a method in a file of its package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from common import StructuredOutputsParams

from ...chain import chain, extended, load

FaultKind = Literal["forward", "logits", "text"]

PARTS: dict[str, dict[str, str | None]] = {
    "schedule": {"m1_single": "core.scheduler.schedule"},
    "draft": {"speculative": "core.scheduler.drafting.drafter.propose"},
    "prepare": {"m2_continuous": "core.runner.inputs.prepare"},
    "table": {"m3_paged": "core.runner.inputs.update_page_table"},
    "upload": {"m5_overlap": "buffers:StepBuffers.upload"},
    "copy": {
        "m2_continuous": "core.runner.kv_pool.move",
        "m3_paged": None,
        "priority": "core.runner.host_pool.copy",
    },
    "load": {
        "priority": "core.runner.host_pool._read",
        "lora": "core.runner.lora.write",
        "hybrid_memory": "core.runner.states.step",
    },
    "forward": {"m1_single": "loaded.model.forward"},
    "store": {
        "m2_continuous": "core.runner.kv_pool.update",
        "m3_paged": "core.runner.ops.store_kv",
    },
    "pool": {"embedding": "model_runner:pool"},
    "masks": {"structured_output": "core.scheduler.grammars.masks"},
    "sample": {"m1_single": "model_runner:sample"},
    "future": {"m5_overlap": "core.runner.future_map.store"},
    "download": {"m5_overlap": "buffers:StepBuffers.download"},
    "update": {"m1_single": "core.scheduler.update_from_output"},
    "compile": {"structured_output": "core.scheduler.grammars.compiler.compile"},
}
KINDS = ("once", "lasting")  # of failures
# A failure of these parts may end the engine, which then says so: nothing can be undone there.
MAY_DIE = {"schedule", "update"}
# After one failure of these parts, the request ends. After a failure of all others, the step is
# undone and tried again, and no request ends.
MAY_END = {"compile"}
RETRIED = [part for part in PARTS if part not in MAY_DIE | MAY_END]


@dataclass(frozen=True)
class Fault:
    """An injected failure of one request.

    forward: each forward that feeds this request's token at `position` raises.
    logits: the logits after this request's token at `position` have no finite distribution.
    text: the detokenizer raises for the output token at `position`.
    """

    kind: FaultKind
    position: int  # in prompt and output together
    token: int  # the token at `position`; no other request of the plan has it there


@dataclass
class PartFault:
    """A failure of a part of a step.

    step: the number of the first schedule in which it may fail. skip: calls that do not fail.
    is_late: the part does its work before it fails.
    victim: only calls for this request fail; None: any call. grammar: that of the victim.
    lasts: it fails as long as the victim lives, and not only once.
    """

    part: str
    step: int
    skip: int
    is_late: bool
    victim: str | None = None
    grammar: StructuredOutputsParams | None = None
    lasts: bool = False
    skipped: int = 0


def place_of(part: str, milestone: str) -> str | None:
    """Return where a failure of a part is injected; None for an engine without this part."""
    places = PARTS[part]
    return next((places[name] for name in reversed(chain(milestone)) if name in places), None)


def parts_of(milestone: str) -> list[str]:
    """Return the parts that an engine has."""
    return [part for part in PARTS if place_of(part, milestone) is not None]


def find(part: str, engine: Any, milestone: str) -> tuple[Any, str]:
    """Return the object that has the function of a part, and the name of the function."""
    place = place_of(part, milestone)
    assert place is not None, f"{milestone} has no part {part!r}"
    module, _, path = place.rpartition(":")
    *names, name = path.split(".")
    owner = load(milestone, module) if module else engine
    if not names and not hasattr(owner, name):  # the code of the milestone looks it up
        bases = [file.removesuffix(".py") for file in extended(milestone)]
        owner = load(milestone, next(base for base in bases if base.endswith(f"_{module}")))
    for step in names:
        owner = getattr(owner, step)
    return owner, name


def is_searching(engine: Any) -> bool:
    """Return whether an engine searches for the cause of a failure."""
    return bool(engine.search.is_active)
