"""The plain model with attention by the Triton kernels: how a mixed step of prompts and decode tokens is computed.

The one idea: the model stays `llama.Llama`, and only the attention function changes. As in
`contbatch.models.attention`, keys and values of all new tokens are written first; then requests with one new token go
through the decode kernel together, and chunks, cut into tiles, through the prefill kernel together. So a layer starts
two kernels at most, however many requests there are.
"""

from __future__ import annotations

import importlib.util
import os

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contbatch.batch import FlatBatch
from contbatch.errors import InvalidConfig, KernelsMissing
from contbatch.models.attention import PagedCache
from contbatch.models.llama import Llama

IntArray = NDArray[np.int64]


def check_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a device or number format that the kernels cannot serve.

    Raises:
        KernelsMissing: no Triton, no CUDA device (and no interpreter, see TRITON_INTERPRET), or float64.
    """
    if importlib.util.find_spec("triton") is None:
        raise KernelsMissing(
            "the attention kernels need Triton; it comes with PyTorch for CUDA, or: pip install triton"
        )
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise KernelsMissing(f"the Triton kernels are for a CUDA device, and the model is on {device}")
    from contbatch.models.gpu import kernels

    if dtype not in kernels.DTYPES:
        raise KernelsMissing(f"the Triton kernels have no {dtype}; use one of {', '.join(map(str, kernels.DTYPES))}")


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """True where `check_kernels` has nothing to say."""
    try:
        check_kernels(device, dtype)
    except KernelsMissing:
        return False
    return True


class TritonForward:
    """Computes passes with the Triton kernels; see `runner.Forward`.

    Raises:
        KernelsMissing: see `check_kernels`.
        InvalidConfig: the plain weights of the model were dropped.
    """

    def __init__(self, model: Llama) -> None:
        if not len(model.layers):
            raise InvalidConfig("the plain weights of this model were dropped when it was packed; load it again")
        weight = model.embed_tokens.weight
        check_kernels(weight.device, weight.dtype)
        self.model = model

    def forward(self, flat: FlatBatch, cache: PagedCache) -> Tensor:
        """Logits [S, vocab_size] of the rows to sample; K and V of all T tokens are in the cache after."""
        device = cache.data.device
        hidden = self.model(_to(flat.input_ids, device), _to(flat.positions, device), TritonAttention(cache, flat))
        return self.model.logits(hidden[_to(flat.sample_rows, device)])


class TritonAttention:
    """The attention function of one step; see `llama.Attend`. Built once, called once per layer."""

    def __init__(self, cache: PagedCache, flat: FlatBatch) -> None:
        from contbatch.models.gpu import kernels

        self.cache, self.kernels = cache, kernels
        device = cache.data.device
        counts = np.diff(flat.cu_seqlens)
        single = np.flatnonzero(counts == 1)
        tile = kernels.query_tile(cache.data.shape[-1], cache.data.dtype)
        self.slot_mapping, self.tables = _to(flat.slot_mapping, device), _to(flat.block_tables, device)
        self.contexts, self.starts = _to(flat.context_lens, device), _to(flat.cu_seqlens, device)
        self.table_rows, self.token_rows = _to(single, device), _to(flat.cu_seqlens[single], device)
        self.lengths, self.tiles = _to(flat.seq_lens[single], device), _to(cut(counts, tile), device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, heads, head_dim], k and v [T, kv_heads, head_dim] -> like q; writes k and v."""
        cache, size = self.cache.data[layer], self.cache.block_size
        cache.index_copy_(0, self.slot_mapping, torch.stack((k, v), dim=1))
        q, result = q.contiguous(), torch.empty_like(q, memory_format=torch.contiguous_format)
        if len(self.token_rows):
            self.kernels.decode_attention(
                q, cache, self.tables, self.lengths, self.token_rows, self.table_rows, size, result
            )
        if len(self.tiles):
            self.kernels.prefill_attention(q, cache, self.tables, self.contexts, self.starts, self.tiles, size, result)
        return result


def cut(counts: IntArray, tile: int) -> IntArray:
    """Cut chunks into tiles: [n, 2] the request, and the first token of its chunk; requests of one token have none."""
    tiles = np.where(counts > 1, -(-counts // tile), 0)
    request = np.repeat(np.arange(len(counts)), tiles)
    before = np.cumsum(tiles) - tiles
    return np.stack((request, (np.arange(len(request)) - before[request]) * tile), axis=1)


def _to(array: IntArray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
