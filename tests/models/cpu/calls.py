"""The kernels as functions of arrays: everything the tests know of how they are called.

Each returns what the kernel wrote. Outputs are filled with NaN before, and stand between guard zones that must not
change, so that an entry that is not written, or one too many, is seen.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from contbatch.models.cpu.decoder import ADD, STORE, SWIGLU
from contbatch.models.cpu.native import Kernels, at
from contbatch.models.cpu.packing import interleave, pack, pad_rows

GUARD = 64


class Guarded:
    """A tensor in the middle of a larger one."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, start: Tensor | None = None) -> None:
        size = torch.Size(shape).numel()
        self.whole = torch.full((size + 2 * GUARD,), 7.0, dtype=dtype)
        self.inner = at(self.whole[GUARD : GUARD + size].view(shape))
        self.inner.fill_(torch.nan)
        if start is not None:
            self.inner.copy_(start)

    def value(self) -> Tensor:
        """What is there now; the guard zones are checked."""
        assert bool((self.whole[:GUARD] == 7).all()) and bool((self.whole[-GUARD:] == 7).all()), "written beyond"
        return self.inner


def product(
    kernels: Kernels, x: Tensor, weight: Tensor, bias: Tensor | None = None, add: Tensor | None = None
) -> Tensor:
    """x [rows, inner] times weight [columns, inner], plus a bias, or added to what is there."""
    lanes, shape = kernels.lanes, (len(x), len(weight))
    out = Guarded(shape, torch.float32, add)
    padded = None if bias is None else at(pad_rows(bias, 2 * lanes))
    packed = at(pack(weight, lanes))
    ending = STORE if add is None else ADD
    kernels.product(at(x.contiguous()), packed, padded, out.inner, len(x), x.shape[1], len(weight), ending)
    return out.value()


def swiglu(kernels: Kernels, x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """silu(x gate) * (x up), both weights [columns, inner]."""
    out = Guarded((len(x), len(gate)), x.dtype)
    packed = at(pack(interleave(gate, up, kernels.lanes), kernels.lanes))
    kernels.product(at(x.contiguous()), packed, None, out.inner, len(x), x.shape[1], len(gate), SWIGLU)
    return out.value()


def rms_norm(kernels: Kernels, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x [rows, width] scaled to root mean square 1, times weight."""
    out = Guarded(x.shape, dtype)
    kernels.rms_norm(at(x.contiguous()), at(weight.contiguous()), eps, out.inner, *x.shape)
    return out.value()


def rope_and_store(
    kernels: Kernels,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor | None, Tensor | None],
    slots: Tensor,
    cache: Tensor,
    heads: tuple[int, int, int],
) -> Tensor:
    """The turned qkv [rows, (queries + 2 keys) * size]; `cache` is written in place."""
    out = Guarded(qkv.shape, torch.float32, qkv)
    q_norm, k_norm = (None if norm is None else at(norm.contiguous()) for norm in norms)
    tables = (at(cos.contiguous()), at(sin.contiguous()))
    kernels.rope_and_store(out.inner, *tables, q_norm, k_norm, 1e-5, at(slots), at(cache), len(qkv), *heads)
    return out.value()


def attention(
    kernels: Kernels,
    qkv: Tensor,
    cache: Tensor,
    tables: Tensor,
    block_size: int,
    heads: tuple[int, int, int],
    tasks: Sequence[tuple[int, int, int, int]],
) -> Tensor:
    """[rows, queries * size]; tasks are (request, first row, rows, position of the first)."""
    out = Guarded((len(qkv), heads[0] * heads[2]), cache.dtype)
    work = at(torch.tensor(tasks, dtype=torch.int64))
    inputs = (at(qkv.contiguous()), at(cache), at(tables.contiguous()))
    kernels.attention(*inputs, out.inner, tables.shape[1], block_size, *heads, work, len(tasks))
    return out.value()


@functools.cache
def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers of about 1."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def flags() -> set[str]:
    """What this processor can do, in the words of Linux; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return set()
    return set(itertools.chain.from_iterable(line.split() for line in lines if line.startswith("flags")))
