"""Cases about policies that order the queue, skip in it, reserve memory or preempt for the urgent.

Each test restates one line of a list of faults that were found in other engines; its id is in the name.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from contbatch.engine import Engine
from contbatch.metrics import summarise
from contbatch.policies import AgedPriority, ShortestJobFirst
from contbatch.trace import Trace
from tests.cases.common import crowded, drive, first_step, grants, preemptions
from tests.toy import assert_alone, config, params, prompt, serve, toy_engine

# Starvation, head-of-line blocking


@pytest.mark.parametrize("policy", ["HfFifo", "HfPrefillFirst"])
def test_b045_a_policy_that_skips_admits_the_next_in_the_same_step(policy: str) -> None:
    """As in the engine that it is named after, skipping has no bound of its own; see B046 for what that costs."""
    engine = crowded(policy)
    engine.step()
    step = engine.trace.steps[-1]
    assert grants(step) == {"R": 1, "next": 8} and step.reasons["head"] == ("blocks", 8, 5)
    drive(engine)
    assert first_step(engine.trace, "head") > first_step(engine.trace, "next")


def large_head_small_rest(policy: str) -> Trace:
    """R holds half the pool, the head of the queue needs most of it, a small request arrives in every step."""
    engine, toy = toy_engine(config(pool=32, bs=4, budget=128, seqs=16), policy)
    sampling = {"R": params(24), "head": params(4)} | {f"s{index}": params(5) for index in range(40)}
    engine.add_request(prompt(40), sampling["R"], request_id="R")
    engine.step()
    engine.add_request(prompt(100, 1), sampling["head"], request_id="head")
    for index in range(40):
        engine.add_request(prompt(4, index + 2), sampling[f"s{index}"], request_id=f"s{index}")
        engine.step()
    drive(engine)
    assert_alone(toy, engine.completions, sampling)
    return engine.trace


def test_b046_skipping_the_head_serves_the_small_ones_at_its_cost() -> None:
    fifo, skipping = large_head_small_rest("VllmV1"), large_head_small_rest("HfFifo")
    assert first_step(skipping, "head") > first_step(fifo, "head")
    waits = []
    for trace in (fifo, skipping):
        requests = summarise(trace).requests
        small = [requests[f"s{index}"].steps.ttft or 0 for index in range(40)]
        waits.append(sum(small) / len(small))
    assert waits[0] >= 5 * waits[1]


def cold_among_hot(policy: ShortestJobFirst, hot: Sequence[int], steps: int = 100) -> Engine:
    """One long request, and in every step a short one, which takes one step; one seat."""
    engine, _ = toy_engine(config(seqs=1, prefix=True), policy)
    engine.add_request(prompt(40, 1), params(1), request_id="cold")
    for index in range(steps):
        engine.add_request([*hot, index], params(1), request_id=f"hot{index}")
        engine.step()
    return engine


@pytest.mark.parametrize("aging", [0.5, 1.0, 2.0])
def test_b049_aging_ends_the_wait_of_a_cold_request_among_hot_ones(aging: float) -> None:
    """No policy here goes by prefix hits; the favoured ones share a prefix and are favoured for being short.

    The bound: a request of `size` tokens is passed only by those that arrive within `size / aging` steps.
    """
    engine = cold_among_hot(ShortestJobFirst(aging=aging), prompt(8))
    assert first_step(engine.trace, "cold") <= (40 + 1) / aging
    assert sum(bool(step.cached) for step in engine.trace.steps) > 50
    drive(engine)


def test_b049_without_aging_a_cold_request_never_starts_among_hot_ones() -> None:
    engine = cold_among_hot(ShortestJobFirst(), prompt(8))
    assert all("cold" not in step.request_ids for step in engine.trace.steps)
    drive(engine)
    assert first_step(engine.trace, "cold") == 100, "when no more arrive"


@pytest.mark.parametrize("aging", [1.0, 4.0])
def test_b050_a_long_job_starts_within_the_bound_of_aging(aging: float) -> None:
    engine = cold_among_hot(ShortestJobFirst(aging=aging), [7])
    assert first_step(engine.trace, "cold") <= (40 + 1) / aging
    assert first_step(engine.trace, "hot0") == 0, "the shortest job is first all the same"
    drive(engine)


@pytest.mark.parametrize("aging", [0.0, 1.0])
def test_b050_jobs_of_equal_length_keep_the_order_of_arrival(aging: float) -> None:
    engine, toy = toy_engine(config(seqs=1), ShortestJobFirst(aging=aging))
    done = serve(engine, {f"r{index}": prompt(5, index) for index in range(6)}, params(3))
    assert_alone(toy, done, params(3))
    starts = [first_step(engine.trace, f"r{index}") for index in range(6)]
    assert starts == sorted(starts)


@pytest.mark.parametrize("policy", ["Orca", "VllmV1"])
def test_b053_memory_reserved_up_front_or_taken_on_demand(policy: str) -> None:
    engine, toy = toy_engine(config(pool=8, bs=4, mml=32), policy)
    done = serve(engine, {f"r{index}": prompt(4, index) for index in range(4)}, params(None))
    assert_alone(toy, done, params(32 - 4))
    most = max(step.num_running for step in engine.trace.steps)
    if policy == "Orca":
        assert most == 1 and preemptions(engine.trace) == 0
        assert engine.trace.steps[0].reasons["r1"] == ("blocks", 8, 0), "it waits for the blocks of a reserve"
    else:
        assert most == 4 and preemptions(engine.trace) > 0


def test_b054_the_short_start_first_but_nobody_is_overtaken_amid_its_prompt() -> None:
    """As in B049, short stands for hit."""
    engine, toy = toy_engine(config(budget=8, seqs=4), ShortestJobFirst())
    sampling = {name: params(2) for name in ("cold", "late", "s0", "s1", "s2")}
    engine.add_request(prompt(40), sampling["cold"], request_id="cold")
    for index in range(3):
        engine.add_request(prompt(4, index + 1), sampling[f"s{index}"], request_id=f"s{index}")
    engine.step()
    assert list(grants(engine.trace.steps[0])) == ["s0", "s1"]
    while "cold" not in engine.trace.steps[-1].request_ids:
        engine.step()
    engine.add_request(prompt(2, 9), sampling["late"], request_id="late")
    drive(engine)
    begun = first_step(engine.trace, "cold")
    answered = next(step.step for step in engine.trace.steps if "cold" in step.sampled)
    for step in engine.trace.steps[begun + 1 : answered]:
        ahead = sum(grants(step).get(name, 0) for name in ("s0", "s1", "s2"))
        assert grants(step)["cold"] == 8 - ahead and "late" not in step.request_ids
    assert first_step(engine.trace, "late") >= answered
    assert_alone(toy, engine.completions, sampling)


# Preemption for the urgent


def urgent_arrives(length: int) -> Engine:
    """A pool of 6 blocks: less urgent ones hold 3, an equally urgent one 2, 1 is free; then the urgent one comes."""
    engine, _ = toy_engine(config(pool=6, bs=4), AgedPriority())
    for name, tokens, priority in (("low", 6, 5), ("lower", 2, 6), ("equal", 6, 0)):
        engine.add_request(prompt(tokens, priority), params(3), request_id=name, priority=priority)
    engine.step()
    assert engine.scheduler.pool.num_free == 1
    engine.add_request(prompt(length, 9), params(2), request_id="urgent", priority=0)
    engine.step()
    return engine


def test_b072_an_urgent_request_that_could_not_be_made_room_for_evicts_nobody() -> None:
    engine = urgent_arrives(18)
    step = engine.trace.steps[-1]
    assert not step.preempted and step.reasons["urgent"] == ("blocks", 5, 1), "5 blocks, and 3 + 1 could be had"
    drive(engine)
    assert preemptions(engine.trace) == 0


def test_b070_a_far_more_urgent_request_is_answered_before_all_that_wait() -> None:
    engine, toy = toy_engine(config(seqs=4), AgedPriority())
    sampling = {f"r{index}": params(3 + index) for index in range(6)} | {"urgent": params(3)}
    for index in range(6):
        engine.add_request(prompt(5, index), sampling[f"r{index}"], request_id=f"r{index}", priority=0)
    engine.step()
    engine.add_request(prompt(5, 9), sampling["urgent"], request_id="urgent", priority=-100)
    drive(engine)
    first = {name: request.steps.tokens[0] for name, request in summarise(engine.trace).requests.items()}
    assert first["urgent"] == 2 < min(first["r4"], first["r5"]), "in the very next step"
    assert_alone(toy, engine.completions, sampling)


@pytest.mark.parametrize(
    ("length", "victims"), [(16, {"low", "lower"}), (9, {"low", "lower"}), (8, {"lower"}), (4, set())]
)
def test_b072_an_urgent_request_evicts_no_more_than_it_needs_and_no_equal(length: int, victims: set[str]) -> None:
    engine = urgent_arrives(length)
    step = engine.trace.steps[-1]
    assert set(step.preempted) == victims and step.admitted == ["urgent"] and "equal" in step.request_ids
    drive(engine)
