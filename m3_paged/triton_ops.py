"""The attention operations of `attention.py` by Triton kernels: same names, same signatures.

The launch grids depend on shapes only, never on lengths, so that a CUDA graph can replay them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton

from . import kernels
from .attention import AttentionMetadata

PROGRAMS = 1024  # of the decode kernel: enough to fill a large GPU
SPLIT, LARGEST_SPLIT = 64, 4096  # tokens of a context that one of these programs reads


def require_runnable(device: torch.device) -> None:
    """Raise `RuntimeError` if kernels cannot run: they need CUDA, or Triton's interpreter."""
    if triton.knobs.runtime.interpret:
        return
    if device.type != "cuda":
        raise RuntimeError(
            "attention_backend='triton' needs a CUDA device (or TRITON_INTERPRET=1, for tests)"
        )
    try:
        _ = triton.runtime.driver.active.utils  # C code, compiled at the first use
    except Exception as error:
        raise RuntimeError(
            "Triton needs a C compiler and Python's headers on a GPU, because it compiles its "
            f"launcher: {error}"
        ) from error


def store_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    meta: AttentionMetadata,
) -> None:
    """Write key and value [T, kv_heads, head_dim] to their slots in a layer's memory."""
    tokens, heads, key_dim = key.shape
    value_dim = value.shape[-1]
    kernels.store_kernel[(tokens, heads)](
        key, value, keys, values, meta.slot_mapping,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        keys.stride(0), values.stride(0),
        KEY_DIM=key_dim, VALUE_DIM=value_dim,
        BLOCK_D=1 << (max(key_dim, value_dim) - 1).bit_length(), num_warps=1,
    )  # fmt: skip


def paged_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """Attend with one query per decoding request. Query and result: [decodes, heads, head_dim].

    Each row has a token, also a row that pads a batch: without one, its result would be undefined.
    """
    batch, heads, _dim = query.shape
    width = meta.page_table.shape[1] * meta.page_size
    size = split_size(batch * keys.shape[0], width)
    splits = _cdiv(width, size)
    value_dim = values.shape[-1]
    output = query.new_empty((batch, heads, value_dim))
    partial_lse = query.new_empty((batch, heads, splits), dtype=torch.float32)
    partial = output[:, :, None]  # the result of one split is the result
    if splits > 1:
        partial = query.new_empty((batch, heads, splits, value_dim), dtype=torch.float32)
    shape = constants(query, keys, values, meta.page_size)
    tile = tiles(keys, shape)["decode"]
    kernels.decode_kernel[(batch, keys.shape[0], splits)](
        query, keys, values, meta.page_table, meta.seq_lens, partial, partial_lse,
        query.stride(0), query.stride(1), keys.stride(0), values.stride(0),
        meta.page_table.stride(0), scale, splits, size,
        **shape, **tile,
    )  # fmt: skip
    if splits > 1:
        kernels.reduce_kernel[(batch, heads)](
            partial, partial_lse, output, meta.seq_lens, splits, size,
            output.stride(0), output.stride(1), VALUE_DIM=value_dim, BLOCK_V=shape["BLOCK_V"],
        )  # fmt: skip
    return output


def split_size(num_contexts: int, width: int) -> int:
    """Return the number of tokens that one program reads of a context.

    num_contexts: requests times KV heads. width: tokens of the widest row of the page table. A
    context is split only if there are too few of them to fill the GPU, or if it is very long: each
    split costs a program, and a result to combine.
    """
    splits = _cdiv(PROGRAMS, num_contexts)
    size = _cdiv(_cdiv(width, splits), SPLIT) * SPLIT
    return min(size, LARGEST_SPLIT)


def _cdiv(x: int, y: int) -> int:
    """Return x / y, rounded up. Triton's own function takes 3 us, because kernels call it too."""
    return -(-x // y)


def paged_prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """Attend with the queries of all chunks. Query and result: [tokens, heads, head_dim]."""
    tokens, heads, _dim = query.shape
    output = query.new_empty((tokens, heads, values.shape[-1]))
    shape = constants(query, keys, values, meta.page_size)
    tile = tiles(keys, shape)["prefill"]
    requests = meta.seq_lens.shape[0] - meta.num_decodes
    blocks = tokens // (tile["ROWS"] // shape["GROUP"]) + requests
    kernels.prefill_kernel[(blocks, keys.shape[0])](
        query, keys, values, output, meta.page_table, meta.query_start_loc, meta.seq_lens,
        query.stride(0), query.stride(1), output.stride(0), output.stride(1),
        keys.stride(0), values.stride(0), meta.page_table.stride(0),
        scale, meta.num_decodes, requests, meta.num_decodes,
        **shape, **tile,
    )  # fmt: skip
    return output


def tiles(keys: torch.Tensor, shape: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Return the tiles for the GPU that the keys are on. shape: the result of `constants`."""
    block_dim = max(shape["BLOCK_K"], shape["BLOCK_V"])
    return kernels.tiles(shape["GROUP"], block_dim, keys.itemsize, _capability(keys.device))


@functools.cache
def _capability(device: torch.device) -> int:
    """Return the compute capability of a GPU: 90 for 9.0. For the interpreter on a CPU, 80."""
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def constants(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, page_size: int
) -> dict[str, Any]:
    """Return the compile-time constants that both attention kernels need, apart from tiles."""
    group = query.shape[1] // keys.shape[0]
    return _constants(group, keys.shape[-1], values.shape[-1], page_size, query.dtype)


@functools.cache
def _constants(
    group: int, key_dim: int, value_dim: int, page_size: int, dtype: torch.dtype
) -> dict[str, Any]:
    return {
        "GROUP": group,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "PAGE_SIZE": page_size,
        "BLOCK_K": max(kernels.MIN_BLOCK, triton.next_power_of_2(key_dim)),
        "BLOCK_V": max(kernels.MIN_BLOCK, triton.next_power_of_2(value_dim)),
        # Float32 stays float32: tf32 on the tensor cores would lose the last digits.
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }
