"""Tensors that lie in a file until somebody asks for them.

The one idea: a checkpoint may be larger than what is left of the memory beside the model, so it is never held as a
whole. Names and shapes are known at once, and checked; the numbers of a tensor are read (and dequantised) when that
tensor is asked for, each time anew, and forgotten with the last reference to them. Nothing is mapped into memory
beyond a read, so that the pages of the file do not count as ours either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from contbatch.errors import CheckpointError

Progress = Callable[[str, int, int], None]
"""`progress(what, done, of)`: called now and then while something long goes on; see `load_model`."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file.

    Args:
        place: the file that it lies in, for messages.
        read: reads it, in a number format of the file's choice.
    """

    shape: tuple[int, ...]
    place: str
    read: Callable[[], Tensor]


class StoredTensors(Mapping[str, Tensor]):
    """Tensors by name. Asking for one reads its file.

    Raises:
        CheckpointError: two tensors have the same name.
    """

    def __init__(self, pairs: Iterable[tuple[str, StoredTensor]]) -> None:
        self._stored: dict[str, StoredTensor] = {}
        for name, tensor in pairs:
            if name in self._stored:
                raise CheckpointError(
                    f"tensor {name!r} is there twice, in {self._stored[name].place} and in {tensor.place}; "
                    "get the files again, all from one place"
                )
            self._stored[name] = tensor

    def __getitem__(self, name: str) -> Tensor:
        return self._stored[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, name: object) -> bool:
        return name in self._stored  # the one of Mapping would read the tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return self._stored[name].shape


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Shapes by name; stored tensors are not read for it."""
    if isinstance(tensors, StoredTensors):
        return {name: tensors.shape(name) for name in tensors}
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
