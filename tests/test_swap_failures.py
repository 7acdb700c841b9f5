"""Preemption by swap when a step fails: before, between and after its copies, to be run again or given up.

Host memory must never be believed to hold what was not copied to it, and nothing may be copied from a device block
that was overwritten meanwhile. Each test shows it by the tokens, which are those of a run alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from contbatch import Engine, summarise
from contbatch.batch import ScheduledBatch
from contbatch.errors import StepFailed
from contbatch.plan import IterationPlan
from contbatch.policies import POLICIES
from contbatch.request import FinishReason, RequestStatus, SamplingParams
from contbatch.step import Step
from contbatch.trace import StepRecord
from contbatch.viz import View
from tests.swapping import Copies, Directed, crowd, finish, send_away, step, swap
from tests.toy import Ticks, Toy, assert_empty, params, prompt


class Watched(Engine):
    """An engine that keeps the plans that were carried out."""

    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self.plans: list[IterationPlan] = []

    def record(self, plan: IterationPlan, start: float) -> StepRecord:
        """As it is, and the plan is kept."""
        self.plans.append(plan)
        return super().record(plan, start)


class Fragile(Copies):
    """Copies, and a forward pass, that fail when told so. Of the copies the second half was made by then."""

    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self.fails_in: str = ""
        self.error: BaseException = RuntimeError("device lost")
        self.meanwhile: Callable[[], object] = lambda: None

    def swap_out(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Half of it, or all."""
        if self.fails_in == "swap_out":
            Toy.swap_out(self, blocks[(len(blocks) + 1) // 2 :])
            self._fail()
        super().swap_out(blocks)

    def swap_in(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Half of it, or all."""
        if self.fails_in == "swap_in":
            Toy.swap_in(self, blocks[(len(blocks) + 1) // 2 :])
            self._fail()
        super().swap_in(blocks)

    def execute(self, batch: ScheduledBatch, sampling: Mapping[str, SamplingParams]) -> Mapping[str, int | Exception]:
        """Everything is written, then it fails; or it works."""
        tokens = super().execute(batch, sampling)
        if self.fails_in == "execute":
            self._fail()
        return tokens

    def _fail(self) -> None:
        self.fails_in = ""
        self.meanwhile()
        raise self.error


def fragile(host: int = 40, prefix: bool = True) -> tuple[Watched, Fragile]:
    """An engine with a crowd in it."""
    limits = swap(host, pool=12, bs=4, budget=24, seqs=6, prefix=prefix)
    toy = Fragile(limits.num_blocks, limits.block_size)
    engine = Watched(toy, limits, clock=Ticks())
    for name, tokens in crowd().items():
        engine.add_request(tokens, params(14), request_id=name)
    return engine, toy


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("hook", ["swap_out", "swap_in", "execute"])
@pytest.mark.parametrize("error", [RuntimeError("device lost"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_a_step_that_failed_is_run_again_without_copying_twice(error: BaseException, hook: str, prefix: bool) -> None:
    engine, toy = fragile(prefix=prefix)
    failures, toy.error = 0, error
    while engine.has_unfinished:
        toy.fails_in = hook
        try:
            engine.step()
        except (StepFailed, KeyboardInterrupt):
            failures += 1
            engine.scheduler.check()
            engine.step()
        engine.scheduler.check()
    assert failures > 2
    assert toy.out == [plan.swap_out_blocks for plan in engine.plans if plan.swap_out_requests]
    assert toy.back == [plan.swap_in_blocks for plan in engine.plans if plan.swap_in_blocks]
    finish(engine, toy, params(14))


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("hook", ["", "swap_out", "swap_in", "execute"])
@pytest.mark.parametrize("drop", [False, True])
def test_one_takes_the_very_blocks_of_another_that_goes_in_the_same_step(hook: str, drop: bool, prefix: bool) -> None:
    """First out, then in; and what was overwritten since must not be copied out again."""
    policy, toy = Directed(), Fragile(6, 4)
    engine = Watched(toy, swap(pool=6, bs=4, prefix=prefix), policy, clock=Ticks())
    for number, name in enumerate("ab"):
        engine.add_request(prompt(9, number), params(12), request_id=name)
    step(engine)
    policy.decide = send_away("a")
    step(engine)
    taken = set(engine.scheduler.requests["b"].block_table)

    def exchange(step: Step) -> None:
        step.preempt(step.running[0])
        assert step.admit([*step.waiting][1], 1, hold=24)

    policy.decide, toy.fails_in = exchange, hook
    if hook:
        with pytest.raises(StepFailed):
            engine.step()
        if drop:
            engine.abort(engine.add_request([1], params(1), request_id="nobody"))
            del engine.completions["nobody"]
    record = step(engine)
    if hook and drop:
        assert engine.scheduler.requests["b"].num_preemptions == 1 and "b" in record.resumed
    else:
        assert (record.swapped_out, record.swapped_in) == (["b"], ["a"])
        assert set(engine.plans[-1].new_blocks["a"]) >= taken
        assert (len(toy.out), len(toy.back)) == (2, 1)
    finish(engine, toy, params(12))


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("hook", ["swap_out", "swap_in", "execute"])
def test_a_plan_that_is_dropped_after_its_copies_corrupts_nothing(hook: str, prefix: bool) -> None:
    """Its victims are computed again; who was coming back still lies in host memory and comes later."""
    engine, toy = fragile(prefix=prefix)
    everybody, dropped = dict(engine.scheduler.requests), 0
    while engine.has_unfinished:
        toy.fails_in = hook
        before = {r.request_id: (r.status, list(r.host_table)) for r in engine.scheduler.requests.values()}
        try:
            engine.step()
        except StepFailed:
            plan = engine._pending
            assert plan is not None
            engine.abort(engine.add_request([1], params(1), request_id="nobody"))
            engine.scheduler.check()
            for name in plan.swap_out_requests:
                victim = engine.scheduler.requests[name]
                assert (victim.status, victim.host_table) == (RequestStatus.PREEMPTED, [])
            for name in plan.swap_in_requests:
                late = engine.scheduler.requests[name]
                assert (late.status, late.host_table) == before[name]
            dropped += bool(plan.swap_out_requests or plan.swap_in_requests)
            toy.fails_in = ""
            step(engine)
    assert dropped > 2
    trace, view = engine.trace, View(engine.trace)
    told = {name: metrics.num_preemptions for name, metrics in summarise(trace).requests.items()}
    assert {name: told[name] for name in everybody} == {n: request.num_preemptions for n, request in everybody.items()}
    for t in range(trace.num_steps):
        assert [state for state, _ in view.frame(t).blocks.values()].count("owned") == view.pool_use[t][0]
    for name in [name for name in engine.completions if name.startswith("nobody")]:
        del engine.completions[name]
    finish(engine, toy, params(14))


@pytest.mark.parametrize("hook", ["swap_out", "swap_in", "execute"])
@pytest.mark.parametrize("drop", [False, True])
def test_an_abort_from_inside_a_failing_step_returns_everything(hook: str, drop: bool) -> None:
    """Whoever it is: a victim of the step, one that comes back in it, or one that runs."""
    reached = 0
    for victim in crowd():
        engine, toy = fragile()
        while engine.has_unfinished:
            toy.fails_in = hook

            def abort(name: str = victim, engine: Engine = engine) -> None:
                """Once the step has something to do with it."""
                plan = engine._pending
                assert plan is not None
                if name in (*plan.swap_out_requests, *plan.swap_in_requests):
                    assert engine.abort(name)

            toy.meanwhile = abort
            try:
                engine.step()
            except StepFailed:
                engine.scheduler.check()
                if drop:
                    engine.abort(engine.add_request([1], params(1), request_id="nobody"))
                    engine.scheduler.check()
                toy.fails_in = ""
                engine.step()
            engine.scheduler.check()
        ended = engine.completions[victim]
        reached += ended.finish_reason is FinishReason.ABORT
        assert ended.token_ids == toy.alone(ended.prompt_token_ids, params(14))[: len(ended.token_ids)]
        assert engine.trace.finished[victim].reason == ended.finish_reason.value
        View(engine.trace)
        for name in [name for name, done in engine.completions.items() if done.finish_reason is FinishReason.ABORT]:
            del engine.completions[name]
        finish(engine, toy, params(14))
    assert reached >= 2


def test_a_deadline_that_passes_while_a_step_fails_drops_the_plan() -> None:
    engine, toy = fragile()
    engine.add_request(prompt(6, 20), params(14), request_id="late", timeout=40.0)
    while not (engine._pending and engine._pending.swap_out_requests):
        toy.fails_in = "swap_out"
        try:
            engine.step()
        except StepFailed:
            continue
    gone = engine._pending.swap_out_requests
    while engine.now() < 100:
        pass
    assert ("late", FinishReason.ABORT) in [(e.request_id, e.finish_reason) for e in engine.step()]
    engine.scheduler.check()
    assert all(engine.scheduler.requests[name].status is not RequestStatus.SWAPPED for name in gone)
    del engine.completions["late"]
    finish(engine, toy, params(14))


@pytest.mark.parametrize("policy", list(POLICIES))
def test_any_traffic_with_failing_copies_under_any_policy(policy: str) -> None:
    """Steps fail anywhere, are run again or given up; requests with common prefixes come, and go at any time."""
    moved = 0
    for seed in range(12):
        chance = random.Random(f"{policy} {seed}")
        bs = chance.choice([1, 2, 4])
        limits = swap(
            chance.choice([2, 6, 60]),
            pool=max(6, 24 // bs),
            bs=bs,
            budget=chance.randint(3, 16),
            seqs=chance.randint(2, 5),
            prefix=chance.random() < 0.7,
            mml=24,
        )
        toy = Fragile(limits.num_blocks, bs)
        engine = Engine(toy, limits, policy, clock=Ticks())
        asked = 0
        while asked < 12 or engine.has_unfinished:
            if asked < 12 and (not engine.has_unfinished or chance.random() < 0.4):
                asked += 1
                tokens = [
                    *prompt(bs * chance.randint(0, 2), chance.randint(0, 1)),
                    *prompt(chance.randint(1, 4), asked),
                ]
                engine.add_request(tokens, params(10), priority=chance.randint(0, 2), client=str(asked % 2))
            toy.fails_in = chance.choice(["", "", "", "swap_out", "swap_in", "execute"])
            names = list(engine.scheduler.requests)
            try:
                engine.step()
            except StepFailed:
                if chance.random() < 0.5:
                    engine.abort(chance.choice(names))
            engine.scheduler.check()
            if chance.random() < 0.05 and engine.scheduler.requests:
                engine.abort(chance.choice(list(engine.scheduler.requests)))
        moved += len(toy.out) + len(toy.back)
        for done in engine.completions.values():
            alone = toy.alone(done.prompt_token_ids, params(10))
            assert done.token_ids == alone[: len(done.token_ids)], seed
            assert done.finish_reason is FinishReason.ABORT or len(done.token_ids) == 10
        assert_empty(engine)
        assert engine.scheduler.host.num_used == 0
    assert moved > 10 or policy in ("Orca", "PeakMemory")
