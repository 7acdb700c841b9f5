"""Cases of metrics: what counts as a token, as a sample, as completed; and that nothing is made up where nothing is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from contbatch import Engine, FinishReason, SchedulerConfig, summarise
from contbatch.errors import RequestTooLarge
from contbatch.simulator import VirtualClock
from tests.cases.common import preemptions
from tests.toy import Bytes, Pieces, config, params, prompt, serve, toy_engine
from tests.virtual import TimedExecutor


def timed(durations: Sequence[float] = (1.0,), limits: SchedulerConfig | None = None, **scripted: Any) -> Engine:
    """An engine whose steps take given times, on a clock that nothing else moves."""
    clock = VirtualClock()
    return Engine(TimedExecutor(clock, durations, **scripted), limits or config(), clock=clock)


def test_b191_one_token_has_no_tpot_and_does_not_count_in_its_mean() -> None:
    engine = timed((10.0, 2.0))
    engine.add_request([1, 2], params(1), request_id="one")
    engine.add_request([3, 4], params(5), request_id="five")
    engine.run()
    metrics = summarise(engine.trace)
    one, five = (metrics.requests[name].seconds for name in ("one", "five"))
    assert one.tpot is None and one.itl == ()
    assert five.e2e is not None and five.ttft is not None and five.tpot == (five.e2e - five.ttft) / 4 == 6.0
    assert (metrics.seconds.tpot.count, metrics.seconds.tpot.mean) == (1, 6.0)


@pytest.mark.parametrize("requests", [0, 1, 3])
def test_b191_without_any_tpot_the_summary_says_so(requests: int) -> None:
    engine = timed()
    for index in range(requests):
        engine.add_request([index + 1], params(1))
    engine.run()
    metrics = summarise(engine.trace)
    assert metrics.seconds.tpot.mean is None and metrics.steps.tpot.count == 0
    for text in (metrics.text(), metrics.text(steps=True)):
        (line,) = (line for line in text.splitlines() if line.startswith("TPOT ("))
        assert line.endswith("n/a") and "nan" not in text


def test_b192_tpot_leaves_out_the_wait_for_the_first_token() -> None:
    engine = timed((10.0, 1.0, 1.0))
    engine.add_request([1, 2], params(3), request_id="a")
    engine.run()
    seconds = summarise(engine.trace).requests["a"].seconds
    assert (seconds.arrival, seconds.tokens) == (0.0, (10.0, 11.0, 12.0))
    assert (seconds.ttft, seconds.tpot, seconds.itl) == (10.0, 1.0, (1.0, 1.0))


def test_b193_tokens_are_counted_and_not_pieces_of_text() -> None:
    """Text held back for a stop string, characters of several tokens, tokens without text."""
    sampling = {"plain": params(7), "held": params(9, stop="\u010f never"), "one": params(1)}
    engine, _ = toy_engine(config(), tokenizer=Bytes())
    done = serve(engine, {name: prompt(4, index) for index, name in enumerate(sampling)}, sampling)
    pieces, silent = Pieces("", "ab", "\u010f"), timed(script={"silent": [0, 0, 1, 0, 2, 0]})
    silent.tokenizer = pieces
    silent.add_request([1], params(6, stop="abc"), request_id="silent")
    done |= {completion.request_id: completion for completion in silent.run()}
    assert done["silent"].text == "ab\u010f"
    for trace in (engine.trace, silent.trace):
        for name, request in summarise(trace).requests.items():
            assert request.num_output_tokens == len(done[name].token_ids) == len(request.seconds.tokens)


@pytest.mark.parametrize("seed", range(20))
def test_b194_the_peak_is_never_below_the_mean(seed: int) -> None:
    chance = random.Random(seed)
    durations = [10 ** chance.uniform(-4, 1) for _ in range(7)]
    engine = timed(durations, config(pool=16, seqs=chance.randint(1, 5), budget=chance.randint(2, 20)))
    for index in range(chance.randint(1, 10)):
        engine.add_request(prompt(chance.randint(1, 12), index), params(chance.randint(1, 12)))
    engine.run()
    metrics = summarise(engine.trace)
    for service in (metrics.seconds, metrics.steps):
        assert service.peak_throughput is not None and service.output_throughput is not None
        assert service.peak_throughput * (1 + 1e-9) >= service.output_throughput > 0


def test_b195_aborted_and_refused_requests_are_not_completed() -> None:
    engine = timed(limits=config(mml=64))
    for index, name in enumerate(("a", "b", "c", "gone")):
        engine.add_request([index + 1, 2, 3], params(3 + index), request_id=name)
    with pytest.raises(RequestTooLarge):
        engine.add_request([1] * 64, params(5), request_id="refused")
    engine.step()
    engine.abort("gone")
    engine.run()
    metrics = summarise(engine.trace)
    assert (metrics.completed, metrics.aborted, metrics.failed, metrics.unfinished) == (3, 1, 0, 0)
    assert metrics.output_tokens == 3 + 4 + 5 and metrics.emitted_tokens == 3 + 4 + 5 + 1
    assert "refused" not in metrics.requests and metrics.requests["gone"].finish_reason == "abort"
    assert "3 completed, 1 aborted, 0 failed" in metrics.text()
    assert metrics.seconds.e2e.count == 3
    assert metrics.seconds.output_throughput == 12 / metrics.seconds.duration


def test_b196_tokens_are_those_that_were_generated_not_those_asked_for() -> None:
    """The end-of-sequence token is one of them: 5, of which 4 are visible."""
    engine = timed(script={"a": [10, 11, 12, 13, 2]}, eos_token_ids=[2])
    engine.add_request([1], params(100), request_id="a")
    (done,) = engine.run()
    metrics = summarise(engine.trace)
    assert done.finish_reason is FinishReason.EOS and metrics.requests["a"].num_output_tokens == 5
    assert metrics.output_tokens == 5 and metrics.requests["a"].steps.tpot == 1.0


def test_b197_own_blocks_found_again_are_counted_apart() -> None:
    engine, _ = toy_engine(config(pool=8, bs=4, budget=24, seqs=4))
    serve(engine, {f"r{index}": prompt(7, index) for index in range(4)}, params(14))
    metrics = summarise(engine.trace)
    assert metrics.preemptions == preemptions(engine.trace) > 0
    assert metrics.prefix_hit_rate == 0 and not any(request.cached_tokens for request in metrics.requests.values())
    assert sum(request.recovered_tokens for request in metrics.requests.values()) > 0


@pytest.mark.parametrize("started", [True, False])
def test_b198_without_a_first_token_there_is_no_ttft(started: bool) -> None:
    """Aborted while waiting, and in the middle of a prompt."""
    engine = timed(limits=config(seqs=20 if started else 18, budget=40, bs=16))
    for index in range(18):
        engine.add_request([index + 1, 2], params(3))
    for name in ("x", "y"):
        engine.add_request([ord(name), *range(30)], params(3), request_id=name)
    engine.step()
    assert all((name in engine.trace.steps[0].request_ids) is (started and name == "x") for name in "xy")
    engine.abort("x")
    engine.abort("y")
    engine.run()
    metrics = summarise(engine.trace)
    assert (metrics.completed, metrics.aborted) == (18, 2)
    assert metrics.seconds.ttft.count == metrics.steps.ttft.count == 18
    assert metrics.requests["x"].seconds.ttft is None and metrics.seconds.ttft.mean == 1.0


@pytest.mark.parametrize("prefix", [True, False])
def test_b199_emitted_tokens_add_up_after_every_step(prefix: bool) -> None:
    engine, _ = toy_engine(config(pool=8, bs=4, budget=12, seqs=4, prefix=prefix), tokenizer=Bytes())
    events = 0
    for index in range(8):
        engine.add_request(prompt(2 + index, index), params(3 + index, stop="e"), request_id=f"r{index}")
    while engine.has_unfinished:
        events += sum(event.token_id is not None for event in engine.step())
        if engine.trace.num_steps == 5:
            engine.abort("r3")
        emitted = sum(len(step.sampled) for step in engine.trace.steps)
        live = sum(request.num_output_tokens for request in engine.scheduler.requests.values())
        ended = sum(len(done.token_ids) for done in engine.completions.values())
        assert emitted == live + ended == events == summarise(engine.trace).emitted_tokens
    assert preemptions(engine.trace) > 0 and len(engine.completions) == 8


def test_b200_without_a_limit_all_of_the_model_length_is_used() -> None:
    engine, _ = toy_engine(config(mml=256, pool=64))
    (done,) = engine.generate([prompt(151)], params(None))
    assert len(done.token_ids) == 105
    assert summarise(engine.trace).requests[done.request_id].num_output_tokens == 105


@pytest.mark.parametrize(("budget", "ttft"), [(4, 3), (5, 2), (10, 1), (1, 10)])
def test_b201_ttft_counts_every_chunk(budget: int, ttft: int) -> None:
    engine = timed(limits=config(budget=budget))
    engine.add_request(prompt(10), params(2), request_id="a")
    events = [engine.step() for _ in range(ttft)]
    assert [len(step) for step in events] == [0] * (ttft - 1) + [1]
    engine.run()
    request = summarise(engine.trace).requests["a"]
    assert request.seconds.ttft == request.steps.ttft == ttft
