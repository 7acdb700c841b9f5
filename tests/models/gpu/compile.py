"""Compile the Triton kernels for a GPU that is not there (compute capability 9.0); run by test_kernels.py.

    python tests/models/gpu/compile.py

The interpreter accepts more than the compiler does. Prints one JSON object: for each kernel, number format and head
size the bytes of shared memory that it takes.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from contbatch.models.gpu import kernels

FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HOPPER = GPUTarget("cuda", 90, 32)
SHARED = 3


def compiled(kernel: Any, name: str, head_dim: int) -> int:
    """Bytes of shared memory of one kernel for one number format and head size."""
    wide = kernels._padded(head_dim)
    tile = kernels._tile(wide, FORMATS[name])
    values = {
        "BLOCK_SIZE": 16,
        "SHARED": SHARED,
        "SHARED_PADDED": kernels._padded(SHARED),
        "HEAD_DIM": head_dim,
        "HEAD_PADDED": wide,
        "QUERIES": tile,
        "TILE": tile,
    }
    types = {**dict.fromkeys(values, "constexpr"), **dict.fromkeys(("q", "cache", "out"), f"*{name}"), "scale": "fp32"}
    signature = {arg: types.get(arg, "i32" if arg.endswith("_stride") else "*i64") for arg in kernel.arg_names}
    constants = {(kernel.arg_names.index(arg),): value for arg, value in values.items() if arg in kernel.arg_names}
    done = triton.compile(ASTSource(kernel, signature=signature, constexprs=constants), target=HOPPER)
    assert done.asm["cubin"]
    return int(done.metadata.shared)


def main() -> None:
    """Compile all and print."""
    found = {}
    sizes = zip(FORMATS, (64, 40, 128), strict=True)
    for kernel, (name, head_dim) in itertools.product((kernels._decode, kernels._prefill), sizes):
        found[f"{kernel.__name__} {name} {head_dim}"] = compiled(kernel, name, head_dim)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
