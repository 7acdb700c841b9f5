"""Parity with the original Rust layer: a test per row, its own tests, and the faults of its surroundings."""

from __future__ import annotations

import dataclasses

import pytest

from contbatch.batch import BatchedRequest, BatchStats, ScheduledBatch
from contbatch.budget import TokenBudget
from contbatch.config import SchedulerConfig
from contbatch.engine import TokenEvent
from contbatch.errors import InvalidConfig, InvalidRequest, PolicyError, RequestTooLarge, StepFailed
from contbatch.plan import DecodeTask, IterationPlan, PrefillTask
from contbatch.policies import POLICIES, PrefillDecodeBudget, VllmV1
from contbatch.request import FinishReason
from tests.toy import (
    Bench,
    Bytes,
    Pieces,
    assert_alone,
    assert_empty,
    config,
    granted,
    params,
    prompt,
    serve,
    terminal,
    toy_engine,
)


def prefill(name: str = "p", count: int = 4, start: int = 0, last: bool = True) -> BatchedRequest:
    """A prefill part of `count` tokens."""
    return BatchedRequest.prefill(name, range(100, 100 + count), 0, [1, 2, 3], start, last)


def decode(name: str = "d", position: int = 10) -> BatchedRequest:
    """A decode part at `position`."""
    return BatchedRequest.decode(name, 5, position, 1, [4, 5, 6], position)


# Rows


@pytest.mark.parametrize("part", [prefill(start=3), decode(position=7)])
def test_batched_request_fields(part: BatchedRequest) -> None:
    assert part.position_offset == part.context_len
    assert part.seq_len == part.context_len + len(part.token_ids)
    assert isinstance(part.request_id, str) and part.block_table and part.kv_cache_slot >= 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        part.context_len = 0  # type: ignore[misc]  # that is the point


def test_batched_request_prefill() -> None:
    part = BatchedRequest.prefill("a", [7, 8, 9], 2, [4])
    assert (part.position_offset, part.context_len, part.seq_len) == (0, 0, 3)
    assert part.is_prefill and part.sample and part.block_table == (4,) and part.kv_cache_slot == 2
    later = BatchedRequest.prefill("a", [7, 8, 9], 2, [4, 5], start_position=512, is_last_chunk=False)
    assert (later.position_offset, later.context_len, later.seq_len) == (512, 512, 515)
    assert not later.sample, "only the last chunk of a prompt yields a token"
    with pytest.raises(InvalidRequest, match="'a' has no tokens"):
        BatchedRequest.prefill("a", [], 2, [4])


def test_batched_request_decode() -> None:
    part = BatchedRequest.decode("a", 9, 6, 2, [4, 5], 6)
    assert (part.token_ids, part.position_offset, part.context_len, part.seq_len) == ((9,), 6, 6, 7)
    assert not part.is_prefill and part.sample
    with pytest.raises(InvalidRequest, match="position 6 and context 5 disagree"):
        BatchedRequest.decode("a", 9, 6, 2, [4, 5], 5)
    with pytest.raises(InvalidRequest, match="position -1"):
        BatchedRequest.decode("a", 9, -1, 2, [4], -1)


def test_num_tokens() -> None:
    assert prefill(count=5).num_tokens == 5
    assert decode().num_tokens == 1


def test_scheduled_batch_fields() -> None:
    batch = ScheduledBatch(3)
    assert (batch.batch_id, batch.total_tokens, batch.has_prefill, batch.has_decode, batch.max_seq_len) == (
        3,
        0,
        False,
        False,
        0,
    )
    batch.add(decode(position=10))
    assert (batch.total_tokens, batch.has_prefill, batch.has_decode, batch.max_seq_len) == (1, False, True, 11)
    batch.add(prefill(count=4, start=20))
    assert (batch.total_tokens, batch.has_prefill, batch.has_decode, batch.max_seq_len) == (5, True, True, 24)


def test_scheduled_batch_new_add_is_empty_len_request_ids() -> None:
    batch = ScheduledBatch(1)
    assert batch.is_empty and not batch and len(batch) == 0
    for name in "cab":
        batch.add(prefill(name))
    assert not batch.is_empty and batch and len(batch) == 3
    assert batch.request_ids == ["c", "a", "b"], "insertion order"
    assert [part.request_id for part in batch] == ["c", "a", "b"] and batch[-1].request_id == "b"
    with pytest.raises(InvalidRequest, match="'a' is already in batch 1"):
        batch.add(decode("a"))
    assert len(batch) == 3
    with pytest.raises(InvalidRequest, match="'a'"):
        ScheduledBatch(1, [prefill("a"), decode("a")])


def test_merge_prefill_decode() -> None:
    batch = ScheduledBatch.merge_prefill_decode([prefill("a"), prefill("b")], [decode("c"), decode("d")], 9)
    assert batch.request_ids == ["a", "b", "c", "d"] and batch.batch_id == 9
    with pytest.raises(InvalidRequest, match="'c' is a decode in the list of prefills"):
        ScheduledBatch.merge_prefill_decode([decode("c")], [], 9)
    with pytest.raises(InvalidRequest, match="'a' is a prefill in the list of decodes"):
        ScheduledBatch.merge_prefill_decode([], [prefill("a")], 9)


def test_split_by_type() -> None:
    batch = ScheduledBatch(0, [decode("d1"), prefill("p1"), decode("d2"), prefill("p2")])
    prefills, decodes = batch.split_by_type()
    assert [part.request_id for part in prefills] == ["p1", "p2"]
    assert [part.request_id for part in decodes] == ["d1", "d2"]


def test_collect_input_ids() -> None:
    batch = ScheduledBatch(0, [prefill("a", 3), decode("b")])
    assert batch.collect_input_ids() == [[100, 101, 102], [5, 0, 0]]
    assert batch.collect_input_ids(pad_id=-1) == [[100, 101, 102], [5, -1, -1]]
    assert ScheduledBatch(0).collect_input_ids() == []
    flat = batch.flatten(block_size=4)
    assert flat.input_ids.tolist() == [100, 101, 102, 5]
    assert flat.positions.tolist() == [0, 1, 2, 10]


def test_collect_positions_and_collect_kv_slots() -> None:
    batch = ScheduledBatch(0, [prefill("a", 3, start=2), decode("b", 11)])
    assert batch.collect_positions() == [2, 11]
    assert batch.collect_kv_slots() == [0, 1]
    assert len(batch.flatten(4).positions) == batch.total_tokens, "the flat form has one position a token"


def test_stats() -> None:
    assert ScheduledBatch(6).stats() == BatchStats(6, 0, 0, 0, 0, 0, 0, 0, 0, None)
    batch = ScheduledBatch(7, [prefill("a", 3, start=8), prefill("b", 4), decode("c", 20)])
    assert batch.stats(token_budget=16) == BatchStats(
        batch_id=7,
        total_requests=3,
        prefill_requests=2,
        decode_requests=1,
        total_tokens=8,
        prefill_tokens=7,
        decode_tokens=1,
        max_seq_len=21,
        cached_tokens=28,
        budget_use=0.5,
    )


def test_prefill_task() -> None:
    task = PrefillTask("a", (1, 2), 8, 3, (4, 5, 6))
    assert task.is_last_chunk
    part = task._replace(is_last_chunk=False).to_batched()
    assert (part.position_offset, part.context_len, part.seq_len, part.sample) == (8, 8, 10, False)
    assert part.kv_cache_slot == 3 and part.block_table == (4, 5, 6) and part.is_prefill


def test_decode_task() -> None:
    part = DecodeTask("a", 42, 8, 3, (4, 5, 6), 8).to_batched()
    assert part == BatchedRequest.decode("a", 42, 8, 3, (4, 5, 6), 8)


def test_iteration_plan_is_immutable_and_holds_a_request_once() -> None:
    task, other = PrefillTask("a", (1, 2), 0, 0, (1,)), DecodeTask("a", 1, 2, 0, (1,), 2)
    plan = IterationPlan(prefill_tasks=(task,), evicted_requests=("b",))
    assert plan.evicted_requests == ("b",) and plan.swap_out_requests == plan.swap_in_requests == ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.prefill_tasks = ()  # type: ignore[misc]  # that is the point
    with pytest.raises(PolicyError, match="'a' appears twice"):
        IterationPlan(prefill_tasks=(task,), decode_tasks=(other,))
    with pytest.raises(PolicyError, match="'a' appears twice"):
        IterationPlan(prefill_tasks=(task, task))
    for gone in ({"evicted_requests": ("a",)}, {"swap_out_requests": ("a",)}):
        with pytest.raises(PolicyError, match="'a'"):
            IterationPlan(prefill_tasks=(task,), **gone)  # type: ignore[arg-type]  # two fields of one type


def test_iteration_plan_says_why_a_request_got_nothing() -> None:
    bench = Bench(config(budget=4), VllmV1())
    bench.add("a", 8)
    bench.add("b", 8)
    plan = bench.plan()
    assert granted(plan) == {"a": 4}
    assert plan.blocked["b"].reason == "budget" and plan.blocked["b"].needs == 8 and plan.blocked["b"].left == 0


def test_empty_has_work_total_requests_total_tokens() -> None:
    empty = IterationPlan.empty()
    assert not empty.has_work and empty.total_requests == empty.total_tokens == 0
    plan = IterationPlan(
        prefill_tasks=[PrefillTask("a", (1, 2, 3), 0, 0, (1,))], decode_tasks=[DecodeTask("b", 1, 2, 1, (2,), 2)]
    )
    assert plan.has_work and plan.total_requests == 2 and plan.total_tokens == 4
    assert IterationPlan(swap_out_requests=("a",)).has_work, "a plan that only swaps has work too"
    assert IterationPlan(swap_in_requests=("a",)).has_work


def test_to_scheduled_batch() -> None:
    chunk = PrefillTask("a", tuple(range(8)), 512, 0, tuple(range(1, 34)), False)
    plan = IterationPlan(
        prefill_tasks=(chunk,),
        decode_tasks=(DecodeTask("b", 1, 2, 1, (40,), 2),),
        evicted_requests=("v",),
        swap_out_requests=("o",),
        swap_in_requests=("i",),
    )
    batch = plan.to_scheduled_batch(5)
    assert batch.batch_id == 5 and batch.request_ids == ["a", "b"], "prefills first, then decodes"
    part = batch[0]
    assert (part.position_offset, part.context_len, part.seq_len) == (512, 512, 520)
    assert (batch.evicted_requests, batch.swap_out_requests, batch.swap_in_requests) == (("v",), ("o",), ("i",))


def test_token_budget_new_fields_reset_total_tokens() -> None:
    budget = TokenBudget(100, 32, 128, 4)
    assert (budget.max_prefill_tokens, budget.max_decode_tokens, budget.max_total_tokens) == (100, 32, 128)
    assert (budget.prefill_tokens, budget.decode_tokens, budget.total_tokens, budget.num_seqs) == (0, 0, 0, 0)
    assert budget.try_allocate_prefill(7) and budget.try_allocate_decode()
    assert (budget.prefill_tokens, budget.decode_tokens, budget.total_tokens, budget.num_seqs) == (7, 1, 8, 2)
    budget.reset()
    assert (budget.prefill_tokens, budget.decode_tokens, budget.total_tokens, budget.num_seqs) == (0, 0, 0, 0)
    limited = TokenBudget(100, 100, 100, max_num_seqs=1)
    assert limited.try_allocate_decode() and not limited.try_allocate_decode()


def test_remaining_prefill_and_remaining_decode() -> None:
    budget = TokenBudget(6, 6, 8)
    assert (budget.remaining_prefill, budget.remaining_decode) == (6, 6)
    budget.try_allocate_prefill(5)
    assert (budget.remaining_prefill, budget.remaining_decode) == (1, 3)
    budget.try_allocate_decode(3)
    assert (budget.remaining_prefill, budget.remaining_decode) == (0, 0), "never below 0"


def test_try_allocate_prefill() -> None:
    budget = TokenBudget(8, 4, 10)
    assert budget.try_allocate_prefill(5)
    before = dataclasses.asdict(budget)
    assert not budget.try_allocate_prefill(4) and dataclasses.asdict(budget) == before, "a refusal changes nothing"
    for wrong in (0, -1):
        with pytest.raises(InvalidConfig, match=f"num_tokens is {wrong}"):
            budget.try_allocate_prefill(wrong)
    assert budget.allocate_chunk(9) == 3, "a chunk takes what is left"
    assert budget.allocate_chunk(9) == 0 and budget.prefill_tokens == 8


def test_try_allocate_decode() -> None:
    budget = TokenBudget(8, 4, 10)
    assert budget.try_allocate_decode() and budget.try_allocate_decode(2)
    before = dataclasses.asdict(budget)
    assert not budget.try_allocate_decode(2) and dataclasses.asdict(budget) == before
    budget.refund(decode=2)
    assert (budget.decode_tokens, budget.num_seqs) == (1, 1)
    assert budget.try_allocate_decode(3)
    with pytest.raises(InvalidConfig, match="num_tokens is 0"):
        budget.try_allocate_decode(0)


def test_is_exhausted() -> None:
    budget = TokenBudget(4, 2, 100)
    assert not budget.is_exhausted
    budget.try_allocate_prefill(4)
    assert not budget.is_exhausted
    budget.try_allocate_decode(2)
    assert budget.is_exhausted, "the sub-limits exhaust it long before the total does"
    by_total = TokenBudget(9, 9, 3)
    by_total.try_allocate_prefill(3)
    assert by_total.is_exhausted


# The original's own tests


def test_original_batched_request() -> None:
    first = BatchedRequest.prefill("r", [1, 2, 3, 4], 0, [0, 1])
    assert first.is_prefill and first.num_tokens == 4 and first.seq_len == 4


def test_original_batched_request_decode() -> None:
    later = BatchedRequest.decode("r", 5, 10, 1, [0, 1, 2], 10)
    assert not later.is_prefill and later.num_tokens == 1 and later.context_len == 10


def test_original_scheduled_batch() -> None:
    batch = ScheduledBatch(1)
    batch.add(BatchedRequest.prefill("r1", [1, 2, 3], 0, []))
    batch.add(BatchedRequest.decode("r2", 4, 5, 1, [], 5))
    assert len(batch) == 2 and batch.has_prefill and batch.has_decode and batch.total_tokens == 4
    assert [len(side) for side in batch.split_by_type()] == [1, 1]


def test_original_token_budget() -> None:
    budget = TokenBudget(100, 32, 128)
    assert budget.try_allocate_prefill(50)
    assert budget.prefill_tokens == 50 and budget.remaining_prefill == 50
    assert budget.try_allocate_decode() and budget.decode_tokens == 1
    assert not budget.try_allocate_prefill(60)
    budget.reset()
    assert budget.total_tokens == 0


def test_original_iteration_plan() -> None:
    plan = IterationPlan(
        prefill_tasks=[PrefillTask("r1", (1, 2, 3, 4, 5), 0, 0, ())], decode_tasks=[DecodeTask("r2", 6, 10, 1, (), 10)]
    )
    assert plan.has_work and plan.total_requests == 2 and plan.total_tokens == 6
    batch = plan.to_scheduled_batch(42)
    assert batch.batch_id == 42 and len(batch) == 2


# What the surroundings of the original got wrong


@pytest.mark.parametrize("policy", POLICIES)
def test_fault_01_chunked_prefill_continues_to_its_end(policy: str) -> None:
    limits = SchedulerConfig(max_num_batched_tokens=512, num_blocks=64, long_prefill_token_threshold=512)
    engine, toy = toy_engine(limits, policy)
    assert_alone(toy, serve(engine, {"long": prompt(600)}, params(4)), params(4))
    if policy not in ("StaticBatching", "Orca"):  # these declare no budget
        assert [step.counts for step in engine.trace.steps[:2]] == [[512], [88]]


@pytest.mark.parametrize("policy", POLICIES)
def test_fault_02_no_token_is_fed_twice_and_prefill_yields_one(policy: str) -> None:
    engine, _ = toy_engine(config(pool=128), policy)
    serve(engine, {"a": prompt(6), "b": prompt(9, 1)}, params(5))
    fed: dict[str, list[int]] = {"a": [], "b": []}
    for step in engine.trace.steps:
        for name, start, count in zip(step.request_ids, step.starts, step.counts, strict=True):
            fed[name] += range(start, start + count)
    assert fed == {"a": list(range(6 + 4)), "b": list(range(9 + 4))}, "each position once; the last token never"
    assert set(engine.trace.steps[0].sampled) == {"a", "b"}, "the prefill yields the first token"


def test_fault_03_context_grows_with_each_decode() -> None:
    engine, toy = toy_engine(config())
    serve(engine, {"a": prompt(6)}, params(5))
    assert [(batch[0].context_len, batch[0].seq_len) for batch in toy.batches] == [
        (0, 6),
        (6, 7),
        (7, 8),
        (8, 9),
        (9, 10),
    ]


def test_fault_04_decode_order_is_fixed_and_nobody_starves() -> None:
    orders = []
    for _ in range(3):
        bench = Bench(config(budget=64, seqs=8), PrefillDecodeBudget(max_decode=4))
        for name in "hgfedcba":
            bench.add(name, 4, max_tokens=6)
        orders.append([list(step) for step in bench.drain()])
    assert orders[0] == orders[1] == orders[2]
    assert orders[0][0] == list("hgfedcba"), "admission order"
    assert orders[0][1] == list("hgfe"), "room for four: those that were admitted first"
    assert {name for step in orders[0][1:] for name in step} == set("abcdefgh")


def test_fault_05_one_seat_and_two_equal_requests() -> None:
    for order in ("fcfs", "priority"):
        bench = Bench(config(seqs=1), VllmV1(order))
        bench.add("a", 5, max_tokens=4)
        bench.add("b", 5, max_tokens=4)
        assert [list(step) for step in bench.drain()] == [["a"]] * 4 + [["b"]] * 4
        assert all(not plan.evicted_requests for plan in bench.plans)


def test_fault_05_a_victim_waits_for_the_one_it_made_room_for() -> None:
    bench = Bench(config(pool=4, bs=4, seqs=4), VllmV1("priority"))
    bench.add("low", 8, max_tokens=8, priority=3)
    bench.step()
    bench.add("critical", 4, max_tokens=9, priority=0)
    steps = bench.drain()
    evictions = [index for index, plan in enumerate(bench.plans) if plan.evicted_requests == ("low",)]
    assert len(evictions) == 1, "evicted once, not for ever"
    assert all("critical" in step for step in steps[: evictions[0] + 1])


def test_fault_06_no_plan_evicts_a_request_and_holds_a_task_for_it() -> None:
    bench = Bench(config(pool=6, bs=4, seqs=4, budget=16), VllmV1("priority"))
    for index, name in enumerate("abcdef"):
        bench.add(name, 5, max_tokens=10, priority=index % 3)
    bench.drain()
    evicting = [plan for plan in bench.plans if plan.evicted_requests]
    assert evicting
    for plan in evicting:
        assert not {*plan.evicted_requests} & {*granted(plan)}


def test_fault_07_two_requests_share_memory_that_their_maximum_would_not_fit() -> None:
    bench = Bench(config(pool=8, bs=16, mml=256), VllmV1())
    bench.add("a", 16, max_tokens=100)
    bench.add("b", 16, max_tokens=100)
    assert bench.step() == {"a": 16, "b": 16}, "blocks are taken as they are needed"
    assert len(bench["a"].block_table) == 1
    bench.drain()


def test_fault_08_a_cut_chunk_takes_what_is_left() -> None:
    for policy in (VllmV1(), PrefillDecodeBudget()):
        bench = Bench(config(pool=64, budget=100, long_cap=64), policy)
        bench.add("a", 64)
        bench.add("b", 64)
        bench.add("c", 10)
        assert bench.step() == {"a": 64, "b": 36}, "no token of the budget is wasted"
        assert bench.step() == {"a": 1, "b": 28, "c": 10}


def test_fault_09_what_can_never_fit_is_refused_and_a_long_prompt_is_cut() -> None:
    bench = Bench(config(pool=4, bs=4, budget=3), VllmV1())
    with pytest.raises(RequestTooLarge, match="num_blocks=4"):
        bench.add("huge", 16, max_tokens=2)
    bench.add("a", 12, max_tokens=2)
    assert bench.steps(4) == [{"a": 3}] * 4
    assert bench.step() == {"a": 1} and not bench.scheduler.has_unfinished


def test_fault_10_blocks_and_seats_come_back_once() -> None:
    bench = Bench(config(pool=6, bs=4, seqs=3, budget=16), VllmV1())
    for name in "abcde":
        bench.add(name, 5, max_tokens=10)
    bench.drain()
    assert any(plan.evicted_requests for plan in bench.plans)
    assert bench.scheduler.pool.num_free == 6 and sorted(bench.scheduler.free_slots) == [0, 1, 2]


def test_fault_11_one_forward_pass_per_step_serves_the_whole_batch() -> None:
    engine, toy = toy_engine(config(budget=8))
    serve(engine, {"a": prompt(3), "b": prompt(9, 1)}, params(4))
    assert len(toy.batches) == len(engine.trace.steps)
    assert any(batch.has_prefill and batch.has_decode for batch in toy.batches)


def test_fault_11_eos_and_stop_strings_end_a_request_in_a_batch() -> None:
    engine, toy = toy_engine(config(), tokenizer=Pieces(*map(str, range(1000, 1251))))
    third = toy.alone(prompt(4), params(3))[2]
    engine, _ = toy_engine(config(), eos=[third], tokenizer=Pieces(*map(str, range(1000, 1251))))
    stop = str(1000 + toy.alone(prompt(5, 1), params(2))[1])
    done = serve(
        engine,
        {"eos": prompt(4), "stop": prompt(5, 1), "length": prompt(6, 2)},
        {"eos": params(9), "stop": params(9, stop=stop, ignore_eos=True), "length": params(9, ignore_eos=True)},
    )
    assert done["eos"].finish_reason is FinishReason.EOS and len(done["eos"].token_ids) == 3
    assert done["stop"].finish_reason is FinishReason.STOP and len(done["stop"].token_ids) == 2
    assert done["length"].finish_reason is FinishReason.LENGTH and len(done["length"].token_ids) == 9


def test_fault_11_the_last_token_is_delivered_once() -> None:
    engine, toy = toy_engine(config())
    engine.add_request(prompt(4), params(3), request_id="a")
    events = [event for _ in range(5) for event in engine.step()]
    assert [event.token_id for event in events] == list(toy.alone(prompt(4), params(3)))
    assert terminal(events) == [("a", FinishReason.LENGTH)]


def test_fault_11_a_callback_may_submit_a_request() -> None:
    engine, toy = toy_engine(config())

    def submit(_: TokenEvent) -> None:
        engine.add_request(prompt(5, 1), params(2), request_id="second")

    engine.add_request(prompt(4), params(1), on_event=submit)
    done = {completion.request_id: completion for completion in engine.run()}
    assert len(done) == 2
    assert done["second"].token_ids == toy.alone(prompt(5, 1), params(2))


def test_fault_11_one_failing_request_does_not_stop_the_loop() -> None:
    engine, toy = toy_engine(config(), tokenizer=Bytes())

    def fail(_: object) -> None:
        raise KeyError("broken client")

    engine.add_request(prompt(4), params(5), request_id="bad", on_event=fail)
    engine.add_request(prompt(5, 1), params(5), request_id="good")
    done = {completion.request_id: completion for completion in engine.run()}
    assert done["bad"].finish_reason is FinishReason.ERROR and isinstance(done["bad"].error, KeyError)
    assert done["good"].token_ids == toy.alone(prompt(5, 1), params(5))
    assert_empty(engine)


def test_fault_11_cancel_of_a_running_request_returns_everything() -> None:
    engine, _ = toy_engine(config())
    name = engine.add_request(prompt(4), params(50))
    engine.step()
    assert engine.abort(name) and engine.completions[name].finish_reason is FinishReason.ABORT
    assert_empty(engine)


def test_fault_11_times_are_measured() -> None:
    engine, _ = toy_engine(config())
    serve(engine, {"a": prompt(4), "b": prompt(90, 1)}, params(4))
    starts = [step.start for step in engine.trace.steps]
    assert starts == sorted(set(starts)) and all(step.duration > 0 for step in engine.trace.steps)
    assert engine.trace.finished["a"].time < engine.trace.finished["b"].time


def test_fault_11_a_failed_step_is_reported_and_run_again() -> None:
    failures = iter([False, True])

    def before(_: object) -> None:
        if next(failures, False):
            raise RuntimeError("device lost")

    engine, toy = toy_engine(config(), before=before)
    name = engine.add_request(prompt(4), params(3))
    engine.step()
    with pytest.raises(StepFailed, match="device lost"):
        engine.step()
    engine.run()
    assert engine.completions[name].token_ids == toy.alone(prompt(4), params(3))
