"""Preemption by swap: a victim's blocks go to host memory and come back, and nobody can tell from the tokens.

From the bottom up: the host pool, what a plan says, the verbs, and the engine. Steps that fail are in
`test_swap_failures.py`, a real model in `test_swap_identity.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from contbatch import Engine, SchedulerConfig, Trace, summarise
from contbatch.blocks import BlockKey
from contbatch.errors import DeadlineExceeded, IntegrityError, InvalidConfig, PolicyError, SchedulerStalled
from contbatch.plan import BlockReason
from contbatch.request import PreemptionMode, RequestStatus, RunningRequest
from contbatch.step import Step
from contbatch.swap import HostPool
from contbatch.viz import View, plots, to_html
from tests.swapping import Directed, admit_head, crowd, directed, finish, send_away, step, swap, swapped
from tests.test_blocks import keys
from tests.toy import Bench, Ticks, Toy, assert_alone, assert_empty, each, params, prompt, serve, toy_engine

# The host pool


def test_full_blocks_that_are_there_already_are_shared() -> None:
    host = HostPool(6, 4)
    first = host.store(keys(prompt(11)), 3)
    assert first is not None and (first.num_known, len(first.blocks)) == (0, 3)
    second = host.store(keys(prompt(10)), 3)
    assert second is not None and second.num_known == 2 and second.blocks[:2] == first.blocks[:2]
    assert host.num_free == 2, "the last, partial blocks are not shared"
    host.check([first.blocks, second.blocks])


def test_a_block_that_nobody_holds_is_known_until_its_room_is_needed() -> None:
    host = HostPool(3, 4)
    for known in (0, 2):
        stored = host.store(keys(prompt(9)), 3)
        assert stored is not None and stored.num_known == known
        host.release(stored.blocks)
    assert (host.num_free, host.num_cached) == (3, 2)
    other = host.store(keys(prompt(12, start=5)), 3)
    assert other is not None and (other.num_known, host.num_cached) == (0, 0)
    host.release(other.blocks)
    again = host.store(keys(prompt(9)), 3)
    assert again is not None and again.num_known == 0, "overwritten"


def test_what_does_not_fit_changes_nothing() -> None:
    host = HostPool(3, 4)
    held = host.store(keys(prompt(8)), 2)
    assert held is not None
    before = (host.free_list, list(host.ref_count), host.num_cached)
    assert host.store(keys(prompt(12, start=5)), 3) is None and host.store([], 2) is None
    assert host.store(keys(prompt(16)), 4) is None, "two of its four blocks are known and there is room for one more"
    assert (host.free_list, list(host.ref_count), host.num_cached) == before
    grown = host.store(keys(prompt(12)), 3)
    assert grown is not None and grown.num_known == 2 and host.num_free == 0


def test_known_blocks_that_nobody_holds_take_room_too() -> None:
    host = HostPool(2, 4)
    held = host.store(keys(prompt(8)), 2)
    assert held is not None
    host.release(held.blocks)
    before = (host.free_list, list(host.ref_count), host.num_cached)
    assert host.store(keys(prompt(12)), 3) is None, "two blocks are known, free, and all there are"
    assert (host.free_list, list(host.ref_count), host.num_cached) == before


def test_there_may_be_no_host_memory() -> None:
    assert HostPool(0, 4).store([], 1) is None
    with pytest.raises(InvalidConfig, match="num_host_blocks is -1"):
        SchedulerConfig(num_host_blocks=-1)
    with pytest.raises(InvalidConfig, match="preemption_mode is 'both'; use 'recompute' or 'swap'"):
        SchedulerConfig(preemption_mode="both")
    assert SchedulerConfig(preemption_mode="swap").preemption_mode is PreemptionMode.SWAP


class HostModel(RuleBasedStateMachine):
    """A host pool against a simple model: memory is a dictionary of what was last written to each block."""

    SIZE, BLOCKS = 2, 7

    def __init__(self) -> None:
        super().__init__()
        self.host = HostPool(self.BLOCKS, self.SIZE)
        self.tables: list[tuple[list[int], list[object]]] = []
        self.memory: dict[int, object] = {}
        self.num_partial = 0

    def held(self) -> set[int]:
        """Blocks that somebody comes back for."""
        return {block for blocks, _ in self.tables for block in blocks}

    def present(self, full: Sequence[BlockKey]) -> int:
        """Leading full blocks that are somewhere in memory."""
        hashes = [key.hash for key in full]
        return next((n for n, name in enumerate(hashes) if name not in self.memory.values()), len(hashes))

    @rule(length=st.integers(1, 9), family=st.integers(0, 2))
    def store(self, length: int, family: int) -> None:
        """What is in memory is not copied; it fits if, and only if, there is room for the rest."""
        full, count = keys(prompt(length, family), self.SIZE), -(-length // self.SIZE)
        known = self.host.lookup(full)
        assert len(known) == self.present(full)
        free = self.BLOCKS - len(self.held() | set(known))
        stored = self.host.store(full, count)
        assert (stored is not None) is (count - len(known) <= free)
        if stored is None:
            return
        assert (stored.num_known, stored.blocks[: len(known)], len(stored.blocks)) == (len(known), known, count)
        wanted: list[object] = [key.hash for key in full]
        if length % self.SIZE:
            self.num_partial += 1
            wanted.append(self.num_partial)
        for block, content in list(zip(stored.blocks, wanted, strict=True))[stored.num_known :]:
            assert block not in self.held(), "somebody else's"
            self.memory[block] = content
        self.tables.append((stored.blocks, wanted))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Somebody comes back; what was written stays until it is overwritten."""
        blocks, _ = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.host.release(blocks)

    @invariant()
    def everybody_finds_what_was_stored(self) -> None:
        """A block in two tables holds the same for both."""
        self.host.check([blocks for blocks, _ in self.tables])
        assert self.host.num_used == len(self.held())
        for blocks, wanted in self.tables:
            assert [self.memory[block] for block in blocks] == wanted


TestHostModel = HostModel.TestCase
TestHostModel.settings = settings(max_examples=60, stateful_step_count=30)


# What a plan says, and the verbs


def bench(limits: SchedulerConfig, *prompts: int) -> tuple[Bench, Directed]:
    """a, b, ... run, with prompts of these lengths; their first step is committed."""
    policy = Directed()
    driven = Bench(limits, policy)
    for name, length in zip("abcdef", prompts, strict=False):
        driven.add(name, length, 20)
    driven.step()
    return driven, policy


def held(driven: Bench) -> object:
    """All that a verb could change: both pools, the queues, and every request."""
    scheduler = driven.scheduler
    pools = [(pool.free_list, list(pool.ref_count), pool.num_cached) for pool in (scheduler.pool, scheduler.host)]
    requests = [
        (r.request_id, r.status, r.num_computed_tokens, r.num_in_flight, r.prefill_end, r.num_hashed_blocks)
        for r in scheduler.requests.values()
    ]
    tables = [(*r.block_table, "host", *r.host_table, "slot", r.kv_cache_slot) for r in scheduler.requests.values()]
    return pools, driven.running, driven.waiting, sorted(scheduler.free_slots), requests, tables


@pytest.mark.parametrize("prefix", [True, False])
def test_a_plan_carries_the_copies_of_a_swap_out(prefix: bool) -> None:
    driven, policy = bench(swap(pool=20, bs=4, prefix=prefix), 10, 5)
    a, policy.decide = driven["a"], send_away("a")
    table = list(a.block_table)
    plan = driven.plan()
    assert (plan.swap_out_requests, plan.evicted_requests, plan.swap_in_requests) == (("a",), (), ())
    assert plan.swap_out_blocks == tuple(zip(table, a.host_table, strict=True)) and len(table) == 3
    assert plan.has_work and plan.to_scheduled_batch(1).swap_out_requests == ("a",)
    assert (a.status, a.num_computed_tokens, a.block_table) == (RequestStatus.SWAPPED, 10, [])
    assert (a.num_preemptions, driven.waiting, driven.scheduler.host.num_used) == (1, ["a"], 3)
    driven.commit(plan)


@pytest.mark.parametrize("prefix", [True, False])
def test_a_plan_carries_the_copies_of_a_swap_in(prefix: bool) -> None:
    """With the prefix cache only those of blocks that the device does not know any more."""
    driven, policy = bench(swap(pool=20, bs=4, prefix=prefix), 10, 5)
    a, policy.decide = driven["a"], send_away("a")
    driven.step()
    lay = list(a.host_table)
    plan = driven.plan()
    assert (plan.swap_in_requests, plan.swap_out_requests, plan.admitted, plan.resumed) == (("a",), (), (), ())
    assert plan.swap_in_blocks == tuple(zip(lay, a.block_table, strict=True))[2 if prefix else 0 :]
    assert plan.to_scheduled_batch(2).swap_in_requests == ("a",) and plan.cached == {}
    assert plan.new_blocks["a"] == a.block_table and len(a.block_table) == 3
    assert (a.status, a.num_in_flight, a.host_table) == (RequestStatus.RUNNING, 1, lay), "kept until it is committed"
    driven.commit(plan)
    assert a.host_table == [] and driven.scheduler.host.num_used == 0 and a.num_computed_tokens == 11


def test_a_step_that_only_moves_blocks_has_work() -> None:
    driven, policy = bench(swap(pool=20, bs=4), 10)
    policy.decide = send_away("a")
    plan = driven.plan()
    assert plan.has_work and plan.total_tokens == 0 and len(plan.swap_out_blocks) == 3
    driven.commit(plan)


def test_recompute_leaves_host_memory_alone() -> None:
    limits = replace(swap(pool=20, bs=4), preemption_mode="recompute")
    driven, policy = bench(limits, 10, 5)
    policy.decide = send_away("a")
    plan = driven.plan()
    assert (plan.evicted_requests, plan.swap_out_requests, plan.swap_out_blocks) == (("a",), (), ())
    assert driven["a"].status is RequestStatus.PREEMPTED and driven.scheduler.host.num_used == 0
    driven.commit(plan)


@pytest.mark.parametrize("prefix", [True, False])
def test_a_swap_in_that_does_not_fit_changes_nothing_and_is_tried_again(prefix: bool) -> None:
    driven, policy = bench(swap(pool=8, bs=4, prefix=prefix), 10, 10)
    policy.decide = send_away("a")
    driven.step()
    tried: list[bool] = []

    def too_tight(step: Step) -> None:
        before = held(driven)
        head = step.waiting.head
        for refused in (partial(step.admit, head, 1, spare=3), partial(step.admit, head, 1, fit=24)):
            tried.append(refused())
            assert held(driven) == before, "five blocks are free and three would come back"
        step.grant_running()

    policy.decide = too_tight
    plan = driven.plan()
    assert tried == [False] * 2 and not plan.swap_in_requests and not plan.swap_in_blocks
    driven.commit(plan)
    driven.step()
    assert driven.running == ["b", "a"]
    driven.drain()


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("undo", [Step.take_back, Step.preempt])
def test_a_swap_in_is_undone_in_its_own_step(undo: Callable[[Step, RunningRequest], None], prefix: bool) -> None:
    """Whether it is taken back or preempted: it lies in host memory as before, and nothing is copied."""
    driven, policy = bench(swap(pool=20, bs=4, prefix=prefix), 10, 5)
    policy.decide = send_away("a")
    driven.step()

    def in_and_out(step: Step) -> None:
        head, before = step.waiting.head, held(driven)
        assert step.admit(head, head.owed) and held(driven) != before
        undo(step, head)
        after = held(driven)
        assert after[1:] == before[1:] and after[0][1] == before[0][1]  # type: ignore[index]
        assert sorted(after[0][0][0]) == sorted(before[0][0][0])  # type: ignore[index]
        assert step.waiting.head is head and not step.victims
        step.grant_running()

    policy.decide = in_and_out
    plan = driven.plan()
    assert not any((plan.swap_in_requests, plan.swap_in_blocks, plan.swap_out_requests, plan.swap_out_blocks))
    assert "a" not in plan.new_blocks and driven["a"].num_preemptions == 1
    driven.commit(plan)
    assert driven.step() == {"b": 1, "a": 1}


def test_who_was_taken_back_can_come_in_the_same_step_after_all() -> None:
    driven, policy = bench(swap(pool=20, bs=4, prefix=False), 10, 5)
    policy.decide = send_away("a")
    driven.step()

    def twice(step: Step) -> None:
        head = step.waiting.head
        assert step.admit(head, 1)
        step.take_back(head)
        admit_head(step)

    policy.decide = twice
    plan = driven.plan()
    assert plan.swap_in_requests == ("a",) and len(plan.swap_in_blocks) == 3
    driven.commit(plan)


def test_nothing_is_copied_for_who_was_taken_back() -> None:
    driven, policy = bench(swap(pool=20, bs=4, prefix=False), 10, 5)
    policy.decide = send_away("a", "b")
    driven.step()

    def instead(step: Step) -> None:
        first, second = step.waiting
        assert step.admit(first, 1)
        step.take_back(first)
        assert step.admit(second, 1)

    policy.decide = instead
    plan = driven.plan()
    assert plan.swap_in_requests == ("a",) and len(plan.swap_in_blocks) == 3
    assert plan.swap_in_blocks == tuple(zip(driven["a"].host_table, driven["a"].block_table, strict=True))
    driven.commit(plan)
    driven.drain()


def test_the_verbs_know_what_a_swapped_out_request_owes() -> None:
    driven, policy = bench(swap(pool=20, bs=4), 10, 5)
    policy.decide = send_away("a")
    driven.step()

    def look(step: Step) -> None:
        head = step.waiting.head
        assert step.cached_prefix(head).num_tokens == 0 and head.owed == 1 and not head.is_prefilling
        assert step.tokens_left(head) == step.budget.remaining_decode
        with pytest.raises(PolicyError, match="not running; admit it first"):
            step.grant(head, 1)
        with pytest.raises(PolicyError, match="only running requests can be preempted"):
            step.preempt(head)
        with pytest.raises(PolicyError, match="owes 1"):
            step.admit(head, 2)
        admit_head(step)

    policy.decide = look
    assert driven.step() == {"a": 1, "b": 1}


def test_a_victim_is_not_swapped_in_in_its_own_step() -> None:
    driven, policy = bench(swap(pool=20, bs=4), 10, 5)

    def decide(step: Step) -> None:
        send_away("a")(step)
        with pytest.raises(PolicyError, match="preempted in this step"):
            step.admit(step.waiting.head, 1)

    policy.decide = decide
    driven.step()


def test_a_policy_that_fails_after_a_swap_out_has_copied_nothing() -> None:
    """The preemption stands. Nothing was copied, so nothing in host memory is believed."""
    driven, policy = bench(swap(pool=20, bs=4), 10, 5)

    def fail(step: Step) -> None:
        send_away("a")(step)
        raise KeyError("a")

    policy.decide = fail
    with pytest.raises(PolicyError, match="its grants were undone"):
        driven.plan()
    driven.scheduler.check()
    a, host = driven["a"], driven.scheduler.host
    assert (a.status, a.num_computed_tokens, host.num_used, host.num_cached) == (RequestStatus.PREEMPTED, 0, 0, 0)
    assert driven.plan().resumed == ("a",)


def test_a_plan_that_is_rolled_back_forgets_what_it_did_not_copy() -> None:
    """What was copied in an earlier step is still believed; who was coming back still lies there."""
    driven, policy = bench(swap(pool=20, bs=4), 10, 5, 6)
    policy.decide = send_away("a", "b")
    driven.step()
    a, b, c, host = driven["a"], driven["b"], driven["c"], driven.scheduler.host
    lay = (list(a.host_table), list(b.host_table))

    def exchange(step: Step) -> None:
        send_away("c")(step)
        for request in list(step.waiting)[1:]:
            assert step.admit(request, 1)

    policy.decide = exchange
    plan = driven.plan()
    assert (plan.swap_in_requests, plan.swap_out_requests) == (("b", "a"), ("c",))
    driven.scheduler.rollback(plan)
    driven.scheduler.check()
    assert (a.status, b.status, c.status) == (RequestStatus.SWAPPED, RequestStatus.SWAPPED, RequestStatus.PREEMPTED)
    assert (a.host_table, b.host_table, c.host_table) == (*lay, []) and host.num_used == 5
    assert {host.key(block) for block in range(1, 41)} - {None} == {
        driven.scheduler.block_key(r, index) for r, full in ((a, 2), (b, 1)) for index in range(full)
    }


DAMAGE: dict[str, Callable[[RunningRequest, HostPool], object]] = {
    "a host block is lost": lambda a, host: a.host_table.pop(),
    "a host block is free too": lambda a, host: host.release(a.host_table[-1:]),
    "its status is that of one who lost everything": lambda a, host: setattr(a, "status", RequestStatus.PREEMPTED),
    "its tokens are not all in its blocks": lambda a, host: setattr(a, "num_computed_tokens", 4),
    "it holds a block of the device": lambda a, host: a.block_table.append(1),
}


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_check_finds_damage_of_a_swapped_out_request(damage: str) -> None:
    driven, policy = bench(swap(pool=20, bs=4), 10, 5)
    policy.decide = send_away("a")
    driven.step()
    DAMAGE[damage](driven["a"], driven.scheduler.host)
    with pytest.raises(IntegrityError):
        driven.scheduler.check()


# In an engine that works


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("bs", [1, 4, 16])
@pytest.mark.parametrize("host", [0, 2, 100])
def test_any_size_of_host_memory_gives_the_tokens_of_each_request_alone(host: int, bs: int, prefix: bool) -> None:
    engine, toy = toy_engine(swap(host, pool=48 // bs, bs=bs, budget=24, seqs=6, prefix=prefix))
    assert_alone(toy, serve(engine, crowd(), params(14)), params(14))
    out, back, full = swapped(engine.trace)
    assert out == back and engine.scheduler.host.num_free == host
    assert (out > 0) is (host * bs >= 8), "8 tokens are the least that a victim here has computed"
    assert (full > 0) is (host < 100)


def test_nothing_is_computed_again_with_ample_host_memory() -> None:
    metrics = {}
    for mode in ("recompute", "swap"):
        engine, _ = toy_engine(replace(swap(pool=12, bs=4, budget=24, seqs=6, prefix=False), preemption_mode=mode))
        serve(engine, crowd(), params(14))
        metrics[mode] = summarise(engine.trace)
    assert metrics["recompute"].recomputed_tokens > 0 == metrics["swap"].recomputed_tokens
    again, kept = metrics["recompute"], metrics["swap"]
    assert kept.computed_tokens == again.computed_tokens - again.recomputed_tokens == 6 * 7 + 6 * 13
    assert kept.preemptions == swapped(engine.trace)[0] > 0
    assert [r.num_preemptions for r in kept.requests.values()] == [
        sum(name in step.swapped_out for step in engine.trace.steps) for name in crowd()
    ]


def test_the_time_in_host_memory_counts() -> None:
    engine, _, policy = directed(swap(pool=20, bs=4), {"a": prompt(10), "b": prompt(5, 9)}, 4)
    for decide in (send_away("a"), Step.grant_running, Step.grant_running):
        policy.decide = decide
        step(engine)
    finish(engine, engine.executor, params(4))  # type: ignore[arg-type]  # it is the toy
    times = summarise(engine.trace).requests["a"].steps
    assert times.tokens == (1, 5, 6, 7) and times.longest_gap == 4 and times.tpot == 2


def test_a_victim_without_room_is_computed_again_and_the_trace_says_so() -> None:
    engine, toy = toy_engine(swap(3, pool=12, bs=4, budget=24, seqs=6, prefix=False))
    assert_alone(toy, serve(engine, crowd(), params(14)), params(14))
    out, _, full = swapped(engine.trace)
    assert out > 0 < full
    for record in engine.trace.steps:
        for name in record.preempted:
            reason, needs, left = record.reasons[name]
            assert reason == BlockReason.HOST_BLOCKS.value == "host blocks" and 3 >= left < needs
        told = {name for name, blocked in record.reasons.items() if blocked.reason == "host blocks"}
        assert told == set(record.preempted)
    assert summarise(engine.trace).recomputed_tokens > 0


@pytest.mark.parametrize("prefix", [True, False])
def test_a_common_prefix_is_copied_once(prefix: bool) -> None:
    shared = prompt(8)
    prompts = {"a": [*shared, 1, 2], "b": [*shared, 3, 4], "c": prompt(5, 9)}
    engine, toy, policy = directed(swap(pool=40, bs=4, prefix=prefix), prompts)
    policy.decide = send_away("b", "a")
    assert step(engine).swapped_out == ["b", "a"]
    assert toy.num_copied == (2 + 1 + 1 if prefix else 3 + 3)
    tables = [engine.scheduler.requests[name].host_table for name in "ab"]
    assert [len(table) for table in tables] == [3, 3] and (tables[0][:2] == tables[1][:2]) is prefix
    finish(engine, toy, params(20))


def test_who_comes_back_leaves_what_another_one_still_needs() -> None:
    shared = prompt(8)
    prompts = {"a": [*shared, 1, 2], "b": [*shared, 3, 4], "c": prompt(5, 9)}
    engine, toy, policy = directed(swap(4, pool=40, bs=4), prompts)
    policy.decide = send_away("b", "a")
    step(engine)
    policy.decide = admit_head
    assert step(engine).swapped_in == ["a"] and engine.scheduler.host.num_used == 3
    policy.decide = send_away("c")
    record = step(engine)
    assert record.preempted == ["c"] and record.reasons["c"] == ("host blocks", 2, 1), "b's are not touched"
    finish(engine, toy, params(20))


def test_who_goes_a_second_time_copies_only_what_is_new() -> None:
    engine, toy, policy = directed(swap(pool=40, bs=4), {"a": prompt(10), "b": prompt(5, 9)})
    policy.decide = send_away("a")
    step(engine)
    assert toy.num_copied == 3
    assert step(engine).swapped_in == ["a"]
    policy.decide = send_away("a")
    step(engine)
    assert toy.num_copied == 4, "two full blocks are in host memory still; the last one has a new token"
    finish(engine, toy, params(20))


def test_what_the_device_still_has_is_not_copied_back() -> None:
    engine, toy, policy = directed(swap(pool=40, bs=4), {"a": prompt(10), "b": prompt(5, 9)})
    policy.decide = send_away("a")
    step(engine)
    assert step(engine).swapped_in == ["a"] and list(map(len, toy.back)) == [1], "the partial block only"
    finish(engine, toy, params(20))


def test_a_prompt_may_hit_blocks_that_come_back_in_the_same_step() -> None:
    """The copies are made before the forward pass."""
    engine, toy, policy = directed(swap(pool=5, bs=4), {"a": prompt(8), "b": prompt(5, 9)}, 9)
    policy.decide = send_away("a")
    step(engine)
    engine.add_request(prompt(16, 30), params(1), request_id="flood")
    policy.decide = lambda step: each(
        partial(step.preempt, step.running[0]), partial(step.admit, [*step.waiting][-1], 16)
    )
    step(engine)
    engine.add_request([*prompt(8), 5], params(9), request_id="like a")

    def both(step: Step) -> None:
        admit_head(step)
        late = list(step.waiting)[-1]
        hit = step.cached_prefix(late)
        assert hit.num_tokens == 8 and step.admit(late, 1, hit)

    assert [r.request_id for r in engine.scheduler.waiting] == ["b", "a", "like a"]
    engine.abort("b")
    copied = len(toy.back)
    policy.decide = both
    assert step(engine).swapped_in == ["a"] and len(toy.back) > copied and len(toy.back[-1]) == 2
    del engine.completions["b"], engine.completions["flood"]
    finish(engine, toy, params(9))


def test_it_goes_on_in_the_middle_of_its_prompt() -> None:
    engine, toy, policy = directed(swap(pool=40, bs=4, budget=6, prefix=False), {"a": prompt(20)})
    policy.decide = send_away("a")
    record = step(engine)
    assert (record.swapped_out, record.counts) == (["a"], [])
    assert engine.scheduler.requests["a"].status is RequestStatus.SWAPPED
    record = step(engine)
    assert (record.swapped_in, record.starts, record.counts, record.kinds) == (["a"], [6], [6], "P")
    finish(engine, toy, params(20))
    assert summarise(engine.trace).recomputed_tokens == 0


def test_a_prompt_that_is_computed_again_can_be_swapped_out_meanwhile() -> None:
    """First there was no room in host memory; the second time, in the middle of the recomputation, there is."""
    engine, toy, policy = directed(swap(2, pool=40, bs=4, budget=8, prefix=False), {"a": prompt(14)})
    for _ in range(3):
        step(engine)
    policy.decide = send_away("a")
    assert step(engine).reasons["a"] == ("host blocks", 4, 2)
    assert step(engine).kinds == "R"
    policy.decide = send_away("a")
    assert step(engine).swapped_out == ["a"]
    record = step(engine)
    assert (record.swapped_in, record.starts, record.counts, record.kinds) == (["a"], [8], [8], "R")
    finish(engine, toy, params(20))
    assert summarise(engine.trace).recomputed_tokens == 16


def test_the_least_urgent_goes_and_the_most_urgent_comes_back_first() -> None:
    policy, toy = Directed("priority"), Toy(40, 4)
    engine = Engine(toy, swap(pool=40, bs=4), policy, clock=Ticks())
    for name, urgency in (("a", 2), ("b", 0), ("c", 1), ("d", 2)):
        engine.add_request(prompt(6, ord(name)), params(6), request_id=name, priority=urgency)
    step(engine)
    gone = []
    for _ in range(3):
        policy.decide = lambda step: each(partial(step.preempt, policy.victim(step)), step.grant_running)
        gone += step(engine).swapped_out
    assert gone == ["d", "a", "c"]
    engine.add_request(prompt(3, 50), params(2), request_id="e", priority=2)
    engine.add_request(prompt(3, 51), params(2), request_id="f", priority=1)
    record = step(engine)
    assert record.swapped_in == ["c", "a", "d"] and record.request_ids == ["b", "c", "f", "a", "d", "e"]
    wanted = {name: params(2 if name in "ef" else 6) for name in "abcdef"}
    engine.run()
    assert_alone(toy, engine.completions, wanted)


@pytest.mark.parametrize("prefix", [True, False])
def test_a_policy_that_never_mixes_does_not_mix_who_comes_back(prefix: bool) -> None:
    """A request that was swapped out while it decoded still decodes: it does not join a step of prefills."""
    engine, toy = toy_engine(swap(pool=12, bs=4, budget=24, seqs=6, prefix=prefix), "NanoVllm")
    waves = [(0, name, tokens) for name, tokens in crowd().items()]
    waves += [(number, f"late{number}", prompt(4, number + 20)) for number in (5, 8, 12, 16, 20)]
    number = 0
    while engine.has_unfinished or waves:
        while waves and waves[0][0] <= number:
            _, name, tokens = waves.pop(0)
            engine.add_request(tokens, params(14), request_id=name)
        record = step(engine)
        assert not (record.decode_tokens and record.prefill_tokens)
        number += 1
    assert swapped(engine.trace)[0] > 3
    assert_alone(toy, engine.completions, params(14))


def test_a_seat_and_the_budget_are_needed_to_come_back() -> None:
    engine, toy, policy = directed(swap(pool=40, bs=4, seqs=2, budget=2), {"a": prompt(1)})
    policy.decide = send_away("a")
    step(engine)
    for name in "bc":
        engine.add_request(prompt(1, ord(name)), params(20), request_id=name)
    policy.decide = lambda step: [step.admit(request, 1) for request in list(step.waiting)[1:]]
    assert step(engine).admitted == ["b", "c"]
    assert step(engine).reasons["a"].reason == "sequences"
    engine.abort("c")
    assert step(engine).swapped_in == ["a"]
    del engine.completions["c"]
    finish(engine, toy, params(20))


@pytest.mark.parametrize("ends", ["abort", "timeout", "abort_all", "close", "stream"])
def test_a_request_can_end_while_it_is_swapped_out(ends: str) -> None:
    engine, toy, policy = directed(swap(pool=40, bs=4), {"b": prompt(5, 9)})
    stream = engine.stream(prompt(10), params(20), request_id="a", timeout=30.0 if ends == "timeout" else None)
    step(engine)
    policy.decide = send_away("a")
    step(engine)
    assert engine.scheduler.requests["a"].status is RequestStatus.SWAPPED and engine.scheduler.host.num_used == 3
    if ends == "timeout":
        while "a" in engine.scheduler.requests:
            policy.decide = Step.grant_running
            step(engine)
        assert isinstance(engine.completions["a"].error, DeadlineExceeded)
    elif ends == "abort":
        assert engine.abort("a") and not engine.abort("a")
    else:
        each({"stream": stream.close, "abort_all": engine.abort_all, "close": engine.close}[ends])
    assert engine.trace.finished["a"].reason == "abort" and engine.trace.finished["a"].num_output_tokens == 1
    assert engine.scheduler.host.num_used == 0
    engine.scheduler.check()
    engine.run()
    if ends not in ("abort_all", "close"):
        assert_alone(toy, {"b": engine.completions["b"]}, params(20))
    assert_empty(engine)


def test_a_policy_that_brings_nobody_back_is_told_who_waits() -> None:
    engine, _, policy = directed(swap(pool=40, bs=4), {"a": prompt(10), "b": prompt(5, 9)})
    policy.decide = send_away("b", "a")
    step(engine)
    policy.schedule = lambda step: None  # type: ignore[method-assign]
    with pytest.raises(SchedulerStalled, match=r"<a swapped: 10 of 11 tokens computed, 0 blocks> is blocked by policy"):
        for _ in range(30):
            engine.step()
    engine.scheduler.check()


def test_a_run_with_swaps_survives_a_file(tmp_path: Path) -> None:
    limits = swap(5, pool=12, bs=4, budget=24, seqs=6)
    engine, _ = toy_engine(limits)
    serve(engine, crowd(), params(14))
    engine.trace.save(tmp_path / "run.jsonl")
    loaded = Trace.load(tmp_path / "run.jsonl")
    assert loaded == engine.trace and loaded.digest() == engine.trace.digest() and min(swapped(loaded)) > 0
    assert SchedulerConfig(**loaded.config) == limits
    recording = Engine(Toy(12, 4), limits, clock=Ticks(), record_to=tmp_path / "as it goes.jsonl")
    for name, tokens in crowd().items():
        recording.add_request(tokens, params(14), request_id=name)
    recording.run()
    recording.close()
    assert Trace.load(tmp_path / "as it goes.jsonl").digest() == loaded.digest()


def test_a_run_with_swaps_is_drawn_and_told() -> None:
    engine, _ = toy_engine(swap(5, pool=12, bs=4, budget=24, seqs=6))
    serve(engine, crowd(), params(14))
    trace, view = engine.trace, View(engine.trace)
    said = [decision.text for decisions in view.decisions for decision in decisions]
    out, back, full = swapped(trace)
    assert sum("is swapped out" in text for text in said) == out > 0
    assert sum("is swapped in" in text for text in said) == back > 0
    assert sum("host memory is too full" in text for text in said) == full > 0
    assert f"; {out + full} preemptions; " in view.summary and out + full == summarise(trace).preemptions
    for caption, record in zip(view.captions, trace.steps, strict=True):
        told = {verb: f"; {verb}: " in caption for verb in ("swapped out", "swapped in", "preempted")}
        assert list(told.values()) == list(map(bool, (record.swapped_out, record.swapped_in, record.preempted)))
    for t, record in enumerate(trace.steps):
        blocks = [state for state, _ in view.frame(t).blocks.values()]
        assert (blocks.count("owned"), blocks.count("cached")) == view.pool_use[t]
        assert len(view.queues[t]) == record.num_waiting
        assert all(view.lanes[name][t] == "S" for name in record.swapped_out)
        assert all(view.lanes[name][t] in "PRD" for name in record.swapped_in)
    for draw in (plots.overview, plots.timeline, plots.budget, plots.blocks, plots.gaps):
        assert draw(trace).get_label()
    plots.compare(trace, trace)
    assert "is swapped in from host memory" in to_html(trace)
