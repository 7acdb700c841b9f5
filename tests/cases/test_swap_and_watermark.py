"""Cases about swapping and the watermark."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from contbatch import Engine, SchedulerConfig
from contbatch.errors import InvalidConfig, RequestTooLarge
from contbatch.request import FinishReason, RequestStatus
from tests.cases.common import Events, Forced, drive
from tests.toy import Ticks, Toy, assert_alone, assert_empty, config, params, prompt, serve, toy_engine


def swap(host: int, **limits: Any) -> SchedulerConfig:
    return replace(config(**limits), preemption_mode="swap", num_host_blocks=host)


def three(host: int, **limits: Any) -> Engine:
    """A, B, C run; B and C are swapped out one after the other, C first; then D arrives."""
    policy, setting = Forced(), swap(host, pool=24, bs=4, prefix=False, **limits)
    engine = Engine(Toy(24, 4), setting, policy, clock=Ticks())
    for number, name in enumerate("ABC"):
        engine.add_request(prompt(9, number), params(12), request_id=name)
    engine.step()
    for name in "CB":
        policy.victims = {name}
        engine.step()
    engine.add_request(prompt(3, 40), params(2), request_id="D")
    return engine


def test_b021_the_largest_request_that_is_accepted_finishes_with_watermark_and_swap() -> None:
    engine, toy = toy_engine(replace(swap(10, pool=6, bs=4), watermark=0.2))
    sampling = {"big": params(12), "small": params(6)}
    assert_alone(toy, serve(engine, {"small": prompt(5, 1), "big": prompt(13)}, sampling), sampling)
    with pytest.raises(RequestTooLarge):
        engine.add_request(prompt(13), params(13))


def test_b076_a_victim_that_does_not_fit_in_host_memory_is_computed_again() -> None:
    engine, toy = toy_engine(swap(2, pool=6, bs=4, prefix=False))
    done = serve(engine, {name: prompt(8, number) for number, name in enumerate("abc")}, params(8))
    assert_alone(toy, done, params(8))
    fell_back = [step.reasons[name] for step in engine.trace.steps for name in step.preempted]
    assert fell_back and {blocked.reason for blocked in fell_back} == {"host blocks"}
    assert all(blocked.needs > blocked.left for blocked in fell_back) and max(b.needs for b in fell_back) == 3


@pytest.mark.parametrize("host", [0, 2, 100])
def test_b077_any_size_of_host_memory_gives_the_same_tokens(host: int) -> None:
    engine, toy = toy_engine(swap(host, pool=8, bs=4, seqs=5))
    assert_alone(toy, serve(engine, {f"r{i}": prompt(5 + i, i) for i in range(6)}, params(10)), params(10))
    assert not engine.scheduler.waiting and engine.scheduler.host.num_free == host


def test_b078_nobody_new_goes_before_a_swapped_request() -> None:
    policy = Forced()
    toy = Toy(10, 4)
    engine = Engine(toy, swap(20, pool=10, bs=4, prefix=False), policy, clock=Ticks())
    engine.add_request(prompt(11), params(20), request_id="A")
    engine.add_request(prompt(17, 1), params(8), request_id="B")
    engine.step()
    policy.victims = {"B"}
    engine.step()
    engine.add_request(prompt(17, 2), params(2), request_id="C")
    engine.add_request(prompt(2, 3), params(2), request_id="new")
    events = drive(engine)
    joined = [name for step in engine.trace.steps for name in (*step.admitted, *step.swapped_in)]
    assert events and joined[:3] == ["A", "B", "B"] and joined.index("C") < joined.index("new")
    assert "C" not in joined[: len(joined) - 1 - joined[::-1].index("B")], "as long as B may go again"
    assert_alone(toy, {"B": engine.completions["B"]}, params(8))


def test_b079_swapped_requests_come_back_in_order_of_arrival_before_new_ones() -> None:
    engine = three(40)
    while engine.has_unfinished:
        engine.step()
        engine.scheduler.check()
    joined = [name for step in engine.trace.steps for name in (*step.swapped_in, *step.admitted) if name in "BCD"]
    assert joined[2:] == ["B", "C", "D"] or joined == ["B", "C", "C", "B", "C", "D"]


def test_b080_the_watermark_holds_back_admissions_only() -> None:
    limits = config(pool=10, bs=4, watermark=0.1)
    engine, _ = toy_engine(limits)
    engine.add_request(prompt(40), params(1), request_id="all")
    engine.step()
    assert engine.trace.steps[0].admitted == ["all"], "alone it may take the whole pool"
    engine, _ = toy_engine(limits)
    engine.add_request(prompt(15), params(6), request_id="runs")
    engine.step()
    engine.add_request(prompt(24, 1), params(1), request_id="rest")
    engine.step()
    assert engine.trace.steps[-1].reasons["rest"].reason == "blocks", "it would take all that is free"
    drive(engine)
    engine, _ = toy_engine(config(pool=4, bs=4, watermark=0.5))
    engine.add_request(prompt(12), params(5), request_id="a")
    drive(engine)
    assert min(step.free_blocks for step in engine.trace.steps) == 0, "a decode may use the last block"
    with pytest.raises(InvalidConfig, match=r"watermark is 1\.0"):
        SchedulerConfig(watermark=1.0)


@pytest.mark.parametrize("when", ["in its step", "a step later", "when it is back"])
def test_b105_an_abort_of_a_swapped_request_is_one_event_and_returns_everything(when: str) -> None:
    policy, events, toy = Forced(), Events(), Toy(24, 4)
    engine = Engine(toy, swap(20, pool=24, bs=4), policy, clock=Ticks())
    other: list[Any] = []

    def abort_in_its_step(event: Any) -> None:
        other.append(event)
        victim = engine.scheduler.requests.get("victim")
        if when == "in its step" and victim and victim.status is RequestStatus.SWAPPED:
            engine.abort("victim")

    engine.add_request(prompt(3, 1), params(12), request_id="other", on_event=abort_in_its_step)
    engine.add_request(prompt(10), params(12), request_id="victim", on_event=events)
    engine.step()
    policy.victims = {"victim"}
    engine.step()
    assert engine.trace.steps[-1].swapped_out == ["victim"]
    if when == "when it is back":
        engine.step()
        assert engine.trace.steps[-1].swapped_in == ["victim"]
    if when != "in its step":
        assert engine.abort("victim")
    assert events.ends() == [("victim", FinishReason.ABORT)] and engine.scheduler.host.num_used == 0
    drive(engine)
    assert_alone(toy, {"other": engine.completions["other"]}, params(12))
    assert_empty(engine)
