"""`LoRARequest`: the adapter that a request wants. The class has vLLM's name."""

from __future__ import annotations

from dataclasses import dataclass

from .validation import require_text

LONGEST = 4096  # characters


@dataclass(frozen=True)
class LoRARequest:
    """A LoRA adapter: its name, and the folder of its files in PEFT's format.

    The folder has `adapter_config.json` and `adapter_model.safetensors`.
    """

    lora_name: str
    lora_path: str

    def __post_init__(self) -> None:
        for field in ("lora_name", "lora_path"):
            value = getattr(self, field)
            require_text(field, value, longest=LONGEST)
            if not value or "\0" in value:
                raise ValueError(f"{field} must not be empty or contain a null character")
