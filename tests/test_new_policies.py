"""What each policy promises beyond the rules that hold for all of them.

The recorded decisions prove the engines' policies where an engine was run; here is what those runs never reach (a
budget of cache reads that binds, a margin, an abort while nobody new is let in), and the promises of the policies
that no engine recorded: who is next, who may be sent away, and for how long anybody can be kept waiting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contbatch.blocks import blocks_needed
from contbatch.errors import InvalidConfig, PolicyError
from contbatch.plan import IterationPlan
from contbatch.policies import (
    AgedPriority,
    FairShare,
    HfFifo,
    HfPrefillFirst,
    Orca,
    PeakMemory,
    SarathiServe,
    ShortestJobFirst,
    VllmV1,
)
from contbatch.policy import Policy
from contbatch.request import Priority, Request, RunningRequest
from tests.toy import Bench, config, granted, params

HF: list[type[HfFifo]] = [HfFifo, HfPrefillFirst]


def kinds(plan: IterationPlan) -> Iterator[tuple[RunningRequest, int, str]]:
    """Each grant of a plan: whose, how many tokens, and D for a decode."""
    assert plan.grants is not None
    return zip(plan.grants.requests, plan.grants.counts, plan.grants.kinds, strict=True)


def first_admissions(bench: Bench) -> list[str]:
    """Ids in the order in which they were first let in."""
    return [name for plan in bench.plans for name in plan.admitted]


def preemptions(bench: Bench) -> int:
    """How often anybody was sent back."""
    return sum(len(plan.evicted_requests) for plan in bench.plans)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HfFifo(1.0), r"safety_margin is 1\.0; use a share of the pool in \[0, 1\)"),
        (lambda: HfFifo(-0.1), r"safety_margin is -0\.1"),
        (lambda: HfPrefillFirst(float("nan")), "safety_margin is nan"),
        (lambda: HfFifo(True), "safety_margin is True"),
        (lambda: HfFifo("much"), "safety_margin is 'much'"),  # type: ignore[arg-type]
        (lambda: SarathiServe(watermark=1), "watermark is 1"),
        (lambda: Orca("oracle"), 'reserve is \'oracle\'; use "max_model_len" or "max_tokens"'),
        (lambda: ShortestJobFirst(aging=-1), "aging is -1; use a number of at least 0"),
        (lambda: ShortestJobFirst(aging=float("inf")), "aging is inf"),
        (lambda: AgedPriority(0), r"aging is 0, with which waits have no bound; use more, or VllmV1"),
        (lambda: AgedPriority(float("nan")), "aging is nan"),
        (lambda: AgedPriority(-0.5), r"aging is -0\.5"),
        (lambda: FairShare(-1), "weight is -1"),
        (lambda: FairShare("2"), "weight is '2'"),  # type: ignore[arg-type]
        (lambda: FairShare(True), "weight is True"),
    ],
)
def test_a_setting_out_of_range_is_named(make: Callable[[], Policy], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        make()


# HfFifo, HfPrefillFirst: order and margin


def test_hf_fifo_serves_decodes_first_and_prefill_first_prefills() -> None:
    for policy, first_step in ((HfFifo(), {"d": 1, "p": 7}), (HfPrefillFirst(), {"p": 8})):
        bench = Bench(config(budget=8), policy)
        bench.add("d", 2, max_tokens=20)
        bench.step()
        bench.add("p", 40, max_tokens=1)
        bench.step()
        assert bench["p"].is_prefilling
        assert bench.step() == first_step
        bench.drain()


def with_little_free(policy: HfFifo) -> Bench:
    """A pool of 20 blocks; one request decodes and holds 17 of them, and a small one waits."""
    bench = Bench(config(pool=20, bs=4, budget=100, prefix=False, mml=100), policy)
    bench.add("large", 65, max_tokens=4)
    bench.step()
    bench.add("small", 4, max_tokens=2)
    assert bench.scheduler.pool.num_free == 3
    return bench


@pytest.mark.parametrize(
    ("policy", "joins"),
    [
        (HfFifo(), True),  # 0.15 of 20 blocks are 3, and 3 are free
        (HfFifo(0.16), False),
        (HfFifo(0.9), False),
        (HfPrefillFirst(), True),
        (HfPrefillFirst(0.16), False),
    ],
)
def test_hf_below_the_margin_only_decodes_join_a_batch(policy: HfFifo, joins: bool) -> None:
    bench = with_little_free(policy)
    assert ("small" in bench.step()) == joins
    order = first_admissions(bench)
    bench.drain()
    assert order == (["large", "small"] if joins else ["large"])


@pytest.mark.parametrize("policy", HF)
def test_hf_the_margin_is_for_a_batch_that_has_somebody(policy: type[HfFifo]) -> None:
    """The first request of a step is served however little is free, or nobody might ever be."""
    bench = Bench(config(pool=20, bs=4, budget=16, prefix=False, mml=100), policy(safety_margin=0.9))
    bench.add("a", 70, max_tokens=2)
    assert [sum(step.values()) for step in bench.drain()] == [16, 16, 16, 16, 6, 1]


@pytest.mark.parametrize("policy", HF)
def test_hf_below_the_margin_all_decodes_are_served(policy: type[HfFifo]) -> None:
    bench = Bench(config(pool=20, bs=4, budget=100, prefix=False, mml=100), policy(safety_margin=0.9))
    bench.add("a", 4, max_tokens=5)
    bench.step()
    bench.add("b", 4, max_tokens=5)
    assert list(bench.step()) == ["a", "b"]
    assert bench.step() == {"a": 1, "b": 1} and bench.scheduler.pool.num_free == 16
    assert bench.step() == {"a": 1, "b": 1}


def test_hf_below_the_margin_an_ongoing_prefill_waits_too() -> None:
    bench = Bench(config(pool=20, bs=4, budget=16, prefix=False, mml=100), HfFifo(safety_margin=0.8))
    bench.add("decodes", 4, max_tokens=3)
    bench.add("long", 60, max_tokens=2)
    assert bench.step() == {"decodes": 4, "long": 12}, "all is free when the step begins"
    assert bench.scheduler.pool.num_free == 16
    assert bench.step() == {"decodes": 1, "long": 15}, "16 of 20 are just enough"
    assert bench.step() == {"decodes": 1}
    assert bench.step() == {"long": 16}, "alone it goes on"


# HfFifo, HfPrefillFirst: the budget of cache reads


def readers(policy: type[HfFifo], lengths: Sequence[int], **limits: Any) -> Bench:
    """Requests whose first 16 tokens are the same ones and share 4 of 10 blocks of 4: together they can have read
    more tokens than the 40 that the pool holds. All of them decode."""
    bench = Bench(config(pool=10, bs=4, **limits), policy(safety_margin=0.0))
    for index, length in enumerate(lengths):
        tail = [100 * (index + 1) + place for place in range(length - 16)]
        tokens = [*range(16), *tail] if tail else [900 + index * 10 + place for place in range(length)]
        bench.add(f"r{index}", tokens, max_tokens=4)
    assert len(bench.step()) == len(lengths)
    return bench


@pytest.mark.parametrize("policy", HF)
def test_hf_a_step_reads_no_more_cached_tokens_than_the_pool_holds(policy: type[HfFifo]) -> None:
    """17 + 17 leave 6 of 40: the third is skipped, though it has its block, and a later one of 3 is served."""
    bench = readers(policy, [17, 17, 17, 3])
    plan = bench.plan()
    assert granted(plan) == {"r0": 1, "r1": 1, "r3": 1}
    assert plan.blocked["r2"] == ("budget", 17, 6) and not plan.evicted_requests
    bench.commit(plan)
    bench.drain()
    assert preemptions(bench) == 0, "who is skipped for its reads is not starved of blocks and is not sent away"


@pytest.mark.parametrize("policy", HF)
@pytest.mark.parametrize(("third", "served"), [(6, True), (7, False)])
def test_hf_the_last_cached_token_may_be_read(policy: type[HfFifo], third: int, served: bool) -> None:
    bench = readers(policy, [17, 17, third])
    assert ("r2" in bench.step()) == served


@pytest.mark.parametrize("policy", HF)
def test_hf_without_reads_left_nobody_new_is_let_in(policy: type[HfFifo]) -> None:
    """A new request reads nothing, but the step ends where the budget of reads is used up."""
    bench = readers(policy, [20, 20])
    bench.add("new", 2, max_tokens=1)
    assert bench.step() == {"r0": 1, "r1": 1} and bench.scheduler.pool.num_free >= 2
    bench.drain()
    bench = readers(policy, [20, 19])
    bench.add("new", 2, max_tokens=1)
    assert bench.step() == {"r0": 1, "r1": 1, "new": 2}


@given(
    policy=st.sampled_from(HF),
    pool=st.integers(8, 14),
    work=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(1, 6)), min_size=2, max_size=8),
)
@settings(max_examples=60)
def test_hf_reads_stay_within_the_pool(policy: type[HfFifo], pool: int, work: list[tuple[int, int, int]]) -> None:
    bench = Bench(config(pool=pool, bs=2, seqs=6), policy())
    for index, (blocks, tail, max_tokens) in enumerate(work):
        bench.add(f"r{index}", [*range(4 * blocks), *range(50 * index + 50, 50 * index + 51 + tail)], max_tokens)
        bench.step()
    bench.drain()
    for plan in bench.plans:
        assert plan.grants is not None
        rows = zip(plan.grants.requests, plan.grants.starts, strict=True)
        reads = [start for request, start in rows if request.request_id not in (*plan.admitted, *plan.resumed)]
        assert sum(reads) <= pool * 2


# HfFifo, HfPrefillFirst: who starves


@pytest.mark.parametrize("policy", HF)
def test_hf_the_starved_go_to_the_back_newest_first_until_the_rest_fit(policy: type[HfFifo]) -> None:
    """Six of one full block each need one more, two are free: r2 to r5 starve, and r4 and r5 make room for r2, r3."""
    bench = Bench(config(pool=8, bs=4, seqs=6, prefix=False), policy(safety_margin=0.0))
    for index in range(6):
        bench.add(f"r{index}", 4, max_tokens=6)
    bench.step()
    for name in "xy":
        bench.add(name, 4, max_tokens=2)
    plan = bench.plan()
    assert granted(plan) == {"r0": 1, "r1": 1}, "those for whom there is room are served in the same step"
    assert plan.evicted_requests == ("r4", "r5") and bench.waiting == ["x", "y", "r4", "r5"], "in their old order"
    assert plan.blocked["r2"] == ("blocks", 1, 0)
    bench.commit(plan)
    assert bench.step() == {"r0": 1, "r1": 1, "r2": 1, "r3": 1}
    bench.drain()
    assert first_admissions(bench)[-2:] == ["x", "y"]


@pytest.mark.parametrize("policy", HF)
def test_hf_who_starves_may_be_the_oldest(policy: type[HfFifo]) -> None:
    """Victims are taken from the starved alone: the oldest, at a block boundary, goes though others are newer."""
    bench = Bench(config(pool=6, bs=4, prefix=False), policy(safety_margin=0.0))
    bench.add("old", 8, max_tokens=6)
    bench.add("new", 13, max_tokens=3)
    bench.step()
    plan = bench.plan()
    assert granted(plan) == {"new": 1} and plan.evicted_requests == ("old",)
    bench.commit(plan)
    bench.drain()


@pytest.mark.parametrize("policy", HF)
def test_hf_room_is_made_at_once_if_nobody_could_be_served(policy: type[HfFifo]) -> None:
    bench = Bench(config(pool=3, bs=4, prefix=False), policy(safety_margin=0.0))
    for name in "abc":
        bench.add(name, 4, max_tokens=3)
    bench.step()
    plan = bench.plan()
    assert granted(plan) == {"a": 1} and set(plan.evicted_requests) == {"b", "c"} - set(bench.running)
    bench.commit(plan)
    assert all(bench.drain()), "no idle step"


def closed_door(policy: type[HfFifo]) -> Bench:
    """After "big" was sent away nobody new is let in, though "next", the head of the queue, would fit."""
    bench = Bench(config(pool=7, bs=4, prefix=False), policy(safety_margin=0.0))
    for name, length in (("r0", 4), ("r1", 4), ("big", 16)):
        bench.add(name, length, max_tokens=4)
    bench.step()
    bench.add("next", 4, max_tokens=2)
    plan = bench.plan()
    assert plan.evicted_requests == ("big",) and bench.waiting == ["next", "big"]
    bench.commit(plan)
    assert bench.step() == {"r0": 1, "r1": 1} and bench.scheduler.pool.num_free == 3
    return bench


@pytest.mark.parametrize("policy", HF)
def test_hf_nobody_new_until_one_finishes(policy: type[HfFifo]) -> None:
    bench = closed_door(policy)
    assert bench.step() == {"r0": 1, "r1": 1} and bench.running == ["r1"], "r0 has finished"
    assert list(bench.step()) == ["r1", "next"]
    bench.drain()


@pytest.mark.parametrize("policy", HF)
@pytest.mark.parametrize("gone", [["r0", "r1"], ["r1", "r0"], ["r1"], ["big"]])
def test_hf_an_abort_lets_new_ones_in_again(policy: type[HfFifo], gone: list[str]) -> None:
    """Also of the last running ones, or the queue would wait for ever."""
    bench = closed_door(policy)
    for name in gone:
        assert bench.scheduler.abort(name)
    assert "next" in bench.step()
    bench.drain()


# Orca


def test_orca_holds_the_longest_sequence_that_a_request_could_become() -> None:
    bench = Bench(config(pool=20, bs=4, mml=30, prefix=False), Orca())
    bench.add("a", 5, max_tokens=2)
    plan = bench.plan()
    assert len(bench["a"].block_table) == 8, "30 tokens, whatever it asked for"
    bench.commit(plan)
    bench.drain()
    bench = Bench(config(pool=20, bs=4, mml=30, prefix=False), Orca("max_tokens"))
    for name, length, max_tokens in (("a", 5, 4), ("b", 5, 5), ("c", 1, 1)):
        bench.add(name, length, max_tokens)
    bench.commit(bench.plan())
    assert [len(table) for table in bench.plans[0].new_blocks.values()] == [2, 3, 1], "the last token is never written"
    bench.drain()


def test_orca_reserves_no_more_than_the_whole_pool() -> None:
    """Otherwise with max_model_len beyond the pool nobody could ever be let in."""
    bench = Bench(config(pool=6, bs=4, mml=1000), Orca())
    for name in "ab":
        bench.add(name, 5, max_tokens=3)
    assert [len(step) for step in bench.drain()] == [1] * 6, "one at a time"


def test_orca_is_first_come_first_served_and_nobody_passes_the_head() -> None:
    bench = Bench(config(pool=10, bs=4, prefix=False), Orca("max_tokens"))
    bench.add("R", 12, max_tokens=9)
    bench.step()
    bench.add("head", 20, max_tokens=5)
    bench.add("small", 2, max_tokens=2)
    plan = bench.plan()
    assert granted(plan) == {"R": 1} and plan.blocked["head"] == ("blocks", 6, 5)
    bench.commit(plan)
    bench.drain()
    assert first_admissions(bench) == ["R", "head", "small"]


@given(
    reserve=st.sampled_from(["max_model_len", "max_tokens"]),
    pool=st.integers(8, 24),
    prefix=st.booleans(),
    work=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 8), st.integers(1, 9)), min_size=1, max_size=10),
)
@settings(max_examples=60)
def test_orca_serves_everybody_in_every_step_and_preempts_nobody(
    reserve: str, pool: int, prefix: bool, work: list[tuple[int, int, int]]
) -> None:
    """Whole prompts whatever the budget, all memory at admission, one token for each running request in each step."""
    bench = Bench(config(pool=pool, bs=3, budget=1, seqs=5, mml=24, prefix=prefix), Orca(reserve))
    for index, (shared, tail, max_tokens) in enumerate(work):
        bench.add(f"r{index}", [*range(3 * shared), *range(50 * index + 50, 50 * index + 50 + tail)], max_tokens)
    while bench.scheduler.has_unfinished:
        running = list(bench.running)
        plan = bench.plan()
        assert plan.token_budget is None and not plan.evicted_requests
        assert list(granted(plan))[: len(running)] == running and set(plan.new_blocks) <= set(plan.admitted)
        for request, _, kind in kinds(plan):
            assert (kind == "D") == (request.request_id in running) and request.owed == 0
        bench.commit(plan)


# PeakMemory


def halfway(length: int, outputs: int, max_tokens: int, name: str = "r") -> RunningRequest:
    """A request that has generated some tokens."""
    record = RunningRequest(Request(name, range(length), params(max_tokens)), 0, max_tokens)
    record.token_ids += [7] * outputs
    return record


def true_peak(requests: Sequence[RunningRequest], size: int) -> int:
    """Most blocks held at once when all of them go on a token a step to their ends, played step by step."""
    peaks = [0]
    for step in range(max((r.max_total_tokens - len(r.token_ids) for r in requests), default=0)):
        alive = [r for r in requests if r.max_total_tokens - len(r.token_ids) > step]
        peaks.append(sum(blocks_needed(len(r.token_ids) + step, size) for r in alive))
    return max(peaks)


ALIVE = st.lists(
    st.tuples(st.integers(1, 20), st.integers(0, 6), st.integers(1, 15)).map(
        lambda sizes: halfway(sizes[0], sizes[1], sizes[1] + sizes[2])
    ),
    max_size=7,
)


@given(requests=ALIVE, size=st.sampled_from([1, 2, 3, 4, 16]))
@settings(max_examples=200)
def test_the_predicted_peak_is_never_below_the_true_one_and_at_most_a_block_each_above(
    requests: list[RunningRequest], size: int
) -> None:
    predicted, true = PeakMemory.peak_blocks(requests, size), true_peak(requests, size)
    assert true <= predicted <= true + len(requests)
    assert size > 1 or predicted == true, "only rounding makes a difference"
    assert predicted == PeakMemory.peak_blocks(reversed(requests), size), "the order of asking does not matter"


@given(
    pool=st.integers(8, 30),
    bs=st.sampled_from([1, 2, 4]),
    prefix=st.booleans(),
    work=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=14),
)
@settings(max_examples=80)
def test_peak_memory_preempts_nobody_where_all_decode_in_every_step(
    pool: int, bs: int, prefix: bool, work: list[tuple[int, int, int]]
) -> None:
    """Requests come at any time and run to max_tokens; the budget never cuts a prompt."""
    bench = Bench(config(pool=pool * 4 // bs, bs=bs, budget=500, seqs=6, prefix=prefix), PeakMemory())
    for index, (pause, length, max_tokens) in enumerate(work):
        bench.steps(pause)
        bench.add(f"r{index}", length, max_tokens)
    bench.drain()
    assert preemptions(bench) == 0 and len(first_admissions(bench)) == len(work)


def test_peak_memory_runs_more_at_once_than_a_reserve_and_preempts_nobody() -> None:
    """One grows slowly to 5 blocks, the other holds 5 but is gone in two steps: at no time do they need ten."""
    steps = {}
    for policy in (PeakMemory(), Orca("max_tokens"), VllmV1()):
        bench = Bench(config(pool=8, bs=4, prefix=False), policy)
        bench.add("grows", 4, max_tokens=16)
        bench.add("short", 16, max_tokens=2)
        bench.step()
        together = len(bench.running)
        bench.drain()
        steps[policy.name] = (together, len(bench.plans), preemptions(bench))
    assert steps == {"PeakMemory": (2, 16, 0), "Orca": (1, 18, 0), "VllmV1": (2, 16, 0)}


def test_peak_memory_waits_where_taking_memory_on_demand_preempts() -> None:
    outcome = {}
    for policy in (PeakMemory(), VllmV1()):
        bench = Bench(config(pool=8, bs=4, prefix=False), policy)
        for name in "abc":
            bench.add(name, 8, max_tokens=9)
        plan = bench.plan()
        bench.commit(plan)
        outcome[policy.name] = len(plan.admitted)
        bench.drain()
        assert (preemptions(bench) == 0) == (policy.name == "PeakMemory")
        if policy.name == "PeakMemory":
            assert plan.blocked["c"] == ("blocks", 12, 8), "the peak of all three, and the pool"
    assert outcome == {"PeakMemory": 2, "VllmV1": 3}


def test_peak_memory_an_early_end_makes_room_at_once() -> None:
    bench = Bench(config(pool=8, bs=4, prefix=False), PeakMemory(), eos=[5])
    bench.add("a", 8, max_tokens=20)
    bench.add("b", 8, max_tokens=20)
    assert list(bench.step(token=5)) == ["a"] and not bench.running, "a ended by itself"
    assert list(bench.step()) == ["b"]
    bench.drain()


# ShortestJobFirst


def test_shortest_job_first_goes_by_prompt_and_output_and_keeps_the_order_of_equals() -> None:
    bench = Bench(config(seqs=1, prefix=False), ShortestJobFirst())
    sizes = {"a": (9, 4), "b": (2, 9), "c": (10, 1), "d": (3, 3), "e": (1, 12), "f": (5, 1)}
    for name, (length, max_tokens) in sizes.items():
        bench.add(name, length, max_tokens)
    bench.drain()
    assert first_admissions(bench) == ["d", "f", "b", "c", "a", "e"], "6, 6, 11, 11, 13, 13"


def test_shortest_job_first_can_be_told_what_will_be_generated() -> None:
    lengths = {"a": 1, "b": 7, "c": 3}
    bench = Bench(config(seqs=1), ShortestJobFirst(length=lambda request: lengths[request.request_id]))
    for name in "abc":
        bench.add(name, 4, max_tokens=5)
    bench.drain()
    assert first_admissions(bench) == ["a", "c", "b"]


def test_shortest_job_first_names_the_request_that_its_oracle_does_not_know() -> None:
    bench = Bench(config(seqs=1), ShortestJobFirst(length=lambda request: {"a": 2}[request.request_id]))
    bench.add("a", 4)
    with pytest.raises(PolicyError, match=r"ShortestJobFirst raised KeyError\('b'\) for request 'b', .*not added"):
        bench.add("b", 4)
    bench.drain()


def test_shortest_job_first_an_oracle_that_was_wrong_counts_no_less_than_nothing() -> None:
    """A request that generates more than was told owes the tokens it has, and nothing is taken off for the excess."""
    policy = ShortestJobFirst(length=lambda request: 2)
    bench = Bench(config(pool=9, bs=4, prefix=False, seqs=3), policy)
    for name in "abc":
        bench.add(name, 7, max_tokens=16)
    bench.until(lambda: bool(preemptions(bench)))
    (name, *_) = bench.plans[-1].evicted_requests
    assert bench[name].num_output_tokens > 2
    assert policy._work(bench[name]) == (len(bench[name].token_ids),)
    bench.drain()


TRAFFIC = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 10), st.integers(1, 8), st.sampled_from(list(Priority))),
    min_size=2,
    max_size=18,
)
"""(steps before it arrives, prompt, max_tokens, priority) for each request."""


def play(bench: Bench, traffic: Sequence[tuple[int, int, int, int]]) -> list[RunningRequest]:
    """Requests arrive at their steps and all are served; checks that running ones keep their order."""
    requests = []
    for index, (pause, length, max_tokens, priority) in enumerate(traffic):
        bench.steps(pause)
        requests.append(bench.add(f"r{index}", length, max_tokens, priority))
    while bench.scheduler.has_unfinished:
        running = list(bench.running)
        served = [name for name in bench.step() if name in running]
        assert served == [name for name in running if name in served], "in the order of their admission"
    return requests


@given(
    traffic=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 20), st.integers(1, 6), st.just(0)), min_size=10, max_size=20
    ),
    aging=st.sampled_from([1.0, 2.0, 4.0, 7.3]),
    pool=st.integers(7, 20),
    seqs=st.integers(1, 2),
    budget=st.integers(2, 20),
)
@settings(max_examples=60)
def test_shortest_job_first_the_bound_of_aging(
    traffic: list[tuple[int, int, int, int]], aging: float, pool: int, seqs: int, budget: int
) -> None:
    """Nobody who arrives more than size / aging steps after a request is admitted before it."""
    limits = config(pool=pool, bs=4, seqs=seqs, budget=budget, prefix=False)
    bench = Bench(limits, ShortestJobFirst(aging=aging))
    requests = play(bench, traffic)
    place = {name: index for index, name in enumerate(first_admissions(bench))}
    for first in requests:
        for later in requests:
            if later.arrival_step > first.arrival_step + first.max_total_tokens / aging:
                assert place[later.request_id] > place[first.request_id]


def test_shortest_job_first_never_sends_a_running_one_away_for_a_shorter_one() -> None:
    bench = Bench(config(seqs=1), ShortestJobFirst())
    bench.add("long", 30, max_tokens=10)
    bench.step()
    bench.add("short", 1, max_tokens=1)
    bench.drain()
    assert preemptions(bench) == 0 and list(granted(bench.plans[-1])) == ["short"]


# AgedPriority


def test_aged_priority_preempts_only_for_a_strictly_more_urgent_one() -> None:
    """One seat, aging 0.25: what arrives 4 steps later and is one more urgent is exactly as urgent."""
    for steps, goes in ((3, True), (4, False), (5, False)):
        bench = Bench(config(seqs=1), AgedPriority(aging=0.25))
        bench.add("runs", 4, max_tokens=20, priority=1)
        bench.steps(steps)
        bench.add("new", 4, max_tokens=2, priority=0)
        plan = bench.plan()
        assert plan.evicted_requests == (("runs",) if goes else ())
        assert list(granted(plan)) == (["new"] if goes else ["runs"]), "at once"
        bench.commit(plan)
        bench.drain()


def test_aged_priority_sends_nobody_away_for_a_seat_that_stays_taken() -> None:
    """The seats of equals cannot be had, and blocks alone would not help."""
    bench = Bench(config(pool=6, bs=4, seqs=2, prefix=False), AgedPriority())
    for name in "ab":
        bench.add(name, 4, max_tokens=9, priority=0)
    bench.step()
    bench.add("c", 4, max_tokens=2, priority=0)
    bench.add("low", 4, max_tokens=2, priority=3)
    bench.drain()
    assert preemptions(bench) == 0 and first_admissions(bench) == ["a", "b", "c", "low"]


def test_aged_priority_the_least_urgent_goes_first_and_of_equals_the_newest() -> None:
    bench = Bench(config(seqs=4), AgedPriority())
    for name, priority in (("a", 1), ("b", 3), ("c", 3), ("d", 2)):
        bench.add(name, 4, max_tokens=12, priority=priority)
    bench.step()
    victims: list[str] = []
    for index in range(3):
        bench.add(f"urgent{index}", 4, max_tokens=30, priority=-50)
        victims += bench.plan().evicted_requests
        bench.commit(bench.plans[-1])
    assert victims == ["c", "b", "d"]
    bench.drain()


def test_aged_priority_when_blocks_run_out_the_least_urgent_goes() -> None:
    bench = Bench(config(pool=8, bs=4, prefix=False), AgedPriority())
    for name, priority in (("low", 3), ("high", 1), ("critical", 0)):
        bench.add(name, 5, max_tokens=9, priority=priority)
        bench.step()
    assert bench.running == ["low", "high", "critical"]
    bench.until(lambda: bool(preemptions(bench)))
    assert bench.plans[-1].evicted_requests == ("low",), "though it is the oldest"
    bench.drain()


@given(
    traffic=TRAFFIC,
    aging=st.sampled_from([0.125, 0.25, 0.5, 1.0, 3.0]),
    pool=st.integers(6, 20),
    seqs=st.integers(1, 3),
    budget=st.integers(2, 20),
    watermark=st.sampled_from([0.0, 0.2]),
)
@settings(max_examples=80)
def test_aged_priority_the_stated_bound(
    traffic: list[tuple[int, int, int, int]], aging: float, pool: int, seqs: int, budget: int, watermark: float
) -> None:
    """Priority q, (p - q) / aging steps or more after priority p, is never admitted before it."""
    limits = config(pool=pool, bs=4, seqs=seqs, budget=budget, prefix=False, watermark=watermark)
    bench = Bench(limits, AgedPriority(aging))
    requests = play(bench, traffic)
    place = {name: index for index, name in enumerate(first_admissions(bench))}
    for first in requests:
        for later in requests:
            lead = (first.request.priority - later.request.priority) / aging
            if later.index > first.index and later.arrival_step - first.arrival_step >= lead:
                assert place[later.request_id] > place[first.request_id]


@given(traffic=TRAFFIC, aging=st.sampled_from([0.125, 0.5, 1.0]), seqs=st.integers(1, 3))
@settings(max_examples=60)
def test_aged_priority_sends_nobody_away_for_one_who_is_not_more_urgent(
    traffic: list[tuple[int, int, int, int]], aging: float, seqs: int
) -> None:
    """With blocks for everybody a victim goes for a seat: to somebody more urgent, who takes it in that step."""
    policy = AgedPriority(aging)
    bench = Bench(config(pool=64, bs=4, seqs=seqs, prefix=False), policy)
    records = {request.request_id: request for request in play(bench, traffic)}
    for plan in bench.plans:
        joined = [records[name] for name in (*plan.admitted, *plan.resumed)]
        victims = [records[name] for name in plan.evicted_requests]
        assert len(joined) >= len(victims) and len(victims) <= 1
        for victim in victims:
            assert any(policy._urgency(request) < policy._urgency(victim) for request in joined)


def endless_urgent(policy: Policy, steps: int, duration: int) -> Bench:
    """A LOW request, one seat, and a CRITICAL one that takes `duration` steps with every step."""
    bench = Bench(config(seqs=1, prefix=False), policy)
    bench.add("low", 6, max_tokens=5, priority=Priority.LOW)
    for index in range(steps):
        bench.add(f"c{index}", 2, max_tokens=duration, priority=Priority.CRITICAL)
        bench.step()
    return bench


def times(bench: Bench, name: str) -> list[int]:
    """The steps in which a request got tokens."""
    return [step for step, plan in enumerate(bench.plans) if name in granted(plan)]


@pytest.mark.parametrize("aging", [0.1, 0.25, 1.0])
@pytest.mark.parametrize("duration", [1, 3])
def test_aged_priority_bounds_the_longest_wait_under_endless_urgent_traffic(aging: float, duration: int) -> None:
    """LOW is overtaken by those of its first 3 / aging steps, and once it runs nobody sends it away any more."""
    overtaking = round(3 / aging)
    bench = endless_urgent(AgedPriority(aging), steps=duration * overtaking + 10, duration=duration)
    served = times(bench, "low")
    assert served == list(range(duration * overtaking, duration * overtaking + 5))
    assert sorted(name for name in first_admissions(bench)[:overtaking]) == sorted(f"c{i}" for i in range(overtaking))


def test_strict_priority_has_no_such_bound() -> None:
    bench = endless_urgent(VllmV1("priority"), steps=300, duration=1)
    assert times(bench, "low") == []
    bench.drain()
    assert times(bench, "low")[0] == 300, "only when no more arrive"


# FairShare


def ask(bench: Bench, name: str, client: str, length: int = 4, max_tokens: int = 4) -> RunningRequest:
    """A request of a client; prompts of different names share nothing."""
    tokens = [(bench.scheduler._num_added + 1) * 100 + place for place in range(length)]
    return bench.scheduler.add(Request(name, tokens, params(max_tokens), client=client))


def backlog(policy: Policy, sizes: Sequence[tuple[int, int]], weight: float, seqs: int) -> list[float]:
    """Two clients with full queues, the first with ten requests for each one of the second. Returns the difference
    of the service they have got, prefill tokens and `weight` for a decode, after each step of those in which both
    have somebody waiting."""
    longest = max(length + max_tokens for length, max_tokens in sizes)
    limits = config(pool=seqs * blocks_needed(longest, 4), bs=4, budget=16, seqs=seqs, prefix=False)
    bench = Bench(limits, policy)
    scheduler, difference = bench.scheduler, [0.0]
    for index in range(110):
        client = "few" if index % 11 == 10 else "many"
        ask(bench, f"{client}{index}", client, *sizes[index % len(sizes)])
    while len({request.request.client for request in scheduler.waiting}) == 2:
        plan = scheduler.plan()
        service = {"many": 0.0, "few": 0.0}
        for request, count, kind in kinds(plan):
            service[request.request.client] += count * (weight if kind == "D" else 1)
        difference.append(difference[-1] + service["many"] - service["few"])
        bench.commit(plan)
    assert len(difference) > 4
    return difference


def bound(sizes: Sequence[tuple[int, int]], weight: float, seqs: int) -> float:
    """The theorem of the paper: twice the larger of the longest prompt and the weighted tokens that a batch holds.

    A batch holds `seqs` sequences of at most the longest prompt and output here. As in the paper a decode token
    counts no less than one of a prompt.
    """
    longest = max(length + max_tokens for length, max_tokens in sizes)
    return 2 * max(max(length for length, _ in sizes), weight * seqs * longest)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 8)), min_size=1, max_size=5),
    weight=st.sampled_from([1.0, 2.0, 4.0]),
    seqs=st.integers(1, 4),
)
@settings(max_examples=30)
def test_fair_share_two_backlogged_clients_get_nearly_the_same(
    sizes: list[tuple[int, int]], weight: float, seqs: int
) -> None:
    """In any interval, so the bound holds between the largest and the smallest difference there ever was."""
    difference = backlog(FairShare(weight), sizes, weight, seqs)
    assert max(difference) - min(difference) <= bound(sizes, weight, seqs)


def test_fair_share_first_come_first_served_is_not_fair() -> None:
    sizes = [(8, 6), (3, 8), (12, 2)]
    fair, unfair = backlog(FairShare(), sizes, 2.0, 2), backlog(VllmV1(), sizes, 2.0, 2)
    assert max(unfair) > 4 * bound(sizes, 2.0, 2) > 4 * (max(fair) - min(fair))


def test_fair_share_equal_requests_alternate() -> None:
    bench = Bench(config(seqs=1, prefix=False), FairShare())
    for index in range(6):
        ask(bench, f"a{index}", "a")
    for index in range(3):
        ask(bench, f"b{index}", "b")
    bench.drain()
    assert first_admissions(bench) == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "a4", "a5"]


@pytest.mark.parametrize(("weight", "turns"), [(0.0, 1), (1.0, 2), (3.0, 5), (4.0, 6)])
def test_fair_share_a_decode_token_counts_weight_times(weight: float, turns: int) -> None:
    """An answer of 8 tokens costs 2 + 7 x weight; b, at 5 for each of its requests, is next until it has had that."""
    bench = Bench(config(seqs=1, prefix=False), FairShare(weight))
    for name in ("a0", "a1"):
        ask(bench, name, "a", 2, 8)
    for index in range(9):
        ask(bench, f"b{index}", "b", 5, 1)
    bench.drain()
    assert first_admissions(bench).index("a1") == 1 + turns == 1 + max(1, -(-int(2 + 7 * weight) // 5))


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_fair_share_counters_are_what_the_steps_computed(mode: str) -> None:
    """What is computed again counts again, and what comes back from host memory does not."""
    policy = FairShare(weight=3.0)
    limits = replace(config(pool=9, bs=4, budget=12, seqs=4), preemption_mode=mode, num_host_blocks=30)
    bench = Bench(limits, policy)
    for index in range(12):
        ask(bench, f"r{index}", "abc"[index % 3], 3 + index % 7, 4 + index % 5)
    bench.drain()
    bench.step()  # a step is counted when it is known to have been computed
    assert any(plan.evicted_requests or plan.swap_out_requests for plan in bench.plans)
    service: Counter[str] = Counter()
    for plan in bench.plans:
        for request, count, kind in kinds(plan):
            service[request.request.client] += count * (3 if kind == "D" else 1)
    assert policy.service == dict(service)


def test_fair_share_a_step_that_failed_and_was_given_up_costs_nothing() -> None:
    policy = FairShare()
    bench = Bench(config(), policy)
    ask(bench, "a", "a", 10, 3)
    for _ in range(4):
        bench.scheduler.rollback(bench.plan())
    bench.drain()
    bench.step()
    assert policy.service == {"a": 10 + 2 * 2.0}


def test_fair_share_a_client_that_was_idle_has_no_credit() -> None:
    policy = FairShare()
    bench = Bench(config(seqs=1, prefix=False), policy)
    ask(bench, "late0", "late", 2, 1)
    bench.drain()
    for index in range(30):
        ask(bench, f"busy{index}", "busy")
    bench.steps(40)
    assert policy.service["late"] < policy.service["busy"] / 10
    for index in range(10):
        ask(bench, f"late{index}", "late")
        assert policy.service["late"] == policy.service["busy"], "lifted to the least of the active ones"
    before = len(first_admissions(bench))
    bench.drain()
    turns = [name[:4] for name in first_admissions(bench)[before:]]
    assert turns[:20].count("late") == 10 and max(turns[:20].count(name) for name in ("late", "busy")) == 10
    assert not any(
        first == second == third for first, second, third in zip(turns, turns[1:18], turns[2:18], strict=False)
    )


def test_fair_share_the_lift_goes_to_the_least_and_never_down() -> None:
    policy = FairShare()
    bench = Bench(config(seqs=3, prefix=False), policy)
    ask(bench, "a", "a", 20, 2)
    ask(bench, "b", "b", 2, 9)
    bench.steps(4)
    least = policy.service["b"]
    assert policy.service["a"] == 22.0 > least >= 4.0 and list(bench.scheduler.requests) == ["b"]
    ask(bench, "a again", "a", 3, 3)
    assert policy.service["a"] == 22.0, "it had more than the least of the active ones"
    ask(bench, "c", "c", 3, 3)
    assert policy.service["c"] == policy.service["b"] >= least
    bench.drain()
    ask(bench, "d", "d", 3, 3)
    assert policy.service["d"] == 0.0, "nobody is active, so there is nothing to catch up with"
    bench.drain()


def test_fair_share_an_abort_makes_a_client_idle() -> None:
    policy = FairShare()
    bench = Bench(config(seqs=1, prefix=False), policy)
    for name in ("a0", "a1"):
        ask(bench, name, "a", 4, 30)
    bench.steps(9)
    for name in ("a0", "a1"):
        bench.scheduler.abort(name)
    ask(bench, "b", "b")
    assert policy.service["b"] == 0.0, "a is gone, aborted or not"
    ask(bench, "a2", "a")
    bench.drain()
    assert first_admissions(bench)[-2:] == ["b", "a2"]


def test_fair_share_nobody_passes_a_head_that_does_not_fit() -> None:
    """The client that is next keeps its turn when its request has to wait for blocks."""
    bench = Bench(config(pool=8, bs=4, prefix=False), FairShare())
    ask(bench, "a0", "a", 16, 3)
    bench.step()
    ask(bench, "a1", "a", 2, 2)
    ask(bench, "b0", "b", 20, 2)
    plan = bench.plan()
    assert granted(plan) == {"a0": 1} and plan.blocked["b0"].reason == "blocks"
    bench.commit(plan)
    bench.drain()
    assert first_admissions(bench) == ["a0", "b0", "a1"]


def decisions(bench: Bench) -> list[tuple[dict[str, int], tuple[str, ...], tuple[str, ...]]]:
    """Whatever was decided, step by step."""
    return [(granted(plan), plan.evicted_requests, plan.admitted + plan.resumed) for plan in bench.plans]


@given(traffic=TRAFFIC, pool=st.integers(5, 16), seqs=st.integers(1, 4), budget=st.integers(1, 20))
@settings(max_examples=60)
def test_fair_share_one_client_is_first_come_first_served(
    traffic: list[tuple[int, int, int, int]], pool: int, seqs: int, budget: int
) -> None:
    """Decision for decision what VllmV1 does, preemptions included."""
    runs = []
    for policy in (FairShare(), VllmV1()):
        bench = Bench(config(pool=pool, bs=4, seqs=seqs, budget=budget), policy)
        play(bench, traffic)
        runs.append(decisions(bench))
    assert runs[0] == runs[1]


def test_fair_share_keeps_the_order_within_a_client() -> None:
    bench = Bench(config(seqs=2, prefix=False), FairShare())
    for index in range(24):
        ask(bench, f"{'abc'[index % 3]}{index:02}", "abc"[index % 3], 1 + index * 7 % 9, 1 + index * 5 % 7)
    bench.drain()
    for client in "abc":
        served = [name for name in first_admissions(bench) if name[0] == client]
        assert served == sorted(served) and len(served) == 8
