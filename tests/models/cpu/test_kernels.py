"""Each kernel computes what 64 bits say, for odd sizes too, writes nothing else, and gives a row the same bits always.

All of it for every kind of processor that this one can stand in for.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from contbatch.models.cpu import native
from contbatch.models.cpu.native import Kernels, KernelsMissing
from tests.models.cpu import calls
from tests.models.cpu.calls import numbers

TARGETS = {
    "native": ((), set()),
    "tiles": (("-DEMULATE_AMX",), {"avx512f"}),
    "avx512": (("-march=x86-64-v4",), {"avx512f", "avx512bw", "avx512vl", "avx512dq"}),
    "avx2": (("-march=x86-64-v3",), {"avx2", "fma"}),
    "sse2": (("-march=x86-64",), {"sse2"}),
}
"""Compiler options, and what the processor must have to run the result."""

DTYPES = [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8}
"""Relative error of one number that is rounded to the format (bf16), or of a sum (float)."""


@pytest.fixture(scope="session", params=TARGETS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    """The kernels compiled for one kind of processor."""
    options, needed = TARGETS[request.param]
    if needed - calls.flags():
        pytest.skip(f"this processor lacks {', '.join(sorted(needed - calls.flags()))}")
    try:
        native.compiler()
    except KernelsMissing as error:
        pytest.skip(str(error))
    path = tmp_path_factory.mktemp("kernels") / "kernels.so"
    native.build(path, options)
    yield ctypes.CDLL(str(path))


@pytest.fixture(params=DTYPES, ids=str)
def kernels(request: pytest.FixtureRequest, library: ctypes.CDLL) -> Kernels:
    """Those of one number format."""
    return Kernels(library, request.param)


def rounded(kernels: Kernels, tensor: Tensor) -> Tensor:
    """As the kernel's format holds it."""
    return tensor.to(kernels.dtype)


@pytest.mark.parametrize("inner", [1, 2, 3, 17, 32, 64, 576])
@pytest.mark.parametrize("columns", [1, 15, 16, 31, 33, 64, 100])
def test_products(kernels: Kernels, inner: int, columns: int) -> None:
    """Plain, with a bias, added to what is there, and gated; from one row to more than all tiles hold."""
    weight, other = (rounded(kernels, numbers(columns, inner, seed=n) / math.sqrt(inner)) for n in (1, 2))
    bias = numbers(columns, seed=3)
    for rows in (1, 2, 5, 6, 7, 12, 13, 16, 17, 31, 32, 33, 40, 100):
        x = rounded(kernels, numbers(rows, inner))
        exact, gate = x.double() @ weight.double().T, x.double() @ other.double().T
        there = numbers(rows, columns, seed=4)
        close = {"rtol": 2e-6, "atol": 5e-6}
        torch.testing.assert_close(calls.product(kernels, x, weight).double(), exact, **close)
        torch.testing.assert_close(calls.product(kernels, x, weight, bias).double(), exact + bias, **close)
        torch.testing.assert_close(calls.product(kernels, x, weight, add=there).double(), exact + there, **close)
        gated = calls.swiglu(kernels, x, other, weight).double()
        tolerance = ROUNDING[kernels.dtype]
        torch.testing.assert_close(gated, torch.nn.functional.silu(gate) * exact, rtol=2 * tolerance, atol=3e-5)


@pytest.mark.parametrize("width", [1, 3, 16, 17, 64, 576])
def test_norms(kernels: Kernels, width: int) -> None:
    """Rows of any width, few and many."""
    weight = numbers(width, seed=1)
    for rows in (1, 4, 5, 30):
        x = numbers(rows, width) * 10
        exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        result = calls.rms_norm(kernels, x, weight, 1e-5, kernels.dtype).double()
        torch.testing.assert_close(result, exact, rtol=2 * ROUNDING[kernels.dtype], atol=1e-6)


@pytest.mark.parametrize("size", [2, 8, 20, 64, 80])
@pytest.mark.parametrize("has_norms", [False, True])
def test_rotary_positions_and_the_cache(kernels: Kernels, size: int, has_norms: bool) -> None:
    """q and k are turned by position, k and v go into their slots, and no other slot is touched."""
    queries, keys, rows = 6, 2, 7
    qkv = numbers(rows, (queries + 2 * keys) * size)
    angles = torch.arange(rows)[:, None] * numbers(size // 2, seed=2)
    norms = (numbers(size, seed=3), numbers(size, seed=4)) if has_norms else (None, None)
    slots = torch.tensor([3, 0, 19, 7, 8, 11, 2])
    cache = torch.full((20, 2, keys, size), torch.nan, dtype=kernels.dtype)
    result = calls.rope_and_store(kernels, qkv, angles.cos(), angles.sin(), norms, slots, cache, (queries, keys, size))
    q, k, v = qkv.double().view(rows, -1, size).split((queries, keys, keys), dim=1)
    turned = torch.cat([turn(normed(x, norm), angles) for x, norm in zip((q, k), norms, strict=True)], dim=1)
    torch.testing.assert_close(result.double().view(rows, -1, size)[:, :-keys], turned, rtol=1e-5, atol=1e-5)
    stored = torch.stack((turned[:, queries:], v), dim=1)
    torch.testing.assert_close(cache[slots].double(), stored, rtol=2 * ROUNDING[kernels.dtype], atol=1e-5)
    others = [slot for slot in range(20) if slot not in slots.tolist()]
    assert bool(cache[others].isnan().all()), "a slot of nobody was written"


def normed(x: Tensor, weight: Tensor | None) -> Tensor:
    """The norm of each head, where a family has one."""
    return x if weight is None else x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()


def turn(x: Tensor, angles: Tensor) -> Tensor:
    """[rows, heads, size] turned by [rows, size / 2] angles, with complex numbers."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1)


class Scene:
    """Two requests with `contexts` cached tokens and `new` tokens each, in scattered blocks of a cache full of NaN."""

    def __init__(
        self, kernels: Kernels, heads: tuple[int, int, int], block: int, contexts: list[int], new: int
    ) -> None:
        queries, keys, size = heads
        self.kernels, self.heads, self.block, self.contexts, self.new = kernels, heads, block, contexts, new
        lengths = [context + new for context in contexts]
        width = max(-(-length // block) for length in lengths)
        ids = torch.randperm(2 * width, generator=torch.Generator().manual_seed(1)) + 1
        self.tables = ids.view(2, width)
        self.cache = torch.full(((2 * width + 1) * block, 2, keys, size), torch.nan, dtype=kernels.dtype)
        self.qkv = numbers(2 * new, (queries + 2 * keys) * size, seed=5)
        for request, length in enumerate(lengths):
            self.cache[self.slots(request, length)] = numbers(length, 2, keys, size, seed=request).to(kernels.dtype)

    def slots(self, request: int, length: int) -> Tensor:
        """Where the first `length` tokens of a request are."""
        place = torch.arange(length)
        return self.tables[request, place // self.block] * self.block + place % self.block

    def run(self, tasks: list[tuple[int, int, int, int]] | None = None) -> Tensor:
        """The kernel's answer; by default each request is one task."""
        whole = [(request, request * self.new, self.new, context) for request, context in enumerate(self.contexts)]
        arguments = (self.qkv, self.cache, self.tables, self.block, self.heads, tasks or whole)
        return calls.attention(self.kernels, *arguments)

    def exact(self) -> Tensor:
        """Softmax attention in 64 bits."""
        queries, keys, size = self.heads
        rows = []
        for request, context in enumerate(self.contexts):
            stored = self.cache[self.slots(request, context + self.new)].double()
            for n in range(self.new):
                q = self.qkv[request * self.new + n].double().view(-1, size)[:queries]
                k, v = stored[: context + n + 1].repeat_interleave(queries // keys, dim=2).unbind(1)
                share = (torch.einsum("hd,thd->ht", q, k) / math.sqrt(size)).softmax(-1)
                rows.append(torch.einsum("ht,thd->hd", share, v).flatten())
        return torch.stack(rows)


HEADS = [
    (1, 1, 64),
    (3, 1, 64),
    (8, 2, 8),
    (8, 1, 20),
    (4, 4, 40),
    (6, 2, 80),
    (2, 2, 96),
    (4, 1, 128),
    (2, 1, 160),
    (2, 1, 2),
]


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("block", [1, 3, 16, 32])
def test_attention(kernels: Kernels, heads: tuple[int, int, int], block: int) -> None:
    """One token and several, behind nothing, one token, block borders and more than a hundred."""
    for new, contexts in itertools.product((1, 5), ([0, 1], [15, 16], [17, 31], [32, 130])):
        scene = Scene(kernels, heads, block, contexts, new)
        tolerance = 3 * ROUNDING[kernels.dtype]  # bf16: the query and the result are rounded
        torch.testing.assert_close(scene.run().double(), scene.exact(), rtol=tolerance, atol=tolerance)


def test_a_row_gets_the_same_bits_in_any_company(kernels: Kernels) -> None:
    """Products, norms and attention: alone, among others, anywhere among them, on one thread or two."""
    weight, x = rounded(kernels, numbers(100, 64, seed=1)), rounded(kernels, numbers(40, 64))
    wide, scale = numbers(40, 33), numbers(33, seed=2)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            together = calls.product(kernels, x, weight)
            normal = calls.rms_norm(kernels, wide, scale, 1e-5, kernels.dtype)
            for start, end in ((0, 1), (39, 40), (3, 20), (7, 40)):
                assert torch.equal(calls.product(kernels, x[start:end], weight), together[start:end])
                part = calls.rms_norm(kernels, wide[start:end], scale, 1e-5, kernels.dtype)
                assert torch.equal(part, normal[start:end])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("heads", [(3, 1, 64), (8, 2, 20)], ids=str)
def test_attention_does_not_depend_on_the_cut(kernels: Kernels, heads: tuple[int, int, int]) -> None:
    """A prompt as one task, as single tokens, and in uneven pieces: the same bits."""
    scene = Scene(kernels, heads, 4, [3, 29], 21)
    whole = scene.run()
    for cuts in ([*range(21)], [0, 1, 8, 16], [0, 20]):
        ends = [*cuts[1:], 21]
        tasks = [
            (request, request * 21 + start, end - start, context + start)
            for request, context in enumerate(scene.contexts)
            for start, end in zip(cuts, ends, strict=True)
        ]
        assert torch.equal(scene.run(tasks), whole)


def test_numbers_that_are_not_numbers_stay_in_their_row(kernels: Kernels) -> None:
    """NaN in one row of a product or in one request's cache shows there, and nowhere else."""
    x = rounded(kernels, numbers(20, 32)).clone()
    clean = calls.product(kernels, x, rounded(kernels, numbers(33, 32, seed=1)))
    x[7, 3] = torch.nan
    dirty = calls.product(kernels, x, rounded(kernels, numbers(33, 32, seed=1)))
    assert bool(dirty[7].isnan().all())
    others = [row for row in range(20) if row != 7]
    assert torch.equal(dirty[others], clean[others])
    scene = Scene(kernels, (3, 1, 64), 4, [9, 9], 1)
    before = scene.run()
    scene.cache[scene.slots(0, 5)[-1]] = torch.nan
    after = scene.run()
    assert bool(after[0].isnan().all()) and torch.equal(after[1], before[1])


def test_nothing_is_left_beside_a_library(tmp_path: Path) -> None:
    """What is built comes into its place at once, a second time too: the folder holds it and its digest."""
    try:
        native.build(tmp_path / "one.so")
        native.build(tmp_path / "one.so")
    except KernelsMissing as error:
        pytest.skip(str(error))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.sha256", "one.so"]
