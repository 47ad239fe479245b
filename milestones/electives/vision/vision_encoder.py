"""`VisionEncoder`: the embeddings of images on the device, and the model's encoder."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedModel

from common.hf.image_processor import ProcessedImage
from common.hf.shared import lock_of
from common.hf.support import refuse

from .encoder_cache import CacheChanges
from .images import ImagePart

SERVED = ("qwen2_vl", "qwen2_5_vl")  # values of `model_type`


class VisionEncoder:
    """Encodes images, each by itself, and keeps what the scheduler's `EncoderCache` has."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises `UnsupportedModelError` for a model with another kind of encoder."""
        refuse(model, other_encoder(model))
        self.model = model
        self.embeddings: dict[int, torch.Tensor] = {}  # [tokens, H], by the digest of the image
        self.num_encoded = 0  # images

    def update(self, changes: CacheChanges) -> None:
        """Free embeddings, then encode images. Runs on the forward stream, in order of steps."""
        for digest in changes.freed:
            self.embeddings.pop(digest, None)  # an undone step may not have encoded it
        for image in changes.encodes:
            self.embeddings[image.digest] = self.encode(image)
            self.num_encoded += 1

    def encode(self, image: ProcessedImage) -> torch.Tensor:
        """Return the embeddings of one image, [tokens, H].

        I2: an image is never encoded together with others, so they cannot change its rounding.
        """
        model: Any = self.model
        pixels = torch.from_numpy(image.pixel_values).to(model.device)
        merge = model.config.vision_config.spatial_merge_size
        grid = torch.tensor([[1, image.rows * merge, image.columns * merge]], device=model.device)
        with lock_of(model):  # another engine may switch the attention of the same model
            [found] = model.get_image_features(pixels, grid, return_dict=True).pooler_output
        assert len(found) == image.num_tokens, f"{len(found)} rows for {image.num_tokens} tokens"
        return torch.as_tensor(found)

    def rows(self, parts: Iterable[ImagePart]) -> torch.Tensor:
        """Return the embeddings of parts of images, one after the other, [I, H]."""
        return torch.cat([self.embeddings[p.image.digest][p.first : p.last] for p in parts])


def other_encoder(model: PreTrainedModel) -> str | None:
    """Return a description of an encoder that this engine would run wrongly, or None."""
    encoder = getattr(model.config, "vision_config", None)
    if encoder is None or model.config.model_type in SERVED:
        return None
    if getattr(encoder, "deepstack_visual_indexes", None):
        return "DeepStack: features of images in several layers (deepstack_visual_indexes)"
    return f"a vision encoder of another kind ({encoder.model_type})"
