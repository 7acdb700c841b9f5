"""Attention kernels in Triton that read keys and values where they lie, through the block table.

The one idea: a position of a sequence becomes a slot with one look-up, `table[position // block_size] * block_size +
position % block_size`, so a tile of keys is gathered on its way into the chip and never copied in memory. The softmax
is kept running over the tiles (Milakov & Gimelshein, 2018; Dao et al., "FlashAttention", 2022): a greatest score, a
sum of exponentials and a weighted sum of values, all rescaled whenever the greatest grows.

`decode_attention` is for one new token each: one program takes one request and one key/value head, with all query
heads that share it, so that every key is read once. `prefill_attention` is for chunks of several new tokens: one
program takes a tile of them and one query head.

Sizes need not be powers of two: tiles are padded to the next one and masked. A masked position is not loaded, so that
what lies in a slot that nobody wrote cannot reach a result, not even a NaN.

Only constants are annotated in a kernel: Triton's compiler looks every annotation up, and refuses those it lacks.

Left out: float64, which `contbatch.models.attention` computes on any device; and splitting one long sequence over
several programs ("flash decoding"), which a small batch of long sequences would need to fill a large chip.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Number formats of the kernels; sums are taken in 32 bits."""

SMALLEST = 16
"""No side of a matrix product in Triton may be shorter."""


def decode_attention(
    q: Tensor,
    cache: Tensor,
    tables: Tensor,
    lengths: Tensor,
    token_rows: Tensor,
    table_rows: Tensor,
    block_size: int,
    out: Tensor,
) -> None:
    """Attention of R requests with one new token each; K and V of those tokens must be in the cache already.

    Args:
        q: [T, heads, head_dim], contiguous in its last two dimensions.
        cache: one layer of `PagedCache.data`, [slots, 2, kv_heads, head_dim].
        tables: [any, width] block ids, contiguous in the last dimension.
        lengths: [R] tokens to look at, the new one included; where it is 0, the row of `out` becomes 0.
        token_rows: [R] the request's row in `q` and `out`.
        table_rows: [R] the request's row in `tables`.
        block_size: tokens a block.
        out: like q; the other rows are left alone.
    """
    heads, head_dim = q.shape[1:]
    kv_heads = cache.shape[2]
    shared = heads // kv_heads
    wide = _padded(head_dim)
    _decode[(len(token_rows), kv_heads)](
        q,
        cache,
        tables,
        lengths,
        token_rows,
        table_rows,
        out,
        head_dim**-0.5,
        q.stride(0),
        out.stride(0),
        cache.stride(0),
        cache.stride(1),
        tables.stride(0),
        BLOCK_SIZE=block_size,
        SHARED=shared,
        SHARED_PADDED=_padded(shared),
        HEAD_DIM=head_dim,
        HEAD_PADDED=wide,
        TILE=_tile(wide, q.dtype),
    )


def prefill_attention(
    q: Tensor,
    cache: Tensor,
    tables: Tensor,
    contexts: Tensor,
    starts: Tensor,
    tiles: Tensor,
    block_size: int,
    out: Tensor,
) -> None:
    """Causal attention of chunks over what was cached before them and over themselves.

    K and V of the chunks must be in the cache already.

    Args:
        q: [T, heads, head_dim], contiguous in its last two dimensions.
        cache: one layer of `PagedCache.data`, [slots, 2, kv_heads, head_dim].
        tables: [B, width] block ids, contiguous in the last dimension.
        contexts: [B] tokens that were cached before this step.
        starts: [B + 1] where each request's tokens begin on the token axis.
        tiles: [n, 2] the work: a request, and the first token of its chunk in this tile; see `query_tile`.
        block_size: tokens a block.
        out: like q; rows in no tile are left alone.
    """
    heads, head_dim = q.shape[1:]
    wide = _padded(head_dim)
    _prefill[(len(tiles), heads)](
        q,
        cache,
        tables,
        contexts,
        starts,
        tiles,
        out,
        head_dim**-0.5,
        q.stride(0),
        out.stride(0),
        cache.stride(0),
        cache.stride(1),
        tables.stride(0),
        BLOCK_SIZE=block_size,
        SHARED=heads // cache.shape[2],
        HEAD_DIM=head_dim,
        HEAD_PADDED=wide,
        QUERIES=query_tile(head_dim, q.dtype),
        TILE=_tile(wide, q.dtype),
    )


def query_tile(head_dim: int, dtype: torch.dtype) -> int:
    """New tokens that one program of `prefill_attention` takes."""
    return _tile(_padded(head_dim), dtype)


def _padded(size: int) -> int:
    """The next power of two that a matrix product accepts."""
    return max(SMALLEST, 1 << (size - 1).bit_length())


def _tile(wide: int, dtype: torch.dtype) -> int:
    """Keys (or queries) a tile: fewer where they are long, so that a tile of each fits into shared memory."""
    return 64 if wide * dtype.itemsize <= 256 else 32


@triton.jit
def _slots(tables, row, position, there, BLOCK_SIZE: tl.constexpr):
    """Slots of positions; 64 bits, because slot times stride passes 2 ** 31 in a large cache."""
    block = tl.load(tables + row + position // BLOCK_SIZE, mask=there, other=0)
    return block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE


@triton.jit
def _fold(best, total, mixed, scores, values):
    """Take one more tile into the running softmax; scores are logarithms to base 2."""
    higher = tl.maximum(best, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(best - higher)
    total = total * shrink + tl.sum(weights, 1)
    mixed = mixed * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return higher, total, mixed


@triton.jit
def _decode(
    q,
    cache,
    tables,
    lengths,
    token_rows,
    table_rows,
    out,
    scale,
    q_stride,
    out_stride,
    slot_stride,
    value_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    SHARED: tl.constexpr,
    SHARED_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    TILE: tl.constexpr,
):
    request, kv_head = tl.program_id(0), tl.program_id(1)
    token = tl.load(token_rows + request).to(tl.int64)
    table = tl.load(table_rows + request).to(tl.int64) * table_stride
    length = tl.load(lengths + request).to(tl.int32)
    head, entry = tl.arange(0, SHARED_PADDED), tl.arange(0, HEAD_PADDED)
    real = (head < SHARED)[:, None] & (entry < HEAD_DIM)[None, :]
    place = (kv_head * SHARED + head)[:, None] * HEAD_DIM + entry[None, :]
    query = tl.load(q + token * q_stride + place, mask=real, other=0.0)
    best = tl.full([SHARED_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([SHARED_PADDED], tl.float32)
    mixed = tl.zeros([SHARED_PADDED, HEAD_PADDED], tl.float32)
    for start in range(0, length, TILE):
        position = start + tl.arange(0, TILE)
        there = position < length
        slot = _slots(tables, table, position, there, BLOCK_SIZE)
        address = cache + slot[:, None] * slot_stride + kv_head * HEAD_DIM + entry[None, :]
        inside = there[:, None] & (entry < HEAD_DIM)[None, :]
        keys = tl.load(address, mask=inside, other=0.0)
        values = tl.load(address + value_stride, mask=inside, other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * (scale * 1.4426950408889634)
        scores = tl.where(there[None, :], scores, float("-inf"))
        best, total, mixed = _fold(best, total, mixed, scores, values)
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + token * out_stride + place, mixed.to(out.dtype.element_ty), mask=real)


@triton.jit
def _prefill(
    q,
    cache,
    tables,
    contexts,
    starts,
    tiles,
    out,
    scale,
    q_stride,
    out_stride,
    slot_stride,
    value_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    SHARED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
):
    head = tl.program_id(1)
    request = tl.load(tiles + tl.program_id(0) * 2)
    first = tl.load(tiles + tl.program_id(0) * 2 + 1).to(tl.int32)
    begin = tl.load(starts + request)
    count = (tl.load(starts + request + 1) - begin).to(tl.int32)
    context = tl.load(contexts + request).to(tl.int32)
    table = request.to(tl.int64) * table_stride
    new, entry = first + tl.arange(0, QUERIES), tl.arange(0, HEAD_PADDED)
    real = (new < count)[:, None] & (entry < HEAD_DIM)[None, :]
    place = head * HEAD_DIM + entry[None, :]
    token = (begin + new).to(tl.int64)[:, None]
    query = tl.load(q + token * q_stride + place, mask=real, other=0.0)
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, HEAD_PADDED], tl.float32)
    end = context + tl.minimum(first + QUERIES, count)  # what the last token of the tile may look at
    for start in range(0, end, TILE):
        position = start + tl.arange(0, TILE)
        there = position < end
        slot = _slots(tables, table, position, there, BLOCK_SIZE)
        address = cache + slot[:, None] * slot_stride + (head // SHARED) * HEAD_DIM + entry[None, :]
        inside = there[:, None] & (entry < HEAD_DIM)[None, :]
        keys = tl.load(address, mask=inside, other=0.0)
        values = tl.load(address + value_stride, mask=inside, other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * (scale * 1.4426950408889634)
        seen = there[None, :] & (position[None, :] <= context + new[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        best, total, mixed = _fold(best, total, mixed, scores, values)  # position 0 is seen by all: best is finite
    mixed = mixed / total[:, None]
    tl.store(out + token * out_stride + place, mixed.to(out.dtype.element_ty), mask=real)
