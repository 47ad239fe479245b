"""Code that all milestones share and no lesson changes: configuration, sampling, text, models."""

from .config import EMBEDDED_MODEL, EngineConfig
from .engine_call import EngineDeadError
from .failure_isolation import FailureIsolation
from .input_processor import Message, Prompt, TokensPrompt
from .model_loader import LoadedModel, load_model
from .model_support import UnsupportedModelError
from .offline import OfflineEngine
from .outputs import CompletionOutput, EngineStats, FinishReason, RequestMetrics, RequestOutput
from .request import Request
from .sampling_params import SamplingParams

__all__ = [
    "EMBEDDED_MODEL",
    "CompletionOutput",
    "EngineConfig",
    "EngineDeadError",
    "EngineStats",
    "FailureIsolation",
    "FinishReason",
    "LoadedModel",
    "Message",
    "OfflineEngine",
    "Prompt",
    "Request",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "TokensPrompt",
    "UnsupportedModelError",
    "load_model",
]
