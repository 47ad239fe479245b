"""The LoRA adapters of a server: loaded at its start, and named by the `model` of a request."""

from __future__ import annotations

from typing import Any

from common import LLMEngine, LoRARequest

NO_ADAPTERS = "lora_modules: this engine has no adapters; the elective lora has them"


class Adapters:
    """Loads adapters, and returns the arguments that a request with one of them needs."""

    def __init__(self, engine: LLMEngine, lora_modules: str | None, model: str) -> None:
        """Load `name=folder` pairs, separated by commas. model: the served name of the model.

        Raises `ValueError`, which names the setting, if one cannot be loaded.
        """
        self.requests = read_modules(lora_modules)
        add_lora: Any = getattr(engine, "add_lora", None)
        if self.requests and add_lora is None:
            raise ValueError(NO_ADAPTERS)
        if model in self.requests:
            raise ValueError(f"lora_modules: {model!r} is the name of the model itself")
        for name, request in self.requests.items():
            try:
                add_lora(request)
            except ValueError as error:
                raise ValueError(f"lora_modules: {name}: {error}") from error

    def options(self, model: str | None) -> dict[str, Any]:
        """Return more arguments of `add_request` for a call that names this model."""
        request = None if model is None else self.requests.get(model)
        return {} if request is None else {"lora_request": request}


def read_modules(text: str | None) -> dict[str, LoRARequest]:
    """Return adapters by name. Raises `ValueError` for text that is not a list of `name=folder`."""
    found: dict[str, LoRARequest] = {}
    for part in text.split(",") if text else []:
        name, _, folder = (piece.strip() for piece in part.partition("="))
        if not name or not folder or name in found:
            raise ValueError(
                f"lora_modules must be name=folder, separated by commas, each name once: {part!r}"
            )
        found[name] = LoRARequest(name, folder)
    return found
