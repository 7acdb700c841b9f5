"""Decode steps recorded once per batch size and replayed: a whole model is started with one call.

The one idea: a decode step of a small model is hundreds of kernels of a few microseconds, and starting them one by one
takes longer than running them. A CUDA graph starts them all at once, but it is fixed: same shapes, same addresses. So
the step is an ordinary function of tensors that never move (`DecodeBuffers`, the cache), recorded for a few batch
sizes, the buckets; a batch takes the smallest bucket that holds it, and its rows are filled up with the row of no
request. Because the function is ordinary, a CPU runs it too: there a "graph" is the function itself, and the tests of
buckets, buffers and padding need no GPU.

Steps with a prompt or a chunk in them, and batches above the largest bucket, are computed without a graph. Left out:
graphs for mixed steps, whose shapes have no end.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from contbatch.batch import FlatBatch
from contbatch.errors import InvalidConfig
from contbatch.models.attention import PagedCache, attend
from contbatch.models.gpu.buffers import DecodeBuffers, decode_inputs
from contbatch.models.gpu.forward import has_kernels
from contbatch.models.llama import Llama

Step = Callable[[], Tensor]
"""A decode step over tensors that never move; gives its logits, [bucket, vocab_size]."""


class Forward(Protocol):
    """As `runner.Forward`: computes any step."""

    def forward(self, flat: FlatBatch, cache: PagedCache) -> Tensor:
        """Logits of the rows to sample."""
        ...


def buckets_up_to(largest: int) -> tuple[int, ...]:
    """1, 2, 4, then every eighth: a row of padding costs little, so at most 7 of them are computed.

    Raises:
        InvalidConfig: below 1.
    """
    if largest < 1:
        raise InvalidConfig(f"the largest batch of a graph is {largest}; use at least 1")
    sizes = [size for size in (1, 2, 4, *range(8, largest, 8)) if size < largest]
    return (*sizes, largest)


class GraphForward:
    """Replays recorded decode steps, and hands every other step to `eager`.

    One of these belongs to one cache: the graphs hold its address.

    Args:
        model: the model; with its cache on a CUDA device, steps become CUDA graphs, elsewhere they are called.
        eager: what computes the steps that have no graph.
        max_num_seqs: requests that run at once, which is also the largest bucket.
        buckets: batch sizes to record; None for `buckets_up_to(max_num_seqs)`.
    """

    def __init__(
        self, model: Llama, eager: Forward, max_num_seqs: int = 256, buckets: tuple[int, ...] | None = None
    ) -> None:
        self.model, self.eager, self.max_num_seqs = model, eager, max_num_seqs
        self.buckets = buckets_up_to(max_num_seqs) if buckets is None else tuple(sorted(buckets))
        if not self.buckets or self.buckets[0] < 1 or self.buckets[-1] > max_num_seqs:
            raise InvalidConfig(f"buckets are {self.buckets}; use sizes from 1 to max_num_seqs, {max_num_seqs}")
        self.replays = 0
        """Steps that were computed by a recorded one."""
        self._cache: PagedCache | None = None
        self._steps: dict[int, Step] = {}

    def forward(self, flat: FlatBatch, cache: PagedCache) -> Tensor:
        """Logits [S, vocab_size] of the rows to sample; K and V of all T tokens are in the cache after."""
        if cache is not self._cache:
            self._adopt(cache)
        bucket = self.bucket(len(flat.seq_lens))
        if bucket is None or not self.buffers.fits(flat):
            return self.eager.forward(flat, cache)
        step = self._step(bucket)
        self.buffers.update(flat)
        self.replays += 1
        return step()[: len(flat.seq_lens)].clone()  # the next replay writes over its own result

    def bucket(self, requests: int) -> int | None:
        """The smallest bucket that holds so many requests."""
        index = bisect.bisect_left(self.buckets, requests)
        return self.buckets[index] if index < len(self.buckets) else None

    def record_all(self, cache: PagedCache) -> None:
        """Record every bucket now, the largest first, so that no step waits for it later."""
        if cache is not self._cache:
            self._adopt(cache)
        for bucket in reversed(self.buckets):
            self._step(bucket)

    def step(self, bucket: int, cache: PagedCache) -> Step:
        """The recorded step of this size over the buffers as they are, for measuring it alone."""
        if cache is not self._cache:
            self._adopt(cache)
        return self._step(bucket)

    def _adopt(self, cache: PagedCache) -> None:
        """Forget what was recorded for another cache."""
        blocks = cache.data.shape[1] // cache.block_size - 1
        longest = -(-self.model.config.max_model_len // cache.block_size)
        device = cache.data.device
        self.buffers = DecodeBuffers(self.max_num_seqs, min(blocks, longest), cache.block_size, device)
        self._cache, self._steps = cache, {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def _step(self, bucket: int) -> Step:
        """The recorded step of this size; recorded with rows of padding alone, so that no live block changes."""
        if bucket not in self._steps:
            assert self._cache is not None
            self.buffers.clear_rows()
            step = decode_step(self.model, self.buffers, self._cache, bucket)
            self._steps[bucket] = record(step, self._cache.data.device, self._pool)
        return self._steps[bucket]


def decode_step(model: Llama, buffers: DecodeBuffers, cache: PagedCache, bucket: int) -> Step:
    """The function that is recorded: one token for each of `bucket` rows, from buffers to logits."""
    kernels = has_kernels(cache.data.device, cache.data.dtype)

    def step() -> Tensor:
        rows, tokens, positions, cache_slots, seen = decode_inputs(buffers, bucket)
        order = torch.arange(bucket, device=rows.device)

        def look(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            data = cache.data[layer]
            data.index_copy_(0, cache_slots, torch.stack((k, v), dim=1))
            if not kernels:
                return plain_decode(q, data, buffers.tables[rows], seen, buffers.block_size)
            from contbatch.models.gpu.kernels import decode_attention

            q, result = q.contiguous(), torch.empty_like(q, memory_format=torch.contiguous_format)
            decode_attention(q, data, buffers.tables, seen, order, rows, buffers.block_size, result)
            return result

        return model.logits(model(tokens, positions, look))

    return step


def plain_decode(q: Tensor, cache: Tensor, tables: Tensor, lengths: Tensor, block_size: int) -> Tensor:
    """What `kernels.decode_attention` computes, with PyTorch operations of fixed shapes.

    Args:
        q: [R, heads, head_dim].
        cache: one layer, [slots, 2, kv_heads, head_dim].
        tables: [R, width] block ids.
        lengths: [R] tokens to look at; a row that looks at none becomes 0.
    """
    column = torch.arange(tables.shape[1] * block_size, device=q.device)
    hidden = column >= lengths[:, None]
    position = torch.where(hidden, 0, column)  # its own first slot: what nobody wrote is not read
    slots = tables.gather(1, position // block_size) * block_size + position % block_size
    keys, values = cache[slots].unbind(2)
    hidden[:, 0] = False  # a row of padding looks at the token that it wrote itself, so that no score is NaN
    mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -torch.inf)
    mixed = attend(q[:, None], keys, values, mask[:, None, None])[:, 0]
    return torch.where((lengths > 0)[:, None, None], mixed, 0)


def record(step: Step, device: torch.device, pool: Any) -> Step:
    """A function that does again what `step` does: a CUDA graph, or `step` itself where there are none.

    It runs twice first, because kernels are compiled and libraries set up at the first call, and neither may happen
    while a graph is recorded. Graphs share the memory `pool` for what lives within a step, so they may not overlap.
    """
    if device.type != "cuda":
        return step
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch gives it no types
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = step()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay
