"""One mixed forward pass per step: the executor that runs a real model.

The one idea: prompts, chunks and decode tokens of a step lie on one token axis and go through the model together,
and logits are computed only for the rows that will be sampled. The executor keeps nothing between steps but the
cache: which block belongs to whom comes with every batch.

How a pass is computed is chosen once: by the compiled kernels of `contbatch.models.cpu`, or by the plain model, which
is the reference for them and what runs where they do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from contbatch.batch import FlatBatch, ScheduledBatch
from contbatch.errors import InvalidConfig, KernelsMissing, UnknownName
from contbatch.models.attention import PagedAttention, PagedCache
from contbatch.models.checkpoint import LoadedModel
from contbatch.models.cpu.decoder import Decoder
from contbatch.models.cpu.native import load_kernels
from contbatch.models.llama import Llama
from contbatch.models.sampler import sample
from contbatch.request import SamplingParams

KERNELS = ("auto", "native", "plain")
"""Ways to compute a pass: compiled kernels, the plain PyTorch model, or the first of these that there is."""


class Forward(Protocol):
    """Computes one pass."""

    def forward(self, flat: FlatBatch, cache: PagedCache) -> Tensor:
        """Logits [S, vocab_size] of the rows to sample; K and V of all T tokens are in the cache after."""
        ...


class PlainForward:
    """The model as `llama.py` writes it, with the attention of `attention.py`: any device, any number format."""

    def __init__(self, model: Llama) -> None:
        if not len(model.layers):
            raise InvalidConfig(
                'the plain weights of this model were dropped when it was packed; load it again with kernels="plain"'
            )
        self.model = model

    def forward(self, flat: FlatBatch, cache: PagedCache) -> Tensor:
        """See `Forward`."""
        device = cache.data.device
        input_ids = torch.from_numpy(flat.input_ids).to(device)
        positions = torch.from_numpy(flat.positions).to(device)
        hidden = self.model(input_ids, positions, PagedAttention(cache, flat))
        return self.model.logits(hidden[torch.from_numpy(flat.sample_rows).to(device)])


def choose_forward(loaded: LoadedModel, kernels: str = "auto") -> tuple[Forward, str]:
    """How the passes of this model are computed, and why in that way.

    Raises:
        KernelsMissing: `kernels` is "native" and there are none.
        UnknownName: `kernels` is none of `KERNELS`.
    """
    if kernels not in KERNELS:
        raise UnknownName(f"kernels is {kernels!r}; use one of {', '.join(KERNELS)}")
    if kernels == "plain":
        return PlainForward(loaded.model), "plain PyTorch, as asked for"
    try:
        if loaded.device.type != "cpu":
            raise KernelsMissing(f"the compiled kernels are for a CPU, and the model is on {loaded.device}")
        found = load_kernels(loaded.dtype)
    except KernelsMissing as error:
        if kernels == "native":
            raise
        return PlainForward(loaded.model), f"plain PyTorch: {error}"
    if loaded.model not in _DECODERS:
        _DECODERS[loaded.model] = Decoder(loaded.model, found)
    return _DECODERS[loaded.model], f"compiled kernels, {found.made_for}"


_DECODERS: WeakKeyDictionary[Llama, Decoder] = WeakKeyDictionary()
"""The decoder of each model that has one: weights are packed once, and all executors of a model share them."""


class ModelExecutor:
    """Runs scheduled batches on a model with a paged cache; implements `contbatch.executor.Executor`.

    Args:
        loaded: the model.
        num_blocks: usable cache blocks; one more is kept as the null block 0.
        block_size: tokens a block.
        num_host_blocks: blocks in host memory, for preemption by swap.
        kernels: see `KERNELS`; `path` says which was taken and why.

    Raises:
        InvalidConfig: a size below 1, or more cache than there is memory.
        KernelsMissing, UnknownName: see `choose_forward`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        kernels: str = "auto",
    ) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise InvalidConfig(f"{name} is {value}; use at least 1")
        self.loaded = loaded
        self.vocab_size: int | None = loaded.config.vocab_size
        self.max_model_len: int | None = loaded.config.max_model_len
        self.eos_token_ids = loaded.eos_token_ids
        self._forward, self.path = choose_forward(loaded, kernels)
        self.cache = PagedCache(loaded.config, num_blocks, block_size, loaded.device, loaded.dtype)
        self.host = PagedCache(loaded.config, num_host_blocks, block_size, torch.device("cpu"), loaded.dtype)

    def execute(self, batch: ScheduledBatch, sampling: Mapping[str, SamplingParams]) -> Mapping[str, int | Exception]:
        """One token for each request that samples in this step; an exception where that one failed."""
        flat = batch.flatten(self.cache.block_size)
        logits = self.forward(flat)
        positions = [part.seq_len for part in batch if part.sample]
        return sample(logits, flat.sample_request_ids, positions, sampling)

    def swap_out(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Copy cache blocks to host memory: (block, host block) each."""
        self.cache.copy_blocks(self.host, blocks)

    def swap_in(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Copy blocks back: (host block, block) each."""
        self.host.copy_blocks(self.cache, blocks)

    def drop_plain_weights(self) -> None:
        """Where packed weights are computed with, forget the plain ones: half of the memory of a model.

        Other executors of the same model can still be made, but no plain one.
        """
        if isinstance(self._forward, Decoder):
            self.loaded.model.layers = nn.ModuleList()

    @torch.inference_mode()
    def forward(self, flat: FlatBatch) -> Tensor:
        """Logits [S, vocab_size] of the rows to sample; K and V of all T tokens are in the cache after."""
        return self._forward.forward(flat, self.cache)
