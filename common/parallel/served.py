"""Which engines can serve a divided model."""

from __future__ import annotations

import re

# In the milestones from m3 on, the arguments of the model say everything about a forward. m1 and m2
# pass a cache of Hugging Face, and its content would differ between ranks. Electives were not
# examined: adapters, for example, would have to be divided too.
SERVED = re.compile(r"m[3-9]_\w+")


def require_servable(engine: type[object], num_ranks: int) -> None:
    """Raise `ValueError` if an engine cannot run on several ranks."""
    packages = [cls.__module__.rpartition(".")[0] for cls in engine.__mro__]
    if num_ranks > 1 and not any(SERVED.fullmatch(package) for package in packages):
        raise ValueError(
            f"tensor_parallel_size must be 1 for {packages[0]}, got {num_ranks}: only milestones "
            "from m3 on run on several ranks"
        )
