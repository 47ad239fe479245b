"""The pictures that users give with a prompt, and how they are read and refused (I4).

Only the elective vision takes pictures. They are images of Pillow, which the extra `vision`
installs. A data URL has the bytes of a file; nothing is fetched from the network.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..validation import shown

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG")
MOST_BYTES = 16 << 20  # of a file
MOST_PIXELS = 1 << 24  # of all files of a conversation: small ones can be decoded to gigabytes
DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,", re.ASCII)
FIELDS = ("prompt", "prompt_token_ids", "multi_modal_data")
PARTS = "messages: a part of a content must have the type text, image_url or image_pil"


def read_prompt(given: dict[str, Any]) -> tuple[Any, list[Image]]:
    """Return the prompt of a dict, text or token ids, and its pictures.

    As in vLLM, `multi_modal_data` is `{"image": picture}` or `{"image": [picture, ...]}`.
    """
    data = given.get("multi_modal_data", {})
    if given.keys() - set(FIELDS) or not isinstance(data, dict) or data.keys() - {"image"}:
        raise ValueError(
            f"prompt must have no other fields than {', '.join(FIELDS)}, and multi_modal_data only "
            f"'image', got {shown(given)}"
        )
    pictures = data.get("image", [])
    pictures = list(pictures) if isinstance(pictures, (list, tuple)) else [pictures]
    for picture in pictures:
        _require_picture("multi_modal_data: image", picture)
    return given.get("prompt_token_ids", given.get("prompt", "")), pictures


def read_content(content: Any, pictures: list[Image]) -> Any:
    """Return the content of a message as chat templates take it.

    content: a text, or a list of parts: texts and pictures, which are appended to `pictures`.
    """
    if not isinstance(content, list):
        return content
    parts: list[dict[str, str]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
            continue
        if kind == "image_url" and isinstance(part.get("image_url"), dict):
            taken = sum(picture.width * picture.height for picture in pictures)
            pictures.append(open_data_url(part["image_url"].get("url"), MOST_PIXELS - taken))
        elif kind == "image_pil":
            _require_picture("messages: image_pil", part.get("image_pil"))
            pictures.append(part["image_pil"])
        else:
            raise ValueError(f"{PARTS}, got {shown(part)}")
        parts.append({"type": "image"})
    return parts


def texts_of(content: list[Any]) -> list[Any]:
    """Return the texts of the parts of a content. `read_content` checks the other parts."""
    texts = (part for part in content if isinstance(part, dict) and part.get("type") == "text")
    return [part.get("text") for part in texts]


def open_data_url(url: Any, most_pixels: int = MOST_PIXELS) -> Image:
    """Return the picture of a data URL. Raises `ValueError` that names what is wrong."""
    if not isinstance(url, str) or (start := DATA_URL.match(url)) is None:
        raise ValueError(
            "image_url: url must be a data URL, data:image/png;base64,..., because nothing is "
            f"fetched, got {shown(url)}"
        )
    if (len(url) - start.end()) * 3 // 4 > MOST_BYTES:
        raise ValueError(f"image_url: the file must have at most {MOST_BYTES} bytes")
    try:
        data = base64.b64decode(url[start.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"image_url: url is not base64: {error}") from None
    return open_picture(data, most_pixels)


def open_picture(data: bytes, most_pixels: int = MOST_PIXELS) -> Image:
    """Return the picture in the bytes of a PNG or JPEG file, upright."""
    _require_pillow()
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            width, height = picture.size  # from the head of the file, before anything is decoded
            if width * height > most_pixels:
                raise ValueError(
                    f"it has {width} x {height} pixels, and all images together must have at most "
                    f"{MOST_PIXELS}"
                )
            picture.load()
            return ImageOps.exif_transpose(picture)
    except Image.UnidentifiedImageError:
        raise ValueError(f"image_url: the file is neither {' nor '.join(FORMATS)}") from None
    except MemoryError:
        raise
    except Exception as error:  # Pillow raises exceptions of many classes for damaged files
        raise ValueError(f"image_url: the image cannot be used: {str(error)[:200]}") from error


def _require_picture(field: str, value: Any) -> None:
    """Raise `ValueError` unless this is an image of Pillow."""
    _require_pillow()
    from PIL.Image import Image

    if not isinstance(value, Image):
        raise ValueError(f"{field} must be a PIL.Image.Image, got {shown(value)}")


def _require_pillow() -> None:
    if find_spec("PIL") is None:
        raise ValueError(
            "multi_modal_data: Pillow is not installed: python -m milestones extras vision "
            "installs it"
        )
