"""From the plain model to the fast one, one kernel at a time: what each of them gains.

    python benchmarks/fast_path.py                      # smollm2-135m, a table; --json FILE writes it too

Every rung computes the same two steps: 16 requests that decode behind 200 tokens, and a prompt of 512 tokens. The
rungs between the plain model and the fast one are the fast one with some kernels exchanged for the PyTorch operations
that do the same on the same buffers, so that a rung differs from the one before it by one kernel. All rungs run in
turn in every round; the table shows medians over the rounds.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, cast

import numpy as np
import torch
import torch.nn.functional as F
import typer
from torch import Tensor

from contbatch.batch import BatchedRequest, FlatBatch, ScheduledBatch
from contbatch.models import LoadedModel, load_model
from contbatch.models.attention import PagedCache
from contbatch.models.cpu.decoder import ADD, SWIGLU, Decoder, Weight
from contbatch.models.cpu.native import Kernels, load_kernels
from contbatch.models.llama import rotate
from contbatch.models.runner import Forward, PlainForward

REQUESTS, CONTEXT, PROMPT, BLOCK_SIZE = 16, 200, 512, 16


class TorchKernels:
    """The calls of `Kernels`; PyTorch operations answer those that are not in `kept`."""

    def __init__(self, kernels: Kernels, kept: tuple[str, ...], lanes: int) -> None:
        self.lanes = lanes
        for name in kept:
            setattr(self, name, getattr(kernels, name))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor, rows: int, width: int) -> None:
        """See `kernels.cpp`."""
        del width
        wide = x[:rows]
        out[:rows] = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight

    def product(self, x: Tensor, weight: Tensor, bias: None, out: Tensor, rows: int, *sizes: int) -> None:
        """See `kernels.cpp`; `weight` is not packed, and gate and up lie one behind the other."""
        del bias
        ending = sizes[-1]
        result = F.linear(x[:rows], weight)
        if ending == SWIGLU:
            gate, up = result.chunk(2, dim=-1)
            torch.mul(F.silu(gate), up, out=out[:rows])
        elif ending == ADD:
            out[:rows] += result
        else:
            out[:rows] = result

    def rope_and_store(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        q_norm: None,
        k_norm: None,
        eps: float,
        slots: Tensor,
        cache: Tensor,
        rows: int,
        queries: int,
        keys: int,
        size: int,
    ) -> None:
        """See `kernels.cpp`."""
        del q_norm, k_norm, eps
        heads = qkv[:rows].view(rows, -1, size)
        heads[:, : queries + keys] = rotate(heads[:, : queries + keys], (cos, sin))
        cache.index_copy_(0, slots, heads[:, queries:].reshape(rows, 2, keys, size).to(cache.dtype))


class TorchProducts(Decoder):
    """A decoder whose weights stay as they are."""

    def _pack(self, weight: Tensor, bias: Tensor | None = None) -> Weight:
        return Weight(weight, bias, weight.shape[1], len(weight))


@dataclass(frozen=True)
class Rung:
    """One way to compute a step, and its median times in milliseconds."""

    name: str
    decode_ms: float
    prefill_ms: float


def ladder(loaded: LoadedModel) -> dict[str, Forward]:
    """The ways, from plain to fast."""
    model, kernels = loaded.model, load_kernels(loaded.dtype)
    unpacked = model.config.intermediate_size  # gate and up are then one behind the other

    def only(*kept: str) -> Kernels:
        return cast(Kernels, TorchKernels(kernels, kept, kernels.lanes if "product" in kept else unpacked))

    return {
        "plain PyTorch": PlainForward(model),
        "attention reads the block table; Q, K, V one product, gate and up one": TorchProducts(
            model, only("attention")
        ),
        "packed weights; SwiGLU and the residual in the product": Decoder(model, only("attention", "product")),
        "the norms": Decoder(model, only("attention", "product", "rms_norm")),
        "rotary positions and the cache write: the fast path": Decoder(model, kernels),
    }


def decode_step() -> FlatBatch:
    """16 requests, one new token each."""
    width = CONTEXT // BLOCK_SIZE + 1
    tables = [tuple(range(1 + n * width, 1 + (n + 1) * width)) for n in range(REQUESTS)]
    parts = [BatchedRequest.decode(str(n), 1000 + n, CONTEXT, n, table, CONTEXT) for n, table in enumerate(tables)]
    return ScheduledBatch(0, parts).flatten(BLOCK_SIZE)


def prefill_step() -> FlatBatch:
    """One prompt."""
    tokens = np.random.default_rng(0).integers(0, 40_000, PROMPT).tolist()
    part = BatchedRequest.prefill("prompt", tokens, 0, range(1, PROMPT // BLOCK_SIZE + 1))
    return ScheduledBatch(0, [part]).flatten(BLOCK_SIZE)


def milliseconds(forward: Forward, flat: FlatBatch, cache: PagedCache) -> float:
    """The time of one pass, on the wall."""
    start = time.perf_counter()
    forward.forward(flat, cache)
    return (time.perf_counter() - start) * 1e3


@torch.inference_mode()
def measure(loaded: LoadedModel, rounds: int) -> list[Rung]:
    """Medians of all rungs, which take turns."""
    ways, steps = ladder(loaded), (decode_step(), prefill_step())
    cache = PagedCache(loaded.config, REQUESTS * (CONTEXT // BLOCK_SIZE + 1), BLOCK_SIZE, loaded.device, loaded.dtype)
    cache.data.normal_()
    times: dict[str, list[list[float]]] = {name: [[], []] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            for kept, flat in zip(times[name], steps, strict=True):
                kept.append(milliseconds(way, flat, cache))
    return [Rung(name, *(round(statistics.median(kept[1:]), 1) for kept in both)) for name, both in times.items()]


def main(
    model: Annotated[str, typer.Option(help="A name from `contbatch models`, a folder, or a .gguf file.")] = (
        "smollm2-135m"
    ),
    rounds: Annotated[int, typer.Option(help="How often each rung runs.")] = 15,
    out: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Measure and print."""
    result = {}
    for dtype in ("float32", "bfloat16"):
        rungs = measure(load_model(model, dtype=dtype), rounds)
        result[dtype] = [asdict(rung) for rung in rungs]
        print(f"\n{model}, {dtype}: a decode step of {REQUESTS} requests, a prompt of {PROMPT} tokens (ms)")
        for rung in rungs:
            gain = rungs[0].decode_ms / rung.decode_ms
            print(f"{rung.decode_ms:8.1f} {rung.prefill_ms:8.1f}   {gain:4.1f} times   {rung.name}")
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
