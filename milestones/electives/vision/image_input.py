"""`ImageInputProcessor`: prompts with placeholders become prompts with images.

What a user writes has one placeholder for each image, and what is computed one for each embedding:

    <|vision_start|> <|image_pad|> <|vision_end|> What is it?
    <|vision_start|> ! ! ! ! ! ! <|vision_end|> W h a t ...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from common import LoadedModel, Message, Prompt, TokensPrompt
from common.hf.image_processor import ImageProcessor, ImageSpan
from common.text.input_processor import InputProcessor
from common.text.pictures import read_content, read_prompt, texts_of

from .images import PromptImages

if TYPE_CHECKING:
    from PIL.Image import Image


class ImageInputProcessor(InputProcessor):
    """Also takes images, or refuses them and names the field (I4)."""

    def __init__(self, loaded: LoadedModel, *rest: Any) -> None:
        super().__init__(loaded, *rest)
        self.placeholder: int | None = getattr(loaded.model.config, "image_token_id", None)
        self.mark: str | None = None  # the text of the placeholder
        if self.placeholder is not None:
            self.mark = str(self.tokenizer.convert_ids_to_tokens(self.placeholder))
            self.processor = ImageProcessor(loaded)

    def with_images(self, prompt: Prompt) -> TokensPrompt:
        """Return a prompt with its token ids and its images. Any thread may call it."""
        if isinstance(prompt, TokensPrompt) and prompt.images is not None:
            return prompt
        pictures: list[Image] = []
        if isinstance(prompt, dict):
            prompt, pictures = read_prompt(prompt)
        return self.expand(self.tokenize(prompt), pictures)

    def expand(self, prompt: TokensPrompt, pictures: Sequence[Image]) -> TokensPrompt:
        """Replace each placeholder by as many tokens as its image has.

        Raises `ValueError` if there is another number of placeholders than of images.
        """
        token_ids, text = prompt[:2]
        places = [i for i, token in enumerate(token_ids) if token == self.placeholder]
        if len(places) != len(pictures):
            raise ValueError(
                f"prompt has {len(places)} placeholders {self.mark or 'for images'} and "
                f"{len(pictures)} images: each image needs one"
            )
        if not pictures:
            return prompt
        # Refuse what does not fit before anything is computed of it.
        more = sum(self.processor.num_tokens(picture) - 1 for picture in pictures)
        self._check_num_tokens(len(token_ids) + more, 1)
        spans: list[ImageSpan] = []
        expanded = list(token_ids)
        for place, picture in zip(places, pictures, strict=True):
            start = place + len(expanded) - len(token_ids)  # images before it took more room
            image = self.processor.process(picture)
            spans.append(ImageSpan(start, image))
            expanded[start : start + 1] = expanded[start : start + 1] * image.num_tokens
        return TokensPrompt(expanded, text, PromptImages(len(expanded), spans))

    def apply_chat_template(self, messages: Sequence[Message], **variables: Any) -> TokensPrompt:
        """Render messages. A content may be a list of parts: text, and images."""
        self.check_messages(messages)
        pictures: list[Image] = []
        plain = [{**m, "content": read_content(m["content"], pictures)} for m in messages]
        return self.expand(super().apply_chat_template(plain, **variables), pictures)

    def check_content(self, content: Any) -> None:
        """Raise `ValueError` unless this is a text without placeholders, or a list of parts."""
        has_parts = isinstance(content, list) and self.placeholder is not None
        for text in texts_of(content) if has_parts else [content]:
            super().check_content(text)
            if self.mark is not None and self.mark in text:
                raise ValueError(f"messages: a text must not contain {self.mark!r}")
