"""The eight workloads that the engines are measured on. They have the same tokens every time.

The tokens are random, so the output is nonsense. It takes as long to compute as a real answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from common.displays.workload import Workload

from .peers.serve import MAX_MODEL_LEN

FIRST_TOKEN, LAST_TOKEN = 100, 40_000  # ids of the embedded model without special tokens
CPU_SCALE = 8  # `nano` on a CPU: 1/8 of the requests, 1/8 of the lengths


class Tokens:
    """Random prompts over a vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self._random = random.Random(0)
        self._last = min(LAST_TOKEN, vocab_size - 1)
        self._first = min(FIRST_TOKEN, self._last)

    def prompt(self, length: int) -> list[int]:
        return [self._random.randint(self._first, self._last) for _ in range(length)]

    def drawn(self, length: int) -> list[int]:
        """Draw token ids up to 10,000, as the benchmark of nano-vllm does."""
        return [self._random.randint(0, min(10_000, self._last)) for _ in range(length)]

    def between(self, low: int, high: int) -> int:
        return self._random.randint(low, high)


def alone(tokens: Tokens, on_gpu: bool) -> Workload:
    """One request: 44 prompt tokens, 64 output tokens."""
    return Workload([tokens.prompt(44)], [64])


def batch(tokens: Tokens, on_gpu: bool) -> Workload:
    """Sixteen requests at once: 44 prompt tokens, 48 output tokens, no shared prefixes."""
    return Workload([tokens.prompt(44) for _ in range(16)], [48] * 16)


def mixed(tokens: Tokens, on_gpu: bool) -> Workload:
    """Thirty-two requests, one every 50 ms: 8 to 512 prompt tokens, 8 to 128 output tokens."""
    lengths = [(tokens.between(8, 512), tokens.between(8, 128)) for _ in range(32)]
    prompts = [tokens.prompt(n) for n, _ in lengths]
    return Workload(prompts, [m for _, m in lengths], arrivals=[0.05 * i for i in range(32)])


def shared(tokens: Tokens, on_gpu: bool) -> Workload:
    """Eight system prompts of 300 tokens, eight questions of 8 to 24 for each; 32 tokens out."""
    systems = [tokens.prompt(300) for _ in range(8)]
    prompts = [systems[i % 8] + tokens.prompt(tokens.between(8, 24)) for i in range(64)]
    return Workload(prompts, [32] * 64)


def turns(tokens: Tokens, on_gpu: bool) -> Workload:
    """Eight conversations of five turns: 100 prompt tokens, then 30 per turn; 32 output tokens."""
    follow_ups = [[tokens.prompt(30) for _ in range(4)] for _ in range(8)]
    return Workload([tokens.prompt(100) for _ in range(8)], [32] * 8, follow_ups=follow_ups)


def nano(tokens: Tokens, on_gpu: bool) -> Workload:
    """The benchmark of nano-vllm: 256 requests, 100 to 1,024 tokens in and out (CPU: 1/8).

    nano-vllm samples at temperature 0.6. So do all engines here, on a GPU.
    """
    scale = 1 if on_gpu else CPU_SCALE
    prompts = [tokens.drawn(tokens.between(100, 1024) // scale) for _ in range(256 // scale)]
    most = [tokens.between(100, 1024) // scale for _ in prompts]
    return Workload(prompts, most, temperature=0.6 if on_gpu else 0.0)


def prompt_512(tokens: Tokens, on_gpu: bool) -> Workload:
    """Only a prefill: one request with 512 prompt tokens, one output token."""
    return Workload([tokens.prompt(512)], [1])


def prompt_2048(tokens: Tokens, on_gpu: bool) -> Workload:
    """Only a prefill: one request with 2,048 prompt tokens, one output token."""
    return Workload([tokens.prompt(2048)], [1])


# The prompt tokens of workloads that measure only the time to the first token.
PREFILLS = {"prompt_512": 512, "prompt_2048": 2048}
WORKLOADS: dict[str, Callable[[Tokens, bool], Workload]] = {
    function.__name__: function
    for function in (alone, batch, mixed, shared, turns, nano, prompt_512, prompt_2048)
}


def workload(
    name: str,
    model: str,
    vocab_size: int,
    on_gpu: bool = False,
    quantization: str = "auto",
) -> Workload:
    """Return a workload, the same for every engine. Raises `ValueError` for an unknown name.

    quantization: of the milestones (`EngineConfig`).
    """
    if name not in WORKLOADS:
        raise ValueError(f"workload must be one of {', '.join(WORKLOADS)}, got {name!r}")
    result = WORKLOADS[name](Tokens(vocab_size), on_gpu)
    result.ignore_eos = True
    rows = 256 if on_gpu else 16
    result.config = {
        "model": model,
        "max_num_seqs": min(rows, len(result.prompts)),
        "quantization": quantization,
    }
    if name in PREFILLS:
        result.config["max_model_len"] = MAX_MODEL_LEN
    return result


def first_requests(work: Workload, count: int) -> Workload:
    """Return a workload with the first requests of another one."""
    return replace(
        work,
        prompts=work.prompts[:count],
        max_tokens=work.max_tokens[:count],
        arrivals=work.arrivals[:count],
        follow_ups=work.follow_ups[:count],
    )
