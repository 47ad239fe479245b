"""`KVCacheManager`: requests share the pages of an image only if it is the same image."""

from __future__ import annotations

from common import Request

from .m5_kv_cache import PADDING_PAGE, PageAllocator, PageTable
from .m5_kv_cache import KVCacheManager as M5KVCacheManager

__all__ = ["PADDING_PAGE", "KVCacheManager", "PageAllocator", "PageTable"]

IMAGE_KEY = 2**32  # larger than any token id, and than the number of tokens of an image


class KVCacheManager(M5KVCacheManager):
    """The tokens of two different images share no node of the tree."""

    def cache_key(self, request: Request, num_tokens: int) -> list[int]:
        """Return the first tokens of a request, as the radix tree knows them.

        All tokens of all images have the same token id, and their keys and values depend on the
        image. So the digest of its image, and its place in the image, are a part of its key.
        """
        key = super().cache_key(request, num_tokens)
        if request.images is not None:
            for part in request.images.parts(0, len(key)):
                for index, row in enumerate(range(part.first, part.last), part.place):
                    key[index] += (part.image.digest * IMAGE_KEY + row) * IMAGE_KEY
        return key
