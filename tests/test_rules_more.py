"""Rules that a deliberate fault broke without any other test noticing it; see `tests/mutants/bank.py`."""

from __future__ import annotations

import pytest

from contbatch.policies import FairShare, PrefillDecodeBudget, ShortestJobFirst
from contbatch.request import Request, RunningRequest
from contbatch.step import Step
from contbatch.waiting import WaitingQueue
from tests.swapping import directed, finish, send_away, swap
from tests.toy import Bench, config, params, prompt


@pytest.mark.parametrize("gone", range(9))
def test_a_queue_by_key_keeps_its_order_whoever_leaves_it(gone: int) -> None:
    queue = WaitingQueue(lambda request: (request.request.priority,))
    urgencies = [1, 6, 2, 7, 8, 3, 5, 9, 4]
    requests = [RunningRequest(Request(f"r{u}", [1], priority=u), index, 4) for index, u in enumerate(urgencies)]
    for request in requests:
        queue.push(request)
    queue.remove(requests[gone])
    left = []
    while queue:
        left.append(queue.head.request.priority)
        queue.remove(queue.head)
    assert left == sorted({*urgencies} - {urgencies[gone]})


def test_decodes_before_a_preemption_count_in_the_budget() -> None:
    """a gets a token, b finds no block, d has to go; then b gets the second token, and c is one too many."""
    bench = Bench(config(pool=7, bs=4, prefix=False), PrefillDecodeBudget(max_decode=2))
    for name, length in (("a", 5), ("b", 4), ("c", 5), ("d", 5)):
        bench.add(name, length)
    bench.step()
    assert bench.step() == {"a": 1, "b": 1} and bench.plans[-1].evicted_requests == ("d",)
    assert bench.plans[-1].blocked["c"].reason == "budget"
    bench.drain()


def test_a_long_job_is_passed_only_by_short_ones_that_come_soon() -> None:
    """With aging 1, work of 10 is passed by work of 2 that comes up to 8 steps later."""
    bench = Bench(config(seqs=1, prefix=False), ShortestJobFirst(aging=1.0))
    bench.add("runs", 1, max_tokens=20)
    bench.step()
    bench.add("long", 8, max_tokens=2)
    bench.steps(7)
    bench.add("soon", 1, max_tokens=1)
    bench.steps(2)
    bench.add("late", 1, max_tokens=1)
    assert bench.waiting == ["soon", "long", "late"]
    bench.drain()


def test_fair_share_gives_the_seats_of_one_step_in_turn() -> None:
    bench = Bench(config(seqs=4, prefix=False), FairShare())
    for name in ("a0", "a1", "a2", "b0", "b1"):
        bench.scheduler.add(Request(name, range(4), params(2), client=name[0]))
    assert list(bench.step()) == ["a0", "b0", "a1", "b1"]
    bench.drain()


def test_what_goes_out_is_copied_before_what_comes_in() -> None:
    """In one step a makes room for b, which comes back into the blocks that a held."""
    engine, toy, policy = directed(swap(pool=6, bs=4, prefix=False), {"a": prompt(10), "b": prompt(10, 1)}, 8)
    policy.decide = send_away("b")
    engine.step()

    def change_places(step: Step) -> None:
        a, b = step.running[0], step.waiting.head
        step.preempt(a)
        assert step.admit(b, b.owed)

    policy.decide = change_places
    engine.step()
    assert (engine.trace.steps[-1].swapped_out, engine.trace.steps[-1].swapped_in) == (["a"], ["b"])
    finish(engine, toy, params(8))
