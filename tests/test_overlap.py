"""Planning ahead changes no token and loses nothing: the loop of `contbatch.overlap` beside the plain one."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from contbatch.batch import UNKNOWN_TOKEN, ScheduledBatch
from contbatch.calibrate import _measured
from contbatch.config import SchedulerConfig
from contbatch.engine import Engine, TokenEvent
from contbatch.errors import DeadlineExceeded, InvalidConfig, PolicyError, RequestTooLarge, StepFailed
from contbatch.executor import ScriptedExecutor
from contbatch.metrics import summarise
from contbatch.policies import VllmV1
from contbatch.request import FinishReason, RequestStatus, SamplingParams
from contbatch.step import Step
from contbatch.trace import Trace
from tests.late import LateHandle, LateToy, late_engine
from tests.swapping import Directed, swap
from tests.test_rules import NAMED, Client, rule_2_blocks_add_up, rule_8_one_finish_event
from tests.toy import Bytes, Ticks, assert_alone, assert_empty, config, params, prompt, serve

POLICIES = sorted(NAMED)


def mixed(count: int, chance: random.Random) -> tuple[dict[str, list[int]], dict[str, SamplingParams]]:
    """Prompts of which some begin alike, outputs of 1 to 14 tokens."""
    prompts = {
        f"r{i}": [*prompt(4 * chance.randint(0, 2), i % 3), *prompt(chance.randint(1, 9), i)] for i in range(count)
    }
    return prompts, {name: params(chance.randint(1, 14)) for name in prompts}


def rules_hold(engine: Engine) -> None:
    """The rules of blocks after a step. With a step on its way they mean: a table covers the computed tokens and those
    of the step on its way (`num_in_flight`), no token is unknown, and who has ended holds nothing."""
    rule_2_blocks_add_up(engine)
    for request in engine.scheduler.requests.values():
        assert UNKNOWN_TOKEN not in request.token_ids
        assert request.status is not RequestStatus.FINISHED


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "limits",
    [
        config(pool=64, budget=16, seqs=6),
        config(pool=9, bs=4, budget=12, seqs=5, prefix=False),
        swap(host=20, pool=9, bs=4, budget=12, seqs=5),
        config(pool=9, bs=4, budget=40, seqs=5, prefix=False),
    ],
    ids=["roomy", "tight", "swap", "wide"],
)
def test_the_same_tokens_as_without_overlap(policy: str, limits: SchedulerConfig) -> None:
    """And without ends that come as a surprise, the same decisions."""
    prompts, wanted = mixed(14, random.Random(policy))
    digests = []
    for overlap in (False, True):
        engine, toy = late_engine(limits, NAMED[policy](), overlap=overlap)
        done = serve(engine, prompts, wanted)
        assert_alone(toy, done, wanted)
        digests.append(engine.trace.digest())
    assert digests[0] == digests[1] or limits.enable_prefix_caching
    assert toy.num_unknown and toy.num_ahead


def test_the_ordinary_case_is_planned_ahead_in_every_step() -> None:
    engine, toy = late_engine(config(pool=64, budget=8, seqs=4))
    for index in range(8):
        engine.add_request(prompt(7 + index, index), params(6))
    engine.run()
    assert toy.num_ahead == toy.num_launched - 1
    assert {"P", "D"} <= set("".join(step.kinds for step in engine.trace.steps))


class Run:
    """One random run: any policy and limits, everything that can happen happens, and the rules hold after each step."""

    def __init__(self, seed: int, policy: str) -> None:
        self.chance = chance = random.Random(f"{policy} {seed}")
        chunked = chance.random() < 0.7
        limits = config(
            pool=chance.randint(5, 16),
            bs=chance.choice([1, 2, 4]),
            budget=chance.randint(1, 16) + (0 if chunked else 12),
            seqs=chance.randint(1, 5),
            mml=40,
            chunked=chunked,
            prefix=chance.random() < 0.6,
        )
        host = chance.choice([None, None, 2, 30])
        if host is not None:
            limits = replace(limits, preemption_mode="swap", num_host_blocks=host)
        self.engine, self.toy = late_engine(limits, NAMED[policy](), eos=[3, 5, 8, 13, 21, 34, 55], tokenizer=Bytes())
        self.toy.before = self.fail_at("result")
        self.toy.on_launch = self.fail_at("launch")
        self.toy.change = self.spoil
        self.clients: dict[str, Client] = {}
        self.wanted: dict[str, SamplingParams] = {}
        self.aborted: set[str] = set()
        self.spoilt: set[str] = set()
        self.failures = 0
        self.is_wild = True

    def fail_at(self, what: str) -> Any:
        """An executor's hook that raises now and then."""

        def hook(_: ScheduledBatch) -> None:
            if self.is_wild and self.chance.random() < 0.06:
                self.failures += 1
                raise RuntimeError(f"{what} failed")

        return hook

    def spoil(self, sampled: dict[str, int | Exception]) -> None:
        """A row of NaN: one request gets no token."""
        if self.is_wild and sampled and self.chance.random() < 0.02:
            name = self.chance.choice(sorted(sampled))
            sampled[name] = ValueError("nan")
            self.spoilt.add(name)

    def add(self) -> None:
        """A request that shares a prefix with others of its family, may raise, stop, be late, or abort another."""
        chance = self.chance
        family = chance.randint(0, 2)
        tokens = [*prompt(chance.randint(0, 3) * self.engine.config.block_size, family)]
        tokens += prompt(chance.randint(0, 6), len(self.clients)) or [1]
        client = Client(chance.choice([None] * 8 + [1, 2, 3]))
        wanted = params(
            chance.choice([1, 2, 3, 5, 8, 12, None]),
            ignore_eos=chance.random() < 0.4,
            stop_token_ids=chance.choice([(), (7, 77, 177), tuple(range(0, 251, 10))]),
            stop=chance.choice([None, None, None, "A", "b"]),
        )

        def on_event(event: TokenEvent) -> None:
            client(event)
            if chance.random() < 0.04:
                self.abort(chance.choice(sorted(self.engine.scheduler.requests) or ["nobody"]))
            elif chance.random() < 0.04:
                self.add()

        try:
            name = self.engine.add_request(
                tokens,
                wanted,
                priority=chance.randint(0, 3),
                client=str(family),
                on_event=on_event,
                timeout=chance.choice([None] * 5 + [40.0, 90.0]),
                request_id=self.free_id(),
            )
        except RequestTooLarge:
            return
        self.clients[name], self.wanted[name] = client, wanted
        self.aborted.discard(name)
        self.spoilt.discard(name)

    def free_id(self) -> str | None:
        """Now and then an id that was used before."""
        ended = sorted(set(self.clients) - set(self.engine._clients))
        return self.chance.choice(ended) if ended and self.chance.random() < 0.2 else None

    def abort(self, name: str) -> None:
        """Whatever state it is in."""
        if self.engine.abort(name):
            self.aborted.add(name)

    def step(self) -> None:
        """One step; it may fail and loses nothing by that."""
        failures, steps = self.failures, self.engine.trace.num_steps
        before = {name: len(client.events) for name, client in self.clients.items()}
        try:
            self.engine.step()
        except StepFailed:
            assert self.failures
            assert all(len(self.clients[n].events) >= count for n, count in before.items() if n in self.clients)
        del failures, steps
        self.check()

    def check(self) -> None:
        """After every step."""
        rules_hold(self.engine)
        for name, client in self.clients.items():
            got = [event.token_id for event in client.events if event.token_id is not None]
            record = self.engine.scheduler.requests.get(name)
            done = None if record else self.engine.completions[name]
            tokens = record.request.prompt_token_ids if record else done.prompt_token_ids  # type: ignore[union-attr]
            limit = record.max_tokens if record else self.engine.trace.requests[name].max_tokens
            alone = self.toy.alone(tokens, self.wanted[name], limit)
            assert tuple(got) == alone[: len(got)]
            if record:
                assert record.output_token_ids == got
            else:
                rule_8_one_finish_event(client)
                assert done is not None and list(done.token_ids) == got
                self.check_reason(name, alone, client.events[-1].finish_reason)

    def check_reason(self, name: str, alone: tuple[int, ...], reason: FinishReason | None) -> None:
        """The reason is the true one; who ended by itself got all its tokens."""
        done = self.engine.completions[name]
        assert done.finish_reason is reason and self.engine.trace.finished[name].reason == reason.value
        assert (reason is FinishReason.ABORT) <= (name in self.aborted or isinstance(done.error, DeadlineExceeded))
        if reason is FinishReason.ERROR:
            assert name in self.spoilt or self.clients[name].raises_at is not None
        elif reason is not FinishReason.ABORT:
            assert done.token_ids == alone or (reason is FinishReason.STOP and self.wanted[name].stop)

    def to_the_end(self) -> None:
        """Random traffic, then calm, until everybody has finished and nothing is held."""
        for _ in range(70):
            what = self.chance.random()
            if what < 0.3:
                self.add()
            elif what < 0.35 and self.clients:
                self.abort(self.chance.choice(sorted(self.clients)))
                self.check()
            elif self.engine.has_unfinished:
                self.step()
        self.is_wild = False
        for _ in range(3000):
            if not self.engine.has_unfinished:
                break
            self.step()
        assert not self.engine.has_unfinished, "no end in sight"
        assert set(self.clients) <= set(self.engine.completions)
        assert_empty(self.engine)
        assert self.engine.scheduler.host.num_used == 0
        self.check_trace()

    def check_trace(self) -> None:
        """It can be read back; what was thrown away is not in it; a request is in no step before or after its life."""
        trace = self.engine.trace
        assert Trace.loads(trace.dumps()).digest() == trace.digest()
        assert [step.step for step in trace.steps] == list(range(len(trace.steps)))
        sampled = dict.fromkeys(trace.requests, 0)
        for step in trace.steps:
            assert step.start <= step.end
            named = {*step.request_ids, *step.admitted, *step.preempted, *step.swapped_out, *step.new_blocks}
            for name in named:
                assert trace.requests[name].arrival_step <= step.step < trace.finished[name].step
            for name in step.sampled:
                sampled[name] += 1
        assert sampled == {name: done.num_output_tokens for name, done in trace.finished.items()}
        metrics = summarise(trace)
        for request in metrics.requests.values():
            if request.seconds.ttft is not None:
                assert 0 <= request.seconds.ttft <= (request.seconds.e2e or 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_any_traffic_keeps_the_rules(policy: str) -> None:
    """Hundreds of runs: aborts, deadlines, callbacks, stops, NaN rows and failing steps, in tiny pools."""
    ahead = failures = 0
    for seed in range(12):
        run = Run(seed, policy)
        run.to_the_end()
        ahead += run.toy.num_ahead
        failures += run.failures
    assert ahead > 100 and failures > 10


def test_an_executor_without_launch_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"ScriptedExecutor has no launch.*overlap=False"):
        Engine(ScriptedExecutor(), overlap=True)


def test_a_surprising_end_throws_the_token_of_the_next_step_away() -> None:
    """The end of sequence is known when the next step is on its way already: that token is nowhere to be seen."""
    engine, toy = late_engine(config(pool=8))
    others = toy.alone(prompt(5), params(6))
    stop = SamplingParams(max_tokens=6, stop_token_ids=[others[2]])
    engine.add_request(prompt(5), stop, request_id="a")
    engine.add_request(prompt(6, 1), params(8), request_id="b")
    done = {completion.request_id: completion for completion in engine.run()}
    assert done["a"].token_ids == others[:3] and done["a"].finish_reason is FinishReason.STOP
    computed = [part.request_id for batch in toy.batches for part in batch]
    recorded = [name for step in engine.trace.steps for name in step.request_ids]
    assert (computed.count("a"), recorded.count("a")) == (4, 3), "it was computed, and thrown away"
    assert sum("a" in step.sampled for step in engine.trace.steps) == 3
    assert_empty(engine)


def test_when_the_last_request_ends_nothing_stays_on_its_way() -> None:
    engine, toy = late_engine(config(pool=8))
    stop = toy.alone(prompt(5), params(3))[-1]
    engine.generate([prompt(5)], SamplingParams(max_tokens=9, stop_token_ids=[stop]))
    assert not toy.pending and toy.num_launched == len(engine.trace.steps) + 1
    engine.add_request(prompt(5), params(2), request_id="next")
    assert engine.trace.requests["next"].arrival_step == len(engine.trace.steps)
    engine.run()
    assert_alone(toy, engine.completions, params(2))


def two_turns(overlap: bool) -> list[int]:
    """Cached tokens of a second turn whose prompt holds the first turn's answer."""
    engine, _ = late_engine(config(pool=32), overlap=overlap)
    first = engine.generate([prompt(6)], params(11))[0]
    engine.generate([[*first.prompt_token_ids, *first.token_ids, 9]], params(2))
    return [count for step in engine.trace.steps for count in step.cached.values()]


def test_blocks_that_hold_a_generated_token_are_found_again() -> None:
    assert two_turns(overlap=True) == two_turns(overlap=False) == [16]


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_a_failed_result_leaves_nothing_in_the_prefix_cache_and_is_run_again(max_tokens: int) -> None:
    """With max_tokens=1 the request had ended by length when its step failed: it is back."""
    engine, toy = late_engine(config(pool=16))
    engine.add_request(prompt(9), params(max_tokens), request_id="a")
    toy.before = fail_once()
    with pytest.raises(StepFailed, match="step 0 raised RuntimeError"):
        engine.step()
    assert engine.has_unfinished and engine.scheduler.pool.num_cached == 0 and not engine.scheduler.pool.num_used
    engine.run()
    assert not any(step.cached for step in engine.trace.steps)
    assert_alone(toy, engine.completions, params(max_tokens))
    assert_empty(engine)


def fail_once() -> Any:
    """An executor's hook that raises the first time."""
    failures = [RuntimeError("device lost")]

    def hook(_: object) -> None:
        if failures:
            raise failures.pop()

    return hook


def test_a_launch_that_fails_does_not_cost_the_tokens_of_the_step_before() -> None:
    engine, toy = late_engine(config(pool=16))
    engine.add_request(prompt(5), params(4), request_id="a")
    engine.step()
    toy.on_launch = fail_once()
    assert [event.token_id for event in engine.step()] == [engine.scheduler.requests["a"].token_ids[-1]]
    with pytest.raises(StepFailed, match="step 2 raised"):
        engine.step()
    engine.run()
    assert_alone(toy, engine.completions, params(4))
    assert_empty(engine)


def test_a_policy_that_fails_while_planning_ahead_does_not_cost_the_tokens_either() -> None:
    policy = Directed()
    engine, toy = late_engine(config(pool=16), policy)
    engine.add_request(prompt(5), params(4), request_id="a")
    engine.step()

    def wrong(step: Step) -> None:
        step.grant(step.running[0], 99)

    policy.decide = wrong
    assert len(engine.step()) == 1
    with pytest.raises(PolicyError, match="grant of 99 tokens"):
        engine.step()
    engine.run()
    assert_alone(toy, engine.completions, params(4))


def test_an_interrupt_while_waiting_loses_nothing() -> None:
    engine, toy = late_engine(config(pool=16))
    engine.add_request(prompt(5), params(4), request_id="a")
    engine.step()

    def interrupt(_: object) -> None:
        toy.before = None
        raise KeyboardInterrupt

    toy.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    toy.pending.clear()
    engine.scheduler.check()
    engine.run()
    assert_alone(toy, engine.completions, params(4))
    assert_empty(engine)


def test_a_request_in_flight_is_preempted_and_its_token_comes_all_the_same() -> None:
    """Its blocks are taken by another in the plan that is made before its token is known."""
    policy = Directed()
    engine, toy = late_engine(config(pool=4, prefix=False), policy)
    engine.add_request(prompt(7), params(6), request_id="a")
    engine.add_request(prompt(7, 1), params(6), request_id="b")
    engine.step()
    before = len(engine.scheduler.requests["b"].token_ids)
    events = engine.step()
    assert [event.request_id for event in events] == ["a", "b"] and len(engine.scheduler.requests) == 2
    b = engine.scheduler.requests["b"]
    assert b.status is RequestStatus.PREEMPTED and len(b.token_ids) == before + 1
    engine.run()
    assert_alone(toy, engine.completions, params(6))
    assert_empty(engine)


def test_no_content_of_a_failed_row_stays_in_the_cache() -> None:
    """A row of NaN at the last token: the request had given its blocks back already."""
    engine, toy = late_engine(config(pool=16))
    engine.add_request(prompt(9), params(1), request_id="a")
    toy.change = lambda sampled: sampled.update(a=ValueError("nan"))
    event = engine.step()[0]
    assert event.finish_reason is FinishReason.ERROR and engine.completions["a"].token_ids == ()
    assert engine.scheduler.pool.num_cached == 0
    assert_empty(engine)


def test_an_abort_from_a_callback_takes_effect_in_the_same_step() -> None:
    """Also for a request that computes in the step on its way, whose token is thrown away."""
    engine, toy = late_engine(config(pool=16))
    engine.add_request(prompt(5), params(6), request_id="a", on_event=lambda _: engine.abort("b") and None)
    engine.add_request(prompt(6, 1), params(6), request_id="b")
    events = engine.step()
    assert [(event.request_id, event.token_id is None) for event in events] == [("a", False), ("b", False), ("b", True)]
    assert "b" not in engine.scheduler.requests and engine.completions["b"].finish_reason is FinishReason.ABORT
    engine.scheduler.check()
    assert len(engine.run()) == 1 and len(toy.batches[1]) == 2
    assert all("b" not in step.request_ids for step in engine.trace.steps[1:])
    assert_empty(engine)


def test_the_times_of_a_trace_show_the_overlap() -> None:
    traces: dict[bool, Trace] = {}
    for overlap in (True, False):
        engine, _ = late_engine(config(pool=16), overlap=overlap)
        engine.generate([prompt(5), prompt(7, 1)], params(6))
        traces[overlap] = engine.trace
    for overlap, trace in traces.items():
        pairs = list(zip(trace.steps, trace.steps[1:], strict=False))
        assert pairs and all((after.start < before.end) is overlap for before, after in pairs)
        assert all(before.start < after.start and before.end < after.end for before, after in pairs)
    steps = traces[True].steps
    assert sum(seconds for _, seconds in _measured(traces[True])) == steps[-1].end - steps[0].start, "counted once"


class Gated(VllmV1):
    """Planning a step opens the gate of the step before it; so does the end of everybody."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = [threading.Event() for _ in range(100)]
        self.num_planned = self.num_finished = 0

    def schedule(self, step: Step) -> None:
        """As VllmV1."""
        super().schedule(step)
        if self.num_planned:
            self.gates[self.num_planned - 1].set()
        self.num_planned += 1

    def on_finish(self, request: Any) -> None:
        """The last one: no plan will follow."""
        self.num_finished += 1
        if self.num_finished == 3:
            self.gates[self.num_planned - 1].set()


class Threaded(LateToy):
    """A device with a thread of its own: a launched step computes when its gate is open."""

    def __init__(self, *arguments: Any, gates: list[threading.Event], **others: Any) -> None:
        super().__init__(*arguments, **others)
        self.gates = gates

    def launch(self, batch: ScheduledBatch, sampling: Mapping[str, SamplingParams]) -> Worker:  # type: ignore[override]
        """Start a thread."""
        return Worker(super().launch(batch, sampling), self.gates[batch.batch_id])


@dataclass
class Worker:
    """A thread that waits for a gate and computes."""

    handle: LateHandle
    gate: threading.Event

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def work(self) -> None:
        """Nothing before the gate is open; it stays shut for good if nobody plans ahead."""
        if self.gate.wait(30):
            self.handle.result()

    def result(self) -> Mapping[str, int | Exception]:
        """Wait for the thread."""
        self.thread.join()
        assert self.gate.is_set(), "the next step was not planned while this one was on its way"
        return self.handle.result()


def test_the_next_step_is_planned_while_the_device_works() -> None:
    """No step begins to compute before the next one is planned, and still everybody gets the tokens of a run alone."""
    policy, limits = Gated(), config(pool=32, budget=8, seqs=3)
    toy = Threaded(limits.num_blocks, limits.block_size, rows=3, gates=policy.gates)
    engine = Engine(toy, limits, policy, clock=Ticks(), overlap=True)
    done = engine.generate([prompt(5 + index, index) for index in range(3)], params(6))
    assert_alone(toy, {completion.request_id: completion for completion in done}, params(6))
    assert policy.num_planned == toy.num_launched == len(engine.trace.steps)
