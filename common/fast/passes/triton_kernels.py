"""The small operations between matrix products as single Triton kernels, for CUDA.

An eager forward launches about fifty kernels in each layer. Most of them read and write only a few
kilobytes, so that a launch takes longer than the work itself. In a CUDA graph, each small kernel
still takes about 3 us. The passes compare each function here with the module that it replaces.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Arguments that change from step to step. Triton would compile variants for 1 and multiples of 16.
CHANGING = ("num_inner", "num_tokens")


@triton.jit(do_not_specialize=CHANGING)
def rms_norm_kernel(
    x, weight, out, outer_stride, inner_stride, num_inner, size, epsilon, BLOCK: tl.constexpr
):  # fmt: skip
    """One program for each row of `size` numbers: in float32, rounded where the module rounds."""
    place = tl.program_id(0).to(tl.int64)
    outer, inner = place // num_inner, place % num_inner
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    row = x + outer * outer_stride + inner * inner_stride
    values = tl.load(row + columns, mask=inside, other=0.0)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + epsilon)
    normed = (wide * scale).to(values.dtype).to(tl.float32)
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    target = out + place * size + columns
    tl.store(target, (normed * factor).to(values.dtype), mask=inside)


@triton.jit(do_not_specialize=CHANGING)
def rotary_kernel(
    q, k, cos, sin, q_out, k_out,
    q_batch, q_head, q_token, k_batch, k_head, k_token, num_tokens, q_heads, k_heads, HALF,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for each head of each token, first the heads of q, then those of k.

    cos and sin have one row for each token. The outputs are [B, T, heads, 2 * HALF].
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, position = token // num_tokens, token % num_tokens
    columns = tl.arange(0, BLOCK)
    inside = columns < HALF
    if head < q_heads:
        source = q + batch * q_batch + head * q_head + position * q_token
        target = q_out + (token * q_heads + head) * 2 * HALF
    else:
        source = k + batch * k_batch + (head - q_heads) * k_head + position * k_token
        target = k_out + (token * k_heads + head - q_heads) * 2 * HALF
    first = tl.load(source + columns, mask=inside, other=0.0)
    second = tl.load(source + HALF + columns, mask=inside, other=0.0).to(tl.float32)
    angle = token * 2 * HALF + columns
    cos_1 = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    sin_1 = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    cos_2 = tl.load(cos + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    sin_2 = tl.load(sin + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    dtype = first.dtype
    first = first.to(tl.float32)
    # The products are rounded before they are added, as in the module.
    upper = (first * cos_1).to(dtype).to(tl.float32) - (second * sin_1).to(dtype).to(tl.float32)
    lower = (second * cos_2).to(dtype).to(tl.float32) + (first * sin_2).to(dtype).to(tl.float32)
    tl.store(target + columns, upper.to(dtype), mask=inside)
    tl.store(target + HALF + columns, lower.to(dtype), mask=inside)


@triton.jit
def add_rms_norm_kernel(x, residual, weight, out, size, epsilon, BLOCK: tl.constexpr):
    """One program for each row: x + residual replaces x, and its RMSNorm is written to `out`."""
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    place = tl.program_id(0).to(tl.int64) * size + columns
    values = tl.load(x + place, mask=inside, other=0.0)
    more = tl.load(residual + place, mask=inside, other=0.0)
    total = (values.to(tl.float32) + more.to(tl.float32)).to(values.dtype)
    tl.store(x + place, total, mask=inside)
    wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + epsilon)
    normed = (wide * scale).to(values.dtype).to(tl.float32)
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, (normed * factor).to(values.dtype), mask=inside)


@triton.jit
def _normed(values, weight, scale, columns, inside):
    """Return one half of a head, float32 numbers of its dtype, after RMSNorm."""
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    rounded = (values.to(tl.float32) * scale).to(values.dtype).to(tl.float32)
    return (rounded * factor).to(values.dtype).to(tl.float32)


@triton.jit
def norm_rotary_kernel(
    qkv, q_weight, k_weight, cos, signed_sin, token_stride, q_heads, HALF, epsilon,
    HAS_NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for each head of q and k of each token: RMSNorm, and rotation, in place.

    A row of `qkv` has the heads of q, of k, and of v. Each thread writes the numbers that it read.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < HALF
    place = qkv + token * token_stride + head * 2 * HALF + columns
    raw_first = tl.load(place, mask=inside, other=0.0)
    raw_second = tl.load(place + HALF, mask=inside, other=0.0)
    dtype = raw_first.dtype
    first, second = raw_first.to(tl.float32), raw_second.to(tl.float32)
    if HAS_NORM:
        weight = q_weight
        if head >= q_heads:
            weight = k_weight
        squares = tl.sum(first * first, axis=0) + tl.sum(second * second, axis=0)
        scale = tl.rsqrt(squares / (2 * HALF) + epsilon)
        first = _normed(raw_first, weight, scale, columns, inside)
        second = _normed(raw_second, weight + HALF, scale, columns, inside)
    angle = token * 2 * HALF + columns
    cos_1 = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    sin_1 = tl.load(signed_sin + angle, mask=inside, other=0.0).to(tl.float32)
    cos_2 = tl.load(cos + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    sin_2 = tl.load(signed_sin + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    # The products are rounded before they are added, as in the module.
    upper = (first * cos_1).to(dtype).to(tl.float32) + (second * sin_1).to(dtype).to(tl.float32)
    lower = (second * cos_2).to(dtype).to(tl.float32) + (first * sin_2).to(dtype).to(tl.float32)
    tl.store(place, upper.to(dtype), mask=inside)
    tl.store(place + HALF, lower.to(dtype), mask=inside)


@triton.jit
def silu_mul_kernel(gate, up, out, gate_stride, up_stride, size, BLOCK: tl.constexpr):
    """One program for each `BLOCK` numbers of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    raw = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0)
    wide = raw.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(raw.dtype).to(tl.float32)
    other = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + columns, (activated * other).to(raw.dtype), mask=inside)


def _power_of_2(x: int) -> int:
    """Return the next power of two. Triton's own function takes 3 us: kernels can call it too."""
    return 1 << (x - 1).bit_length()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMSNorm over the last dimension. x: [..., n]; returns the same shape, contiguous."""
    size = x.shape[-1]
    rows = x.reshape(-1, x.shape[-2], size)  # a view if only the heads are split off
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    block = _power_of_2(size)
    # One dimension: the second one of a grid may have only 65,535 programs.
    rms_norm_kernel[(rows.shape[0] * rows.shape[1],)](
        rows, weight, out, rows.stride(0), rows.stride(1), rows.shape[1], size, epsilon,
        BLOCK=block, num_warps=min(8, max(1, block // 256)),
    )  # fmt: skip
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + residual, in the memory of x, and its RMSNorm over the last dimension.

    x and residual: [..., n], x contiguous. The results have the same shape.
    """
    size, residual = x.shape[-1], residual.contiguous()
    assert x.is_contiguous(), "the sum is written to the memory of x"
    out, block = torch.empty_like(x), _power_of_2(size)
    add_rms_norm_kernel[(x.numel() // size,)](
        x, residual, weight, out, size, epsilon,
        BLOCK=block, num_warps=min(8, max(1, block // 256)),
    )  # fmt: skip
    return x, out


def norm_and_rotate(
    qkv: torch.Tensor,
    heads: tuple[int, int],
    head_dim: int,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    epsilon: float = 0.0,
) -> None:
    """Apply RMSNorm (if there are `norms`, the weights) and rotation to q and k, in place.

    qkv: [B, T, n], a contiguous product of q, k and v. heads: the numbers of heads of q and of k.
    cos, signed_sin: [B, T, 1, head_dim], contiguous; see `rotary.signed`.
    """
    assert qkv.is_contiguous(), "rows of other strides"
    batch, tokens, width = qkv.shape
    q_weight, k_weight = norms or (cos, cos)  # without norms, the kernel reads none
    norm_rotary_kernel[(batch * tokens, sum(heads))](
        qkv, q_weight, k_weight, cos, signed_sin, width, heads[0], head_dim // 2, epsilon,
        HAS_NORM=norms is not None, BLOCK=_power_of_2(head_dim // 2), num_warps=1,
    )  # fmt: skip


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k, [B, heads, T, head_dim]. cos, sin: [B, T, head_dim].

    Returns tensors of the same shapes as q and k. In memory, the tokens come before the heads.
    """
    batch, q_heads, tokens, head_dim = q.shape
    k_heads = k.shape[1]
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    cos, sin = (x.expand(batch, -1, -1).contiguous() for x in (cos, sin))
    q_out = q.new_empty(batch, tokens, q_heads, head_dim)
    k_out = k.new_empty(batch, tokens, k_heads, head_dim)
    rotary_kernel[(batch * tokens, q_heads + k_heads)](
        q, k, cos, sin, q_out, k_out, *q.stride()[:3], *k.stride()[:3],
        tokens, q_heads, k_heads, head_dim // 2,
        BLOCK=_power_of_2(head_dim // 2), num_warps=1,
    )  # fmt: skip
    return q_out.transpose(1, 2), k_out.transpose(1, 2)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, contiguous. Both are [..., n], usually views of one tensor."""
    size = gate.shape[-1]
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gate, up = gate.reshape(-1, size), up.reshape(-1, size)
    block = min(1024, _power_of_2(size))
    silu_mul_kernel[(gate.shape[0], -(-size // block))](
        gate, up, out, gate.stride(0), up.stride(0), size, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out
