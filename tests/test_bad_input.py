"""Bad input, row by row: an exception of ours that names the bad value and says what to change; nothing else moves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from contbatch.engine import Engine
from contbatch.errors import (
    ContbatchError,
    DuplicateRequest,
    InvalidConfig,
    InvalidRequest,
    RequestTooLarge,
    TraceError,
    UnknownName,
)
from contbatch.request import SamplingParams
from contbatch.trace import Trace
from tests.toy import Bytes, Toy, assert_alone, assert_empty, config, params, prompt, toy_engine


@dataclass(frozen=True)
class Row:
    """One row of bad input: how to do it, what is raised, and the words that must be in the message."""

    name: str
    do: Callable[[Engine], object]
    error: type[ContbatchError]
    says: tuple[str, ...]


def sampling(**fields: Any) -> Callable[[Engine], object]:
    """A request with one wrong sampling value."""
    return lambda engine: engine.add_request(prompt(3), SamplingParams(**fields))


ROWS = [
    Row("empty prompt", lambda e: e.add_request([]), InvalidRequest, ("empty prompt", "at least one token")),
    Row("empty text", lambda e: e.add_request(""), InvalidRequest, ("empty prompt", "at least one token")),
    Row("token too large", lambda e: e.add_request([1, 251, 2]), InvalidRequest, ("token id 251", "0 to 250")),
    Row("token negative", lambda e: e.add_request([1, -3]), InvalidRequest, ("-3", "integers from 0")),
    Row("token no integer", lambda e: e.add_request([1, "x"]), InvalidRequest, ("'x'", "integers from 0")),  # type: ignore[list-item]
    Row("max_tokens 0", sampling(max_tokens=0), InvalidRequest, ("max_tokens is 0", "at least 1")),
    Row("max_tokens negative", sampling(max_tokens=-5), InvalidRequest, ("max_tokens is -5", "at least 1")),
    Row("prompt too long", lambda e: e.add_request(prompt(64)), RequestTooLarge, ("64", "max_model_len=64", "shorten")),
    Row(
        "larger than the pool",
        lambda e: e.add_request(prompt(30), params(9)),
        RequestTooLarge,
        ("30 prompt tokens and max_tokens=9", "10 blocks", "num_blocks=8", "lower max_tokens or raise num_blocks"),
    ),
    Row(
        "duplicate id",
        lambda e: e.add_request(prompt(3), request_id="live"),
        DuplicateRequest,
        ("'live'", "use another id"),
    ),
    Row("temperature negative", sampling(temperature=-0.5), InvalidRequest, ("temperature is -0.5", "0 (greedy)")),
    Row("temperature NaN", sampling(temperature=math.nan), InvalidRequest, ("temperature is nan", "finite")),
    Row("top_p 0", sampling(top_p=0), InvalidRequest, ("top_p is 0", "above 0 and up to 1")),
    Row("top_p 1.5", sampling(top_p=1.5), InvalidRequest, ("top_p is 1.5", "above 0 and up to 1")),
    Row("top_p NaN", sampling(top_p=math.nan), InvalidRequest, ("top_p is nan", "finite")),
    Row("budget 0", lambda e: config(budget=0), InvalidConfig, ("max_num_batched_tokens is 0", "at least 1")),
    Row("block size 0", lambda e: config(bs=0), InvalidConfig, ("block_size is 0", "at least 1")),
    Row("pool 0", lambda e: config(pool=0), InvalidConfig, ("num_blocks is 0", "at least 1")),
    Row("seats 0", lambda e: config(seqs=0), InvalidConfig, ("max_num_seqs is 0", "at least 1")),
    Row("unknown policy", lambda e: Engine(Toy(8, 4), policy="Vllm"), UnknownName, ("'Vllm'", "there are VllmV1")),
    Row("unknown limit", lambda e: Engine.load(blocks=3), InvalidConfig, ("'blocks'", "the limits are max_num_seqs")),
    Row("request id empty", lambda e: e.add_request([1], request_id=""), InvalidRequest, ("request_id is ''",)),
    Row("stop empty", sampling(stop=""), InvalidRequest, ("stop contains ''", "at least one character")),
    Row("cut trace", lambda e: Trace.loads(e.trace.dumps()[:-9]), TraceError, ("cut", "again")),
    Row(
        "trace of another version",
        lambda e: Trace.loads(e.trace.dumps().replace('"contbatch_trace": 1', '"contbatch_trace": 9')),
        TraceError,
        ("version 9", "reads trace version 1"),
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_bad_input(row: Row) -> None:
    engine, toy = toy_engine(config(pool=8, bs=4, mml=64), tokenizer=Bytes())
    engine.add_request(prompt(5), params(6), request_id="live")
    engine.add_request(prompt(6, 1), params(6), request_id="waiting")
    engine.step()
    digest = engine.trace.digest()
    with pytest.raises(row.error) as caught:
        row.do(engine)
    assert isinstance(caught.value, ContbatchError) and isinstance(caught.value, ValueError)
    for words in row.says:
        assert words in str(caught.value)
    engine.scheduler.check()
    assert engine.trace.digest() == digest and set(engine.scheduler.requests) == {"live", "waiting"}
    engine.run()
    assert_alone(toy, engine.completions, params(6))
    assert_empty(engine)


def test_with_chunking_off_a_prompt_larger_than_the_budget_is_refused() -> None:
    engine, _ = toy_engine(config(budget=8, chunked=False))
    with pytest.raises(RequestTooLarge, match=r"9 tokens .*8 prefill tokens.*chunked prefill is off; raise the budget"):
        engine.add_request(prompt(9), params(1))
    assert_empty(engine)


def test_a_cut_trace_file_names_the_file(tmp_path: Path) -> None:
    engine, _ = toy_engine(config())
    engine.generate([prompt(4)], params(2))
    path = tmp_path / "cut.jsonl"
    path.write_text(engine.trace.dumps()[:-20], encoding="utf-8")
    with pytest.raises(TraceError, match=r"cut\.jsonl"):
        Trace.load(path)


MARKUP = "</script><script>alert(1)</script><b>&amp;"


def test_a_prompt_with_markup_is_kept_as_it_is() -> None:
    engine, _ = toy_engine(config(), tokenizer=Bytes())
    done = engine.generate([MARKUP], params(2))[0]
    assert done.prompt == MARKUP
    again = Trace.loads(engine.trace.dumps())
    assert next(iter(again.requests.values())).prompt == MARKUP, "escaping is for whoever shows it"
