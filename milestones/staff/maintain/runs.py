"""The engines of m1 to m3 for the handouts' pictures. `workload_run.py` has their requests."""

from __future__ import annotations

import m1_single
import m2_continuous
import m3_paged
from common import LLMEngine, LoadedModel, load_model

from ...course.student.workload_run import config, of_pages

ROWS = 6  # of the slot cache


def load() -> LoadedModel:
    """Load the model of all runs."""
    return load_model(config())


def single(loaded: LoadedModel, *, use_cache: bool = True) -> LLMEngine:
    """Return the engine of m1_single."""
    return m1_single.LLMEngine(config(), loaded, use_cache=use_cache)


def slots(loaded: LoadedModel, rows: int = ROWS) -> LLMEngine:
    """Return the engine of m2_continuous."""
    return m2_continuous.LLMEngine(config(max_num_seqs=rows), loaded)


def paged(loaded: LoadedModel) -> LLMEngine:
    """Return the engine of m3_paged, with the memory of a few rows."""
    return m3_paged.LLMEngine(of_pages(), loaded)
