"""`ImageProcessor`: from a picture to what a vision encoder reads, by Hugging Face's processor.

It needs Pillow, and not torchvision. Only the elective vision has images.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from ..validation import shown

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

    from .loaded_model import LoadedModel

TINY_OPTIONS: dict[str, Any] = {"min_pixels": 8 * 8 * 4, "max_pixels": 8 * 8 * 64}  # 4 to 64 tokens
MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr")  # of Pillow, with 8 bits or less
WIDEST = 200  # times as wide as high, or as high as wide


@dataclass(frozen=True, eq=False)
class ProcessedImage:
    """An image as the encoder reads it. Its embeddings have one row for each token."""

    digest: int  # of the picture and of the options of its processor: equal digests, equal inputs
    rows: int  # of tokens
    columns: int
    pixel_values: np.ndarray  # [patches, numbers of a patch] float32

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns


class ImageSpan(NamedTuple):
    """The tokens [start, end) of a prompt are those of an image."""

    start: int
    image: ProcessedImage

    @property
    def end(self) -> int:
        return self.start + self.image.num_tokens


class ImageProcessor:
    """Resizes a picture, cuts it into patches, and identifies it by a digest."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.name = loaded.name
        self.encoder_config: Any = loaded.model.config.vision_config

    @functools.cached_property
    def of_model(self) -> Any:
        """The image processor of the model. Raises `ImportError` without Pillow."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        if not self.name.startswith("tiny-"):
            return Qwen2VLImageProcessorPil.from_pretrained(self.name)
        config = self.encoder_config
        return Qwen2VLImageProcessorPil(
            patch_size=config.patch_size,
            merge_size=config.spatial_merge_size,
            temporal_patch_size=config.temporal_patch_size,
            **TINY_OPTIONS,
        )

    @functools.cached_property
    def options(self) -> bytes:
        """The options of the processor: with other options, the same picture is another image."""
        return json.dumps(self.of_model.to_dict(), sort_keys=True, default=str).encode()

    def num_tokens(self, picture: Image) -> int:
        """Return how many tokens a picture has. Raises `ValueError` if it cannot be an image."""
        width, height = picture.size
        if min(width, height) < 1 or max(width, height) > WIDEST * min(width, height):
            raise ValueError(
                f"an image must be at most {WIDEST} times as wide as high, or as high as wide, "
                f"got {width} x {height} pixels"
            )
        if picture.mode not in MODES:
            raise ValueError(
                f"an image must have one of the modes {', '.join(MODES)}, got {shown(picture.mode)}"
            )
        patches: int = self.of_model.get_number_of_image_patches(height, width)
        return patches // self.of_model.merge_size**2

    def process(self, picture: Image) -> ProcessedImage:
        """Return what the encoder reads of a picture. Raises `ValueError` if it is damaged."""
        try:
            colours = picture.convert("RGB")  # palettes and transparency are gone from here on
        except (OSError, SyntaxError) as error:  # Pillow reads a file when it is first needed
            raise ValueError(f"an image cannot be read: {error}") from error
        digest = blake2b(self.options, digest_size=16)
        digest.update(f"{colours.size}".encode())  # the same bytes may have another shape
        digest.update(colours.tobytes())
        found = self.of_model.preprocess([colours], return_tensors="np")
        _, rows, columns = (int(n) for n in found["image_grid_thw"][0])
        merge = self.of_model.merge_size
        number = int.from_bytes(digest.digest(), "big")
        return ProcessedImage(number, rows // merge, columns // merge, found["pixel_values"])
