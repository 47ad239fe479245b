"""`AddReqResult`: whether a waiting request joins a step, or why not."""

from __future__ import annotations

from enum import Enum


class AddReqResult(Enum):
    """SGLang has the same name, and its `NO_TOKEN` is our `NO_MEMORY`."""

    CONTINUE = "it joins"
    NO_ROW = "no row"
    NO_BUDGET = "no tokens left in the step"
    NO_MEMORY = "no memory"
    OTHER = "another reason"  # that an elective adds, such as no slot for an adapter
    PREFIX_IN_FLIGHT = "a running request computes its prefix"
