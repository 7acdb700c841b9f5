"""The engine: one finish event per request, whatever happens; failures that stay with one request; batched = alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contbatch.batch import ScheduledBatch
from contbatch.config import SchedulerConfig
from contbatch.engine import Completion, Engine, TokenEvent
from contbatch.errors import (
    DuplicateRequest,
    InvalidRequest,
    PolicyError,
    RequestTooLarge,
    SchedulerStalled,
    StepFailed,
)
from contbatch.executor import ScriptedExecutor
from contbatch.policies import POLICIES
from contbatch.request import FinishReason, RequestStatus, SamplingParams
from contbatch.step import Step
from tests.toy import (
    Bytes,
    Pieces,
    Scripted,
    Ticks,
    Toy,
    assert_alone,
    assert_empty,
    config,
    params,
    prompt,
    serve,
    terminal,
    toy_engine,
)


def scripted(
    script: Mapping[str, Sequence[int]],
    tokenizer: Bytes | Pieces | None = None,
    eos: Sequence[int] = (),
    limits: SchedulerConfig | None = None,
) -> Engine:
    """An engine whose tokens are given."""
    return Engine(ScriptedExecutor(script, eos_token_ids=eos), limits or config(), tokenizer=tokenizer, clock=Ticks())


def by_id(completions: Sequence[Completion]) -> dict[str, Completion]:
    """Completions by request id."""
    return {completion.request_id: completion for completion in completions}


class Log:
    """A callback that keeps the events of every request it is given to."""

    def __init__(self) -> None:
        self.events: list[TokenEvent] = []

    def __call__(self, event: TokenEvent) -> None:
        self.events.append(event)

    def ends(self) -> list[tuple[str, FinishReason]]:
        """The finish events."""
        return terminal(self.events)


# The loop


def test_events_completions_and_trace_say_the_same() -> None:
    engine, _ = toy_engine(config(pool=8, bs=4, budget=8, seqs=3), tokenizer=Bytes())
    log = Log()
    for index, name in enumerate("abcd"):
        engine.add_request(prompt(5, index), params(3 + index), request_id=name, on_event=log)
    returned: list[TokenEvent] = []
    while engine.has_unfinished:
        number = len(engine.trace.steps)
        events = engine.step()
        assert all(event.step == number for event in events)
        returned += events
    assert returned == log.events, "callbacks get what step returns, in the same order"
    for name, completion in engine.completions.items():
        mine = [event for event in returned if event.request_id == name]
        assert tuple(event.token_id for event in mine) == completion.token_ids
        assert "".join(event.text for event in mine) == completion.text == engine.trace.finished[name].text
        assert [event.finish_reason for event in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason is completion.finish_reason
        assert completion.error is None and completion.prompt is None
        assert completion.prompt_token_ids == tuple(prompt(5, "abcd".index(name)))


def test_step_without_requests_does_nothing() -> None:
    engine, toy = toy_engine(config())
    assert engine.step() == [] and engine.run() == [] and not toy.batches and not engine.trace.steps


def test_run_stops_after_max_steps_and_goes_on() -> None:
    engine, toy = toy_engine(config())
    engine.add_request(prompt(4), params(5), request_id="a")
    assert engine.run(max_steps=3) == [] and len(toy.batches) == 3
    (done,) = engine.run()
    assert done.token_ids == toy.alone(prompt(4), params(5)) and engine.run() == []


def test_run_returns_completions_in_the_order_of_finishing() -> None:
    engine, _ = toy_engine(config())
    for name, max_tokens in (("slow", 5), ("quick", 1), ("middle", 3)):
        engine.add_request(prompt(4), params(max_tokens), request_id=name)
    assert [done.request_id for done in engine.run()] == ["quick", "middle", "slow"]


def test_the_model_length_is_that_of_the_executor() -> None:
    toy = Toy(64, 4, max_model_len=16)
    engine = Engine(toy, config(mml=64))
    assert engine.config.max_model_len == engine.scheduler.config.max_model_len == 16
    assert engine.trace.config["max_model_len"] == 16
    with pytest.raises(RequestTooLarge, match="max_model_len=16"):
        engine.add_request(prompt(16))
    assert Engine(Toy(64, 4, max_model_len=99), config(mml=64)).config.max_model_len == 64


def test_times_are_those_of_the_engines_clock() -> None:
    engine, _ = toy_engine(config())
    engine.add_request(prompt(4), params(2), request_id="a")
    engine.run()
    trace = engine.trace
    assert 0 <= trace.requests["a"].arrival_time < trace.steps[0].start
    assert trace.finished["a"].time == trace.steps[-1].end <= engine.now()


# generate


def test_b136_generate_returns_in_order_with_ids_of_its_own() -> None:
    engine, toy = toy_engine(config(seqs=2))
    prompts = [prompt(9), prompt(2, 1), prompt(5, 2)]
    sampling = [params(6), params(1), params(3)]
    first, second = engine.generate(prompts, sampling), engine.generate(prompts, sampling)
    for done in (first, second):
        assert [completion.token_ids for completion in done] == [
            toy.alone(tokens, wanted) for tokens, wanted in zip(prompts, sampling, strict=True)
        ]
    assert len({completion.request_id for completion in first + second}) == 6
    assert not engine.completions, "what generate returned is not kept"
    assert_empty(engine)


def test_generate_leaves_other_requests_to_go_on() -> None:
    engine, toy = toy_engine(config())
    engine.add_request(prompt(7, 5), params(20), request_id="other")
    assert engine.generate([], params(1)) == []
    (done,) = engine.generate([prompt(4)], params(3))
    assert done.token_ids == toy.alone(prompt(4), params(3)) and engine.has_unfinished
    assert by_id(engine.run())["other"].token_ids == toy.alone(prompt(7, 5), params(20))


def test_generate_serves_none_if_one_is_refused() -> None:
    engine, toy = toy_engine(config())
    with pytest.raises(InvalidRequest, match="empty prompt"):
        engine.generate([prompt(4), [], prompt(3)], params(3))
    assert not toy.batches and all(done.finish_reason is FinishReason.ABORT for done in engine.completions.values())
    assert_empty(engine)


def test_generate_checks_the_number_of_sampling_parameters() -> None:
    engine, _ = toy_engine(config())
    with pytest.raises(InvalidRequest, match="2 prompts and 1 sampling"):
        engine.generate([prompt(4), prompt(3)], [params(3)])
    with pytest.raises(InvalidRequest, match="pass a list of prompts"):
        engine.generate("one text")
    assert_empty(engine)


def test_generate_gives_up_its_requests_when_a_step_fails() -> None:
    def broken(_: ScheduledBatch) -> None:
        raise RuntimeError("no device")

    engine, toy = toy_engine(config(), before=broken)
    with pytest.raises(StepFailed, match=r"step 0 raised RuntimeError\('no device'\)"):
        engine.generate([prompt(4)], params(3))
    assert_empty(engine)
    toy.before = None
    assert engine.generate([prompt(4)], params(3))[0].token_ids == toy.alone(prompt(4), params(3))


# Streams


def test_a_stream_gives_every_event_and_drives_the_others() -> None:
    engine, toy = toy_engine(config())
    engine.add_request(prompt(5, 1), params(9), request_id="other")
    stream = engine.stream(prompt(4), params(4), request_id="mine")
    events = list(stream)
    assert [event.token_id for event in events] == list(toy.alone(prompt(4), params(4)))
    assert terminal(events) == [("mine", FinishReason.LENGTH)]
    assert list(stream) == [] and "mine" not in engine.completions
    engine.run()
    assert_empty(engine)


def test_two_streams_in_turns() -> None:
    engine, toy = toy_engine(config())
    streams = {name: engine.stream(prompt(4, index), params(6)) for index, name in enumerate("ab")}
    got: dict[str, list[int | None]] = {"a": [], "b": []}
    for first, second in itertools.zip_longest(*streams.values()):
        got["a"].append(first.token_id)
        got["b"].append(second.token_id)
    assert got == {name: list(toy.alone(prompt(4, index), params(6))) for index, name in enumerate("ab")}


def test_b100_closing_a_stream_aborts_its_request() -> None:
    engine, toy = toy_engine(config())
    stream = engine.stream(prompt(4), params(200))
    for _ in range(3):
        next(stream)
    before = len(toy.batches)
    stream.close()
    stream.close()
    assert len(toy.batches) == before and next(stream, None) is None
    assert engine.trace.finished[stream.request_id].reason == "abort" and not engine.completions
    assert_empty(engine)


def test_a_stream_is_a_context() -> None:
    engine, _ = toy_engine(config())
    with pytest.raises(KeyError), engine.stream(prompt(4), params(200)) as stream:
        next(stream)
        raise KeyError
    assert_empty(engine)


def test_b106_many_streams_closed_early() -> None:
    engine, toy = toy_engine(config(pool=8, bs=4, seqs=4))
    for index in range(60):
        stream = engine.stream(prompt(4, index), params(25))
        assert next(stream).token_id is not None and next(stream).token_id is not None
        stream.close()
    assert len(toy.batches) == 120, "two steps each"
    assert_empty(engine)


def test_a_stream_sees_that_its_request_was_aborted() -> None:
    engine, _ = toy_engine(config())
    stream = engine.stream(prompt(4), params(200))
    next(stream)
    engine.abort(stream.request_id)
    assert [event.finish_reason for event in stream] == [FinishReason.ABORT]


def test_closing_a_stream_whose_request_has_ended_aborts_nobody() -> None:
    engine, toy = toy_engine(config())
    stream = engine.stream(prompt(4), params(2), request_id="a")
    engine.run()
    engine.add_request(prompt(5, 1), params(3), request_id="a")
    stream.close()
    assert by_id(engine.run())["a"].token_ids == toy.alone(prompt(5, 1), params(3))


def test_b002_a_stream_of_a_request_that_cannot_fit_ends_at_once() -> None:
    engine, _ = toy_engine(config(budget=16, chunked=False))
    with pytest.raises(RequestTooLarge):
        engine.stream(prompt(17), params(1))
    assert_empty(engine)


# Ends


@pytest.mark.parametrize(
    ("changes", "count", "reason"),
    [
        ({"max_tokens": 9}, 3, FinishReason.EOS),
        ({"max_tokens": 2}, 2, FinishReason.LENGTH),
        ({"max_tokens": 9, "ignore_eos": True}, 9, FinishReason.LENGTH),
        ({"max_tokens": 9, "stop_token_ids": [2]}, 2, FinishReason.STOP),
        ({"max_tokens": 9, "stop": "b"}, 2, FinishReason.STOP),
        ({"max_tokens": None, "ignore_eos": True}, 13, FinishReason.LENGTH),
    ],
)
def test_b149_endings(changes: dict[str, Any], count: int, reason: FinishReason) -> None:
    tokens = [1, 2, 0, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1]
    engine = scripted({"a": tokens}, Pieces("<eos>", "a", "b", "c"), eos=[0], limits=config(mml=16))
    engine.add_request([1, 2, 3], params(**changes), request_id="a")
    (done,) = engine.run()
    assert (len(done.token_ids), done.finish_reason) == (count, reason)
    assert done.finish_reason.vllm in ("stop", "length")
    assert_empty(engine)


def test_b150_ignore_eos_and_a_stop_token_that_is_eos() -> None:
    engine = scripted({"a": [5, 0, 6, 6, 6], "b": [5, 0, 6, 6, 6]}, eos=[0])
    engine.add_request([1], params(5, ignore_eos=True), request_id="a")
    engine.add_request([1], params(5, ignore_eos=True, stop_token_ids=[0]), request_id="b")
    done = by_id(engine.run())
    assert len(done["a"].token_ids) == 5
    assert done["b"].token_ids == (5, 0) and done["b"].finish_reason is FinishReason.STOP, "the explicit one wins"


def test_b152_eos_in_a_prompt_stops_nobody() -> None:
    engine = scripted({}, eos=[0])
    engine.add_request([0, 1, 0], params(5), request_id="a")
    engine.add_request([0] * 7, params(5), request_id="b")
    assert all(len(done.token_ids) == 5 for done in engine.run())


def test_b154_eos_as_the_first_token() -> None:
    engine = scripted({"a": [0]}, Pieces("<eos>", "x"), eos=[0], limits=config(seqs=1))
    engine.add_request([1, 1], params(9), request_id="a")
    engine.add_request([1, 1], params(1), request_id="next")
    (event,) = engine.step()
    assert (event.token_id, event.text, event.finish_reason) == (0, "", FinishReason.EOS)
    assert engine.scheduler.pool.num_used == 0, "everything is back in that step"
    assert engine.trace.steps[0].num_running == 1
    assert [event.request_id for event in engine.step()] == ["next"]
    assert engine.completions["a"].text == ""


def test_b157_each_request_has_its_own_stops() -> None:
    tokenizer = Pieces("a", "b", "c", "d")
    engine = scripted({name: [0, 1, 2, 3, 0] for name in "xyz"}, tokenizer)
    stops = {"x": (), "y": ("cd",), "z": ("q", "b", "zz")}
    for name, stop in stops.items():
        engine.add_request([0], params(5, stop=stop), request_id=name)
    done = by_id(engine.run())
    assert {name: done[name].text for name in stops} == {"x": "abcda", "y": "ab", "z": "a"}
    assert {name: done[name].finish_reason for name in stops} == {
        "x": FinishReason.LENGTH,
        "y": FinishReason.STOP,
        "z": FinishReason.STOP,
    }


def test_b145_b147_text_streamed_and_whole_is_the_same() -> None:
    tokenizer = Pieces("The", " quick", " br", "own", " fox", " jumps")
    for stop, text in ((("own fox",), "The quick br"), ((" quick",), "The"), ((), "The quick brown fox jumps")):
        engine = scripted({"a": range(6), "b": range(6)}, tokenizer)
        streamed = "".join(event.text for event in engine.stream([0], params(6, stop=stop), request_id="a"))
        engine.add_request([0], params(6, stop=stop), request_id="b")
        assert by_id(engine.run())["b"].text == streamed == text


def test_b153_held_text_comes_with_the_end() -> None:
    engine = scripted({"a": [0, 1, 9]}, Pieces("ple", "as", *"cdefgh", "", "<eos>"), eos=[9])
    events = list(engine.stream([0], params(9, stop="please"), request_id="a"))
    assert [event.text for event in events] == ["", "", "pleas"]
    assert events[-1].finish_reason is FinishReason.EOS and events[-1].token_id == 9


def test_b158_characters_come_whole() -> None:
    engine = scripted({"a": [0xC4, 0x8F, ord("x")]}, Bytes())
    assert [event.text for event in engine.stream([0], params(3), request_id="a")] == ["", "ď", "x"]


def test_a_stop_string_found_in_the_last_held_text_is_a_stop() -> None:
    engine = scripted({"a": [0, 1]}, Pieces("x", "end\ufffd"))
    engine.add_request([0], params(2, stop="end"), request_id="a")
    (done,) = engine.run()
    assert done.text == "x" and done.finish_reason is FinishReason.STOP
    assert engine.trace.finished["a"].reason == engine.trace.steps[-1].finished["a"] == "stop"


def test_an_aborted_request_gives_its_held_text() -> None:
    engine = scripted({"a": [0, 0, 0]}, Pieces("ab"))
    log = Log()
    engine.add_request([0], params(9, stop="abc"), request_id="a", on_event=log)
    engine.step()
    engine.step()
    engine.abort("a")
    assert [event.text for event in log.events] == ["", "ab", "ab"]
    assert engine.completions["a"].text == "abab"


def test_b196_tokens_are_counted_as_generated() -> None:
    engine = scripted({"a": [5, 5, 5, 5, 0]}, eos=[0])
    engine.add_request([1], params(100), request_id="a")
    (done,) = engine.run()
    assert len(done.token_ids) == engine.trace.finished["a"].num_output_tokens == 5


def test_b140_b200_the_model_length_is_never_passed() -> None:
    engine, _ = toy_engine(config(mml=32))
    for length in (1, 15, 30, 31):
        done = engine.generate([prompt(length)], params(None))[0]
        assert length + len(done.token_ids) == 32 and done.finish_reason is FinishReason.LENGTH


# Ids


def test_b135_duplicate_and_reused_ids() -> None:
    engine, toy = toy_engine(config())
    engine.add_request(prompt(4), params(3), request_id="r")
    with pytest.raises(DuplicateRequest, match="'r' is in use"):
        engine.add_request(prompt(5, 1), params(2), request_id="r")
    assert by_id(engine.run())["r"].token_ids == toy.alone(prompt(4), params(3)), "the first is unaffected"
    engine.add_request(prompt(5, 1), params(2), request_id="r")
    (done,) = engine.run()
    assert done.token_ids == toy.alone(prompt(5, 1), params(2))
    assert all(step.duration >= 0 for step in engine.trace.steps)
    assert list(engine.trace.requests) == ["r#1", "r"] and engine.trace.finished["r#1"].num_output_tokens == 3


def test_made_up_ids_avoid_those_in_use() -> None:
    engine, _ = toy_engine(config())
    engine.add_request(prompt(4), params(1), request_id="r0")
    assert engine.add_request(prompt(4), params(1)) == "r1"
    assert len(engine.run()) == 2


def test_an_id_is_in_use_until_its_finish_event_is_delivered() -> None:
    engine, toy = toy_engine(config())
    refused: list[Exception] = []

    def reuse(_: TokenEvent) -> None:
        try:
            engine.add_request(prompt(3, 2), params(2), request_id="second")
        except DuplicateRequest as error:
            refused.append(error)

    engine.add_request(prompt(4), params(1), request_id="first", on_event=reuse)
    engine.add_request(prompt(5, 1), params(1), request_id="second")
    events = engine.step()
    assert terminal(events) == [("first", FinishReason.LENGTH), ("second", FinishReason.LENGTH)]
    assert len(refused) == 1 and engine.completions["second"].token_ids == toy.alone(prompt(5, 1), params(1))
    assert_empty(engine)


def test_a_callback_may_reuse_its_own_id_when_it_has_ended() -> None:
    engine, toy = toy_engine(config())
    lengths = iter([5, 6])

    def again(event: TokenEvent) -> None:
        length = next(lengths, None) if event.finish_reason else None
        if length is not None:
            engine.add_request(prompt(length, length), params(2), request_id="a", on_event=again)

    engine.add_request(prompt(4), params(2), request_id="a", on_event=again)
    engine.run()
    assert list(engine.trace.requests) == ["a#1", "a#2", "a"] == list(engine.trace.finished)
    assert [record.num_prompt_tokens for record in engine.trace.requests.values()] == [4, 5, 6]
    assert [step.finished for step in engine.trace.steps if step.finished] == [
        {"a#1": "length"},
        {"a#2": "length"},
        {"a": "length"},
    ]
    assert engine.completions["a"].token_ids == toy.alone(prompt(6, 6), params(2))
    assert_empty(engine)


# Callbacks


def test_a_callback_that_raises_ends_its_request_alone() -> None:
    engine, toy = toy_engine(config())
    seen: list[TokenEvent] = []

    def fragile(event: TokenEvent) -> None:
        seen.append(event)
        if len(seen) >= 2:
            raise ValueError(f"event {len(seen)}")

    engine.add_request(prompt(4), params(9), request_id="bad", on_event=fragile)
    engine.add_request(prompt(5, 1), params(5), request_id="good")
    returned: list[TokenEvent] = []
    while engine.has_unfinished:
        returned += engine.step()
    bad, good = engine.completions["bad"], engine.completions["good"]
    assert bad.finish_reason is FinishReason.ERROR and str(bad.error) == "event 2", "the first error counts"
    assert [event.finish_reason for event in seen] == [None, None, FinishReason.ERROR]
    assert [event for event in returned if event.request_id == "bad"] == seen, "no token is lost from the events"
    assert bad.token_ids == toy.alone(prompt(4), params(2))
    assert good.token_ids == toy.alone(prompt(5, 1), params(5)) and good.error is None
    assert terminal(returned).count(("bad", FinishReason.ERROR)) == 1
    assert_empty(engine)


def test_a_callback_that_raises_on_the_last_event_is_reported() -> None:
    engine, _ = toy_engine(config())

    def fail(event: TokenEvent) -> None:
        if event.finish_reason:
            raise ValueError("at the end")

    engine.add_request(prompt(4), params(2), request_id="a", on_event=fail)
    (done,) = engine.run()
    assert done.finish_reason is FinishReason.LENGTH and str(done.error) == "at the end"
    assert_empty(engine)


def test_a_callback_may_add_and_abort() -> None:
    engine, toy = toy_engine(config())
    log = Log()

    def meddle(event: TokenEvent) -> None:
        if event.finish_reason is None and "added" not in engine.trace.requests:
            engine.add_request(prompt(6, 2), params(3), request_id="added", on_event=log)
            assert engine.abort("victim") and engine.abort("victim")

    engine.add_request(prompt(4), params(3), request_id="meddler", on_event=meddle)
    engine.add_request(prompt(5, 1), params(9), request_id="victim", on_event=log)
    events = engine.step()
    assert [event.request_id for event in events] == ["meddler", "victim", "victim"]
    assert terminal(events) == [("victim", FinishReason.ABORT)], "it got its token, then its end, once"
    assert engine.trace.steps[0].finished == {"victim": "abort"}
    engine.run()
    assert log.ends() == [("victim", FinishReason.ABORT), ("added", FinishReason.LENGTH)]
    assert engine.completions["added"].token_ids == toy.alone(prompt(6, 2), params(3))
    assert_empty(engine)


def test_aborts_in_callbacks_of_aborts_are_events_of_the_same_step() -> None:
    engine, _ = toy_engine(config())
    chain = {"a": "b", "b": "c", "c": "d"}

    def follow(event: TokenEvent) -> None:
        if event.finish_reason is FinishReason.ABORT or event.request_id == "a":
            engine.abort(chain.get(event.request_id, "nobody"))

    for index, name in enumerate("abcd"):
        engine.add_request(prompt(4, index), params(9), request_id=name, on_event=follow)
    assert terminal(engine.step()) == [(name, FinishReason.ABORT) for name in "bcd"]
    engine.run()
    assert_empty(engine)


def test_a_callback_that_aborts_itself() -> None:
    engine, _ = toy_engine(config())

    def abort(_: TokenEvent) -> None:
        engine.abort("a")

    engine.add_request(prompt(4), params(9), request_id="a", on_event=abort)
    assert terminal(engine.step()) == [("a", FinishReason.ABORT)] and len(engine.completions["a"].token_ids) == 1
    assert_empty(engine)


def test_an_abort_meant_for_one_request_never_hits_the_next_of_that_id() -> None:
    engine, toy = toy_engine(config(), tokenizer=Bytes())

    def first(event: TokenEvent) -> None:
        engine.abort("b")

    def second(event: TokenEvent) -> None:
        if event.finish_reason is FinishReason.ERROR:
            engine.add_request(prompt(5, 3), params(2), request_id="b")
        else:
            raise ValueError("ends itself in the step in which it is aborted")

    engine.add_request(prompt(4), params(1), request_id="a", on_event=first)
    engine.add_request(prompt(4, 1), params(9), request_id="b", on_event=second)
    engine.run()
    assert engine.completions["b"].token_ids == toy.alone(prompt(5, 3), params(2))
    assert engine.trace.finished["b#1"].reason == "error"
    assert_empty(engine)


@pytest.mark.parametrize("way", ["step", "run", "generate", "stream"])
def test_driving_the_engine_from_a_callback_is_refused(way: str) -> None:
    engine, toy = toy_engine(config())
    ways: dict[str, Callable[[], object]] = {
        "step": engine.step,
        "run": engine.run,
        "generate": lambda: engine.generate([prompt(3)], params(2)),
        "stream": lambda: list(engine.stream(prompt(3), params(2))),
    }

    def drive(_: TokenEvent) -> None:
        ways[way]()

    engine.add_request(prompt(4), params(3), request_id="a", on_event=drive)
    engine.add_request(prompt(5, 1), params(4), request_id="b")
    while engine.has_unfinished:
        engine.step()
    assert isinstance(engine.completions["a"].error, StepFailed)
    assert "inside a step" in str(engine.completions["a"].error)
    assert engine.completions["b"].token_ids == toy.alone(prompt(5, 1), params(4))
    assert_empty(engine)


# Abort


def test_b037_b107_aborting_everybody_between_steps() -> None:
    engine, _ = toy_engine(config(pool=6, bs=4, seqs=3))
    log = Log()
    for index in range(5):
        engine.add_request(prompt(6, index), params(12), request_id=f"r{index}", on_event=log)
    while not any(step.preempted for step in engine.trace.steps):
        engine.step()
    states = {request.status.value for request in engine.scheduler.requests.values()}
    assert states == {"running", "waiting", "preempted"}
    assert engine.abort_all() == 5
    assert log.ends() == [(f"r{index}", FinishReason.ABORT) for index in range(5)]
    assert engine.step() == [] and not engine.has_unfinished
    assert_empty(engine)


def test_b099_a_request_aborted_while_waiting_is_in_no_step() -> None:
    engine, _ = toy_engine(config(seqs=1))
    engine.add_request(prompt(4), params(5), request_id="A")
    engine.add_request(prompt(4, 1), params(5), request_id="B")
    engine.step()
    engine.abort("B")
    engine.run()
    assert all("B" not in step.request_ids and "B" not in step.finished for step in engine.trace.steps)
    finish = engine.trace.finished["B"]
    assert finish.reason == "abort" and finish.num_output_tokens == 0
    assert finish.time > engine.trace.requests["B"].arrival_time


def test_b101_aborting_what_is_not_there() -> None:
    engine, _ = toy_engine(config())
    log = Log()
    engine.add_request(prompt(4), params(1), request_id="a", on_event=log)
    engine.run()
    assert not engine.abort("nope") and not engine.abort("a") and not engine.abort("a")
    assert log.ends() == [("a", FinishReason.LENGTH)] and list(engine.trace.finished) == ["a"]


def test_b092_aborting_between_chunks_gives_everything_back() -> None:
    engine, toy = toy_engine(config(budget=4, bs=4, pool=20))
    for index in range(3):
        name = engine.add_request(prompt(20, index), params(2))
        engine.step()
        engine.step()
        assert engine.scheduler.pool.num_used == 2
        engine.abort(name)
        assert_empty(engine)
    done = engine.generate([prompt(12, 9)], params(3))[0]
    assert done.token_ids == toy.alone(prompt(12, 9), params(3))


class Hooks(Toy):
    """A toy with a hook before and behind the forward pass."""

    def __init__(self, limits: SchedulerConfig) -> None:
        super().__init__(limits.num_blocks, limits.block_size)
        self.hooks: dict[str, Callable[[], object]] = {}

    def execute(self, batch: ScheduledBatch, sampling: Mapping[str, SamplingParams]) -> Mapping[str, int | Exception]:
        """Hook, forward pass, hook."""
        self.hooks.get("before", bool)()
        tokens = super().execute(batch, sampling)
        self.hooks.get("behind", bool)()
        return tokens


@pytest.mark.parametrize("hook", ["after add", "before", "behind", "callback", "between", "while preempted"])
@pytest.mark.parametrize("position", ["victim first", "victim last"])
def test_b103_b105_abort_at_every_hook(hook: str, position: str) -> None:
    limits = config(pool=6, bs=4, seqs=4)
    toy = Hooks(limits)
    engine = Engine(toy, limits, clock=Ticks())
    victim, other = Log(), Log()

    def abort() -> None:
        if hook == "after add" or len(other.events) >= 2:
            engine.abort("victim")

    def callback(event: TokenEvent) -> None:
        other(event)
        if hook == "callback":
            abort()

    add = {
        "victim": lambda: engine.add_request(prompt(6), params(9), request_id="victim", on_event=victim),
        "other": lambda: engine.add_request(prompt(6, 1), params(9), request_id="other", on_event=callback),
    }
    for name in sorted(add, reverse=position == "victim first"):
        add[name]()
    if hook in ("before", "behind"):
        toy.hooks[hook] = abort
    while engine.has_unfinished:
        if hook == "while preempted" and len(other.events) == 2:
            preempt(engine, "victim")
            engine.abort("victim")
        elif hook in ("between", "after add"):
            abort()
        engine.step()
        engine.scheduler.check()
        assert victim.ends() or len(other.events) < 3, "within one step"
    assert victim.ends() == [("victim", FinishReason.ABORT)], "one finish event"
    assert other.ends() == [("other", FinishReason.LENGTH)]
    assert_alone(toy, {"other": engine.completions["other"]}, params(9))
    tokens = engine.completions["victim"].token_ids
    assert len(tokens) <= 3 and tokens == toy.alone(prompt(6), params(9))[: len(tokens)]
    assert_empty(engine)


def preempt(engine: Engine, name: str) -> None:
    """Send a running request back to the queue in a step of its own."""
    policy = engine.scheduler.policy
    engine.scheduler.policy = Scripted(lambda step: step.preempt(engine.scheduler.requests[name]))
    engine.step()
    engine.scheduler.policy = policy
    assert engine.scheduler.requests[name].status is RequestStatus.PREEMPTED


@pytest.mark.parametrize("hook", ["before", "behind"])
def test_b102_an_abort_in_the_last_step_is_an_abort(hook: str) -> None:
    limits = config()
    toy = Hooks(limits)
    engine = Engine(toy, limits)
    toy.hooks[hook] = lambda: len(toy.batches) >= (3 if hook == "before" else 4) and engine.abort("a")
    engine.add_request(prompt(4), params(4), request_id="a")
    (done,) = engine.run()
    assert done.finish_reason is FinishReason.ABORT and len(done.token_ids) == 3


def test_abort_of_a_waiting_request_inside_the_forward_pass_is_an_event_of_the_step() -> None:
    limits = config(seqs=1)
    toy = Hooks(limits)
    engine = Engine(toy, limits)
    toy.hooks["before"] = lambda: engine.abort("waits")
    engine.add_request(prompt(4), params(2), request_id="runs")
    engine.add_request(prompt(4), params(2), request_id="waits")
    assert terminal(engine.step()) == [("waits", FinishReason.ABORT)]
    engine.run()
    assert_empty(engine)


# Steps that fail


def flaky(failing: Sequence[int], error: type[BaseException] = RuntimeError) -> Callable[[ScheduledBatch], None]:
    """A hook that raises in the calls whose numbers are given."""
    calls = itertools.count()

    def before(_: ScheduledBatch) -> None:
        if next(calls) in failing:
            raise error("device lost")

    return before


@pytest.mark.parametrize("policy", POLICIES)
def test_b006_failed_steps_are_run_again_with_the_same_plan(policy: str) -> None:
    prompts = {f"r{index}": prompt(5 + index, index % 2) for index in range(6)}
    limits = config(pool=10, bs=4, budget=10, seqs=4)
    calm, _ = toy_engine(limits, policy)
    serve(calm, prompts, params(7))
    engine, toy = toy_engine(limits, policy, before=flaky(range(0, 200, 3)))
    for name, tokens in prompts.items():
        engine.add_request(tokens, params(7), request_id=name)
    failures = 0
    while engine.has_unfinished:
        try:
            engine.step()
        except StepFailed:
            failures += 1
        engine.scheduler.check()
    assert failures > 5 and engine.trace.digest() == calm.trace.digest(), "the failures left no mark"
    assert_alone(toy, engine.completions, params(7))
    assert_empty(engine)


def test_a_failed_step_may_be_given_up_by_aborting() -> None:
    engine, toy = toy_engine(config(), before=flaky([1]))
    logs = {name: Log() for name in "ab"}
    for index, name in enumerate("ab"):
        engine.add_request(prompt(5, index), params(4), request_id=name, on_event=logs[name])
    engine.step()
    engine.add_request(prompt(5, 7), params(4), request_id="late")
    with pytest.raises(StepFailed, match=r"step 1 raised .*call step\(\) to run it again, or abort requests"):
        engine.step()
    engine.add_request(prompt(5, 8), params(4), request_id="later")
    assert engine.trace.requests["later"].arrival_step == 2, "the failed step was planned without it"
    assert engine.abort("a")
    assert engine.trace.requests["later"].arrival_step == 1, "the next plan is a new one"
    engine.scheduler.check()
    engine.run()
    assert logs["a"].ends() == [("a", FinishReason.ABORT)]
    done = {name: engine.completions[name] for name in ("b", "late", "later")}
    assert_alone(toy, done, params(4))
    assert_empty(engine)


def test_an_abort_in_a_step_that_fails_and_is_given_up_still_ends_the_request() -> None:
    limits = config()
    toy = Hooks(limits)
    engine = Engine(toy, limits)
    log = Log()

    def abort_and_fail() -> None:
        engine.abort("a")
        raise RuntimeError("device lost")

    toy.hooks["before"] = abort_and_fail
    for index, name in enumerate("abc"):
        engine.add_request(prompt(4, index), params(3), request_id=name, on_event=log)
    with pytest.raises(StepFailed):
        engine.step()
    assert log.ends() == [] and "a" in engine.scheduler.requests
    toy.hooks.clear()
    engine.abort("b")
    assert log.ends() == [("a", FinishReason.ABORT), ("b", FinishReason.ABORT)]
    engine.run()
    assert engine.completions["c"].token_ids == toy.alone(prompt(4, 2), params(3))
    assert_empty(engine)


def test_an_abort_in_a_step_that_fails_and_is_run_again_ends_the_request() -> None:
    limits = config()
    toy = Hooks(limits)
    engine = Engine(toy, limits)

    def abort_and_fail() -> None:
        toy.hooks.clear()
        engine.abort("a")
        raise RuntimeError("device lost")

    toy.hooks["before"] = abort_and_fail
    engine.add_request(prompt(4), params(3), request_id="a")
    with pytest.raises(StepFailed):
        engine.step()
    assert terminal(engine.step()) == [("a", FinishReason.ABORT)]
    assert_empty(engine)


def test_a_waiting_request_aborted_in_a_step_that_fails_ends_at_once() -> None:
    limits = config(seqs=1)
    toy = Hooks(limits)
    engine = Engine(toy, limits)

    def abort_and_fail() -> None:
        toy.hooks.clear()
        engine.abort("waits")
        raise RuntimeError("device lost")

    toy.hooks["before"] = abort_and_fail
    log = Log()
    engine.add_request(prompt(4), params(3), request_id="runs")
    engine.add_request(prompt(4), params(3), request_id="waits", on_event=log)
    with pytest.raises(StepFailed):
        engine.step()
    assert log.ends() == [("waits", FinishReason.ABORT)]
    engine.run()
    assert engine.completions["runs"].token_ids == toy.alone(prompt(4), params(3))
    assert_empty(engine)


@pytest.mark.parametrize("where", ["before", "behind"])
def test_an_interrupt_in_the_forward_pass_costs_nothing(where: str) -> None:
    limits = config(budget=6)
    toy = Hooks(limits)
    engine = Engine(toy, limits)
    calls = itertools.count()

    def interrupt() -> None:
        if next(calls) in (0, 2, 5):
            raise KeyboardInterrupt

    toy.hooks[where] = interrupt
    prompts = {name: prompt(7, index) for index, name in enumerate("abc")}
    for name, tokens in prompts.items():
        engine.add_request(tokens, params(5), request_id=name)
    interrupts = 0
    while engine.has_unfinished:
        try:
            engine.run()
        except KeyboardInterrupt:
            interrupts += 1
            engine.scheduler.check()
    assert interrupts == 3
    assert_alone(toy, engine.completions, params(5))
    assert_empty(engine)


def test_an_interrupt_in_a_callback_waits_for_the_end_of_the_step() -> None:
    engine, toy = toy_engine(config())
    log = Log()

    def interrupted(event: TokenEvent) -> None:
        if event.finish_reason is None and not log.events:
            raise KeyboardInterrupt

    engine.add_request(prompt(4), params(2), request_id="a", on_event=interrupted)
    engine.add_request(prompt(5, 1), params(1), request_id="b", on_event=log)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert log.ends() == [("b", FinishReason.LENGTH)], "the other's events were not lost"
    engine.run()
    assert_alone(toy, {"a": engine.completions["a"]}, params(2))
    assert_empty(engine)


def test_an_interrupt_while_planning_costs_nothing() -> None:
    engine, toy = toy_engine(config())
    policy = engine.scheduler.policy

    def interrupted(step: Step) -> None:
        policy.schedule(step)
        raise KeyboardInterrupt

    engine.add_request(prompt(4), params(3), request_id="a")
    engine.scheduler.policy = Scripted(interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.scheduler.policy = policy
    engine.run()
    assert_alone(toy, engine.completions, params(3))


@pytest.mark.parametrize("result", [None, [1, 2], 7, "tokens"])
def test_an_executor_that_returns_no_mapping_fails_the_step(result: Any) -> None:
    engine, toy = toy_engine(config())
    engine.add_request(prompt(4), params(3), request_id="a")
    execute = toy.execute
    toy.execute = lambda batch, sampling: result  # type: ignore[method-assign]  # for this test only
    with pytest.raises(StepFailed, match=f"execute returned {type(result).__name__}, not a mapping"):
        engine.step()
    toy.execute = execute  # type: ignore[method-assign]  # as it was
    engine.run()
    assert_alone(toy, engine.completions, params(3))


@pytest.mark.parametrize("failure", [ValueError("NaN"), -1, 9999, 1.5, None])
def test_sampling_that_fails_for_one_request_ends_it_alone(failure: Any) -> None:
    class Failing(Toy):
        """Fails one request in its second step."""

        def execute(
            self, batch: ScheduledBatch, sampling: Mapping[str, SamplingParams]
        ) -> Mapping[str, int | Exception]:
            """A wrong token, or none."""
            tokens = dict(super().execute(batch, sampling))
            if len(self.batches) == 2:
                tokens["bad"] = failure
                if failure is None:
                    del tokens["bad"]
            return tokens

    limits = config()
    toy = Failing(limits.num_blocks, limits.block_size)
    engine = Engine(toy, limits)
    log = Log()
    for name in ("first", "bad", "last"):
        engine.add_request(prompt(9), params(4), request_id=name, on_event=log)
    while engine.has_unfinished:
        engine.step()
        engine.scheduler.check()
    bad = engine.completions["bad"]
    assert bad.finish_reason is FinishReason.ERROR and bad.error is not None and len(bad.token_ids) == 1
    assert_alone(toy, {name: engine.completions[name] for name in ("first", "last")}, params(4))
    assert log.ends().count(("bad", FinishReason.ERROR)) == 1
    assert engine.trace.steps[1].finished == {"bad": "error"} and "bad" not in engine.trace.steps[1].sampled
    assert_empty(engine)


def test_a_policy_error_comes_out_of_step_and_the_engine_goes_on() -> None:
    engine, toy = toy_engine(config())
    policy = engine.scheduler.policy
    engine.add_request(prompt(4), params(3), request_id="a")
    engine.scheduler.policy = Scripted(lambda step: step.admit(step.waiting.head, 99))
    with pytest.raises(PolicyError, match="grant of 99 tokens"):
        engine.step()
    assert not engine.trace.steps
    engine.scheduler.policy = Scripted(lambda step: None)
    with pytest.raises(SchedulerStalled, match="<a waiting"):
        engine.run()
    engine.scheduler.policy = policy
    engine.run()
    assert_alone(toy, engine.completions, params(3))


class Fragile(Pieces):
    """A tokenizer that cannot decode one of its tokens."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Raises for token 2."""
        if 2 in token_ids:
            raise UnicodeError("token 2 is broken")
        return super().decode(token_ids)


@pytest.mark.parametrize("last", [False, True])
def test_a_tokenizer_that_raises_ends_one_request(last: bool) -> None:
    engine = scripted({"bad": [0, 2, 0], "good": [0, 1, 0]}, Fragile("a", "b", "c"))
    log = Log()
    for name in ("bad", "good"):
        engine.add_request([0], params(2 if last else 3), request_id=name, on_event=log)
    engine.run()
    assert engine.completions["bad"].finish_reason is FinishReason.ERROR
    assert isinstance(engine.completions["bad"].error, UnicodeError) and engine.completions["bad"].text == "a"
    assert engine.completions["good"].text == ("ab" if last else "aba")
    assert sorted(name for name, _ in log.ends()) == ["bad", "good"]
    assert engine.trace.finished["bad"].reason == "error"
    assert_empty(engine)


# Refusals disturb nobody


def test_b134_a_refused_request_disturbs_nobody() -> None:
    engine, toy = toy_engine(config(), tokenizer=Bytes())
    for index, name in enumerate("ab"):
        engine.add_request(prompt(5, index), params(6), request_id=name)
    engine.step()
    wrong: list[Callable[[], object]] = [
        lambda: engine.add_request([]),
        lambda: engine.add_request(""),
        lambda: engine.add_request([251]),
        lambda: engine.add_request(prompt(3), request_id="a"),
        lambda: engine.add_request(prompt(300)),
        lambda: engine.add_request(prompt(3), {"max_tokens": 3}),  # type: ignore[arg-type]  # that is the point
        lambda: engine.add_request(5),  # type: ignore[arg-type]  # that is the point
    ]
    for add in wrong:
        with pytest.raises(InvalidRequest):
            add()
    assert set(engine.trace.requests) == {"a", "b"} == set(engine._clients)
    engine.run()
    assert_alone(toy, engine.completions, params(6))
    assert_empty(engine)


def test_text_without_a_tokenizer_is_refused() -> None:
    engine, _ = toy_engine(config())
    with pytest.raises(InvalidRequest, match="no tokenizer; pass token ids"):
        engine.add_request("text")
    with pytest.raises(InvalidRequest, match=r"stop is \('x',\) and this engine has no tokenizer; use stop_token_ids"):
        engine.add_request([1], params(3, stop="x"))
    assert_empty(engine)


def test_b028_every_accepted_request_has_one_finish_event() -> None:
    engine, _ = toy_engine(config(pool=5, bs=2, mml=12))
    log = Log()
    accepted = []
    for index, (length, max_tokens) in enumerate(itertools.product((1, 5, 10, 11, 24), (1, 3, None))):
        try:
            accepted.append(engine.add_request(prompt(length, index), params(max_tokens), on_event=log))
        except InvalidRequest:
            continue
    engine.run()
    assert sorted(name for name, _ in log.ends()) == sorted(accepted) and len(accepted) < 15
    assert_empty(engine)


# Nothing leaks


@pytest.mark.parametrize("bs", [1, 4, 16])
@pytest.mark.parametrize("chunked", [True, False])
def test_b081_b082_nothing_leaks(bs: int, chunked: bool) -> None:
    budget = 8 if chunked else 40
    engine, toy = toy_engine(config(pool=160 // bs // 2, bs=bs, budget=budget, chunked=chunked, seqs=5))
    names = []
    for index in range(30):
        names.append(engine.add_request(prompt(6 + index % 9, index % 3), params(1 + index % 7)))
        engine.step()
        engine.scheduler.check()
        if index % 5 == 4:
            engine.abort(names[index - 2])
            engine.scheduler.check()
    while engine.has_unfinished:
        engine.step()
        engine.scheduler.check()
    assert_empty(engine)
    for completion in engine.completions.values():
        wanted = toy.alone(completion.prompt_token_ids, params(7))
        assert completion.token_ids == wanted[: len(completion.token_ids)]


def test_b044_b084_many_chats_one_after_another() -> None:
    engine, toy = toy_engine(config(pool=8, bs=4))
    for index in range(50):
        done = engine.generate([prompt(12, index)], params(3))[0]
        assert done.token_ids == toy.alone(prompt(12, index), params(3))
        assert_empty(engine)
    assert all(step.num_tokens for step in engine.trace.steps)


def test_b085_b093_a_shared_prefix_is_never_evicted_under_a_live_request() -> None:
    engine, toy = toy_engine(config(pool=6, bs=4, prefix=True))
    shared = prompt(8)
    serve(engine, {"X": [*shared, 7]}, params(1))
    engine.add_request([*shared, 9], params(5), request_id="B")
    engine.step()
    assert engine.trace.steps[-1].cached == {"B": 8}
    table = list(engine.scheduler.requests["B"].block_table[:2])
    engine.add_request(prompt(15, 3), params(2), request_id="C")
    while "B" in engine.scheduler.requests:
        assert engine.scheduler.requests["B"].block_table[:2] == table
        assert all(engine.scheduler.pool.ref_count[block] == 1 for block in table)
        engine.step()
        engine.scheduler.check()
    engine.run()
    assert_alone(toy, {"B": engine.completions["B"]}, params(5))
    assert_alone(toy, {"C": engine.completions["C"]}, params(2))


def test_b089_only_completions_and_the_trace_are_kept() -> None:
    engine, _ = toy_engine(config())
    for index in range(20):
        if index % 2:
            list(engine.stream(prompt(4, index), params(2)))
        else:
            engine.add_request(prompt(4, index), params(2))
    engine.run()
    assert_empty(engine)
    assert len(engine.completions) == 10


# Batched = alone


def test_b114_b094_equal_prompts_in_one_step() -> None:
    for budget in (64, 9, 4):
        for prefix in (True, False):
            engine, toy = toy_engine(config(budget=budget, bs=4, prefix=prefix))
            assert_alone(toy, serve(engine, {"a": prompt(9), "b": prompt(9)}, params(5)), params(5))


def test_b124_the_next_turn_of_a_chat_hits_the_last_one() -> None:
    engine, toy = toy_engine(config(bs=4))
    first = prompt(10)
    answer = engine.generate([first], params(7))[0].token_ids
    second = [*first, *answer, *prompt(5, 9)]
    done = engine.generate([second], params(4))[0]
    computed = len(first) + len(answer) - 1
    assert [step.cached for step in engine.trace.steps if step.cached] == [{done.request_id: computed // 4 * 4}]
    assert done.token_ids == toy.alone(second, params(4))


def test_b125_the_prefix_cache_changes_no_token() -> None:
    prompts = {f"r{index}": [*prompt(4 * (index % 4)), *prompt(5, index)] for index in range(20)}
    for prefix in (True, False):
        engine, toy = toy_engine(config(pool=24, bs=4, prefix=prefix, seqs=4, budget=16))
        assert_alone(toy, serve(engine, prompts, params(6)), params(6))


def test_b164_equal_prompts_at_any_time() -> None:
    for size in (1, 2, 4, 8):
        engine, toy = toy_engine(config(seqs=size))
        assert_alone(toy, serve(engine, {f"r{index}": prompt(9) for index in range(8)}, params(6)), params(6))


def test_b165_other_chunks_change_no_token() -> None:
    engine, toy = toy_engine(config(budget=4))
    done = serve(engine, {"a": prompt(15), "b": prompt(9, 1)}, params(5))
    chunks = [
        count for step in engine.trace.steps for count, kind in zip(step.counts, step.kinds, strict=True) if kind == "P"
    ]
    assert chunks != [4, 4, 4, 3, 4, 4, 1]
    assert_alone(toy, done, params(5))


def test_b162_b167_a_seed_gives_the_same_tokens_alone_and_in_a_batch() -> None:
    engine, toy = toy_engine(config(pool=10, bs=4, seqs=3, prefix=False))
    sampling = {
        "greedy": params(9),
        "seven": params(9, temperature=1.0, seed=7),
        "eight": params(9, temperature=0.5, seed=8),
        "short": params(2, temperature=1.0, seed=7),
    }
    prompts = {name: prompt(6) for name in sampling}
    first = {name: done.token_ids for name, done in serve(engine, prompts, sampling).items()}
    assert any(step.preempted for step in engine.trace.steps)
    assert first == {name: toy.alone(prompt(6), wanted) for name, wanted in sampling.items()}
    assert len(set(first.values())) == 4 and first["short"] == first["seven"][:2]
    assert engine.generate([prompt(6)], sampling["seven"])[0].token_ids == first["seven"]


def test_a_request_without_a_seed_gets_one_from_the_engine() -> None:
    def tokens(seed: int, temperature: float = 1.0) -> list[tuple[int, ...]]:
        engine = Engine(Toy(64, 4), config(), seed=seed)
        return [done.token_ids for done in engine.generate([prompt(5)] * 3, params(8, temperature=temperature))]

    assert tokens(0) == tokens(0) != tokens(1)
    assert len(set(tokens(0))) == 3, "a seed for each request"
    assert len(set(tokens(0, temperature=0.0))) == 1


def test_b185_b186_rows_that_end_at_different_times() -> None:
    engine, toy = toy_engine(config(pool=25, bs=4, seqs=10))
    assert_alone(toy, serve(engine, {f"r{i}": prompt(5, i) for i in range(10)}, params(6)), params(6))
    for order in itertools.permutations(range(1, 5)):
        engine, toy = toy_engine(config())
        sampling = {f"r{i}": params(count) for i, count in enumerate(order)}
        assert_alone(toy, serve(engine, {name: prompt(4 + len(name)) for name in sampling}, sampling), sampling)


@pytest.mark.parametrize("bs", [4, 16])
@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize(("budget", "chunked"), [(16, True), (64, True), (512, True), (512, False)])
def test_b059_64_mixed_requests_in_a_tiny_pool(bs: int, prefix: bool, budget: int, chunked: bool) -> None:
    """The workload of the acceptance criteria (prompts 1 to 200, outputs 1 to 64), with the toy in place of a model."""
    draw = random.Random(1)
    sizes = [(round(200 ** draw.random()), draw.randint(1, 64)) for _ in range(64)]
    prompts = {f"r{index}": prompt(length, index % 5) for index, (length, _) in enumerate(sizes)}
    sampling = {f"r{index}": params(max_tokens) for index, (_, max_tokens) in enumerate(sizes)}
    limits = config(pool=320 // bs, bs=bs, budget=budget, chunked=chunked, prefix=prefix, seqs=16, mml=264)
    engine, toy = toy_engine(limits)
    done = {name: engine.add_request(tokens, sampling[name], request_id=name) for name, tokens in prompts.items()}
    engine.run()
    assert sum(len(step.preempted) for step in engine.trace.steps) >= 20
    assert_alone(toy, {name: engine.completions[name] for name in done}, sampling)
    assert_empty(engine)


@given(
    pool=st.integers(6, 30),
    bs=st.sampled_from([1, 2, 4, 8]),
    budget=st.integers(1, 24),
    seqs=st.integers(1, 6),
    prefix=st.booleans(),
    long_cap=st.sampled_from([0, 0, 3]),
    watermark=st.sampled_from([0.0, 0.2]),
    policy=st.sampled_from(sorted(POLICIES)),
    work=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 9), st.integers(1, 8)), min_size=1, max_size=9
    ),
)
@settings(max_examples=80)
def test_batched_equals_alone(
    pool: int,
    bs: int,
    budget: int,
    seqs: int,
    prefix: bool,
    long_cap: int,
    watermark: float,
    policy: str,
    work: list[tuple[int, int, int, int]],
) -> None:
    """Any limits, any policy, prompts that share prefixes: every request gets the tokens it gets alone."""
    limits = config(
        pool=pool, bs=bs, budget=budget, seqs=seqs, prefix=prefix, long_cap=long_cap, watermark=watermark, mml=64
    )
    engine, toy = toy_engine(limits, policy)
    accepted: dict[str, SamplingParams] = {}
    for family, blocks, tail, max_tokens in work:
        tokens = [*prompt(blocks * bs, family), *prompt(tail, family + blocks)]
        try:
            accepted[engine.add_request(tokens, params(max_tokens))] = params(max_tokens)
        except RequestTooLarge:
            continue
        engine.step()
        engine.scheduler.check()
    while engine.has_unfinished:
        engine.step()
        engine.scheduler.check()
    assert_alone(toy, {name: engine.completions[name] for name in accepted}, accepted)
    assert_empty(engine)
