"""Workloads: the same on every machine, kept as data, and driven into an engine at the moments they say."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contbatch import Engine, SamplingParams, SchedulerConfig, ScriptedExecutor
from contbatch.errors import InvalidConfig, RequestTooLarge, TraceError
from contbatch.metrics import summarise
from contbatch.workload import (
    Workload,
    WorkloadRequest,
    bursty,
    drive,
    log_uniform,
    long_document,
    mixed,
    poisson,
    shared_prefix,
)
from tests.virtual import TimedExecutor, VirtualClock

GOLDEN = Path(__file__).parent / "golden"
GENERATORS: dict[str, Callable[[int], Workload]] = {
    "mixed": lambda seed: mixed(30, seed=seed),
    "log-uniform": lambda seed: log_uniform(30, seed=seed),
    "shared-prefix": lambda seed: shared_prefix(30, groups=3, seed=seed),
    "long-document": lambda seed: long_document(seed=seed),
    "poisson": lambda seed: poisson(mixed(30, seed=seed), 0.4),
    "poisson in seconds": lambda seed: poisson(mixed(30, seed=seed), 12.5, seconds=True),
    "bursty": lambda seed: bursty(mixed(30, seed=seed), size=4, every=7),
}


def lengths(workload: Workload) -> list[tuple[int, int | None]]:
    return [(len(request.prompt), request.max_tokens) for request in workload.requests]


# Drawing


@pytest.mark.parametrize("name", GENERATORS)
def test_a_seed_gives_the_same_workload_and_another_seed_another(name: str) -> None:
    assert GENERATORS[name](7) == GENERATORS[name](7)
    assert GENERATORS[name](7).requests != GENERATORS[name](8).requests


def test_workloads_are_the_same_on_every_machine() -> None:
    text = "".join(generator(3).dumps() for generator in GENERATORS.values())
    assert hashlib.sha256(text.encode()).hexdigest()[:12] == "d86265fad9d5"


@given(st.integers(0, 99), st.integers(1, 30), st.integers(0, 50), st.integers(1, 9), st.integers(0, 9))
def test_lengths_stay_within_their_range(seed: int, low: int, more: int, out: int, more_out: int) -> None:
    prompt, output = (low, low + more), (out, out + more_out)
    for generator in (mixed, log_uniform):
        workload = generator(12, prompt, output, seed=seed, vocab_size=5)
        assert len(workload.requests) == 12
        for request in workload.requests:
            assert prompt[0] <= len(request.prompt) <= prompt[1]
            assert request.max_tokens is not None and output[0] <= request.max_tokens <= output[1]
            assert all(isinstance(token, int) and 0 <= token < 5 for token in request.prompt)


def test_both_ends_of_a_range_are_drawn() -> None:
    assert {size for size, _ in lengths(mixed(80, (1, 4), (2, 2)))} == {1, 2, 3, 4}
    assert {size for size, _ in lengths(log_uniform(80, (1, 4), (2, 2)))} == {1, 2, 3, 4}


def test_log_uniform_lengths_are_as_often_in_each_decade() -> None:
    sizes = [size for size, _ in lengths(log_uniform(400, (1, 999), (1, 1)))]
    decades = [sum(10**d <= size < 10 ** (d + 1) for size in sizes) for d in range(3)]
    assert sum(decades) == 400 and all(abs(count - 400 / 3) < 40 for count in decades)


def test_shared_prefix_chats_share_their_systems_prompt_in_turn() -> None:
    workload = shared_prefix(6, prefix=32, question=(4, 9), groups=2)
    starts = [request.prompt[:32] for request in workload.requests]
    assert starts[0] == starts[2] == starts[4] != starts[1] == starts[3] == starts[5]
    assert len({request.prompt for request in workload.requests}) == 6
    served = Engine(ScriptedExecutor(), SchedulerConfig(max_num_batched_tokens=512, block_size=16))
    metrics = summarise(drive(served, workload))
    assert [r.cached_tokens for r in metrics.requests.values()] == [0, 0, 32, 32, 32, 32]


def test_a_long_document_arrives_among_chats() -> None:
    workload = long_document(chats=3, prompt=5, output=20, document=50, answer=7, arrival_step=4)
    assert lengths(workload) == [(5, 20)] * 3 + [(50, 7)]
    assert [request.arrival_step for request in workload.requests] == [0, 0, 0, 4]
    assert workload.requests[-1].request_id == "document"


def test_poisson_gaps_have_the_mean_and_the_spread_of_their_rate() -> None:
    times = [request.arrival_time or 0.0 for request in poisson(mixed(2000, (1, 1)), 4.0, seconds=True).requests]
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    assert min(gaps) >= 0 and mean == pytest.approx(1 / 4, rel=0.06)
    assert math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) == pytest.approx(1 / 4, rel=0.1)


def test_bursts_come_together() -> None:
    workload = bursty(mixed(5), size=2, every=10)
    assert [request.arrival_step for request in workload.requests] == [0, 0, 10, 10, 20]
    timed = bursty(workload, size=3, every=0.5, seconds=True)
    assert [(request.arrival_step, request.arrival_time) for request in timed.requests] == [(0, 0.0)] * 3 + [
        (0, 0.5)
    ] * 2
    assert lengths(timed) == lengths(mixed(5))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mixed(-1), "n is -1"),
        (lambda: mixed(2.5), "n is 2.5"),  # type: ignore[arg-type]
        (lambda: mixed(2, prompt=(9, 3)), r"prompt is \(9, 3\)"),
        (lambda: mixed(2, output=(0, 3)), r"output is \(0, 3\)"),
        (lambda: mixed(2, seed=-1), "seed is -1"),
        (lambda: mixed(2, vocab_size=0), "vocab_size is 0"),
        (lambda: shared_prefix(2, groups=0), "groups is 0"),
        (lambda: long_document(document=0), "document is 0"),
        (lambda: long_document(arrival_step=-3), "arrival_step is -3"),
        (lambda: poisson(mixed(2), 0), "rate is 0"),
        (lambda: poisson(mixed(2), float("nan")), "rate is nan"),
        (lambda: poisson(mixed(2), 1e-320), "rate is 1e-320"),
        (lambda: bursty(mixed(2), 0, 1), "size is 0"),
        (lambda: bursty(mixed(2), 1, float("inf")), "every is inf"),
    ],
)
def test_a_generator_names_what_it_cannot_draw(make: Callable[[], Workload], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        make()


# Data


@given(st.sampled_from(sorted(GENERATORS)), st.integers(0, 20))
def test_what_is_written_is_read(name: str, seed: int) -> None:
    workload = replace(GENERATORS[name](seed), config=SchedulerConfig(num_blocks=77) if seed % 2 else None)
    assert Workload.loads(workload.dumps()) == workload


def test_texts_priorities_and_clients_survive_a_file(tmp_path: Path) -> None:
    requests = (
        WorkloadRequest("a", 'one "quoted" </script> \u00fc', None, 3, priority=0, client="x"),
        WorkloadRequest("b", (1, 2), 4),
    )
    workload = Workload("w", 5, requests)
    workload.save(tmp_path / "w.json")
    assert Workload.load(tmp_path / "w.json") == workload
    assert json.loads((tmp_path / "w.json").read_text())["requests"][1]["id"] == "b"


def test_recorded_workloads_are_read_with_one_block_less_and_seeded_prompts() -> None:
    stall = Workload.load(GOLDEN / "workloads.json", "stall")
    assert stall.config is not None and stall.config.num_blocks == 399
    assert lengths(stall) == [(20, 60)] * 8 + [(2000, 20)]
    assert stall.requests[-1].arrival_step == 10
    assert stall == Workload.load(GOLDEN / "workloads.json", "stall")
    assert len({request.prompt for request in stall.requests}) == 9


@pytest.mark.parametrize(
    ("name", "steps", "tokens", "preemptions", "gap"), [("stall", 60, 2651, 0, 1), ("squeeze", 233, 2098, 6, 106)]
)
def test_recorded_workloads_run_as_on_vllm(name: str, steps: int, tokens: int, preemptions: int, gap: int) -> None:
    """Steps, tokens computed and preemptions of vLLM v1 on these two workloads."""
    workload = Workload.load(GOLDEN / "workloads.json", name)
    metrics = summarise(drive(Engine(ScriptedExecutor(), workload.config), workload))
    assert (metrics.num_steps, metrics.computed_tokens, metrics.preemptions) == (steps, tokens, preemptions)
    assert metrics.steps.itl.max == gap
    ideal = sum(len(r.prompt) + (r.max_tokens or 0) - 1 for r in workload.requests)
    assert metrics.recomputed_tokens == tokens - ideal


def as_json(**changes: Any) -> str:
    request = {"id": "r0", "prompt": [1, 2], "max_tokens": 4} | changes
    return json.dumps({"requests": [{k: v for k, v in request.items() if v != "absent"}]})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ('{"requests": [', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", r"workload is \[1\]; use a JSON object"),
        ('{"name": "w"}', "requests is None"),
        ('{"requests": {}}', "requests is {}"),
        ('{"requests": [], "sede": 3}', "sede is 3; use only the fields"),
        ('{"requests": [], "seed": "x"}', "seed is 'x'"),
        ('{"requests": [], "name": 4}', "name is 4"),
        ('{"requests": [], "contbatch_workload": 2}', "contbatch_workload is 2"),
        ('{"requests": [], "config": {"blocks": 4}}', "blocks is 4; use only the fields"),
        ('{"requests": [], "config": {"num_blocks": 0}}', "num_blocks is 0"),
        ('{"requests": [], "config": []}', r"config is \[\]"),
        ('{"requests": [7]}', r"requests\[0\]: request is 7"),
        ('{"workloads": 3}', "workloads is not a list"),
        ('{"workloads": [{"name": "a"}, {"name": "b"}]}', "name is None; the file has a, b"),
        (as_json(arival_step=3), r"requests\[0\]: arival_step is 3; use only the fields"),
        (as_json(arrival_step=-1), "arrival_step is -1"),
        (as_json(arrival_step=1.5), "arrival_step is 1.5"),
        (as_json(arrival_step=True), "arrival_step is True"),
        (as_json(arrival_time=-0.5), "arrival_time is -0.5"),
        (as_json(arrival_time=float("nan")), "arrival_time is nan"),
        (as_json(arrival_time=float("inf")), "arrival_time is inf"),
        (as_json(arrival_time=1e300), r"arrival_time is 1e\+300; use seconds from 0 to 1e9"),
        (as_json(arrival_time=10**400), r"arrival_time is 1000.*\.\.\.; use"),
        (as_json(arrival_time="soon"), "arrival_time is 'soon'"),
        (as_json(arrival_time=1.0, arrival_step=2), "arrival_step is 2"),
        (as_json(id=""), "request_id is ''"),
        (as_json(id="absent"), "id is 'missing'"),
        (as_json(prompt="absent"), "prompt is 'missing'"),
        (as_json(prompt=[]), r"prompt is \(\)"),
        (as_json(prompt=""), "prompt is ''"),
        (as_json(prompt=[1, -2]), r"prompt is \(1, -2\)"),
        (as_json(prompt=[1, "x"]), r"prompt is \(1, 'x'\)"),
        (as_json(prompt={"a": 1}), "prompt is {'a': 1}"),
        (as_json(prompt_len=3), "use prompt or prompt_len, not both"),
        (as_json(prompt="absent", prompt_len=0), "prompt_len is 0"),
        (as_json(prompt="absent", prompt_len=10**12), "prompt_len is 1000000000000"),
        (as_json(max_tokens=0), "max_tokens is 0"),
        (as_json(max_tokens="many"), "max_tokens is 'many'"),
        (as_json(priority="high"), "priority is 'high'"),
        (as_json(client=4), "client is 4"),
    ],
)
def test_a_file_that_is_wrong_names_the_field_and_the_value(text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        Workload.loads(text)


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "w.json").write_bytes(b"\xff\xfe\x00")
    for name in ("w.json", "nothing.json"):
        with pytest.raises(TraceError, match="cannot be read as a workload"):
            Workload.load(tmp_path / name)
    with pytest.raises(TraceError, match="name is 'stal'; the file has stall, squeeze"):
        Workload.load(GOLDEN / "workloads.json", "stal")


def test_ids_are_used_once_and_clocks_are_not_mixed() -> None:
    request = WorkloadRequest("a", (1,))
    with pytest.raises(InvalidConfig, match="request_id is 'a'; use each id once"):
        Workload("w", 0, (request, request))
    with pytest.raises(InvalidConfig, match="arrival steps for all of them, or arrival times for all"):
        Workload("w", 0, (request, replace(request, request_id="b", arrival_time=0.0)))


# Driving


def arriving(*steps: int, max_tokens: int = 2) -> Workload:
    requests = (WorkloadRequest(f"r{i}", (1, 2), max_tokens, step) for i, step in enumerate(steps))
    return Workload("w", 0, tuple(requests))


def test_a_request_is_added_before_the_step_of_its_arrival() -> None:
    trace = drive(Engine(ScriptedExecutor()), arriving(0, 3, 1, max_tokens=6))
    assert {name: record.arrival_step for name, record in trace.requests.items()} == {"r0": 0, "r2": 1, "r1": 3}
    assert [list(step.admitted) for step in trace.steps[:4]] == [["r0"], ["r2"], [], ["r1"]]


def test_equal_arrivals_keep_the_order_of_the_list() -> None:
    trace = drive(Engine(ScriptedExecutor()), arriving(2, 0, 2, 0, 2))
    assert list(trace.requests) == ["r1", "r3", "r0", "r2", "r4"]


def test_steps_in_which_there_is_nothing_to_do_are_skipped() -> None:
    trace = drive(Engine(ScriptedExecutor()), arriving(5, 10**12, 10**12 + 1))
    assert [step.request_ids for step in trace.steps] == [["r0"], ["r0"], ["r1"], ["r1", "r2"], ["r2"]]
    assert len(trace.finished) == 3


def test_a_second_workload_counts_its_steps_from_its_own_start() -> None:
    served = Engine(ScriptedExecutor())
    drive(served, arriving(0))
    later = Workload("v", 0, tuple(replace(r, request_id=f"v{i}") for i, r in enumerate(arriving(0, 1).requests)))
    trace = drive(served, later)
    assert {name: record.arrival_step for name, record in trace.requests.items()} == {"r0": 0, "v0": 2, "v1": 3}


def test_what_the_engine_still_has_to_do_is_served_too() -> None:
    served = Engine(ScriptedExecutor())
    served.add_request([1, 2], SamplingParams(max_tokens=4), request_id="before")
    served.step()
    trace = drive(served, arriving(0, 2))
    assert [step.request_ids for step in trace.steps[:4]] == [
        ["before"],
        ["before", "r0"],
        ["before", "r0"],
        ["before", "r1"],
    ]
    assert len(trace.finished) == 3


def test_sampling_applies_to_all_and_max_tokens_to_each() -> None:
    executor = ScriptedExecutor(script=lambda _, position: position)
    requests = (WorkloadRequest("a", (1,), 9), WorkloadRequest("b", (1, 1), 2, priority=0, client="x"))
    served = Engine(executor)
    trace = drive(served, Workload("w", 0, requests), SamplingParams(max_tokens=50, stop_token_ids=(4,)))
    assert {name: done.token_ids for name, done in served.completions.items()} == {"a": (1, 2, 3, 4), "b": (2, 3)}
    assert (trace.requests["b"].priority, trace.requests["b"].client) == (0, "x")


def timed(*seconds: float, max_tokens: int = 2) -> Workload:
    requests = (WorkloadRequest(f"r{i}", (1, 2), max_tokens, arrival_time=s) for i, s in enumerate(seconds))
    return Workload("w", 0, tuple(requests))


def test_a_request_is_added_when_its_time_has_come_and_waits_from_then() -> None:
    clock = VirtualClock(1000.0)
    served = Engine(TimedExecutor(clock), clock=clock)
    clock.advance(5.0)
    metrics = summarise(drive(served, timed(0.0, 1.25, 20.5, max_tokens=3), wait=clock.advance))
    times = {name: (r.seconds.arrival, r.seconds.queue_time, r.seconds.ttft) for name, r in metrics.requests.items()}
    assert times == {"r0": (5.0, 0, 1), "r1": (6.25, 0.75, 1.75), "r2": (25.5, 0, 1)}
    assert [r.steps.arrival for r in metrics.requests.values()] == [0, 2, 5]


@given(st.lists(st.floats(0, 1e5, allow_subnormal=False), max_size=8), st.sampled_from([0.0, 0.1, 1e9 + 0.3]))
def test_any_times_are_served_in_order_and_never_before_they_come(seconds: list[float], start: float) -> None:
    clock = VirtualClock(start)
    served = Engine(TimedExecutor(clock), clock=clock)
    metrics = summarise(drive(served, timed(*seconds), wait=clock.advance))
    assert metrics.completed == len(seconds)
    arrivals = [r.seconds.arrival for r in metrics.requests.values()]
    assert arrivals == sorted(arrivals)
    for request in metrics.requests.values():
        assert request.seconds.arrival == pytest.approx(seconds[int(request.request_id[1:])], abs=2e-6)
        assert request.seconds.queue_time is not None and 0 <= request.seconds.queue_time <= 1.0 + 2e-6


def test_a_clock_that_stands_still_is_an_error_and_not_an_endless_loop() -> None:
    clock = VirtualClock()
    served = Engine(TimedExecutor(clock), clock=clock)
    with pytest.raises(InvalidConfig, match=r"wait\(7.000000\) did not move the engine's clock"):
        drive(served, timed(7.0), wait=lambda _: None)


def test_a_refused_request_leaves_those_before_it_in_the_engine() -> None:
    served = Engine(ScriptedExecutor(), SchedulerConfig(max_model_len=8))
    workload = Workload("w", 0, (WorkloadRequest("a", (1,), 2), WorkloadRequest("b", (1,) * 9, 2)))
    with pytest.raises(RequestTooLarge, match="'b'"):
        drive(served, workload)
    assert [done.request_id for done in served.run()] == ["a"]


def test_an_empty_workload_runs_no_step() -> None:
    assert drive(Engine(ScriptedExecutor()), mixed(0)).steps == []
