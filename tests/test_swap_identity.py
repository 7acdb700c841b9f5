"""Swap and recomputation change no token: mixed requests on the embedded model in fp32, in pools that are too small."""

from __future__ import annotations

import pytest

from contbatch import Engine, SamplingParams, summarise
from tests.test_token_identity import Asked

LIMITS = {
    "max_num_seqs": 20,
    "max_num_batched_tokens": 64,
    "max_model_len": 110,
    "block_size": 8,
    "num_blocks": 15,
    "scheduler_reserve_full_isl": False,
}
SAMPLING = SamplingParams(max_tokens=32, ignore_eos=True)


@pytest.fixture(scope="module")
def requests() -> list[Asked]:
    """48 requests that all want to run at once; every third begins like the one before it."""
    prompts = [tuple((7 * index + 3 * place) % 900 + 20 for place in range(6 + index)) for index in range(48)]
    for index in range(2, 48, 3):
        prompts[index] = prompts[index - 1] + prompts[index][:4]
    return [Asked(prompt, 32) for prompt in prompts]


@pytest.fixture(scope="module")
def alone(requests: list[Asked]) -> list[tuple[int, ...]]:
    """One by one."""
    engine = Engine.load("pocket", max_num_seqs=1, enable_prefix_caching=False)
    return [engine.generate([asked.prompt], SAMPLING)[0].token_ids for asked in requests]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("mode", "host"), [("recompute", 0), ("swap", 200), ("swap", 6)])
def test_fifty_preemptions_change_no_token(
    requests: list[Asked], alone: list[tuple[int, ...]], mode: str, host: int, caching: bool
) -> None:
    engine = Engine.load("pocket", preemption_mode=mode, num_host_blocks=host, enable_prefix_caching=caching, **LIMITS)
    done = engine.generate([asked.prompt for asked in requests], SAMPLING)
    assert [completion.token_ids for completion in done] == alone
    metrics = summarise(engine.trace)
    swapped = sum(len(step.swapped_out) for step in engine.trace.steps)
    assert metrics.preemptions >= 50
    assert swapped == {0: 0, 200: metrics.preemptions}.get(host, swapped) and (
        host != 6 or 0 < swapped < metrics.preemptions
    )
    assert (metrics.recomputed_tokens == 0) is (host == 200)
    assert engine.scheduler.host.num_used == engine.scheduler.pool.num_used == 0
