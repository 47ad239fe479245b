"""`Scheduler`: requests hold pages of all groups, and chunks end where states can be resumed."""

from __future__ import annotations

from dataclasses import replace

from common import EngineConfig, EngineStats, FinishReason, Request
from common.engine_core import EngineCoreOutput, SampledToken

from .hybrid_kv_cache import HybridKVCacheManager
from .in_flight import num_rows
from .kv_groups import FULL_ATTENTION, Groups
from .m5_scheduler import Scheduler as M5Scheduler
from .schedule_batch import ScheduleBatch


class Scheduler(M5Scheduler):
    """Gives back the pages behind the windows after each step."""

    kv_cache: HybridKVCacheManager

    def __init__(
        self, config: EngineConfig, num_pages: int, groups: Groups = FULL_ATTENTION
    ) -> None:
        super().__init__(config, num_pages)
        self.kv_cache = HybridKVCacheManager(
            num_rows(config), num_pages, config.page_size, groups, config.max_model_len or 0
        )
        for part in (self.policy, self.in_flight, self.admission):
            part.kv_cache = self.kv_cache

    def update_from_output(
        self, batch: ScheduleBatch, sampled: list[SampledToken]
    ) -> list[EngineCoreOutput]:
        outputs = super().update_from_output(batch, sampled)
        for request in [request for request in batch.requests if not request.is_finished]:
            self.kv_cache.free_behind_windows(request)
        return outputs

    def finish_request(self, request: Request, reason: FinishReason) -> None:
        # Before its memory is freed: it keeps its other pages while a step in flight writes them.
        if request.row is not None:
            self.kv_cache.free_behind_windows(request)
        super().finish_request(request, reason)

    def make_stats(self) -> EngineStats:
        num_cached = self.kv_cache.radix_cache.num_evictable_pages
        return replace(super().make_stats(), kv_pages_cached=num_cached)

    def _add(self, batch: ScheduleBatch, request: Request, num_tokens: int) -> None:
        """Let a chunk end where its state can be resumed."""
        end = self.kv_cache.chunk_end(request, request.num_computed_tokens + num_tokens)
        super()._add(batch, request, end - request.num_computed_tokens)
