"""Attention over a paged cache, for one step's flat batch of prompts, chunks and decode tokens.

The one idea: first the keys and values of *all* new tokens of the step are written to their slots, then every
request reads its own sequence back through its block table. So a chunk sees the earlier chunks, a decode token sees
everything before it, and a request may even use a block that another request fills in the same step.

A request reads only slots that were written: padding of a row repeats the row's own first slot and is masked. What
lies in unused slots, in the null block, or in the rest of a last block cannot reach a result, not even a NaN.

Requests with one new token are computed together, padded to the longest of them; the others one by one, because
their shapes differ. Left out: a kernel that reads the block table without the gathered copy (part of making it fast).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from contbatch.batch import FlatBatch
from contbatch.errors import InvalidConfig
from contbatch.models.config import ModelConfig
from contbatch.models.device import free_memory


class PagedCache:
    """Keys and values of all layers: `data` is [layers, slots, 2, kv_heads, head_dim].

    Slot `block_id * block_size + offset` holds one token; its key and value lie side by side, so that one gather
    reads both. There is one block more than `num_blocks`: block 0, the null block, which no request owns.

    Raises:
        InvalidConfig: the memory for so many blocks is not there.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        shape = (config.num_layers, (num_blocks + 1) * block_size, 2, config.num_kv_heads, config.head_dim)
        needed, free = math.prod(shape) * dtype.itemsize, free_memory(device)
        self.block_size = block_size
        try:
            if needed > free:
                raise RuntimeError("not tried")
            # Not filled: a slot that nobody wrote is never read, and memory is taken when it is first written.
            self.data = torch.empty(shape, device=device, dtype=dtype)
        except RuntimeError as error:
            fit = max(0, free * (num_blocks + 1) // needed - 1)
            raise InvalidConfig(
                f"a cache of {num_blocks} blocks of {block_size} tokens needs {needed / 1e9:.1f} GB on {device}, "
                f"where {free / 1e9:.1f} GB are free; set num_blocks to at most {fit}"
            ) from error

    def copy_blocks(self, target: PagedCache, blocks: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks of all layers to another cache: (block here, block there) each."""
        source, place = torch.tensor(blocks).T
        target._by_block()[:, place.to(target.data.device)] = self._by_block()[:, source.to(self.data.device)].to(
            target.data.device
        )

    def _by_block(self) -> Tensor:
        """[layers, blocks, block_size, 2, kv_heads, head_dim], a view."""
        return self.data.view(len(self.data), -1, self.block_size, *self.data.shape[2:])


@dataclass(frozen=True)
class _Group:
    """Requests with equally many new tokens: which rows they feed and which slots they read."""

    rows: slice | Tensor
    """Their rows on the token axis."""
    slots: Tensor
    """[requests, longest] slots of each sequence, padded with its own first slot."""
    mask: Tensor | None
    """Added to the scores, [requests, 1, new tokens, longest]; None (causal) where nothing was cached before."""


class PagedAttention:
    """The attention function of one step; see `llama.Attend`. Built once, called once per layer."""

    def __init__(self, cache: PagedCache, flat: FlatBatch) -> None:
        self.cache = cache
        self.slot_mapping = torch.from_numpy(flat.slot_mapping).to(cache.data.device)
        counts = np.diff(flat.cu_seqlens)
        single, several = np.flatnonzero(counts == 1), np.flatnonzero(counts > 1)
        self.groups = [self._group(flat, several[i : i + 1]) for i in range(len(several))]
        if len(single):
            self.groups.append(self._group(flat, single))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, heads, head_dim], k and v [T, kv_heads, head_dim] -> like q; writes k and v."""
        cache = self.cache.data[layer]
        cache.index_copy_(0, self.slot_mapping, torch.stack((k, v), dim=1))
        result = torch.empty_like(q)
        for group in self.groups:
            requests, longest = group.slots.shape
            read = cache.index_select(0, group.slots.flatten())
            keys, values = read.view(requests, longest, 2, *k.shape[1:]).unbind(2)
            rows = q[group.rows]
            mixed = attend(rows.reshape(requests, -1, *q.shape[1:]), keys, values, group.mask)
            result[group.rows] = mixed.flatten(0, 1)
        return result

    def _group(self, flat: FlatBatch, members: np.ndarray[tuple[int], np.dtype[np.int64]]) -> _Group:
        """Slots and mask of requests `members`, which feed equally many tokens (several if alone)."""
        size, device = self.cache.block_size, self.cache.data.device
        lengths, context = flat.seq_lens[members], flat.context_lens[members]
        start, count = flat.cu_seqlens[members[0]], lengths[0] - context[0]
        column = np.arange(lengths.max())
        position = np.where(column < lengths[:, None], column, 0)
        blocks = np.take_along_axis(flat.block_tables[members], position // size, axis=1)
        slots = torch.from_numpy(blocks * size + position % size).to(device)
        if count > 1:
            rows: slice | Tensor = slice(int(start), int(start + count))
        else:
            rows = torch.from_numpy(flat.cu_seqlens[members]).to(device)
        if count > 1 and context[0] == 0:
            return _Group(rows, slots, None)
        last_seen = context[:, None] + np.arange(count)
        hidden = torch.from_numpy(column > last_seen[:, None, :, None]).to(device)
        mask = torch.zeros(hidden.shape, device=device, dtype=self.cache.data.dtype)
        return _Group(rows, slots, mask.masked_fill_(hidden, -torch.inf))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax attention with grouped queries: `heads / kv_heads` query heads read one key/value head.

    Args:
        q: [requests, new tokens, heads, head_dim].
        k, v: [requests, longest, kv_heads, head_dim]; never repeated in memory.
        mask: [requests, 1, new tokens, longest] added to the scores; None means causal from position 0.

    Returns:
        Like q.
    """
    requests, new, heads, head_dim = q.shape
    shared = heads // k.shape[2]
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if new == 1:  # the queries that share a key stand where several new tokens would
        q = q.view(requests, -1, shared, head_dim)
        return F.scaled_dot_product_attention(q, k, v, mask).reshape(requests, 1, heads, head_dim)
    # one request: its key/value heads stand where requests would
    q = q[0].transpose(0, 1).view(-1, shared, new, head_dim)
    k, v = (x[0][:, None].expand(-1, shared, -1, -1) for x in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
    return out.flatten(0, 1).transpose(0, 1)[None]
