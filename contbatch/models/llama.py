"""A Llama-family decoder in plain PyTorch, over one flat axis of tokens.

The one idea: everything in a decoder but attention treats each token on its own. So the model takes the tokens of
all requests end to end, with no batch dimension and no padding, and hands attention to a function that it is given.
Which tokens may look at which, and where keys and values are kept, is known by that function alone: the paged
cache of `attention.py` when serving, a few lines over a rectangle when training.

Parameter names are those of Hugging Face checkpoints without the leading `model.`. Left out: dropout, fused products
(readable first).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contbatch.models.config import ModelConfig, RopeScaling

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""`attend(layer, q, k, v)`: q [T, heads, head_dim], k and v [T, kv_heads, head_dim] -> like q."""

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, each [T, 1, head_dim / 2]."""


class Llama(nn.Module):
    """Token ids in, one hidden vector per token out; `logits` turns chosen ones into scores.

    Source: Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, n) for n in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        if not config.tied_head:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """[T] ids at [T] positions -> [T, hidden_size] normalised hidden vectors."""
        hidden: Tensor = self.embed_tokens(input_ids)
        rotation = rotary(positions, self.config, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, rotation, attend)
        return self.norm(hidden)  # type: ignore[no-any-return]  # nn.Module calls are untyped

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden_size] -> [S, vocab_size] scores of the next token."""
        head = self.embed_tokens if self.config.tied_head else self.lm_head
        return F.linear(hidden, head.weight)


class DecoderLayer(nn.Module):
    """Attention, then a gated feed-forward block; each on a normalised copy, added to the stream."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, hidden: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, attend)
        result: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return result


class Attention(nn.Module):
    """Projections and rotary positions around the attention function.

    Grouped queries: `num_heads / num_kv_heads` query heads share one key/value head.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.head_dim = config.head_dim
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, hidden: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        q, k, v = (
            project(hidden).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(self.q_norm(q), rotation), rotate(self.k_norm(k), rotation)
        mixed = attend(self.index, q, k, v)
        result: Tensor = self.o_proj(mixed.flatten(-2))
        return result


class FeedForward(nn.Module):
    """SwiGLU: one product opens the gate of the other (Shazeer, 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        gated = F.silu(self.gate_proj(hidden)) * self.up_proj(hidden)
        result: Tensor = self.down_proj(gated)
        return result


class RMSNorm(nn.Module):
    """Scale each vector to root mean square 1, then by learned weights (Zhang & Sennrich, 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., size] -> [..., size]; the mean is taken in at least 32 bits."""
        wide = hidden.to(accumulator(hidden.dtype))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(hidden.dtype)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The number format for sums and angles of a model in `dtype`: never fewer than 32 bits."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rotary(positions: Tensor, config: ModelConfig, dtype: torch.dtype) -> Rotation:
    """Cosines and sines for [T] positions, computed per step, so that no table limits the length.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """
    wide = accumulator(dtype)
    angles = (positions[:, None].to(wide) * frequencies(config, wide, positions.device))[:, None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


@functools.lru_cache(maxsize=16)
def frequencies(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[head_dim / 2] radians that one position turns each pair of entries.

    Kept on the device after the first call, so that a later one copies nothing and waits for nothing. A step that is
    captured in a CUDA graph must have been run once before.
    """
    with torch.inference_mode(False):  # training may use them after a step without gradients made them
        pairs = torch.arange(0, config.head_dim, 2, dtype=dtype, device=device)
        plain = 1.0 / config.rope_theta ** (pairs / config.head_dim)
        return plain if config.rope_scaling is None else _slowed(plain, config.rope_scaling)


def _slowed(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Frequencies of a model that was stretched to longer texts; the kinds are told at `RopeScaling`."""
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "divisors":
        return plain / plain.new_tensor(scaling.divisors)
    turns = scaling.original_max_len * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (kept + (1 - kept) / scaling.factor)


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Turn [T, heads, head_dim] by position; entry i is paired with entry i + head_dim / 2."""
    cos, sin = rotation
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
