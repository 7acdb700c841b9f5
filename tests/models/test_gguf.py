"""GGUF files: written by the format's own library, read back as the weights that were quantised."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from contbatch.errors import CheckpointError
from contbatch.models import ModelConfig, RopeScaling, gguf_file, load_model, read_gguf, write_folder
from contbatch.models.llama import frequencies
from tests.models.tiny import Floats, Sequences, tiny_checkpoint, tiny_config, tokens

TYPES = [gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")]
CONFIG = tiny_config(hidden_size=32, intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=8)
"""Every row is a multiple of 32, the block of the quantised types."""

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
}
WORDS = ["<end>", "<turn>", "a", "b", "c", "Ġ", "ab", "Ġa", "1", "2", "12", *(f"x{n}" for n in range(50))]
METADATA: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.merges": ["a b", "Ġ a", "1 2"],
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.ggml.eot_token_id": 1,
}


ARCHITECTURES = {
    "llama": ("llama", CONFIG),
    "llama, bias": ("llama", replace(CONFIG, qkv_bias=True, output_bias=True)),
    "llama, untied": ("llama", replace(CONFIG, tied_head=False)),
    "qwen2": ("qwen2", replace(CONFIG, qkv_bias=True)),
    "qwen2, untied": ("qwen2", replace(CONFIG, qkv_bias=True, tied_head=False)),
    "qwen3": ("qwen3", replace(CONFIG, qk_norm=True, head_dim=16)),
}


def _add(writer: gguf.GGUFWriter, key: str, value: str | bool | int | float) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_float32(key, value)


def _gguf_name(name: str) -> str:
    name, _, ending = name.rpartition(".")
    if name.startswith("layers."):
        _, index, kind = name.split(".", 2)
        return f"blk.{index}.{NAMES[kind]}.{ending}"
    return f"{NAMES[name]}.{ending}"


def _neighbours(weight: Floats, heads: int) -> Floats:
    """Row i and row i + half of each head become neighbours: llama.cpp's order, written with a loop."""
    size = len(weight) // heads
    order = [h * size + i + part * size // 2 for h in range(heads) for i in range(size // 2) for part in (0, 1)]
    return weight[order]


def write_gguf(
    path: Path,
    config: ModelConfig = CONFIG,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str = "llama",
    extra: dict[str, Floats] | None = None,
    leave_out: str = "",
    words: list[str] = WORDS,
    types: list[int] | None = None,
    **metadata: Any,
) -> dict[str, Floats]:
    """Write a file; returns the weights as they are after quantisation, by parameter name.

    Llama's Q and K rows are written in neighbouring order, as llama.cpp's converter does, and nobody else's.
    """
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_model_len)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_layers)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.head_dim)
    if config.head_dim * config.num_heads != config.hidden_size:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_token_list(words)
    writer.add_token_types(types or [3, 3, *[1] * (len(words) - 2)])
    for key, value in {**METADATA, **{name.replace("__", "."): value for name, value in metadata.items()}}.items():
        if value == []:
            continue  # the format has no empty arrays
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            _add(writer, key, value)
    kept: dict[str, Floats] = {}
    for name, tensor in tiny_checkpoint(config).tensors.items():
        if name == leave_out:
            continue
        its = gguf.GGMLQuantizationType.F32 if tensor.ndim == 1 else kind
        weight = tensor.float().numpy()
        data = gguf.quants.quantize(weight, its)
        kept[name] = gguf.quants.dequantize(data, its).astype(np.float32)
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
        if heads and architecture == "llama":
            data = gguf.quants.quantize(_neighbours(weight, heads), its)
        writer.add_tensor(_gguf_name(name), data, raw_dtype=its)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("architecture", "config"), ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
def test_weights_come_back_as_they_were_quantised(
    tmp_path: Path, kind: gguf.GGMLQuantizationType, architecture: str, config: ModelConfig
) -> None:
    """Every type and architecture, biases and norms too; Llama's Q and K rows in half-split order again; a file
    without `output.weight` has a tied head."""
    expected = write_gguf(tmp_path / "m.gguf", config, kind, architecture)
    read = read_gguf(tmp_path / "m.gguf")
    assert read.config == config
    assert read.tensors.keys() == expected.keys()
    for name, weight in expected.items():
        np.testing.assert_array_equal(read.tensors[name].numpy(), weight, err_msg=name)


@pytest.mark.parametrize(("architecture", "config"), ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
def test_a_gguf_file_and_a_folder_compute_the_same(tmp_path: Path, architecture: str, config: ModelConfig) -> None:
    """The same weights in both formats give the same logits."""
    write_gguf(tmp_path / "m.gguf", config, architecture=architecture)
    checkpoint = tiny_checkpoint(config)
    write_folder(tmp_path / "folder", checkpoint, torch.float32)
    text = tokens(9)
    one, other = (
        Sequences(load_model(path, dtype="float64"), 4, [text]).step({0: 9})
        for path in (tmp_path / "m.gguf", tmp_path / "folder")
    )
    assert (one == other).all()


def test_a_large_tensor_is_dequantised_in_slabs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some rows at a time, the last ones fewer: no row is lost, none read twice."""
    monkeypatch.setattr(gguf_file, "_SLAB", 7 * CONFIG.hidden_size)
    expected = write_gguf(tmp_path / "m.gguf", kind=gguf.GGMLQuantizationType.Q4_1)
    assert len(expected["embed_tokens.weight"]) % 7
    np.testing.assert_array_equal(
        read_gguf(tmp_path / "m.gguf").tensors["embed_tokens.weight"].numpy(), expected["embed_tokens.weight"]
    )


# Stretched rotary positions

LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, original_max_len=64)


def _llama3_divisors(config: ModelConfig, scaling: RopeScaling) -> Floats:
    """What llama.cpp's converter writes for a Llama 3 model, in terms of wavelengths."""
    result = []
    for pair in range(0, config.head_dim, 2):
        wavelength = 2 * math.pi * config.rope_theta ** (pair / config.head_dim)
        shortest, longest = (
            scaling.original_max_len / factor for factor in (scaling.high_freq_factor, scaling.low_freq_factor)
        )
        if wavelength < shortest:
            result.append(1.0)
        elif wavelength > longest:
            result.append(scaling.factor)
        else:
            high, low = scaling.high_freq_factor, scaling.low_freq_factor
            smooth = (scaling.original_max_len / wavelength - low) / (high - low)
            result.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return np.array(result)


def test_rope_freqs_are_the_scaling_of_llama_3(tmp_path: Path) -> None:
    """The tensor of divisors gives the frequencies of the formula, and the logits of the same folder."""
    config = replace(CONFIG, head_dim=16, rope_scaling=LLAMA3)
    divisors = _llama3_divisors(config, LLAMA3)
    assert divisors.min() == 1 and divisors.max() == 8 and any(1 < x < 8 for x in divisors), (
        "all three ranges are there"
    )
    write_gguf(tmp_path / "m.gguf", config, extra={"rope_freqs.weight": divisors})
    read = read_gguf(tmp_path / "m.gguf")
    assert read.config.rope_scaling is not None and read.config.rope_scaling.kind == "divisors"
    cpu = torch.device("cpu")
    np.testing.assert_allclose(
        frequencies(read.config, torch.float64, cpu), frequencies(config, torch.float64, cpu), rtol=1e-7
    )
    write_folder(tmp_path / "folder", tiny_checkpoint(config), torch.float32)
    text = tokens(200)
    one, other = (
        Sequences(load_model(path, dtype="float32"), 16, [text]).step({0: 200})
        for path in (tmp_path / "m.gguf", tmp_path / "folder")
    )
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)
    with pytest.raises(CheckpointError, match="no field for the divisors"):
        write_folder(tmp_path / "again", read, torch.float32)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}, RopeScaling("linear", 4.0)),
        ({"llama__rope__scaling__factor": 4.0}, RopeScaling("linear", 4.0)),
        ({"llama__rope__scale_linear": 2.0}, RopeScaling("linear", 2.0)),
        ({"llama__rope__scaling__type": "none", "llama__rope__scaling__factor": 4.0}, None),
        ({"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 1.0}, None),
    ],
)
def test_linear_scaling(tmp_path: Path, metadata: dict[str, Any], expected: RopeScaling | None) -> None:
    """One factor for all frequencies, under its name of today or its old one; no type means linear."""
    write_gguf(tmp_path / "m.gguf", **metadata)
    assert read_gguf(tmp_path / "m.gguf").config.rope_scaling == expected


# Tokenizers


def test_the_tokenizer_is_rebuilt(tmp_path: Path) -> None:
    """Merges; single digits although "12" is a word; control tokens are whole and not shown; both end tokens."""
    write_gguf(tmp_path / "m.gguf")
    tokenizer = read_gguf(tmp_path / "m.gguf").tokenizer
    ids = tokenizer.encode("abc a12<turn>")
    assert [WORDS[token] for token in ids] == ["ab", "c", "Ġa", "1", "2", "<turn>"]
    assert tokenizer.decode(ids) == "abc a12"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "abc a12<turn>"
    assert tokenizer.eos_token_ids == {0, 1}


def test_a_tokenizer_beside_the_file_is_used(tmp_path: Path) -> None:
    """It also mends a file whose tokenizer cannot be rebuilt."""
    write_gguf(tmp_path / "m.gguf", tokenizer__ggml__model="llama")
    with pytest.raises(CheckpointError, match=r"'llama', 'smollm'.*tokenizer\.json beside"):
        read_gguf(tmp_path / "m.gguf")
    tiny_checkpoint().tokenizer.core.save(str(tmp_path / "tokenizer.json"))
    assert read_gguf(tmp_path / "m.gguf").tokenizer.encode("w3 w4") == [3, 4]


ONES = np.ones(4)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architecture": "mamba"}, "'mamba' is not supported; supported: 'llama', 'qwen2', 'qwen3'"),
    "sliding window": ({"llama__attention__sliding_window": 4096}, "sliding_window is 4096"),
    "experts": ({"llama__expert_count": 8}, "expert_count is 8"),
    "rope scaling": ({"llama__rope__scaling__type": "yarn"}, "rope.scaling.type is 'yarn'"),
    "scaled twice": (
        {"extra": {"rope_freqs.weight": ONES}, "llama__rope__scaling__factor": 2.0},
        "twice, by 2.0 and by the tensor rope_freqs",
    ),
    "too few divisors": ({"extra": {"rope_freqs.weight": np.ones(3)}}, "3 rotary divisors do not fit heads of 8"),
    "divisor of 0": ({"extra": {"rope_freqs.weight": np.zeros(4)}}, "a divisor of the rotary scaling is 0.0"),
    "partial rotary": ({"llama__rope__dimension_count": 4}, "dimension_count is 4 .* 8 wide"),
    "value size": ({"llama__attention__value_length": 4}, "value_length is 4"),
    "bias without the others": ({"extra": {"blk.0.attn_q.bias": np.ones(32)}}, r"lacks .*k_proj\.bias"),
    "bias of one layer": ({"extra": {"blk.1.attn_q.bias": np.ones(32)}}, r"has .*q_proj\.bias"),
    "bias of the feed-forward block": ({"extra": {"blk.0.ffn_up.bias": np.ones(64)}}, r"has .*up_proj\.bias"),
    "no query norm": ({"architecture": "qwen3"}, r"lacks .*k_norm\.weight"),
    "unknown layer part": ({"extra": {"blk.0.ssm_a.weight": ONES}}, r"ssm_a\.weight"),
    "missing tensor": ({"leave_out": "layers.1.mlp.up_proj.weight"}, r"lacks layers\.1\.mlp\.up_proj\.weight"),
    "layer beyond": ({"extra": {"blk.2.attn_norm.weight": np.ones(32)}}, r"has layers\.2\.input_layernorm"),
    "wrong shape": (
        {"leave_out": "norm.weight", "extra": {"output_norm.weight": ONES}},
        r"norm\.weight \(4,\) \(expected \(32,\)\)",
    ),
    "rows no head can share": (
        {"leave_out": "layers.0.self_attn.q_proj.weight", "extra": {"blk.0.attn_q.weight": np.ones((30, 32))}},
        r"q_proj\.weight \(30, 32\) \(expected \(32, 32\)\)",
    ),
    "not a number": (
        {"leave_out": "norm.weight", "extra": {"output_norm.weight": np.full(32, np.nan)}},
        r"'norm\.weight' holds NaN",
    ),
    "more words than embeddings": ({"words": [*WORDS, "more"]}, "ids up to 61 and the model a vocabulary of 61"),
    "no such end token": ({"tokenizer__ggml__bos_token_id": 99}, "bos_token_id is 99 .* has 61 tokens"),
    "fewer types than words": ({"types": [1, 1]}, "61 tokens and 2 token types"),
    "no end of merges": ({"tokenizer__ggml__merges": ["a zz"]}, "tokenizer is damaged"),
    "tokenizer cut differently": ({"tokenizer__ggml__pre": "tekken"}, r"'gpt2', 'tekken'.*tokenizer\.json"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD.keys())
def test_a_bad_file_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """Bad input: unsupported, incomplete or inconsistent; the message names it."""
    write_gguf(tmp_path / "m.gguf", **changes)
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(tmp_path: Path, share: float) -> None:
    """Cut anywhere: in the magic, the metadata, or the weights."""
    path = tmp_path / "m.gguf"
    write_gguf(path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(CheckpointError, match=r"truncated or not a GGUF file"):
        read_gguf(path)


def test_missing_metadata_is_named(tmp_path: Path) -> None:
    """A file that says nothing about its sizes."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"no field 'llama\.embedding_length'"):
        read_gguf(tmp_path / "m.gguf")
