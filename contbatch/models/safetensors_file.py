"""Safetensors: the weights of a checkpoint folder, in one file or in several with an index.

The one idea: the headers say everything that can be wrong before a weight is read: a file that is cut, a shard that
is missing or holds other tensors than the index says, a tensor that is there twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from contbatch.errors import CheckpointError
from contbatch.models.files import read_json
from contbatch.models.stored import StoredTensor

_FLOATS = ("F64", "F32", "F16", "BF16")


def stored_tensors(folder: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Names, as they are in the files, and tensors of a folder.

    Raises:
        CheckpointError: a file is missing or damaged, or does not hold what the index says.
    """
    index = _index(folder)
    for path in weight_files(folder):
        stored = dict(_file(path))
        listed = {name for name, file in index.items() if file == path.name}
        if lacking := sorted(listed - stored.keys()):
            raise CheckpointError(
                f"{path} lacks {lacking[0]!r}, which {_INDEX} says is in it ({len(lacking)} such tensors); "
                "get the files again, all from one place"
            )
        yield from stored.items()


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights, whether they are there or not.

    Raises:
        CheckpointError: neither model.safetensors nor a usable index.
    """
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    return [folder / name for name in sorted(set(_index(folder).values()))]


_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def _index(folder: Path) -> dict[str, str]:
    """File name by tensor name; empty where there is only one file."""
    if (folder / _SINGLE).is_file():
        return {}
    if not (folder / _INDEX).is_file():
        raise CheckpointError(
            f"{folder} has neither {_SINGLE} nor {_INDEX}; get the weights in safetensors "
            "format (pickled .bin files are not read, because reading one can run code)"
        )
    shards = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(file, str) for file in shards.values()):
        raise CheckpointError(f"{folder / _INDEX} has no weight_map from tensors to files; get the file again")
    return {name: Path(file).name for name, file in shards.items()}


def _file(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; get the file from the model's source")
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118  # not a dict
            header = file.get_slice(name)
            if header.get_dtype() not in _FLOATS:
                raise CheckpointError(
                    f"tensor {name!r} of {path} has type {header.get_dtype()}, and this is not supported; "
                    f"supported: {', '.join(_FLOATS)}"
                )
            yield name, StoredTensor(tuple(header.get_shape()), str(path), partial(_read, path, name))


def _read(path: Path, name: str) -> Tensor:
    with _opened(path) as file:
        tensor: Tensor = file.get_tensor(name)
        return tensor


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        size = path.stat().st_size if path.is_file() else 0
        raise CheckpointError(f"{path} ({size} bytes) is truncated or damaged: {error}; get the file again") from error
