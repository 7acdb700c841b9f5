"""The rules that always hold, checked after every step of random traffic under every policy.

A state machine drives an engine with the toy model: requests with shared prefixes, priorities, stops and callbacks
that fail arrive and are aborted at any time, pools are tiny, and steps fail at random and are run again or given up.
Each rule is a function below; the numbers are those of `design.md`, section 5.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from contbatch.batch import ScheduledBatch
from contbatch.engine import Engine, TokenEvent
from contbatch.errors import DeadlineExceeded, QueueFull, RequestTooLarge, StepFailed
from contbatch.metrics import summarise
from contbatch.policies import POLICIES, Orca, PrefillDecodeBudget, ShortestJobFirst, StaticBatching, VllmV1
from contbatch.policy import Policy
from contbatch.request import FinishReason, RequestStatus, SamplingParams
from contbatch.trace import StepRecord
from tests.toy import Bytes, Ticks, Toy, assert_empty, config, params, prompt, toy_engine

NAMED: dict[str, Callable[[], Policy]] = {
    **POLICIES,
    "VllmV1 by priority": lambda: VllmV1("priority"),
    "Orca with max_tokens": lambda: Orca("max_tokens"),
    "ShortestJobFirst with aging": lambda: ShortestJobFirst(aging=0.5),
    "StaticBatching of 2": lambda: StaticBatching(2),
    "PrefillDecodeBudget with tight limits": lambda: PrefillDecodeBudget(max_prefill=5, max_decode=2, max_total=6),
}


class Client:
    """What a client saw: its events in order. It may raise at one of them."""

    def __init__(self, raises_at: int | None) -> None:
        self.events: list[TokenEvent] = []
        self.raises_at = raises_at

    def __call__(self, event: TokenEvent) -> None:
        self.events.append(event)
        if len(self.events) == self.raises_at:
            raise ValueError("client broke")


def rule_1_grants_stay_within_the_budget(engine: Engine, step: StepRecord) -> None:
    """Granted tokens are at least one each, and within the total, prefill, decode and sequence limits."""
    limits = engine.scheduler.policy.token_budget(engine.config)
    assert all(count >= 1 for count in step.counts)
    assert step.num_tokens <= limits.max_total_tokens
    assert step.prefill_tokens <= limits.max_prefill_tokens
    assert step.decode_tokens <= limits.max_decode_tokens
    assert len(step.request_ids) == len(set(step.request_ids)) <= engine.config.max_num_seqs
    assert step.num_running <= engine.config.max_num_seqs


def rule_2_blocks_add_up(engine: Engine) -> None:
    """Reference counts are the tables that hold a block; a table covers what is computed and no more; only full
    blocks are shared. `Scheduler.check` proves it; this says it once more in other words."""
    scheduler, pool = engine.scheduler, engine.scheduler.pool
    scheduler.check()
    held = Counter(block for request in scheduler.running for block in request.block_table)
    hosted = Counter(block for request in scheduler.requests.values() for block in request.host_table)
    assert {block: count for block, count in enumerate(scheduler.host.ref_count) if count} == dict(hosted)
    assert {block: count for block, count in enumerate(pool.ref_count) if count} == dict(held)
    assert sorted([*pool.free_list, *held]) == list(range(1, pool.num_blocks + 1))
    for request in scheduler.running:
        tokens = request.num_computed_tokens + request.num_in_flight
        tokens = max(tokens, request.num_reserved_tokens)
        assert len(request.block_table) == -(-tokens // pool.block_size), "no more than needed or reserved"
        full = tokens // pool.block_size
        assert all(held[block] == 1 for block in request.block_table[full:])
    if not engine.config.enable_prefix_caching:
        assert pool.num_cached == 0 and all(count == 1 for count in held.values())


def rule_3_a_hit_is_whole_blocks_and_never_everything(engine: Engine, step: StepRecord) -> None:
    """Cached tokens come in whole blocks, and at least one token is computed."""
    for name, cached in step.cached.items():
        assert cached % engine.config.block_size == 0 and name in [*step.admitted, *step.resumed]
        row = step.request_ids.index(name)
        assert step.starts[row] == cached and step.counts[row] >= 1


def rule_6_a_victim_makes_room(step: StepRecord) -> None:
    """A victim is in no task and joins nobody in the step in which it goes, and what it made room for gets tokens."""
    victims = {*step.preempted, *step.swapped_out}
    assert len(victims) == len(step.preempted) + len(step.swapped_out)
    assert not victims & {*step.request_ids, *step.admitted, *step.resumed, *step.swapped_in}
    assert not victims or step.request_ids


def rule_8_one_finish_event(client: Client) -> None:
    """Exactly one event has a finish reason, and it is the last one."""
    assert [event.finish_reason is not None for event in client.events] == [False] * (len(client.events) - 1) + [True]


def rule_10_metrics_are_consistent(engine: Engine) -> None:
    """Times of one clock: first token before the end, gaps add up, no token is counted twice."""
    metrics = summarise(engine.trace)
    for name, request in metrics.requests.items():
        times = request.seconds
        assert request.num_output_tokens == len(engine.completions[name].token_ids) == len(times.tokens)
        if times.ttft is not None:
            assert times.e2e is not None and 0 <= times.ttft <= times.e2e
        if times.tpot is not None:
            assert times.tpot * (len(times.tokens) - 1) == pytest.approx(sum(times.itl))
    assert metrics.computed_tokens == sum(step.num_tokens for step in engine.trace.steps)


class AnyTraffic(RuleBasedStateMachine):
    """An engine under random traffic and one policy."""

    engine: Engine
    policy: str

    @initialize(
        pool=st.integers(4, 16),
        bs=st.sampled_from([1, 2, 4]),
        budget=st.integers(1, 16),
        seqs=st.integers(1, 5),
        chunked=st.booleans(),
        prefix=st.booleans(),
        watermark=st.sampled_from([0.0, 0.0, 0.3]),
        long_cap=st.sampled_from([0, 0, 3]),
        host=st.sampled_from([None, 0, 2, 30]),
        queue=st.sampled_from([None, None, 4]),
    )
    def begin(self, host: int | None, queue: int | None, **limits: Any) -> None:
        """Any policy, any limits."""
        self.fail_next = 0
        self.clients: dict[str, Client] = {}
        self.wanted: dict[str, SamplingParams] = {}
        self.aborted: set[str] = set()
        self.checked = 0
        limits = {**limits, "budget": limits["budget"] + (0 if limits["chunked"] else 12)}
        setting = replace(config(mml=40, **limits), max_num_queued_reqs=queue)
        if host is not None:
            setting = replace(setting, preemption_mode="swap", num_host_blocks=host)
        self.toy = Toy(setting.num_blocks, setting.block_size, eos_token_ids=[3, 5, 8, 13], before=self.before)
        self.engine = Engine(self.toy, setting, NAMED[self.policy](), Bytes(), clock=Ticks())

    def before(self, _: ScheduledBatch) -> None:
        """Fails as often as was asked for."""
        if self.fail_next:
            self.fail_next -= 1
            raise RuntimeError("device lost")

    @rule(
        family=st.integers(0, 2),
        shared=st.integers(0, 3),
        tail=st.integers(0, 6),
        max_tokens=st.integers(1, 8) | st.just(12) | st.none(),
        priority=st.integers(0, 3),
        ignore_eos=st.booleans(),
        sampled=st.booleans(),
        raises_at=st.sampled_from([None, None, None, 1, 2, 3]),
        timeout=st.sampled_from([None, None, None, 40.0]),
    )
    def add(
        self,
        family: int,
        shared: int,
        tail: int,
        max_tokens: int | None,
        priority: int,
        ignore_eos: bool,
        sampled: bool,
        raises_at: int | None,
        timeout: float | None,
    ) -> None:
        """A request that shares a prefix with others of its family."""
        tokens = [*prompt(shared * self.engine.config.block_size, family), *prompt(tail, len(self.clients))] or [1]
        client = Client(raises_at)
        wanted = params(max_tokens, ignore_eos=ignore_eos)
        if sampled:
            wanted = params(max_tokens, ignore_eos=ignore_eos, temperature=0.7, seed=family)
        before = len(self.engine.scheduler.requests)
        try:
            name = self.engine.add_request(
                tokens, wanted, priority=priority, on_event=client, client=str(family), timeout=timeout
            )
        except (RequestTooLarge, QueueFull):
            assert len(self.engine.scheduler.requests) == before
            return
        self.clients[name] = client
        self.wanted[name] = wanted

    @precondition(lambda self: self.engine.has_unfinished)
    @rule()
    def step(self) -> None:
        """One step."""
        running = {r.request_id for r in self.engine.scheduler.running}
        computed = {r.request_id: r.num_computed_tokens for r in self.engine.scheduler.requests.values()}
        pending, steps = self.engine._pending is not None, len(self.engine.trace.steps)
        events = self.engine.step()
        if len(self.engine.trace.steps) == steps:
            return self.everybody_was_late(events)
        record = self.engine.trace.steps[-1]
        rule_1_grants_stay_within_the_budget(self.engine, record)
        rule_3_a_hit_is_whole_blocks_and_never_everything(self.engine, record)
        rule_6_a_victim_makes_room(record)
        assert record.request_ids, "every step of these policies computes something"
        if not pending:
            assert {*record.preempted, *record.swapped_out} <= running
            for name, start in zip(record.request_ids, record.starts, strict=True):
                kept = computed[name] if name in running or name in record.swapped_in else record.cached.get(name, 0)
                assert start == kept

    def everybody_was_late(self, events: list[TokenEvent]) -> None:
        """A step in which the last requests pass their deadline computes nothing."""
        assert events and not self.engine.has_unfinished
        assert {event.finish_reason for event in events} == {FinishReason.ABORT}

    @precondition(lambda self: self.engine.has_unfinished)
    @rule(times=st.integers(1, 2))
    def step_that_fails(self, times: int) -> None:
        """The forward pass raises; the plan stays and will be run again by whichever step comes next."""
        self.fail_next = times
        tokens = {r.request_id: list(r.token_ids) for r in self.engine.scheduler.requests.values()}
        steps = len(self.engine.trace.steps)
        for _ in range(times):
            try:
                self.engine.step()
            except StepFailed:
                continue
            assert not self.engine.has_unfinished, "only where the last of them were late nothing fails"
        assert len(self.engine.trace.steps) == steps
        left = {r.request_id: list(r.token_ids) for r in self.engine.scheduler.requests.values()}
        assert left.items() <= tokens.items()
        self.fail_next = 0

    @precondition(lambda self: self.engine._pending is not None)
    @rule()
    def give_up_the_failed_step(self) -> None:
        """What was planned is undone; the next step is planned anew."""
        name = next(reversed(self.engine.scheduler.requests))
        self.abort_one(name)
        assert self.engine._pending is None
        assert not any(request.num_in_flight for request in self.engine.scheduler.running)

    @precondition(lambda self: self.engine.has_unfinished)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Somebody leaves, in whatever state."""
        self.abort_one(data.draw(st.sampled_from(sorted(self.engine.scheduler.requests))))

    def abort_one(self, name: str) -> None:
        """Everything comes back at once."""
        request = self.engine.scheduler.requests[name]
        assert self.engine.abort(name) and not self.engine.abort(name)
        assert not request.block_table and request.kv_cache_slot == -1 and request.status is RequestStatus.FINISHED
        self.aborted.add(name)

    @invariant()
    def rules_hold(self) -> None:
        """Rules 2, 7, 8 and 9, at any time."""
        if not hasattr(self, "engine"):
            return
        rule_2_blocks_add_up(self.engine)
        for name, client in self.clients.items():
            self.check_tokens(name, [event.token_id for event in client.events if event.token_id is not None])
            if name not in self.engine.scheduler.requests:
                rule_8_one_finish_event(client)
                self.check_reason(name)

    def check_tokens(self, name: str, got: list[int]) -> None:
        """Rule 7: what came out so far is what comes out alone, and nothing is taken back."""
        record = self.engine.scheduler.requests.get(name)
        limit = record.max_tokens if record else self.engine.trace.requests[name].max_tokens
        tokens = record.request.prompt_token_ids if record else self.engine.completions[name].prompt_token_ids
        if got:
            alone = self.toy.alone(tokens, self.wanted[name], limit)
            assert tuple(got) == alone[: len(got)]
        if record:
            assert record.output_token_ids == got

    def check_reason(self, name: str) -> None:
        """Rules 8 and 9: the reason is the true one, and the same everywhere."""
        done, client = self.engine.completions[name], self.clients[name]
        reason = client.events[-1].finish_reason
        assert done.finish_reason is reason is not None and self.engine.trace.finished[name].reason == reason.value
        late = isinstance(done.error, DeadlineExceeded)
        assert (reason is FinishReason.ABORT) == (name in self.aborted or late)
        if reason is FinishReason.ERROR:
            assert isinstance(done.error, ValueError) and client.raises_at is not None
        elif reason is FinishReason.EOS:
            assert done.token_ids[-1] in self.toy.eos_token_ids and not self.wanted[name].ignore_eos
        elif reason is FinishReason.LENGTH:
            assert len(done.token_ids) == self.engine.trace.requests[name].max_tokens

    def teardown(self) -> None:
        """Rule 6: whatever state this is, the rest finishes; then nothing is held."""
        if not hasattr(self, "engine"):
            return
        self.fail_next = 0
        owed = sum(len(r.token_ids) + r.max_tokens for r in self.engine.scheduler.requests.values())
        limit = 20 * (owed + 1)
        while self.engine.has_unfinished:
            self.step()
            self.rules_hold()
            limit -= 1
            assert limit, "no end in sight"
        assert set(self.engine.completions) == set(self.clients)
        rule_10_metrics_are_consistent(self.engine)
        assert_empty(self.engine)


@pytest.mark.parametrize("policy", sorted(NAMED))
def test_any_traffic_keeps_all_rules(policy: str) -> None:
    """Random traffic, tiny pools, failures and aborts: all rules hold after every step."""
    machine = type(f"Traffic under {policy}", (AnyTraffic,), {"policy": policy})
    run_state_machine_as_test(machine, settings=settings(max_examples=25, stateful_step_count=40))


# Rule 4 is in test_scheduler.py (refusals).


DETERMINISM = """
from tests.toy import config, params, prompt, toy_engine
from contbatch import POLICIES
for policy in POLICIES:
    engine, _ = toy_engine(config(pool=9, bs=4, budget=12, seqs=4), policy)
    for index in range(12):
        engine.add_request(prompt(3 + index % 7, index % 3), params(2 + index % 8), request_id=f"name-{index * 7 % 12}")
        engine.step()
    engine.abort("name-7")
    engine.run()
    print(engine.trace.digest())
"""


def test_rule_5_the_same_decisions_for_any_hash_seed() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", DETERMINISM],
            cwd=Path(__file__).parents[1],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(digests) == 1 and len(digests.pop().split()) == len(POLICIES)


@pytest.mark.parametrize("policy", sorted(NAMED))
def test_rule_6_some_counter_grows_in_every_step(policy: str) -> None:
    """Under the hardest pressure, a pool in which only one request fits whole."""
    engine, _ = toy_engine(config(pool=5, bs=4, budget=6, seqs=5), NAMED[policy]())
    for index in range(10):
        engine.add_request(prompt(4 + index, index), params(20 - 4 - index), priority=index % 3)
    progress: dict[str, int] = {}
    stuck = 0
    while engine.has_unfinished:
        engine.step()
        step = engine.trace.steps[-1]
        grown = [
            name
            for name, start, count in zip(step.request_ids, step.starts, step.counts, strict=True)
            if start + count > progress.get(name, 0)
        ]
        for name, start, count in zip(step.request_ids, step.starts, step.counts, strict=True):
            progress[name] = max(progress.get(name, 0), start + count)
        stuck = 0 if grown else stuck + 1
        assert stuck <= 5, "recomputing one request's pool of tokens takes at most this long"


@pytest.mark.parametrize("policy", sorted(NAMED))
def test_rule_6_a_victim_waits_until_those_it_made_room_for_have_their_tokens(policy: str) -> None:
    engine, _ = toy_engine(config(pool=6, bs=4, budget=16, seqs=4, prefix=False), NAMED[policy]())
    for index in range(6):
        engine.add_request(prompt(5, index), params(12), request_id=f"r{index}", priority=index % 2)
    engine.run()
    preempted = 0
    for before, after in zip(engine.trace.steps, engine.trace.steps[1:], strict=False):
        if before.preempted:
            preempted += 1
            assert before.request_ids, "somebody used the room at once"
            assert not set(before.preempted) & set(before.request_ids)
            served = set(before.request_ids)
            back = set(before.preempted) & set(after.resumed)
            assert not back or served <= {*after.request_ids, *before.finished, *after.preempted}
    assert preempted or policy in (
        "PrefillDecodeBudget with tight limits",
        "Orca",
        "Orca with max_tokens",
        "PeakMemory",
    )
