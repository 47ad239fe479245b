"""`ImageMemory`: the bytes of all processed images that are alive, in whatever queue or cache."""

from __future__ import annotations

import weakref
from collections import deque

from common import TokensPrompt

from .errors import ApiError
from .limits import RETRY_AFTER


class ImageMemory:
    """Refuses prompts with images while others fill the memory. One thread calls it.

    A processed image takes a thousand times as much memory as a file of few colours.
    """

    def __init__(self, most: int) -> None:
        """most: bytes."""
        self.most = most
        self.num_bytes = 0
        self.freed: deque[int] = deque()  # any thread may free an image

    def check(self, prompt: TokensPrompt) -> None:
        """Count the images of a new prompt. Raises `ApiError`, and counts none, without room."""
        while self.freed:
            self.num_bytes -= self.freed.popleft()
        spans = prompt.images.spans if prompt.images is not None else ()
        images = [span.image for span in spans]
        size = sum(image.pixel_values.nbytes for image in images)
        together = self.num_bytes + size
        if images and together > self.most:
            raise ApiError(
                503, f"the images of all calls would take {together} bytes of memory, the limit is "
                f"{self.most}: try later", code="too_many_bytes", headers=RETRY_AFTER,
            )  # fmt: skip
        self.num_bytes += size
        for image in images:
            weakref.finalize(image, self.freed.append, image.pixel_values.nbytes)
