"""Nobody waits for ever: admission, stalls, deadlines and full queues.

Whoever is accepted is served, ends by a deadline or leaves; what can be none of these is an exception that names the
request, the reason and the remedy. Where a message gives a remedy, the test follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contbatch.config import SchedulerConfig
from contbatch.engine import Engine, TokenEvent, TokenStream
from contbatch.errors import (
    ContbatchError,
    DeadlineExceeded,
    InvalidConfig,
    InvalidRequest,
    QueueFull,
    RequestTooLarge,
    SchedulerStalled,
    StepFailed,
)
from contbatch.plan import BlockReason
from contbatch.policies import POLICIES, AgedPriority, FairShare, SarathiServe, ShortestJobFirst, VllmV1
from contbatch.policy import Policy
from contbatch.request import FinishReason, RequestStatus
from contbatch.scheduler import IDLE_LIMIT
from contbatch.simulator import VirtualClock
from contbatch.step import Step
from contbatch.workload import Workload, WorkloadRequest, drive
from tests.cases.common import Events, Forced
from tests.toy import Bench, Scripted, Toy, assert_alone, assert_empty, config, params, prompt, toy_engine

# Admission

WATERMARKED: dict[str, Callable[[], Policy]] = {
    "VllmV1": VllmV1,
    "ShortestJobFirst": ShortestJobFirst,
    "AgedPriority": AgedPriority,
    "FairShare": FairShare,
    "SarathiServe": lambda: SarathiServe(watermark=0.25),
}


@pytest.mark.parametrize("policy", WATERMARKED)
@given(
    pool=st.integers(8, 20),
    prefix=st.booleans(),
    work=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 14), st.integers(1, 8), st.integers(0, 3)), min_size=2, max_size=9
    ),
)
@settings(max_examples=15)
def test_an_admission_beside_others_leaves_the_watermark_free(
    policy: str, pool: int, prefix: bool, work: list[tuple[int, int, int, int]]
) -> None:
    bench = Bench(config(pool=pool, bs=4, budget=12, prefix=prefix, watermark=0.25), WATERMARKED[policy]())
    left = []
    for index, (pause, length, max_tokens, priority) in enumerate(work):
        bench.steps(pause)
        tokens = [*range(min(length, 5)), *range(50 * index + 50, 50 * index + 50 + length)]
        bench.add(f"r{index}", tokens, max_tokens, priority)
    while bench.scheduler.has_unfinished:
        plan = bench.plan()
        if (plan.admitted or plan.resumed) and len(bench.running) > 1:
            left.append(bench.scheduler.pool.num_free)
        bench.commit(plan)
    assert all(free >= pool // 4 for free in left)


@pytest.mark.parametrize(
    ("limits", "length", "max_tokens", "says", "remedy"),
    [
        ({"mml": 16}, 16, 4, "shorten the prompt", ({}, 15, 4)),
        ({"mml": 16}, 16, 4, "raise max_model_len", ({"mml": 17}, 16, 4)),
        ({"pool": 3}, 10, 4, "lower max_tokens", ({}, 10, 3)),
        ({"pool": 3}, 10, 4, "raise num_blocks", ({"pool": 4}, 10, 4)),
        ({"budget": 8, "chunked": False}, 9, 1, "raise the budget", ({"budget": 9}, 9, 1)),
        ({"budget": 8, "chunked": False}, 9, 1, "turn it on", ({"chunked": True}, 9, 1)),
    ],
)
@pytest.mark.parametrize("policy", ["VllmV1", "SarathiServe", "HfFifo", "NanoVllm", "AgedPriority"])
def test_what_a_refusal_says_to_change_helps(
    policy: str,
    limits: dict[str, Any],
    length: int,
    max_tokens: int,
    says: str,
    remedy: tuple[dict[str, Any], int, int],
) -> None:
    engine, _ = toy_engine(config(**limits), policy)
    with pytest.raises(RequestTooLarge, match=says):
        engine.add_request(prompt(length), params(max_tokens))
    assert not engine.has_unfinished and not engine.trace.requests
    changes, shorter, fewer = remedy
    engine, toy = toy_engine(config(**{**limits, **changes}), policy)
    done = engine.generate([prompt(shorter)], params(fewer))[0]
    assert done.token_ids == toy.alone(prompt(shorter), params(fewer), len(done.token_ids)) and done.token_ids


# Stalls


class Ignores(VllmV1):
    """Never lets one request in."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.ignored = name

    def schedule(self, step: Step) -> None:
        """VllmV1 for the others."""
        self.grant_or_preempt(step)
        for request in [request for request in step.waiting if request.request_id != self.ignored]:
            if not step.admit(request, min(request.owed, step.tokens_left(request))):
                return


def test_a_stall_names_the_one_that_a_policy_forgets() -> None:
    """The others finish first; then the reason is the policy, and another policy is the remedy."""
    engine, toy = toy_engine(config(), Ignores("b"))
    for index, name in enumerate("abc"):
        engine.add_request(prompt(5, index), params(4), request_id=name)
    with pytest.raises(SchedulerStalled) as caught:
        engine.run()
    message = str(caught.value)
    assert "1 requests are unfinished; <b waiting: 0 of 5 tokens computed, 0 blocks> is blocked by policy" in message
    assert "64 of 64 blocks free under policy Ignores; let the policy grant what a request owes" in message
    assert set(engine.completions) == {"a", "c"}
    engine.scheduler.policy = VllmV1()
    engine.run()
    assert_alone(toy, engine.completions, params(4))
    assert_empty(engine)


class HoldsAndWaits(Policy):
    """Grants and admits, and never preempts: two requests can each hold what the other needs."""

    def __init__(self, explains: bool) -> None:
        self.explains = explains

    def schedule(self, step: Step) -> None:
        """Whoever is stuck may be given a reason."""
        stuck = step.grant_running()
        if stuck is not None and self.explains:
            step.skip(stuck, BlockReason.BLOCKS, 1, step.free_blocks)
        while step.waiting and step.seats_left:
            if not step.admit(step.waiting.head, step.waiting.head.owed):
                return


@pytest.mark.parametrize(("explains", "why"), [(True, "is blocked by blocks"), (False, "gets no tokens")])
def test_a_stall_for_lack_of_blocks_says_so_and_its_remedies_help(explains: bool, why: str) -> None:
    limits = config(pool=4, bs=4, prefix=False)
    engine, _ = toy_engine(limits, HoldsAndWaits(explains))
    for index in range(2):
        engine.add_request(prompt(8, index), params(4), request_id=f"r{index}")
    with pytest.raises(SchedulerStalled) as caught:
        engine.run()
    message = str(caught.value)
    assert f"<r0 running: 8 of 9 tokens computed, 2 blocks> {why} and was preempted 0 times" in message
    assert "0 of 4 blocks free under policy HoldsAndWaits; raise num_blocks or lower max_num_seqs" in message
    engine.scheduler.check()
    for remedy in (replace(limits, num_blocks=6), replace(limits, max_num_seqs=1)):
        engine, toy = toy_engine(remedy, HoldsAndWaits(explains))
        for index in range(2):
            engine.add_request(prompt(8, index), params(4), request_id=f"r{index}")
        engine.run()
        assert_alone(toy, engine.completions, params(4))


def test_after_a_stall_the_one_that_is_named_can_be_aborted() -> None:
    engine, toy = toy_engine(config(pool=4, bs=4, prefix=False), HoldsAndWaits(True))
    for index in range(2):
        engine.add_request(prompt(8, index), params(4), request_id=f"r{index}")
    with pytest.raises(SchedulerStalled, match="<r0 "):
        engine.run()
    engine.abort("r0")
    engine.run()
    assert_alone(toy, {"r1": engine.completions["r1"]}, params(4))
    assert_empty(engine)


class PingPong(Policy):
    """Lets a waiting request compute one chunk and then sends it away for the next one."""

    def schedule(self, step: Step) -> None:
        """One at a time, and never to the end."""
        if step.running and step.free_blocks < 2:
            step.preempt(step.running[0], to_back=True)
        elif step.running:
            step.grant_running()
        for request in list(step.waiting):
            if request not in step.victims and step.seats_left and step.admit(request, 4):
                return


def test_two_that_take_each_others_blocks_for_ever_are_a_stall() -> None:
    """Every step computes something, so it is not idleness that is noticed."""
    engine, toy = toy_engine(config(pool=2, bs=4, prefix=False), PingPong())
    for name in "ab":
        engine.add_request(prompt(7), params(2), request_id=name)
    with pytest.raises(SchedulerStalled, match=r"no request got further than before; <a .* was preempted \d+ times"):
        engine.run()
    assert all(step.num_tokens for step in engine.trace.steps) and len(engine.trace.steps) < 40
    assert sum(len(step.preempted) for step in engine.trace.steps) > 10
    engine.scheduler.policy = VllmV1()
    engine.abort("a")
    engine.run()
    assert_alone(toy, {"b": engine.completions["b"]}, params(2))
    assert_empty(engine)


@pytest.mark.parametrize("way", ["run", "generate", "stream", "drive"])
def test_a_stall_is_raised_whoever_drives(way: str) -> None:
    engine, _ = toy_engine(config(), Scripted(lambda step: None, name="Lazy"))
    ways: dict[str, Callable[[], object]] = {
        "run": lambda: engine.add_request(prompt(4), params(2)) and engine.run(),
        "generate": lambda: engine.generate([prompt(4)], params(2)),
        "stream": lambda: list(engine.stream(prompt(4), params(2))),
        "drive": lambda: drive(engine, Workload("w", 0, (WorkloadRequest("r0", (1, 2)),))),
    }
    with pytest.raises(SchedulerStalled, match="under policy Lazy"):
        ways[way]()
    assert len(engine.trace.steps) == IDLE_LIMIT
    engine.abort_all()
    assert_empty(engine)


def test_a_pause_that_is_shorter_than_the_limit_is_no_stall() -> None:
    """The count starts again with every step that computes something."""
    turns = iter(range(1000))

    def now_and_then(step: Step) -> None:
        if next(turns) % IDLE_LIMIT == 0:
            VllmV1().schedule(step)

    engine, toy = toy_engine(config(), Scripted(now_and_then))
    engine.add_request(prompt(4), params(3), request_id="a")
    engine.run()
    assert len(engine.trace.steps) == 2 * IDLE_LIMIT + 1
    assert_alone(toy, engine.completions, params(3))


# Deadlines, and clients that leave: in every state


@dataclass
class Scene:
    """A request "late" in some state, a deadline of 10 s, and "other", which has none."""

    engine: Engine
    toy: Toy
    clock: VirtualClock
    stream: TokenStream

    @property
    def status(self) -> RequestStatus:
        """Of the late one."""
        return self.engine.scheduler.requests["late"].status


def scene(policy: Policy | None = None, other_first: bool = True, **changes: Any) -> Scene:
    """Both are added, nothing has happened."""
    limits = replace(config(pool=40, bs=4), **changes)
    clock, toy = VirtualClock(), Toy(limits.num_blocks, limits.block_size)
    engine = Engine(toy, limits, policy or VllmV1(), clock=clock)
    if other_first:
        engine.add_request(prompt(5, 9), params(12), request_id="other")
    stream = engine.stream(prompt(10), params(20), request_id="late", timeout=10.0)
    if not other_first:
        engine.add_request(prompt(5, 9), params(12), request_id="other")
    return Scene(engine, toy, clock, stream)


def waiting() -> Scene:
    """It has no seat."""
    late = scene(max_num_seqs=1)
    late.engine.step()
    assert late.status is RequestStatus.WAITING
    return late


def never_planned() -> Scene:
    """No step was run at all."""
    return scene()


def mid_chunk() -> Scene:
    """Between two chunks of its prompt."""
    late = scene(max_num_batched_tokens=8)
    late.engine.step()
    assert late.engine.scheduler.requests["late"].num_computed_tokens == 3
    return late


def running() -> Scene:
    """It has two tokens."""
    late = scene(other_first=False)
    late.engine.run(max_steps=2)
    assert late.engine.scheduler.requests["late"].num_output_tokens == 2
    return late


def sent_away(**changes: Any) -> Scene:
    """Preempted in the last step."""
    policy = Forced()
    late = scene(policy, **changes)
    late.engine.step()
    policy.victims = {"late"}
    late.engine.step()
    return late


def preempted() -> Scene:
    """To be computed again."""
    late = sent_away()
    assert late.status is RequestStatus.PREEMPTED
    return late


def swapped() -> Scene:
    """In host memory."""
    late = sent_away(preemption_mode="swap", num_host_blocks=9)
    assert late.status is RequestStatus.SWAPPED and late.engine.scheduler.host.num_used == 3
    return late


def failing(late: Scene) -> Scene:
    """The next step is planned, and its forward pass raises."""

    def fail(_: object) -> None:
        late.toy.before = None
        raise RuntimeError("device lost")

    late.toy.before = fail
    with pytest.raises(StepFailed):
        late.engine.step()
    assert late.engine._pending is not None
    return late


def failed_in_its_first_step() -> Scene:
    """It was admitted in the step that failed."""
    late = failing(never_planned())
    assert late.status is RequestStatus.RUNNING and late.engine.scheduler.requests["late"].num_in_flight == 10
    return late


def failed_in_flight() -> Scene:
    """It was to get its next token."""
    return failing(running())


def failed_without_it() -> Scene:
    """It is not in the step that failed."""
    return failing(waiting())


def failed_as_it_was_sent_away() -> Scene:
    """It was swapped out in the step that failed."""
    policy = Forced()
    late = scene(policy, preemption_mode="swap", num_host_blocks=9)
    late.engine.step()
    policy.victims = {"late"}
    failing(late)
    assert late.status is RequestStatus.SWAPPED
    return late


def failed_as_it_came_back() -> Scene:
    """It was swapped in in the step that failed."""
    late = failing(swapped())
    assert late.status is RequestStatus.RUNNING and late.engine.scheduler.host.num_used == 3
    return late


STATES: list[Callable[[], Scene]] = [
    never_planned,
    waiting,
    mid_chunk,
    running,
    preempted,
    swapped,
    failed_in_its_first_step,
    failed_in_flight,
    failed_without_it,
    failed_as_it_was_sent_away,
    failed_as_it_came_back,
]


def ends_alone(late: Scene, request: Any) -> None:
    """It holds nothing, anywhere, and the other one goes on as if it had been alone."""
    assert request.status is RequestStatus.FINISHED and "late" not in late.engine.scheduler.requests
    assert not request.block_table and not request.host_table and request.kv_cache_slot == -1
    assert late.engine.scheduler.host.num_used == 0
    late.engine.scheduler.check()
    late.engine.run()
    assert_alone(late.toy, {"other": late.engine.completions["other"]}, params(12))
    assert_empty(late.engine)


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_a_deadline_ends_a_request_in_every_state(state: Callable[[], Scene]) -> None:
    late = state()
    request = late.engine.scheduler.requests["late"]
    outputs = list(request.output_token_ids)
    late.clock.advance(10.0)
    events = [event for event in late.engine.step() if event.request_id == "late"]
    assert [(event.token_id, event.finish_reason) for event in events] == [(None, FinishReason.ABORT)]
    done = late.engine.completions["late"]
    assert done.finish_reason is FinishReason.ABORT and isinstance(done.error, DeadlineExceeded)
    message = f"request 'late' had {len(outputs)} of 20 tokens after 10 s, its timeout; allow more time or ask for less"
    assert str(done.error) == message and done.token_ids == tuple(outputs)
    assert [event.token_id for event in late.stream] == [*outputs, None], "the stream ends with it"
    assert late.engine.trace.finished["late"].reason == "abort"
    ends_alone(late, request)


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_a_client_can_leave_in_every_state(state: Callable[[], Scene]) -> None:
    late = state()
    request = late.engine.scheduler.requests["late"]
    late.stream.close()
    late.stream.close()
    assert list(late.stream) == [] and "late" not in late.engine.completions
    assert late.engine.trace.finished["late"].reason == "abort"
    ends_alone(late, request)
    late.clock.advance(100.0)
    assert late.engine.step() == [], "its deadline is gone with it"


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_before_its_deadline_nobody_is_late(state: Callable[[], Scene]) -> None:
    """Also after a failed step, which is run again."""
    late = state()
    late.clock.advance(9.999)
    late.engine.run()
    late.clock.advance(100.0)
    assert late.engine.step() == []
    tokens = [event.token_id for event in late.stream if event.token_id is not None]
    assert tuple(tokens) == late.toy.alone(prompt(10), params(20))


def slow_engine(seconds: float) -> tuple[Engine, Toy, VirtualClock]:
    """Each forward pass takes some seconds."""
    clock = VirtualClock()
    limits = config()
    toy = Toy(limits.num_blocks, limits.block_size, before=lambda _: clock.advance(seconds))
    return Engine(toy, limits, clock=clock), toy, clock


def test_a_deadline_in_a_long_step_ends_a_request_after_it() -> None:
    """The token of that step is delivered: it was computed. If it was the last one, nothing was late."""
    engine, toy, _ = slow_engine(7.0)
    for name, max_tokens in (("slow", 9), ("done", 2)):
        engine.add_request(prompt(4), params(max_tokens), request_id=name, timeout=10.0)
    engine.run()
    slow, done = engine.completions["slow"], engine.completions["done"]
    assert slow.token_ids == toy.alone(prompt(4), params(2)) and slow.finish_reason is FinishReason.ABORT
    assert done.token_ids == slow.token_ids and done.finish_reason is FinishReason.LENGTH and done.error is None
    assert engine.trace.finished["slow"].time == engine.trace.finished["done"].time == 14.0
    assert len(engine.trace.steps) == 2, "nothing is computed for nobody"


def test_a_timeout_counts_from_the_arrival() -> None:
    engine, _, clock = slow_engine(1.0)
    clock.advance(100.0)
    engine.add_request(prompt(4), params(50), request_id="came before", arrival_time=96.0, timeout=10.0)
    engine.add_request(prompt(4), params(50), request_id="comes now", timeout=10.0)
    engine.add_request(prompt(4), params(50), request_id="came too late", arrival_time=50.0, timeout=10.0)
    engine.run()
    lengths = {name: len(done.token_ids) for name, done in engine.completions.items()}
    assert lengths == {"came too late": 0, "came before": 6, "comes now": 10}


def test_several_are_late_in_the_order_of_their_deadlines() -> None:
    engine, _, clock = slow_engine(1.0)
    for name, timeout in (("c", 5.0), ("a", 3.0), ("d", 5.0), ("b", 3.5), ("never", None)):
        engine.add_request(prompt(4), params(9), request_id=name, timeout=timeout)
    engine.step()
    clock.advance(50.0)
    late = [event.request_id for event in engine.step() if event.finish_reason]
    assert late == ["a", "b", "c", "d"]
    assert engine.run()[0].finish_reason is FinishReason.LENGTH


def test_a_deadline_is_that_of_a_request_and_not_of_its_id() -> None:
    engine, toy, clock = slow_engine(1.0)
    engine.add_request(prompt(4), params(2), request_id="a", timeout=10.0)
    engine.run()
    engine.add_request(prompt(4), params(20), request_id="a")
    clock.advance(50.0)
    engine.run()
    assert_alone(toy, {"a": engine.completions["a"]}, params(20))


def test_the_head_of_the_queue_that_is_late_lets_the_next_one_in() -> None:
    clock = VirtualClock()
    engine = Engine(Toy(10, 4), config(pool=10, bs=4), clock=clock)
    engine.add_request(prompt(17), params(9), request_id="R")
    engine.step()
    engine.add_request(prompt(32, 1), params(3), request_id="head", timeout=5.0)
    engine.add_request(prompt(8, 2), params(3), request_id="next")
    engine.step()
    assert engine.trace.steps[-1].request_ids == ["R"]
    clock.advance(5.0)
    engine.step()
    assert engine.trace.steps[-1].request_ids == ["R", "next"], "in the very step in which the head has gone"
    engine.run()
    assert_empty(engine)


def test_whoever_hears_of_a_deadline_may_add_abort_and_raise() -> None:
    engine, toy, clock = slow_engine(1.0)
    heard: list[TokenEvent] = []

    def again(event: TokenEvent) -> None:
        if event.finish_reason:
            heard.append(event)
            engine.add_request(prompt(5, 3), params(3), request_id="again")
            engine.abort("other")
            raise ValueError("as well")

    engine.add_request(prompt(4), params(9), request_id="late", on_event=again, timeout=5.0)
    engine.add_request(prompt(4, 1), params(9), request_id="other")
    engine.add_request(prompt(4, 2), params(9), request_id="stays")
    engine.step()
    clock.advance(9.0)
    engine.run()
    assert len(heard) == 1 and isinstance(engine.completions["late"].error, DeadlineExceeded)
    assert engine.completions["other"].finish_reason is FinishReason.ABORT
    assert engine.completions["other"].error is None, "that one was not late"
    assert_alone(toy, {"again": engine.completions["again"]}, params(3))
    assert_alone(toy, {"stays": engine.completions["stays"]}, params(9))
    assert_empty(engine)


@pytest.mark.parametrize("timeout", [0, -1, 0.0, float("nan"), float("inf"), True, "soon"])
def test_a_timeout_that_is_none_is_refused(timeout: Any) -> None:
    engine, _ = toy_engine(config())
    with pytest.raises(InvalidRequest, match=f"(timeout|deadline) is {timeout!r}; use"):
        engine.add_request(prompt(3), timeout=timeout)
    assert not engine.has_unfinished and not engine.trace.requests


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_under_every_policy_nobody_outlives_the_step_of_a_deadline(policy: str, mode: str) -> None:
    limits = replace(config(pool=10, bs=4, budget=12, seqs=4), preemption_mode=mode, num_host_blocks=6)
    clock = VirtualClock()
    toy = Toy(limits.num_blocks, limits.block_size, before=lambda _: clock.advance(1.0))
    engine = Engine(toy, limits, policy, clock=clock)
    deadlines, events = {}, Events()
    for index in range(16):
        timeout = None if index % 4 == 3 else 2.0 + index * 5 % 13
        name = engine.add_request(
            prompt(2 + index % 9, index), params(9), timeout=timeout, on_event=events, client=str(index % 3)
        )
        deadlines[name] = float("inf") if timeout is None else clock() + timeout
        engine.step()
        engine.scheduler.check()
    while engine.has_unfinished:
        engine.step()
        engine.scheduler.check()
    late = {name for name, done in engine.completions.items() if isinstance(done.error, DeadlineExceeded)}
    assert late and len(engine.completions) == 16 == len(events.ends())
    for name, done in engine.completions.items():
        assert done.token_ids == toy.alone(done.prompt_token_ids, params(9))[: len(done.token_ids)]
        assert (done.finish_reason is FinishReason.ABORT) == (name in late)
        assert engine.trace.finished[name].time < deadlines[name] + 1 + 1e-9
    assert_empty(engine)


# Queues that are full


def state_of(engine: Engine) -> tuple[object, ...]:
    """What a refusal may not change."""
    waiting = engine.scheduler.waiting
    return (
        list(engine.scheduler.requests),
        [request.request_id for request in waiting],
        waiting.num_tokens,
        dict(engine.trace.requests),
        set(engine._clients),
        set(engine._sampling),
        list(engine._deadlines),
        engine.scheduler._num_added,
    )


def limited(**limits: int) -> SchedulerConfig:
    """One seat, and a queue with limits."""
    return replace(config(seqs=1), **limits)  # type: ignore[arg-type]  # some fields


def test_a_full_queue_refuses_one_more_request_and_has_room_after_an_admission() -> None:
    policy = FairShare()
    engine, toy = toy_engine(limited(max_num_queued_reqs=2), policy)
    for index, name in enumerate("ab"):
        engine.add_request(prompt(5, index), params(3), request_id=name)
    before = state_of(engine)
    with pytest.raises(QueueFull) as caught:
        engine.add_request(prompt(5, 2), params(3), request_id="c", client="new", timeout=9.0)
    assert str(caught.value) == "request 'c': 2 requests are queued, max_num_queued_reqs=2; send it again later"
    assert isinstance(caught.value, InvalidRequest) and isinstance(caught.value, ContbatchError)
    assert state_of(engine) == before and "new" not in policy.service, "the policy has not heard of it"
    engine.step()
    assert engine.add_request(prompt(5, 2), params(3), request_id="c") == "c"
    with pytest.raises(QueueFull):
        engine.add_request(prompt(5, 3), params(3), request_id="d")
    engine.abort("b")
    engine.add_request(prompt(5, 3), params(3), request_id="d")
    engine.run()
    assert_alone(toy, {name: engine.completions[name] for name in "acd"}, params(3))
    assert_empty(engine)


def test_a_queue_is_limited_in_tokens_too() -> None:
    engine, _ = toy_engine(limited(max_num_queued_tokens=12))
    engine.add_request(prompt(7), params(3), request_id="a")
    engine.add_request(prompt(5), params(3), request_id="b")
    before = state_of(engine)
    with pytest.raises(QueueFull, match=r"'c': with its prompt 13 tokens would be queued, max_num_queued_tokens=12"):
        engine.add_request(prompt(1), params(3), request_id="c")
    assert state_of(engine) == before
    engine.step()
    engine.add_request(prompt(7), params(3), request_id="c")
    with pytest.raises(QueueFull):
        engine.add_request(prompt(1), params(3), request_id="d")
    engine.run()
    assert_empty(engine)


def test_a_prompt_above_the_limit_is_queued_alone() -> None:
    """To send it again later would never help."""
    engine, _ = toy_engine(limited(max_num_queued_tokens=12))
    engine.add_request(prompt(40), params(2), request_id="large")
    with pytest.raises(QueueFull):
        engine.add_request(prompt(1), params(2))
    engine.run()
    assert len(engine.completions["large"].token_ids) == 2


def test_the_preempted_count_with_all_their_tokens_and_are_never_refused() -> None:
    policy = Forced()
    engine, toy = toy_engine(replace(limited(max_num_queued_tokens=12), max_num_seqs=2), policy)
    for index, name in enumerate("ab"):
        engine.add_request(prompt(5, index), params(9), request_id=name)
        engine.run(max_steps=2)
    policy.victims = {"a", "b"}
    engine.step()
    assert engine.scheduler.waiting.num_tokens == 5 + 4 + 5 + 2 == 16
    with pytest.raises(QueueFull, match="17 tokens would be queued"):
        engine.add_request(prompt(1), params(2))
    engine.run()
    assert_alone(toy, engine.completions, params(9))


@pytest.mark.parametrize("seats", [1, 2])
def test_generate_serves_none_if_the_queue_is_full_before_its_last(seats: int) -> None:
    engine, toy = toy_engine(replace(limited(max_num_queued_reqs=3), max_num_seqs=seats))
    engine.add_request(prompt(4), params(5), request_id="runs")
    engine.step()
    with pytest.raises(QueueFull, match="3 requests are queued"):
        engine.generate([prompt(4, index) for index in range(4)], params(2))
    assert list(engine.scheduler.requests) == ["runs"] and len(engine.scheduler.waiting) == 0
    assert len(engine.generate([prompt(4, index) for index in range(3)], params(2))) == 3
    engine.run()
    assert_alone(toy, {"runs": engine.completions["runs"]}, params(5))
    assert_empty(engine)


@pytest.mark.parametrize("field", ["max_num_queued_reqs", "max_num_queued_tokens"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "many"])
def test_a_limit_of_a_queue_is_at_least_one(field: str, value: Any) -> None:
    with pytest.raises(InvalidConfig, match=f"{field} is {value!r}; use an integer of at least 1"):
        SchedulerConfig(**{field: value})


@given(
    policy=st.sampled_from(sorted(POLICIES)),
    mode=st.sampled_from(["recompute", "swap"]),
    work=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.sampled_from([None, 0, 1])), max_size=12),
)
@settings(max_examples=40)
def test_the_tokens_of_a_queue_are_counted(policy: str, mode: str, work: list[tuple[int, int, int | None]]) -> None:
    """Through admissions, preemptions, failed steps and aborts."""
    limits = replace(config(pool=6, bs=4, seqs=3, budget=9), preemption_mode=mode, num_host_blocks=4)
    engine, toy = toy_engine(limits, policy)

    def is_counted() -> bool:
        waiting = engine.scheduler.waiting
        return waiting.num_tokens == sum(len(request.token_ids) for request in waiting)

    for index, (length, max_tokens, gone) in enumerate(work):
        engine.add_request(prompt(length, index), params(max_tokens))
        toy.before = None
        if gone is not None:
            late = failed_step(engine, toy)
            engine.abort(late[gone % len(late)])
        engine.step()
        assert is_counted()
    while engine.has_unfinished:
        engine.step()
        assert is_counted()
    assert engine.scheduler.waiting.num_tokens == 0


def failed_step(engine: Engine, toy: Toy) -> Sequence[str]:
    """A step whose forward pass raises; returns who is there."""

    def fail(_: object) -> None:
        toy.before = None
        raise RuntimeError("device lost")

    toy.before = fail
    with pytest.raises(StepFailed):
        engine.step()
    return list(engine.scheduler.requests)
