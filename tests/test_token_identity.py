"""Batching changes no token: 64 mixed requests, together and one by one, on the embedded model in fp32."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from contbatch import Engine, SamplingParams, Trace
from contbatch.prompts import EXAMPLE_PROMPTS

MAX_LEN = 264
ROOMY = 64 * MAX_LEN
TIGHT = {16: 528, 64: 800, 512: 336}
"""For each budget, the tokens that a pool must hold so that it is too small at least 20 times."""


@dataclass(frozen=True)
class Asked:
    """One request of the workload."""

    prompt: tuple[int, ...]
    max_tokens: int


@pytest.fixture(scope="module")
def requests() -> list[Asked]:
    """64 requests: prompts of 1 to 200 tokens cut from English text, outputs of 1 to 64 tokens."""
    chance = random.Random(4)
    tokenizer = Engine.load("pocket").tokenizer
    assert tokenizer is not None
    text = tokenizer.encode(" ".join(EXAMPLE_PROMPTS) * 4)
    lengths = [1, 200, *(chance.randint(1, 200) for _ in range(62))]
    starts = [chance.randrange(len(text) - 200) for _ in lengths]
    prompts = [tuple(text[start : start + length]) for start, length in zip(starts, lengths, strict=True)]
    # Every fourth prompt begins like the one before it, so that there are prefixes to share.
    for index in range(3, 64, 4):
        prompts[index] = (prompts[index - 1] + prompts[index])[:200]
    return [Asked(prompt, chance.randint(1, 64)) for prompt in prompts]


@pytest.fixture(scope="module")
def alone(requests: list[Asked]) -> list[tuple[int, ...]]:
    """The tokens of each request when it is the only one the engine ever sees."""
    engine = Engine.load("pocket", max_num_seqs=1, max_num_batched_tokens=512, enable_prefix_caching=False)
    return [
        engine.generate([asked.prompt], SamplingParams(max_tokens=asked.max_tokens, ignore_eos=True))[0].token_ids
        for asked in requests
    ]


def together(requests: list[Asked], **limits: object) -> tuple[list[tuple[int, ...]], Trace]:
    """The tokens of all requests when they are added at once."""
    engine = Engine.load("pocket", max_model_len=MAX_LEN, **limits)
    sampling = [SamplingParams(max_tokens=asked.max_tokens, ignore_eos=True) for asked in requests]
    done = engine.generate([asked.prompt for asked in requests], sampling)
    engine.scheduler.check()
    assert engine.scheduler.pool.num_used == 0
    return [completion.token_ids for completion in done], engine.trace


def grid() -> Iterator[object]:
    """Budget, chunking, block size, pool and prefix cache; chunking can be off only where a prompt fits."""
    for budget, block_size, tight, caching in itertools.product(TIGHT, (4, 16), (False, True), (False, True)):
        for chunked in (True, False) if budget == 512 else (True,):
            name = f"budget{budget}-block{block_size}-{'tight' if tight else 'roomy'}"
            name += f"-{'cache' if caching else 'nocache'}{'' if chunked else '-whole'}"
            yield pytest.param(budget, block_size, tight, caching, chunked, id=name)


@pytest.mark.parametrize(("budget", "block_size", "tight", "caching", "chunked"), list(grid()))
def test_batched_equals_alone(
    requests: list[Asked],
    alone: list[tuple[int, ...]],
    budget: int,
    block_size: int,
    tight: bool,
    caching: bool,
    chunked: bool,
) -> None:
    """Rule 7, token for token; a tight pool forces at least 20 preemptions."""
    tokens, trace = together(
        requests,
        max_num_seqs=64 if tight else 16,
        max_num_batched_tokens=budget,
        block_size=block_size,
        num_blocks=(TIGHT[budget] if tight else ROOMY) // block_size,
        enable_prefix_caching=caching,
        enable_chunked_prefill=chunked,
        scheduler_reserve_full_isl=not tight,
    )
    assert tokens == alone
    if tight:
        assert sum(len(step.preempted) for step in trace.steps) >= 20
