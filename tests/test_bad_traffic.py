"""Bad and odd traffic: a clear error or a right result, never a hang.

Moments that are none, arrivals in any order, priorities that are all equal or enormous, ten thousand clients that
leave, and workloads as files and generators get them from people: each is refused in the package's own words, with
nothing else touched, or served as it should be.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contbatch import Engine, ScriptedExecutor
from contbatch.engine import TokenEvent
from contbatch.errors import ContbatchError, DeadlineExceeded, InvalidConfig, InvalidRequest, TraceError
from contbatch.metrics import summarise
from contbatch.policies import POLICIES, AgedPriority, VllmV1
from contbatch.policy import Policy
from contbatch.request import FinishReason, RequestStatus
from contbatch.simulator import VirtualClock
from contbatch.workload import Workload, WorkloadRequest, bursty, drive, log_uniform, mixed, poisson, shared_prefix
from tests.cases.common import first_step
from tests.toy import Bench, assert_alone, assert_empty, config, params, prompt, toy_engine
from tests.virtual import TimedExecutor

# Moments of arrival


@pytest.mark.parametrize("moment", [-1, -1e-9, float("nan"), float("inf"), -float("inf"), "now", True, (1,), 10**400])
@pytest.mark.parametrize("timeout", [None, 5.0])
def test_an_arrival_time_that_is_none_is_refused(moment: Any, timeout: float | None) -> None:
    engine, toy = toy_engine(config())
    engine.add_request(prompt(4), params(3), request_id="live")
    with pytest.raises(InvalidRequest, match=r"request 'bad': arrival_time is .*; use"):
        engine.add_request(prompt(4), params(3), request_id="bad", arrival_time=moment, timeout=timeout)
    assert list(engine.scheduler.requests) == ["live"] == list(engine.trace.requests) and not engine._deadlines
    engine.run()
    assert_alone(toy, engine.completions, params(3))
    assert_empty(engine)


@pytest.mark.parametrize("policy", POLICIES)
def test_arrival_times_in_any_order_change_no_decision(policy: str) -> None:
    """Who comes first is whose call came first; no policy here but priority among equals goes by the clock."""
    runs = []
    for moments in ([0.0] * 9, [float(9 - index) for index in range(9)], [float(index * 5 % 9) for index in range(9)]):
        clock = VirtualClock(0.0)
        engine = Engine(TimedExecutor(clock), config(pool=12, bs=4, budget=16, seqs=3), policy, clock=clock)
        clock.advance(10.0)
        for index, moment in enumerate(moments):
            engine.add_request(prompt(3 + index, index), params(5), arrival_time=moment)
        engine.run()
        runs.append([(step.request_ids, step.counts) for step in engine.trace.steps])
        seconds = {name: request.seconds for name, request in summarise(engine.trace).requests.items()}
        assert [seconds[f"r{index}"].arrival for index in range(9)] == moments
        assert all(0 <= (times.ttft or 0) <= (times.e2e or 0) for times in seconds.values())
    assert runs[0] == runs[1] == runs[2]


def test_among_equal_priorities_the_clock_decides_and_then_the_order_of_the_calls() -> None:
    """As in vLLM: (priority, arrival time, order)."""
    bench = Bench(config(seqs=1), VllmV1("priority"))
    for name, arrival in (("c", 7.0), ("a", 1.0), ("d", 7.0), ("b", 1.0)):
        bench.add(name, 4, max_tokens=1, arrival=arrival)
    assert bench.waiting == ["a", "b", "c", "d"]


@given(order=st.permutations(range(8)), in_seconds=st.booleans(), policy=st.sampled_from(sorted(POLICIES)))
@settings(max_examples=40)
def test_a_workload_that_is_not_sorted_runs_like_the_sorted_one(
    order: list[int], in_seconds: bool, policy: str
) -> None:
    requests = []
    for index in range(8):
        when: dict[str, Any] = {"arrival_time": index * 1.7} if in_seconds else {"arrival_step": index * 2}
        requests.append(WorkloadRequest(f"r{index}", tuple(prompt(2 + index, index)), 4, priority=index % 3, **when))
    digests = set()
    for chosen in (range(8), order):
        clock = VirtualClock()
        engine = Engine(TimedExecutor(clock), config(pool=8, bs=4, budget=10, seqs=3), policy, clock=clock)
        workload = Workload("w", 0, tuple(requests[index] for index in chosen))
        digests.add(drive(engine, workload, wait=clock.advance).digest())
    assert len(digests) == 1


def test_all_at_the_same_moment_keep_the_order_of_the_list() -> None:
    for moment in (0.0, 3.5, 1e9):
        clock = VirtualClock()
        engine = Engine(TimedExecutor(clock), config(seqs=1), clock=clock)
        requests = (WorkloadRequest(f"r{index * 7 % 10}", (1, 2), 1, arrival_time=moment) for index in range(10))
        trace = drive(engine, Workload("w", 0, tuple(requests)), wait=clock.advance)
        assert [step.request_ids for step in trace.steps] == [[f"r{index * 7 % 10}"] for index in range(10)]


# Priorities


@pytest.mark.parametrize("make", [AgedPriority, lambda: VllmV1("priority")], ids=["AgedPriority", "VllmV1 by priority"])
@pytest.mark.parametrize("priority", [0, 3, -7, 10**9])
def test_equal_priorities_are_first_come_first_served(make: Callable[[], Policy], priority: int) -> None:
    """Decision for decision: nobody is sent away for an equal, and victims are the newest."""
    runs = []
    for policy in (make(), VllmV1()):
        bench = Bench(config(pool=8, bs=4, budget=12, seqs=3, prefix=False), policy)
        for index in range(9):
            bench.add(f"r{index}", 2 + index * 5 % 9, max_tokens=6, priority=priority, arrival=float(index))
            bench.steps(index % 3)
        bench.drain()
        runs.append([(plan.evicted_requests, plan.admitted) for plan in bench.plans])
    assert sum(len(evicted) for evicted, _ in runs[0]) > 0
    assert [admitted for _, admitted in runs[0] if admitted] == [admitted for _, admitted in runs[1] if admitted]


@pytest.mark.parametrize("policy", POLICIES)
def test_any_integer_is_a_priority(policy: str) -> None:
    engine, toy = toy_engine(config(pool=10, bs=4, seqs=2), policy)
    for index, priority in enumerate([2**52, -(2**52), 0, -1, 2**52 - 1, 10**6]):
        engine.add_request(prompt(4, index), params(4), priority=priority, request_id=f"r{index}")
    engine.run()
    assert_alone(toy, engine.completions, params(4))
    if policy == "AgedPriority":
        starts = [first_step(engine.trace, f"r{index}") for index in (1, 3, 2, 5, 4, 0)]
        assert starts == sorted(starts)


@pytest.mark.parametrize("priority", [1.5, float("nan"), "high", None, True, (1,), 10**400, -(10**400)])
def test_what_is_no_priority_is_refused(priority: Any) -> None:
    for policy in ("VllmV1", "AgedPriority"):
        engine, _ = toy_engine(config(), policy)
        with pytest.raises(InvalidRequest, match=r"priority is .*; use an integer"):
            engine.add_request(prompt(4), priority=priority)
        assert not engine.has_unfinished and not engine.trace.requests


# Ten thousand clients leave


def crowd(policy: Policy | str, count: int, timeout: float | None = None) -> tuple[Engine, VirtualClock]:
    """Many requests, a pool that is too small for those that run, a small host memory and a small budget."""
    limits = replace(config(pool=160, bs=4, seqs=64, budget=200), preemption_mode="swap", num_host_blocks=40)
    clock = VirtualClock()
    engine = Engine(ScriptedExecutor(), limits, policy, clock=clock)
    for index in range(count):
        late = None if timeout is None else timeout + index * 7919 % count
        engine.add_request(
            prompt(5 + index % 40, index % 7), params(30), priority=index % 4, client=str(index % 5), timeout=late
        )
    return engine, clock


MOST_SECONDS = 20.0
"""It takes about one second; a machine may be busy. With work that grows with the square it takes minutes."""


def states(engine: Engine) -> set[str]:
    """In what states anybody is."""
    found = {request.status.value for request in engine.scheduler.requests.values()}
    if any(request.is_prefilling and request.num_computed_tokens for request in engine.scheduler.running):
        found.add("mid-chunk")
    return found


def test_ten_thousand_aborts_in_random_states_take_seconds() -> None:
    engine, _ = crowd("VllmV1", 10_000)
    draw, seen = random.Random(5), set[str]()
    names = list(engine.scheduler.requests)
    draw.shuffle(names)
    began, aborted = time.perf_counter(), 0
    for index, name in enumerate(names):
        if index % 500 == 0:
            for _ in range(6):
                engine.step()
                seen |= states(engine)
        running = engine.scheduler.running
        aborted += engine.abort(draw.choice(running).request_id if index % 12 == 0 and running else name)
    aborted += engine.abort_all()
    assert time.perf_counter() - began < MOST_SECONDS
    assert seen >= {"waiting", "running", "preempted", "swapped", "mid-chunk"}
    ends = [done.finish_reason for done in engine.completions.values()]
    assert len(ends) == 10_000 and ends.count(FinishReason.ABORT) == aborted > 9000
    assert_empty(engine)
    assert engine.scheduler.host.num_used == 0
    assert engine.generate([prompt(9)], params(3))[0].finish_reason is FinishReason.LENGTH, "and it goes on"


def test_thousands_of_aborts_from_one_callback_take_seconds() -> None:
    engine, _ = crowd("VllmV1", 0)

    def stop_all(_: TokenEvent) -> None:
        engine.abort_all()

    engine.add_request(prompt(3), params(3), request_id="first", on_event=stop_all)
    for index in range(4999):
        engine.add_request(prompt(5 + index % 40, index % 7), params(30))
    began = time.perf_counter()
    engine.step()
    assert time.perf_counter() - began < MOST_SECONDS
    assert not engine.has_unfinished and len(engine.completions) == 5000, "all in that step"
    assert_empty(engine)


def test_thousands_of_deadlines_take_seconds() -> None:
    """They pass at random moments, most of them while their request waits."""
    engine, clock = crowd("VllmV1", 5000, timeout=50.0)
    began = time.perf_counter()
    while engine.has_unfinished:
        engine.step()
        clock.advance(100.0)
    assert time.perf_counter() - began < MOST_SECONDS
    late = sum(isinstance(done.error, DeadlineExceeded) for done in engine.completions.values())
    assert late > 4500 and len(engine.completions) == 5000 and not engine._deadlines
    assert_empty(engine)


def test_aborting_what_was_never_there_ten_thousand_times_changes_nothing() -> None:
    engine, toy = toy_engine(config())
    engine.add_request(prompt(4), params(3), request_id="a")
    engine.step()
    assert not any(engine.abort(f"nobody {index}") for index in range(10_000))
    assert engine.scheduler.requests["a"].status is RequestStatus.RUNNING
    engine.run()
    assert_alone(toy, engine.completions, params(3))


# Workload files

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=True)
    | st.sampled_from(["", "x", "high", "\ud800", "r0", 10**400]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["id", "name", "x"]), inner, max_size=2)
    ),
    max_leaves=6,
)
GOOD: dict[str, Any] = {
    "contbatch_workload": 1,
    "name": "w",
    "seed": 3,
    "config": {"num_blocks": 40, "block_size": 4, "preemption_mode": "swap", "num_host_blocks": 3},
    "requests": [
        {"id": "r0", "prompt": [1, 2, 3], "max_tokens": 4, "arrival_step": 1, "priority": 1, "client": "a"},
        {"id": "r1", "prompt_len": 5, "max_tokens": None},
    ],
}
PLACES: list[tuple[str | int, ...]] = [
    *((name,) for name in GOOD),
    *(("config", name) for name in (*GOOD["config"], "watermark", "max_num_queued_reqs", "enable_prefix_caching")),
    *(("requests", 0, name) for name in (*GOOD["requests"][0], "prompt_len", "arrival_time")),
    ("requests", 0),
    ("requests", 1, "prompt_len"),
]


@given(place=st.sampled_from(PLACES), value=JSON, extra=st.sampled_from([None, None, "unknown", "arival_step"]))
@settings(max_examples=250)
def test_a_workload_file_with_anything_in_it_loads_or_is_refused(
    place: tuple[str | int, ...], value: Any, extra: str | None
) -> None:
    """Any value in any place: what is loaded can be written and read again, all else is a `TraceError`."""
    data: Any = json.loads(json.dumps(GOOD))
    inner = data
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    if extra is not None and isinstance(inner, dict):
        inner[extra] = 1
    try:
        workload = Workload.loads(json.dumps(data))
    except TraceError as error:
        assert "; use" in str(error) or "not JSON" in str(error) or "config" in str(error)
        return
    assert extra is None or not isinstance(inner, dict)
    assert Workload.loads(workload.dumps()) == workload


@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")))
@settings(max_examples=60)
def test_a_file_of_any_bytes_is_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any bytes w.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"w\.json"):
        Workload.load(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"arrival_step": -1}, "arrival_step is -1"),
        ({"arrival_time": -0.5}, "arrival_time is -0.5"),
        ({"arrival_time": float("nan")}, "arrival_time is nan"),
        ({"arrival_time": 2e9}, r"arrival_time is 2000000000\.0; use seconds from 0 to 1e9"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"priority": 0.5}, "priority is 0.5"),
        ({"client": None}, "client is None"),
        ({"request_id": 7}, "request_id is 7"),
        ({"prompt": 7}, "prompt is 7"),
        ({"prompt": ("a", "b")}, r"prompt is \('a', 'b'\)"),
    ],
)
def test_a_request_of_a_workload_is_checked_where_it_is_written(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=f"{message}.*use|{message}"):
        WorkloadRequest(**{"request_id": "r0", "prompt": (1, 2), **fields})


# Generators

ODD: list[tuple[Callable[[], Workload], str]] = [
    (lambda: mixed(True), "n is True"),
    (lambda: mixed("3"), "n is '3'"),  # type: ignore[arg-type]
    (lambda: mixed(None), "n is None"),  # type: ignore[arg-type]
    (lambda: mixed(2, prompt=(1.0, 2.0)), r"prompt is \(1\.0, 2\.0\)"),  # type: ignore[arg-type]
    (lambda: mixed(2, prompt=(True, 2)), r"prompt is \(True, 2\)"),
    (lambda: mixed(2, output=(-5, -1)), r"output is \(-5, -1\)"),
    (lambda: log_uniform(2, prompt=(0, 5)), r"prompt is \(0, 5\)"),
    (lambda: log_uniform(2, seed=1.5), "seed is 1.5"),  # type: ignore[arg-type]
    (lambda: shared_prefix(2, prefix=0), "prefix is 0"),
    (lambda: shared_prefix(2, groups=-1), "groups is -1"),
    (lambda: shared_prefix(2, vocab_size=1.5), "vocab_size is 1.5"),  # type: ignore[arg-type]
    (lambda: poisson(mixed(2), -1.0), "rate is -1.0"),
    (lambda: poisson(mixed(2), True), "rate is True"),
    (lambda: poisson(mixed(2), "often"), "rate is 'often'"),  # type: ignore[arg-type]
    (lambda: poisson(mixed(2), float("inf"), seconds=True), "rate is inf"),
    (lambda: poisson(mixed(40), 1e-9, seconds=True), "arrival_time is .*; use seconds from 0 to 1e9"),
    (lambda: bursty(mixed(2), 1, -1), "every is -1"),
    (lambda: bursty(mixed(2), 1.5, 1), "size is 1.5"),  # type: ignore[arg-type]
    (lambda: bursty(mixed(9), 1, 1e9, seconds=True), "arrival_time is .*; use seconds from 0 to 1e9"),
    (lambda: bursty(mixed(2), 1, float("nan")), "every is nan"),
]


@pytest.mark.parametrize(("make", "message"), ODD, ids=[message for _, message in ODD])
def test_an_odd_argument_of_a_generator_is_named(make: Callable[[], Workload], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: mixed(0),
        lambda: mixed(1, (1, 1), (1, 1), vocab_size=1),
        lambda: mixed(3, seed=2**200),
        lambda: log_uniform(5, (1, 1), (7, 7)),
        lambda: shared_prefix(1, prefix=1, groups=9),
        lambda: poisson(mixed(5, (1, 3), (1, 3)), 1e9),
        lambda: poisson(mixed(5, (1, 3), (1, 3)), 1e-9),
        lambda: poisson(mixed(0), 1.0, seconds=True),
        lambda: bursty(mixed(5, (1, 3), (1, 3)), 1000, 1e9),
        lambda: bursty(mixed(5, (1, 3), (1, 3)), 1, 0, seconds=True),
        lambda: bursty(poisson(mixed(5, (1, 3), (1, 3)), 3.0, seconds=True), 2, 1e9),
    ],
)
def test_an_extreme_argument_of_a_generator_gives_a_workload_that_runs(make: Callable[[], Workload]) -> None:
    workload = make()
    clock = VirtualClock()
    engine = Engine(TimedExecutor(clock), config(pool=100, mml=250, budget=250), clock=clock)
    trace = drive(engine, workload, wait=clock.advance)
    assert len(trace.finished) == len(workload.requests) and len(trace.steps) < 400
    assert Workload.loads(workload.dumps()) == workload
    assert_empty(engine)


def test_a_workload_that_the_engine_refuses_stops_with_the_name_of_the_request() -> None:
    """And what came before it can still be served."""
    requests = (WorkloadRequest("fits", (1, 2), 3), WorkloadRequest("large", tuple(prompt(60)), 300))
    engine = Engine(ScriptedExecutor(), config(pool=4, bs=4, mml=999))
    with pytest.raises(ContbatchError, match=r"request 'large': 60 prompt tokens and max_tokens=300 need 90 blocks"):
        drive(engine, Workload("w", 0, requests))
    assert [done.request_id for done in engine.run()] == ["fits"]
    assert_empty(engine)
