"""Cases about preemption by swap, and about the watermark."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from contbatch import Engine, SchedulerConfig
from contbatch.batch import ScheduledBatch
from contbatch.engine import TokenEvent
from contbatch.errors import InvalidConfig, RequestTooLarge
from contbatch.request import FinishReason, RequestStatus, SamplingParams
from contbatch.step import Step
from tests.cases.common import Events, drive
from tests.swapping import Directed, directed, finish, send_away, step, swap, swapped
from tests.toy import Ticks, Toy, assert_alone, assert_empty, config, params, prompt, serve, toy_engine


def test_b021_a_swapped_request_that_fills_the_pool_comes_back_in_spite_of_the_watermark() -> None:
    """The pool cannot shrink, and what could outgrow it is refused: so the largest that is accepted must finish."""
    engine, toy, policy = directed(replace(swap(10, pool=6, bs=4), watermark=0.2), {"big": prompt(13)}, 12)
    with pytest.raises(RequestTooLarge, match="need 7 blocks, the whole pool has num_blocks=6"):
        engine.add_request(prompt(13), params(13))
    while engine.scheduler.pool.num_used < 6:
        step(engine)
    policy.decide = send_away("big")
    assert step(engine).swapped_out == ["big"] and engine.scheduler.host.num_used == 6
    assert step(engine).swapped_in == ["big"] and engine.scheduler.pool.num_free == 0
    finish(engine, toy, params(12))


def test_b076_a_victim_that_does_not_fit_in_host_memory_is_computed_again() -> None:
    engine, toy, policy = directed(swap(2, pool=6, bs=4), {"a": prompt(9), "b": prompt(5, 1)}, 8)
    policy.decide = send_away("a")
    record = step(engine)
    assert (record.swapped_out, record.preempted, record.reasons["a"]) == ([], ["a"], ("host blocks", 3, 2))
    policy.decide = send_away("b")
    assert step(engine).swapped_out == ["b"], "a refusal takes no room"
    finish(engine, toy, params(8))


@pytest.mark.parametrize("host", [0, 2, 100])
def test_b077_any_size_of_host_memory_gives_the_same_tokens(host: int) -> None:
    engine, toy = toy_engine(swap(host, pool=8, bs=4, seqs=5))
    assert_alone(toy, serve(engine, {f"r{i}": prompt(5 + i, i) for i in range(6)}, params(10)), params(10))
    assert not engine.scheduler.waiting and engine.scheduler.host.num_free == host
    out, back, full = swapped(engine.trace)
    assert out == back and (out > 0, full > 0) == {0: (False, True), 2: (True, True), 100: (True, False)}[host]


def test_b078_nobody_new_goes_before_a_swapped_request() -> None:
    engine, toy, policy = directed(swap(20, pool=7, bs=4, prefix=False), {"A": prompt(15), "B": prompt(9, 1)}, 9)
    policy.decide = send_away("B")
    step(engine)
    engine.add_request(prompt(2, 3), params(9), request_id="new")
    record = step(engine)
    assert record.reasons == {"B": ("blocks", 3, 2)} and record.request_ids == ["A"], "new needs one block of the two"
    assert record.num_waiting == 2 and engine.scheduler.requests["B"].status is RequestStatus.SWAPPED
    finish(engine, toy, params(9))
    joined = [name for record in engine.trace.steps for name in (*record.swapped_in, *record.admitted)]
    assert joined[:4] == ["A", "B", "B", "new"]


def abc(pool: int) -> tuple[Engine, Toy, Directed]:
    """A, B, C run; C is swapped out, then B; then D arrives."""
    prompts = {"A": prompt(21), "B": prompt(9, 1), "C": prompt(9, 2)}
    engine, toy, policy = directed(swap(20, pool=pool, bs=4, prefix=False), prompts, 8)
    for name in "CB":
        policy.decide = send_away(name)
        assert step(engine).swapped_out == [name]
    engine.add_request(prompt(3, 40), params(8), request_id="D")
    return engine, toy, policy


def test_b079_swapped_requests_come_back_in_order_of_arrival_before_new_ones() -> None:
    engine, toy, _ = abc(pool=24)
    record = step(engine)
    assert (record.swapped_in, record.admitted, record.request_ids) == (["B", "C"], ["D"], ["A", "B", "C", "D"])
    finish(engine, toy, params(8))


def test_b079_where_there_is_room_for_one_the_first_comes_back_and_the_rest_waits() -> None:
    engine, toy, policy = abc(pool=12)
    while engine.scheduler.pool.num_free > 5:
        policy.decide = Step.grant_running
        step(engine)
    record = step(engine)
    assert (record.swapped_in, record.admitted, record.reasons) == (["B"], [], {"C": ("blocks", 3, 2)})
    finish(engine, toy, params(8))
    joined = [name for record in engine.trace.steps for name in (*record.swapped_in, *record.admitted)]
    assert joined[3:] == ["B", "C", "D"]


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
    assert min(record.free_blocks for record in engine.trace.steps) == 0, "a decode may use the last block"
    with pytest.raises(InvalidConfig, match=r"watermark is 1\.0"):
        SchedulerConfig(watermark=1.0)


def test_b080_the_watermark_holds_back_who_comes_back_too() -> None:
    engine, toy, policy = directed(replace(swap(pool=10, bs=4), watermark=0.3), {"A": prompt(15), "B": prompt(9, 1)}, 9)
    policy.decide = send_away("B")
    step(engine)
    blocked = step(engine).reasons["B"]
    assert (blocked.reason, blocked.left) == ("blocks", 5), "it needs three, and three must stay free"
    finish(engine, toy, params(9))


class Hooked(Toy):
    """A toy that tells where it is."""

    def __init__(self, num_blocks: int, block_size: int, tell: Callable[[str], None]) -> None:
        super().__init__(num_blocks, block_size)
        self.tell = tell

    def swap_out(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Before the copies."""
        self.tell("swap_out")
        super().swap_out(blocks)

    def swap_in(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Before the copies."""
        self.tell("swap_in")
        super().swap_in(blocks)

    def execute(self, batch: ScheduledBatch, sampling: Mapping[str, SamplingParams]) -> Mapping[str, int | Exception]:
        """Before the forward pass, and after it."""
        self.tell("execute")
        tokens = super().execute(batch, sampling)
        self.tell("executed")
        return tokens


ALWAYS = ("schedule", "execute", "executed", "callback of another", "between steps")
HOOKS = [*((number, hook) for number in (1, 2, 3) for hook in ALWAYS), (1, "swap_out"), (3, "swap_in"), (3, "callback")]


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize(("number", "hook"), HOOKS)
def test_b105_an_abort_of_a_swapped_request_is_one_event_and_returns_everything(
    number: int, hook: str, prefix: bool
) -> None:
    """At every hook of the step in which it goes (1), waits in host memory (2), and comes back (3)."""
    at, events, policy = 0, Events(), Directed()

    def tell(where: str) -> None:
        if (at, where) == (number, hook):
            assert engine.abort("victim")

    def decide(first: Callable[[Step], object]) -> Callable[[Step], None]:
        def schedule(step: Step) -> None:
            tell("schedule")
            first(step)

        return schedule

    def listen(event: TokenEvent) -> None:
        events(event)
        if event.finish_reason is None:
            tell("callback" if event.request_id == "victim" else "callback of another")

    toy = Hooked(24, 4, tell)
    engine = Engine(toy, swap(20, pool=24, bs=4, prefix=prefix), policy, clock=Ticks())
    for index, name in enumerate(("victim", "other")):
        engine.add_request(prompt(10, index), params(12), request_id=name, on_event=listen)
    step(engine)
    bring_back = super(Directed, policy).schedule
    for at, first in enumerate((send_away("victim"), Step.grant_running, bring_back), start=1):
        policy.decide = decide(first)
        record = step(engine)
        tell("between steps")
        moved = record.swapped_out if at == 1 else record.swapped_in if at == 3 else ["victim"]
        assert moved == ["victim"]
        if at == number:
            break
    at = 0
    assert terminal_of(events) == [FinishReason.ABORT], "within this step"
    assert "victim" not in engine.scheduler.requests and engine.scheduler.host.num_used == 0
    drive(engine)
    assert terminal_of(events) == [FinishReason.ABORT] and not engine.abort("victim")
    tokens = engine.completions.pop("victim").token_ids
    assert tokens == toy.alone(prompt(10), params(12))[: len(tokens)] and len(tokens) in (1, 2)
    assert_alone(toy, engine.completions, params(12))
    assert_empty(engine)


def terminal_of(events: Events) -> list[FinishReason]:
    """How the victim ended, each time it did."""
    return [reason for name, reason in events.ends() if name == "victim"]
