"""What a tester found in the scheduler half, each as the smallest test that would find it again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contbatch import (
    Engine,
    FairShare,
    SamplingParams,
    SchedulerConfig,
    ScriptedExecutor,
    Trace,
    VllmV1,
    Workload,
    WorkloadRequest,
)
from contbatch.calibrate import calibrate
from contbatch.compare import compare
from contbatch.errors import (
    ContbatchError,
    DuplicateRequest,
    InvalidConfig,
    InvalidRequest,
    PolicyError,
    StepFailed,
    TraceError,
)
from contbatch.plan import BlockReason
from contbatch.policies import AgedPriority, HfFifo
from contbatch.request import FinishReason
from contbatch.step import Step
from contbatch.verify import verify
from contbatch.workload import mixed
from tests.toy import Bench, Bytes, Scripted, assert_alone, assert_empty, config, params, prompt, serve, toy_engine


def test_a_deadline_after_an_abort_in_a_failed_step_ends_once() -> None:
    class Aborts(ScriptedExecutor):
        def execute(self, *_: Any) -> Mapping[str, int | Exception]:
            engine.abort("a")
            raise ValueError

    now = [0.0]
    engine = Engine(Aborts(), clock=lambda: now[0])
    engine.add_request([1], request_id="a", timeout=1)
    with pytest.raises(StepFailed):
        engine.step()
    now[0] = 2.0
    engine.step()
    assert engine.completions["a"].finish_reason is FinishReason.ABORT and not engine.has_unfinished


class Interrupted(Bytes):
    """A tokenizer in which Ctrl-C lands."""

    def __init__(self, at: int) -> None:
        self.calls, self.at = 0, at

    def decode(self, token_ids: Sequence[int]) -> str:
        """Once."""
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt
        return super().decode(token_ids)


@pytest.mark.parametrize("at", range(1, 8))
def test_an_interrupt_in_the_tokenizer_loses_no_event(at: int) -> None:
    engine, toy = toy_engine(config(), tokenizer=Interrupted(at))
    stream = engine.stream(prompt(4), params(3))
    engine.add_request(prompt(5, 1), params(3), request_id="other")
    tokens: list[int | None] = []
    for _ in range(3):
        try:
            for event in stream:
                tokens.append(event.token_id)
        except KeyboardInterrupt:
            continue
    assert [token for token in tokens if token is not None] == list(toy.alone(prompt(4), params(3)))
    engine.run()
    assert_alone(toy, {"other": engine.completions["other"]}, params(3))
    assert_empty(engine)


@pytest.mark.parametrize("hook", ["schedule", "on_add", "on_finish", "queue_key", "victim"])
def test_an_interrupt_in_a_policy_leaves_the_engine_usable(hook: str) -> None:
    armed = [False]

    class Fragile(VllmV1):
        def _hit(self, name: str) -> None:
            if name == hook and armed[0]:
                armed[0] = False
                raise KeyboardInterrupt

        def schedule(self, step: Step) -> None:
            super().schedule(step)
            self._hit("schedule")

        def on_add(self, _: Any) -> None:
            self._hit("on_add")

        def on_finish(self, _: Any) -> None:
            self._hit("on_finish")

        def victim(self, step: Step) -> Any:
            self._hit("victim")
            return super().victim(step)

    policy = Fragile()
    if hook == "queue_key":
        policy.queue_key = lambda request: (policy._hit("queue_key"), (request.index,))[1]
    engine, toy = toy_engine(config(pool=6, bs=4, budget=12, seqs=4, prefix=False), policy)
    interrupts = 0
    prompts = {f"r{index}": prompt(5 + index, index) for index in range(5)}
    for name, tokens in prompts.items():
        armed[0] = name == "r3"
        try:
            engine.add_request(tokens, params(8), request_id=name)
        except KeyboardInterrupt:
            interrupts += 1
            engine.add_request(tokens, params(8), request_id=name)
    for number in range(200):
        armed[0] = armed[0] or number == 4
        try:
            engine.step()
        except KeyboardInterrupt:
            interrupts += 1
        engine.scheduler.check()
    assert interrupts >= 1
    assert_alone(toy, {name: engine.completions[name] for name in prompts}, params(8))
    armed[0] = False
    assert_empty(engine)


@pytest.mark.parametrize("field", ["spare", "fit"])
@pytest.mark.parametrize("value", [-100, float("nan"), 1.5, "3"])
def test_an_admission_checks_what_it_is_given(field: str, value: Any) -> None:
    policy = Scripted(lambda step: step.admit(step.waiting.head, 1, **{field: value}))
    engine, _ = toy_engine(config(), policy)
    engine.add_request(prompt(5), params(2))
    with pytest.raises(PolicyError, match=f"{field}="):
        engine.step()
    engine.scheduler.check()


def test_a_refused_admission_says_so_itself() -> None:
    engine, _ = toy_engine(config(pool=4, bs=4, seqs=4, prefix=False), Scripted(greedy))
    engine.add_request(prompt(9), params(4), request_id="a")
    engine.add_request(prompt(9, 1), params(4), request_id="b")
    engine.step()
    assert engine.trace.steps[0].reasons["b"] == (BlockReason.BLOCKS.value, 3, 1)


def greedy(step: Step) -> None:
    """Whole prompts while there is room; it does not say why somebody waits."""
    step.grant_running()
    while step.waiting and step.admit(step.waiting.head, step.waiting.head.owed):
        pass


def test_policies_cannot_change_what_they_read() -> None:
    def meddle(step: Step) -> None:
        for request in step.running:
            step.preempt(request)
        assert not step.running and len(step.victims) == 3
        step.grants.clear()
        with pytest.raises(AttributeError):
            step.waiting.push(None)  # type: ignore[attr-defined]
        with pytest.raises(AttributeError):
            step.running.pop()  # type: ignore[attr-defined]

    engine, toy = toy_engine(config())
    for index in range(3):
        engine.add_request(prompt(4, index), params(4), request_id=f"r{index}")
    engine.step()
    policy, engine.scheduler.policy = engine.scheduler.policy, Scripted(meddle)
    engine.step()
    engine.scheduler.check()
    engine.scheduler.policy = policy
    engine.run()
    assert_alone(toy, engine.completions, params(4))


# Recorded runs


def recorded(path: Path) -> Engine:
    return Engine(ScriptedExecutor(), record_to=path)


def test_a_made_up_id_never_meets_a_given_one(tmp_path: Path) -> None:
    engine = recorded(tmp_path / "run.jsonl")
    engine.add_request([1], params(2), request_id="r0")
    engine.run()
    assert engine.add_request([2], params(2)) == "r1"
    with pytest.raises(DuplicateRequest, match="used before"):
        engine.add_request([1], params(2), request_id="r0")
    engine.close()
    assert list(Trace.load(tmp_path / "run.jsonl").requests) == ["r0", "r1"]


def test_closing_in_a_step_is_refused_and_afterwards_everything_is(tmp_path: Path) -> None:
    engine = recorded(tmp_path / "run.jsonl")
    faults: list[Exception] = []

    def close(_: Any) -> None:
        try:
            engine.close()
        except StepFailed as error:
            faults.append(error)

    engine.add_request([1], params(2), on_event=close)
    engine.run()
    assert len(faults) == 2
    engine.close()
    engine.close()
    for call in (engine.step, lambda: engine.add_request([1])):
        with pytest.raises(StepFailed, match="closed"):
            call()
    assert Trace.load(tmp_path / "run.jsonl").num_steps == 2


@pytest.mark.parametrize("path", ["no/such/folder/run.jsonl", "."])
def test_a_trace_that_cannot_be_written_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(TraceError, match="cannot be written"):
        recorded(tmp_path / path)


def test_reusing_an_id_does_not_walk_through_the_whole_trace() -> None:
    """The earlier request of that id is renamed in the steps of its life only."""
    engine = Engine(ScriptedExecutor())
    for _ in range(5):
        engine.add_request([1, 2], params(2), request_id="x")
        engine.run()
    assert list(engine.trace.requests) == ["x#1", "x#2", "x#3", "x#4", "x"]
    assert [step.request_ids for step in engine.trace.steps] == [
        [name] for name in ("x#1", "x#1", "x#2", "x#2", "x#3", "x#3", "x#4", "x#4", "x", "x")
    ]


# Input


@pytest.mark.parametrize(
    "arguments",
    [
        {"client": None},
        {"client": 5},
        {"priority": 10**400},
        {"timeout": 10**400},
        {"timeout": float("inf")},
        {"timeout": 0},
        {"timeout": 1, "arrival_time": 10**400},
        {"timeout": 1, "arrival_time": "x"},
        {"arrival_time": -1.0},
        {"arrival_time": float("nan")},
    ],
)
def test_odd_arguments_of_a_request_are_refused(arguments: dict[str, Any]) -> None:
    engine, toy = toy_engine(config())
    with pytest.raises(InvalidRequest):
        engine.add_request(prompt(3), params(2), **arguments)
    assert_alone(toy, serve(engine, {"a": prompt(3)}, params(2)), params(2))


def test_a_policy_class_is_no_policy() -> None:
    with pytest.raises(InvalidConfig, match=r"pass an instance, VllmV1\(\)"):
        Engine(ScriptedExecutor(), policy=VllmV1)  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [None, 5])
def test_a_budget_that_is_none_is_the_policys_fault(budget: Any) -> None:
    policy = VllmV1()
    policy.token_budget = lambda _: budget  # type: ignore[method-assign]
    with pytest.raises(PolicyError, match="return a TokenBudget"):
        Engine(ScriptedExecutor(), policy=policy).add_request([1])


def test_a_queue_key_may_be_a_number() -> None:
    policy = VllmV1()
    policy.queue_key = lambda request: -request.num_prompt_tokens
    engine, _ = toy_engine(config(seqs=1), policy)
    serve(engine, {"short": prompt(3), "long": prompt(9, 1)}, params(2))
    assert list(engine.completions) == ["long", "short"]


@pytest.mark.parametrize("meddle", [lambda e: e.abort_all(), lambda e: e.step(), lambda e: e.abort("b")])
def test_on_add_that_calls_the_engine_leaves_it_in_order(meddle: Callable[[Engine], object]) -> None:
    policy = VllmV1()
    engine, _ = toy_engine(config(), policy)
    engine.add_request(prompt(3), params(2), request_id="a")
    policy.on_add = lambda _: meddle(engine) and None  # type: ignore[method-assign]
    with suppress(ContbatchError):
        engine.add_request(prompt(5), params(2), request_id="b")
    del policy.on_add
    assert "b" not in engine.scheduler.requests
    engine.scheduler.check()
    assert engine.scheduler.waiting.num_tokens == sum(len(r.token_ids) for r in engine.scheduler.waiting)
    engine.run()
    assert_empty(engine)


def test_fair_share_charges_nothing_for_a_step_that_was_given_up() -> None:
    policy, fails = FairShare(), [True]

    class Fails(ScriptedExecutor):
        def execute(self, *arguments: Any) -> Mapping[str, int | Exception]:
            if fails[0]:
                raise ValueError
            return super().execute(*arguments)

    engine = Engine(Fails(), policy=policy)
    engine.add_request([1] * 10, client="x")
    for _ in range(5):
        with pytest.raises(StepFailed):
            engine.step()
        engine.abort(engine.add_request([2], client="q"))
    assert policy.service["x"] == 0


# Files


def test_a_comparison_counts_steps_and_needs_no_requests() -> None:
    assert compare(Workload("none", 0, ()), ["VllmV1"])[0].excess == 0
    timed = Workload("timed", 0, (WorkloadRequest("a", (1, 2), 2, arrival_time=1.0),))
    with pytest.raises(InvalidConfig, match="arrival_step"):
        compare(timed, ["VllmV1"])


STEP = {"step": 0, "scheduled": {}, "preempted": [], "finished": [], "free_blocks": 8}


@pytest.mark.parametrize(
    "change",
    [{"step": "x"}, {"step": -5}, {"step": 1.5}, {"free_blocks": "x"}, {"scheduled": ["abc"]}, {"step": float("inf")}],
)
def test_a_recording_with_odd_values_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "odd.json"
    case = {"case": "c", "config": {"num_blocks": 9}, "requests": [], "steps": [STEP | change]}
    path.write_text(json.dumps({"policy": "VllmV1", "cases": [case]}))
    with pytest.raises(TraceError):
        verify(path)


def test_a_recording_of_a_far_step_is_not_walked_through(tmp_path: Path) -> None:
    path = tmp_path / "far.json"
    case = {"case": "c", "config": {"num_blocks": 9}, "requests": [], "steps": [STEP | {"step": 10**9}]}
    path.write_text(json.dumps({"policy": "VllmV1", "cases": [case]}))
    assert not verify(path).equal


def test_a_recording_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 200_000)
    with pytest.raises(TraceError):
        verify(path)


@pytest.mark.parametrize("size", ["abc", None, 0, -1, True])
def test_calibration_needs_to_know_the_block_size(size: Any) -> None:
    with pytest.raises(TraceError, match="block_size"):
        calibrate(Trace(config={"block_size": size}))


@pytest.mark.parametrize("share", [0, 1, -1, 1.5, float("nan")])
def test_the_share_kept_aside_is_a_share(share: float) -> None:
    with pytest.raises(InvalidConfig, match="held_out"):
        calibrate(Trace(), held_out=share)


def test_infinite_times_are_refused_in_a_trace() -> None:
    engine = Engine(ScriptedExecutor(), SchedulerConfig())
    engine.add_request([1], SamplingParams(max_tokens=1))
    engine.run()
    text = engine.trace.dumps().replace(f'"end": {engine.trace.steps[0].end}', '"end": 1e999')
    with pytest.raises(TraceError, match="1e999 is no number"):
        Trace.loads(text)


# Policies, events and arguments


def test_aged_priority_exactly_as_urgent_is_not_more_urgent() -> None:
    wrong = []
    for start in range(200):
        bench = Bench(config(seqs=1), AgedPriority(0.1))
        bench.steps(start)
        bench.add("low", 4, max_tokens=60, priority=3)
        bench.steps(30)
        bench.add("critical", 4, max_tokens=1, priority=0)
        if bench.plan().evicted_requests:
            wrong.append(start)
    assert not wrong


def test_aged_priority_does_not_evict_in_vain_when_a_decode_takes_the_freed_block() -> None:
    bench = Bench(config(pool=8, bs=4, prefix=False), AgedPriority())
    bench.add("equal", 7, max_tokens=12, priority=0)
    bench.add("low", 12, max_tokens=4, priority=3)
    bench.steps(2)
    bench.add("urgent", 24, max_tokens=1, priority=0)
    plan = bench.plan()
    assert not plan.evicted_requests or plan.admitted == ("urgent",)


def test_aged_priority_does_not_evict_in_vain_when_the_budget_is_gone() -> None:
    bench = Bench(config(budget=8, seqs=2, pool=200, mml=400), AgedPriority())
    bench.add("low", 2, max_tokens=40, priority=3)
    bench.step()
    bench.add("normal", 100, max_tokens=2, priority=2)
    bench.step()
    bench.add("urgent", 2, max_tokens=2, priority=0)
    plan = bench.plan()
    assert not plan.evicted_requests or plan.admitted == ("urgent",)


def test_aged_priority_alone_needs_no_watermark() -> None:
    bench = Bench(config(pool=10, bs=4, watermark=0.3), AgedPriority())
    bench.add("low", 16, max_tokens=10, priority=3)
    bench.step()
    bench.add("urgent", 32, max_tokens=1, priority=0)
    plan = bench.plan()
    assert plan.evicted_requests == ("low",) and plan.admitted == ("urgent",)


def test_the_tokens_of_a_step_are_not_lost_when_on_finish_raises() -> None:
    policy = VllmV1()
    engine, toy = toy_engine(config(), policy)
    engine.add_request(prompt(4), params(1), request_id="a")
    engine.add_request(prompt(5, 1), params(3), request_id="b")
    policy.on_finish = lambda request: 1 / 0 and None  # type: ignore[method-assign, assignment]
    events = []
    while engine.has_unfinished:
        with suppress(PolicyError):
            events += engine.step()
    tokens = tuple(event.token_id for event in events if event.request_id == "b")
    assert tokens == toy.alone(prompt(5, 1), params(3))


def test_hf_fifo_lets_somebody_in_when_nobody_runs() -> None:

    class Impatient(HfFifo):
        sends_away = False

        def schedule(self, step: Step) -> None:
            super().schedule(step)
            if step.victims and self.sends_away:
                self.sends_away = False
                for request in step.running:
                    step.preempt(request)

    policy = Impatient(safety_margin=0.0)
    policy.sends_away = True
    bench = Bench(config(pool=6, bs=4, prefix=False), policy)
    bench.add("old", 8, max_tokens=6)
    bench.add("new", 13, max_tokens=3)
    bench.drain()


@pytest.mark.parametrize("prompt_range", [5, (1, 2, 3), None])
def test_a_range_that_is_no_pair_is_named(prompt_range: Any) -> None:
    with pytest.raises(InvalidConfig, match="prompt is"):
        mixed(2, prompt=prompt_range)


def test_a_huge_vocabulary_is_named() -> None:
    with pytest.raises(InvalidConfig, match="vocab_size is"):
        mixed(2, vocab_size=10**400)


def test_a_request_that_can_never_fit_is_not_told_to_come_again() -> None:
    engine = Engine(ScriptedExecutor(), replace(config(pool=4, bs=4), max_num_queued_reqs=1))
    engine.add_request(prompt(3), params(2))
    with pytest.raises(ContbatchError, match="num_blocks=4"):
        engine.add_request(prompt(30), params(2))
