"""What the policies decide, step by step, on small workloads whose outcome can be worked out by hand."""

from __future__ import annotations

import pytest

from contbatch.config import SchedulerConfig
from contbatch.errors import InvalidConfig, RequestTooLarge, UnknownName
from contbatch.policies import POLICIES, PrefillDecodeBudget, StaticBatching, VllmV1, policy_by_name
from tests.toy import Bench, Scripted, assert_alone, config, granted, params, prompt, serve, toy_engine

# VllmV1: the budget


def test_b004_many_small_requests_in_a_small_budget() -> None:
    bench = Bench(config(budget=4, seqs=8), VllmV1())
    for name in "abcdef":
        bench.add(name, 1, max_tokens=5)
    steps = bench.drain()
    assert all(0 < sum(step.values()) <= 4 for step in steps)
    assert {name for step in steps for name in step} == set("abcdef")


def test_b005_a_prompt_is_cut_into_chunks_of_the_budget() -> None:
    bench = Bench(config(budget=4), VllmV1())
    bench.add("a", 9, max_tokens=1)
    assert bench.drain() == [{"a": 4}, {"a": 4}, {"a": 1}]


def test_b007_decodes_come_first_and_a_prompt_takes_what_is_left() -> None:
    bench = Bench(config(budget=8, seqs=8), VllmV1())
    bench.add("a", 2)
    bench.add("b", 2)
    bench.step()
    bench.add("c", 10)
    plan = bench.plan()
    assert granted(plan) == {"a": 1, "b": 1, "c": 6}
    assert len(plan.decode_tasks) == 2 and len(plan.prefill_tasks) == 1, "both kinds in one step"


def test_b008_a_step_without_budget_looks_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(config(budget=4), VllmV1())
    bench.add("a", 12)
    bench.step()
    bench.add("b", 8)
    bench.add("c", 8)
    order = bench.scheduler.pool.free_list
    looked_up: list[str] = []
    lookup = bench.scheduler.pool.lookup
    monkeypatch.setattr(bench.scheduler.pool, "lookup", lambda keys: looked_up.append("") or lookup(keys))  # type: ignore[func-returns-value]
    plan = bench.plan()
    assert granted(plan) == {"a": 4} and not looked_up
    assert [block for block in order if block not in plan.new_blocks["a"]] == list(bench.scheduler.pool.free_list)


def test_b009_two_prompts_share_the_budget_over_three_steps() -> None:
    bench = Bench(config(budget=8), VllmV1())
    bench.add("A", 10)
    bench.add("B", 20)
    assert bench.steps(3) == [{"A": 8}, {"A": 2, "B": 6}, {"A": 1, "B": 7}]


def test_b011_a_running_request_gets_a_token_in_every_step() -> None:
    bench = Bench(config(budget=8), VllmV1())
    bench.add("a", 2, max_tokens=20)
    bench.step()
    for index in range(6):
        bench.add(f"new{index}", 13, max_tokens=3)
    while "a" in bench.scheduler.requests:
        assert bench.step()["a"] == 1


def test_b041_a_newcomer_waits_for_the_hog_and_is_next() -> None:
    bench = Bench(config(budget=4, seqs=3), VllmV1())
    bench.add("hog", 40)
    bench.step()
    bench.add("new", 3)
    steps = bench.drain()
    first = next(index for index, step in enumerate(steps) if "new" in step)
    assert steps[first - 1] == {"hog": 4} and steps[first] == {"hog": 1, "new": 3}, "first come, first served"


def test_b051_a_cap_on_long_prompts_lets_a_short_one_pass() -> None:
    bench = Bench(config(budget=8, long_cap=4), VllmV1())
    bench.add("long", 40)
    bench.add("short", 4)
    assert bench.steps(2) == [{"long": 4, "short": 4}, {"long": 4, "short": 1}]
    alone = Bench(config(budget=8, long_cap=4), VllmV1())
    alone.add("long", 40, max_tokens=1)
    assert alone.drain() == [{"long": 8}] * 5, "no budget is left idle when only the long one is there"


def test_b090_blocks_follow_the_chunks() -> None:
    bench = Bench(config(prefix=False, budget=4, bs=4), VllmV1())
    request = bench.add("a", 18)
    held = []
    for count in (4, 4, 4, 4, 2):
        assert bench.step() == {"a": count}
        held.append(len(request.block_table))
    assert held == [1, 2, 3, 4, 5]


def test_b129_a_cached_prompt_is_computed_in_one_step() -> None:
    bench = Bench(config(budget=8, bs=4), VllmV1())
    bench.add("a", list(range(40)), max_tokens=1)
    assert len(bench.drain()) == 5
    bench.add("b", list(range(40)), max_tokens=1)
    plan = bench.plan()
    assert plan.cached == {"b": 36} and granted(plan) == {"b": 4}


# VllmV1: blocks and seats


@pytest.mark.parametrize(("length", "held"), [(3, [1, 1, 2]), (4, [1, 2, 2]), (5, [2, 2, 2])])
def test_b031_a_block_is_taken_when_its_first_token_is_written(length: int, held: list[int]) -> None:
    bench = Bench(config(bs=4), VllmV1())
    request = bench.add("a", length)
    found = []
    for _ in held:
        bench.step()
        found.append(len(request.block_table))
    assert found == held


def test_b032_admission_counts_blocks_not_tokens() -> None:
    bench = Bench(config(pool=4, bs=4), VllmV1())
    for name in "abcde":
        bench.add(name, 1, max_tokens=1)
    plan = bench.plan()
    assert len(granted(plan)) == 4 and plan.blocked["e"] == ("blocks", 1, 0)
    bench.commit(plan)
    assert bench.step() == {"e": 1}


def test_b033_one_victim_is_enough() -> None:
    bench = Bench(config(pool=11, bs=4, seqs=6, prefix=False), VllmV1())
    for name in "abcdef":
        bench.add(name, 4, max_tokens=8)
    bench.step()
    for block in range(5):
        assert bench.scheduler.pool.num_free == 5, block
    plan = bench.plan()
    assert plan.evicted_requests == ("f",) and granted(plan) == dict.fromkeys("abcde", 1)


def test_b034_two_that_do_not_fit_together_both_finish() -> None:
    bench = Bench(config(pool=7, bs=4), VllmV1())
    bench.add("A", 16, max_tokens=5)
    bench.add("B", 12, max_tokens=5)
    steps = bench.drain()
    assert all(steps) and any(len(step) == 1 for step in steps)


def test_b036_preemptions_are_bounded() -> None:
    bench = Bench(config(pool=8, bs=4, seqs=8), VllmV1())
    for name in "abcdefgh":
        bench.add(name, 5, max_tokens=12)
    steps = bench.drain()
    victims = [len(plan.evicted_requests) for plan in bench.plans]
    assert 0 < sum(victims) <= len(steps)


def test_b039_admission_by_blocks() -> None:
    bench = Bench(config(pool=3, bs=32, seqs=8, budget=8), VllmV1())
    for name in "abcdef":
        bench.add(name, 8, max_tokens=8)
    most = 0
    while bench.scheduler.has_unfinished:
        bench.step()
        most = max(most, len(bench.running))
    assert most <= 3


@pytest.mark.parametrize("length", [4, 8, 12])
def test_b040_a_prompt_that_fills_its_blocks_decodes_on(length: int) -> None:
    bench = Bench(config(bs=4), VllmV1())
    request = bench.add("a", length, max_tokens=6)
    bench.drain()
    assert request.num_output_tokens == 6


def test_b043_capacity_ends_a_request_without_a_limit() -> None:
    bench = Bench(config(pool=8, bs=4, mml=64), VllmV1())
    bench.add("A", list(range(9)), max_tokens=3)
    bench.drain()
    request = bench.add("B", list(range(9)), max_tokens=None)
    bench.drain()
    assert request.num_output_tokens == 8 * 4 + 1 - 9


def test_b045_the_queue_is_never_overtaken() -> None:
    bench = Bench(config(pool=10, bs=4), VllmV1())
    bench.add("R", 20, max_tokens=4)
    bench.step()
    bench.add("big", 32)
    bench.add("small", 8)
    plan = bench.plan()
    assert granted(plan) == {"R": 1} and plan.blocked == {"big": ("blocks", 8, 4)}
    bench.commit(plan)
    bench.until(lambda: "big" in bench.running)
    assert "small" not in granted(bench.plans[-2]) and bench.running[0] == "big"
    bench.drain()


def test_b047_after_the_head_is_aborted_the_next_is_admitted() -> None:
    bench = Bench(config(pool=10, bs=4), VllmV1())
    bench.add("R", 20)
    bench.step()
    bench.add("big", 32)
    bench.add("small", 8)
    bench.step()
    bench.scheduler.abort("big")
    assert bench.step() == {"R": 1, "small": 8}


def test_b052_seats_are_counted() -> None:
    bench = Bench(config(seqs=2), VllmV1())
    for name in "abcde":
        bench.add(name, 3, max_tokens=4)
    while bench.scheduler.has_unfinished:
        plan = bench.plan()
        assert len(bench.running) <= 2
        if len(bench.running) == 2 and bench.waiting:
            assert plan.blocked[bench.waiting[0]].reason == "sequences"
        bench.commit(plan)


def test_b053_memory_is_taken_on_demand() -> None:
    bench = Bench(config(pool=8, bs=4, mml=32), VllmV1())
    for name in "abcd":
        bench.add(name, 4, max_tokens=None)
    assert bench.step() == dict.fromkeys("abcd", 4)
    bench.drain()
    assert sum(len(plan.evicted_requests) for plan in bench.plans) > 0


def test_b072_a_waiting_urgent_request_evicts_nobody() -> None:
    bench = Bench(config(pool=6, bs=4, prefix=False), VllmV1("priority"))
    bench.add("low", 11, max_tokens=2, priority=5)
    bench.add("equal", 7, max_tokens=2, priority=0)
    bench.step()
    bench.add("urgent", 18, max_tokens=2, priority=0)
    plan = bench.plan()
    assert not plan.evicted_requests and plan.blocked["urgent"].reason == "blocks"


def test_b073_a_prompt_that_does_not_fit_whole_is_not_begun() -> None:
    bench = Bench(config(pool=8, bs=4, budget=4, prefix=False), VllmV1())
    running = bench.add("R", 18, max_tokens=3)
    bench.steps(5)
    table = list(running.block_table)
    bench.add("late", 20, max_tokens=1)
    plan = bench.plan()
    assert granted(plan) == {"R": 1} and not plan.evicted_requests and running.block_table == table
    bench.commit(plan)
    bench.drain()


def test_without_the_reserve_rule_a_prompt_that_does_not_fit_whole_is_begun() -> None:
    limits = SchedulerConfig(8, 4, 64, 4, 8, scheduler_reserve_full_isl=False)
    bench = Bench(limits, VllmV1())
    bench.add("R", 18, max_tokens=6)
    bench.steps(5)
    bench.add("late", 20, max_tokens=1)
    assert bench.step() == {"R": 1, "late": 3}
    bench.drain()


def test_b080_the_watermark_keeps_blocks_free_for_those_who_run() -> None:
    limits = config(pool=10, bs=4, watermark=0.1)
    bench = Bench(limits, VllmV1())
    bench.add("all", 40, max_tokens=1)
    assert bench.step() == {"all": 40}, "on an empty engine it does not bind"
    bench.add("R", 16, max_tokens=9)
    bench.step()
    bench.add("rest", 24, max_tokens=1)
    plan = bench.plan()
    assert granted(plan) == {"R": 1} and plan.blocked["rest"].reason == "blocks"
    bench.commit(plan)
    bench.scheduler.abort("rest")
    bench.add("but one", 16, max_tokens=2)
    bench.drain()
    assert not any(plan.evicted_requests for plan in bench.plans)


def test_b080_a_decode_may_take_the_last_block() -> None:
    bench = Bench(config(pool=2, bs=4, watermark=0.5), VllmV1())
    bench.add("a", 4, max_tokens=5)
    bench.drain()
    assert not any(plan.evicted_requests for plan in bench.plans)


# VllmV1: preemption


def test_b057_preemptions_grant_no_more_than_is_known_and_change_no_token() -> None:
    outputs = []
    for prefix in (True, False):
        engine, toy = toy_engine(config(pool=6, bs=4, prefix=prefix))
        done = serve(engine, {name: prompt(6, index) for index, name in enumerate("abc")}, params(8))
        assert_alone(toy, done, params(8))
        outputs.append([completion.token_ids for completion in done.values()])
        assert sum(len(step.preempted) for step in engine.trace.steps) > 0
        for step in engine.trace.steps:
            assert all(start + count <= 6 + 8 - 1 for start, count in zip(step.starts, step.counts, strict=True))
    assert outputs[0] == outputs[1]


def test_b058_a_resumed_request_computes_all_it_knows_in_chunks() -> None:
    bench = Bench(config(budget=4, prefix=False, bs=4), VllmV1())
    request = bench.add("a", 3, max_tokens=14)
    for token in range(10):
        bench.step(token)
    bench.scheduler.policy = Scripted(lambda step: step.preempt(request))
    bench.step()
    bench.scheduler.policy = VllmV1()
    assert bench.steps(4) == [{"a": 4}, {"a": 4}, {"a": 4}, {"a": 1}], "13 tokens again"
    bench.drain()
    assert request.output_token_ids == [*range(10), 7, 7, 7, 7], "no token twice"


def test_b059_a_minimal_pool_changes_no_token() -> None:
    prompts = {f"r{index}": prompt(3 + index % 8, index) for index in range(14)}
    results = []
    for pool in (100, 6):
        engine, toy = toy_engine(config(pool=pool, bs=4))
        done = serve(engine, prompts, params(12))
        assert_alone(toy, done, params(12))
        results.append({name: completion.token_ids for name, completion in done.items()})
    assert sum(len(step.preempted) for step in engine.trace.steps) >= 10
    assert results[0] == results[1]


@pytest.mark.parametrize("order", ["fcfs", "priority"])
def test_b061_the_preempted_comes_back_before_new_ones(order: str) -> None:
    bench = Bench(config(pool=4, bs=4, prefix=False), VllmV1(order))
    for name in "abc":
        bench.add(name, 7, max_tokens=6)
    bench.step()
    assert bench.running == ["a", "b"]
    bench.until(lambda: bool(bench.plans[-1].evicted_requests))
    assert bench.plans[-1].evicted_requests == ("b",) and bench.waiting == ["b", "c"]
    bench.until(lambda: "a" not in bench.scheduler.requests)
    assert bench.step()["b"] > 0 and bench.plans[-1].resumed == ("b",)


def test_b070_the_most_urgent_is_next() -> None:
    bench = Bench(config(seqs=4), VllmV1("priority"))
    for index in range(6):
        bench.add(f"p0-{index}", 5, max_tokens=4, arrival=float(index))
    bench.step()
    bench.add("urgent", 5, max_tokens=4, priority=-100, arrival=9.0)
    assert bench.waiting[0] == "urgent"
    steps = bench.drain()
    firsts = {name: index for index, step in reversed(list(enumerate(steps))) for name in step}
    assert firsts["urgent"] <= min(firsts["p0-4"], firsts["p0-5"])


def test_priority_evicts_the_least_urgent_even_if_it_was_granted_already() -> None:
    bench = Bench(config(pool=4, bs=4, prefix=False, seqs=3), VllmV1("priority"))
    bench.add("low", 4, max_tokens=8, priority=5)
    bench.add("high", 4, max_tokens=8, priority=0)
    bench.step()
    assert bench.running == ["high", "low"], "the queue is in order of urgency"
    bench.drain()
    bench = Bench(config(pool=4, bs=4, prefix=False, seqs=3), VllmV1("priority"))
    bench.add("low", 6, max_tokens=8, priority=5)
    bench.step()
    bench.add("high", 8, max_tokens=8, priority=0)
    bench.step()
    assert bench.running == ["low", "high"]
    plan = bench.plan()
    assert granted(plan) == {"high": 1} and plan.evicted_requests == ("low",), "its grant went back"
    assert plan.total_tokens == 1
    bench.commit(plan)
    bench.drain()


def test_priority_skips_nobody_when_a_victim_stood_before() -> None:
    bench = Bench(config(pool=4, bs=4, prefix=False, seqs=3), VllmV1("priority"))
    bench.add("low", 5, max_tokens=8, priority=5)
    bench.step()
    bench.add("first", 4, max_tokens=4, priority=0)
    bench.add("second", 3, max_tokens=4, priority=0)
    bench.step()
    assert bench.running == ["low", "first", "second"] and bench.scheduler.pool.num_free == 0
    plan = bench.plan()
    assert plan.evicted_requests == ("low",) and granted(plan) == {"first": 1, "second": 1}
    bench.commit(plan)
    bench.drain()


def test_priority_lets_the_victim_itself_go_and_serves_the_others() -> None:
    bench = Bench(config(pool=5, bs=4, prefix=False, seqs=3), VllmV1("priority"))
    bench.add("a", 7, max_tokens=6, priority=1)
    bench.add("b", 4, max_tokens=6, priority=0)
    bench.add("c", 8, max_tokens=6, priority=9)
    bench.step()
    assert bench.running == ["b", "a", "c"]
    plan = bench.plan()
    assert plan.evicted_requests == ("c",) and granted(plan) == {"b": 1, "a": 1}
    bench.commit(plan)
    bench.drain()


def test_b074_a_victim_is_not_readmitted_before_room_is_there() -> None:
    engine, toy = toy_engine(config(pool=4, bs=4))
    done = serve(engine, {name: prompt(5, index) for index, name in enumerate("abcde")}, params(6))
    assert_alone(toy, done, params(6))
    for step in engine.trace.steps:
        assert not (step.preempted and (step.admitted or step.resumed))


def test_no_new_request_between_a_preemption_and_the_room_for_the_victim() -> None:
    bench = Bench(config(pool=4, bs=4, prefix=False), VllmV1())
    for name in "abcde":
        bench.add(name, 7, max_tokens=6)
    waiting_victim = None
    while bench.scheduler.has_unfinished:
        plan = bench.plan()
        if waiting_victim:
            joined = [*plan.resumed, *plan.admitted]
            assert not joined or waiting_victim in joined
            waiting_victim = None if waiting_victim in joined else waiting_victim
        if plan.evicted_requests:
            (waiting_victim,) = plan.evicted_requests
        bench.commit(plan)


def test_b075_one_victim_and_two_run() -> None:
    bench = Bench(config(pool=6, bs=4, prefix=False), VllmV1())
    for name in "abc":
        bench.add(name, 7, max_tokens=6)
    bench.steps(2)
    assert bench.scheduler.pool.num_free == 0
    plan = bench.plan()
    assert plan.evicted_requests == ("c",) and granted(plan) == {"a": 1, "b": 1}


def test_the_victim_of_first_come_first_served_is_the_newest() -> None:
    bench = Bench(config(pool=8, bs=4, seqs=3, prefix=False), VllmV1())
    bench.add("a", 4, max_tokens=16)
    bench.add("b", 12, max_tokens=9)
    bench.step()
    bench.add("c", 4, max_tokens=9)
    bench.until(lambda: bool(bench.plans[-1].evicted_requests))
    assert bench.plans[-1].evicted_requests == ("c",)
    bench.drain()


def test_with_the_cache_a_victim_hits_its_own_blocks() -> None:
    engine, toy = toy_engine(config(pool=7, bs=4))
    done = serve(engine, {"a": prompt(10), "b": prompt(10, 1), "c": prompt(10, 2)}, params(8))
    assert_alone(toy, done, params(8))
    resumed = [(name, step.cached.get(name, 0)) for step in engine.trace.steps for name in step.resumed]
    assert any(cached > 0 for _, cached in resumed)


# StaticBatching


def test_static_batching_admits_nobody_until_the_last_has_finished() -> None:
    bench = Bench(config(budget=4), StaticBatching(batch_size=3))
    for name, length, max_tokens in (("a", 9, 1), ("b", 3, 4), ("c", 5, 2), ("d", 2, 2), ("e", 6, 1)):
        bench.add(name, length, max_tokens)
    assert bench.drain() == [
        {"a": 9, "b": 3, "c": 5},
        {"b": 1, "c": 1},
        {"b": 1},
        {"b": 1},
        {"d": 2, "e": 6},
        {"d": 1},
    ]
    assert bench.plans[0].token_budget is None, "no token budget is declared"


def test_static_batching_is_bounded_by_seats_and_blocks() -> None:
    bench = Bench(config(seqs=2), StaticBatching(batch_size=5))
    for name in "abc":
        bench.add(name, 4, max_tokens=2)
    assert list(bench.step()) == ["a", "b"]
    bench.drain()
    bench = Bench(config(pool=3, bs=4), StaticBatching())
    for name in "abc":
        bench.add(name, 8, max_tokens=1)
    plan = bench.plan()
    assert granted(plan) == {"a": 8} and plan.blocked["b"] == ("blocks", 2, 1)
    bench.commit(plan)
    bench.drain()


def test_static_batching_outlives_a_pool_that_runs_out() -> None:
    engine, toy = toy_engine(config(pool=6, bs=4), "StaticBatching")
    done = serve(engine, {name: prompt(5, index) for index, name in enumerate("abcde")}, params(12))
    assert_alone(toy, done, params(12))
    assert any(step.preempted for step in engine.trace.steps)


# PrefillDecodeBudget


def test_prefill_decode_budget_keeps_three_limits() -> None:
    bench = Bench(config(), PrefillDecodeBudget(max_prefill=6, max_decode=2, max_total=7))
    for name, length in (("a", 2), ("b", 2), ("c", 2), ("d", 9)):
        bench.add(name, length, max_tokens=3)
    assert bench.step() == {"a": 2, "b": 2, "c": 2}
    plan = bench.plan()
    assert granted(plan) == {"a": 1, "b": 1, "d": 5} and plan.blocked["c"] == ("budget", 1, 0)
    assert plan.token_budget == 7
    bench.commit(plan)
    for step in bench.drain():
        assert sum(step.values()) <= 7


def test_prefill_decode_budget_serves_decodes_then_chunks_then_new_ones() -> None:
    bench = Bench(config(budget=8), PrefillDecodeBudget())
    bench.add("a", 2)
    bench.add("b", 12)
    assert bench.step() == {"a": 2, "b": 6}
    bench.add("c", 3)
    assert list(bench.step().items()) == [("a", 1), ("b", 6), ("c", 1)]
    assert list(bench.step().items()) == [("a", 1), ("b", 1), ("c", 2)], "decodes in admission order, then chunks"


def test_prefill_decode_budget_lets_the_preempted_in_before_new_ones() -> None:
    bench = Bench(config(pool=5, bs=4, prefix=False), PrefillDecodeBudget())
    for name in "abc":
        bench.add(name, 7, max_tokens=8)
    bench.step()
    bench.until(lambda: bool(bench.plans[-1].evicted_requests))
    assert bench.plans[-1].evicted_requests == ("b",) and bench.waiting == ["b", "c"]
    joined = [name for _ in range(40) if bench.step() for name in bench.plans[-1].resumed + bench.plans[-1].admitted]
    assert joined[0] == "b"


def test_prefill_decode_budget_never_lets_anybody_pass_the_head() -> None:
    bench = Bench(config(pool=10, bs=4), PrefillDecodeBudget())
    bench.add("R", 20)
    bench.step()
    bench.add("big", 32, max_tokens=1)
    bench.add("small", 4)
    plan = bench.plan()
    assert granted(plan) == {"R": 1} and plan.blocked["big"].reason == "blocks"


@pytest.mark.parametrize("field", ["max_prefill", "max_decode", "max_total"])
def test_prefill_decode_budget_checks_its_limits(field: str) -> None:
    with pytest.raises(InvalidConfig, match=f"{field} is 0"):
        PrefillDecodeBudget(**{field: 0})


# All of them


def test_b143_every_policy_finishes_the_same_work_with_the_same_tokens() -> None:
    prompts = {f"r{index}": prompt(1 + 3 * index % 17, index) for index in range(10)}
    sampling = {name: params(1 + index % 5) for index, name in enumerate(prompts)}
    results = []
    for name in POLICIES:
        engine, toy = toy_engine(config(pool=12, bs=4, budget=12, seqs=4), name)
        done = serve(engine, prompts, sampling)
        assert_alone(toy, done, sampling)
        assert engine.trace.policy == name == engine.scheduler.policy.name
        results.append(sum(len(completion.token_ids) for completion in done.values()))
    assert set(results) == {sum(1 + index % 5 for index in range(10))}


@pytest.mark.parametrize("policy", ["VllmV1", "PrefillDecodeBudget"])
def test_b055_mixed_policies_mix(policy: str) -> None:
    engine, _ = toy_engine(config(budget=8), policy)
    serve(engine, {"a": prompt(2), "b": prompt(20, 1)}, params(8))
    assert any(step.prefill_tokens and step.decode_tokens for step in engine.trace.steps)


def test_b055_static_batching_never_mixes() -> None:
    engine, _ = toy_engine(config(budget=8, seqs=2), "StaticBatching")
    serve(engine, {name: prompt(4, index) for index, name in enumerate("abcd")}, params(5))
    assert not any(step.prefill_tokens and step.decode_tokens for step in engine.trace.steps)


@pytest.mark.parametrize("policy", POLICIES)
def test_same_inputs_same_decisions(policy: str) -> None:
    digests = set()
    for _ in range(2):
        engine, _ = toy_engine(config(pool=10, bs=4, budget=16, seqs=4), policy)
        serve(engine, {f"r{index}": prompt(3 + index, index % 3) for index in range(8)}, params(9))
        digests.add(engine.trace.digest())
    assert len(digests) == 1


def test_an_unknown_policy_is_named_and_a_near_one_is_offered() -> None:
    assert isinstance(policy_by_name("VllmV1"), VllmV1)
    with pytest.raises(UnknownName, match=r"no policy is called 'VlmV1'; there are VllmV1, .*did you mean VllmV1\?"):
        policy_by_name("VlmV1")
    with pytest.raises(UnknownName, match="'zzz'"):
        policy_by_name("zzz")
    with pytest.raises(InvalidConfig, match="order is 'random'"):
        VllmV1("random")
    with pytest.raises(InvalidConfig, match="batch_size is 0"):
        StaticBatching(0)


def test_policies_are_made_afresh() -> None:
    assert policy_by_name("StaticBatching") is not policy_by_name("StaticBatching")


@pytest.mark.parametrize("policy", POLICIES)
def test_b133_every_request_gets_exactly_max_tokens(policy: str) -> None:
    for budget in (1, 2, 3, 4):
        for max_tokens in range(1, 10):
            engine, toy = toy_engine(config(budget=budget, bs=4), policy)
            done = serve(engine, {"a": prompt(5)}, params(max_tokens))
            assert_alone(toy, done, params(max_tokens))
            assert len(done["a"].token_ids) == max_tokens


def test_b141_one_token_takes_one_step() -> None:
    engine, _ = toy_engine(config(budget=8))
    serve(engine, {"a": prompt(5)}, params(1))
    assert len(engine.trace.steps) == 1 and engine.trace.steps[0].decode_tokens == 0


def test_b201_the_first_token_comes_with_the_last_chunk() -> None:
    engine, _ = toy_engine(config(budget=4))
    engine.add_request(prompt(10), params(2))
    assert [len(engine.step()) for _ in range(4)] == [0, 0, 1, 1]


def test_b128_a_cached_request_takes_as_many_steps_and_gives_the_same_tokens() -> None:
    engine, toy = toy_engine(config(bs=4))
    for name in "ab":
        before = len(engine.trace.steps)
        assert_alone(toy, serve(engine, {name: prompt(8)}, params(3)), params(3))
        assert len(engine.trace.steps) - before == 3
    assert engine.trace.steps[3].cached == {"b": 4}


def test_what_no_policy_can_serve_is_refused_the_same_everywhere() -> None:
    for name in POLICIES:
        bench = Bench(config(pool=2, bs=4), policy_by_name(name))
        with pytest.raises(RequestTooLarge, match="num_blocks=2"):
            bench.add("a", 9, max_tokens=1)
