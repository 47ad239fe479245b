"""`ScheduleBatch`: the work of one step, with the parts of images in its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from common import Request

from .encoder_cache import CacheChanges
from .images import ImagePart
from .m5_schedule_batch import ScheduleBatch as M5ScheduleBatch


@dataclass
class ScheduleBatch(M5ScheduleBatch):
    """A chunk may begin and end inside an image."""

    image_parts: list[ImagePart] = field(default_factory=list)  # indices count in the step's tokens
    changes: CacheChanges = field(default_factory=lambda: CacheChanges([], []))

    @property
    def is_decode(self) -> bool:
        """Whether each request has one token, which is text. CUDA graphs read no embeddings."""
        return super().is_decode and not self.image_parts

    def add(self, request: Request, num_tokens: int) -> None:
        index, start = self.num_tokens, request.num_computed_tokens
        super().add(request, num_tokens)
        if request.images is not None:
            for part in request.images.parts(start, start + num_tokens):
                self.image_parts.append(part._replace(place=index + part.place))
