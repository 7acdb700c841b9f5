"""Every family that can be loaded computes what `transformers` computes, in 32 bits, from the same files.

Small checkpoints with random weights are made by `transformers` and saved in the form in which it publishes models.
The largest difference of any logit, over prompts, chunks and decode tokens in mixed steps, is `DIFFERENCE`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from contbatch.errors import CheckpointError
from contbatch.models import LoadedModel, ModelConfig, RopeScaling, load_model, read_folder, write_folder
from contbatch.models.llama import frequencies, rotary
from tests.models.tiny import Floats, Sequences, tiny_config, tiny_tokenizer, tokens

DIFFERENCE = 2e-5
"""Largest difference of logits, which reach 8 here, so that one rounding is up to 5e-7. Measured: 3e-6 to 1e-5."""

SIZES: dict[str, Any] = {
    "vocab_size": 64,  # three more than the tokenizer has
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""So short that among the six frequencies of a head of 12 some are kept, some divided, and some in between."""
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 2": ("Llama", {}),
    "Llama 2, all heads have keys": ("Llama", {"num_key_value_heads": 4}),
    "Llama 3": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}),
    "Llama 3.1": ("Llama", {"rope_parameters": LLAMA3}),
    "Llama, linear scaling": ("Llama", {"rope_parameters": LINEAR}),
    "Llama, attention bias": ("Llama", {"attention_bias": True}),
    "Llama, other head_dim": ("Llama", {"head_dim": 20, "rms_norm_eps": 1e-3}),
    "SmolLM2": ("Llama", {"tie_word_embeddings": True, "num_attention_heads": 6}),
    "Mistral without a window": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "Qwen2": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}),
    "Qwen2.5, untied": ("Qwen2", {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 2}),
    "Qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "Qwen3, untied, with bias": ("Qwen3", {"head_dim": 8, "attention_bias": True}),
}


def make(folder: Path, family: str, changes: dict[str, Any], **saving: Any) -> transformers.PreTrainedModel:
    """A model of `transformers` with random weights, biases and norms included, and its folder."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0, 0.3)
            elif "norm" in name:
                weight.uniform_(0.5, 1.5)
    model.save_pretrained(folder, **saving)
    tiny_tokenizer().core.save(str(folder / "tokenizer.json"))
    return model


def reference(model: transformers.PreTrainedModel, text: tuple[int, ...]) -> Floats:
    """[T, vocab_size] logits of one whole sequence."""
    with torch.inference_mode():
        return np.asarray(model(torch.tensor([text])).logits[0].double().numpy())


def largest_difference(loaded: LoadedModel, model: transformers.PreTrainedModel) -> float:
    """Over a whole prompt, chunks that begin anywhere, and decode tokens, in mixed steps of several requests."""
    texts = [tokens(90, 1), tokens(40, 2), tokens(150, 3)]
    expected = [reference(model, text) for text in texts]
    run = Sequences(loaded, 16, texts)
    found = 0.0
    for counts in [{0: 88, 2: 1}, {0: 1, 1: 7, 2: 100}, {2: 47, 1: 32, 0: 1}, {2: 1, 1: 1}, {2: 1}]:
        logits = run.step(counts)
        rows = [expected[index][run.done[index] - 1] for index in counts]
        found = max(found, float(np.abs(logits - np.array(rows)).max()))
    assert run.done == [90, 40, 150]
    return found


@pytest.mark.parametrize(("family", "changes"), FAMILIES.values(), ids=FAMILIES.keys())
def test_logits_equal_transformers(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    """From the same files, in 32 bits, whatever the mix of prompts, chunks and decode tokens."""
    model = make(tmp_path, family, changes)
    assert largest_difference(load_model(tmp_path), model) <= DIFFERENCE


@pytest.mark.parametrize("family", ["Llama 3.1", "Qwen3"])
def test_shards(tmp_path: Path, family: str) -> None:
    """Several files and an index, as `save_pretrained` writes them."""
    model = make(tmp_path, *FAMILIES[family], max_shard_size="50KB")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    assert largest_difference(load_model(tmp_path), model) <= DIFFERENCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_files_in_16_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    """What is stored in 16 bits is computed in 32, from the very numbers that were stored."""
    make(tmp_path, "Qwen2", {}).to(dtype).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert largest_difference(load_model(tmp_path, dtype="float32"), model) <= DIFFERENCE


def _to_old_form(path: Path) -> None:
    """Rotary fields as `transformers` wrote them before its fifth version."""
    fields = json.loads(path.read_text())
    rope = fields.pop("rope_parameters")
    fields["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    fields["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    path.write_text(json.dumps(fields))


@pytest.mark.parametrize("family", ["Llama 3", "Llama 3.1", "Llama, linear scaling", "Qwen2"])
def test_rotary_fields_in_their_old_form(tmp_path: Path, family: str) -> None:
    """`rope_scaling` and `rope_theta` say the same as `rope_parameters`."""
    make(tmp_path, *FAMILIES[family])
    new = read_folder(tmp_path).config
    _to_old_form(tmp_path / "config.json")
    assert read_folder(tmp_path).config == new
    assert new.rope_theta == FAMILIES[family][1]["rope_parameters"]["rope_theta"]


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_a_window_that_is_switched_off(tmp_path: Path, family: str) -> None:
    """Published Qwen configs name a window beside `use_sliding_window: false`; no layer has one."""
    model = make(tmp_path, *FAMILIES[family])
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    del fields["layer_types"]
    path.write_text(json.dumps({**fields, "use_sliding_window": False, "sliding_window": 16, "max_window_layers": 1}))
    assert largest_difference(load_model(tmp_path), model) <= DIFFERENCE


@pytest.mark.parametrize(("family", "changes"), FAMILIES.values(), ids=FAMILIES.keys())
def test_what_is_written_is_read_by_transformers(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    """`write_folder` names the family that computes the same."""
    model = make(tmp_path / "theirs", family, changes)
    checkpoint = read_folder(tmp_path / "theirs")
    write_folder(tmp_path / "ours", checkpoint, torch.float32)
    assert read_folder(tmp_path / "ours").config == checkpoint.config
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    text = tokens(70, 4)
    np.testing.assert_allclose(reference(again, text), reference(model, text), rtol=0, atol=DIFFERENCE)


PUBLISHED = {
    "Llama 3.1": {**LLAMA3, "rope_theta": 500_000.0, "original_max_position_embeddings": 8192},
    "Llama 3.2": {**LLAMA3, "rope_theta": 500_000.0, "original_max_position_embeddings": 8192, "factor": 32.0},
    "linear": {**LINEAR, "rope_theta": 1e6},
    "Qwen3": {"rope_type": "default", "rope_theta": 1e6},
}


@pytest.mark.parametrize("rope", PUBLISHED.values(), ids=PUBLISHED.keys())
@pytest.mark.parametrize("head_dim", [64, 128])
def test_frequencies_equal_transformers(rope: dict[str, Any], head_dim: int) -> None:
    """With the numbers of published models: equal but for two roundings of 32 bits."""
    changes = {"head_dim": head_dim, "rope_parameters": rope, "max_position_embeddings": 131_072}
    config = transformers.LlamaConfig(**{**SIZES, **changes})
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq
    ours = ModelConfig.from_huggingface({**config.to_dict(), "architectures": ["LlamaForCausalLM"]})
    found = frequencies(ours, torch.float32, torch.device("cpu"))
    np.testing.assert_allclose(found.numpy(), theirs.numpy(), rtol=2.4e-7, atol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "yarn", "factor": 2.0}, "kind 'yarn' is not supported"),
        ({"kind": "linear", "factor": float("inf")}, "factor of the rotary scaling is inf"),
        ({"kind": "linear", "factor": True}, "factor of the rotary scaling is True"),
        ({"kind": "linear", "factor": 2.0, "divisors": (1.0,)}, "'linear' has 1 divisors"),
        ({"kind": "divisors"}, "'divisors' has 0 divisors"),
        ({"kind": "divisors", "divisors": (1.0, float("nan"))}, "a divisor of the rotary scaling is nan"),
    ],
)
def test_scalings_that_scale_nothing_sensibly(arguments: dict[str, Any], message: str) -> None:
    """Bad input: refused when they are made."""
    with pytest.raises(CheckpointError, match=message):
        RopeScaling(**arguments)


def test_switches_that_no_family_has(tmp_path: Path) -> None:
    """They can be computed and not be named in a config.json."""
    for switches in ({"qkv_bias": True, "qk_norm": True}, {"output_bias": True}):
        with pytest.raises(CheckpointError, match="no family has qkv_bias="):
            tiny_config(**switches).to_huggingface()


def test_rotary_reads_no_position_on_the_host() -> None:
    """Positions may lie where nothing can be read: so a step can be captured and replayed on a device."""
    positions = torch.arange(7, device="meta")
    for rope in PUBLISHED.values():
        fields = {**SIZES, "architectures": ["LlamaForCausalLM"], "head_dim": 12, "rope_parameters": rope}
        cos, sin = rotary(positions, ModelConfig.from_huggingface(fields), torch.bfloat16)
        assert cos.shape == sin.shape == (7, 1, 6)
        assert cos.device.type == "meta" and cos.dtype == torch.bfloat16


def test_frequencies_made_in_a_step_may_be_used_in_training() -> None:
    """They are kept; a forward pass without gradients may be the first to ask for them."""
    config = tiny_config(rope_theta=123.0)
    with torch.inference_mode():
        rotary(torch.arange(3), config, torch.float32)
    assert not frequencies(config, torch.float32, torch.device("cpu")).is_inference()
