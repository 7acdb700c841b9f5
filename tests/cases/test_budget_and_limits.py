"""Cases: the token budget of a step, and requests that can never fit.

Each test restates one line of a list of faults that were found in other engines; its id is in the name. What
cannot fit is refused when it is added, with the numbers; whatever was accepted finishes.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contbatch.batch import ScheduledBatch
from contbatch.config import SchedulerConfig
from contbatch.engine import Engine
from contbatch.errors import InvalidConfig, InvalidRequest, RequestTooLarge, SchedulerStalled, StepFailed
from contbatch.executor import ScriptedExecutor
from contbatch.metrics import summarise
from contbatch.request import FinishReason
from tests.cases.common import ALL, BUDGETED, Events, drive, grants, preemptions
from tests.toy import assert_alone, assert_empty, config, params, prompt, serve, toy_engine

STALL_FREE = ["VllmV1", "PrefillDecodeBudget", "SarathiServe"]
"""Policies under which a decode never waits for a prompt."""


# Token budget


@pytest.mark.parametrize("policy", BUDGETED)
def test_b001_without_chunks_a_prompt_fits_the_budget_or_is_refused(policy: str) -> None:
    engine, toy = toy_engine(config(budget=16, chunked=False, bs=4, pool=40, mml=160), policy)
    for count, length in enumerate((1, 15, 16), start=1):
        assert_alone(toy, serve(engine, {f"r{length}": prompt(length)}, params(1)), params(1))
        assert len(engine.trace.steps) == count, "served in the next step, not waited for"
    for length in (17, 18, 33):
        with pytest.raises(RequestTooLarge, match=rf"prompt of {length} tokens exceeds the 16 "):
            engine.add_request(prompt(length), params(1))
    assert not engine.has_unfinished


@pytest.mark.parametrize("policy", BUDGETED)
def test_b002_the_stream_of_a_prompt_over_the_budget_ends_with_an_error(policy: str) -> None:
    engine, toy = toy_engine(config(budget=16, chunked=False, bs=4, pool=40, mml=160), policy)
    with pytest.raises(RequestTooLarge):
        list(engine.stream(prompt(17), params(1)))
    assert len(engine.trace.steps) <= 5
    events = list(engine.stream(prompt(16), params(2)))
    assert [event.token_id for event in events] == list(toy.alone(prompt(16), params(2)))


@pytest.mark.parametrize("field", ["max_num_batched_tokens", "max_num_seqs", "block_size", "num_blocks"])
@pytest.mark.parametrize("value", [-1, 0])
def test_b003_a_limit_below_one_is_a_value_error_that_names_it(field: str, value: int) -> None:
    makers: list[Callable[..., object]] = [SchedulerConfig, Engine.load]
    for make in makers:
        with pytest.raises(ValueError, match=f"{field} is {value}") as caught:
            make(**{field: value})
        assert isinstance(caught.value, InvalidConfig) and not isinstance(caught.value, AssertionError)


@pytest.mark.parametrize("policy", BUDGETED)
def test_b004_more_running_requests_than_budget(policy: str) -> None:
    engine, toy = toy_engine(config(budget=4, seqs=8), policy)
    done = serve(engine, {f"r{index}": prompt(1, index) for index in range(6)}, params(5))
    assert_alone(toy, done, params(5))
    assert all(1 <= step.num_tokens <= 4 for step in engine.trace.steps)


@pytest.mark.parametrize("chunk", [1, 4, 5, 8, 100])
def test_b005_a_chunk_larger_than_the_budget_is_cut_to_it(chunk: int) -> None:
    engine, toy = toy_engine(config(budget=4, long_cap=chunk))
    assert_alone(toy, serve(engine, {"a": prompt(9)}, params(1)), params(1))
    assert [step.counts for step in engine.trace.steps] == [[4], [4], [1]], "alone, the cap does not bind"
    engine, toy = toy_engine(config(budget=4, long_cap=chunk))
    assert_alone(toy, serve(engine, {"a": prompt(9), "b": prompt(9, 1)}, params(1)), params(1))
    assert max(step.num_tokens for step in engine.trace.steps) <= 4
    assert max(max(step.counts) for step in engine.trace.steps) <= chunk


@pytest.mark.parametrize("policy", BUDGETED)
def test_b006_random_traffic_with_shared_prefixes_stays_within_the_budget(policy: str) -> None:
    draw = random.Random(6)
    engine, toy = toy_engine(config(pool=24, bs=4, budget=16, seqs=6, mml=96), policy)
    wanted = {}
    for index in range(25):
        tokens = [*prompt(4 * draw.randint(0, 3), draw.randint(0, 2)), *prompt(draw.randint(1, 12), index)]
        limit = params(draw.randint(1, 9))
        wanted[engine.add_request(tokens, limit)] = limit
        engine.run(max_steps=draw.randint(0, 3))
    drive(engine)
    assert any(step.cached for step in engine.trace.steps)
    assert max(step.num_tokens for step in engine.trace.steps) <= 16
    assert_alone(toy, engine.completions, wanted)
    assert_empty(engine)


def test_b006_a_model_that_raises_is_reported_to_whoever_waits_for_it() -> None:
    """Nobody blocks: each stream that is read while the model is broken raises, and goes on when it works again."""
    broken = False

    def before(_: ScheduledBatch) -> None:
        if broken:
            raise RuntimeError("device lost")

    engine, toy = toy_engine(config(budget=16), before=before)
    streams = [engine.stream(prompt(5, index), params(6)) for index in range(4)]
    got: list[list[int | None]] = [[next(stream).token_id] for stream in streams]
    broken = True
    for stream, tokens in zip(streams, got, strict=True):
        with pytest.raises(StepFailed, match="device lost"):
            for event in stream:
                tokens.append(event.token_id)
    broken = False
    for index, (stream, tokens) in enumerate(zip(streams, got, strict=True)):
        tokens += [event.token_id for event in stream]
        assert tuple(tokens) == toy.alone(prompt(5, index), params(6)), "no token is lost or doubled"
    assert_empty(engine)


@pytest.mark.parametrize("policy", STALL_FREE)
def test_b007_a_prompt_takes_what_the_decodes_leave(policy: str) -> None:
    engine, _ = toy_engine(config(budget=8, seqs=8), policy)
    for name in "ab":
        engine.add_request(prompt(2, ord(name)), params(8), request_id=name)
    engine.step()
    engine.add_request(prompt(10, 3), params(8), request_id="c")
    engine.step()
    step = engine.trace.steps[-1]
    assert grants(step) == {"a": 1, "b": 1, "c": 6} and (step.decode_tokens, step.prefill_tokens) == (2, 6)


def test_b008_who_gets_no_budget_touches_no_cached_block() -> None:
    engine, toy = toy_engine(config(budget=4))
    serve(engine, {"old B": [*prompt(8, 1), 5], "old C": [*prompt(8, 2), 5]}, params(1))
    engine.add_request(prompt(12), params(1), request_id="A")
    engine.step()
    for name, family in (("B", 1), ("C", 2)):
        engine.add_request([*prompt(8, family), 6], params(1), request_id=name)
    order = engine.scheduler.pool.free_list
    engine.step()
    step = engine.trace.steps[-1]
    assert grants(step) == {"A": 4} and not step.cached
    assert step.reasons["B"].reason == "budget" and "C" not in step.reasons, "C was not looked at"
    assert engine.scheduler.pool.free_list == tuple(block for block in order if block not in step.new_blocks["A"])
    assert summarise(engine.trace).requests["B"].cached_tokens == 0
    drive(engine)
    assert [summarise(engine.trace).requests[name].cached_tokens for name in "BC"] == [8, 8], "the hits are there"
    assert_alone(toy, engine.completions, params(1))


def test_b009_two_prompts_share_the_budget() -> None:
    engine, _ = toy_engine(config(budget=8))
    serve(engine, {"A": prompt(10), "B": prompt(20, 1)}, params(5))
    assert [grants(step) for step in engine.trace.steps[:3]] == [{"A": 8}, {"A": 2, "B": 6}, {"A": 1, "B": 7}]


@pytest.mark.parametrize("policy", STALL_FREE)
def test_b011_nobody_waits_for_a_fuller_batch(policy: str) -> None:
    """There is no option to wait for company, so the token times are one step apart whatever else arrives."""
    engine, _ = toy_engine(config(budget=8), policy)
    engine.add_request(prompt(2), params(12), request_id="a")
    for index in range(5):
        engine.step()
        engine.add_request(prompt(13, index + 1), params(3))
    drive(engine)
    assert summarise(engine.trace).requests["a"].steps.tokens == tuple(range(1, 13))


# Requests that can never fit


@pytest.mark.parametrize("policy", ALL)
def test_b014_what_exceeds_the_pool_is_refused_with_both_numbers(policy: str) -> None:
    engine, toy = toy_engine(config(pool=6, bs=4, mml=64), policy)
    for length, max_tokens in ((25, 1), (24, 2), (1, 25), (40, 8)):
        with pytest.raises(RequestTooLarge, match=rf"{length} prompt tokens.*num_blocks=6"):
            engine.add_request(prompt(length), params(max_tokens))
    sampling = {"whole": params(1), "filled": params(24), "queued": params(2)}
    done = serve(engine, {"whole": prompt(24), "filled": prompt(1, 1), "queued": prompt(8, 2)}, sampling)
    assert_alone(toy, done, sampling)


def test_b018_an_allocator_that_fails_for_the_only_request_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It preempts itself once; the end is `SchedulerStalled`, after a bounded number of steps."""
    engine, toy = toy_engine(config(pool=4, bs=4))
    engine.add_request(prompt(4), params(8), request_id="a")
    engine.step()
    with monkeypatch.context() as stub:
        stub.setattr(engine.scheduler.pool, "take", lambda count: None)
        stub.setattr(type(engine.scheduler.pool), "num_free", property(lambda pool: 0))
        with pytest.raises(SchedulerStalled, match=r"<a preempted.* blocked by blocks .*0 of 4 blocks"):
            engine.run(max_steps=40)
    assert preemptions(engine.trace) <= 2
    drive(engine)
    assert_alone(toy, engine.completions, params(8))


@pytest.mark.parametrize("policy", ALL)
def test_b023_a_prompt_must_leave_room_for_one_token(policy: str) -> None:
    """max_tokens is cut to the model length; a prompt as long as the model is refused."""
    engine, toy = toy_engine(config(mml=32), policy)
    done = serve(engine, {"a": prompt(31)}, params(5))["a"]
    assert len(done.token_ids) == 1 and done.finish_reason is FinishReason.LENGTH
    with pytest.raises(RequestTooLarge, match=r"prompt of 32 tokens .*max_model_len=32"):
        engine.add_request(prompt(32), params(5))
    assert_alone(toy, serve(engine, {"b": prompt(5)}, params(5)), params(5))


@pytest.mark.parametrize("policy", ALL)
@pytest.mark.parametrize("max_tokens", [6, 7])
def test_b024_output_is_cut_to_the_model_length(policy: str, max_tokens: int) -> None:
    engine, toy = toy_engine(config(mml=16), policy)
    done = serve(engine, {"a": prompt(10)}, params(max_tokens))["a"]
    assert done.token_ids == toy.alone(prompt(10), params(6)) and done.finish_reason is FinishReason.LENGTH
    last = engine.trace.steps[-1]
    assert last.starts[0] + last.counts[0] - 1 == 14, "the last token is never written"


LIMIT_OF_10 = {
    "model": config(mml=10),
    "pool": config(pool=5, bs=2, mml=64),
    "budget": config(budget=10, chunked=False, mml=32),
}


@pytest.mark.parametrize("policy", ALL)
@pytest.mark.parametrize("limit", LIMIT_OF_10)
def test_b028_each_accepted_request_has_one_finish_event(policy: str, limit: str) -> None:
    engine, _ = toy_engine(LIMIT_OF_10[limit], policy)
    events, accepted = Events(), []
    for length, max_tokens in itertools.product((1, 9, 10, 11, 24), (1, 3, None)):
        try:
            accepted.append(engine.add_request(prompt(length, length), params(max_tokens), on_event=events))
        except InvalidRequest:
            assert length >= 9 or max_tokens is not None
    drive(engine)
    assert accepted and sorted(name for name, _ in events.ends()) == sorted(accepted)
    assert set(engine.trace.requests) == set(accepted), "a refused one leaves no mark"
    assert_empty(engine)


def sizes(limits: SchedulerConfig) -> Iterator[tuple[int, int | None]]:
    """Every prompt length up to the model's, with a few limits on the output."""
    for length in range(1, limits.max_model_len + 1):
        yield length, (1, 2, 7, None)[length % 4]


def finishes_or_is_refused(limits: SchedulerConfig, policy: str) -> None:
    """No silent wait: each request raises when it is added, or ends after as many tokens as it may have."""
    engine = Engine(ScriptedExecutor(), limits, policy)
    accepted = []
    for length, max_tokens in sizes(limits):
        try:
            accepted.append(engine.add_request(range(length), params(max_tokens)))
        except InvalidRequest:
            continue
    drive(engine, limit=20_000)
    for name in accepted:
        done = engine.completions[name]
        assert done.finish_reason is FinishReason.LENGTH
        assert len(done.token_ids) == engine.trace.requests[name].max_tokens


def test_b030_every_length_with_a_pool_of_60_finishes_or_raises() -> None:
    finishes_or_is_refused(SchedulerConfig(num_blocks=60, block_size=1, max_model_len=80), "VllmV1")


@given(
    policy=st.sampled_from(ALL),
    pool=st.integers(1, 30),
    bs=st.integers(1, 5),
    budget=st.integers(1, 12),
    seqs=st.integers(1, 4),
    mml=st.integers(2, 30),
    chunked=st.booleans(),
    prefix=st.booleans(),
)
@settings(max_examples=20)
def test_b030_every_length_finishes_or_raises_under_any_limits(
    policy: str, pool: int, bs: int, budget: int, seqs: int, mml: int, chunked: bool, prefix: bool
) -> None:
    limits = config(pool=pool, bs=bs, budget=budget, seqs=seqs, mml=mml, chunked=chunked, prefix=prefix)
    finishes_or_is_refused(limits, policy)
