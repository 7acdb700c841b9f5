"""Checkpoints: from files on disk to a model that can run.

The one idea: everything is checked before anything is built. A reader (`read_folder` here, `read_gguf` in
`gguf_file.py`) turns its format into one `Checkpoint`: sizes, tensors by name, tokenizer. `assemble` compares
names and shapes with those the architecture needs and only then makes the model around the tensors.

Pickled weights (`pytorch_model.bin`) are left out on purpose: reading one can run code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from contbatch.errors import CheckpointError
from contbatch.models.chat import folder_template, write_template
from contbatch.models.config import ModelConfig
from contbatch.models.files import read_json, read_json_if_there, write_json
from contbatch.models.llama import Llama
from contbatch.models.safetensors_file import stored_tensors, weight_files
from contbatch.models.stored import Progress, StoredTensors, shapes
from contbatch.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds, whatever its format."""

    config: ModelConfig
    tensors: Mapping[str, Tensor]
    """Weights by parameter name of `Llama`; those of a file are read one by one, when they are asked for."""
    tokenizer: Tokenizer


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run, and what belongs to it."""

    name: str
    config: ModelConfig
    model: Llama
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    device: torch.device
    dtype: torch.dtype


def assemble(
    name: str, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, progress: Progress | None = None
) -> LoadedModel:
    """Build the model around the tensors of a checkpoint, of which one at a time is in memory beside the model.

    Args:
        progress: called after each tensor with "loading", how many are done, and of how many.

    Raises:
        CheckpointError: a tensor is missing, unknown, of the wrong shape, or holds NaN or infinite numbers; or the
            tokenizer has ids that the model lacks.
    """
    with torch.device("meta"):
        model = Llama(checkpoint.config)
    check_tensors(model, checkpoint.tensors)
    check_vocabulary(checkpoint)
    names = list(model.state_dict())
    state: dict[str, Tensor] = {}
    for key in names:
        state[key] = _prepared(key, checkpoint.tensors[key], device, dtype)
        if progress is not None:
            progress("loading", len(state), len(names))
    model.load_state_dict(state, assign=True)
    model.requires_grad_(False).eval()
    tokenizer = checkpoint.tokenizer
    return LoadedModel(name, checkpoint.config, model, tokenizer, tokenizer.eos_token_ids, device, dtype)


def _prepared(name: str, stored: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A tensor as the model computes with it: every number finite."""
    # Copied, so that memory is aligned alike whatever the file: the last bit of a sum can depend on it.
    tensor = stored.to(device, dtype, copy=True)
    if _is_finite(tensor):
        return tensor
    if _is_finite(stored):
        raise CheckpointError(
            f"tensor {name!r} has numbers beyond the range of {dtype}; load the model as bfloat16 or float32"
        )
    raise CheckpointError(f"tensor {name!r} holds NaN or infinite numbers; the checkpoint is damaged, get it again")


def _is_finite(tensor: Tensor) -> bool:
    """True without NaN and infinities: the two extremes tell, and need no second tensor of that size."""
    return bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


def check_vocabulary(checkpoint: Checkpoint) -> None:
    """Refuse a tokenizer with ids that the model has no embedding for. A model may have more ids than its tokenizer:
    many are padded to a round number, and `Tokenizer.decode` gives nothing for those.

    Raises:
        CheckpointError: with both numbers.
    """
    highest, size = checkpoint.tokenizer.highest_id, checkpoint.config.vocab_size
    if highest >= size:
        raise CheckpointError(
            f"the tokenizer has ids up to {highest} and the model a vocabulary of {size}, which ends at {size - 1}; "
            "they do not belong together, get both from one place"
        )


def check_tensors(model: Llama, tensors: Mapping[str, Tensor]) -> None:
    """Compare names and shapes with what `model` needs.

    Raises:
        CheckpointError: the first few differences of one kind.
    """
    needed = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    there = shapes(tensors)
    if missing := sorted(needed.keys() - there.keys()):
        raise CheckpointError(f"the checkpoint lacks {_few(missing)}; it is incomplete or of another architecture")
    if unknown := sorted(there.keys() - needed.keys()):
        raise CheckpointError(
            f"the checkpoint has {_few(unknown)}, which this architecture does not use; "
            "running without would give wrong text"
        )
    wrong = [f"{key} {there[key]} (expected {shape})" for key, shape in needed.items() if there[key] != shape]
    if wrong:
        raise CheckpointError(f"wrong shapes: {_few(wrong)}; config and weights do not belong together")


def read_folder(folder: Path) -> Checkpoint:
    """Read a Hugging Face folder: config.json, safetensors (one file or several), tokenizer.json.

    Raises:
        CheckpointError: a file is missing or damaged, or the architecture is not supported.
    """
    fields = read_json(folder / "config.json")
    config = ModelConfig.from_huggingface(fields)
    eos = _eos_token_ids(folder, fields)
    tokenizer = Tokenizer.from_file(folder / "tokenizer.json", eos, folder_template(folder))
    named = ((_parameter_name(name), tensor) for name, tensor in stored_tensors(folder))
    tensors = StoredTensors((name, tensor) for name, tensor in named if not _is_computed(name, config))
    return Checkpoint(config, tensors, tokenizer)


def is_complete(folder: Path) -> bool:
    """True if every file that `read_folder` needs is there; their content is not looked at."""
    needed = [folder / "config.json", folder / "tokenizer.json"]
    try:
        needed += weight_files(folder)
    except CheckpointError:
        return False
    return all(path.is_file() for path in needed)


def write_folder(folder: Path, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    """Write a folder that `read_folder` reads, with weights stored in `dtype`."""
    folder.mkdir(parents=True, exist_ok=True)
    eos = sorted(checkpoint.tokenizer.eos_token_ids)
    fields = {**checkpoint.config.to_huggingface(), "eos_token_id": eos}
    write_json(folder / "config.json", fields)
    write_json(folder / "generation_config.json", {"eos_token_id": eos})
    tensors = {
        _huggingface_name(key): value.detach().to("cpu", dtype).contiguous()
        for key, value in checkpoint.tensors.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint.tokenizer.core.save(str(folder / "tokenizer.json"))
    if checkpoint.tokenizer.chat_template is not None:
        write_template(folder, checkpoint.tokenizer.chat_template)


def _parameter_name(name: str) -> str:
    return name.removeprefix("model.")


def _is_computed(name: str, config: ModelConfig) -> bool:
    """True for a stored buffer that is computed here, and for a copy of a tied head."""
    return name.endswith("rotary_emb.inv_freq") or (config.tied_head and name == "lm_head.weight")


def _huggingface_name(name: str) -> str:
    return name if name.startswith("lm_head.") else f"model.{name}"


def _eos_token_ids(folder: Path, fields: Mapping[str, Any]) -> frozenset[int]:
    """Ids that end a text: generation_config.json decides if it is there, config.json otherwise."""
    generation = read_json_if_there(folder / "generation_config.json")
    value = generation.get("eos_token_id", fields.get("eos_token_id"))
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise CheckpointError(f"eos_token_id is {value!r} in {folder}; use a token id or a list of them")
    return frozenset(ids)


def _few(items: list[str]) -> str:
    more = f" and {len(items) - 3} more" if len(items) > 3 else ""
    return ", ".join(items[:3]) + more
