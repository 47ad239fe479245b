"""`EncoderCache`: which images have their embeddings on the device. Plain Python data, no tensors.

    image      dog    map    cat           size 64: 16 + 30 + 12 tokens are cached, 6 are free
    tokens     16     30     12
    holders    -      r1 r4  r4            the embeddings of `dog` may be evicted

A request holds an image from the first step that computes one of its tokens until all of them are
computed: their keys and values are in the KV cache then. After that, the embeddings stay until
others need their room, so that the next request with the image does not encode it again.

The step in flight may still read embeddings that the next step frees. So the scheduler only notes
changes, and the device makes them when the next step begins. vLLM: `EncoderCacheManager`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from common import Request

if TYPE_CHECKING:
    from common.hf.image_processor import ProcessedImage


@dataclass(eq=False)
class Entry:
    """An image in the cache."""

    image: ProcessedImage
    holders: set[Request] = field(default_factory=set)  # its reference count is their number


class CacheChanges(NamedTuple):
    """What a step begins with: it frees embeddings first, and then encodes images."""

    freed: list[int]  # digests
    encodes: list[ProcessedImage]


class EncoderCache:
    """I3: only running requests hold images. I5: an image without holders can be evicted."""

    def __init__(self, size: int) -> None:
        """size: the most tokens of all images in the cache together."""
        self.size = size
        self.entries: dict[int, Entry] = {}  # by digest, least recently used first
        self.num_tokens = 0  # of all entries
        self.freed: list[int] = []  # for the next step
        self.encodes: list[ProcessedImage] = []  # for the next step

    def hold(self, request: Request, image: ProcessedImage) -> bool:
        """Let a request hold an image, which becomes the most recently used one. If the cache does
        not have it, the next step encodes it. Returns False, and changes nothing, without room.
        """
        entry = self.entries.pop(image.digest, None)
        if entry is None:
            if not self.make_room(image.num_tokens):
                return False
            entry = Entry(image)
            self.num_tokens += image.num_tokens
            self.encodes.append(image)
        self.entries[image.digest] = entry
        entry.holders.add(request)
        return True

    def make_room(self, num_tokens: int) -> bool:
        """Evict images without holders, least recently used first, until `num_tokens` more fit.

        Returns False, and evicts nothing, if images with holders leave too little room.
        """
        idle = [entry.image for entry in self.entries.values() if not entry.holders]
        held = self.num_tokens - sum(image.num_tokens for image in idle)
        if held + num_tokens > self.size:
            return False
        for image in idle:
            if self.num_tokens + num_tokens <= self.size:
                break
            self.forget(image)
        return True

    def release_computed(self, request: Request) -> None:
        """Let a request release all images that it is not in the middle of. An image that it has
        not begun is held again when a step begins it.
        """
        spans = request.images.spans if request.images is not None else ()
        computed = request.num_computed_tokens
        begun = [s.image.digest for s in spans if s.start < computed < s.end]
        self.release(request, kept=begun)

    def release(self, request: Request, kept: Sequence[int] = ()) -> None:
        """Let a request release its images, except those with the digests in `kept`."""
        for span in request.images.spans if request.images is not None else ():
            digest = span.image.digest
            if digest in self.entries and digest not in kept:
                self.entries[digest].holders.discard(request)

    def forget(self, image: ProcessedImage) -> None:
        """Remove an image. The next step frees its embeddings."""
        del self.entries[image.digest]
        self.num_tokens -= image.num_tokens
        self.freed.append(image.digest)
        self.encodes = [other for other in self.encodes if other.digest != image.digest]

    def is_held(self, request: Request, image: ProcessedImage) -> bool:
        """Return whether a request holds an image."""
        entry = self.entries.get(image.digest)
        return entry is not None and request in entry.holders

    def take_changes(self) -> CacheChanges:
        """Return what the next step must begin with."""
        changes = CacheChanges(self.freed, self.encodes)
        self.freed, self.encodes = [], []
        return changes

    def undo(self, changes: CacheChanges) -> None:
        """Undo the changes of a step that was not computed, or only in part: forget the images that
        it was to encode. A request that needs one holds it again.
        """
        self.freed = changes.freed + self.freed
        for image in changes.encodes:
            if image.digest in self.entries:
                self.forget(image)

    def check_invariants(self, running: list[Request]) -> None:
        """Raise `AssertionError` if a request that does not run holds an image, or sizes differ."""
        for entry in self.entries.values():
            waiting = entry.holders.difference(running)
            assert not waiting, f"I3: {waiting} hold an image, but they do not run"
        sizes = sum(entry.image.num_tokens for entry in self.entries.values())
        assert sizes == self.num_tokens <= self.size, (
            f"I3: {sizes} tokens are cached, {self.num_tokens} counted, {self.size} allowed"
        )
