"""Measure the bandwidth and arithmetic of this machine: the least time of a workload."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from common.displays.workload import WorkloadResult
from common.fast.cpu_kernels import Linear, kernels
from common.fast.stored.formats import FORMATS
from common.fast.stored.modules import stored_of
from common.fast.stored.weight import StoredWeight
from common.hf.support import layer_shapes

# Rows and columns of the product. It is not a power of two: all rows would then begin at the same
# places of the cache, and the product would be a tenth slower than those of a usual model.
SIDE = 2304


@dataclass(frozen=True)
class Roofline:
    """The bandwidth and arithmetic of a machine, and what a model needs of them."""

    bytes_per_second: float  # read from memory
    flops_per_second: float  # of a large matrix product in the model's dtype
    weight_bytes: int  # of all matrices that a token is multiplied with, as they are stored
    num_weights: int  # of these matrices
    kv_bytes: int  # keys and values of one token, in all layers
    head_weights: int = 0  # of the LM head: a prefill multiplies only one token with it
    query_width: int = 0  # numbers in the queries of a token, in all layers

    def step_seconds(self, rows: float) -> float:
        """The least time of one forward over `rows` tokens: to read the weights, or to multiply."""
        flops = 2 * rows * self.num_weights
        return max(self.weight_bytes / self.bytes_per_second, flops / self.flops_per_second)

    def seconds(self, result: WorkloadResult) -> float:
        """The least time of a run: its prefill as one product, its decode steps, the KV reads."""
        steps, decoded = result.stats["num_steps"], result.stats["decode_tokens"]
        kv_seconds = result.kv_used * self.kv_bytes / self.bytes_per_second
        decode = steps * self.step_seconds(decoded / steps)
        prefill_flops = 2 * result.stats["prefill_tokens"] * (self.num_weights - self.head_weights)
        return prefill_flops / self.flops_per_second + decode + kv_seconds

    def prefill_seconds(self, tokens: int) -> float:
        """The least time of the prefill of one prompt, its causal attention included."""
        products = 2 * tokens * (self.num_weights - self.head_weights)
        attention = 2 * tokens**2 * self.query_width  # each query sees half
        return (products + attention) / self.flops_per_second


def measure(model: PreTrainedModel) -> Roofline:
    """Measure the machine that `model` is on, in about two seconds.

    Uses torch's operations or the kernels in C, whichever are faster: torch does not use all
    instructions of some CPUs.
    """
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    weight_bytes = sum(_stored_bytes(linear) for linear in linears)
    num_weights = sum(linear.weight.numel() for linear in linears)
    layers = layer_shapes(model)
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    kv = sum(layer.num_kv_heads * (layer.key_dim + layer.value_dim) for layer in layers)
    with torch.inference_mode():
        # Far more bytes than any cache holds, and a product that uses each number many times. A GPU
        # needs larger ones, because the launch of a kernel takes microseconds.
        scale = 4 if model.device.type == "cuda" else 1
        side = scale * SIDE
        read = torch.ones(24, SIDE, side, dtype=torch.float32, device=model.device)
        square = torch.ones(side, side, dtype=model.dtype, device=model.device)
        reading: list[Callable[[], torch.Tensor]] = [read.sum]
        multiplying = [lambda: square @ square]
        if model.device.type == "cpu" and model.dtype == torch.float32 and kernels() is not None:
            reading.append(_product(square[:1], read))
            multiplying.append(_product(square, square))
        return Roofline(
            bytes_per_second=read.nbytes / min(_best(work, model.device) for work in reading),
            flops_per_second=2 * side**3 / min(_best(work, model.device) for work in multiplying),
            weight_bytes=weight_bytes,
            kv_bytes=kv * model.dtype.itemsize,
            num_weights=num_weights,
            head_weights=head.weight.numel(),
            query_width=len(layers) * config.num_attention_heads * layers[0].key_dim,
        )


def _product(x: torch.Tensor, ones: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return the kernel's product of x and a weight of ones, which need not be packed."""
    ours = kernels()
    assert ours is not None
    panels = ones.view(-1, x.shape[1] * ours.panel_size).view(torch.uint8)
    weight = StoredWeight(FORMATS["F32"], len(panels) * ours.panel_size, x.shape[1], panels)
    linear = Linear.of([weight], None)
    return lambda: ours.linear(x, linear)


def _stored_bytes(linear: torch.nn.Linear) -> int:
    """Return the bytes that a product reads: those of the weight as it is stored."""
    return sum(weight.nbytes for weight in stored_of(linear)) or linear.weight.nbytes


def _best(work: Callable[[], torch.Tensor], device: torch.device) -> float:
    """Return the time of one call in the shortest of six runs, in seconds.

    On a GPU, a run has several calls and waits once, so that the wait counts for little.
    """
    on_gpu = device.type == "cuda"
    calls, seconds = 10 if on_gpu else 1, []
    for _ in range(6):
        started = time.perf_counter()
        for _ in range(calls):
            work()
        if on_gpu:
            torch.cuda.synchronize(device)
        seconds.append((time.perf_counter() - started) / calls)
    return min(seconds)
