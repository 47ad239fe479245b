"""Code that all milestones share and no lesson changes: configuration, sampling, text, models.

Most names are plain data. The others need a model, and are imported when they are first used.
"""

from typing import TYPE_CHECKING

from . import cpu  # noqa: F401 (the first import: it must run before torch computes anything)
from .config import EMBEDDED_MODEL, EngineConfig
from .guard import EngineDeadError
from .inputs import AgentHint, LoRARequest, Message, PoolingParams, Prompt, TokensPrompt
from .lazy import lazy_exports
from .outputs import (
    CompletionOutput,
    EngineStats,
    FinishReason,
    PoolingOutput,
    PoolingRequestOutput,
    RequestMetrics,
    RequestOutput,
)
from .request import Request
from .sampling.params import SamplingParams
from .sampling.structured import StructuredOutputsParams

if TYPE_CHECKING:
    from .hf.loaded_model import LoadedModel
    from .hf.model_loading import load_model
    from .hf.support import UnsupportedModelError
    from .llm_engine import LLMEngine
else:
    __getattr__ = lazy_exports(
        __name__,
        {
            "LoadedModel": ".hf.loaded_model",
            "LLMEngine": ".llm_engine",
            "UnsupportedModelError": ".hf.support",
            "load_model": ".hf.model_loading",
        },
    )

__all__ = [
    "EMBEDDED_MODEL",
    "AgentHint",
    "CompletionOutput",
    "EngineConfig",
    "EngineDeadError",
    "EngineStats",
    "FinishReason",
    "LLMEngine",
    "LoRARequest",
    "LoadedModel",
    "Message",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "Prompt",
    "Request",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TokensPrompt",
    "UnsupportedModelError",
    "load_model",
]
