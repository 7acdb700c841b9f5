"""Checkpoints: from files on disk to a model that can run.

The one idea: everything is checked before anything is built. A reader (`read_folder` here, `read_gguf` in
`gguf_file.py`) turns its format into one `Checkpoint`: sizes, tensors by name, tokenizer. `assemble` compares
names and shapes with those the architecture needs and only then makes the model around the tensors.

Pickled weights (`pytorch_model.bin`) are left out on purpose: reading one can run code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from contbatch.errors import CheckpointError
from contbatch.models.config import ModelConfig
from contbatch.models.llama import Llama
from contbatch.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds, whatever its format."""

    config: ModelConfig
    tensors: Mapping[str, Tensor]
    """Weights by parameter name of `Llama`."""
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


def assemble(name: str, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """Build the model around the tensors of a checkpoint.

    Raises:
        CheckpointError: a tensor is missing, unknown, or of the wrong shape.
    """
    with torch.device("meta"):
        model = Llama(checkpoint.config)
    check_tensors(model, checkpoint.tensors)
    # Copied, so that memory is aligned alike whatever the file: the last bit of a sum can depend on it.
    state = {key: checkpoint.tensors[key].to(device, dtype, copy=True) for key in model.state_dict()}
    model.load_state_dict(state, assign=True)
    model.requires_grad_(False).eval()
    tokenizer = checkpoint.tokenizer
    return LoadedModel(name, checkpoint.config, model, tokenizer, tokenizer.eos_token_ids, device, dtype)


def check_tensors(model: Llama, tensors: Mapping[str, Tensor]) -> None:
    """Compare names and shapes with what `model` needs.

    Raises:
        CheckpointError: the first few differences of one kind.
    """
    needed = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    if missing := sorted(needed.keys() - tensors.keys()):
        raise CheckpointError(f"the checkpoint lacks {_few(missing)}; it is incomplete or of another architecture")
    if unknown := sorted(tensors.keys() - needed.keys()):
        raise CheckpointError(
            f"the checkpoint has {_few(unknown)}, which this architecture does not use; "
            "running without would give wrong text"
        )
    wrong = [
        f"{key} {tuple(tensors[key].shape)} (expected {shape})"
        for key, shape in needed.items()
        if tuple(tensors[key].shape) != shape
    ]
    if wrong:
        raise CheckpointError(f"wrong shapes: {_few(wrong)}; config and weights do not belong together")


def read_folder(folder: Path) -> Checkpoint:
    """Read a Hugging Face folder: config.json, safetensors (one file or several), tokenizer.json.

    Raises:
        CheckpointError: a file is missing or damaged, or the architecture is not supported.
    """
    fields = _read_json(folder / "config.json")
    config = ModelConfig.from_huggingface(fields)
    eos = _eos_token_ids(folder, fields)
    tokenizer = Tokenizer.from_file(folder / "tokenizer.json", eos)
    tensors: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        tensors.update(_read_safetensors(path))
    return Checkpoint(config, _parameter_names(tensors, config), tokenizer)


def is_complete(folder: Path) -> bool:
    """True if every file that `read_folder` needs is there; their content is not looked at."""
    needed = [folder / "config.json", folder / "tokenizer.json"]
    try:
        needed += _weight_files(folder)
    except CheckpointError:
        return False
    return all(path.is_file() for path in needed)


def write_folder(folder: Path, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    """Write a folder that `read_folder` reads, with weights stored in `dtype`."""
    folder.mkdir(parents=True, exist_ok=True)
    eos = sorted(checkpoint.tokenizer.eos_token_ids)
    fields = {**checkpoint.config.to_huggingface(), "eos_token_id": eos}
    _write_json(folder / "config.json", fields)
    _write_json(folder / "generation_config.json", {"eos_token_id": eos})
    tensors = {
        _huggingface_name(key): value.detach().to("cpu", dtype).contiguous()
        for key, value in checkpoint.tensors.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint.tokenizer.core.save(str(folder / "tokenizer.json"))


def _parameter_names(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Names as in `Llama`; without buffers that are computed, and without a copy of a tied head."""
    named = {key.removeprefix("model."): value for key, value in tensors.items()}
    if config.tied_head:
        named.pop("lm_head.weight", None)
    return {key: value for key, value in named.items() if not key.endswith("rotary_emb.inv_freq")}


def _huggingface_name(name: str) -> str:
    return name if name.startswith("lm_head.") else f"model.{name}"


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if not index.is_file():
        raise CheckpointError(
            f"{folder} has neither model.safetensors nor {index.name}; get the weights in safetensors "
            "format (pickled .bin files are not read, because reading one can run code)"
        )
    shards = _read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise CheckpointError(f"{index} has no weight_map from tensors to files; get the file again")
    return [folder / Path(name).name for name in sorted(set(shards.values()))]


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; get the file from the model's source")
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) is truncated or damaged: {error}; get the file again"
        ) from error


def _eos_token_ids(folder: Path, fields: Mapping[str, Any]) -> frozenset[int]:
    """Ids that end a text: generation_config.json decides if it is there, config.json otherwise."""
    path = folder / "generation_config.json"
    generation = _read_json(path) if path.is_file() else {}
    value = generation.get("eos_token_id", fields.get("eos_token_id"))
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise CheckpointError(f"eos_token_id is {value!r} in {folder}; use a token id or a list of them")
    return frozenset(ids)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; a checkpoint folder needs it")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is truncated or damaged: {error}; get the file again") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} holds a {type(fields).__name__}, not an object; get it again")
    return fields


def _write_json(path: Path, fields: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _few(items: list[str]) -> str:
    more = f" and {len(items) - 3} more" if len(items) > 3 else ""
    return ", ".join(items[:3]) + more
