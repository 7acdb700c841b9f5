"""The Triton kernels in Triton's interpreter, over a grid of sizes; run by test_kernels.py in a process of its own.

    TRITON_INTERPRET=1 python tests/models/gpu/grid.py

Prints one JSON object: for each case the greatest difference from the plain attention in 64 bits.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import torch
from torch import Tensor

from contbatch.batch import BatchedRequest, FlatBatch, ScheduledBatch
from contbatch.models import ModelConfig
from contbatch.models.attention import PagedAttention, PagedCache
from contbatch.models.gpu import kernels
from contbatch.models.gpu.forward import TritonAttention, TritonForward
from contbatch.models.gpu.graphs import GraphForward
from contbatch.models.runner import PlainForward
from tests.models.tiny import TINY, tiny_model, tokens

SHARED, BLOCK_SIZES, HEAD_DIMS, KV_HEADS = (1, 3, 4, 8), (1, 4, 16), (8, 40, 64), 2
DECODE = (0, 1, 16, 62, 63, 64, 110)
"""Contexts of requests with one new token: none, one, the borders of blocks and of a tile of keys, two tiles."""
MIXED = ((0, 2), (5, 1), (0, 65), (110, 3), (0, 1))
"""(context, new tokens): within a tile of queries, one more than a tile, behind two tiles of keys; single tokens."""
BORDERS = ((0, 64), (1, 3), (62, 3), (64, 5), (17, 130), (64, 1))
"""More of them, for a few sizes only: the interpreter takes its time."""
CPU = torch.device("cpu")


def config(shared: int, head_dim: int) -> ModelConfig:
    """Two layers, so that the layer's offset counts."""
    return ModelConfig(9, 16, 16, 2, KV_HEADS * shared, KV_HEADS, head_dim, 4096)


def batch(parts: Sequence[tuple[int, int]], block_size: int, chance: torch.Generator) -> tuple[FlatBatch, int]:
    """A step of requests (context, new tokens) whose blocks lie scattered, and how many blocks there are."""
    counts = [-(-(context + new) // block_size) for context, new in parts]
    blocks = iter((torch.randperm(sum(counts), generator=chance) + 1).tolist())
    requests = [
        BatchedRequest.prefill(str(n), (1,) * new, n, tuple(itertools.islice(blocks, count)), context)
        for n, ((context, new), count) in enumerate(zip(parts, counts, strict=True))
    ]
    return ScheduledBatch(0, requests).flatten(block_size), sum(counts)


def caches(shape: ModelConfig, flat: FlatBatch, blocks: int, block_size: int, dtype: torch.dtype) -> list[PagedCache]:
    """The same cached tokens in `dtype` and in 64 bits; NaN in every slot that nobody wrote."""
    chance = torch.Generator().manual_seed(1)
    result = [PagedCache(shape, blocks, block_size, CPU, kind) for kind in (dtype, torch.float64)]
    for cache in result:
        cache.data.fill_(torch.nan)
    for table, context in zip(flat.block_tables, flat.context_lens.tolist(), strict=True):
        for position in range(context):
            slot = int(table[position // block_size]) * block_size + position % block_size
            value = torch.randn(shape.num_layers, 2, KV_HEADS, shape.head_dim, generator=chance).to(dtype)
            value[:, 0] *= 1 + position / 32  # later keys weigh more, so that the running softmax is rescaled
            for cache in result:
                cache.data[:, slot] = value
    return result


def difference(
    shared: int,
    block_size: int,
    head_dim: int,
    parts: Sequence[tuple[int, int]],
    dtype: torch.dtype = torch.float32,
) -> float:
    """Of one mixed step, computed by the kernels, from the same step in 64 bits."""
    chance = torch.Generator().manual_seed(0)
    shape = config(shared, head_dim)
    flat, blocks = batch(parts, block_size, chance)
    ours, exact = caches(shape, flat, blocks, block_size, dtype)
    q, k, v = (
        torch.randn(flat.num_tokens, heads, head_dim, generator=chance).to(dtype)
        for heads in (shape.num_heads, KV_HEADS, KV_HEADS)
    )
    got = TritonAttention(ours, flat)(1, q, k, v)
    want = PagedAttention(exact, flat)(1, q.double(), k.double(), v.double())
    return worst(got, want)


def worst(got: Tensor, want: Tensor) -> float:
    """Greatest difference; infinite where anything is not a number."""
    gap = float((got.double() - want).abs().max())
    return gap if gap == gap else float("inf")


def padded_rows() -> dict[str, bool]:
    """Rows of length 0 become 0 whatever lies in the null block, and rows that nobody named are left alone."""
    shape = config(3, 8)
    cache = PagedCache(shape, 4, 4, CPU, torch.float32)
    cache.data.fill_(torch.nan)
    cache.data[0, 4:8] = 1.0
    q, out = torch.ones(4, 6, 8), torch.full((4, 6, 8), 7.0)
    tables = torch.tensor([[0, 0], [1, 0]])
    lengths, tokens, rows = torch.tensor([0, 4]), torch.tensor([3, 1]), torch.tensor([0, 1])
    kernels.decode_attention(q, cache.data[0], tables, lengths, tokens, rows, 4, out)
    return {
        "empty": bool((out[3] == 0).all()),
        "full": bool((out[1] == 1).all()),
        "untouched": bool((out[[0, 2]] == 7).all()),
    }


@torch.inference_mode()
def forwards() -> dict[str, float]:
    """A small model in 32 bits, its passes by `TritonForward` and by recorded decode steps, from the one in 64 bits."""
    ours, exact = (tiny_model(TINY, dtype=kind).model for kind in (torch.float32, torch.float64))
    held = [PagedCache(TINY, 30, 4, CPU, kind) for kind in (torch.float32, torch.float64)]
    for cache in held:
        cache.data.fill_(torch.nan)
    graphs, plain = GraphForward(ours, TritonForward(ours), 4), PlainForward(exact)
    gaps = {}
    fed = {"prompts": (7, 1, 70), "mixed": (1, 3, 1), "decode": (1, 1, 1)}
    done = [0, 0, 0]
    for name, counts in fed.items():
        parts = []
        for n, count in enumerate(counts):
            table = (range(1, 4), range(4, 7), range(7, 30))[n]
            ids = tokens(count, seed=n + done[n])
            parts.append(BatchedRequest.prefill(str(n), ids, n, table, done[n]))
            done[n] += count
        flat = ScheduledBatch(0, parts).flatten(4)
        gaps[name] = worst(graphs.forward(flat, held[0]), plain.forward(flat, held[1]))
    assert graphs.replays == 1
    return gaps


def main() -> None:
    """Compute all cases and print them."""
    found = {}
    for shared, block_size, head_dim in itertools.product(SHARED, BLOCK_SIZES, HEAD_DIMS):
        name = f"shared {shared}, block {block_size}, head {head_dim}"
        found[f"decode, {name}"] = difference(shared, block_size, head_dim, [(context, 1) for context in DECODE])
        found[f"mixed, {name}"] = difference(shared, block_size, head_dim, MIXED)
    for block_size, head_dim in ((4, 40), (16, 64), (16, 128)):
        found[f"borders, block {block_size}, head {head_dim}"] = difference(3, block_size, head_dim, BORDERS)
    half = difference(3, 16, 64, BORDERS, torch.float16)  # the interpreter's products of bfloat16 are wrong
    print(json.dumps({"float32": found, "float16": half, "padded": padded_rows(), "forward": forwards()}))


if __name__ == "__main__":
    main()
