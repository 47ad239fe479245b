"""The fast path: what makes a Hugging Face model faster without changing what it computes.

The rest of the project calls the names below, and imports none of the files in this folder. Tests
and benchmarks, which check and measure the parts, do.

    weights as stored      `write_stored` and `read_stored`: a folder with the weights of a `.gguf`
                           file, in the precision of the file (`stored/`)
                           `keep_narrow` and `dequantize`: the same for a model in memory
    a faster model         `apply_passes` replaces its slow parts (`passes/`); `has_passes` tells
                           whether it did
    its parts              `joined_layers` and `shared_products`: what the passes have made, for an
                           engine that must change it (the elective `lora`)
    attention              `cpu_attention` has the operations of an `attention.py`, in C
    kernels                `kernels()`: all functions in C, or None without a compiler
                           (`cpu_kernels/`)
    memory and threads     settings of C libraries, for models on a CPU (`cpu_runtime.py`)
"""

from . import cpu_attention
from .cpu_kernels import kernels
from .cpu_runtime import keep_freed_memory, release_freed_memory
from .passes import apply_passes, has_passes, parse_passes
from .passes.forwards import Forward
from .passes.layer import joined_layers
from .passes.layer_parts import CompiledParts
from .passes.merge import shared_products
from .passes.pack import StoredProductError
from .passes.replace import subclass
from .stored.convert import shards_of
from .stored.folder import panel_size, read_stored, write_stored
from .stored.modules import dequantize, keep_narrow, with_stored

__all__ = [
    "CompiledParts",
    "Forward",
    "StoredProductError",
    "apply_passes",
    "cpu_attention",
    "dequantize",
    "has_passes",
    "joined_layers",
    "keep_freed_memory",
    "keep_narrow",
    "kernels",
    "panel_size",
    "parse_passes",
    "read_stored",
    "release_freed_memory",
    "shards_of",
    "shared_products",
    "subclass",
    "with_stored",
    "write_stored",
]
