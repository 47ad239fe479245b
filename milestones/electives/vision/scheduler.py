"""`Scheduler`: a chunk ends before an image for which the encoder cache has no room."""

from __future__ import annotations

from common import EngineConfig, FinishReason, Request

from .encoder_cache import EncoderCache
from .m5_scheduler import Scheduler as M5Scheduler
from .schedule_batch import ScheduleBatch


class Scheduler(M5Scheduler):
    """Owns the encoder cache, too."""

    def __init__(self, config: EngineConfig, num_pages: int) -> None:
        super().__init__(config, num_pages)
        self.encoder_cache = EncoderCache(config.encoder_cache_size)
        self.lacks_room = False  # a request of this step waits for room in the encoder cache

    def add_request(self, request: Request) -> None:
        images = [span.image for span in request.images.spans] if request.images else []
        largest, size = max((i.num_tokens for i in images), default=0), self.encoder_cache.size
        if largest > size:
            raise ValueError(f"an image has {largest} tokens, more than encoder_cache_size={size}")
        super().add_request(request)

    def schedule(self) -> ScheduleBatch:
        for request in self.running:
            self.encoder_cache.release_computed(request)
        self.lacks_room = False
        batch = super().schedule()
        if batch.requests:
            batch.changes = self.encoder_cache.take_changes()
        return batch

    def undo(self, batch: ScheduleBatch) -> None:
        self.encoder_cache.undo(batch.changes)
        super().undo(batch)

    def finish_request(self, request: Request, reason: FinishReason) -> None:
        super().finish_request(request, reason)
        self.encoder_cache.release(request)

    def send_back(self, request: Request) -> None:
        super().send_back(request)
        self.encoder_cache.release(request)

    def check_invariants(self) -> None:
        super().check_invariants()
        self.encoder_cache.check_invariants(self.running)

    def _add(self, batch: ScheduleBatch, request: Request, num_tokens: int) -> None:
        if request.images is not None:
            if self.lacks_room:
                num_tokens = self.num_tokens_before_new_image(request, num_tokens)
            wanted = num_tokens
            num_tokens = self.num_tokens_with_images(request, wanted)
            self.lacks_room |= num_tokens < wanted
        if num_tokens > 0:
            super()._add(batch, request, num_tokens)

    def num_tokens_before_new_image(self, request: Request, num_tokens: int) -> int:
        """Return how many of the next tokens come before an image that the request does not hold.

        I5: if an older request waits for room, no younger one begins an image before it.
        """
        start = request.num_computed_tokens
        for part in request.images.parts(start, start + num_tokens):
            if not self.encoder_cache.is_held(request, part.image):
                return part.place
        return num_tokens

    def num_tokens_with_images(self, request: Request, num_tokens: int) -> int:
        """Return how many of the next `num_tokens` tokens can be computed: those before the first
        image without room. The request holds the images of these tokens.

        I5: what takes the room is held by running requests, which need no other image to finish it.
        """
        start = request.num_computed_tokens
        for part in request.images.parts(start, start + num_tokens):
            if not self.encoder_cache.hold(request, part.image):
                return part.place
        return num_tokens
