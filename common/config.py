"""`EngineConfig`: one configuration for all rungs; a rung ignores what belongs to a higher one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .validation import require_choice, require_float, require_int

EMBEDDED_MODEL = "SmolLM2-135M-Instruct"
DEFAULT_MAX_MODEL_LEN = (
    2048  # tokens; used where max_model_len is not given and the model allows it
)

DTYPES = ("auto", "float32", "float16", "bfloat16")
BACKENDS = ("auto", "triton", "compiled", "torch")
POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "random")


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is built from. Wrong values raise `ValueError` naming the field and its limit.

    model: the embedded model's name, a Hugging Face id, a local folder, a `.gguf` file, or
        `tiny-<architecture>` for a random model made on the fly.
    device: `auto` (CUDA where there is one, else CPU) or anything `torch.device` accepts.
    dtype: `auto` (float32 on CPU, the checkpoint's own on CUDA) or the name of a floating type.
    model_passes: what makes the model's modules faster: `all`, `none`, or some of the names in
        `common/model_passes`, with commas between them.
    max_num_seqs: most requests in flight at once.
    max_model_len: most tokens of one request, prompt and output together. None: the model's own
        limit, at most `DEFAULT_MAX_MODEL_LEN`. The engine's own `config` carries the number.
    max_num_batched_tokens: most tokens computed in one step.
    page_size, num_pages: tokens a KV page holds, pages in the pool (None: from free memory).
    attention_backend: `triton` (on CUDA), `compiled` (C, for float32 on a CPU), `torch`
        (anywhere), or `auto`: the first of them that can run.
    schedule_policy: the order in which waiting requests are admitted.
    enable_overlap: plan and process steps while the one between them is computed.
    cuda_graph, lazy_cuda_graphs: replay decode steps as CUDA graphs; capture each when it is first
        needed, not all at the start.
    emulated_forward_ms: on a CPU, let each forward of the overlap engine take at least so long,
        asleep, as if another processor computed it. 0: it takes what it takes.
    seed: makes the seeds of requests that bring none reproducible. None: drawn at random.
    """

    model: str = EMBEDDED_MODEL
    device: str = "auto"
    dtype: str = "auto"
    model_passes: str = "all"
    max_num_seqs: int = 16
    max_model_len: int | None = None
    max_num_batched_tokens: int = 2048
    page_size: int = 16
    num_pages: int | None = None
    attention_backend: Literal["auto", "triton", "compiled", "torch"] = "auto"
    schedule_policy: Literal["fcfs", "lpm", "dfs-weight", "lof", "random"] = "fcfs"
    enable_overlap: bool = True
    cuda_graph: bool = True
    lazy_cuda_graphs: bool = False
    emulated_forward_ms: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for field in ("model", "device", "model_passes"):
            if not isinstance(getattr(self, field), str) or not getattr(self, field):
                raise ValueError(
                    f"{field} must be a non-empty string, got {getattr(self, field)!r}"
                )
        require_choice("dtype", self.dtype, DTYPES)
        require_int("max_num_seqs", self.max_num_seqs, low=1)
        require_int("max_model_len", self.max_model_len, low=2, optional=True)
        require_int("max_num_batched_tokens", self.max_num_batched_tokens, low=1)
        require_int("page_size", self.page_size, low=1)
        require_int("num_pages", self.num_pages, low=1, optional=True)
        require_choice("attention_backend", self.attention_backend, BACKENDS)
        require_choice("schedule_policy", self.schedule_policy, POLICIES)
        require_choice("enable_overlap", self.enable_overlap, (True, False))
        require_choice("cuda_graph", self.cuda_graph, (True, False))
        require_choice("lazy_cuda_graphs", self.lazy_cuda_graphs, (True, False))
        require_float("emulated_forward_ms", self.emulated_forward_ms, low=0.0)
        require_int("seed", self.seed, low=-(2**63), high=2**63 - 1, optional=True)
