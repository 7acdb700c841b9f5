"""A tiny random Llama in float64 behind an engine, with every row of logits kept.

The cases speak of outputs and of logits. The toy of `tests.toy` gives exact outputs; this gives the logits, and its
cache is NaN wherever nobody wrote, so that a slot read by mistake shows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from contbatch import Engine, FlatBatch, SamplingParams, SchedulerConfig
from contbatch.models import LoadedModel, ModelExecutor
from tests.models.tiny import Floats, dense_logits, tiny_model

torch.set_num_threads(1)
TOLERANCE = 1e-9


@cache
def model() -> LoadedModel:
    """One model for all tests: nobody writes to its weights."""
    return tiny_model()


class Recorder(ModelExecutor):
    """Keeps the arrays of every step, and the logits of every sampled row by request and position."""

    def __init__(self, limits: SchedulerConfig) -> None:
        super().__init__(model(), limits.num_blocks, limits.block_size, limits.num_host_blocks)
        self.cache.data.fill_(torch.nan)
        self.flats: list[FlatBatch] = []
        self.logits: defaultdict[str, dict[int, Floats]] = defaultdict(dict)

    def forward(self, flat: FlatBatch) -> Tensor:
        """As the base class does, and written down."""
        logits = super().forward(flat)
        self.flats.append(flat)
        for row, name, scores in zip(flat.sample_rows, flat.sample_request_ids, logits, strict=True):
            self.logits[name][int(flat.positions[row]) + 1] = scores.numpy().copy()
        return logits


def model_engine(limits: SchedulerConfig) -> tuple[Engine, Recorder]:
    """An engine with the tiny model, and its executor."""
    recorder = Recorder(limits)
    return Engine(recorder, limits), recorder


def greedy(max_tokens: int, **others: object) -> SamplingParams:
    """Sampling parameters that no end-of-sequence token cuts short."""
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **others)  # type: ignore[arg-type]  # passed on


def solo(limits: SchedulerConfig, prompt: Sequence[int], sampling: SamplingParams) -> tuple[int, ...]:
    """The tokens of a request that is alone in a fresh engine."""
    engine, _ = model_engine(limits)
    (done,) = engine.generate([prompt], sampling)
    assert done.error is None
    return done.token_ids


def gap(one: Mapping[int, Floats], other: Mapping[int, Floats]) -> float:
    """The largest difference between two requests' logits; they must be of the same positions and finite."""
    assert one.keys() == other.keys() and one
    difference = float(max(np.abs(one[position] - other[position]).max() for position in one))
    assert np.isfinite(difference)
    return difference


def assert_dense(recorder: Recorder, name: str, token_ids: Sequence[int]) -> None:
    """Every row of logits of a request is that of the dense forward pass over its tokens."""
    dense = dense_logits(model(), token_ids)
    for position, scores in recorder.logits[name].items():
        np.testing.assert_allclose(scores, dense[position - 1], rtol=0, atol=TOLERANCE)
