"""Faults stay where they are: one failed request, or one exception that names the policy or the step.

An executor, a sampler, a client's callback or a policy does something wrong in the middle of real traffic: a small
pool, shared prefixes, preemption by both modes. After each fault every block is accounted for, and in the end every
other request has exactly the tokens that it gets alone.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from contbatch.batch import ScheduledBatch
from contbatch.budget import TokenBudget
from contbatch.config import SchedulerConfig
from contbatch.engine import Engine, TokenEvent
from contbatch.errors import ContbatchError, InvalidRequest, PolicyError, SchedulerStalled, StepFailed
from contbatch.plan import BlockReason
from contbatch.policies import POLICIES, FairShare, VllmV1
from contbatch.policy import Policy
from contbatch.request import FinishReason, Request, RunningRequest, SamplingParams
from contbatch.simulator import VirtualClock
from contbatch.step import PrefixHit, Step
from tests.cases.common import Events, Forced
from tests.toy import Bench, Scripted, Ticks, Toy, assert_alone, assert_empty, config, params, prompt, toy_engine

MODES = ["recompute", "swap"]


def tight(mode: str, **limits: int) -> SchedulerConfig:
    """A pool in which some requests of `traffic` have to go, and half of them find room in host memory."""
    limits = {"pool": 9, "bs": 4, "budget": 14, "seqs": 4} | limits
    return replace(config(**limits), preemption_mode=mode, num_host_blocks=4)  # type: ignore[arg-type]  # all integers


def traffic() -> dict[str, list[int]]:
    """Prompts of which every second one begins with the same two blocks."""
    prompts = {f"r{index}": prompt(2 + index, index) for index in range(0, 8, 2)}
    prompts |= {f"r{index}": [*prompt(8, 50), *prompt(1 + index // 2, index)] for index in range(1, 8, 2)}
    return dict(sorted(prompts.items()))


def add_all(engine: Engine, max_tokens: int = 6, **request: Any) -> None:
    """Queue the traffic, of three clients and with two priorities."""
    for index, (name, tokens) in enumerate(traffic().items()):
        client = "abc"[index % 3]
        engine.add_request(tokens, params(max_tokens), request_id=name, client=client, priority=index % 2, **request)


# Policies


class Saboteur(Policy):
    """A named policy that does something wrong, in some steps before and in some behind its own decision."""

    def __init__(self, policy: Policy, wrong: Callable[[Step], object], times: int = 6) -> None:
        self.policy, self.wrong, self.times = policy, wrong, times
        self.queue_key = policy.queue_key
        self.on_add, self.on_finish = policy.on_add, policy.on_finish  # type: ignore[method-assign]  # the same
        self.calls = itertools.count(1)
        self.steps: list[Step] = []

    def token_budget(self, config: SchedulerConfig) -> TokenBudget:
        """The same."""
        return self.policy.token_budget(config)

    def schedule(self, step: Step) -> None:
        """Every third step is spoilt."""
        call = next(self.calls)
        spoils = call % 3 == 0 and call <= 3 * self.times
        if spoils and call % 2:
            self.wrong(step)
        self.policy.schedule(step)
        if spoils:
            self.wrong(step)
        self.steps.append(step)


def another_scheduler() -> Bench:
    """It knows a running "r0" and a waiting "r1"."""
    bench = Bench(config(seqs=1), VllmV1())
    for name in ("r0", "r1"):
        bench.add(name, 9)
    bench.step()
    return bench


OTHERS = another_scheduler()


def stranger(name: str) -> RunningRequest:
    """A record that no scheduler made, with an id that one knows."""
    return RunningRequest(Request(name, range(8)), 0, 8)


def twice(step: Step) -> object:
    """Grants once more to whoever got something, or else to somebody twice."""
    running = step.running[0]
    return [step.grant(running, 1) for _ in range(2)]


def preempt_most(step: Step) -> None:
    """What was decided is thrown away, and then the policy breaks."""
    for request in step.running[1:]:
        step.preempt(request)
    raise LookupError("nearly nobody is left")


def take_back_some(step: Step) -> None:
    """One more time than there are grants."""
    for request in reversed([request for request, _, _ in step.grants]):
        step.take_back(request)
        step.take_back(request)


def use_old(verb: Callable[[Step, RunningRequest], object]) -> Callable[[Step], object]:
    """A verb of a step that is long over."""
    kept: list[Step] = []

    def wrong(step: Step) -> None:
        if not kept or kept[0].config is not step.config:
            kept[:] = [step]
        verb(kept[0], step.running[0])
        raise ContbatchError("the first step is this one")

    return wrong


WRONG: dict[str, Callable[[Step], object]] = {
    "raises": lambda step: 1 / 0,
    "raises one of our errors": lambda step: Request("", ()),
    "looks for what is not there": lambda step: step.runing,  # type: ignore[attr-defined]
    "grants twice": twice,
    "grants too much": lambda step: step.grant(step.running[-1], step.running[-1].owed + 1),
    "grants nothing": lambda step: step.grant(step.running[0], 0),
    "grants to a waiting request": lambda step: step.grant(step.waiting.head, 1),
    "admits more than it owes": lambda step: step.admit(step.waiting.head, step.waiting.head.owed + 1),
    "admits a running request": lambda step: step.admit(step.running[0], 1),
    "admits a stranger": lambda step: step.admit(stranger("r0"), 1),
    "admits what another scheduler runs": lambda step: step.admit(OTHERS["r0"], 1),
    "admits who waits for another scheduler": lambda step: step.admit(OTHERS["r1"], 1),
    "grants to what another scheduler runs": lambda step: step.grant(OTHERS["r0"], 1),
    "preempts what another scheduler runs": lambda step: step.preempt(OTHERS["r0"]),
    "preempts a waiting request": lambda step: step.preempt(step.waiting.head),
    "preempts nobody": lambda step: step.preempt(None),  # type: ignore[arg-type]
    "preempts all but one and raises": preempt_most,
    "takes back too much": take_back_some,
    "makes up a hit": lambda step: step.admit(step.waiting.head, 1, PrefixHit((1,), 4)),
    "admits the wrong kind": lambda step: step.admit(step.waiting, 1),  # type: ignore[arg-type]
    "admits half a token": lambda step: step.admit(step.waiting.head, 0.5),  # type: ignore[arg-type]
    "grants with an old step": use_old(lambda old, request: old.grant(request, 1)),
    "grants to all with an old step": use_old(lambda old, request: old.grant_running()),
    "preempts with an old step": use_old(lambda old, request: old.preempt(request)),
    "admits with an old step": use_old(lambda old, request: old.admit(request, 1)),
    "takes back with an old step": use_old(lambda old, request: old.take_back(request)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_whatever_a_policy_does_wrong_costs_one_step(wrong: str) -> None:
    """Under every named policy: its decision of the step is undone, and the next one is as good as ever."""
    for index, name in enumerate(POLICIES):
        limits = tight(MODES[(index + len(wrong)) % 2])
        toy = Toy(limits.num_blocks, limits.block_size)
        engine = Engine(toy, limits, Saboteur(POLICIES[name](), WRONG[wrong]), clock=Ticks())
        add_all(engine)
        faults = 0
        while engine.has_unfinished:
            steps = len(engine.trace.steps)
            try:
                engine.step()
            except SchedulerStalled:
                raise
            except ContbatchError as error:
                faults += 1
                assert str(error) and len(engine.trace.steps) == steps and engine._pending is None
                assert not any(request.num_in_flight for request in engine.scheduler.requests.values())
            engine.scheduler.check()
        assert faults >= 3
        assert_alone(toy, engine.completions, params(6))
        assert_empty(engine)
    OTHERS.scheduler.check()
    assert OTHERS.running == ["r0"] and OTHERS.waiting == ["r1"], "the other scheduler has not noticed"


def test_a_policy_without_a_schedule_says_what_to_write() -> None:
    engine, _ = toy_engine(config(), Policy())
    engine.add_request(prompt(4), params(2))
    with pytest.raises(PolicyError, match=r"Policy does not say how to schedule a step; write schedule\(self, step\)"):
        engine.step()
    engine.abort_all()
    assert_empty(engine)


@pytest.mark.parametrize(
    "victim",
    [
        lambda step: 1 / 0,
        lambda step: None,
        lambda step: step.waiting.head,
        lambda step: OTHERS["r0"],
        lambda step: stranger("r0"),
        lambda step: step.running,
        lambda step: step.preempt(step.running[-1]) or step.victims[0],
    ],
    ids=["raises", "nobody", "who waits", "another's", "a stranger", "all of them", "who has gone already"],
)
@pytest.mark.parametrize("mode", MODES)
def test_a_victim_that_cannot_be_one_costs_one_step(victim: Callable[[Step], Any], mode: str) -> None:
    policy = VllmV1()
    engine, toy = toy_engine(tight(mode), policy)
    add_all(engine, max_tokens=9)
    faults = 0
    while engine.has_unfinished:
        if faults < 3:
            policy.victim = victim  # type: ignore[method-assign, assignment]  # for this test only
        else:
            policy.__dict__.pop("victim", None)
        try:
            engine.step()
        except PolicyError:
            faults += 1
        engine.scheduler.check()
    assert faults == 3
    assert_alone(toy, engine.completions, params(9))
    assert_empty(engine)


class Hooked(Forced):
    """VllmV1 whose hooks a test may break."""

    def __init__(self, order: str = "fcfs") -> None:
        super().__init__(order)
        self.breaks: set[str] = set()
        """Ids for which a hook raises."""

    def on_add(self, request: RunningRequest) -> None:
        """Breaks for an id that says so."""
        if request.request_id.startswith("bad add"):
            raise LookupError("on_add broke")

    def on_finish(self, request: RunningRequest) -> None:
        """Breaks for those that were named."""
        if request.request_id in self.breaks:
            raise LookupError(f"{request.request_id} broke on_finish")


def test_on_add_that_raises_adds_nothing() -> None:
    engine, toy = toy_engine(config(), Hooked())
    engine.add_request(prompt(4), params(3), request_id="good")
    engine.step()
    with pytest.raises(PolicyError, match=r"Hooked raised LookupError\('on_add broke'\) .*'bad add'.*was not added"):
        engine.add_request(prompt(4, 1), params(3), request_id="bad add", timeout=1000.0)
    assert list(engine.scheduler.requests) == ["good"] == list(engine._clients) == list(engine.trace.requests)
    assert len(engine.scheduler.waiting) == 0 == engine.scheduler.waiting.num_tokens and not engine._deadlines
    engine.scheduler.check()
    engine.scheduler.policy = VllmV1()
    engine.add_request(prompt(4, 1), params(3), request_id="bad add")
    engine.run()
    assert_alone(toy, engine.completions, params(3))
    assert_empty(engine)


ENDS: dict[str, Callable[[Engine, VirtualClock], object]] = {
    "length": lambda engine, clock: None,
    "abort": lambda engine, clock: engine.abort("bad"),
    "timeout": lambda engine, clock: clock.advance(10.0),
    "callback": lambda engine, clock: None,
}


def run_to_the_end(engine: Engine) -> list[tuple[int, str]]:
    """Steps until nobody is left, and once more; returns what the policy was blamed for, and in which step."""
    faults = []
    for turn in range(200):
        unfinished = engine.has_unfinished
        try:
            engine.step()
        except PolicyError as error:
            faults.append((turn, str(error)))
        engine.scheduler.check()
        if not unfinished:
            return faults
    raise AssertionError("no end in sight")


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("is_last", [False, True])
def test_on_finish_that_raises_is_reported_once_and_at_the_latest_by_the_next_step(end: str, is_last: bool) -> None:
    """However the request ended: it has ended all the same, and if it was the last one, too."""
    clock, limits, policy = VirtualClock(), config(), Hooked()
    toy = Toy(limits.num_blocks, limits.block_size)
    engine = Engine(toy, limits, policy, clock=clock)
    policy.breaks = {"bad"}

    def on_event(event: TokenEvent) -> None:
        if end == "callback" and len(toy.batches) == 2 and event.finish_reason is None:
            raise ValueError("client broke")

    engine.add_request(prompt(4), params(2 if end == "length" else 9), request_id="bad", timeout=9.0, on_event=on_event)
    if not is_last:
        engine.add_request(prompt(5, 1), params(6), request_id="good")
    engine.step()
    ENDS[end](engine, clock)
    (fault,) = run_to_the_end(engine)
    assert fault[0] <= 1 and "policy Hooked raised LookupError('bad broke on_finish') in on_finish" in fault[1]
    assert engine.trace.finished["bad"].num_output_tokens == (1 if end in ("abort", "timeout") else 2)
    if not is_last:
        assert_alone(toy, {"good": engine.completions["good"]}, params(6))
    assert_empty(engine)


@pytest.mark.parametrize(
    "key",
    [None, [1], "ab", (None,), ("x",), ((1,),), (float("nan"),), (1, float("nan")), (1j,), object()],
    ids=str,
)
def test_a_queue_key_that_orders_nothing_adds_nothing(key: Any) -> None:
    policy = VllmV1()
    policy.queue_key = lambda request: key if request.request_id == "bad" else (request.request.priority,)
    engine, toy = toy_engine(config(seqs=1), policy)
    engine.add_request(prompt(4), params(3), request_id="a", priority=3)
    with pytest.raises(PolicyError, match=r"policy VllmV1 raised .* for request 'bad', which was not added"):
        engine.add_request(prompt(4, 1), params(3), request_id="bad")
    engine.add_request(prompt(4, 2), params(3), request_id="b", priority=1)
    assert [request.request_id for request in engine.scheduler.waiting] == ["b", "a"]
    engine.scheduler.check()
    engine.run()
    assert_alone(toy, engine.completions, params(3))
    assert set(engine.completions) == {"a", "b"}
    assert_empty(engine)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrong", [lambda: 1 / 0, lambda: None, lambda: (float("nan"),)])
def test_a_queue_key_that_breaks_for_a_victim_loses_nobody(wrong: Callable[[], Any], mode: str) -> None:
    """The step is completed with the victim first in the queue; it is reported then or by the next one."""
    policy = Hooked()
    policy.queue_key = lambda request: wrong() if request.num_output_tokens else (request.index,)
    engine, toy = toy_engine(replace(config(pool=30), preemption_mode=mode, num_host_blocks=9), policy)
    for index, name in enumerate("abc"):
        engine.add_request(prompt(5, index), params(4), request_id=name)
    engine.step()
    policy.victims = {"b"}
    (fault,) = run_to_the_end(engine)
    assert fault[0] <= 1 and "in on_finish or queue_key" in fault[1]
    assert sum(len(step.preempted) + len(step.swapped_out) for step in engine.trace.steps) == 1
    assert_alone(toy, engine.completions, params(4))
    assert_empty(engine)


def test_counters_of_a_policy_survive_its_own_requests() -> None:
    """A fair share knows every client again after faults of others: nobody is left counted as active."""
    policy = FairShare()
    engine, _ = toy_engine(tight("recompute"), policy)

    def fail(event: TokenEvent) -> None:
        if event.request_id in ("r1", "r4"):
            raise ValueError("client broke")

    add_all(engine, on_event=fail)
    engine.step()
    engine.abort("r6")
    engine.run()
    assert set(policy._unfinished.values()) == {0}
    assert_empty(engine)


def test_a_reason_given_too_late_changes_no_record() -> None:
    """A policy that keeps its step and goes on explaining changes neither the plan nor the trace of later steps."""
    kept: list[Step] = []

    def schedule(step: Step) -> None:
        kept.append(step)
        VllmV1().schedule(step)

    engine, _ = toy_engine(config(), Scripted(schedule))
    engine.add_request(prompt(4), params(3), request_id="a")
    engine.step()
    request = engine.scheduler.requests["a"]
    digest = engine.trace.digest()
    kept[0].skip(request, BlockReason.POLICY)
    assert engine.trace.digest() == digest and not engine.trace.steps[0].reasons
    engine.run()
    assert_empty(engine)


# Executors


class Wrong(Toy):
    """Gives something else than a token to one request, for its n-th token."""

    def __init__(self, limits: SchedulerConfig, name: str, number: int, gives: object) -> None:
        super().__init__(limits.num_blocks, limits.block_size)
        self.name, self.number, self.gives = name, number, gives

    def execute(self, batch: ScheduledBatch, sampling: Mapping[str, SamplingParams]) -> Mapping[str, int | Exception]:
        """Counts the tokens that were due."""
        tokens = dict(super().execute(batch, sampling))
        if self.name in tokens:
            self.number -= 1
            if self.number == 0:
                tokens[self.name] = self.gives  # type: ignore[assignment]  # that is the point
        return tokens


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("number", [1, 3, 6])
def test_a_sampler_error_ends_one_request_under_every_policy(policy: str, number: int) -> None:
    """Also of one that others share blocks with; its last token is not kept."""
    for mode, name in itertools.product(MODES, ("r0", "r1")):
        limits = tight(mode)
        toy = Wrong(limits, name, number, ValueError("all logits are NaN"))
        engine = Engine(toy, limits, policy, clock=Ticks())
        events = Events()
        add_all(engine, on_event=events)
        while engine.has_unfinished:
            engine.step()
            engine.scheduler.check()
        bad = engine.completions.pop(name)
        assert bad.finish_reason is FinishReason.ERROR and str(bad.error) == "all logits are NaN"
        assert bad.token_ids == toy.alone(traffic()[name], params(6))[: number - 1]
        assert len(events.ends()) == 8 and events.ends().count((name, FinishReason.ERROR)) == 1
        assert_alone(toy, engine.completions, params(6))
        assert_empty(engine)


def test_everybody_may_fail_in_one_step() -> None:
    limits = tight("recompute", pool=40, seqs=8, budget=200)
    toy = Toy(limits.num_blocks, limits.block_size)
    engine = Engine(toy, limits, clock=Ticks())
    add_all(engine)
    execute = toy.execute
    toy.execute = lambda batch, sampling: dict.fromkeys(execute(batch, sampling), ValueError("NaN"))  # type: ignore[method-assign]
    engine.step()
    assert not engine.has_unfinished and len(engine.completions) == 8
    assert_empty(engine)
    toy.execute = execute  # type: ignore[method-assign]  # as it was
    done = engine.generate(list(traffic().values()), params(6))
    assert [completion.token_ids for completion in done] == [toy.alone(t, params(6)) for t in traffic().values()]


def test_tokens_that_nobody_asked_for_are_ignored() -> None:
    """Of an unknown request, and of one in the middle of its prompt."""
    limits = config(budget=4)
    toy = Toy(limits.num_blocks, limits.block_size)
    engine = Engine(toy, limits, clock=Ticks())
    execute = toy.execute
    toy.execute = lambda batch, sampling: {"a": 9, "nobody": 7, **execute(batch, sampling)}  # type: ignore[method-assign]
    engine.add_request(prompt(10), params(3), request_id="a")
    engine.run()
    assert_alone(toy, engine.completions, params(3))


@pytest.mark.parametrize(
    "error",
    [RuntimeError("lost"), MemoryError(), InvalidRequest("ours"), StopIteration(), PolicyError("not the policy's")],
    ids=lambda error: type(error).__name__,
)
def test_whatever_an_executor_raises_is_a_failed_step(error: Exception) -> None:
    """With its cause, and the same step can be run again."""
    errors = iter([error, error])

    def before(_: ScheduledBatch) -> None:
        if len(toy.batches) == 1 and (now := next(errors, None)):
            raise now

    limits = config(budget=9)
    toy = Toy(limits.num_blocks, limits.block_size, before=before)
    engine = Engine(toy, limits, clock=Ticks())
    add_all(engine)
    engine.step()
    for _ in range(2):
        with pytest.raises(
            StepFailed, match=r"the forward pass of step 1 raised .*call step\(\) to run it again"
        ) as caught:
            engine.run()
        assert caught.value.__cause__ is error
        engine.scheduler.check()
    engine.run()
    assert_alone(toy, engine.completions, params(6))
    assert_empty(engine)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_executor_that_never_works_again_leaves_nothing_behind(policy: str) -> None:
    def before(_: ScheduledBatch) -> None:
        if len(toy.batches) >= 4:
            raise RuntimeError("device lost")

    limits = tight("swap")
    toy = Toy(limits.num_blocks, limits.block_size, before=before)
    engine = Engine(toy, limits, policy, clock=Ticks())
    events = Events()
    add_all(engine, on_event=events)
    for _ in range(8):
        with pytest.raises(StepFailed):
            engine.run()
    assert len(engine.trace.steps) == 4
    engine.abort_all()
    assert len(events.ends()) == 8
    assert_empty(engine)


# Callbacks


class Meddler:
    """A callback that adds, aborts itself, another or everybody, or raises, at random."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self.draw = engine, random.Random(seed)
        self.events, self.did = Events(), set[str]()
        self.added = 0

    def __call__(self, event: TokenEvent) -> None:
        self.events(event)
        what = self.draw.choice(["raise", "add", "abort self", "abort other", "abort all", *["nothing"] * 14])
        if what == "add" and self.added < 30:
            self.added += 1
            self.engine.add_request(prompt(3 + self.added % 7, self.added), params(6), on_event=self)
        elif what == "abort self":
            self.engine.abort(event.request_id)
        elif what == "abort other" and self.engine.scheduler.requests:
            self.engine.abort(self.draw.choice(sorted(self.engine.scheduler.requests)))
        elif what == "abort all" and self.draw.random() < 0.3:
            self.engine.abort_all()
        elif what == "raise":
            raise ValueError("client broke")
        self.did.add(what)


@pytest.mark.parametrize("policy", POLICIES)
def test_whatever_callbacks_do_each_request_ends_once(policy: str) -> None:
    done = set[str]()
    for mode, seed in itertools.product(MODES, range(4)):
        engine, toy = toy_engine(tight(mode), policy)
        meddler = Meddler(engine, seed)
        add_all(engine, on_event=meddler)
        while engine.has_unfinished:
            engine.step()
            engine.scheduler.check()
        ends = meddler.events.ends()
        assert sorted(name for name, _ in ends) == sorted(engine.trace.requests) == sorted(engine.completions)
        for name, completion in engine.completions.items():
            assert (name, completion.finish_reason) in ends
            alone = toy.alone(completion.prompt_token_ids, params(6))
            assert completion.token_ids == alone[: len(completion.token_ids)]
            assert completion.finish_reason is not FinishReason.LENGTH or completion.token_ids == alone
            seen = [event.token_id for event in meddler.events.of(name) if event.token_id is not None]
            assert tuple(seen) == completion.token_ids, "every token was told, once"
        assert_empty(engine)
        done |= meddler.did
    assert done >= {"add", "abort self", "abort other", "nothing"}


def test_a_callback_may_abort_everybody() -> None:
    engine, toy = toy_engine(config(seqs=2))
    events = Events()

    def stop_all(event: TokenEvent) -> None:
        events(event)
        if event.request_id == "b" and event.finish_reason is None:
            assert engine.abort_all() == 4

    for index, name in enumerate("abcd"):
        engine.add_request(prompt(4, index), params(5), request_id=name, on_event=stop_all)
    engine.step()
    assert not engine.has_unfinished, "at the end of that step, those who wait and those who run"
    assert sorted(events.ends()) == sorted((name, FinishReason.ABORT) for name in "abcd")
    assert [len(engine.completions[name].token_ids) for name in "abcd"] == [1, 1, 0, 0]
    assert_empty(engine)
    assert engine.generate([prompt(4)], params(5))[0].token_ids == toy.alone(prompt(4), params(5))


@pytest.mark.parametrize("gives_up", [False, True])
def test_an_abort_from_inside_the_forward_pass_never_hits_the_next_of_that_id(gives_up: bool) -> None:
    """Whether the step succeeds, or fails and is given up."""

    def abort(_: ScheduledBatch) -> None:
        toy.before = None
        engine.abort("a")
        if gives_up:
            raise RuntimeError("device lost")

    engine, toy = toy_engine(config())
    for name in ("a", "other"):
        engine.add_request(prompt(4), params(3), request_id=name)
    toy.before = abort
    if gives_up:
        with pytest.raises(StepFailed):
            engine.step()
        engine.abort("other")
    else:
        engine.step()
    assert engine.completions["a"].finish_reason is FinishReason.ABORT
    engine.add_request(prompt(5, 1), params(4), request_id="a")
    engine.run()
    assert_alone(toy, {"a": engine.completions["a"]}, params(4))
    assert_empty(engine)


def test_a_callback_may_add_for_as_long_as_it_likes() -> None:
    """Each end brings the next request; nobody is lost, and the others are served meanwhile."""
    engine, toy = toy_engine(tight("recompute"))
    left = iter(range(60))

    def again(event: TokenEvent) -> None:
        if event.finish_reason and (number := next(left, None)) is not None:
            engine.add_request(prompt(1 + number % 9, number), params(6), on_event=again)

    add_all(engine, on_event=again)
    engine.run()
    assert len(engine.completions) == 68
    assert_alone(toy, engine.completions, params(6))
    assert_empty(engine)
