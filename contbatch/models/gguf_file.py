"""GGUF files: weights, sizes and tokenizer in one file, as llama.cpp writes them.

The one idea: undo what the writer did. Weights are dequantised to 32 bits, one tensor at a time, when it is asked for.
In files of the architecture `llama` the rows of Q and K come back into the half-split order: llama.cpp pairs
neighbouring rows for rotary positions there, Hugging Face pairs row i with row i + head_dim / 2.

Left out: computing with quantised weights. The tokenizer is rebuilt in `gguf_tokenizer.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor
from gguf.quants import dequantize

from contbatch.errors import CheckpointError
from contbatch.models.checkpoint import Checkpoint
from contbatch.models.config import ModelConfig, check_count, equal_share
from contbatch.models.gguf_tokenizer import read_tokenizer
from contbatch.models.rope import RopeScaling
from contbatch.models.stored import StoredTensor, StoredTensors

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Architectures that can be loaded, by the name in the file; Mistral's files say `llama`."""

_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FREQS = "rope_freqs.weight"
_SLAB = 1 << 20
"""Numbers that are dequantised at once; the library needs some more copies of so many."""


def read_gguf(path: Path) -> Checkpoint:
    """Read a GGUF file; its weights are read later, one by one.

    Raises:
        CheckpointError: the file is missing or damaged, or something in it is not supported.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; give the path of a GGUF file")
    try:
        reader = GGUFReader(path)
    except Exception as error:  # the reader raises whatever its parsing runs into
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) is truncated or not a GGUF file: {error}; get it again"
        ) from error
    fields = _Fields(reader)
    stored = {tensor.name: _stored(path, tensor) for tensor in reader.tensors}
    divisors = stored.pop(_ROPE_FREQS, None)
    config = _config(fields, set(stored), () if divisors is None else tuple(divisors.read().tolist()))
    is_paired = fields["general.architecture"] == "llama"
    tensors = StoredTensors(_parameter(name, tensor, config, is_paired) for name, tensor in stored.items())
    return Checkpoint(config, tensors, read_tokenizer(fields, path))


class _Fields:
    """Metadata by key, with an error of ours for a key that is not there."""

    def __init__(self, reader: GGUFReader) -> None:
        self._fields = reader.fields
        self._contents: dict[str, Any] = {}

    def get(self, key: str, default: Any = None) -> Any:
        if key not in self._fields:
            return default
        if key not in self._contents:  # kept, because reading a vocabulary takes a second
            self._contents[key] = self._fields[key].contents()
        return self._contents[key]

    def __getitem__(self, key: str) -> Any:
        if key not in self._fields:
            raise CheckpointError(f"the GGUF file has no field {key!r}; it is incomplete")
        return self.get(key)


class _Sizes:
    """The fields of one architecture, whose keys begin with its name."""

    def __init__(self, fields: _Fields, architecture: str) -> None:
        self.fields = fields
        self.architecture = architecture

    def get(self, key: str, default: Any = None) -> Any:
        return self.fields.get(f"{self.architecture}.{key}", default)

    def __getitem__(self, key: str) -> Any:
        return self.fields[f"{self.architecture}.{key}"]


def _config(fields: _Fields, names: set[str], divisors: tuple[float, ...]) -> ModelConfig:
    architecture = fields["general.architecture"]
    if architecture not in ARCHITECTURES:
        supported = ", ".join(map(repr, ARCHITECTURES))
        raise CheckpointError(f"GGUF architecture {architecture!r} is not supported; supported: {supported}")
    sizes = _Sizes(fields, architecture)
    _refuse_features(sizes)
    hidden, heads = sizes["embedding_length"], sizes["attention.head_count"]
    check_count("embedding_length", hidden)
    check_count("attention.head_count", heads)
    head_dim = sizes.get("attention.key_length") or equal_share(hidden, heads)
    _refuse_head_sizes(sizes, head_dim)
    return ModelConfig(
        vocab_size=sizes.get("vocab_size") or len(fields["tokenizer.ggml.tokens"]),
        hidden_size=hidden,
        intermediate_size=sizes["feed_forward_length"],
        num_layers=sizes["block_count"],
        num_heads=heads,
        num_kv_heads=sizes.get("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_model_len=sizes["context_length"],
        norm_eps=_shortest(sizes["attention.layer_norm_rms_epsilon"]),
        rope_theta=_shortest(sizes.get("rope.freq_base", 10_000.0)),
        tied_head="output.weight" not in names,
        qkv_bias="blk.0.attn_q.bias" in names,
        output_bias="blk.0.attn_output.bias" in names,
        qk_norm=architecture == "qwen3",
        rope_scaling=_rope_scaling(sizes, divisors),
    )


def _rope_scaling(sizes: _Sizes, divisors: tuple[float, ...]) -> RopeScaling | None:
    """Llama 3 gives a divisor for each frequency, as a tensor; others one factor for all."""
    kind = sizes.get("rope.scaling.type", "linear")  # a factor without a type is of this one
    factor = _shortest(sizes.get("rope.scaling.factor", sizes.get("rope.scale_linear", 1.0))) or 1.0
    is_linear = kind == "linear" and factor != 1
    if divisors and is_linear:
        raise CheckpointError(
            f"the GGUF file scales its rotary positions twice, by {factor} and by the tensor {_ROPE_FREQS}; "
            "this is not supported"
        )
    if divisors:
        return RopeScaling("divisors", divisors=divisors)
    return RopeScaling("linear", factor) if is_linear else None


def _refuse_features(sizes: _Sizes) -> None:
    refused = {
        "attention.sliding_window": (None, 0),
        "expert_count": (None, 0),
        "rope.scaling.type": (None, "none", "linear"),
    }
    for key, allowed in refused.items():
        if sizes.get(key) not in allowed:
            raise CheckpointError(
                f"{sizes.architecture}.{key} is {sizes.get(key)!r} in the GGUF file, and this is not supported; "
                "choose a model without it"
            )


def _refuse_head_sizes(sizes: _Sizes, head_dim: int) -> None:
    for key in ("attention.value_length", "rope.dimension_count"):
        if sizes.get(key, head_dim) != head_dim:
            raise CheckpointError(
                f"{sizes.architecture}.{key} is {sizes.get(key)} in the GGUF file and heads are {head_dim} wide; "
                "different sizes are not supported"
            )


def _shortest(value: float) -> float:
    """The number that was meant: 1e-05 and not the 32-bit 9.999999747378752e-06 it was stored as."""
    return float(str(np.float32(value)))


def _stored(path: Path, tensor: ReaderTensor) -> StoredTensor:
    """A tensor under the file's own name. Keeps nothing of the reader, which holds the whole file."""
    shape = tuple(int(size) for size in reversed(tensor.shape))
    width = int(tensor.data.shape[-1])
    read = partial(
        _dequantised, path, tensor.name, shape, int(tensor.data_offset), tensor.data.dtype, width, tensor.tensor_type
    )
    return StoredTensor(shape, str(path), read)


def _dequantised(
    path: Path,
    name: str,
    shape: tuple[int, ...],
    offset: int,
    dtype: np.dtype[Any],
    width: int,
    kind: GGMLQuantizationType,
) -> torch.Tensor:
    """Read the rows of a tensor, `width` entries of `dtype` each, into 32 bits, some rows at a time."""
    values = np.empty(shape, np.float32)
    rows = values.reshape(-1, shape[-1])
    at_once = max(1, _SLAB // shape[-1])
    try:
        with path.open("rb") as file:
            file.seek(offset)
            for start in range(0, len(rows), at_once):
                count = min(at_once, len(rows) - start)
                raw = np.fromfile(file, dtype, count * width).reshape(count, width)
                rows[start : start + count] = dequantize(raw, kind)
    except (NotImplementedError, OSError, ValueError) as error:
        raise CheckpointError(f"tensor {name!r} of type {kind.name} cannot be read from {path}: {error}") from error
    return torch.from_numpy(values)


def _parameter(name: str, tensor: StoredTensor, config: ModelConfig, is_paired: bool) -> tuple[str, StoredTensor]:
    """A tensor of the file under the name that it has in `Llama`, its rows in the order they have there."""
    *prefix, kind, ending = name.split(".")
    is_known = kind in _NAMES and ending in ("weight", "bias") and len(prefix) in (0, 2)
    if not is_known:
        raise CheckpointError(f"the GGUF file has tensor {name!r}, which no supported architecture uses")
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(kind)
    read: Callable[[], torch.Tensor] = tensor.read
    if is_paired and heads is not None:
        read = partial(_half_split, name, tensor, heads)
    parameter = f"{_NAMES[kind]}.{ending}"
    parameter = f"layers.{prefix[1]}.{parameter}" if prefix else parameter
    return parameter, StoredTensor(tensor.shape, tensor.place, read)


def _half_split(name: str, tensor: StoredTensor, heads: int) -> torch.Tensor:
    """Rows of each head from pairs (0, 1), (2, 3) ... to pairs (0, h), (1, h + 1) ..., h = half."""
    rows = tensor.read()
    if len(rows) % (2 * heads):
        raise CheckpointError(f"tensor {name!r} has shape {tensor.shape}, which {heads} heads cannot share")
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
