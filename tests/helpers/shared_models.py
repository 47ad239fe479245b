"""Models that are loaded once for all tests, and audited engines on them."""

from __future__ import annotations

import functools
from typing import Any

import torch

from common import EngineConfig, LLMEngine, LoadedModel, load_model
from milestones.lab.instruments.audit import audited_engine_class
from tests import conftest


@functools.cache
def shared_model(name: str) -> LoadedModel:
    """Return a model that is loaded once for the whole run. Engines share it."""
    with torch.inference_mode(False):  # other tests may use it outside of inference mode
        return load_model(EngineConfig(model=name, device="cpu"))


@functools.cache
def plain_model(name: str) -> LoadedModel:
    """Return the model as Hugging Face made it, without our passes. The oracle uses it."""
    with torch.inference_mode(False):  # other tests may use it outside of inference mode
        return load_model(EngineConfig(model=name, device="cpu"), plain=True)


def build_engine(
    milestone: str, model: str | LoadedModel = "tiny-llama", **config: Any
) -> LLMEngine:
    """Return an audited engine on a shared model, in the mode of this run of the tests."""
    loaded = shared_model(model) if isinstance(model, str) else model
    config = {"enable_overlap": conftest.MODE != "serial", **config}
    return audited_engine_class(milestone, conftest.MODE)(
        EngineConfig(model=loaded.name, device="cpu", **config), loaded
    )
