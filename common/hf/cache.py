"""The folder in which models and kernels are kept after they were converted or compiled once."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return `$LLM_LADDER_CACHE` if it is set, else `llm-ladder` in the user's cache folder."""
    if override := os.environ.get("LLM_LADDER_CACHE"):
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llm-ladder"
