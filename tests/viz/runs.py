"""Runs to draw: one small enough to check by hand, and real ones of the engine with made-up tokens."""

from __future__ import annotations

import random
from typing import Any

from contbatch.config import SchedulerConfig
from contbatch.engine import Engine
from contbatch.executor import ScriptedExecutor
from contbatch.request import SamplingParams
from contbatch.trace import Blocked, FinishRecord, RequestRecord, StepRecord, Trace

MARKUP = '</script><img src=x onerror="window.hacked = 1"> & <b>bold</b>'


def hand_trace() -> Trace:
    """Three requests, four blocks of four tokens, a budget of eight; b makes room for a in step 3."""
    config = {"max_num_batched_tokens": 8, "block_size": 4, "num_blocks": 4, "enable_prefix_caching": True}
    short = Blocked("blocks", 3, 0)
    steps = [
        _step(0, [("a", 0, 6, "P"), ("b", 0, 2, "P")], "a", 1, admitted=["a", "b"], new_blocks={"a": [1, 2], "b": [3]}),
        _step(1, [("a", 6, 1, "D"), ("b", 2, 3, "P")], "ab", 0, new_blocks={"b": [4]}, reasons={"c": short}),
        _step(2, [("a", 7, 1, "D"), ("b", 5, 1, "D")], "ab", 0, reasons={"c": short}),
        _step(
            3,
            [("a", 8, 1, "D")],
            "a",
            1,
            preempted=["b"],
            new_blocks={"a": [4]},
            reasons={"b": Blocked("policy", 7, 7)},
            cached_blocks=1,
            finished={"a": "length"},
        ),
        _step(
            4,
            [("b", 4, 3, "R")],
            "b",
            2,
            resumed=["b"],
            cached={"b": 4},
            new_blocks={"b": [3, 4]},
            reasons={"c": Blocked("blocks", 3, 2)},
            cached_blocks=2,
        ),
        _step(5, [("b", 7, 1, "D")], "b", 2, cached_blocks=2, finished={"b": "length"}),
        _step(6, [("c", 0, 8, "P")], "", 2, admitted=["c"], new_blocks={"c": [2, 1]}, cached_blocks=2),
        _step(7, [("c", 8, 1, "P")], "c", 1, new_blocks={"c": [4]}, cached_blocks=1),
        _step(8, [("c", 9, 1, "D")], "c", 1, cached_blocks=1, finished={"c": "length"}),
    ]
    requests = [("a", 6, 4, 0, "first"), ("b", 5, 4, 0, MARKUP), ("c", 9, 2, 1, None)]
    return Trace(
        policy="VllmV1",
        config=config,
        requests={i: RequestRecord(i, n, most, 2, known, 0.0, prompt) for i, n, most, known, prompt in requests},
        steps=steps,
        finished={
            i: FinishRecord("length", step, 0.0, count, MARKUP if i == "b" else "")
            for i, step, count in (("a", 4, 4), ("b", 6, 4), ("c", 9, 2))
        },
    )


def _step(number: int, grants: list[tuple[str, int, int, str]], sampled: str, free: int, **more: Any) -> StepRecord:
    ids = {"a", "b"} if number < 3 else {grants[0][0]}
    return StepRecord(
        step=number,
        request_ids=[grant[0] for grant in grants],
        starts=[grant[1] for grant in grants],
        counts=[grant[2] for grant in grants],
        kinds="".join(grant[3] for grant in grants),
        sampled=dict.fromkeys(sampled, 1000 + number),
        budget=8,
        free_blocks=free,
        num_running=len(ids),
        num_waiting=(0, 1, 1, 2, 1, 1, 0, 0, 0)[number],
        **more,
    )


def engine_run(
    num_requests: int = 8,
    seed: int = 0,
    prompts: tuple[int, int] = (4, 28),
    outputs: tuple[int, int] = (2, 20),
    over_steps: int = 12,
    policy: Any = "VllmV1",
    **config: Any,
) -> Trace:
    """A seeded run; every third prompt begins with the same sixteen tokens."""
    rng = random.Random(seed)
    limits = {"num_blocks": 24, "block_size": 4, "max_num_batched_tokens": 24, "max_num_seqs": 6, **config}
    engine = Engine(ScriptedExecutor(), SchedulerConfig(**limits), policy=policy, clock=lambda: 0.0)
    shared = [rng.randrange(90) for _ in range(16)]
    arrivals = sorted(rng.randrange(over_steps) for _ in range(num_requests))
    step = 0
    while arrivals or engine.has_unfinished:
        while arrivals and arrivals[0] <= step:
            arrivals.pop(0)
            prompt = [rng.randrange(90) for _ in range(rng.randint(*prompts))]
            prompt = shared + prompt if len(engine.trace.requests) % 3 == 2 else prompt
            engine.add_request(prompt, SamplingParams(max_tokens=rng.randint(*outputs)), priority=rng.randrange(3))
        engine.step()
        step += 1
    return engine.trace


def large_run() -> Trace:
    """About 500 steps of 64 requests, with preemptions: the size that the player must show in time."""
    return engine_run(
        64,
        prompts=(20, 120),
        outputs=(40, 140),
        over_steps=200,
        num_blocks=120,
        block_size=16,
        max_num_batched_tokens=64,
        max_num_seqs=16,
    )
