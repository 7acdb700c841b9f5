"""A tiny random Llama, its mathematics written a second time in numpy, and a way to drive the executor by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray

from contbatch.batch import BatchedRequest, ScheduledBatch
from contbatch.models import Checkpoint, Llama, LoadedModel, ModelConfig, ModelExecutor, Tokenizer
from contbatch.models.checkpoint import assemble

Floats = NDArray[np.float64]
TINY = ModelConfig(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,  # not hidden_size / num_heads
    max_model_len=4096,
    rope_theta=500.0,
)


def tiny_config(**changes: Any) -> ModelConfig:
    """`TINY` with some sizes changed."""
    return ModelConfig(**{**TINY.__dict__, **changes})


def tiny_tokenizer() -> Tokenizer:
    """A tokenizer with one word for each id of `TINY`."""
    words = {f"w{index}": index for index in range(TINY.vocab_size)}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return Tokenizer(core, frozenset({2, 5}))


def tiny_checkpoint(config: ModelConfig = TINY, seed: int = 0) -> Checkpoint:
    """Random weights in 64 bits; large enough for attention to be far from uniform."""
    chance = torch.Generator().manual_seed(seed)
    shapes = {name: value.shape for name, value in Llama(config).state_dict().items()}
    weights = {name: torch.randn(shape, generator=chance, dtype=torch.float64) / 2 for name, shape in shapes.items()}
    return Checkpoint(config, weights, tiny_tokenizer())


def tiny_model(config: ModelConfig = TINY, seed: int = 0, dtype: torch.dtype = torch.float64) -> LoadedModel:
    """A model with the weights of `tiny_checkpoint`."""
    return assemble("tiny", tiny_checkpoint(config, seed), torch.device("cpu"), dtype)


def tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    """`count` random token ids."""
    return tuple(np.random.default_rng(seed).integers(0, TINY.vocab_size, count).tolist())


class Sequences:
    """Feeds sequences to an executor in pieces of any size, each sequence in scattered blocks of its own.

    Args:
        sequences: the token ids of each.
        model, block_size: what runs them.
    """

    def __init__(self, model: LoadedModel, block_size: int, sequences: Sequence[Sequence[int]]) -> None:
        self.sequences = sequences
        self.done = [0] * len(sequences)
        needed = [-(-len(tokens) // block_size) for tokens in sequences]
        ids = np.random.default_rng(7).permutation(np.arange(1, sum(needed) + 3)).tolist()
        self.tables = [tuple(ids.pop() for _ in range(count)) for count in needed]
        self.executor = ModelExecutor(model, sum(needed) + 2, block_size)
        self.executor.cache.data.fill_(torch.nan)  # whatever nobody wrote must not matter

    def step(self, counts: dict[int, int]) -> Floats:
        """Feed `counts[i]` more tokens of sequence i in one forward pass; logits [S, vocab_size] of their last ones."""
        parts = [self._part(index, count) for index, count in counts.items()]
        flat = ScheduledBatch(0, parts).flatten(self.executor.cache.block_size)
        return np.asarray(self.executor.forward(flat).double().numpy())

    def slots(self, index: int, start: int, end: int) -> list[int]:
        """Cache slots of positions [start, end) of sequence `index`."""
        size = self.executor.cache.block_size
        return [self.tables[index][p // size] * size + p % size for p in range(start, end)]

    def _part(self, index: int, count: int) -> BatchedRequest:
        start = self.done[index]
        self.done[index] += count
        fed = tuple(self.sequences[index][start : start + count])
        assert len(fed) == count
        name, table = str(index), self.tables[index]
        if count == 1 and start:
            return BatchedRequest.decode(name, fed[0], start, index, table, start)
        return BatchedRequest.prefill(name, fed, index, table, start)


def dense_logits(model: LoadedModel, token_ids: Sequence[int]) -> Floats:
    """[T, vocab_size] logits of one sequence: the textbook's dense forward pass, in numpy.

    Rotary positions are written with complex numbers, heads and tokens with loops: nothing is shared with the package.
    """
    c, w = model.config, {name: value.double().numpy() for name, value in model.model.state_dict().items()}
    x = w["embed_tokens.weight"][list(token_ids)]
    for n in range(c.num_layers):
        p = f"layers.{n}."
        h = _norm(x, w[p + "input_layernorm.weight"], c.norm_eps)
        q, k, v = (
            h @ w[f"{p}self_attn.{name}_proj.weight"].T + _bias(w, f"{p}self_attn.{name}_proj") for name in "qkv"
        )
        heads = []
        for head in range(c.num_heads):
            shared = head // (c.num_heads // c.num_kv_heads)
            mine, theirs = (
                slice(head * c.head_dim, (head + 1) * c.head_dim),
                slice(shared * c.head_dim, (shared + 1) * c.head_dim),
            )
            query, key = q[:, mine], k[:, theirs]
            if c.qk_norm:
                query = _norm(query, w[p + "self_attn.q_norm.weight"], c.norm_eps)
                key = _norm(key, w[p + "self_attn.k_norm.weight"], c.norm_eps)
            heads.append(_one_head(_turn(query, c), _turn(key, c), v[:, theirs]))
        x = x + np.concatenate(heads, axis=1) @ w[p + "self_attn.o_proj.weight"].T + _bias(w, p + "self_attn.o_proj")
        h = _norm(x, w[p + "post_attention_layernorm.weight"], c.norm_eps)
        gate, up = h @ w[p + "mlp.gate_proj.weight"].T, h @ w[p + "mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[p + "mlp.down_proj.weight"].T
    head_weight = w["embed_tokens.weight"] if c.tied_head else w["lm_head.weight"]
    return np.asarray(_norm(x, w["norm.weight"], c.norm_eps) @ head_weight.T)


def _norm(x: Floats, weight: Floats, eps: float) -> Floats:
    return np.asarray(x / np.sqrt((x**2).mean(axis=1, keepdims=True) + eps) * weight)


def _bias(weights: dict[str, Floats], name: str) -> Floats:
    return weights.get(f"{name}.bias", np.zeros(1))


def _turn(x: Floats, config: ModelConfig) -> Floats:
    half = config.head_dim // 2
    speed = config.rope_theta ** (-np.arange(half) / half)
    if config.rope_scaling is not None:
        assert config.rope_scaling.kind == "linear", "the other kinds are compared with transformers"
        speed = speed / config.rope_scaling.factor
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * np.outer(np.arange(len(x)), speed))
    return np.concatenate([turned.real, turned.imag], axis=1)


def _one_head(q: Floats, k: Floats, v: Floats) -> Floats:
    rows = []
    for t in range(len(q)):
        scores = k[: t + 1] @ q[t] / np.sqrt(q.shape[1])
        share = np.exp(scores - scores.max())
        rows.append(share / share.sum() @ v[: t + 1])
    return np.array(rows)
