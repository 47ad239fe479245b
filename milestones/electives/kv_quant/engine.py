"""`LLMEngine`: m5's, with a format for the numbers of the cache."""

from __future__ import annotations

from common import EngineConfig, LoadedModel

from .formats import find_format
from .m5_engine import EngineCore
from .m5_engine import LLMEngine as M5LLMEngine

__all__ = ["EngineCore", "LLMEngine"]


class LLMEngine(M5LLMEngine):
    """Runs requests until they finish, one `step` at a time."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        loaded: LoadedModel | None = None,
        *,
        kv_cache_dtype: str = "int8",
    ) -> None:
        """kv_cache_dtype: the name of a format in `FORMATS`: `int8`, `fp8` or `int4`."""
        self.line_type = find_format(kv_cache_dtype)
        super().__init__(config, loaded)

    def make_core(self) -> EngineCore:
        from .model_runner import ModelRunner  # not above: a core needs no model

        runner = ModelRunner(self.loaded.model, self.config, self.line_type)
        return EngineCore(self.config, runner)
