"""GGUF files: weights, sizes and tokenizer in one file, as llama.cpp writes them.

The one idea: undo what the writer did. Weights are dequantised to 32 bits. The rows of Q and K come back into the
half-split order: llama.cpp pairs neighbouring rows for rotary positions, Hugging Face pairs row i with row
i + head_dim / 2. The tokenizer is rebuilt from the vocabulary and merges in the metadata, unless a
`tokenizer.json` lies beside the file.

Left out: computing with quantised weights, and tokenizers that are not byte-level BPE.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from contbatch.errors import CheckpointError
from contbatch.models.checkpoint import Checkpoint
from contbatch.models.config import ModelConfig, check_count, equal_share
from contbatch.models.tokenizer import Tokenizer

_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_CONTROL_TOKEN, _USER_TOKEN = 3, 4


def read_gguf(path: Path) -> Checkpoint:
    """Read a GGUF file of architecture `llama`.

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
    config = _config(fields, {tensor.name for tensor in reader.tensors})
    tensors = dict(_weight(tensor, config) for tensor in reader.tensors)
    return Checkpoint(config, tensors, _tokenizer(fields, path))


class _Fields:
    """Metadata by key, with an error of ours for a key that is not there."""

    def __init__(self, reader: GGUFReader) -> None:
        self._fields = reader.fields

    def get(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def __getitem__(self, key: str) -> Any:
        if key not in self._fields:
            raise CheckpointError(f"the GGUF file has no field {key!r}; it is incomplete")
        return self.get(key)


def _config(fields: _Fields, names: set[str]) -> ModelConfig:
    architecture = fields["general.architecture"]
    if architecture != "llama":
        raise CheckpointError(f"GGUF architecture {architecture!r} is not supported; supported: 'llama'")
    _refuse_features(fields, names)
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    check_count("llama.embedding_length", hidden)
    check_count("llama.attention.head_count", heads)
    head_dim = fields.get("llama.attention.key_length") or equal_share(hidden, heads)
    _refuse_head_sizes(fields, head_dim)
    return ModelConfig(
        vocab_size=fields.get("llama.vocab_size") or len(fields["tokenizer.ggml.tokens"]),
        hidden_size=hidden,
        intermediate_size=fields["llama.feed_forward_length"],
        num_layers=fields["llama.block_count"],
        num_heads=heads,
        num_kv_heads=fields.get("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        max_model_len=fields["llama.context_length"],
        norm_eps=_shortest(fields["llama.attention.layer_norm_rms_epsilon"]),
        rope_theta=_shortest(fields.get("llama.rope.freq_base", 10_000.0)),
        tied_head="output.weight" not in names,
    )


def _refuse_features(fields: _Fields, names: set[str]) -> None:
    refused = {
        "llama.attention.sliding_window": (None, 0),
        "llama.expert_count": (None, 0),
        "llama.rope.scaling.type": (None, "none"),
    }
    for key, allowed in refused.items():
        if fields.get(key) not in allowed:
            raise CheckpointError(
                f"{key} is {fields.get(key)!r} in the GGUF file, and this is not supported; choose a model without it"
            )
    if "rope_freqs.weight" in names:
        raise CheckpointError(
            "the GGUF file scales its rotary positions (tensor rope_freqs.weight), and this is not "
            "supported; choose a model without it"
        )


def _refuse_head_sizes(fields: _Fields, head_dim: int) -> None:
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if fields.get(key, head_dim) != head_dim:
            raise CheckpointError(
                f"{key} is {fields.get(key)} in the GGUF file and heads are {head_dim} wide; "
                "different sizes are not supported"
            )


def _shortest(value: float) -> float:
    """The number that was meant: 1e-05 and not the 32-bit 9.999999747378752e-06 it was stored as."""
    return float(str(np.float32(value)))


def _weight(tensor: ReaderTensor, config: ModelConfig) -> tuple[str, torch.Tensor]:
    """(parameter name, weights in 32 bits) of one tensor of the file."""
    *prefix, kind, _ = tensor.name.split(".")
    if kind not in _NAMES or not tensor.name.endswith(".weight"):
        raise CheckpointError(f"the GGUF file has tensor {tensor.name!r}, which no Llama uses")
    try:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    except (NotImplementedError, ValueError) as error:
        raise CheckpointError(
            f"tensor {tensor.name!r} of type {tensor.tensor_type.name} cannot be read: {error}"
        ) from error
    values = values.reshape([int(size) for size in reversed(tensor.shape)])
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(kind)
    if heads is not None:
        values = _half_split(tensor.name, values, heads)
    name = f"{_NAMES[kind]}.weight"
    name = f"layers.{prefix[1]}.{name}" if prefix else name
    return name, torch.from_numpy(np.array(values))


def _half_split(name: str, rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of each head from pairs (0, 1), (2, 3) ... to pairs (0, h), (1, h + 1) ..., h = half."""
    if rows.ndim != 2 or len(rows) % (2 * heads):
        raise CheckpointError(f"tensor {name!r} has shape {rows.shape}, which {heads} heads cannot share")
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _tokenizer(fields: _Fields, path: Path) -> Tokenizer:
    ends = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    eos = frozenset(int(fields.get(key)) for key in ends if fields.get(key) is not None)
    beside = path.with_name("tokenizer.json")
    if beside.is_file():
        return Tokenizer.from_file(beside, eos)
    return Tokenizer(_byte_level_bpe(fields), eos)


def _byte_level_bpe(fields: _Fields) -> tokenizers.Tokenizer:
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in fields.get("tokenizer.ggml.merges", [])]
    split = _splitter(fields)
    try:
        core = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    except Exception as error:  # the library raises a bare Exception
        raise CheckpointError(f"the GGUF file's tokenizer is damaged: {error}; get the file again") from error
    core.pre_tokenizer = split
    core.decoder = decoders.ByteLevel()
    for kind, special in ((_CONTROL_TOKEN, True), (_USER_TOKEN, False)):
        texts = [token for token, its in zip(tokens, types, strict=True) if its == kind]
        added = [AddedToken(text, special=special, normalized=False) for text in texts]
        core.add_special_tokens(added) if special else core.add_tokens(added)
    return core


def _splitter(fields: _Fields) -> pre_tokenizers.PreTokenizer:
    """How text is cut before BPE; the file only names it."""
    model, name = fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre", "default")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if model == "gpt2" and name in ("default", "gpt-2"):
        return byte_level
    if model == "gpt2" and name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, byte_level])
    raise CheckpointError(
        f"the GGUF file's tokenizer ({model!r}, {name!r}) cannot be rebuilt; "
        "put the model's tokenizer.json beside the file"
    )
