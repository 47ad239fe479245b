"""Code that all milestones share and no lesson changes: configuration, sampling, text, models."""

from . import cpu  # noqa: F401 (the first import: it must run before torch computes anything)
from .config import EMBEDDED_MODEL, EngineConfig
from .engine.call import EngineDeadError
from .engine.failure_isolation import FailureIsolation
from .engine.offline import OfflineEngine
from .hf.loaded import LoadedModel
from .hf.loader import load_model
from .hf.support import UnsupportedModelError
from .lora_request import LoRARequest
from .outputs import (
    CompletionOutput,
    EngineStats,
    FinishReason,
    RequestMetrics,
    RequestOutput,
)
from .pooling import PoolingOutput, PoolingParams, PoolingRequestOutput
from .request import Request
from .sampling.params import SamplingParams
from .sampling.structured import StructuredOutputsParams
from .text.input_processor import Message, Prompt, TokensPrompt

__all__ = [
    "EMBEDDED_MODEL",
    "CompletionOutput",
    "EngineConfig",
    "EngineDeadError",
    "EngineStats",
    "FailureIsolation",
    "FinishReason",
    "LoRARequest",
    "LoadedModel",
    "Message",
    "OfflineEngine",
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
