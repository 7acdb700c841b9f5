"""Preemption changes no token: by swap and by recomputation, on the embedded model in fp32, 50 times and more.

The requests are served one by one first, which also tells how far ahead the best token was each time. No choice hangs
on a near-tie, so whatever differs afterwards is a fault and not rounding. A tiny model in fp64 shows the same with a
cache, and host memory, in which everything that nobody wrote is NaN.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from contbatch import Engine, SamplingParams, SchedulerConfig, summarise
from contbatch.batch import FlatBatch
from contbatch.models import ModelExecutor
from contbatch.prompts import EXAMPLE_PROMPTS
from tests.models.tiny import TINY, tiny_model, tokens
from tests.swapping import swap, swapped

SMALLEST_MARGIN = 1e-3
LIMITS: dict[str, Any] = {
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
    served = [engine.generate([prompt], SAMPLING)[0].token_ids for prompt in prompts]
    return Alone(prompts, served, watched.margins)


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
    assert metrics.preemptions >= 50
    expected = {0: [0], 8: range(5, metrics.preemptions - 4), 200: [metrics.preemptions]}[host]
    assert swapped(engine.trace)[0] in expected
    assert (metrics.recomputed_tokens == 0) is (host == 200)
    engine.scheduler.check()
    assert engine.scheduler.pool.num_used == engine.scheduler.host.num_used == 0


def test_the_executor_copies_whole_blocks_of_all_layers() -> None:
    """To host memory and back, into other blocks, and touches nothing else."""
    executor = ModelExecutor(tiny_model(), num_blocks=6, block_size=4, num_host_blocks=5)
    device, host = (
        cache.data.view(TINY.num_layers, -1, 4, 2, TINY.num_kv_heads, TINY.head_dim)
        for cache in (executor.cache, executor.host)
    )
    device.copy_(torch.randn(device.shape, generator=torch.Generator().manual_seed(1)))
    host.fill_(7.0)
    before = device.clone()
    executor.swap_out([(2, 5), (4, 1)])
    assert torch.equal(device, before)
    assert torch.equal(host[:, 5], before[:, 2]) and torch.equal(host[:, 1], before[:, 4])
    assert (host[:, [0, 2, 3, 4]] == 7).all()
    device.fill_(3.0)
    executor.swap_in([(5, 6), (1, 2)])
    assert torch.equal(device[:, 6], before[:, 2]) and torch.equal(device[:, 2], before[:, 4])
    assert (device[:, [0, 1, 3, 4, 5]] == 3).all()
    assert torch.equal(host[:, 5], before[:, 2]), "it can be brought back again, should the step fail"


@pytest.mark.parametrize("caching", [True, False], ids=["cache", "nocache"])
@pytest.mark.parametrize("bs", [1, 4, 16])
@pytest.mark.parametrize("host_tokens", [0, 240])
def test_swapped_equals_alone_in_64_bits(host_tokens: int, bs: int, caching: bool) -> None:
    """Chunked prompts too, and nothing that was not copied reaches a result: it is NaN."""
    limits = swap(host_tokens // bs, pool=48 // bs, bs=bs, budget=8, seqs=6, prefix=caching)
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = [tokens(5 + index, index // 2) for index in range(6)]
    model = tiny_model()

    def serve(limits: SchedulerConfig, prompts: list[tuple[int, ...]]) -> tuple[Engine, list[tuple[int, ...]]]:
        executor = ModelExecutor(model, limits.num_blocks, bs, limits.num_host_blocks)
        executor.cache.data.fill_(torch.nan)
        executor.host.data.fill_(torch.nan)
        engine = Engine(executor, limits)
        return engine, [done.token_ids for done in engine.generate(prompts, sampling)]

    engine, together = serve(limits, prompts)
    assert together == [serve(limits, [prompt])[1][0] for prompt in prompts]
    out, back, full = swapped(engine.trace)
    assert out == back
    assert (out > 0, full > 0) == ((True, False) if host_tokens else (False, True))
