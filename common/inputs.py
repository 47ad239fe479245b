"""What users give to an engine with a request, beside `SamplingParams`: plain data.

Only the elective `lora` has adapters, only `embedding` computes vectors, and only `agents` reads
hints about conversations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from .validation import require_choice, require_float, require_int, require_text

LONGEST_NAME = 4096  # characters of an adapter's name or path
LONGEST_SESSION_ID = 256  # characters
LONGEST_PAUSE = 86_400.0  # seconds
NO_POOLING = (
    "this engine makes no embeddings; the elective embedding makes them, of models that have an "
    "output embedding"
)
NO_IMAGES = "this engine takes no images; the elective vision takes them"


class TokensPrompt(NamedTuple):
    """A prompt that is already tokenized, and optionally its text.

    images: of a prompt with placeholders for images that the elective `vision` has expanded.
    """

    prompt_token_ids: list[int]
    prompt: str | None = None
    images: Any = None


# A dict is a prompt with images, as in vLLM: {"prompt": text, "multi_modal_data": {"image": [...]}}
Prompt = str | Sequence[int] | TokensPrompt | dict[str, Any]
Message = dict[str, Any]  # with `role` and `content`: a text, or parts for the elective `vision`


@dataclass(frozen=True)
class LoRARequest:
    """The adapter that a request wants: its name, and the folder of its files in PEFT's format.

    The folder has `adapter_config.json` and `adapter_model.safetensors`.
    """

    lora_name: str
    lora_path: str

    def __post_init__(self) -> None:
        for field in ("lora_name", "lora_path"):
            value = getattr(self, field)
            require_text(field, value, longest=LONGEST_NAME)
            if not value or "\0" in value:
                raise ValueError(f"{field} must not be empty or contain a null character")


@dataclass(frozen=True)
class PoolingParams:
    """How the hidden states of a prompt become one vector. The names are vLLM's.

    Wrong values raise `ValueError` (I4).

    pooling_type: `LAST` takes the hidden state of the last token, `MEAN` the mean over all tokens.
        Which one is right depends on the training of the model. There is no `CLS`: with causal
        attention, the first token has seen no other token.
    normalize: divide the vector by its length. A vector of zeros stays as it is.
    dimensions: keep only this many first numbers of the vector, before it is normalized.
        It makes sense for models that were trained for it (Matryoshka embeddings). None: all.
    """

    pooling_type: Literal["LAST", "MEAN"] = "LAST"
    normalize: bool = True
    dimensions: int | None = None

    def __post_init__(self) -> None:
        require_choice("pooling_type", self.pooling_type, ("LAST", "MEAN"))
        require_choice("normalize", self.normalize, (True, False))
        require_int("dimensions", self.dimensions, low=1, optional=True)


@dataclass(frozen=True)
class AgentHint:
    """What a client knows about the conversation of a request. A hint never changes an answer.

    Wrong values raise `ValueError` (I4).

    session_id: the conversation. Its next call begins with the tokens of this one.
    expected_pause: seconds from the end of this call to the next one. None: the engine estimates.
    ttl: seconds for which the prefix of this call is worth keeping. None: the engine chooses.
    release: no call follows, so the prefix can go first.
    """

    session_id: str
    expected_pause: float | None = None
    ttl: float | None = None
    release: bool = False

    def __post_init__(self) -> None:
        require_text("session_id", self.session_id, longest=LONGEST_SESSION_ID)
        for field in ("expected_pause", "ttl"):
            if (value := getattr(self, field)) is not None:
                require_float(field, value, low=0.0, high=LONGEST_PAUSE)
        require_choice("release", self.release, (True, False))
