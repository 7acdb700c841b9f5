"""A step of the model through the kernels: the mathematics of `llama.py`, eight calls a layer.

The one idea: what does not change from step to step is made once. Weights are packed, buffers are kept, and a layer
is a fixed list of calls on addresses, so that Python costs about a microsecond a call, however many tokens there are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from contbatch.batch import FlatBatch
from contbatch.models.attention import PagedCache
from contbatch.models.config import ModelConfig
from contbatch.models.cpu.native import Kernels, at
from contbatch.models.cpu.packing import interleave, pack, pad_rows
from contbatch.models.llama import DecoderLayer, Llama, RMSNorm, rotary

STORE, ADD, SWIGLU = range(3)
"""What a product does with its sums: the kernels' `Ending`."""

QUERIES = 8
"""Neighbouring tokens of a prompt whose attention is computed together: they read the same keys and values."""


class Weight(NamedTuple):
    """A packed matrix with its bias, and the sizes of the product: `inner` inputs, `columns` outputs."""

    packed: Tensor
    bias: Tensor | None
    inner: int
    columns: int


class Layer(NamedTuple):
    """The weights of one layer as the kernels read them."""

    qkv: Weight
    output: Weight
    gate_up: Weight
    down: Weight
    attention_norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None


class Workspace:
    """Buffers for the activations of up to `rows` tokens."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, rows: int) -> None:
        heads = config.num_heads + 2 * config.num_kv_heads
        self.rows = rows
        self.hidden = at(torch.empty(rows, config.hidden_size))
        self.normed = at(torch.empty(rows, config.hidden_size, dtype=dtype))
        self.qkv = at(torch.empty(rows, heads * config.head_dim))
        self.mixed = at(torch.empty(rows, config.num_heads * config.head_dim, dtype=dtype))
        self.gated = at(torch.empty(rows, config.intermediate_size, dtype=dtype))


class Decoder:
    """Runs steps of a Llama-family model in float32 or bfloat16.

    Sums, norms, rotary positions and the stream between layers are float32 in both.

    Args:
        model: the plain model; its weights are copied into packed ones.
        kernels: those of the model's number format.
    """

    def __init__(self, model: Llama, kernels: Kernels) -> None:
        self.config, self.kernels = model.config, kernels
        self.embedding: Tensor = model.embed_tokens.weight
        self.layers = [self._pack_layer(layer) for layer in model.layers]  # type: ignore[arg-type]
        self.norm = at(model.norm.weight.float())
        head = model.embed_tokens if model.config.tied_head else model.lm_head
        self.head = self._pack(head.weight)
        self.workspace = self._workspace(0)

    def forward(self, flat: FlatBatch, cache: PagedCache) -> Tensor:
        """Logits [S, vocab_size] in float32; K and V of all T tokens are in the cache after."""
        rows = flat.num_tokens
        if rows > self.workspace.rows:
            self.workspace = self._workspace(rows)
        hidden = self.workspace.hidden[:rows]
        hidden.copy_(self.embedding[torch.from_numpy(flat.input_ids)])
        cos, sin = (at(x.contiguous()) for x in rotary(torch.from_numpy(flat.positions), self.config, torch.float32))
        arrays = [at(torch.from_numpy(x)) for x in (flat.slot_mapping, flat.block_tables, attention_tasks(flat))]
        for layer, keys_values in zip(self.layers, cache.data, strict=True):
            self._layer(layer, at(keys_values), rows, cos, sin, cache.block_size, *arrays)
        return self._logits(hidden[torch.from_numpy(flat.sample_rows)])

    def _layer(
        self,
        layer: Layer,
        cache: Tensor,
        rows: int,
        cos: Tensor,
        sin: Tensor,
        block_size: int,
        slots: Tensor,
        tables: Tensor,
        tasks: Tensor,
    ) -> None:
        work, kernels, c = self.workspace, self.kernels, self.config
        heads = (c.num_heads, c.num_kv_heads, c.head_dim)
        self._norm(work.hidden, layer.attention_norm, work.normed, rows)
        self._product(work.normed, layer.qkv, work.qkv, rows, STORE)
        kernels.rope_and_store(work.qkv, cos, sin, layer.q_norm, layer.k_norm, c.norm_eps, slots, cache, rows, *heads)
        kernels.attention(work.qkv, cache, tables, work.mixed, tables.shape[1], block_size, *heads, tasks, len(tasks))
        self._product(work.mixed, layer.output, work.hidden, rows, ADD)
        self._norm(work.hidden, layer.mlp_norm, work.normed, rows)
        self._product(work.normed, layer.gate_up, work.gated, rows, SWIGLU)
        self._product(work.gated, layer.down, work.hidden, rows, ADD)

    def _workspace(self, rows: int) -> Workspace:
        return Workspace(self.config, self.embedding.dtype, rows)

    def _logits(self, hidden: Tensor) -> Tensor:
        normed = at(torch.empty_like(hidden, dtype=self.workspace.normed.dtype))
        logits = at(torch.empty(len(hidden), self.head.columns))
        self._norm(at(hidden), self.norm, normed, len(hidden))
        self._product(normed, self.head, logits, len(hidden), STORE)
        return logits

    def _norm(self, x: Tensor, weight: Tensor, out: Tensor, rows: int) -> None:
        self.kernels.rms_norm(x, weight, self.config.norm_eps, out, rows, x.shape[1])

    def _product(self, x: Tensor, weight: Weight, out: Tensor, rows: int, ending: int) -> None:
        self.kernels.product(x, weight.packed, weight.bias, out, rows, weight.inner, weight.columns, ending)

    def _pack_layer(self, layer: DecoderLayer) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        weights: list[Tensor] = [p.weight for p in projections]
        biases: list[Tensor] = [p.bias for p in projections if p.bias is not None]
        gated = interleave(mlp.gate_proj.weight, mlp.up_proj.weight, self.kernels.lanes)
        return Layer(
            qkv=self._pack(torch.cat(weights), torch.cat(biases) if biases else None),
            output=self._pack(attention.o_proj.weight, attention.o_proj.bias),
            gate_up=self._pack(gated)._replace(columns=len(mlp.gate_proj.weight)),
            down=self._pack(mlp.down_proj.weight),
            attention_norm=at(layer.input_layernorm.weight.float()),
            mlp_norm=at(layer.post_attention_layernorm.weight.float()),
            q_norm=_weight(attention.q_norm),
            k_norm=_weight(attention.k_norm),
        )

    def _pack(self, weight: Tensor, bias: Tensor | None = None) -> Weight:
        lanes = self.kernels.lanes
        padded = None if bias is None else at(pad_rows(bias.float(), 2 * lanes))
        return Weight(at(pack(weight, lanes)), padded, weight.shape[1], len(weight))


def _weight(norm: nn.Module) -> Tensor | None:
    """The weights of a head's norm; None for a family without."""
    return at(norm.weight.float()) if isinstance(norm, RMSNorm) else None


def attention_tasks(flat: FlatBatch) -> NDArray[np.int64]:
    """[tasks, 4]: request, first row on the token axis, number of rows, position of the first; the longest first."""
    counts = np.diff(flat.cu_seqlens)
    pieces = -(-counts // QUERIES)
    request = np.repeat(np.arange(len(counts)), pieces)
    offset = (np.arange(len(request)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * QUERIES
    row, position = flat.cu_seqlens[request] + offset, flat.context_lens[request] + offset
    count = np.minimum(counts[request] - offset, QUERIES)
    longest_first = np.argsort(-count * (position + count), kind="stable")
    return np.ascontiguousarray(np.stack((request, row, count, position), axis=1)[longest_first])
