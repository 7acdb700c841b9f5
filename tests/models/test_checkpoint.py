"""Hugging Face folders: what is written is read back, and every bad folder is refused with its reason."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from contbatch.errors import CheckpointError
from contbatch.models import Checkpoint, load_model, read_folder, write_folder
from contbatch.models.checkpoint import assemble
from contbatch.models.stored import StoredTensor, StoredTensors, shapes
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


def _cut_shard(folder: Path) -> None:
    _shard(folder)
    _cut("model-00002-of-00002.safetensors")(folder)


def _moved(folder: Path) -> None:
    """The index says that every tensor is in the second file."""
    _shard(folder)
    path = folder / "model.safetensors.index.json"
    files = json.loads(path.read_text())["weight_map"]
    last = max(files.values())
    path.write_text(json.dumps({"weight_map": dict.fromkeys(files, last)}))


def _twice(folder: Path) -> None:
    """Both files hold the last norm; the index names one of them."""
    _shard(folder)
    for file in folder.glob("model-*.safetensors"):
        save_file({**load_file(file), "model.norm.weight": torch.ones(24)}, file)


def _number(name: str, value: float) -> Callable[[Path], object]:
    """One number of a tensor becomes `value`."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors[name].flatten()[-1] = value
        save_file(tensors, folder / "model.safetensors")

    return change


def _fewer_embeddings(folder: Path) -> None:
    """Config and weights agree on 60; the tokenizer has 61."""
    _config(vocab_size=60)(folder)
    weights = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    _tensor("model.embed_tokens.weight", weights[:60].clone())(folder)


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
    "cut shard": (_cut_shard, r"model-00002-of-00002\.safetensors \(\d+ bytes\) is truncated or damaged"),
    "shard without a tensor": (_moved, r"model-00002-of-00002\.safetensors lacks '.*', which .*index\.json says"),
    "tensor in two shards": (_twice, r"'norm\.weight' is there twice, in .*00001-of.* and in .*00002-of"),
    "tensor under two names": (
        _tensor("norm.weight", torch.ones(24)),
        r"'norm\.weight' is there twice, in .*model\.safetensors",
    ),
    "no tokenizer": (_unlink("tokenizer.json"), r"tokenizer\.json is missing"),
    "cut tokenizer": (_cut("tokenizer.json"), "not a usable tokenizer"),
    "cut generation config": (_cut("generation_config.json"), r"generation_config\.json is truncated"),
    "bad end token": (lambda f: _edit(f / "generation_config.json", eos_token_id="</s>"), "eos_token_id is '</s>'"),
    "architecture": (_config(architectures=["MambaForCausalLM"]), "MambaForCausalLM.*supported: LlamaForCausalLM"),
    "no architecture": (_config(architectures=..., model_type=...), "architecture None.*supported: LlamaForCausalLM"),
    "sliding window": (_config(sliding_window=4096), "sliding_window is 4096"),
    "Mistral's sliding window": (
        _config(architectures=["MistralForCausalLM"], sliding_window=4096),
        "sliding_window is 4096",
    ),
    "Mistral's sliding window by default": (_config(architectures=["MistralForCausalLM"]), "sliding_window is 4096"),
    "Qwen2 with a window": (
        _config(architectures=["Qwen2ForCausalLM"], use_sliding_window=True, sliding_window=4096),
        "use_sliding_window is True.*sliding window",
    ),
    "Qwen3 with a window in some layers": (
        _config(architectures=["Qwen3ForCausalLM"], layer_types=["full_attention", "sliding_attention"]),
        "layer_types is .*sliding_attention",
    ),
    "experts": (_config(num_experts=8), "num_experts is 8"),
    "attention bias": (_config(attention_bias=True), r"lacks .*\.bias"),
    "attention bias of text": (_config(attention_bias="no"), "attention_bias is 'no'"),
    "Qwen2 without bias": (_config(architectures=["Qwen2ForCausalLM"]), r"lacks .*k_proj\.bias"),
    "Qwen3 without norms": (_config(architectures=["Qwen3ForCausalLM"]), r"lacks .*k_norm\.weight"),
    "mlp bias": (_config(mlp_bias=True), "mlp_bias is True"),
    "activation": (_config(hidden_act="gelu"), "hidden_act is 'gelu'"),
    "quantised": (_config(quantization_config={"quant_method": "gptq"}), "quantization_config is .*gptq"),
    "partial rotary": (_config(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
    "dynamic": (_config(rope_scaling={"type": "dynamic", "factor": 2}), "rope_scaling .*type 'dynamic'"),
    "yarn": (_config(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "rope_scaling .*type 'yarn'"),
    "linear without factor": (_config(rope_scaling={"type": "linear"}), "'linear' need the field 'factor'"),
    "factor of 0": (_config(rope_scaling={"type": "linear", "factor": 0}), "factor of the rotary scaling is 0"),
    "llama3 without a field": (
        _config(rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        "'llama3' need the field 'original_max_position_embeddings'",
    ),
    "llama3 upside down": (
        _config(
            rope_scaling={
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 4.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        ),
        "low_freq_factor is 4.0 and high_freq_factor 4.0",
    ),
    "partial rotary, new form": (
        _config(rope_parameters={"partial_rotary_factor": 0.5}),
        "partial_rotary_factor is 0.5",
    ),
    "rope for each kind of layer": (
        _config(rope_parameters={"full_attention": {"rope_type": "default"}}),
        "rope_parameters is .*one object",
    ),
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
    "not a number": (
        _number("model.layers.1.mlp.up_proj.weight", torch.nan),
        r"'layers\.1\.mlp\.up_proj\.weight' holds NaN",
    ),
    "infinite": (_number("model.norm.weight", -torch.inf), r"'norm\.weight' holds NaN or infinite"),
    "beyond 32 bits": (
        _number("model.norm.weight", 1e60),
        r"'norm\.weight' has numbers beyond the range of torch\.float32",
    ),
    "whole numbers": (
        _tensor("model.norm.weight", torch.ones(24, dtype=torch.int8)),
        r"model\.norm\.weight.*has type I8.*supported: F64",
    ),
    "tokenizer of another model": (_fewer_embeddings, "ids up to 60 and the model a vocabulary of 60.*at 59"),
    "wrong shape": (_tensor("model.norm.weight", torch.ones(23)), r"norm\.weight \(23,\) \(expected \(24,\)\)"),
}


@pytest.mark.parametrize(("damage", "message"), BAD.values(), ids=BAD.keys())
def test_a_bad_folder_is_refused(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    """Bad input: missing, truncated, of wrong shape or unsupported; the message names it."""
    damage(folder)
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        load_model(folder)


def test_a_vocabulary_may_be_padded(tmp_path: Path) -> None:
    """More embeddings than the tokenizer has ids: common, to a round number. Such an id decodes to nothing."""
    write_folder(tmp_path, tiny_checkpoint(tiny_config(vocab_size=64)), torch.float32)
    loaded = load_model(tmp_path)
    assert loaded.config.vocab_size == 64 and loaded.tokenizer.vocab_size == 61
    assert loaded.tokenizer.highest_id == 60
    assert loaded.tokenizer.decode([3, 61, 63, 4]) == "w3 w4"


# How much is in memory, and who is told


class _Watched(Mapping[str, torch.Tensor]):
    """Hands out copies of tensors, and counts those that are still alive when it is asked for the next one."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.given: list[weakref.ref[torch.Tensor]] = []
        self.most_alive = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        self.most_alive = max(self.most_alive, sum(given() is not None for given in self.given))
        result = self.tensors[name].clone()
        self.given.append(weakref.ref(result))
        return result

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_one_tensor_at_a_time_is_in_memory_beside_the_model(dtype: torch.dtype) -> None:
    """Whatever is read is let go before the next one is asked for, even if the number format is the same."""
    checkpoint = tiny_checkpoint()
    watched = _Watched(checkpoint.tensors)
    stored = StoredTensors(
        (name, StoredTensor(tuple(value.shape), "memory", partial(watched.__getitem__, name)))
        for name, value in checkpoint.tensors.items()
    )
    assemble("tiny", Checkpoint(checkpoint.config, stored, checkpoint.tokenizer), torch.device("cpu"), dtype)
    assert len(watched.given) == len(watched) and watched.most_alive <= 1


def test_names_and_shapes_are_known_without_reading() -> None:
    """Nothing is read before everything is checked."""

    def refuse() -> torch.Tensor:
        raise AssertionError("a tensor was read")

    stored = StoredTensors([("a", StoredTensor((2, 3), "memory", refuse))])
    assert "a" in stored and "b" not in stored and list(stored) == ["a"] and len(stored) == 1
    assert shapes(stored) == {"a": (2, 3)}
    checkpoint = tiny_checkpoint()
    with pytest.raises(CheckpointError, match="lacks"):
        assemble(
            "tiny", Checkpoint(checkpoint.config, stored, checkpoint.tokenizer), torch.device("cpu"), torch.float32
        )


def test_a_file_that_is_damaged_after_it_was_opened(folder: Path) -> None:
    """Tensors are read later than the header; a file that has gone by then is named."""
    read = read_folder(folder)
    (folder / "model.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"model\.safetensors \(1 bytes\)"):
        read.tensors["norm.weight"]
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors \(0 bytes\)"):
        read.tensors["norm.weight"]


def test_progress_is_told_for_each_tensor(folder: Path) -> None:
    """Counted from 1 to the number of tensors; nothing is told that is not asked for."""
    told: list[tuple[str, int, int]] = []
    load_model(folder, progress=lambda *call: told.append(call))
    count = len(tiny_checkpoint().tensors)
    assert told == [("loading", done + 1, count) for done in range(count)]


def test_tiny_is_what_the_other_tests_think_it_is() -> None:
    """The reference tests must see a head size that does not follow from the other sizes."""
    assert TINY.head_dim * TINY.num_heads != TINY.hidden_size
