"""Preemption changes no token: by swap and by recomputation, on the embedded model in fp32, 50 times and more.

The requests are served one by one first, which also tells how far ahead the best token was each time. No choice hangs
on a near-tie, so whatever differs afterwards is a fault and not rounding.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from torch import Tensor

from contbatch import Engine, SamplingParams, summarise
from contbatch.batch import FlatBatch
from contbatch.models import ModelExecutor
from contbatch.prompts import EXAMPLE_PROMPTS

SMALLEST_MARGIN = 1e-3
LIMITS = {
    "max_num_seqs": 36,
    "max_num_batched_tokens": 32,
    "max_model_len": 24,
    "block_size": 2,
    "num_blocks": 24,  # two of the longest requests
    "scheduler_reserve_full_isl": False,
}
SAMPLING = SamplingParams(max_tokens=16, ignore_eos=True)


class Watched(ModelExecutor):
    """Writes down how far ahead the best token was."""

    margins: list[float]

    def forward(self, flat: FlatBatch) -> Tensor:
        logits = super().forward(flat)
        self.margins += [first - second for first, second in logits.topk(2).values.tolist()]
        return logits


@dataclass(frozen=True)
class Alone:
    """The requests, and what each of them gets when nobody else is there."""

    prompts: list[tuple[int, ...]]
    tokens: list[tuple[int, ...]]
    margins: list[float]


@pytest.fixture(scope="module")
def alone() -> Alone:
    """36 short prompts cut from English text, which outgrow the pool; every third begins like the one before it."""
    engine = Engine.load("pocket", max_num_seqs=1, enable_prefix_caching=False, num_blocks=2)
    assert engine.tokenizer is not None and isinstance(engine.executor, ModelExecutor)
    engine.executor = watched = Watched(engine.executor.loaded, 2, 16)
    watched.margins = []
    text = engine.tokenizer.encode(" ".join(EXAMPLE_PROMPTS))
    chance = random.Random(3)
    prompts: list[tuple[int, ...]] = []
    for index in range(36):
        start, length = chance.randrange(len(text) - 8), chance.randint(2, 8)
        prompt = tuple(text[start : start + length])
        prompts.append((prompts[-1] + prompt)[:8] if index % 3 == 2 else prompt)
    tokens = [engine.generate([prompt], SAMPLING)[0].token_ids for prompt in prompts]
    return Alone(prompts, tokens, watched.margins)


def test_no_token_hangs_on_a_near_tie(alone: Alone) -> None:
    assert len(alone.margins) == sum(map(len, alone.tokens)) == 36 * 16
    assert min(alone.margins) > SMALLEST_MARGIN


@pytest.mark.parametrize("caching", [True, False], ids=["cache", "nocache"])
@pytest.mark.parametrize(("mode", "host"), [("recompute", 0), ("swap", 200), ("swap", 8)])
def test_fifty_preemptions_change_no_token(alone: Alone, mode: str, host: int, caching: bool) -> None:
    """Everybody is swapped where there is room, and some of them where there is little."""
    engine = Engine.load("pocket", preemption_mode=mode, num_host_blocks=host, enable_prefix_caching=caching, **LIMITS)
    done = engine.generate(alone.prompts, SAMPLING)
    assert [completion.token_ids for completion in done] == alone.tokens
    metrics = summarise(engine.trace)
    swapped = sum(len(step.swapped_out) for step in engine.trace.steps)
    assert metrics.preemptions >= 50
    expected = {0: [0], 8: range(5, metrics.preemptions - 4), 200: [metrics.preemptions]}[host]
    assert swapped in expected
    assert (metrics.recomputed_tokens == 0) is (host == 200)
    engine.scheduler.check()
    assert engine.scheduler.pool.num_used == engine.scheduler.host.num_used == 0
