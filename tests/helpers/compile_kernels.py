"""Compile a module's kernels for GPUs, on a machine that may have none.

    python -m tests.helpers.compile_kernels m3_paged.kernels
    python -m tests.helpers.compile_kernels common.sampling.draw_kernels

The output is JSON, with what the compilers report of each kernel. This runs in a process of its
own, because Triton decides at its import whether it interprets or compiles.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from types import ModuleType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler
from triton.compiler import ASTSource

GROUP, PAGE_SIZE = 3, 16
ITEM_SIZES = {"fp16": 2, "bf16": 2, "fp32": 4}
# Compute capabilities of GPUs: T4 (7.5), A100, RTX 30 (8.6), L4 (8.9), H100, B200 (10.0),
# RTX 50 (12.0). A T4 has no bfloat16. The others compile only what needs the most shared memory.
WHOLE, OTHERS = (75, 80, 90), (86, 89, 100, 120)
LARGEST = ("decode_kernel", "prefill_kernel")
PAGED = [
    (capability, dtype, dim)
    for capability in (*WHOLE, *OTHERS)
    for dtype in (("fp16",) if capability in OTHERS else ITEM_SIZES)
    for dim in ((128, 256) if capability in OTHERS else (64, 128, 256))
    if (capability, dtype) != (75, "bf16")
]
# Many query heads of a KV head (StarCoder, Falcon), and keys that are wider than values (DeepSeek):
# query heads, head dimension of the keys, and of the values.
UNUSUAL = [(cc, *shape) for cc in (80, 90, 120) for shape in ((48, 128, 128), (71, 64, 64))]
UNUSUAL += [(cc, 16, 192, 128) for cc in (86, 90)]
# One query head of a KV head, where no tensor cores are used: a tile with one row.
ALONE = [(75, "fp16"), (75, "fp32"), (90, "fp32")]
TENSOR_PRODUCT = r"^\s*(?:@\S+ )?(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\."
# The number of tiles [positions, dim] of keys or values that shared memory holds.
BUFFERS = r"local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x"
ROWS = [(cc, dtype, 128) for cc in WHOLE for dtype in ITEM_SIZES if (cc, dtype) != (75, "bf16")]
# The tokens of a vocabulary, and the blocks of a row of logits: of Qwen3.
SAMPLED = {"BLOCK": 1024, "BLOCKS": 256}
POINTERS = {
    "page_table": "i32", "seq_lens": "i32", "query_start_loc": "i32", "slot_mapping": "i64",
    "temperature": "fp32", "greedy": "i1", "uniforms": "fp64", "log_min_p": "fp32",
    "maxima": "fp32", "tokens": "i32", "sums": "fp32", "ties": "i32", "search": "i64",
    "buckets": "i64", "token_ids": "i64", "is_valid": "i1",
}  # fmt: skip


def main() -> None:
    kernels = importlib.import_module(sys.argv[1])
    paged, sampled = hasattr(kernels, "decode_kernel"), hasattr(kernels, "draw_kernel")

    def programs(capability: int, dtype: str, dim: int) -> list[tuple[Any, dict[str, Any]]]:
        if paged:
            return paged_programs(kernels, dtype, dim, capability)
        return sampler_programs() if sampled else row_programs(kernels, dim)

    report = [
        {"kernel": fn.__name__, "capability": capability, "dtype": dtype, "dim": dim}
        | {"tile": constants.get("TILE")}
        | compile_kernel(fn, constants, dtype, capability)
        for capability, dtype, dim in (PAGED if paged else ROWS)
        for fn, constants in programs(capability, dtype, dim)
        if capability in WHOLE or fn.__name__ in LARGEST
    ]
    others: list[tuple[int, str, int, int, int]]
    others = [(cc, "fp16", group, key_dim, dim) for cc, group, key_dim, dim in UNUSUAL]
    others += [(cc, dtype, 1, dim, dim) for cc, dtype in ALONE for dim in (64, 256)]
    for capability, dtype, group, key_dim, dim in others if paged else ():
        for fn, constants in paged_programs(kernels, dtype, dim, capability, group, key_dim)[:2]:
            report.append(
                {"kernel": fn.__name__, "capability": capability, "dtype": dtype, "group": group}
                | compile_kernel(fn, constants, dtype, capability)
            )
    sys.stdout.write(json.dumps(report, indent=1))


def paged_programs(
    kernels: ModuleType, dtype: str, dim: int, capability: int, group: int = GROUP, key_dim: int = 0
) -> list[tuple[Any, dict[str, Any]]]:
    """Return each kernel with the constants that its launcher would compile it with.

    dim: of a head. key_dim: of the keys, if it is another number.
    """
    key_dim = key_dim or dim
    block_k = triton.next_power_of_2(key_dim)
    tiles = kernels.tiles(group, max(block_k, dim), ITEM_SIZES[dtype], capability)
    shape = {
        "GROUP": group, "KEY_DIM": key_dim, "VALUE_DIM": dim, "PAGE_SIZE": PAGE_SIZE,
        "BLOCK_K": block_k, "BLOCK_V": dim, "PRECISION": "ieee" if dtype == "fp32" else "tf32",
    }  # fmt: skip
    reduce = {"VALUE_DIM": dim, "BLOCK_V": dim}
    return [
        (kernels.decode_kernel, {**shape, **tiles["decode"]}),
        (kernels.prefill_kernel, {**shape, **tiles["prefill"]}),
        (kernels.reduce_kernel, reduce),
        (kernels.store_kernel, {"KEY_DIM": dim, "VALUE_DIM": dim, "BLOCK_D": dim, "num_warps": 1}),
    ]


def row_programs(kernels: ModuleType, dim: int) -> list[tuple[Any, dict[str, Any]]]:
    """Return the kernels of the model passes, for heads of size `dim` and rows of 32 heads."""
    return [
        (kernels.rms_norm_kernel, {"BLOCK": 32 * dim, "num_warps": 8}),
        (kernels.add_rms_norm_kernel, {"BLOCK": 32 * dim, "num_warps": 8}),
        (kernels.rotary_kernel, {"BLOCK": dim // 2, "num_warps": 1}),
        *(
            (kernels.norm_rotary_kernel, {"HAS_NORM": norm, "BLOCK": dim // 2, "num_warps": 1})
            for norm in (True, False)
        ),
        (kernels.silu_mul_kernel, {"BLOCK": 1024, "num_warps": 4}),
    ]


def sampler_programs() -> list[tuple[Any, dict[str, Any]]]:
    """Return the kernels of the sampler: with and without filters, for top-k and for top-p."""
    from common.sampling import draw_kernels, filter_kernels

    which = ({"IS_TOP_K": is_top_k} for is_top_k in (True, False))
    return [
        (draw_kernels.scan_kernel, {"BLOCK": SAMPLED["BLOCK"]}),
        *((draw_kernels.draw_kernel, {"IS_FILTERED": yes, **SAMPLED}) for yes in (True, False)),
        (filter_kernels.keep_kernel, SAMPLED),
        *(
            program for part in which
            for program in ((filter_kernels.count_kernel, {**part, **SAMPLED}),
                            (filter_kernels.find_kernel, part))
        ),
    ]  # fmt: skip


def compile_kernel(
    fn: Any, constants: dict[str, Any], dtype: str, capability: int
) -> dict[str, Any]:
    """Compile one kernel and return its figures.

    Pointers and strides are declared as multiples of 16, as those of torch's tensors are.
    """
    options = {n: constants[n] for n in ("num_warps", "num_stages") if n in constants}
    constants = {n: value for n, value in constants.items() if n not in options}
    signature, attributes = {}, {}
    for index, name in enumerate(fn.arg_names):
        aligned = [["tt.divisibility", 16]]
        if name in constants:
            signature[name] = "constexpr"
        elif is_integer(name):
            signature[name] = "i32"
            if "stride" in name and name != "table_stride":
                attributes[(index,)] = aligned
        elif name in ("scale", "epsilon"):
            signature[name] = "fp32"
        else:
            kind = "fp32" if name.startswith("partial") else POINTERS.get(name, dtype)
            if name == "limits":  # numbers of tokens, or probabilities
                kind = "i64" if constants["IS_TOP_K"] else "fp64"
            signature[name], attributes[(index,)] = f"*{kind}", aligned
    source = ASTSource(fn=fn, signature=signature, constexprs=constants, attrs=attributes)
    result = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = result.asm["ptx"]
    threads = 32 * result.metadata.num_warps
    return {
        "shared": result.metadata.shared,
        "wide_copies": len(re.findall(r"cp\.async\.cg\.shared\.global .*0x10", ptx)),
        "tensor_products": len(re.findall(TENSOR_PRODUCT, ptx, re.MULTILINE)),
        "multiplications": len(re.findall(r"fma\.rn\.f32", ptx)) * threads,
        "warps": re.findall(r"nvidia_mma<.*?warpsPerCTA = \[([\d, ]+)\]", result.asm["ttgir"]),
        "buffers": re.findall(BUFFERS, result.asm["ttgir"]),
        **assemble(ptx, capability),
    }


def is_integer(name: str) -> bool:
    """Return whether an argument of the kernels is a number of elements."""
    return name in ("size", "split_size", "HALF", "shift", "is_first") or bool(
        re.search(r"stride|^num_|^first_|^[qk]_(batch|head|token|heads)$", name)
    )


def assemble(ptx: str, capability: int) -> dict[str, int]:
    """Return the registers and the bytes of spilled registers that ptxas reports."""
    ptxas = compiler.get_ptxas(capability).path
    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        done = subprocess.run(
            [ptxas, "-v", f"--gpu-name={target[1]}", file.name, "-o", os.devnull],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    spills = re.findall(r"(\d+) bytes spill stores", done.stderr)
    registers = re.findall(r"Used (\d+) registers", done.stderr)
    return {"spill_stores": max(map(int, spills)), "registers": max(map(int, registers))}


if __name__ == "__main__":
    main()
