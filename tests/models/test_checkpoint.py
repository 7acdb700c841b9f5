"""Hugging Face folders: what is written is read back, and every bad folder is refused with its reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from contbatch.errors import CheckpointError
from contbatch.models import load_model, read_folder, write_folder
from tests.models.tiny import TINY, Sequences, tiny_checkpoint, tiny_config, tiny_model, tokens


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good folder, stored in 64 bits."""
    write_folder(tmp_path, tiny_checkpoint(), torch.float64)
    return tmp_path


def _edit(path: Path, **changes: Any) -> None:
    """Set fields of a JSON file; `...` takes a field away."""
    fields = json.loads(path.read_text())
    fields.update(changes)
    path.write_text(json.dumps({key: value for key, value in fields.items() if value is not ...}))


def _shard(folder: Path) -> None:
    """Turn model.safetensors into two files and an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


@pytest.mark.parametrize("tied_head", [True, False])
@pytest.mark.parametrize("sharded", [True, False])
def test_round_trip(tmp_path: Path, tied_head: bool, sharded: bool) -> None:
    """Sizes, weights, tokenizer and end tokens come back; one file or several."""
    config = tiny_config(tied_head=tied_head, norm_eps=3e-6)
    written = tiny_checkpoint(config)
    write_folder(tmp_path, written, torch.float64)
    if sharded:
        _shard(tmp_path)
    read = read_folder(tmp_path)
    assert read.config == config
    assert read.tensors.keys() == written.tensors.keys()
    assert all(torch.equal(read.tensors[name], value) for name, value in written.tensors.items())
    assert read.tokenizer.eos_token_ids == {2, 5}
    assert read.tokenizer.encode("w3 w60 w1") == [3, 60, 1]
    assert read.tokenizer.decode([3, 60, 1]) == "w3 w60 w1"
    assert read.tokenizer.vocab_size == 61


def test_a_loaded_folder_computes_the_same(folder: Path) -> None:
    """The model from the folder gives the very logits of the model that was written."""
    text = tokens(9)
    loaded = load_model(folder, dtype="float64")
    assert loaded.name == str(folder) and loaded.eos_token_ids == {2, 5}
    expected = Sequences(tiny_model(), 4, [text]).step({0: 9})
    assert (Sequences(loaded, 4, [text]).step({0: 9}) == expected).all()


def test_stored_in_16_bits_and_computed_in_32(tmp_path: Path) -> None:
    """On a CPU "auto" is float32, whatever the weights are stored in."""
    write_folder(tmp_path, tiny_checkpoint(), torch.bfloat16)
    loaded = load_model(tmp_path)
    assert loaded.dtype == torch.float32
    assert {value.dtype for value in loaded.model.state_dict().values()} == {torch.float32}
    stored = tiny_checkpoint().tensors["norm.weight"].bfloat16()
    assert torch.equal(loaded.model.norm.weight, stored.float())


def test_head_dim_may_be_left_out(tmp_path: Path) -> None:
    """Then the heads share the hidden size equally."""
    write_folder(tmp_path, tiny_checkpoint(tiny_config(head_dim=6)), torch.float64)
    for left_out in (..., None):
        _edit(tmp_path / "config.json", head_dim=left_out)
        assert load_model(tmp_path).config.head_dim == 6


def test_fields_of_newer_files(folder: Path) -> None:
    """transformers 5 keeps the rotary base in `rope_parameters`."""
    _edit(folder / "config.json", rope_theta=..., rope_parameters={"rope_type": "default", "rope_theta": 77.0})
    assert read_folder(folder).config.rope_theta == 77.0
    _edit(folder / "config.json", rope_parameters=...)
    assert read_folder(folder).config.rope_theta == 10_000.0


def test_generation_config_decides_the_end_tokens(folder: Path) -> None:
    """It wins over config.json, which counts where it is silent; one id or a list."""
    _edit(folder / "generation_config.json", eos_token_id=7)
    assert read_folder(folder).tokenizer.eos_token_ids == {7}
    (folder / "generation_config.json").unlink()
    assert read_folder(folder).tokenizer.eos_token_ids == {2, 5}
    _edit(folder / "config.json", eos_token_id=...)
    assert read_folder(folder).tokenizer.eos_token_ids == frozenset()


def test_a_stored_copy_of_a_tied_head_is_ignored(folder: Path) -> None:
    """Some writers store the head although it is the embedding; and buffers that are computed."""
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros(61, 24)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(tensors, folder / "model.safetensors")
    assert read_folder(folder).tensors.keys() == tiny_checkpoint().tensors.keys()


# Bad folders: what is done to a good one, and what the message must say.


def _unlink(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def _cut(name: str) -> Callable[[Path], object]:
    def cut(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) // 2])

    return cut


def _empty(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(b"")


def _config(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: _edit(folder / "config.json", **changes)


def _tensor(name: str, value: torch.Tensor | None) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
        save_file(tensors, folder / "model.safetensors")

    return change


def _lost_shard(folder: Path) -> None:
    _shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def _bad_index(folder: Path) -> None:
    _shard(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": [1]}')


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


BAD = {
    "no config": (_unlink("config.json"), r"config\.json is missing"),
    "cut config": (_cut("config.json"), r"config\.json is truncated or damaged"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "not an object"),
    "no weights": (_unlink("model.safetensors"), r"neither model\.safetensors nor"),
    "cut weights": (_cut("model.safetensors"), r"model\.safetensors \(\d+ bytes\) is truncated or damaged"),
    "empty weights": (_empty("model.safetensors"), r"\(0 bytes\) is truncated or damaged"),
    "pickled weights": (_pickled, "can run code"),
    "lost shard": (_lost_shard, r"model-00002-of-00002\.safetensors is missing"),
    "bad index": (_bad_index, "has no weight_map"),
    "no tokenizer": (_unlink("tokenizer.json"), r"tokenizer\.json is missing"),
    "cut tokenizer": (_cut("tokenizer.json"), "not a usable tokenizer"),
    "cut generation config": (_cut("generation_config.json"), r"generation_config\.json is truncated"),
    "bad end token": (lambda f: _edit(f / "generation_config.json", eos_token_id="</s>"), "eos_token_id is '</s>'"),
    "architecture": (_config(architectures=["MambaForCausalLM"]), "MambaForCausalLM.*supported: LlamaForCausalLM"),
    "no architecture": (_config(architectures=..., model_type=...), "architecture None.*supported: LlamaForCausalLM"),
    "sliding window": (_config(sliding_window=4096), "sliding_window is 4096"),
    "attention bias": (_config(attention_bias=True), "attention_bias is True"),
    "mlp bias": (_config(mlp_bias=True), "mlp_bias is True"),
    "activation": (_config(hidden_act="gelu"), "hidden_act is 'gelu'"),
    "quantised": (_config(quantization_config={"quant_method": "gptq"}), "quantization_config is .*gptq"),
    "partial rotary": (_config(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
    "rope scaling": (_config(rope_scaling={"rope_type": "llama3", "factor": 8}), "rope_scaling .*type 'llama3'"),
    "old rope scaling": (_config(rope_scaling={"type": "linear", "factor": 2}), "rope_scaling .*type 'linear'"),
    "new rope scaling": (_config(rope_parameters={"rope_type": "yarn"}), "rope_parameters .*type 'yarn'"),
    "missing field": (_config(num_hidden_layers=...), "no 'num_hidden_layers'"),
    "field of 0": (_config(vocab_size=0), "vocab_size is 0"),
    "field of text": (_config(hidden_size="24"), "hidden_size is '24'"),
    "field is true": (_config(num_hidden_layers=True), "num_hidden_layers is True"),
    "rope base of 0": (_config(rope_theta=0), "rope_theta is 0"),
    "heads": (_config(num_key_value_heads=3), "4 query heads cannot share 3"),
    "odd head": (_config(head_dim=7), "head_dim is 7"),
    "no equal share": (_config(head_dim=None, hidden_size=26), "26 is not a multiple of 4"),
    "wrong shapes": (_config(intermediate_size=48), r"wrong shapes: .*\(40, 24\) \(expected \(48, 24\)\).* and 3 more"),
    "fewer heads": (_config(head_dim=6), r"self_attn\.q_proj\.weight \(32, 24\) \(expected \(24, 24\)\)"),
    "more layers": (_config(num_hidden_layers=3), r"lacks layers\.2\..* and 6 more"),
    "fewer layers": (_config(num_hidden_layers=1), r"has layers\.1\..*does not use"),
    "untied without head": (_config(tie_word_embeddings=False), r"lacks lm_head\.weight"),
    "missing tensor": (_tensor("model.norm.weight", None), r"lacks norm\.weight"),
    "unknown tensor": (_tensor("model.layers.0.self_attn.q_norm.weight", torch.ones(8)), r"has .*q_norm.*does not use"),
    "wrong shape": (_tensor("model.norm.weight", torch.ones(23)), r"norm\.weight \(23,\) \(expected \(24,\)\)"),
}


@pytest.mark.parametrize(("damage", "message"), BAD.values(), ids=BAD.keys())
def test_a_bad_folder_is_refused(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    """Bad input: missing, truncated, of wrong shape or unsupported; the message names it."""
    damage(folder)
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        load_model(folder)


def test_tiny_is_what_the_other_tests_think_it_is() -> None:
    """The reference tests must see a head size that does not follow from the other sizes."""
    assert TINY.head_dim * TINY.num_heads != TINY.hidden_size
