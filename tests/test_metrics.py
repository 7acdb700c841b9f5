"""Metrics: every number is defined by the moments of a trace, exists or is None, and never divides by zero."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contbatch import Engine, SamplingParams, SchedulerConfig, StaticBatching, Trace
from contbatch.errors import InvalidConfig, TraceError
from contbatch.metrics import Distribution, Metrics, Slo, Timeline, goodput, percentile, summarise, within
from contbatch.trace import FinishRecord, RequestRecord, StepRecord
from tests.virtual import TimedExecutor, VirtualClock


def engine(
    durations: Sequence[float] = (1.0,), policy: Any = "VllmV1", eos: Sequence[int] = (), **limits: Any
) -> Engine:
    clock = VirtualClock()
    executor = TimedExecutor(clock, durations, eos_token_ids=eos)
    return Engine(executor, SchedulerConfig(**limits), policy, clock=clock)


def add(served: Engine, name: str, prompt: int, output: int, first_token: int = 0) -> None:
    tokens = [first_token + i for i in range(prompt)]
    served.add_request(tokens, SamplingParams(max_tokens=output), request_id=name)


def hand_made(tokens_at: dict[str, Sequence[float]], end: dict[str, float] | None = None) -> Trace:
    """Requests that arrive at 0 and get a token at the given seconds; one step for each moment."""
    trace = Trace()
    for name in tokens_at:
        trace.requests[name] = RequestRecord(name, 1, 100, 0, 0, 0.0)
    moments = sorted({moment for times in tokens_at.values() for moment in times})
    for index, moment in enumerate(moments):
        names = [name for name, times in tokens_at.items() if moment in times]
        step = StepRecord(index, start=moment - 1, end=moment, request_ids=names, kinds="D" * len(names))
        step.starts, step.counts = [index] * len(names), [1] * len(names)
        step.sampled = dict.fromkeys(names, 7)
        trace.steps.append(step)
    for name, times in tokens_at.items():
        finished = (end or {}).get(name, times[-1])
        trace.finished[name] = FinishRecord("length", moments.index(times[-1]) + 1, finished, len(times))
    return trace


# Definitions


def test_tpot_divides_by_the_gaps_and_not_by_the_tokens() -> None:
    request = summarise(hand_made({"A": [10, 11, 12]})).requests["A"]
    assert request.seconds.ttft == 10
    assert request.seconds.tpot == 1.0
    assert request.seconds.itl == (1, 1)
    assert request.seconds.e2e == 12


def test_one_token_has_no_tpot_and_the_mean_leaves_it_out() -> None:
    metrics = summarise(hand_made({"one": [1], "five": [2, 4, 5, 6, 14]}))
    five = metrics.requests["five"].seconds
    assert metrics.requests["one"].seconds.tpot is None
    assert metrics.requests["one"].seconds.longest_gap is None
    assert five.e2e is not None and five.ttft is not None and five.tpot == (five.e2e - five.ttft) / 4 == 3
    assert metrics.seconds.tpot == Distribution(1, 3, 3, 3, 3, 3)
    assert five.longest_gap == 8
    assert metrics.requests["five"].steps.longest_gap == 1


def test_values_that_do_not_exist_are_shown_as_such() -> None:
    metrics = summarise(hand_made({"one": [1], "other": [1]}))
    assert metrics.seconds.tpot == Distribution(0, None, None, None, None, None)
    totals = dict(metrics.totals())
    assert totals["TPOT (s)"] == totals["ITL (s)"] == totals["blocks used"].split(",")[0].removeprefix("mean ") == "n/a"
    assert totals["token budget used"] == "n/a"
    assert metrics.table()[1][5] == "n/a"


def test_a_chunked_prompt_gets_its_first_token_with_its_last_chunk() -> None:
    served = engine(max_num_batched_tokens=4)
    add(served, "A", prompt=10, output=2)
    assert [len(served.step()) for _ in range(3)] == [0, 0, 1]
    request = summarise(served.trace).requests["A"]
    assert request.steps.ttft == request.seconds.ttft == 3
    assert request.steps.queue_time == request.seconds.queue_time == 0


def test_queue_time_ends_with_the_first_computation_and_is_part_of_ttft() -> None:
    served = engine(durations=(2.0,), max_num_seqs=1)
    add(served, "A", prompt=4, output=3)
    add(served, "B", prompt=4, output=1)
    served.run()
    request = summarise(served.trace).requests["B"]
    assert (request.steps.queue_time, request.steps.ttft, request.steps.e2e) == (3, 4, 4)
    assert (request.seconds.queue_time, request.seconds.ttft, request.seconds.e2e) == (6, 8, 8)


def test_requests_that_end_without_a_token_give_no_sample() -> None:
    served = engine(max_num_seqs=19, max_num_batched_tokens=19 * 8)
    for i in range(20):
        add(served, f"r{i}", prompt=9 if i == 0 else 8, output=4, first_token=100 * i)
    served.step()
    served.abort("r18")
    served.abort("r19")
    served.run()
    metrics = summarise(served.trace)
    assert metrics.seconds.ttft.count == metrics.completed == 18
    assert metrics.aborted == 2
    assert metrics.seconds.e2e.count == 18


def test_aborted_before_the_first_token_but_after_computation_has_a_queue_time_only() -> None:
    served = engine(max_num_batched_tokens=4, max_num_seqs=1)
    add(served, "ran", prompt=10, output=4)
    add(served, "never", prompt=10, output=4)
    served.step()
    served.abort_all()
    requests = summarise(served.trace).requests
    assert requests["ran"].seconds.queue_time == 0
    assert requests["never"].seconds.queue_time is None
    for request in requests.values():
        assert request.seconds.ttft is None and request.seconds.tpot is None and request.seconds.itl == ()
        assert request.seconds.e2e == 1 and request.steps.e2e == 1
        assert request.finish_reason == "abort" and not request.completed


def test_outcomes_are_counted_apart_and_output_is_that_of_completed_requests() -> None:
    served = engine(eos=(1,), max_num_seqs=8)
    for name, output in (("A", 3), ("B", 4), ("C", 5), ("gone", 9)):
        add(served, name, prompt=4, output=output)

    def fail(_: object) -> None:
        raise RuntimeError("the client hung up")

    served.add_request([1, 2], SamplingParams(max_tokens=9), request_id="bad", on_event=fail)
    with pytest.raises(ValueError, match="max_tokens"):
        served.add_request([1], SamplingParams(max_tokens=0))
    served.step()
    served.step()
    served.abort("gone")
    assert summarise(served.trace).unfinished == 3
    served.run()
    metrics = summarise(served.trace)
    assert (metrics.completed, metrics.aborted, metrics.failed, metrics.unfinished) == (3, 1, 1, 0)
    assert metrics.output_tokens == 3 + 4 + 5
    assert metrics.emitted_tokens == 3 + 4 + 5 + 2 + 1
    assert metrics.steps.output_throughput == 12 / 5
    assert metrics.steps.total_throughput == (12 + 3 * 4) / 5


def test_an_end_of_sequence_token_is_counted_and_the_rest_of_max_tokens_is_not() -> None:
    clock = VirtualClock()
    executor = TimedExecutor(clock, script={"A": [5, 6, 7, 8, 1]}, eos_token_ids=(1,))
    served = Engine(executor, clock=clock)
    add(served, "A", prompt=4, output=100)
    served.run()
    request = summarise(served.trace).requests["A"]
    assert request.num_output_tokens == 5 and request.finish_reason == "eos" and request.completed


def test_without_a_limit_a_request_fills_the_model() -> None:
    served = engine(max_model_len=256)
    served.add_request(list(range(151)), SamplingParams(max_tokens=None), request_id="A")
    served.run()
    assert summarise(served.trace).requests["A"].num_output_tokens == 105


# Tokens


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")


def test_tokens_are_counted_also_while_their_text_is_held_back() -> None:
    said = "aé€ENDxx".encode()
    clock = VirtualClock()
    served = Engine(TimedExecutor(clock, script={"A": said}), tokenizer=Bytes(), clock=clock)
    served.add_request("hi", SamplingParams(max_tokens=len(said), stop="END?"), request_id="A")
    events = []
    while served.has_unfinished:
        events += served.step()
        assert summarise(served.trace).emitted_tokens == len(events)
    assert len(said) > sum(event.text != "" for event in events)
    assert len(served.completions["A"].token_ids) == len(said) == summarise(served.trace).output_tokens


def test_every_emitted_token_is_counted_once_after_every_step() -> None:
    served = engine(max_num_seqs=4, num_blocks=10, block_size=4, max_num_batched_tokens=16)
    for i in range(6):
        add(served, f"r{i}", prompt=5 + i, output=12, first_token=50 * i)
    emitted = 0
    while served.has_unfinished:
        emitted += sum(event.token_id is not None for event in served.step())
        live = sum(request.num_output_tokens for request in served.scheduler.requests.values())
        done = sum(len(completion.token_ids) for completion in served.completions.values())
        assert summarise(served.trace).emitted_tokens == emitted == live + done
    assert summarise(served.trace).preemptions > 0


def test_own_blocks_found_again_are_not_prefix_hits() -> None:
    served = engine(num_blocks=9, block_size=4)
    add(served, "A", prompt=8, output=12)
    add(served, "B", prompt=8, output=16, first_token=100)
    served.run()
    metrics = summarise(served.trace)
    assert metrics.preemptions > 0
    assert metrics.prefix_hit_rate == 0
    assert [r.recovered_tokens for r in metrics.requests.values()] == [0, 16]
    assert all(r.cached_tokens == 0 for r in metrics.requests.values())


def test_the_hit_rate_is_the_share_of_prompt_tokens_that_were_cached() -> None:
    served = engine(block_size=4)
    add(served, "first", prompt=10, output=2)
    served.run()
    add(served, "again", prompt=10, output=2)
    served.run()
    metrics = summarise(served.trace)
    assert [r.cached_tokens for r in metrics.requests.values()] == [0, 8]
    assert metrics.prefix_hit_rate == 8 / 20
    assert metrics.prefill_tokens == 12


def test_only_tokens_below_the_high_water_mark_are_computed_again() -> None:
    trace = hand_made({"A": [1, 2, 3]})
    chunks = [(0, 8, "P"), (0, 5, "R"), (5, 5, "R")]  # the last chunk goes two tokens beyond the mark of 8
    for step, (start, count, kind) in zip(trace.steps, chunks, strict=True):
        step.starts, step.counts, step.kinds = [start], [count], kind
    trace.steps[1].preempted = ["A"]
    request = summarise(trace).requests["A"]
    assert (request.prefill_tokens, request.decode_tokens, request.recomputed_tokens) == (10, 0, 8)
    assert request.num_preemptions == 1


def test_use_of_budget_and_blocks_is_a_share_of_what_was_there() -> None:
    served = engine(max_num_batched_tokens=8, num_blocks=10, block_size=4)
    add(served, "A", prompt=12, output=2)
    served.run()
    metrics = summarise(served.trace)
    assert metrics.budget_utilisation == (8 + 4 + 1) / 24
    used = [2, 3, 4]  # 8, 12 and 13 tokens in blocks of 4
    assert metrics.cache_utilisation == pytest.approx(sum(used) / 30)
    assert metrics.peak_cache_utilisation == 4 / 10


def test_steps_without_a_token_budget_have_no_budget_utilisation() -> None:
    served = engine(policy=StaticBatching(2))
    for name in "ABC":
        add(served, name, prompt=3, output=2)
    served.run()
    assert summarise(served.trace).budget_utilisation is None
    served.trace.steps[0].budget = 12
    assert summarise(served.trace).budget_utilisation == 6 / 12


# Statistics


def test_percentiles_are_interpolated_linearly() -> None:
    assert percentile([20, 1, 10, 2], 50) == 6
    assert percentile([3], 99) == 3
    assert percentile([], 50) is None
    with pytest.raises(InvalidConfig, match="percent is 101"):
        percentile([1], 101)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.sampled_from([0, 50, 90, 99, 100]))
def test_percentiles_equal_numpys(values: list[float], percent: int) -> None:
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))


def test_goodput_counts_completed_requests_within_every_limit() -> None:
    metrics = summarise(hand_made({"fast": [1, 2, 3], "late": [8, 9, 10], "stalls": [1, 2, 10], "one": [2]}))
    assert within(metrics, Slo()) == ["fast", "late", "stalls", "one"]
    assert within(metrics, Slo(ttft=2)) == ["fast", "stalls", "one"]
    assert within(metrics, Slo(ttft=2, longest_gap=7)) == ["fast", "one"]
    assert within(metrics, Slo(tpot=1)) == ["fast", "late", "one"]
    assert within(metrics, Slo(e2e=3)) == ["fast", "one"]
    assert goodput(metrics, Slo(ttft=2)) == 3 / 10
    assert goodput(metrics, Slo(ttft=2), steps=True) == 3 / 6
    assert goodput(summarise(Trace()), Slo()) is None


def test_an_aborted_request_is_never_good() -> None:
    trace = hand_made({"A": [1, 2]})
    trace.finished["A"].reason = "abort"
    assert within(summarise(trace), Slo()) == []


@pytest.mark.parametrize("limit", [-1, float("nan"), "fast", True])
def test_a_limit_that_is_no_time_is_refused(limit: Any) -> None:
    with pytest.raises(InvalidConfig, match=f"ttft is {limit!r}"):
        Slo(ttft=limit)


# Rule 10, on any run


@st.composite
def runs(draw: st.DrawFn) -> Trace:
    """A run with small limits, odd durations, late arrivals and aborts; perhaps looked at before its end."""
    durations = draw(st.lists(st.sampled_from([0.0, 1e-9, 0.03, 0.7, 1.0, 12.5]), min_size=1, max_size=5))
    served = engine(
        durations,
        eos=(1003, 1011),
        max_num_seqs=draw(st.integers(1, 4)),
        max_num_batched_tokens=draw(st.integers(1, 20)),
        block_size=4,
        num_blocks=draw(st.integers(8, 20)),
        enable_prefix_caching=draw(st.booleans()),
    )
    for i in range(draw(st.integers(0, 7))):
        add(
            served,
            f"r{i}",
            draw(st.integers(1, 16)),
            draw(st.integers(1, 16)),
            first_token=draw(st.sampled_from([0, 40])),
        )
        for _ in range(draw(st.integers(0, 3))):
            served.step()
        if draw(st.integers(0, 5)) == 0:
            served.abort(f"r{i}")
    served.run(max_steps=draw(st.sampled_from([0, 3, None])))
    return served.trace


def ordered(*moments: float | None) -> bool:
    known = [moment for moment in moments if moment is not None]
    return known == sorted(known)


@given(runs())
def test_times_of_any_run_are_ordered_and_no_time_is_lost(trace: Trace) -> None:
    metrics = summarise(trace)
    for request in metrics.requests.values():
        for times in (request.steps, request.seconds):
            assert ordered(0, times.queue_time, times.ttft, times.e2e)
            assert ordered(times.arrival, times.start, *times.tokens, times.end)
            assert (times.tpot is None) == (request.num_output_tokens < 2) == (times.itl == ())
            if times.tpot is not None and times.ttft is not None:
                through = times.ttft + times.tpot * (request.num_output_tokens - 1)
                assert through == pytest.approx(times.tokens[-1] - times.arrival)
                assert through == pytest.approx(times.ttft + sum(times.itl))
        if request.completed:
            assert request.steps.end == request.steps.tokens[-1]
            assert request.seconds.end == request.seconds.tokens[-1]
        finish = trace.finished.get(request.request_id)
        if finish is not None:
            assert len(request.seconds.tokens) == len(request.steps.tokens) == finish.num_output_tokens


@given(runs())
def test_tokens_of_any_run_add_up(trace: Trace) -> None:
    metrics = summarise(trace)
    assert metrics.computed_tokens == sum(step.num_tokens for step in trace.steps)
    assert metrics.decode_tokens == sum(step.decode_tokens for step in trace.steps)
    assert metrics.emitted_tokens == sum(len(step.sampled) for step in trace.steps)
    assert metrics.preemptions == sum(len(step.preempted) for step in trace.steps)
    if metrics.preemptions == 0:
        assert metrics.recomputed_tokens == 0
    for request in metrics.requests.values():
        new = request.prefill_tokens + request.decode_tokens
        known = request.num_prompt_tokens + max(0, request.num_output_tokens - 1)
        if request.completed:  # each position but the last token's was computed, or its blocks were found
            assert new <= known <= new + request.cached_tokens + request.recovered_tokens


@given(runs())
def test_rates_and_shares_of_any_run_are_possible(trace: Trace) -> None:
    metrics = summarise(trace)
    for service in (metrics.steps, metrics.seconds):
        assert service.duration >= 0
        assert (service.output_throughput is None) == (service.duration == 0)
        if service.output_throughput is not None and service.peak_throughput is not None:
            assert service.peak_throughput >= metrics.emitted_tokens / service.duration >= service.output_throughput
            assert math.isfinite(service.peak_throughput)
        for name in ("queue_time", "ttft", "tpot", "itl", "e2e"):
            spread: Distribution = getattr(service, name)
            assert ordered(0, spread.p50, spread.p90, spread.p99, spread.max)
    for share in (metrics.budget_utilisation, metrics.cache_utilisation, metrics.prefix_hit_rate):
        assert share is None or 0 <= share <= 1
    assert ordered(metrics.cache_utilisation, metrics.peak_cache_utilisation, 1)


@given(runs())
def test_any_run_prints_itself_and_the_same_after_saving(trace: Trace) -> None:
    metrics = summarise(trace)
    assert metrics == summarise(Trace.loads(trace.dumps()))
    for steps in (True, False):
        assert "nan" not in metrics.text(steps)
        assert {len(row) for row in metrics.table(steps)} == {12}


def test_one_second_of_a_run_is_never_slower_than_the_whole_run() -> None:
    trace = hand_made({"A": [0.1, 0.2, 0.3], "B": [0.3]})
    assert summarise(trace).seconds.peak_throughput == summarise(trace).seconds.output_throughput == 4 / 0.3
    halves = summarise(hand_made({"A": [0.1, 0.2, 1.5]})).seconds  # two parts of 0.75 s
    assert halves.peak_throughput == 2 / 0.75
    late = summarise(hand_made({"A": [0.5, 3.1, 3.2, 3.3, 4]}))
    assert late.seconds.peak_throughput == 4
    assert late.steps.peak_throughput == 1


# Text


def test_an_empty_trace_has_metrics() -> None:
    metrics = summarise(Trace())
    assert (metrics.num_steps, metrics.completed, metrics.computed_tokens) == (0, 0, 0)
    assert metrics.prefix_hit_rate is metrics.budget_utilisation is metrics.cache_utilisation is None
    assert metrics.seconds.output_throughput is metrics.steps.peak_throughput is None
    assert "n/a" in repr(metrics) and "n/a" in metrics.text() and "<table>" in metrics._repr_html_()


def two_requests(duration: float) -> Metrics:
    served = engine(durations=(duration,), max_num_batched_tokens=6, policy="VllmV1")
    add(served, "A", prompt=4, output=3)
    add(served, "<b>&B", prompt=8, output=1)
    served.run()
    return summarise(served.trace)


def test_what_a_notebook_shows_does_not_depend_on_the_clock() -> None:
    slow, fast = two_requests(0.37), two_requests(0.002)
    assert slow != fast and slow.text() != fast.text()
    assert repr(slow) == repr(fast) == slow.text(steps=True)
    assert slow._repr_html_() == fast._repr_html_()
    assert repr(slow.requests) == repr(fast.requests)


def test_the_table_reads_like_a_table() -> None:
    assert two_requests(0.5).text(steps=True).splitlines()[:8] == [
        "request  prompt  output  queue (steps)  TTFT (steps)  TPOT (steps)  longest gap (steps)  E2E (steps)"
        "  preempted  cached  recomputed  finish",
        "A             4       3              0             1             1                    1            3"
        "          0       0           0  length",
        "<b>&B         8       1              0             3           n/a                  n/a            3"
        "          0       0           0  length",
        "",
        "requests            2 completed, 0 aborted, 0 failed",
        "steps               3",
        "output tokens       4, 1.33 per step",
        "tokens computed     14: 12 prefill, 2 decode, 0 computed again",
    ]
    assert two_requests(0.5).table()[2][3:8] == ["0.000", "1.500", "n/a", "n/a", "1.500"]
    assert dict(two_requests(0.5).totals())["TTFT (s)"] == "mean 1.000, p50 1.000, p90 1.400, p99 1.490"


def test_a_request_id_with_markup_is_shown_as_text() -> None:
    page = two_requests(1)._repr_html_()
    assert "&lt;b&gt;&amp;B" in page and "<b>" not in page


def test_a_trace_that_speaks_of_unknown_requests_is_refused() -> None:
    trace = hand_made({"A": [1]})
    trace.steps[0].sampled["ghost"] = 1
    with pytest.raises(TraceError, match="step 0 speaks of 'ghost'"):
        summarise(trace)


def test_a_timeline_without_anything_has_no_times() -> None:
    times = Timeline(3, None, (), None)
    assert times.queue_time is times.ttft is times.tpot is times.longest_gap is times.e2e is None
