"""What the notebooks store must come out the same on every machine: no token of theirs hangs on a near-tie.

Beyond the end of a story too, because most notebooks let each request run to its full length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from contbatch import Engine, SamplingParams, ScheduledBatch
from contbatch.batch import FlatBatch
from contbatch.models import ModelExecutor
from contbatch.prompts import DEMO_PROMPTS

SMALLEST_MARGIN = 1e-3
OUTPUTS = (24, 16, 30, 20, 12, 24, 28, 16)
"""Tokens of each request in notebooks 05 and 06."""
LONGER = (32, 24, 40, 28, 36, 20, 32, 24)
"""Tokens of each request in notebook 08."""


class Watched(ModelExecutor):
    """Writes down how far ahead the best token was, for every token of every request."""

    margins: dict[tuple[str, int], float]

    def execute(self, batch: ScheduledBatch, sampling: Mapping[str, SamplingParams]) -> Mapping[str, int | Exception]:
        flat = batch.flatten(self.cache.block_size)
        best = self.forward(flat).topk(2).values
        for request_id, (first, second) in zip(flat.sample_request_ids, best.tolist(), strict=True):
            row = flat.request_ids.index(request_id)
            self.margins[request_id, int(flat.seq_lens[row])] = first - second
        return super().execute(batch, sampling)


class Forgetful(Watched):
    """The fault that notebook 05 plants: new tokens are numbered from 0."""

    def forward(self, flat: FlatBatch) -> Any:
        first = np.repeat(flat.cu_seqlens[:-1], np.diff(flat.cu_seqlens))
        return super().forward(replace(flat, positions=np.arange(flat.num_tokens) - first))


def margins(kind: type[Watched], params: list[SamplingParams]) -> dict[tuple[str, int], float]:
    """The margins of a run of the notebooks' eight requests, under the limits of notebook 05."""
    limits = {"max_num_batched_tokens": 16, "block_size": 4, "num_blocks": 128, "enable_prefix_caching": False}
    engine = Engine.load("pocket", **limits)
    engine.executor = watched = kind(engine.executor.loaded, 128, 4)  # type: ignore[attr-defined]  # the model's own
    watched.margins = {}
    engine.generate(DEMO_PROMPTS, params)
    return watched.margins


def near_ties(found: Mapping[tuple[str, int], float]) -> dict[tuple[str, int], float]:
    return {place: margin for place, margin in found.items() if margin <= SMALLEST_MARGIN}


@pytest.mark.parametrize(
    "outputs", [OUTPUTS, LONGER, (24,) * 8], ids=["notebooks 05, 06", "notebook 08", "notebook 00"]
)
def test_no_token_hangs_on_a_near_tie(outputs: tuple[int, ...]) -> None:
    found = margins(Watched, [SamplingParams(max_tokens=n, ignore_eos=True) for n in outputs])
    assert len(found) == sum(outputs)
    assert near_ties(found) == {}


def test_the_planted_fault_gives_the_same_text_everywhere() -> None:
    """Notebook 05 serves the eight requests with wrong positions and shows two of the texts."""
    found = margins(Forgetful, [SamplingParams(max_tokens=n, ignore_eos=True) for n in OUTPUTS])
    shown = {place: margin for place, margin in found.items() if place[0] in ("r0", "r1")}
    assert len(shown) == OUTPUTS[0] + OUTPUTS[1]
    assert near_ties(shown) == {}
