"""`AdapterRegistry`: the adapters that are loaded, by name. Their matrices are on the host.

Each load of an adapter gets a number that is never used again. A request holds the `Adapter` that
its name meant when it arrived. If the name is loaded again, or removed, the request does not
change, and the prefixes that it caches are not mixed with those of the new version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from common import LoRARequest

from .peft_folder import LowRank, read_adapter

BASE = 0  # the slot of rows without an adapter
LowRanks = Mapping[str, LowRank]  # by linear layer


@dataclass(frozen=True, eq=False)
class Adapter:
    """One version of an adapter. Two loads of the same files are two adapters."""

    name: str
    path: str
    number: int  # of the load, from 1 on
    weights: LowRanks

    def __repr__(self) -> str:
        return f"Adapter({self.name!r}, {self.number})"


class Load(NamedTuple):
    """An adapter to write to a slot, at the beginning of a step."""

    slot: int
    adapter: Adapter


class AdapterRegistry:
    """Loads, finds and removes adapters."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, int]],
        max_rank: int,
        stage: Callable[[LowRanks], LowRanks],
    ) -> None:
        """shapes: (in, out) of each linear layer that may have an adapter. stage: prepares the
        matrices, once for each load, for the copies to slots.
        """
        self.shapes = shapes
        self.max_rank = max_rank
        self.stage = stage
        self.adapters: dict[str, Adapter] = {}  # by name
        self.num_loads = 0

    def load(self, request: LoRARequest) -> Adapter:
        """Read an adapter. From now on, its name means this version.

        Raises `ValueError`, and changes nothing, if the files cannot be used (I4).
        """
        weights = self.stage(read_adapter(request.lora_path, self.shapes, self.max_rank))
        self.num_loads += 1
        adapter = Adapter(request.lora_name, request.lora_path, self.num_loads, weights)
        self.adapters[adapter.name] = adapter
        return adapter

    def find(self, request: LoRARequest | None) -> Adapter | None:
        """Return the adapter that a request wants, and load it if its name is new.

        Raises `ValueError` if the name belongs to an adapter of another path.
        """
        if request is None:
            return None
        if not isinstance(request, LoRARequest):
            raise ValueError(f"lora_request must be a LoRARequest, got {type(request).__name__}")
        known = self.adapters.get(request.lora_name)
        if known is None:
            return self.load(request)
        if known.path != request.lora_path:
            raise ValueError(
                f"lora_request: {known.name!r} is loaded from {known.path}, not from "
                f"{request.lora_path}; add_lora() replaces it"
            )
        return known

    def remove(self, name: str) -> bool:
        """Forget a name. Requests that hold the adapter go on. Returns whether it was loaded."""
        return self.adapters.pop(name, None) is not None
