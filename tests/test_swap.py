"""Preemption by swap: blocks go to host memory and come back, and nobody can tell from the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from contbatch import Engine, SchedulerConfig, Trace, summarise
from contbatch.errors import InvalidConfig, PolicyError, StepFailed
from contbatch.plan import BlockReason
from contbatch.request import FinishReason, PreemptionMode, RequestStatus
from contbatch.step import Step
from contbatch.swap import HostPool
from contbatch.viz import View
from tests.cases.common import Forced
from tests.test_blocks import keys
from tests.toy import (
    Scripted,
    Ticks,
    Toy,
    assert_alone,
    assert_empty,
    config,
    params,
    prompt,
    serve,
    toy_engine,
)

# The host pool


def test_full_blocks_that_are_there_already_are_shared() -> None:
    host = HostPool(6, 4)
    first = host.store(keys(prompt(11)), 3)
    assert first is not None and (first.num_known, len(first.blocks)) == (0, 3)
    second = host.store(keys(prompt(10)), 3)
    assert second is not None and second.num_known == 2 and second.blocks[:2] == first.blocks[:2]
    assert host.num_free == 2, "the last, partial blocks are not shared"
    host.check([first.blocks, second.blocks])


def test_what_does_not_fit_changes_nothing() -> None:
    host = HostPool(3, 4)
    held = host.store(keys(prompt(8)), 2)
    assert held is not None
    before = (host.free_list, list(host.ref_count), host.num_cached)
    assert host.store(keys(prompt(12, start=5)), 3) is None and host.store([], 2) is None
    assert (host.free_list, list(host.ref_count), host.num_cached) == before


def test_there_may_be_no_host_memory() -> None:
    assert HostPool(0, 4).store([], 1) is None
    with pytest.raises(InvalidConfig, match="num_host_blocks is -1"):
        SchedulerConfig(num_host_blocks=-1)
    with pytest.raises(InvalidConfig, match="preemption_mode is 'both'; use 'recompute' or 'swap'"):
        SchedulerConfig(preemption_mode="both")
    assert SchedulerConfig(preemption_mode="swap").preemption_mode is PreemptionMode.SWAP


class HostModel(RuleBasedStateMachine):
    """A host pool against what it means: each table is a list of (key or nothing) that nobody else overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self.host = HostPool(7, 2)
        self.tables: list[tuple[list[int], list[object]]] = []
        self.content: dict[int, object] = {}
        self.fresh = 0

    @rule(length=st.integers(1, 9), family=st.integers(0, 2))
    def store(self, length: int, family: int) -> None:
        """New blocks are written, known ones hold what they should."""
        full = keys(prompt(length, family), 2)
        count = -(-length // 2)
        stored = self.host.store(full, count)
        if stored is None:
            return
        wanted: list[object] = [key.hash for key in full]
        if length % 2:
            self.fresh += 1
            wanted.append(self.fresh)
        for block, value in list(zip(stored.blocks, wanted, strict=True))[stored.num_known :]:
            self.content[block] = value
        self.tables.append((stored.blocks, wanted))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Somebody comes back."""
        blocks, _ = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.host.release(blocks)

    @invariant()
    def everybody_finds_what_was_stored(self) -> None:
        """A block in two tables holds the same for both."""
        self.host.check([blocks for blocks, _ in self.tables])
        for blocks, wanted in self.tables:
            assert [self.content[block] for block in blocks] == wanted


TestHostModel = HostModel.TestCase
TestHostModel.settings = settings(max_examples=60, stateful_step_count=30)


# In the engine


def swapping(host: int = 40, **limits: Any) -> SchedulerConfig:
    return replace(config(**limits), preemption_mode="swap", num_host_blocks=host)


def crowd(count: int = 6, length: int = 6, output: int = 14) -> dict[str, list[int]]:
    return {f"r{index}": prompt(length + index % 3, index) for index in range(count)}


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("bs", [1, 4, 16])
@pytest.mark.parametrize("host", [0, 3, 200])
def test_tokens_are_those_of_each_request_alone(host: int, bs: int, prefix: bool) -> None:
    engine, toy = toy_engine(swapping(host, pool=48 // bs, bs=bs, budget=24, seqs=6, prefix=prefix))
    assert_alone(toy, serve(engine, crowd(), params(14)), params(14))
    out = sum(len(step.swapped_out) for step in engine.trace.steps)
    back = sum(len(step.swapped_in) for step in engine.trace.steps)
    assert out == back and (out > 0) is (host > 3 or (host == 3 and bs > 1))
    assert summarise(engine.trace).preemptions > 0
    assert engine.scheduler.host.num_free == host


def test_nothing_is_computed_again_with_ample_host_memory() -> None:
    recomputing, _ = toy_engine(config(pool=12, bs=4, budget=24, seqs=6, prefix=False))
    swapped, _ = toy_engine(swapping(pool=12, bs=4, budget=24, seqs=6, prefix=False))
    for engine in (recomputing, swapped):
        serve(engine, crowd(), params(14))
    assert summarise(recomputing.trace).recomputed_tokens > 0 == summarise(swapped.trace).recomputed_tokens


def test_a_victim_without_room_is_computed_again_and_the_trace_says_so() -> None:
    engine, toy = toy_engine(swapping(2, pool=12, bs=4, budget=24, seqs=6, prefix=False))
    assert_alone(toy, serve(engine, crowd(), params(14)), params(14))
    full = [(step, name) for step in engine.trace.steps for name in step.preempted]
    assert full
    for step, name in full:
        reason, needs, left = step.reasons[name]
        assert reason == BlockReason.HOST_BLOCKS.value and needs > left
    for step in engine.trace.steps:
        assert not set(step.swapped_out) & set(step.reasons) or step.num_waiting


def forced(limits: SchedulerConfig, prompts: dict[str, Sequence[int]], output: int = 20) -> tuple[Engine, Toy, Forced]:
    """Everybody runs; who is named in `victims` goes in the next step."""
    policy, toy = Forced(), Toy(limits.num_blocks, limits.block_size)
    engine = Engine(toy, limits, policy, clock=Ticks())
    for name, tokens in prompts.items():
        engine.add_request(tokens, params(output), request_id=name)
    engine.step()
    return engine, toy, policy


def test_a_common_prefix_is_copied_once() -> None:
    shared = prompt(8)
    engine, toy, policy = forced(
        swapping(pool=40, bs=4), {"a": [*shared, 1, 2], "b": [*shared, 3, 4], "c": prompt(5, 9)}
    )
    policy.victims = {"a", "b"}
    engine.step()
    assert engine.trace.steps[-1].swapped_out == ["a", "b"] and toy.num_copied == 2 + 1 + 1
    for name in "ab":
        assert len(engine.scheduler.requests[name].host_table) == 3
    engine.scheduler.check()


def test_who_goes_a_second_time_copies_only_what_is_new() -> None:
    engine, toy, policy = forced(swapping(pool=40, bs=4), {"a": prompt(10), "b": prompt(5, 9)})
    policy.victims = {"a"}
    engine.step()
    assert toy.num_copied == 3
    engine.step()
    assert engine.trace.steps[-1].swapped_in == ["a"]
    policy.victims = {"a"}
    engine.step()
    assert toy.num_copied == 4, "two full blocks are in host memory still; the last one has a new token"


def test_what_the_device_still_has_is_not_copied_back() -> None:
    engine, _, policy = forced(swapping(pool=40, bs=4), {"a": prompt(10), "b": prompt(5, 9)})
    policy.victims = {"a"}
    engine.step()
    plan = engine.scheduler.plan()
    assert plan.swap_in_requests == ("a",) and len(plan.swap_in_blocks) == 1, "the partial block only"
    assert len(plan.new_blocks["a"]) == 3 and plan.resumed == plan.admitted == () and plan.cached == {}
    engine.scheduler.rollback(plan)
    engine.scheduler.check()
    engine.run()
    assert_empty(engine)


def test_it_goes_on_in_the_middle_of_its_prompt() -> None:
    engine, toy, policy = forced(swapping(pool=40, bs=4, budget=6, prefix=False), {"a": prompt(20)})
    assert engine.scheduler.running[0].num_computed_tokens == 6
    policy.victims = {"a"}
    engine.step()
    assert engine.trace.steps[-1].swapped_out == ["a"] and engine.trace.steps[-1].counts == []
    assert engine.scheduler.requests["a"].status is RequestStatus.SWAPPED
    engine.step()
    assert (engine.trace.steps[-1].starts, engine.trace.steps[-1].kinds) == ([6], "P")
    engine.run()
    assert_alone(toy, engine.completions, params(20))


def test_a_swap_in_that_does_not_fit_changes_nothing_and_is_tried_again() -> None:
    engine, toy, policy = forced(swapping(pool=8, bs=4, prefix=False), {"a": prompt(10), "b": prompt(10, 9)}, 6)
    policy.victims = {"b"}
    engine.step()
    other = engine.add_request(prompt(3, 30), params(2))
    free = engine.scheduler.pool.free_list
    seen: list[bool] = []

    def squeeze(step: Step) -> None:
        head = step.waiting.head
        before = (step.free_blocks, head.host_table[:], list(engine.scheduler.host.ref_count), head.status)
        seen.append(step.admit(head, head.owed, spare=step.free_blocks))
        assert (step.free_blocks, head.host_table, list(engine.scheduler.host.ref_count), head.status) == before
        step.grant_running()

    engine.scheduler.policy.schedule = squeeze  # type: ignore[method-assign]
    engine.step()
    assert seen == [False] and engine.scheduler.pool.free_list == free
    del engine.scheduler.policy.schedule
    engine.run()
    assert_alone(toy, {name: engine.completions[name] for name in "ab"}, params(6))
    order = [name for step in engine.trace.steps for name in (*step.swapped_in, *step.admitted)]
    assert order.index("b", 2) < order.index(other), "before any new request"


@pytest.mark.parametrize("hook", ["swap_out", "swap_in", "execute"])
@pytest.mark.parametrize("give_up", [False, True])
def test_a_step_that_fails_around_the_copies_loses_nothing(hook: str, give_up: bool) -> None:
    """The same plan is run again without copying twice, or dropped: then what was never copied is computed again."""
    fail = {"at": 0}

    class Fragile(Toy):
        def _maybe(self, name: str) -> None:
            if name == hook and fail["at"]:
                fail["at"] -= 1
                raise RuntimeError("device lost")

        def swap_out(self, blocks: Sequence[tuple[int, int]]) -> None:
            self._maybe("swap_out")
            super().swap_out(blocks)

        def swap_in(self, blocks: Sequence[tuple[int, int]]) -> None:
            self._maybe("swap_in")
            super().swap_in(blocks)

        def execute(self, *arguments: Any) -> Any:
            tokens = super().execute(*arguments)
            self._maybe("execute")
            return tokens

    limits = swapping(pool=12, bs=4, budget=24, seqs=6)
    toy = Fragile(limits.num_blocks, limits.block_size)
    engine = Engine(toy, limits, clock=Ticks())
    for name, tokens in crowd().items():
        engine.add_request(tokens, params(14), request_id=name)
    failures = 0
    while engine.has_unfinished:
        fail["at"] = 2
        copied = toy.num_copied
        try:
            engine.step()
        except StepFailed:
            failures += 1
            if give_up:
                engine.abort("nobody")
                extra = engine.add_request([1], params(1))
                engine.abort(extra)
            fail["at"] = 0
            engine.step()
            assert (
                give_up
                or hook != "execute"
                or toy.num_copied - copied
                <= sum(
                    len(engine.scheduler.requests[name].host_table)
                    for name in engine.trace.steps[-1].swapped_out
                    if name in engine.scheduler.requests
                )
            )
        engine.scheduler.check()
    assert failures > 2
    assert_alone(toy, {name: engine.completions[name] for name in crowd()}, params(14))
    assert_empty(engine)


def test_a_request_that_comes_back_and_goes_in_the_same_step_is_not_copied_again() -> None:
    engine, toy, policy = forced(swapping(pool=40, bs=4, prefix=False), {"a": prompt(10), "b": prompt(5, 9)})
    policy.victims = {"a"}
    engine.step()
    copied = toy.num_copied

    def in_and_out(step: Step) -> None:
        head = step.waiting.head
        assert step.admit(head, head.owed)
        step.preempt(head) if in_and_out.__dict__.get("preempts") else step.take_back(head)
        step.grant_running()

    for preempts in (False, True):
        in_and_out.__dict__["preempts"] = preempts
        engine.scheduler.policy.schedule = in_and_out  # type: ignore[method-assign]
        engine.step()
        engine.scheduler.check()
        assert engine.trace.steps[-1].swapped_in == engine.trace.steps[-1].swapped_out == []
        assert engine.scheduler.requests["a"].status is RequestStatus.SWAPPED and toy.num_copied == copied
    del engine.scheduler.policy.schedule
    engine.run()
    assert_alone(toy, engine.completions, params(20))


@pytest.mark.parametrize("ends", ["abort", "timeout", "abort_all", "close"])
def test_a_swapped_out_request_can_end(ends: str) -> None:
    engine, toy, policy = forced(swapping(pool=40, bs=4), {"b": prompt(5, 9)})
    engine.add_request(prompt(10), params(20), request_id="a", timeout=25.0 if ends == "timeout" else None)
    engine.step()
    policy.victims = {"a"}
    engine.step()
    assert engine.scheduler.requests["a"].status is RequestStatus.SWAPPED and engine.scheduler.host.num_used == 3
    if ends == "timeout":
        engine.scheduler.policy.schedule = lambda step: step.grant_running() and None  # type: ignore[method-assign]
        while "a" in engine.scheduler.requests:
            engine.step()
    elif ends == "abort":
        assert engine.abort("a")
    else:
        getattr(engine, ends)()
    assert engine.completions["a"].finish_reason is FinishReason.ABORT and engine.scheduler.host.num_used == 0
    engine.scheduler.check()
    if ends == "abort":
        engine.run()
        assert_alone(toy, {"b": engine.completions["b"]}, params(20))
    engine.abort_all()
    assert_empty(engine)


def test_verbs_know_a_swapped_out_request() -> None:
    engine, _, policy = forced(swapping(pool=40, bs=4), {"a": prompt(10), "b": prompt(5, 9)})
    policy.victims = {"a"}
    engine.step()
    faults: list[str] = []

    def check(step: Step) -> None:
        head = step.waiting.head
        assert step.cached_prefix(head).num_tokens == 0 and head.owed == 1 and not head.is_prefilling
        assert step.tokens_left(head) == step.budget.remaining_decode
        for verb in (lambda: step.grant(head, 1), lambda: step.preempt(head), lambda: step.admit(head, 2)):
            with pytest.raises(PolicyError) as caught:
                verb()
            faults.append(str(caught.value))
        step.grant_running()

    engine.scheduler.policy.schedule = check  # type: ignore[method-assign]
    engine.step()
    assert len(faults) == 3 and "owes 1" in faults[2]


def test_a_swapped_run_survives_a_file_and_is_drawn(tmp_path: Path) -> None:
    engine, _ = toy_engine(swapping(5, pool=12, bs=4, budget=24, seqs=6))
    serve(engine, crowd(), params(14))
    engine.trace.save(tmp_path / "run.jsonl")
    loaded = Trace.load(tmp_path / "run.jsonl")
    assert loaded == engine.trace and loaded.digest() == engine.trace.digest()
    said = [decision.text for decisions in View(loaded).decisions for decision in decisions]
    out = sum(len(step.swapped_out) for step in loaded.steps)
    back = sum(len(step.swapped_in) for step in loaded.steps)
    full = sum(len(step.preempted) for step in loaded.steps)
    assert sum("is swapped out" in text for text in said) == out > 0
    assert sum("is swapped in" in text for text in said) == back > 0
    assert sum("host memory is too full" in text for text in said) == full > 0


def test_a_policy_that_schedules_nothing_after_a_swap_stalls_with_a_diagnosis() -> None:
    engine, _, policy = forced(swapping(pool=40, bs=4), {"a": prompt(10), "b": prompt(5, 9)})
    policy.victims = {"a", "b"}
    engine.step()
    engine.scheduler.policy = Scripted(lambda step: None)
    with pytest.raises(Exception, match=r"<a swapped: 10 of 11 tokens computed, 0 blocks> gets no tokens"):
        for _ in range(30):
            engine.step()
    engine.scheduler.check()
