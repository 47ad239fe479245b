"""`LADDER_CPU=x86-64-v3` makes this machine a narrower one, for our kernels and for torch.

So one machine can show what others compute: `x86-64-v3` is a CPU with AVX2 and without AVX-512, and
`x86-64` is one that has neither. A program that is started by this one is as narrow.

Torch and its libraries choose their code by themselves. They read their own variables when they
compute for the first time, so the package imports this module before it imports torch.
"""

from __future__ import annotations

import os
import platform
from collections.abc import MutableMapping
from pathlib import Path

VARIABLE = "LADDER_CPU"
KINDS = {
    "x86-64-v3": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "x86-64": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_CBWR": "COMPATIBLE",  # MKL ignores MKL_ENABLE_INSTRUCTIONS on an AMD CPU
    },
}
NEEDED = {"x86-64-v3": {"avx2", "bmi2", "f16c", "fma"}}  # in the words of /proc/cpuinfo


def narrow(environment: MutableMapping[str, str]) -> str:
    """Set the variables of torch's libraries; return the CPU that our C is compiled for.

    Raises `ValueError` for a kind of CPU that is unknown or that this machine cannot be.
    """
    if not (kind := environment.get(VARIABLE)):
        return "native"
    if kind not in KINDS:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(KINDS)}, got {kind!r}")
    if platform.machine() not in ("x86_64", "AMD64"):
        raise ValueError(f"{VARIABLE}={kind} needs an x86-64 CPU, this one is {platform.machine()}")
    if lacking := NEEDED.get(kind, set()) - features():
        raise ValueError(f"{VARIABLE}={kind}: this CPU has no {', '.join(sorted(lacking))}")
    environment.update(KINDS[kind])
    return kind


def features() -> set[str]:
    """Return the features of this CPU; all that are asked for where the system does not say it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set().union(*NEEDED.values())
    return set(next((line for line in lines if line.startswith("flags")), "").split())


MARCH = narrow(os.environ)
