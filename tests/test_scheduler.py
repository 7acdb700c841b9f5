"""The scheduler and its step verbs: what is refused, what is undone, what is committed, and when it gives up."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contbatch.blocks import NO_PARENT, BlockKey, block_hash
from contbatch.budget import TokenBudget
from contbatch.config import SchedulerConfig
from contbatch.errors import (
    ContbatchError,
    DuplicateRequest,
    IntegrityError,
    InvalidConfig,
    InvalidRequest,
    PolicyError,
    RequestTooLarge,
    SchedulerStalled,
)
from contbatch.plan import BlockReason, IterationPlan
from contbatch.policies import PrefillDecodeBudget, StaticBatching, VllmV1
from contbatch.request import FinishReason, Request, RequestStatus, RunningRequest
from contbatch.scheduler import IDLE_LIMIT, THRASH_LIMIT, Scheduler
from contbatch.step import PrefixHit, Step
from tests.toy import Bench, Scripted, Verb, config, each, granted, params


def snapshot(scheduler: Scheduler) -> dict[str, Any]:
    """All that a step may change, as far as a rollback must restore it."""
    pool = scheduler.pool
    return {
        "running": list(scheduler.running),
        "waiting": list(scheduler.waiting),
        "slots": sorted(scheduler.free_slots),
        "refs": list(pool.ref_count),
        "free": sorted(pool.free_list),
        "cached": pool.num_cached,
        "keys": dict(pool._keys),
        "requests": {
            name: (
                request.status,
                tuple(request.token_ids),
                request.num_computed_tokens,
                request.num_in_flight,
                tuple(request.block_table),
                request.num_hashed_blocks,
                request.num_reserved_tokens,
                request.kv_cache_slot,
                request.num_preemptions,
            )
            for name, request in scheduler.requests.items()
        },
    }


# Refusals of add


def test_a_refused_request_changes_nothing() -> None:
    bench = Bench(config(pool=4, mml=32), VllmV1(), vocab=5000)
    bench.add("a", [1, 2, 3], max_tokens=3)
    bench.step()
    before = snapshot(bench.scheduler)
    for name, tokens, max_tokens in (("a", [1], 1), ("b", [5000], 1), ("c", [1] * 16, 2), ("d", [1] * 32, 1)):
        with pytest.raises(InvalidRequest, match=f"'{name}'"):
            bench.add(name, tokens, max_tokens)
        assert snapshot(bench.scheduler) == before
    bench.drain()


def test_b001_with_chunking_off_a_prompt_must_fit_the_budget() -> None:
    bench = Bench(config(budget=16, chunked=False, bs=4, pool=40), VllmV1())
    bench.add("fits", 16, max_tokens=1)
    with pytest.raises(
        RequestTooLarge, match=r"prompt of 17 tokens exceeds the 16 prefill .*max_num_batched_tokens=16"
    ):
        bench.add("large", 17, max_tokens=1)
    assert bench.step() == {"fits": 16} and not bench.scheduler.has_unfinished


def test_b001_the_budget_that_counts_is_the_policys() -> None:
    bench = Bench(config(budget=16, chunked=False), StaticBatching())
    bench.add("whole", 40, max_tokens=1)
    assert bench.step() == {"whole": 40}, "StaticBatching declares no budget"
    bench = Bench(config(budget=16, chunked=False), PrefillDecodeBudget(max_prefill=8))
    with pytest.raises(RequestTooLarge, match="prompt of 9 tokens exceeds the 8 prefill tokens"):
        bench.add("a", 9, max_tokens=1)
    bench.add("b", 8, max_tokens=1)
    bench.drain()


@pytest.mark.parametrize("policy", [VllmV1, PrefillDecodeBudget])
def test_with_chunking_off_no_prompt_is_cut(policy: Callable[[], VllmV1]) -> None:
    bench = Bench(config(budget=16, chunked=False), policy())
    bench.add("a", 10, max_tokens=4)
    bench.add("b", 10, max_tokens=4)
    plan = bench.plan()
    assert granted(plan) == {"a": 10} and plan.blocked["b"] == ("budget", 10, 6)
    bench.commit(plan)
    assert bench.step() == {"a": 1, "b": 10}


@pytest.mark.parametrize("policy", [VllmV1, PrefillDecodeBudget])
def test_with_chunking_off_a_preempted_request_that_outgrew_the_budget_resumes(policy: Callable[[], VllmV1]) -> None:
    bench = Bench(config(pool=7, bs=4, budget=9, chunked=False, prefix=False), policy())
    bench.add("a", 8, max_tokens=12)
    bench.add("b", 8, max_tokens=12)
    bench.drain()
    resumed = [plan for plan in bench.plans if plan.resumed]
    assert resumed and max(sum(granted(plan).values()) for plan in bench.plans) <= 9
    assert any(plan.prefill_tasks and not plan.prefill_tasks[0].is_last_chunk for plan in resumed)


def test_b014_what_exceeds_the_pool_is_refused_with_both_numbers() -> None:
    bench = Bench(config(pool=6, bs=4, mml=64), VllmV1())
    with pytest.raises(RequestTooLarge, match=r"25 prompt tokens and max_tokens=8 need 8 blocks.*num_blocks=6"):
        bench.add("large", 25)
    bench.add("small", 8)
    bench.drain()
    assert not bench.scheduler.has_unfinished


def test_a_request_needs_a_slot_for_every_token_but_the_last() -> None:
    bench = Bench(config(pool=4, bs=4), VllmV1())
    with pytest.raises(RequestTooLarge):
        bench.add("a", 8, max_tokens=10)
    bench.add("a", 8, max_tokens=9)
    bench.drain()
    assert all(not plan.evicted_requests for plan in bench.plans)


def test_b023_a_prompt_must_leave_room_for_one_token() -> None:
    bench = Bench(config(mml=32), VllmV1())
    request = bench.add("a", 31, max_tokens=5)
    assert request.max_tokens == 1, "cut to the model length"
    with pytest.raises(RequestTooLarge, match="prompt of 32 tokens leaves no room for output within max_model_len=32"):
        bench.add("b", 32)
    plan = bench.plan()
    (output,) = bench.commit(plan)
    assert output.finish_reason is FinishReason.LENGTH
    bench.add("c", 3)
    bench.drain()


@pytest.mark.parametrize(("asked", "got"), [(6, 6), (7, 6), (None, 6), (1, 1)])
def test_b024_b139_max_tokens_is_cut_to_the_model_length(asked: int | None, got: int) -> None:
    bench = Bench(config(mml=16), VllmV1())
    request = bench.add("a", 10, max_tokens=asked)
    bench.drain()
    assert request.num_output_tokens == got
    assert request.high_water == 10 + got - 1, "the last token is never written: the highest position is mml - 2"


def test_b142_max_tokens_is_cut_not_refused() -> None:
    for asked, got in ((10, 10), (11, 10), (20, 10)):
        bench = Bench(config(mml=16), VllmV1())
        assert bench.add("a", 6, max_tokens=asked).max_tokens == got


def test_max_tokens_none_means_as_much_as_model_and_pool_hold() -> None:
    bench = Bench(config(pool=4, bs=4, mml=64), VllmV1())
    request = bench.add("a", 10, max_tokens=None)
    assert request.max_tokens == 4 * 4 + 1 - 10
    assert bench.add("b", 16, max_tokens=None).max_tokens == 1
    with pytest.raises(RequestTooLarge, match="17 prompt tokens"):
        bench.add("c", 17, max_tokens=None)
    bench.drain()
    assert request.num_output_tokens == 7


def test_b135_an_id_is_unique_among_unfinished_requests() -> None:
    bench = Bench(config(), VllmV1())
    first = bench.add("r", 5, max_tokens=2)
    with pytest.raises(DuplicateRequest, match="'r' is in use"):
        bench.add("r", 3)
    assert bench["r"] is first
    bench.drain()
    second = bench.add("r", 3, max_tokens=2)
    assert second is not first and second.index > first.index
    bench.drain()


def test_a_token_outside_the_vocabulary_is_named() -> None:
    bench = Bench(config(), VllmV1(), vocab=100)
    bench.add("ok", [0, 99])
    with pytest.raises(InvalidRequest, match="'bad': token id 100 is outside the vocabulary; use ids from 0 to 99"):
        bench.add("bad", [0, 100, 3])


@given(
    pool=st.integers(1, 20),
    bs=st.integers(1, 5),
    budget=st.integers(1, 12),
    seqs=st.integers(1, 4),
    mml=st.integers(2, 40),
    chunked=st.booleans(),
    lengths=st.lists(st.tuples(st.integers(1, 40), st.none() | st.integers(1, 20)), min_size=1, max_size=6),
)
@settings(max_examples=60)
def test_b030_what_is_not_refused_finishes(
    pool: int, bs: int, budget: int, seqs: int, mml: int, chunked: bool, lengths: list[tuple[int, int | None]]
) -> None:
    bench = Bench(config(pool=pool, bs=bs, budget=budget, seqs=seqs, mml=mml, chunked=chunked), VllmV1())
    accepted: list[RunningRequest] = []
    for index, (length, max_tokens) in enumerate(lengths):
        try:
            accepted.append(bench.add(f"r{index}", length, max_tokens))
        except RequestTooLarge:
            continue
    for step in bench.drain(limit=5000):
        assert step, "no step without tokens while somebody waits"
    assert all(request.num_output_tokens == request.max_tokens for request in accepted)


# Verbs: every way to be refused


def run_once(
    verb: Callable[[Step, RunningRequest, RunningRequest], object], limits: SchedulerConfig | None = None
) -> Bench:
    """A step with one running and one waiting request of 8 tokens, in which a policy does something wrong."""
    bench = Bench(limits or config(budget=8, bs=4, prefix=False), Scripted(lambda step: None))
    first, second = bench.add("run", 8), bench.add("wait", 8)
    bench.scheduler.policy = Scripted(lambda step: step.admit(first, 4))
    bench.step()
    bench.scheduler.policy = Scripted(lambda step: verb(step, first, second))
    before = snapshot(bench.scheduler)
    with pytest.raises(PolicyError):
        bench.scheduler.plan()
    bench.scheduler.check()
    assert snapshot(bench.scheduler) == before, "what the policy had granted is undone"
    return bench


def stranger() -> RunningRequest:
    """A request that no scheduler knows."""
    return RunningRequest(Request("run", range(8)), 0, 8)


def running_stranger() -> RunningRequest:
    """A request that claims to run."""
    request = stranger()
    request.status = RequestStatus.RUNNING
    return request


WRONG: dict[str, Callable[[Step, RunningRequest, RunningRequest], object]] = {
    "grant to a waiting request": lambda step, run, wait: step.grant(wait, 1),
    "grant of nothing": lambda step, run, wait: step.grant(run, 0),
    "grant of less than nothing": lambda step, run, wait: step.grant(run, -1),
    "grant of half a token": lambda step, run, wait: step.grant(run, 0.5),  # type: ignore[arg-type]
    "grant of a float": lambda step, run, wait: step.grant(run, 2.0),  # type: ignore[arg-type]
    "grant of more than is owed": lambda step, run, wait: step.grant(run, 5),
    "grant twice": lambda step, run, wait: step.grant(run, 1) and step.grant(run, 1),
    "grant out of thin air": lambda step, run, wait: step.grant(stranger(), 1),
    "grant to a stranger that runs": lambda step, run, wait: step.grant(running_stranger(), 1),
    "grant that holds a float": lambda step, run, wait: step.grant(run, 1, hold=7.5),  # type: ignore[arg-type]
    "admit a running request": lambda step, run, wait: step.admit(run, 1),
    "admit nothing": lambda step, run, wait: step.admit(wait, 0),
    "admit a float": lambda step, run, wait: step.admit(wait, 4.0),  # type: ignore[arg-type]
    "admit more than is owed": lambda step, run, wait: step.grant(run, 1) and step.admit(wait, 9),
    "admit twice": lambda step, run, wait: step.admit(wait, 1) and step.admit(wait, 1),
    "admit, then grant": lambda step, run, wait: step.admit(wait, 1) and step.grant(wait, 1),
    "admit out of thin air": lambda step, run, wait: step.admit(stranger(), 1),
    "admit that holds a float": lambda step, run, wait: step.admit(wait, 1, hold=8.5),  # type: ignore[arg-type]
    "admit with a made-up hit": lambda step, run, wait: step.admit(wait, 4, PrefixHit((5,), 4)),
    "admit with the blocks of another": lambda step, run, wait: step.admit(
        wait, 4, PrefixHit(tuple(run.block_table), 4)
    ),
    "admit with a hit of tokens but no blocks": lambda step, run, wait: step.admit(wait, 4, PrefixHit((), 4)),
    "admit the victim of this step": lambda step, run, wait: each(
        lambda: step.preempt(run), lambda: step.admit(run, 1)
    ),
    "preempt a waiting request": lambda step, run, wait: step.preempt(wait),
    "preempt out of thin air": lambda step, run, wait: step.preempt(running_stranger()),
    "take back what was not granted": lambda step, run, wait: step.take_back(run),
    "take back from a stranger": lambda step, run, wait: step.take_back(stranger()),
    "take back twice": lambda step, run, wait: each(
        lambda: step.grant(run, 1), lambda: step.take_back(run), lambda: step.take_back(run)
    ),
    "budget": lambda step, run, wait: step.grant(run, 4) and step.admit(wait, 5),
    "raise": lambda step, run, wait: step.grant(run, 4) and step.admit(wait, 4) and 1 / 0,
    "no method": lambda step, run, wait: step.grant(run, 4) and step.give(wait),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_policy_is_refused_and_undone(wrong: str) -> None:
    if "victim" in wrong:
        with pytest.raises(AssertionError, match="undone"):
            run_once(WRONG[wrong])  # a preemption stands; nothing else may differ, see below
        return
    bench = run_once(WRONG[wrong])
    bench.scheduler.policy = VllmV1()
    bench.drain()


def test_a_preemption_stands_when_the_policy_fails_afterwards() -> None:
    bench = Bench(config(), VllmV1())
    request = bench.add("a", 8)
    bench.step()

    def wrong(step: Step) -> None:
        step.preempt(request)
        step.admit(request, 1)

    bench.scheduler.policy = Scripted(wrong)
    with pytest.raises(PolicyError, match="was preempted in this step"):
        bench.scheduler.plan()
    bench.scheduler.check()
    assert request.status is RequestStatus.PREEMPTED and bench.waiting == ["a"]
    bench.scheduler.policy = VllmV1()
    bench.drain()


def test_b052_no_more_than_max_num_seqs_run() -> None:
    bench = Bench(config(seqs=2), Scripted(lambda step: [step.admit(r, 1) for r in list(step.waiting)]))
    for name in "abc":
        bench.add(name, 4)
    before = snapshot(bench.scheduler)
    with pytest.raises(PolicyError, match="all 2 seats"):
        bench.scheduler.plan()
    assert snapshot(bench.scheduler) == before


def test_messages_name_the_request_and_the_numbers() -> None:
    bench = Bench(config(budget=6), Scripted(lambda step: step.admit(step.waiting.head, 9)))
    bench.add("long", 8)
    with pytest.raises(PolicyError, match=r"grant of 9 tokens to <long waiting: 0 of 8 .*owes 8; use 1 to 8"):
        bench.scheduler.plan()
    bench.scheduler.policy = Scripted(lambda step: step.admit(step.waiting.head, 7))
    with pytest.raises(PolicyError, match=r"grant of 7 tokens to <long .* with 6 left in the budget"):
        bench.scheduler.plan()
    bench.scheduler.policy = Scripted(lambda step: 1 / 0 and None, name="Broken")
    with pytest.raises(PolicyError, match="policy Broken raised ZeroDivisionError") as caught:
        bench.scheduler.plan()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_step_that_is_over_is_closed() -> None:
    kept: list[Step] = []
    bench = Bench(config(), Scripted(lambda step: kept.append(step)))
    request = bench.add("a", 8)
    plan = bench.plan()
    before = snapshot(bench.scheduler)
    verbs: list[Verb] = [
        lambda: kept[0].admit(request, 1),
        lambda: kept[0].grant(request, 1),
        lambda: kept[0].preempt(request),
        lambda: kept[0].take_back(request),
    ]
    for verb in verbs:
        with pytest.raises(PolicyError, match="this step is over"):
            verb()
    assert snapshot(bench.scheduler) == before
    bench.commit(plan)


def test_a_budget_that_is_not_fresh_is_reset() -> None:
    policy = VllmV1()
    shared = TokenBudget.of(4)
    policy.token_budget = lambda config: shared  # type: ignore[method-assign]  # for this test only
    bench = Bench(config(), policy)
    bench.add("a", 8, max_tokens=2)
    assert [sum(step.values()) for step in bench.drain()] == [4, 4, 1]


@pytest.mark.parametrize("hook", ["token_budget", "schedule"])
def test_a_hook_that_raises_is_a_policy_error(hook: str) -> None:
    def broken(*_: object) -> None:
        raise KeyError("oops")

    policy = VllmV1()
    bench = Bench(config(), policy)
    bench.add("a", 8)
    setattr(policy, hook, broken)
    with pytest.raises(PolicyError, match=r"policy VllmV1 raised KeyError\('oops'\)"):
        bench.scheduler.plan()
    delattr(policy, hook)
    bench.drain()


def test_on_finish_that_raises_loses_nothing() -> None:
    def broken(request: RunningRequest) -> None:
        raise KeyError(request.request_id)

    policy = VllmV1()
    policy.on_finish = broken  # type: ignore[method-assign]
    bench = Bench(config(), policy)
    for name, max_tokens in (("a", 1), ("b", 2), ("c", 3)):
        bench.add(name, 4, max_tokens)
    outputs = bench.commit(bench.plan())
    assert [output.request.request_id for output in outputs] == ["a", "b", "c"], "the commit is complete"
    with pytest.raises(PolicyError, match=r"raised KeyError\('a'\) in on_finish"):
        bench.scheduler.plan()
    del policy.on_finish
    bench.drain()


def test_a_queue_key_that_raises_adds_nothing() -> None:
    policy = VllmV1("priority")
    policy.queue_key = lambda request: (1 / request.request.priority,)
    bench = Bench(config(), policy)
    bench.add("a", 4, priority=1)
    with pytest.raises(PolicyError, match=r"ZeroDivisionError.* request 'b', which was not added"):
        bench.add("b", 4, priority=0)
    assert list(bench.scheduler.requests) == ["a"] == bench.waiting
    bench.drain()


def test_equal_queue_keys_keep_the_order_of_arrival() -> None:
    policy = VllmV1()
    policy.queue_key = lambda request: (0,)
    bench = Bench(config(), policy)
    for name in "dbca":
        bench.add(name, 4)
    assert bench.waiting == list("dbca") and list(bench.step()) == list("dbca")


def test_an_interrupt_while_planning_leaves_nothing_behind() -> None:
    def interrupted(step: Step) -> None:
        step.admit(step.waiting.head, 2)
        raise KeyboardInterrupt

    bench = Bench(config(), VllmV1())
    bench.add("a", 4)
    before = snapshot(bench.scheduler)
    bench.scheduler.policy = Scripted(interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench.scheduler.plan()
    assert snapshot(bench.scheduler) == before
    bench.scheduler.policy = VllmV1()
    bench.drain()


# Verbs: what they do


def test_a_refused_allocation_changes_nothing() -> None:
    seen: list[bool] = []

    def greedy(step: Step) -> None:
        before = snapshot(bench.scheduler)
        seen.append(step.grant(first, 4))
        assert snapshot(bench.scheduler) == before and step.budget.total_tokens == 0
        seen.append(step.admit(second, 4))
        seen.append(step.admit(second, 4, spare=1))
        seen.append(step.admit(second, 4, fit=9))
        assert snapshot(bench.scheduler) == before and step.budget.total_tokens == 0
        assert not step.was_granted(first) and not step.was_granted(second)

    bench = Bench(config(pool=2, bs=4, prefix=False), Scripted(lambda step: step.admit(first, 4, hold=8)))
    first, second = bench.add("a", 8, max_tokens=1), bench.add("b", 8, max_tokens=1)
    bench.step()
    first.block_table, spare = first.block_table[:1], first.block_table[1:]
    first.num_reserved_tokens = 0
    held = bench.scheduler.pool
    bench.scheduler.pool.check([first.block_table, spare])
    bench.scheduler.policy = Scripted(greedy)
    bench.scheduler.plan()
    assert seen == [False] * 4 and held.num_free == 0


def test_spare_and_fit_keep_blocks_free() -> None:
    def schedule(step: Step) -> None:
        head = step.waiting.head
        assert not step.admit(head, 4, spare=7) and not step.admit(head, 4, fit=29)
        assert not step.admit(head, 4, spare=4, fit=16)
        assert step.admit(head, 4, spare=3, fit=16)
        assert len(head.block_table) == 1, "what must fit is not taken"

    bench = Bench(config(pool=7, bs=4), Scripted(schedule))
    bench.add("a", 16)
    bench.plan()


def test_hold_reserves_blocks_ahead_and_check_knows_it() -> None:
    bench = Bench(config(pool=8, bs=4), Scripted(lambda step: step.admit(step.waiting.head, 4, hold=14)))
    request = bench.add("a", 8)
    plan = bench.plan()
    assert len(request.block_table) == 4
    bench.scheduler.rollback(plan)
    assert not request.block_table and not request.num_reserved_tokens
    bench.step()
    bench.scheduler.policy = Scripted(lambda step: step.grant(request, 4, hold=20))
    plan = bench.plan()
    assert len(request.block_table) == 5
    bench.scheduler.rollback(plan)
    assert len(request.block_table) == 4
    bench.scheduler.check()
    bench.scheduler.policy = VllmV1()
    bench.drain()


def test_take_back_returns_tokens_blocks_and_place() -> None:
    def schedule(step: Step) -> None:
        before = snapshot(bench.scheduler)
        second = list(step.waiting)[1]
        assert step.admit(second, 5)
        step.take_back(second)
        assert snapshot(bench.scheduler) == before and step.budget.total_tokens == 0 == step.budget.num_seqs
        assert step.admit(second, 5), "it may be granted again"

    bench = Bench(config(), Scripted(schedule))
    for name in "abc":
        bench.add(name, 6)
    plan = bench.plan()
    assert granted(plan) == {"b": 5} and plan.new_blocks == {"b": bench["b"].block_table}


def test_take_back_from_one_whose_planned_blocks_are_shared_is_refused() -> None:
    def schedule(step: Step) -> None:
        first, second = step.waiting
        step.admit(first, 9)
        hit = step.cached_prefix(second)
        assert hit.num_tokens == 8, "planned blocks can be hit in the same step"
        step.admit(second, 1, hit)
        step.take_back(first)

    bench = Bench(config(), Scripted(schedule))
    for name in "ab":
        bench.add(name, list(range(9)))
    before = snapshot(bench.scheduler)
    with pytest.raises(PolicyError, match="shares its new blocks"):
        bench.scheduler.plan()
    assert snapshot(bench.scheduler) == before, "undone from the last grant to the first"


def test_b067_preempting_twice_changes_nothing_more() -> None:
    def schedule(step: Step) -> None:
        request = step.running[0]
        step.preempt(request)
        before = snapshot(bench.scheduler)
        with pytest.raises(PolicyError, match="only running requests can be preempted"):
            step.preempt(request)
        assert snapshot(bench.scheduler) == before

    bench = Bench(config(), VllmV1())
    request = bench.add("a", 8)
    bench.step()
    bench.scheduler.policy = Scripted(schedule)
    plan = bench.plan()
    assert plan.evicted_requests == ("a",) and request.num_preemptions == 1
    assert request.num_computed_tokens == 0 and request.num_output_tokens == 1, "tokens are kept"


def test_preempting_one_that_was_admitted_in_this_step_is_no_preemption() -> None:
    def schedule(step: Step) -> None:
        request = step.waiting.head
        step.admit(request, 4)
        step.preempt(request)

    bench = Bench(config(), Scripted(schedule))
    request = bench.add("a", 8)
    plan = bench.plan()
    assert not plan.has_work and not plan.evicted_requests and not plan.admitted
    assert request.status is RequestStatus.WAITING and request.num_preemptions == 0


def test_a_victims_grant_of_this_step_goes_back_to_the_budget() -> None:
    def schedule(step: Step) -> None:
        first = step.running[0]
        step.grant(first, 1)
        assert step.budget.total_tokens == 1
        step.preempt(first)
        assert step.budget.total_tokens == 0

    bench = Bench(config(), VllmV1())
    bench.add("a", 8)
    bench.step()
    bench.scheduler.policy = Scripted(schedule)
    assert granted(bench.plan()) == {}


def test_a_victim_goes_to_the_front_or_to_the_back() -> None:
    for to_back, order in ((False, ["a", "b"]), (True, ["b", "a"])):
        bench = Bench(config(seqs=1), VllmV1())
        request = bench.add("a", 4)
        bench.add("b", 4)
        bench.step()
        bench.scheduler.policy = Scripted(partial(Step.preempt, request=request, to_back=to_back))
        bench.plan()
        assert bench.waiting == order


def test_skip_is_written_down_and_a_grant_wipes_it() -> None:
    def schedule(step: Step) -> None:
        first, second = step.waiting
        step.skip(first, BlockReason.POLICY, 8, 3)
        step.skip(second, BlockReason.BLOCKS, 2, 1)
        step.admit(first, 4)

    bench = Bench(config(), Scripted(schedule))
    for name in "ab":
        bench.add(name, 8)
    plan = bench.plan()
    assert plan.blocked == {"b": ("blocks", 2, 1)} and plan.num_waiting == 1


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (config(seqs=1), "sequences"),
        (config(budget=4), "budget"),
        (config(), "policy"),
    ],
)
def test_the_head_of_the_queue_always_gets_a_reason(limits: SchedulerConfig, reason: str) -> None:
    bench = Bench(limits, Scripted(lambda step: step.admit(step.waiting.head, 4)))
    for name in "abc":
        bench.add(name, 8)
    plan = bench.plan()
    assert set(plan.blocked) == {"b"} and plan.blocked["b"].reason == reason


def test_the_kind_of_a_grant() -> None:
    bench = Bench(config(pool=16, prefix=False), VllmV1())
    request = bench.add("a", 6, max_tokens=9)

    def kinds() -> str:
        plan = bench.plan()
        bench.commit(plan)
        assert plan.grants is not None
        return "".join(plan.grants.kinds)

    assert [kinds(), kinds(), kinds()] == ["P", "D", "D"]
    bench.scheduler.policy = Scripted(lambda step: step.preempt(request))
    bench.step()
    bench.scheduler.policy = Scripted(lambda step: step.admit(request, 8))
    assert kinds() == "R"
    bench.scheduler.policy = Scripted(lambda step: step.grant(request, request.owed))
    plan = bench.plan()
    assert plan.grants is not None and plan.grants.kinds == ["P"], "its last token was never computed before"
    assert plan.prefill_tasks[0].is_last_chunk


def test_a_task_that_stops_short_of_the_end_samples_nothing() -> None:
    bench = Bench(config(budget=3), VllmV1())
    bench.add("a", 7, max_tokens=2)
    lasts = []
    for _ in range(3):
        plan = bench.plan()
        lasts.append([task.is_last_chunk for task in plan.prefill_tasks])
        assert [part.sample for part in plan.to_scheduled_batch(0)] == lasts[-1]
        assert bool(bench.commit(plan)) == lasts[-1][0]
    assert lasts == [[False], [False], [True]]


# Prefix hits


def test_b110_a_hit_covers_whole_blocks_and_never_the_last_token() -> None:
    hits = {}
    for length in (15, 16, 17, 31, 32, 33):
        bench = Bench(config(pool=64, bs=16), VllmV1())
        tokens = [length * 1000 + place for place in range(length)]
        runs = []
        for name in "abc":
            bench.add(name, tokens, max_tokens=1)
            plan = bench.plan()
            runs.append(plan.cached.get(name, 0))
            bench.commit(plan)
        hits[length] = runs
    assert hits == {
        15: [0, 0, 0],
        16: [0, 0, 0],
        17: [0, 16, 16],
        31: [0, 16, 16],
        32: [0, 16, 16],
        33: [0, 32, 32],
    }


def test_b127_short_prompts_and_a_cache_that_is_off_hit_nothing() -> None:
    for length, prefix in ((1, True), (2, True), (3, True), (9, False)):
        bench = Bench(config(prefix=prefix), VllmV1())
        for name in "ab":
            bench.add(name, list(range(length)), max_tokens=1)
            assert not bench.plan().cached
            bench.commit(bench.plans[-1])
        assert bench.scheduler.pool.num_cached == 0


def test_b121_a_stale_hit_is_refused() -> None:
    hits: list[PrefixHit] = []
    bench = Bench(config(pool=6, bs=4), VllmV1())
    bench.add("a", list(range(9)), max_tokens=1)
    bench.drain()
    request = bench.add("b", list(range(9)), max_tokens=1)
    bench.scheduler.policy = Scripted(lambda step: hits.append(step.cached_prefix(request)))
    bench.commit(bench.plan())
    assert hits[0].num_tokens == 8
    evictor = bench.add("evictor", 24, max_tokens=1)
    bench.scheduler.policy = Scripted(lambda step: step.admit(evictor, 24))
    bench.step()
    bench.scheduler.policy = Scripted(lambda step: step.admit(request, 1, hits[0]))
    with pytest.raises(PolicyError, match="is not the cached prefix"):
        bench.scheduler.plan()
    bench.scheduler.policy = VllmV1()
    plan = bench.plan()
    assert granted(plan) == {"b": 9} and not plan.cached, "what was evicted is computed again, never a negative count"


def test_a_shorter_hit_than_what_is_cached_is_allowed() -> None:
    bench = Bench(config(), VllmV1())
    bench.add("a", list(range(13)), max_tokens=1)
    bench.drain()

    def schedule(step: Step) -> None:
        hit = step.cached_prefix(step.waiting.head)
        assert hit.num_tokens == 12
        step.admit(step.waiting.head, 9, PrefixHit(hit.blocks[:1], 4))

    bench.add("b", list(range(13)), max_tokens=1)
    bench.scheduler.policy = Scripted(schedule)
    assert bench.step() == {"b": 9}


def test_blocks_planned_in_a_step_can_be_hit_in_it_and_leave_the_index_if_it_fails() -> None:
    bench = Bench(config(), VllmV1())
    for name in "ab":
        bench.add(name, list(range(9)), max_tokens=2)
    before = snapshot(bench.scheduler)
    plan = bench.plan()
    assert plan.cached == {"b": 8} and bench["a"].block_table[:2] == bench["b"].block_table[:2]
    bench.scheduler.rollback(plan)
    bench.scheduler.check()
    assert snapshot(bench.scheduler) == before
    assert not bench.scheduler.pool._keys, "nobody computed those blocks"
    assert bench.plan().cached == {"b": 8}


def test_b130_chunks_enter_full_blocks_as_they_are_planned() -> None:
    bench = Bench(config(budget=13, bs=4), VllmV1())
    request = bench.add("a", 30, max_tokens=1)
    hashed = []
    while bench.scheduler.has_unfinished:
        plan = bench.plan()
        hashed.append((granted(plan)["a"], request.num_hashed_blocks))
        bench.commit(plan)
    assert hashed == [(13, 3), (13, 6), (4, 7)]
    assert bench.scheduler.pool.num_cached == 7


def test_a_failed_request_leaves_no_content_behind() -> None:
    bench = Bench(config(), VllmV1())
    bench.add("a", list(range(9)), max_tokens=3)
    plan = bench.plan()
    (output,) = bench.scheduler.commit(plan, {"a": ValueError("NaN in the logits")})
    bench.scheduler.check()
    assert output.finish_reason is FinishReason.ERROR and str(output.error) == "NaN in the logits"
    assert bench.scheduler.pool.num_cached == 0, "what it computed is not trusted"


# Commit and rollback


def test_commit_counts_and_appends() -> None:
    bench = Bench(config(budget=6), VllmV1(), eos=[50])
    first, second = bench.add("a", 4, max_tokens=3), bench.add("b", 4, max_tokens=3)
    plan = bench.plan()
    assert (first.num_in_flight, second.num_in_flight) == (4, 2)
    outputs = bench.scheduler.commit(plan, {"a": 9, "b": 9})
    assert [(out.request.request_id, out.token_id, out.finish_reason) for out in outputs] == [("a", 9, None)]
    assert (first.num_computed_tokens, first.num_in_flight, first.output_token_ids) == (4, 0, [9])
    assert (second.num_computed_tokens, second.output_token_ids) == (2, []), "a token nobody asked for is not used"


@pytest.mark.parametrize(
    ("token", "changes", "reason"),
    [
        (50, {}, FinishReason.EOS),
        (50, {"ignore_eos": True}, None),
        (50, {"ignore_eos": True, "stop_token_ids": [50]}, FinishReason.STOP),
        (50, {"stop_token_ids": [50]}, FinishReason.EOS),
        (51, {"stop_token_ids": [50, 51]}, FinishReason.STOP),
        (50, {"max_tokens": 1}, FinishReason.EOS),
        (51, {"max_tokens": 1, "stop_token_ids": [51]}, FinishReason.STOP),
        (52, {"max_tokens": 1}, FinishReason.LENGTH),
        (52, {}, None),
    ],
)
def test_b149_the_order_of_the_reasons(token: int, changes: dict[str, Any], reason: FinishReason | None) -> None:
    scheduler = Scheduler(config(), VllmV1(), frozenset([50]))
    scheduler.add(Request("a", [1, 2], params(**changes)))
    (output,) = scheduler.commit(scheduler.plan(), {"a": token})
    assert output.finish_reason is reason and output.token_id == token
    assert ("a" in scheduler.requests) == (reason is None)


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (None, "returned no token"),
        (-1, "returned -1"),
        (100, "returned 100, outside the vocabulary of 100"),
        (1.0, "returned 1.0"),
        (True, "returned True"),
        ("x", "returned 'x'"),
        (2**40, f"returned {2**40}"),
        (ValueError("broken"), "broken"),
    ],
)
def test_a_wrong_token_fails_its_request_alone(token: Any, message: str) -> None:
    bench = Bench(config(), VllmV1(), vocab=100)
    for name in "abc":
        bench.add(name, [ord(name) % 100, 2, 3, 4, 5], max_tokens=3)
    plan = bench.plan()
    tokens = {"a": 7, "b": token, "c": 7}
    if token is None:
        del tokens["b"]
    outputs = bench.scheduler.commit(plan, tokens)
    bench.scheduler.check()
    by_name = {output.request.request_id: output for output in outputs}
    assert by_name["b"].finish_reason is FinishReason.ERROR and message in str(by_name["b"].error)
    assert by_name["a"].finish_reason is by_name["c"].finish_reason is None
    bench.drain()


def test_a_plan_is_committed_once_and_only_the_one_in_flight() -> None:
    bench = Bench(config(), VllmV1())
    bench.add("a", 4)
    old = bench.plan()
    with pytest.raises(PolicyError, match="neither committed nor rolled back"):
        bench.scheduler.plan()
    bench.commit(old)
    verbs: list[Verb] = [lambda: bench.scheduler.commit(old, {"a": 1}), lambda: bench.scheduler.rollback(old)]
    for verb in verbs:
        with pytest.raises(PolicyError, match="not the one that is in flight"):
            verb()
    plan = bench.plan()
    with pytest.raises(PolicyError, match="not the one that is in flight"):
        bench.scheduler.commit(IterationPlan.empty(), {})
    bench.commit(plan)
    bench.drain()


def test_rollback_restores_everything_but_preemptions() -> None:
    bench = Bench(config(pool=6, bs=4, budget=12), VllmV1())
    for name in "abcd":
        bench.add(name, 6, max_tokens=12)
    rolled_back = preempting = 0
    while bench.scheduler.has_unfinished:
        before = snapshot(bench.scheduler)
        plan = bench.plan()
        if plan.evicted_requests:
            preempting += 1
            victims = {bench[name] for name in plan.evicted_requests}
            bench.scheduler.rollback(plan)
            assert victims == {r for r in bench.scheduler.waiting if r.num_preemptions and r in victims}
            assert {r.request_id for r in bench.scheduler.running} == {r.request_id for r in before["running"]} - set(
                plan.evicted_requests
            )
        else:
            bench.scheduler.rollback(plan)
            after = snapshot(bench.scheduler)
            lost = before.pop("keys").items() - after.pop("keys").items()
            taken = {block for blocks in plan.new_blocks.values() for block in blocks}
            assert {block for block, _ in lost} <= taken, "only the content of reused blocks is gone"
            assert before.pop("cached") - after.pop("cached") == len(lost)
            assert after == before
        rolled_back += 1
        bench.scheduler.check()
        bench.step()
    assert preempting and rolled_back > 20


def test_b068_a_preemption_keeps_every_token_once() -> None:
    bench = Bench(config(prefix=False), VllmV1())
    request = bench.add("a", 5, max_tokens=9)
    for token in (11, 12, 13):
        bench.step(token)
    bench.scheduler.policy = Scripted(lambda step: step.preempt(request))
    bench.step()
    assert request.output_token_ids == [11, 12, 13] and request.owed == 8
    bench.scheduler.policy = VllmV1()
    assert bench.step(14) == {"a": 8}
    assert request.output_token_ids == [11, 12, 13, 14]


def test_tasks_of_a_plan_are_what_was_granted() -> None:
    bench = Bench(config(budget=8, bs=4), VllmV1())
    bench.add("d", 3, max_tokens=5)
    bench.step(token=77)
    bench.add("p", 9, max_tokens=5)
    plan = bench.plan()
    (decode,), (chunk,) = plan.decode_tasks, plan.prefill_tasks
    assert (decode.input_token, decode.position, decode.context_len) == (77, 3, 3)
    assert decode.block_table == tuple(bench["d"].block_table) and decode.kv_cache_slot == bench["d"].kv_cache_slot
    assert chunk.tokens == bench["p"].request.prompt_token_ids[:7] and chunk.start_position == 0
    assert not chunk.is_last_chunk and len(chunk.block_table) == 2
    assert plan.total_tokens == 8 and plan.total_requests == 2 and plan.token_budget == 8
    assert list(plan.decode_tasks[:1]) == [decode] and len(plan.prefill_tasks) == 1
    with pytest.raises(IndexError):
        plan.decode_tasks[1]
    assert plan.to_scheduled_batch(1).request_ids == ["p", "d"]


# Abort


def test_abort_in_every_state() -> None:
    bench = Bench(config(pool=8, bs=4, budget=6, seqs=2), VllmV1())
    for name in "abc":
        bench.add(name, 9, max_tokens=5)
    bench.step()
    assert bench.running == ["a"] and bench["a"].is_prefilling
    assert bench.scheduler.abort("c"), "waiting"
    assert bench.scheduler.abort("a"), "between two chunks"
    bench.scheduler.check()
    bench.steps(2)
    assert bench.scheduler.abort("b"), "decoding or about to"
    assert not bench.scheduler.has_unfinished and bench.scheduler.pool.num_free == 8


def test_b101_aborting_what_is_not_there_changes_nothing() -> None:
    bench = Bench(config(), VllmV1())
    bench.add("a", 4, max_tokens=1)
    bench.step()
    before = snapshot(bench.scheduler)
    assert not bench.scheduler.abort("a") and not bench.scheduler.abort("nope")
    assert snapshot(bench.scheduler) == before


def test_abort_with_tokens_in_flight_waits_for_the_commit() -> None:
    bench = Bench(config(), VllmV1())
    request = bench.add("a", 4, max_tokens=1)
    bench.add("b", 4, max_tokens=2)
    plan = bench.plan()
    assert bench.scheduler.abort("a") and "a" in bench.scheduler.requests and request.block_table
    outputs = bench.commit(plan)
    assert [(out.request.request_id, out.token_id, out.finish_reason) for out in outputs] == [
        ("a", None, FinishReason.ABORT),
        ("b", 7, None),
    ]
    assert request.num_output_tokens == 0


def test_abort_with_tokens_in_flight_and_a_step_that_fails() -> None:
    bench = Bench(config(), VllmV1())
    bench.add("a", 4)
    bench.add("b", 4)
    plan = bench.plan()
    bench.scheduler.abort("a")
    aborted = bench.scheduler.rollback(plan)
    assert [(out.request.request_id, out.finish_reason) for out in aborted] == [("a", FinishReason.ABORT)]
    assert list(bench.scheduler.requests) == ["b"]
    bench.drain()


def test_abort_of_a_victim_between_plan_and_commit() -> None:
    bench = Bench(config(pool=4, bs=4, prefix=False), VllmV1())
    for name in "ab":
        bench.add(name, 8, max_tokens=8)
    bench.step()
    plan = bench.plan()
    assert plan.evicted_requests == ("b",)
    bench.scheduler.abort("b")
    bench.commit(plan)
    bench.drain()
    assert bench.scheduler.pool.num_free == 4


def test_finish_twice_or_in_flight_is_refused() -> None:
    bench = Bench(config(), VllmV1())
    request = bench.add("a", 4)
    plan = bench.plan()
    before = snapshot(bench.scheduler)
    with pytest.raises(InvalidRequest, match="is being computed; abort it"):
        bench.scheduler.finish(request, FinishReason.STOP)
    assert snapshot(bench.scheduler) == before
    bench.commit(plan)
    bench.scheduler.finish(request, FinishReason.STOP)
    with pytest.raises(InvalidRequest, match="has ended"):
        bench.scheduler.finish(request, FinishReason.STOP)
    bench.scheduler.check()


def test_every_end_is_told_to_the_policy_once() -> None:
    policy = Scripted(VllmV1().schedule)
    bench = Bench(config(seqs=2), policy)
    for name in "abcd":
        bench.add(name, 4, max_tokens=2)
    bench.step()
    bench.scheduler.abort("a")
    bench.scheduler.abort("d")
    bench.drain()
    assert policy.finished == ["a", "d", "b", "c"]


# Liveness


def test_a_policy_that_never_grants_is_stalled_with_a_diagnosis() -> None:
    bench = Bench(config(), Scripted(lambda step: None, name="Lazy"))
    bench.add("first", 5)
    bench.add("second", 5)
    bench.steps(IDLE_LIMIT)
    with pytest.raises(SchedulerStalled) as caught:
        bench.scheduler.plan()
    message = str(caught.value)
    assert f"{IDLE_LIMIT + 1} steps in a row computed nothing while 2 requests are unfinished" in message
    assert "<first waiting: 0 of 5 tokens computed" in message and "blocked by policy" in message
    assert "under policy Lazy" in message and "64 of 64 blocks free" in message
    bench.scheduler.check()
    bench.scheduler.policy = VllmV1()
    bench.drain()


def test_a_policy_that_only_preempts_is_stalled() -> None:
    admit = Scripted(lambda step: step.admit(step.waiting.head, 4))
    preempt = Scripted(lambda step: step.preempt(step.running[0]))
    bench = Bench(config(pool=2, bs=4, prefix=False), admit)
    bench.add("a", 8, max_tokens=1)
    with pytest.raises(SchedulerStalled, match=r"were computed again and no request got further.*preempted \d+ times"):
        for _ in range(1000):
            bench.scheduler.policy = preempt if bench.running else admit
            bench.step()
    assert len(bench.plans) <= 2 * (THRASH_LIMIT * 2 * 4 // 4 + 2), "within a bounded number of steps"


def test_after_a_stall_the_guilty_one_can_be_aborted_and_the_others_go_on() -> None:
    admit = Scripted(lambda step: step.admit(step.waiting.head, 4))
    preempt = Scripted(lambda step: step.preempt(step.running[0]))
    bench = Bench(config(pool=2, bs=4, prefix=False), admit)
    bench.add("a", 8, max_tokens=1)
    bench.add("b", 8, max_tokens=1)
    with pytest.raises(SchedulerStalled, match="<a "):
        for _ in range(1000):
            bench.scheduler.policy = preempt if bench.running else admit
            bench.step()
    bench.scheduler.abort("a")
    bench.scheduler.policy = VllmV1()
    bench.drain()


def test_b018_an_allocator_that_always_fails_stalls_with_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(config(pool=4, bs=4), VllmV1())
    request = bench.add("a", 4, max_tokens=8)
    bench.step()
    monkeypatch.setattr(bench.scheduler.pool, "take", lambda count: None)
    monkeypatch.setattr(type(bench.scheduler.pool), "num_free", property(lambda pool: 0))
    with pytest.raises(SchedulerStalled, match=r"<a preempted.*blocked by blocks.* with 0 of 4 blocks free"):
        for _ in range(100):
            plan = bench.scheduler.plan()
            bench.scheduler.commit(plan, {"a": 7})
    assert request.num_preemptions == 1, "preempted itself once, then waited"


def test_no_request_and_no_work_is_no_stall() -> None:
    bench = Bench(config(), Scripted(lambda step: None))
    for _ in range(3 * IDLE_LIMIT):
        assert bench.step() == {}


# The integrity check


def _lose_from_queue(bench: Bench) -> None:
    bench.scheduler.waiting.remove(bench["w"])


def _two_queues(bench: Bench) -> None:
    bench.scheduler.running.append(bench["w"])


def _lose_a_slot(bench: Bench) -> None:
    bench.scheduler.free_slots.remove(2)


def _share_a_slot(bench: Bench) -> None:
    bench["a"].kv_cache_slot = bench["b"].kv_cache_slot


def _lose_a_block(bench: Bench) -> None:
    bench["a"].block_table.pop()


def _two_live_requests_share_an_unfinished_block(bench: Bench) -> None:
    block = bench["a"].block_table[-1]
    bench.scheduler.pool.ref_count[block] += 1
    old = bench["b"].block_table[-1]
    bench["b"].block_table[-1] = block
    bench.scheduler.pool.ref_count[old] = 0
    bench.scheduler.pool._free[old] = None


def _swap_blocks(bench: Bench) -> None:
    table = bench["a"].block_table
    table[0], table[1] = table[1], table[0]


def _hold_more_than_needed(bench: Bench) -> None:
    bench["a"].block_table += bench.scheduler.pool.take(1) or []


def _hold_less_than_needed(bench: Bench) -> None:
    bench["a"].num_computed_tokens += 4


def _compute_more_than_is_known(bench: Bench) -> None:
    del bench["a"].token_ids[9:]


def _hold_while_waiting(bench: Bench) -> None:
    bench["w"].num_computed_tokens = 1


def _hold_blocks_while_waiting(bench: Bench) -> None:
    bench["w"].block_table += bench.scheduler.pool.take(1) or []


def _change_a_hashed_token(bench: Bench) -> None:
    bench["a"].token_ids[1] += 1


def _wrong_key(bench: Bench) -> None:
    pool = bench.scheduler.pool
    block = bench["a"].block_table[0]
    pool.forget(block)
    pool.remember(block, BlockKey(block_hash(NO_PARENT, (1, 2, 3, 4)), NO_PARENT, (1, 2, 3, 4)))


@pytest.mark.parametrize(
    "damage",
    [
        _lose_from_queue,
        _two_queues,
        _lose_a_slot,
        _share_a_slot,
        _lose_a_block,
        _two_live_requests_share_an_unfinished_block,
        _swap_blocks,
        _hold_more_than_needed,
        _hold_less_than_needed,
        _compute_more_than_is_known,
        _hold_while_waiting,
        _hold_blocks_while_waiting,
        _change_a_hashed_token,
        _wrong_key,
    ],
)
def test_b095_check_notices_damage(damage: Callable[[Bench], None]) -> None:
    bench = Bench(config(seqs=3, budget=21), VllmV1())
    for name in "abw":
        bench.add(name, 10)
    bench.scheduler.policy = Scripted(lambda step: [step.admit(request, 10) for request in list(step.waiting)[:2]])
    bench.step()
    bench.scheduler.check()
    damage(bench)
    with pytest.raises(IntegrityError):
        bench.scheduler.check()


# Configuration


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_num_seqs", [0, -1, 1.5, True, None]),
        ("max_num_batched_tokens", [0, -1]),
        ("max_model_len", [0, -1]),
        ("block_size", [0, -1]),
        ("num_blocks", [0, -1]),
        ("long_prefill_token_threshold", [-1, 1.5, True]),
        ("watermark", [-0.1, 1.0, float("nan"), "a"]),
        ("enable_prefix_caching", ["yes", 1, None]),
        ("enable_chunked_prefill", ["no"]),
        ("scheduler_reserve_full_isl", [0]),
    ],
)
def test_b003_b080_a_configuration_out_of_range_is_named(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidConfig, match=f"{field} is {value!r}") as caught:
            SchedulerConfig(**{field: value})
        assert isinstance(caught.value, ValueError) and isinstance(caught.value, ContbatchError)


def test_b080_watermark_blocks_are_rounded_down() -> None:
    assert config(pool=10, watermark=0.1).watermark_blocks == 1
    assert config(pool=19, watermark=0.1).watermark_blocks == 1
    assert config(pool=9, watermark=0.1).watermark_blocks == 0
