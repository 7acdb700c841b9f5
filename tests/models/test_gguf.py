"""GGUF files: written by the format's own library, read back as the weights that were quantised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from contbatch.errors import CheckpointError
from contbatch.models import ModelConfig, load_model, read_gguf, write_folder
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
    "llama.rope.freq_base": 500.0,
    "llama.rope.dimension_count": 8,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.merges": ["a b", "Ġ a", "1 2"],
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.ggml.eot_token_id": 1,
}


def _add(writer: gguf.GGUFWriter, key: str, value: str | int | float) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_float32(key, value)


def _gguf_name(name: str) -> str:
    name = name.removesuffix(".weight")
    if name.startswith("layers."):
        _, index, kind = name.split(".", 2)
        return f"blk.{index}.{NAMES[kind]}.weight"
    return f"{NAMES[name]}.weight"


def _neighbours(weight: Floats, heads: int) -> Floats:
    """Row i and row i + half of each head become neighbours: llama.cpp's order, written with a loop."""
    size = len(weight) // heads
    order = [h * size + i + part * size // 2 for h in range(heads) for i in range(size // 2) for part in (0, 1)]
    return weight[order]


def _write(
    path: Path,
    config: ModelConfig = CONFIG,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str = "llama",
    extra: dict[str, Floats] | None = None,
    leave_out: str = "",
    **metadata: Any,
) -> dict[str, Floats]:
    """Write a file; returns the weights as they are after quantisation, by parameter name."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_model_len)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_layers)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, *[1] * (len(WORDS) - 2)])
    for key, value in {**METADATA, **{name.replace("__", "."): value for name, value in metadata.items()}}.items():
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
        if heads:
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
@pytest.mark.parametrize("tied_head", [True, False])
def test_weights_come_back_as_they_were_quantised(
    tmp_path: Path, kind: gguf.GGMLQuantizationType, tied_head: bool
) -> None:
    """Every type; Q and K rows in half-split order again; a file without `output.weight` has a tied head."""
    config = tiny_config(**{**CONFIG.__dict__, "tied_head": tied_head})
    expected = _write(tmp_path / "m.gguf", config, kind)
    read = read_gguf(tmp_path / "m.gguf")
    assert read.config == config
    assert read.tensors.keys() == expected.keys()
    for name, weight in expected.items():
        np.testing.assert_array_equal(read.tensors[name].numpy(), weight, err_msg=name)


def test_a_gguf_file_and_a_folder_compute_the_same(tmp_path: Path) -> None:
    """The same weights in both formats give the same logits."""
    _write(tmp_path / "m.gguf")
    checkpoint = tiny_checkpoint(CONFIG)
    write_folder(tmp_path / "folder", checkpoint, torch.float32)
    text = tokens(9)
    one, other = (
        Sequences(load_model(path, dtype="float64"), 4, [text]).step({0: 9})
        for path in (tmp_path / "m.gguf", tmp_path / "folder")
    )
    assert (one == other).all()


def test_head_size_may_be_given(tmp_path: Path) -> None:
    """`attention.key_length` where heads are not hidden size / heads wide."""
    sizes: dict[str, Any] = {
        "llama.attention.key_length": 16,
        "llama.attention.value_length": 16,
        "llama.rope.dimension_count": 16,
    }
    config = tiny_config(**{**CONFIG.__dict__, "head_dim": 16})
    _write(tmp_path / "m.gguf", config, **{key.replace(".", "__"): value for key, value in sizes.items()})
    assert load_model(tmp_path / "m.gguf").config == config


def test_the_tokenizer_is_rebuilt(tmp_path: Path) -> None:
    """Merges; single digits although "12" is a word; control tokens are whole and not shown; both end tokens."""
    _write(tmp_path / "m.gguf")
    tokenizer = read_gguf(tmp_path / "m.gguf").tokenizer
    ids = tokenizer.encode("abc a12<turn>")
    assert [WORDS[token] for token in ids] == ["ab", "c", "Ġa", "1", "2", "<turn>"]
    assert tokenizer.decode(ids) == "abc a12"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "abc a12<turn>"
    assert tokenizer.eos_token_ids == {0, 1}


def test_a_tokenizer_beside_the_file_is_used(tmp_path: Path) -> None:
    """It also mends a file whose tokenizer cannot be rebuilt."""
    _write(tmp_path / "m.gguf", tokenizer__ggml__model="llama")
    with pytest.raises(CheckpointError, match=r"'llama', 'smollm'.*tokenizer\.json beside"):
        read_gguf(tmp_path / "m.gguf")
    tiny_checkpoint().tokenizer.core.save(str(tmp_path / "tokenizer.json"))
    assert read_gguf(tmp_path / "m.gguf").tokenizer.encode("w3 w4") == [3, 4]


ONES = np.ones(4)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architecture": "mamba"}, "'mamba' is not supported; supported: 'llama'"),
    "sliding window": ({"llama__attention__sliding_window": 4096}, "sliding_window is 4096"),
    "experts": ({"llama__expert_count": 8}, "expert_count is 8"),
    "rope scaling": ({"llama__rope__scaling__type": "yarn"}, "rope.scaling.type is 'yarn'"),
    "rope factors": ({"extra": {"rope_freqs.weight": ONES}}, "rope_freqs"),
    "partial rotary": ({"llama__rope__dimension_count": 4}, "dimension_count is 4 .* 8 wide"),
    "value size": ({"llama__attention__value_length": 4}, "value_length is 4"),
    "unknown tensor": ({"extra": {"blk.0.attn_q.bias": ONES}}, r"attn_q\.bias"),
    "unknown layer part": ({"extra": {"blk.0.ssm_a.weight": ONES}}, r"ssm_a\.weight"),
    "missing tensor": ({"leave_out": "layers.1.mlp.up_proj.weight"}, r"lacks layers\.1\.mlp\.up_proj\.weight"),
    "layer beyond": ({"extra": {"blk.2.attn_norm.weight": np.ones(32)}}, r"has layers\.2\.input_layernorm"),
    "wrong shape": (
        {"leave_out": "norm.weight", "extra": {"output_norm.weight": ONES}},
        r"norm\.weight \(4,\) \(expected \(32,\)\)",
    ),
    "rows no head can share": (
        {"leave_out": "layers.0.self_attn.q_proj.weight", "extra": {"blk.0.attn_q.weight": np.ones((30, 32))}},
        "4 heads cannot share",
    ),
    "no end of merges": ({"tokenizer__ggml__merges": ["a zz"]}, "tokenizer is damaged"),
    "tokenizer cut differently": ({"tokenizer__ggml__pre": "qwen2"}, r"'gpt2', 'qwen2'.*tokenizer\.json"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD.keys())
def test_a_bad_file_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """Bad input: unsupported, incomplete or inconsistent; the message names it."""
    _write(tmp_path / "m.gguf", **changes)
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(tmp_path: Path, share: float) -> None:
    """Cut anywhere: in the magic, the metadata, or the weights."""
    path = tmp_path / "m.gguf"
    _write(path)
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
