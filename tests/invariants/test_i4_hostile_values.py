"""I4: each public argument gets each of many values that it was not made for.

A value must be harmless, or be refused with a `ValueError` that names the field. No other error is
raised, and the answer of a request in flight does not change.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import fields
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common import EngineConfig, LLMEngine, SamplingParams, TokensPrompt, load_model
from tests.conftest import EngineFactory
from tests.helpers.oracle import assert_one_answer, drain, greedy


class Failing:
    """An object with methods that all raise, so that any check of its value fails."""

    def fail(self, *_: object) -> Any:
        raise RuntimeError("a hostile object was asked")

    __bool__ = __eq__ = __repr__ = __len__ = __iter__ = __getitem__ = fail
    __hash__ = object.__hash__
    __index__ = __int__ = __float__ = __str__ = __lt__ = __gt__ = fail


def list_of_itself() -> list[Any]:
    values: list[Any] = []
    values.append(values)
    return values


MESSAGE = {"role": "user", "content": "hi"}
MAKERS: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "0": lambda: 0,
    "-1": lambda: -1,
    "2**31": lambda: 2**31,
    "2**63": lambda: 2**63,
    "-2**63-1": lambda: -(2**63) - 1,
    "10**5000": lambda: 10**5000,
    "1.5": lambda: 1.5,
    "1e308": lambda: 1e308,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "complex": lambda: 1j,
    "Decimal": lambda: Decimal("nan"),
    "Fraction": lambda: Fraction(1, 2),
    "empty text": lambda: "",
    "blank": lambda: " ",
    "null character": lambda: "\0",
    "surrogate": lambda: "a\ud800",
    "pair of surrogates": lambda: "\ud83d\ude00",
    "a megabyte": lambda: "a" * 2**20,
    "bytes": lambda: b"ab",
    "bytearray": lambda: bytearray(b"ab"),
    "memoryview": lambda: memoryview(b"ab"),
    "Path": lambda: Path("/"),
    "[]": list,
    "()": tuple,
    "{}": dict,
    "set": lambda: {1},
    "dict": lambda: dict(MESSAGE),
    "OrderedDict": OrderedDict,
    "deque": lambda: deque([1, 2]),
    "[None]": lambda: [None],
    "[[]]": lambda: [[]],
    "[[[1]]]": lambda: [[[1]]],
    "[True]": lambda: [True],
    "[1.5]": lambda: [1.5],
    "[-1]": lambda: [-1],
    "[2**63]": lambda: [2**63],
    "[10**5000]": lambda: [10**5000],
    "list of a surrogate": lambda: ["\ud800"],
    "list of arrays": lambda: [np.arange(2), np.arange(2)],
    "list of tensors": lambda: [torch.arange(2), torch.arange(2)],
    "list of a meta tensor": lambda: [torch.tensor(1, device="meta")],
    "list of a message": lambda: [dict(MESSAGE)],
    "content of None": lambda: [{"role": "user", "content": None}],
    "content of parts": lambda: [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
    "content with a surrogate": lambda: [{"role": "user", "content": "\ud800"}],
    "role that is no text": lambda: [{"role": 5, "content": "a"}],
    "talks, one a dict": lambda: [[MESSAGE], MESSAGE],
    "a message, then a list": lambda: [MESSAGE, [MESSAGE]],
    "TokensPrompt of a number": lambda: TokensPrompt(5),  # type: ignore[arg-type]
    "TokensPrompt of bytes": lambda: TokensPrompt(b"ab"),  # type: ignore[arg-type]
    "TokensPrompt from a number": lambda: TokensPrompt([1], 5),  # type: ignore[arg-type]
    "range(10**12)": lambda: range(10**12),
    "range(2**100)": lambda: range(2**100),
    "list of itself": list_of_itself,
    "generator": lambda: (i for i in range(3)),
    "iterator": lambda: iter([[1], [2]]),
    "array of bools": lambda: np.array([True, False]),
    "array of ints": lambda: np.arange(3),
    "array of texts": lambda: np.array(["a"]),
    "numpy int": lambda: np.int64(5),
    "numpy bool": lambda: np.bool_(True),
    "numpy float": lambda: np.float64("nan"),
    "tensor": lambda: torch.arange(3),
    "tensor of a bool": lambda: torch.tensor(True),
    "meta tensor": lambda: torch.empty(2, device="meta"),
    "object": object,
    "function": lambda: lambda: None,
    "class": lambda: SamplingParams,
    "failing object": Failing,
    "list of a failing object": lambda: [Failing()],
    "message of a failing object": lambda: [{"role": Failing(), "content": Failing()}],
}
SHORT = greedy(2)
CALLS: dict[tuple[str, str], Callable[[LLMEngine, Any], object]] = {
    ("add_request", "prompt"): lambda e, value: e.add_request(value, SHORT),
    ("add_request", "params"): lambda e, value: e.add_request([1], value),
    ("add_request", "request_id"): lambda e, value: e.add_request([1], SHORT, value),
    ("stream", "prompt"): lambda e, value: list(e.stream(value, SHORT)),
    ("stream", "params"): lambda e, value: list(e.stream([1], value)),
    ("generate", "prompt"): lambda e, value: e.generate(value, SHORT),
    ("generate", "params"): lambda e, value: e.generate([1], value),
    ("generate", "progress"): lambda e, value: e.generate([1], SHORT, progress=value),
    ("chat", "messages"): lambda e, value: e.chat(value, SHORT),
    ("chat", "params"): lambda e, value: e.chat([MESSAGE], value),
}


def refused(field: str, act: Callable[[], object]) -> bool:
    """Return whether `act` raised a `ValueError` that names `field`. Any other error fails."""
    try:
        act()
    except ValueError as error:
        assert not isinstance(error, UnicodeError), f"I4: no message about {field}: {error}"
        assert str(error).startswith(field), f"I4: {error} does not name {field}"
        assert len(str(error)) < 1000, "I4: the message holds the whole value"
        return True
    return False


@pytest.mark.parametrize(("method", "field"), CALLS, ids=lambda part: part)
def test_arguments(make_engine: EngineFactory, method: str, field: str) -> None:
    engine = make_engine(max_model_len=64)
    engine.add_request([5, 6, 7], greedy(40), "busy")
    engine.step()
    results = {}
    for name, make in MAKERS.items():
        results[name] = refused(field, lambda make=make: CALLS[method, field](engine, make()))  # type: ignore[misc]
        engine.check_invariants()
    assert_one_answer("tiny-llama", drain(engine)["busy"][-1], 40)
    never = {"surrogate", "bytes", "generator", "array of bools", "failing object", "10**5000"}
    assert all(results[name] for name in never), "I4: a wrong value was accepted"


@pytest.mark.parametrize("field", [f.name for f in fields(SamplingParams)])
def test_sampling_parameters(make_engine: EngineFactory, field: str) -> None:
    """If the constructor accepts a value, an engine serves the request or refuses it."""
    engine = make_engine(max_model_len=64)
    engine.add_request([5, 6, 7], greedy(20), "busy")
    for make in MAKERS.values():
        values = {"max_tokens": 2, field: make()}
        refused(field, lambda values=values: engine.add_request([1], SamplingParams(**values)))  # type: ignore[misc]
    outputs = drain(engine)
    assert_one_answer("tiny-llama", outputs["busy"][-1], 20)
    assert all(o[-1].finished for o in outputs.values())


@pytest.mark.parametrize("field", [f.name for f in fields(EngineConfig)])
def test_configuration(field: str) -> None:
    """No engine is built here, because some valid values need more memory than there is."""
    for make in MAKERS.values():
        refused(field, lambda make=make: EngineConfig(**{field: make()}))  # type: ignore[misc]


@pytest.mark.parametrize(
    "device",
    [
        *("cuda:99", "cuda:-1", "cuda:x", "cuda:", "cuda:1000000", "cpu:x", "cpu:5", "meta", "mps"),
        *("xpu", "vulkan", "CPU", " cpu", "cpu\n", "cuda:0x1", "cuda:٣", "none", "\0", "\ud800"),
    ],
)
def test_devices_that_no_engine_can_use(device: str) -> None:
    with pytest.raises(ValueError, match="device"):
        load_model(EngineConfig(model="tiny-llama", device=device))


def test_a_device_with_too_large_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert EngineConfig(device="cuda:1").device == "cuda:1"
    with pytest.raises(ValueError, match="device must be .* below 2, .* got 'cuda:2'"):
        EngineConfig(device="cuda:2")


def test_names_of_passes_that_there_are_none_of() -> None:
    for name in ("\0", " ", ",", "none,all", "a" * 4000):
        with pytest.raises(ValueError, match="model_passes"):
            load_model(EngineConfig(model="tiny-llama", device="cpu", model_passes=name))
