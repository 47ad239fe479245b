"""`EngineConfig`: one configuration for all milestones.

A milestone ignores the fields that belong to a later one.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from typing import Any, Literal

from .validation import (
    LARGEST_INT,
    require_choice,
    require_float,
    require_int,
    require_text,
    shown,
)

EMBEDDED_MODEL = "SmolLM2-135M-Instruct"
DEFAULT_MAX_MODEL_LEN = (
    2048  # tokens; used if max_model_len is not given and the model allows that many
)

LARGEST_COUNT = 2**31 - 1  # page tables and lengths of sequences are int32
MAX_NUM_SEQS = 2**16  # a row for each is allocated when the engine starts
LONGEST_NAME = 4096  # characters; file systems do not allow a longer path
LONGEST_FORWARD_MS = 60_000
MOST_LORAS, LARGEST_RANK = 1024, 512
MOST_RANKS = 64  # processes of tensor parallelism
DEVICE = re.compile(r"auto|cpu(?::0)?|cuda(?::(0|[1-9][0-9]{0,2}))?")
LEAST_BATCHED_TOKENS, MOST_BATCHED_TOKENS = 2048, 16_384  # of the default, not of the field
BYTES_PER_BATCHED_TOKEN = 4 << 20  # of a GPU's memory: its activations must fit beside the model

QUANTIZATIONS = ("auto", "none")
DTYPES = ("auto", "float32", "float16", "bfloat16")
BACKENDS = ("auto", "triton", "compiled", "torch")
POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "random")


@dataclass(frozen=True)
class EngineConfig:
    """The settings of an engine. A wrong value raises `ValueError` that names the field and limit.

    model: the embedded model's name, a Hugging Face id, a local folder, a `.gguf` file,
        `tiny-<architecture>` for a tiny random model made on the fly, or `random-qwen3-0.6b` for a
        random model of that shape.
    device: `auto` (CUDA if the machine has it, otherwise CPU), `cpu`, `cuda`, or `cuda:<number>`.
    dtype: `auto` (float32 on CPU; on CUDA the dtype of the checkpoint, or float16 where the GPU
        has no bfloat16) or the name of a floating-point type. A `.gguf` file, such as that of the
        embedded model, becomes float32 on CUDA too: `dtype` makes it faster there.
    quantization: `auto` keeps the weights as the checkpoint stores them, where the compiled CPU
        kernels run; `none` converts them to `dtype` when the model is loaded. Both give the same
        tokens.
    model_passes: the passes that make the model's modules faster: `all`, `none`, or some of the
        names in `common/fast/passes`, separated by commas.
    max_num_seqs: the maximum number of requests that run at the same time.
    max_model_len: the maximum number of tokens of one request, prompt and output together. None:
        the model's own limit, at most `DEFAULT_MAX_MODEL_LEN`. In the engine's own `config` this
        field is always a number.
    max_num_batched_tokens: the maximum number of tokens that one step computes. None: 2,048 on a
        CPU; on a GPU one for each 4 MiB of its memory, from 2,048 to 16,384. The prefill of a GPU
        is faster in large steps. After construction, this field is always a number.
    page_size: the number of tokens in a KV page.
    num_pages: the number of pages in the pool. None: the engine derives it from free memory.
    attention_backend: `triton` (on CUDA), `compiled` (C, for float32 on a CPU), `torch`
        (anywhere), or `auto`: `triton` on CUDA, elsewhere `compiled` if it can run, else `torch`.
    readable: run the lines of the milestone's files in every step, so that a breakpoint or a print
        works in any of them: no passes, no stored weights, no CUDA graphs, and attention in torch.
        With `attention_backend="triton"`, Triton's interpreter runs the kernels. ARCHITECTURE.md
        says what the mode costs.
    schedule_policy: the order in which waiting requests are admitted.
    enable_overlap: plan step N+1 and process step N-1 while step N is computed.
    disable_consecutive_prefill_overlap: if step N and step N+1 both compute prompts, plan N+1 when
        N has ended. The first tokens of N then do not wait for the launch of N+1.
    cuda_graph: replay decode steps as CUDA graphs.
    lazy_cuda_graphs: capture each CUDA graph when it is first needed, instead of all at the start.
    emulated_forward_ms: on a CPU, let each forward of the overlap engine take at least this many
        milliseconds. The forward thread sleeps for the rest of the time, as if another processor
        computed the forward. 0: a forward takes only the time that it needs.
    tensor_parallel_size: the number of processes (ranks) that compute each forward together. Each
        has a part of the weights, and the keys and values of its heads. It must divide the number
        of KV heads. On GPUs, each rank has one. From m3 on.
    max_loras: the number of LoRA adapters that the requests of one step may use together. Only the
        elective lora has adapters.
    max_lora_rank: the largest rank of an adapter. Memory for `max_loras` adapters of this rank is
        allocated when the engine starts.
    encoder_cache_size: the number of image tokens with embeddings that the encoder cache can hold.
        An image with more tokens is refused. Only the elective vision has images.
    seed: makes the seeds of requests that have none reproducible. None: they are random.
    """

    model: str = EMBEDDED_MODEL
    device: str = "auto"
    dtype: str = "auto"
    quantization: Literal["auto", "none"] = "auto"
    model_passes: str = "all"
    max_num_seqs: int = 16
    max_model_len: int | None = None
    max_num_batched_tokens: int = None  # type: ignore[assignment]  # a number after construction
    page_size: int = 16
    num_pages: int | None = None
    attention_backend: Literal["auto", "triton", "compiled", "torch"] = "auto"
    readable: bool = False
    schedule_policy: Literal["fcfs", "lpm", "dfs-weight", "lof", "random"] = "fcfs"
    enable_overlap: bool = True
    disable_consecutive_prefill_overlap: bool = False
    cuda_graph: bool = True
    lazy_cuda_graphs: bool = False
    emulated_forward_ms: float = 0.0
    tensor_parallel_size: int = 1
    max_loras: int = 4
    max_lora_rank: int = 16
    encoder_cache_size: int = 8192
    seed: int | None = None

    def __post_init__(self) -> None:
        for field in ("model", "device", "model_passes"):
            require_text(field, getattr(self, field), longest=LONGEST_NAME)
        if "\0" in self.model:
            raise ValueError(f"model must not contain a null character, got {shown(self.model)}")
        _require_device(self.device)
        if self.max_num_batched_tokens is None:
            object.__setattr__(self, "max_num_batched_tokens", _batched_tokens(self.device))
        require_choice("dtype", self.dtype, DTYPES)
        require_choice("quantization", self.quantization, QUANTIZATIONS)
        require_int("max_num_seqs", self.max_num_seqs, low=1, high=MAX_NUM_SEQS)
        for field, low in (("max_num_batched_tokens", 1), ("page_size", 1)):
            require_int(field, getattr(self, field), low=low, high=LARGEST_COUNT)
        for field, low in (("max_model_len", 2), ("num_pages", 1)):
            require_int(field, getattr(self, field), low=low, high=LARGEST_COUNT, optional=True)
        require_choice("attention_backend", self.attention_backend, BACKENDS)
        require_choice("schedule_policy", self.schedule_policy, POLICIES)
        for field, default in vars(EngineConfig).items():
            if isinstance(default, bool):
                require_choice(field, getattr(self, field), (True, False))
        require_float(
            "emulated_forward_ms", self.emulated_forward_ms, low=0.0, high=LONGEST_FORWARD_MS
        )
        require_int("tensor_parallel_size", self.tensor_parallel_size, low=1, high=MOST_RANKS)
        require_int("max_loras", self.max_loras, low=1, high=MOST_LORAS)
        require_int("max_lora_rank", self.max_lora_rank, low=1, high=LARGEST_RANK)
        require_int("encoder_cache_size", self.encoder_cache_size, low=1, high=LARGEST_COUNT)
        require_int("seed", self.seed, low=-LARGEST_INT - 1, optional=True)
        if self.readable:
            self._choose_readable()

    def _choose_readable(self) -> None:
        """Set the fields that decide whether Python runs the lines of a milestone.

        Raises `ValueError` for a field that asks for something else.
        """
        if self.attention_backend == "compiled":
            raise ValueError(
                "attention_backend must be 'auto', 'torch' or 'triton' with readable=True, because "
                "a breakpoint does not stop in C, got 'compiled'"
            )
        if self.model_passes not in ("all", "none"):  # "all" is the default
            raise ValueError(
                "model_passes must be 'none' with readable=True, because a pass replaces lines of "
                f"the model, got {shown(self.model_passes)}"
            )
        if self.attention_backend == "triton":
            _interpret_triton()
        else:
            object.__setattr__(self, "attention_backend", "torch")
        object.__setattr__(self, "model_passes", "none")
        object.__setattr__(self, "quantization", "none")
        object.__setattr__(self, "cuda_graph", False)  # a replay does not call the model


def _require_device(device: str) -> None:
    """Raise `ValueError` for a device that no engine can use, or that this machine does not have.

    `load_model` checks later whether the machine has CUDA at all.
    """
    if (match := DEVICE.fullmatch(device)) is None:
        raise ValueError(
            f"device must be 'auto', 'cpu', 'cuda' or 'cuda:<number>', got {shown(device)}"
        )
    if not (number := match[1]) or (cuda := _cuda()) is None:
        return
    if 0 < (count := cuda.device_count()) <= int(number):
        raise ValueError(
            f"device must be 'cuda:<number>' with a number below {count}, the number of CUDA "
            f"devices here, got {device!r}"
        )


def _interpret_triton() -> None:
    """Let Triton interpret its kernels in Python. Triton decides this when it is imported.

    Raises `ValueError` if it has been imported already, to compile kernels.
    """
    triton = sys.modules.get("triton")
    if triton is None:
        os.environ["TRITON_INTERPRET"] = "1"
    elif isinstance(triton.language.cdiv, triton.JITFunction):
        raise ValueError(
            "attention_backend='triton' with readable=True needs Triton's interpreter, but Triton "
            "has been imported without it (transformers imports it): set TRITON_INTERPRET=1 in the "
            "environment before Python starts"
        )


def _cuda() -> Any:
    """Return `torch.cuda`, or None without torch: a configuration is plain data, and needs none."""
    try:
        import torch
    except ImportError:
        return None
    return torch.cuda


def _batched_tokens(device: str) -> int:
    """Return the default of `max_num_batched_tokens`: a multiple of 256 that fits the device."""
    if device.startswith("cpu") or (cuda := _cuda()) is None or not cuda.is_available():
        return LEAST_BATCHED_TOKENS
    number = 0 if device in ("auto", "cuda") else int(device.partition(":")[2])
    fitting = cuda.get_device_properties(number).total_memory // BYTES_PER_BATCHED_TOKEN
    return max(LEAST_BATCHED_TOKENS, min(fitting // 256 * 256, MOST_BATCHED_TOKENS))
