"""Cases of parameters, edge requests, stop conditions and streamed text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contbatch import POLICIES, Engine, FinishReason, SamplingParams, ScriptedExecutor, StaticBatching, summarise
from contbatch.config import SchedulerConfig
from contbatch.engine import Completion
from contbatch.errors import DuplicateRequest, InvalidRequest
from tests.toy import (
    Bytes,
    Pieces,
    Ticks,
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


def both_ways(
    script: Sequence[int], tokenizer: Bytes | Pieces, sampling: SamplingParams, eos: Sequence[int] = ()
) -> tuple[list[str], Completion]:
    """The pieces that a stream gives, and the completion; they must agree."""
    engine = scripted({"stream": script, "whole": script}, tokenizer, eos)
    events = list(engine.stream([0], sampling, request_id="stream"))
    engine.add_request([0], sampling, request_id="whole")
    (done,) = engine.run()
    assert "".join(event.text for event in events) == done.text
    assert terminal(events) == [("stream", done.finish_reason)]
    assert [event.token_id for event in events] == list(done.token_ids)
    assert_empty(engine)
    return [event.text for event in events], done


# Parameters and edge requests


def test_b132_max_tokens_0_is_refused_and_the_engine_lives() -> None:
    engine, toy = toy_engine(config())
    engine.add_request(prompt(5), params(3), request_id="before")
    engine.step()
    with pytest.raises(InvalidRequest, match="max_tokens is 0"):
        engine.add_request(prompt(5, 1), SamplingParams(max_tokens=0))
    done = serve(engine, {"after": prompt(5, 2)}, params(2))
    assert_alone(toy, done, params(2))
    assert_alone(toy, {"before": engine.completions["before"]}, params(3))


@cache
def baseline() -> dict[str, tuple[int, ...]]:
    """What static batching generates for nine requests with 1 to 9 tokens."""
    engine, _ = toy_engine(config(bs=4, seqs=9), StaticBatching(9))
    return {name: done.token_ids for name, done in serve(engine, *nine()).items()}


def nine() -> tuple[dict[str, list[int]], dict[str, SamplingParams]]:
    """Prompts and parameters of those nine requests."""
    return (
        {f"r{count}": prompt(1 + count % 5, count) for count in range(1, 10)},
        {f"r{count}": params(count) for count in range(1, 10)},
    )


@pytest.mark.parametrize("budget", range(1, 5))
@pytest.mark.parametrize("policy", POLICIES)
def test_b133_any_budget_gives_max_tokens_and_what_static_batching_gives(policy: str, budget: int) -> None:
    engine, _ = toy_engine(config(budget=budget, bs=4, seqs=9), policy)
    done = serve(engine, *nine())
    assert {name: len(completion.token_ids) for name, completion in done.items()} == {f"r{n}": n for n in range(1, 10)}
    assert {name: completion.token_ids for name, completion in done.items()} == baseline()


def test_b134_empty_prompts_disturb_nobody() -> None:
    engine, toy = toy_engine(config(), tokenizer=Bytes())
    for index, name in enumerate("ab"):
        engine.add_request(prompt(6, index), params(8), request_id=name)
    engine.step()
    empty: tuple[Any, ...] = ([], "", ())
    for nothing in empty:
        with pytest.raises(ValueError, match="empty prompt"):
            engine.add_request(nothing, params(8))
    engine.run()
    assert_alone(toy, engine.completions, params(8))
    assert set(engine.completions) == set("ab")
    assert_empty(engine)


def test_b135_an_id_in_use_is_refused_and_free_after_its_end() -> None:
    engine, toy = toy_engine(config())
    engine.add_request(prompt(4), params(3), request_id="r")
    for _ in range(2):
        with pytest.raises(DuplicateRequest, match="'r' is in use") as refused:
            engine.add_request(prompt(5, 1), params(2), request_id="r")
        assert isinstance(refused.value, ValueError)
        engine.step()
    engine.run()
    assert_alone(toy, {"r": engine.completions["r"]}, params(3))
    engine.add_request(prompt(5, 1), params(2), request_id="r")
    engine.run()
    assert_alone(toy, {"r": engine.completions["r"]}, params(2))
    requests = summarise(engine.trace).requests.values()
    assert len(requests) == 2
    for times in (line for request in requests for line in (request.seconds, request.steps)):
        assert all(value is not None and value >= 0 for value in (times.queue_time, times.ttft, times.tpot, times.e2e))
        assert all(value >= 0 for value in times.itl)


def test_b136_generate_twice() -> None:
    engine, toy = toy_engine(config(seqs=2))
    prompts = [prompt(9), prompt(2, 1), prompt(5, 2)]
    runs = [engine.generate(prompts, params(4)) for _ in range(2)]
    for done in runs:
        assert [completion.token_ids for completion in done] == [toy.alone(tokens, params(4)) for tokens in prompts]
    assert len({completion.request_id for done in runs for completion in done}) == 6


@pytest.mark.parametrize("value", [-1, -100, 1.5, "3", True])
def test_b138_max_tokens_that_is_no_positive_integer_is_named(value: Any) -> None:
    with pytest.raises(ValueError, match=f"max_tokens is {value!r}"):
        SamplingParams(max_tokens=value)


def test_b139_without_a_limit_the_model_length_ends_it() -> None:
    engine, _ = toy_engine(config(mml=16), eos=range(251))
    (done,) = engine.generate([prompt(8)], params(None, ignore_eos=True))
    assert (len(done.token_ids), done.finish_reason) == (8, FinishReason.LENGTH)


@given(
    mml=st.integers(2, 24),
    asked=st.lists(
        st.tuples(st.integers(1, 23), st.one_of(st.none(), st.integers(1, 30)), st.booleans()), min_size=1, max_size=6
    ),
    policy=st.sampled_from(sorted(POLICIES)),
)
def test_b140_nobody_outgrows_the_model_length(
    mml: int, asked: list[tuple[int, int | None, bool]], policy: str
) -> None:
    """A model that never ends a sequence ends everybody with `length`."""
    engine, _ = toy_engine(config(mml=mml, bs=4, pool=24), policy)
    lengths: dict[str, tuple[int, int]] = {}
    for index, (length, max_tokens, sampled) in enumerate(asked):
        wanted = params(max_tokens, temperature=float(sampled))
        if length >= mml:
            with pytest.raises(InvalidRequest, match=f"max_model_len={mml}"):
                engine.add_request(prompt(length, index), wanted)
        else:
            name = engine.add_request(prompt(length, index), wanted)
            lengths[name] = length, min(max_tokens or mml, mml - length)
    done = {completion.request_id: completion for completion in engine.run()}
    assert {name: len(completion.token_ids) for name, completion in done.items()} == {
        name: count for name, (_, count) in lengths.items()
    }
    for name, (length, _) in lengths.items():
        assert length + len(done[name].token_ids) <= mml and done[name].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("policy", POLICIES)
def test_b141_one_token_takes_one_step_and_has_no_tpot(policy: str) -> None:
    engine, _ = toy_engine(config(budget=8), policy)
    serve(engine, {"a": prompt(5)}, params(1))
    metrics = summarise(engine.trace)
    assert (metrics.num_steps, metrics.decode_tokens) == (1, 0)
    assert metrics.requests["a"].steps.tpot is None and metrics.requests["a"].seconds.tpot is None


@pytest.mark.parametrize(("asked", "got"), [(9, 9), (10, 10), (11, 10), (20, 10), (None, 10)])
def test_b142_max_tokens_is_cut_to_what_fits(asked: int | None, got: int) -> None:
    """Nothing is refused, so there is no message; the trace has the number that counts."""
    engine, _ = toy_engine(config(mml=16))
    engine.add_request(prompt(6), params(asked), request_id="a")
    assert engine.trace.requests["a"].max_tokens == got
    (done,) = engine.run()
    assert len(done.token_ids) == got


def test_b143_every_policy_finishes_the_same_ten_requests() -> None:
    prompts = {f"r{index}": prompt(1 + 3 * index % 17, index) for index in range(10)}
    sampling = {name: params(1 + index % 5) for index, name in enumerate(prompts)}
    totals = set()
    for name in POLICIES:
        engine, _ = toy_engine(config(pool=12, bs=4, budget=12, seqs=4), name)
        done = serve(engine, prompts, sampling)
        metrics = summarise(engine.trace)
        totals.add((metrics.completed, metrics.output_tokens, tuple(item.token_ids for item in done.values())))
    (total,) = totals
    assert total[:2] == (10, 30)


# Stop conditions

FOX = Pieces("The", " quick", " brown", " fox", " jumps")


@pytest.mark.parametrize(
    ("stop", "text", "count"),
    [
        ("own fox", "The quick br", 4),
        (" quick", "The", 2),
        ("e q", "Th", 2),
        ("The", "", 1),
        ("jumps", "The quick brown fox ", 5),
        ("s", "The quick brown fox jump", 5),
    ],
)
def test_b145_a_stop_string_across_tokens_is_never_shown(stop: str, text: str, count: int) -> None:
    pieces, done = both_ways(range(5), FOX, params(5, stop=stop))
    assert (done.text, done.finish_reason, len(done.token_ids)) == (text, FinishReason.STOP, count)
    assert text.startswith("".join(pieces))


def test_b147_text_before_a_stop_string_in_the_same_token_stays() -> None:
    pieces, done = both_ways(range(3), Pieces(" four,", " five", " six,"), params(9, stop="five"))
    assert done.text == " four, " and done.finish_reason is FinishReason.STOP
    assert pieces == [" four,", " "], "the end adds nothing"


@pytest.mark.parametrize(
    ("changes", "count", "reason", "word"),
    [
        ({"max_tokens": 9}, 3, FinishReason.EOS, "stop"),
        ({"max_tokens": 9, "stop": "b"}, 2, FinishReason.STOP, "stop"),
        ({"max_tokens": 9, "stop_token_ids": [2]}, 2, FinishReason.STOP, "stop"),
        ({"max_tokens": 2}, 2, FinishReason.LENGTH, "length"),
        ({"max_tokens": None, "ignore_eos": True}, 13, FinishReason.LENGTH, "length"),
        ({"max_tokens": 99, "ignore_eos": True}, 13, FinishReason.LENGTH, "length"),
    ],
)
def test_b149_four_endings(changes: dict[str, Any], count: int, reason: FinishReason, word: str) -> None:
    """The end of a sequence has its own reason here; `vllm` gives the word of the case."""
    engine = scripted({"a": [1, 2, 0, *[3] * 20]}, Pieces("<eos>", "a", "b", "c"), eos=[0, 9], limits=config(mml=16))
    engine.add_request([1, 2, 3], params(**changes), request_id="a")
    (done,) = engine.run()
    assert (len(done.token_ids), done.finish_reason, done.finish_reason.vllm) == (count, reason, word)
    assert_empty(engine)


@pytest.mark.parametrize(
    ("changes", "count", "reason"),
    [
        ({"ignore_eos": True}, 5, FinishReason.LENGTH),
        ({"ignore_eos": True, "stop_token_ids": [0]}, 2, FinishReason.STOP),
        ({"ignore_eos": True, "stop_token_ids": [7]}, 5, FinishReason.LENGTH),
        ({}, 2, FinishReason.EOS),
    ],
)
def test_b150_ignore_eos_and_a_stop_token_of_the_user(
    changes: dict[str, Any], count: int, reason: FinishReason
) -> None:
    """What the user names explicitly wins over `ignore_eos`."""
    engine = scripted({"a": [5, 0, 6, 6, 6]}, eos=[0])
    engine.add_request([1], params(5, **changes), request_id="a")
    (done,) = engine.run()
    assert (len(done.token_ids), done.finish_reason) == (count, reason)


def test_b152_end_tokens_in_a_prompt_stop_nobody() -> None:
    """There is no padding token, so none can be taken for the end of a sequence."""
    engine = scripted({}, eos=[0])
    for name, tokens in {"a": [1, 2, 3], "b": [1, 2, 3, 4, 5, 6, 7], "c": [0, 1, 0], "d": [0]}.items():
        engine.add_request(tokens, params(5), request_id=name)
    assert [len(done.token_ids) for done in engine.run()] == [5] * 4


def test_b153_text_that_was_held_back_comes_with_the_end() -> None:
    pieces, done = both_ways([0, 1, 2], Pieces("ple", "as", ""), params(9, stop="please"), eos=[2])
    assert done.text == "pleas" and done.finish_reason is FinishReason.EOS
    assert pieces == ["", "", "pleas"]


def test_b154_an_end_token_first() -> None:
    engine = scripted({"a": [0]}, Pieces("", "x"), eos=[0], limits=config(seqs=1))
    engine.add_request([1, 1], params(9), request_id="a")
    engine.add_request([1, 1], params(1), request_id="next")
    events = engine.step()
    assert terminal(events) == [("a", FinishReason.EOS)] and events[0].finish_reason is not None
    assert (engine.completions["a"].text, events[0].finish_reason.vllm) == ("", "stop")
    assert engine.scheduler.pool.num_used == 0 and not engine.scheduler.running, "all is back in that step"
    engine.step()
    assert engine.trace.steps[1].admitted == ["next"]


def test_b156_stop_in_every_spelling() -> None:
    tokenizer = Pieces("a", "x", "b")
    spellings: tuple[Any, ...] = ("x", ["x"], ("x",))
    for stop in spellings:
        _, done = both_ways([0, 1, 2], tokenizer, params(3, stop=stop))
        assert (done.text, done.finish_reason) == ("a", FinishReason.STOP)
    for nothing in ([], None, ()):
        _, done = both_ways([0, 1, 2], tokenizer, params(3, stop=nothing))
        assert (done.text, done.finish_reason) == ("axb", FinishReason.LENGTH)
    for empty in ([""], "", ["x", ""]):
        with pytest.raises(ValueError, match="stop contains ''"):
            params(3, stop=empty)


def test_b157_stop_lists_of_different_sizes_in_one_batch() -> None:
    stops = {"none": (), "one": ("cd",), "three": ("q", "b", "zz")}
    engine = scripted({name: [0, 1, 2, 3, 0] for name in stops}, Pieces("a", "b", "c", "d"))
    for name, stop in stops.items():
        engine.add_request([0], params(5, stop=stop), request_id=name)
    done = {completion.request_id: completion for completion in engine.run()}
    assert engine.trace.steps[0].num_running == 3
    assert {name: (done[name].text, done[name].finish_reason.value) for name in stops} == {
        "none": ("abcda", "length"),
        "one": ("ab", "stop"),
        "three": ("a", "stop"),
    }


# Streaming text


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("\u010fx", ["", "\u010f", "x"]),
        ("\U0001f600", ["", "", "", "\U0001f600"]),
        ("a\u20ac", ["a", "", "", "\u20ac"]),
    ],
)
def test_b158_a_character_of_several_tokens_comes_whole(text: str, pieces: list[str]) -> None:
    tokens = list(text.encode())
    assert both_ways(tokens, Bytes(), params(len(tokens)))[0] == pieces


def test_b158_an_emoji_of_several_characters() -> None:
    text = "hi \U0001f469\u200d\U0001f469\u200d\U0001f467 x"
    tokens = list(text.encode())
    pieces, done = both_ways(tokens, Bytes(), params(len(tokens)))
    assert done.text == text and not any("\ufffd" in piece for piece in pieces)
    shown = ["".join(pieces[: count + 1]) for count in range(len(pieces))]
    assert all(later.startswith(earlier) for earlier, later in pairwise(shown)) and shown[-1] == text
