"""The trace: what is recorded, and files that come back equal or are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contbatch.engine import Engine
from contbatch.errors import StepFailed, TraceError
from contbatch.trace import Blocked, FinishRecord, RequestRecord, StepRecord, Trace
from tests.toy import Bytes, config, params, prompt, serve, toy_engine


def run(**changes: Any) -> Engine:
    """A run with chunks, preemptions, prefix hits, an abort and text."""
    engine, _ = toy_engine(config(**{"pool": 8, "bs": 4, "budget": 8, "seqs": 3, **changes}), tokenizer=Bytes())
    engine.add_request('one <b>&amp;</b> "two" \u2028', params(4), request_id="text", client="me")
    engine.add_request(prompt(9), params(8), request_id="a")
    engine.add_request(prompt(9), params(8), request_id="b", priority=0)
    engine.step()
    engine.add_request(prompt(5, 1), params(9), request_id="c")
    engine.add_request(prompt(5, 2), params(9), request_id="gone")
    engine.step()
    engine.abort("gone")
    engine.run()
    return engine


# What is recorded


def test_a_step_adds_up() -> None:
    engine = run()
    for step in engine.trace.steps:
        assert len(step.request_ids) == len(step.starts) == len(step.counts) == len(step.kinds)
        assert step.num_tokens == step.prefill_tokens + step.decode_tokens <= (step.budget or 0)
        assert step.end >= step.start and step.duration == step.end - step.start
        assert set(step.sampled) <= set(step.request_ids)
        assert 0 <= step.cached_blocks <= step.free_blocks <= 8
        assert step.num_running <= 3 and set(step.reasons).isdisjoint(step.request_ids)
    assert [step.step for step in engine.trace.steps] == list(range(len(engine.trace.steps)))


def test_blocks_can_be_followed_from_step_to_step() -> None:
    engine = run()
    tables: dict[str, list[int]] = {}
    for step in engine.trace.steps:
        for name in step.preempted:
            tables.pop(name)
        for name, blocks in step.new_blocks.items():
            tables.setdefault(name, []).extend(blocks)
        held = {block for table in tables.values() for block in table}
        assert 8 - len(held) == step.free_blocks, step.step
        for name, start, count in zip(step.request_ids, step.starts, step.counts, strict=True):
            assert len(tables[name]) == -(-(start + count) // 4)
        for name in step.finished:
            del tables[name]
        for name, finish in engine.trace.finished.items():
            if finish.step == step.step + 1 and name in tables:
                del tables[name]
    assert not tables


def test_b199_emitted_tokens_are_counted_once() -> None:
    engine = run()
    emitted: dict[str, list[int]] = {name: [] for name in engine.trace.requests}
    for step in engine.trace.steps:
        for name, token in step.sampled.items():
            emitted[name].append(token)
    for name, finish in engine.trace.finished.items():
        assert tuple(emitted[name]) == engine.completions[name].token_ids
        assert len(emitted[name]) == finish.num_output_tokens


def test_arrivals_and_finishes_are_placed_between_steps() -> None:
    trace = run().trace
    assert [record.arrival_step for record in trace.requests.values()] == [0, 0, 0, 1, 1]
    assert trace.finished["gone"].reason == "abort" and trace.finished["gone"].step == 2
    for name, finish in trace.finished.items():
        last = max((step.step for step in trace.steps if name in step.sampled), default=None)
        assert last is None or finish.step == last + 1 or finish.reason == "abort"
        assert finish.reason == "abort" or trace.steps[finish.step - 1].finished[name] == finish.reason
        arrived = trace.requests[name].arrival_step
        assert all(name not in step.request_ids for step in trace.steps[:arrived])


def test_request_records_say_what_was_asked() -> None:
    trace = run().trace
    record = trace.requests["text"]
    assert record.prompt == 'one <b>&amp;</b> "two" \u2028' and record.client == "me" and record.max_tokens == 4
    assert trace.requests["a"].prompt is None and trace.requests["b"].priority == 0
    assert trace.finished["text"].text is not None
    assert trace.config["num_blocks"] == 8 and trace.policy == "VllmV1"


def test_kinds_tell_recomputation_from_first_computation() -> None:
    trace = run(prefix=False).trace
    again = {
        name for step in trace.steps for name, kind in zip(step.request_ids, step.kinds, strict=True) if kind == "R"
    }
    assert again and again == {name for step in trace.steps for name in step.preempted} - {"gone"}


# Round trip


def test_a_trace_comes_back_equal(tmp_path: Path) -> None:
    trace = run().trace
    path = tmp_path / "run.jsonl"
    trace.save(path)
    again = Trace.load(path)
    assert again == trace and again.digest() == trace.digest() and repr(again) == repr(trace)
    assert again.dumps() == trace.dumps() == path.read_text(encoding="utf-8")
    assert all(isinstance(value, Blocked) for step in again.steps for value in step.reasons.values())
    assert list(again.requests) == list(trace.requests) and list(again.finished) == list(trace.finished)


def test_an_empty_trace_comes_back_equal() -> None:
    assert Trace.loads(Trace("p", "m", {"num_blocks": 3}).dumps()) == Trace("p", "m", {"num_blocks": 3})


def test_a_request_that_waits_for_a_step_that_failed_is_saved() -> None:
    def broken(_: object) -> None:
        raise RuntimeError("no device")

    engine, _ = toy_engine(config(), before=broken)
    engine.add_request(prompt(4), params(2), request_id="a")
    with pytest.raises(StepFailed):
        engine.step()
    engine.add_request(prompt(4), params(2), request_id="late")
    assert set(Trace.loads(engine.trace.dumps()).requests) == {"a", "late"}
    engine.abort_all()
    again = Trace.loads(engine.trace.dumps())
    assert again == engine.trace and set(again.finished) == {"a", "late"}


NAMES = st.sampled_from(["a", "b", "</script>", "ü\u2028\n", ""])


@given(
    st.lists(
        st.builds(
            StepRecord,
            step=st.just(0),
            start=st.floats(0, 1e6),
            end=st.floats(0, 1e6),
            request_ids=st.lists(NAMES, min_size=2, max_size=2),
            starts=st.just([0, 3]),
            counts=st.just([3, 1]),
            kinds=st.sampled_from(["PD", "RR"]),
            sampled=st.dictionaries(NAMES, st.integers(0, 99)),
            cached=st.dictionaries(NAMES, st.integers(1, 9)),
            new_blocks=st.dictionaries(NAMES, st.lists(st.integers(1, 9))),
            reasons=st.dictionaries(NAMES, st.builds(Blocked, st.just("budget"), st.integers(), st.integers())),
            preempted=st.lists(NAMES),
            budget=st.none() | st.integers(1, 99),
        ),
        max_size=4,
    ),
    st.text(),
)
def test_any_trace_comes_back_equal(steps: list[StepRecord], text: str) -> None:
    trace = Trace("any", config={"x": [1, None, text]})
    for name in ("a", "b", "</script>", "ü\u2028\n", ""):
        trace.requests[name] = RequestRecord(name, 3, 4, 2, 0, 0.5, prompt=text)
    for number, step in enumerate(steps):
        step.step = number
        trace.steps.append(step)
    trace.finished["a"] = FinishRecord("stop", len(steps), 1.5, 4, text)
    assert Trace.loads(trace.dumps()) == trace


# Digest


def test_the_digest_ignores_times_texts_and_the_model() -> None:
    first, second = run().trace, run().trace
    assert first.digest() == second.digest() and len(first.digest()) == 12
    for step in second.steps:
        step.start, step.end = step.start + 5, step.end + 9
    for request in second.requests.values():
        request.arrival_time, request.prompt = 99.0, "other"
    for finish in second.finished.values():
        finish.time, finish.text = 99.0, "other"
    second.model = "other"
    assert first.digest() == second.digest()


def _first(trace: Trace) -> StepRecord:
    return trace.steps[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda trace: setattr(trace, "policy", "other"),
        lambda trace: trace.config.update(num_blocks=9),
        lambda trace: _first(trace).counts.__setitem__(0, 1),
        lambda trace: trace.steps[8].request_ids.reverse(),
        lambda trace: _first(trace).sampled.update(text=3),
        lambda trace: _first(trace).reasons.update(z=Blocked("blocks", 1, 0)),
        lambda trace: _first(trace).new_blocks.update(text=[3]),
        lambda trace: setattr(_first(trace), "free_blocks", 7),
        lambda trace: trace.steps.pop(),
        lambda trace: setattr(trace.requests["a"], "priority", 9),
        lambda trace: setattr(trace.requests["a"], "max_tokens", 9),
        lambda trace: setattr(trace.finished["a"], "reason", "stop"),
    ],
)
def test_the_digest_covers_every_decision(change: Callable[[Trace], object]) -> None:
    trace = run().trace
    before = trace.digest()
    change(trace)
    assert trace.digest() != before


# Files that are refused


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nothing\.jsonl: cannot be read"):
        Trace.load(tmp_path / "nothing.jsonl")
    with pytest.raises(TraceError, match="cannot be read"):
        Trace.load(tmp_path)
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="cannot be read"):
        Trace.load(path)


def test_a_cut_file_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    text = run().trace.dumps()
    for cut in (*range(0, 400, 7), *range(400, len(text) - 1, 97), len(text) - 1):
        with pytest.raises(TraceError):
            Trace.loads(text[:cut])
    lines = text.splitlines(keepends=True)
    for count in range(len(lines)):
        with pytest.raises(TraceError):
            Trace.loads("".join(lines[:count]))


def test_a_file_with_a_line_missing_in_the_middle_is_refused() -> None:
    lines = run().trace.dumps().splitlines(keepends=True)
    for number, line in enumerate(lines[:-1]):
        if '"finish"' not in line:
            with pytest.raises(TraceError):
                Trace.loads("".join(lines[:number] + lines[number + 1 :]))


@pytest.mark.parametrize("version", [0, 2, "1", None, [1]])
def test_another_version_is_named(version: object) -> None:
    lines = run().trace.dumps().splitlines(keepends=True)
    header = {**json.loads(lines[0]), "contbatch_trace": version}
    with pytest.raises(TraceError, match=r"version .*in the first line; this package reads trace version 1"):
        Trace.loads("".join([json.dumps(header) + "\n", *lines[1:]]), name="old.jsonl")


def test_a_file_of_another_kind_is_refused() -> None:
    for text in ("hello\n", "{}\n", "[1]\n", '"x"\n', "\n", "", "[" * 100_000 + "\n", "1" * 5000 + "\n"):
        with pytest.raises(TraceError, match=r"^other"):
            Trace.loads(text, name="other")


def damaged(kind: str, **changes: Any) -> str:
    """A trace whose first line of a kind has some fields changed; None takes a field out."""
    lines = [json.loads(line) for line in run().trace.dumps().splitlines()]
    line = next(line for line in lines if line.get("type") == kind)
    for key, value in changes.items():
        line[key] = value
        if value is None:
            del line[key]
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("step", {"step": 7}),
        ("step", {"step": "0"}),
        ("step", {"step": None}),
        ("step", {"start": "now"}),
        ("step", {"start": float("nan")}),
        ("step", {"kinds": "PP"}),
        ("step", {"kinds": "Q"}),
        ("step", {"kinds": 3}),
        ("step", {"counts": [1, 2]}),
        ("step", {"counts": "abc"}),
        ("step", {"counts": [1.5, 2]}),
        ("step", {"request_ids": [["x"], "a"]}),
        ("step", {"sampled": [1]}),
        ("step", {"sampled": {"a": "x"}}),
        ("step", {"new_blocks": {"a": [1, "2"]}}),
        ("step", {"reasons": {"a": 3}}),
        ("step", {"reasons": {"a": ["blocks"]}}),
        ("step", {"reasons": {"a": ["blocks", "1", 2]}}),
        ("step", {"surprise": 1}),
        ("step", {"type": "stop"}),
        ("step", {"type": None}),
        ("step", {"preempted": ["nobody"]}),
        ("step", {"sampled": {"nobody": 1}}),
        ("request", {"request_id": None}),
        ("request", {"request_id": ["x"]}),
        ("request", {"num_prompt_tokens": "9"}),
        ("request", {"num_prompt_tokens": True}),
        ("request", {"prompt": 5}),
        ("request", {"surprise": 1}),
        ("finish", {"request_id": None}),
        ("finish", {"request_id": "nobody"}),
        ("finish", {"reason": 5}),
        ("finish", {"step": None}),
        ("end", {"num_steps": 3}),
        ("end", {"num_steps": None}),
    ],
)
def test_damaged_lines_are_refused(kind: str, changes: dict[str, Any]) -> None:
    with pytest.raises(TraceError):
        Trace.loads(damaged(kind, **changes))


def test_lines_behind_the_end_are_refused() -> None:
    text = run().trace.dumps()
    for more in (text.splitlines()[1], text.splitlines()[-1], text.splitlines()[0]):
        with pytest.raises(TraceError):
            Trace.loads(text + more + "\n")


def test_the_message_names_file_line_and_field() -> None:
    with pytest.raises(TraceError, match=r"run\.jsonl, line \d+: .*counts is \"'abc'\"|counts is 'abc'"):
        Trace.loads(damaged("step", counts="abc"), name="run.jsonl")


def test_loading_runs_no_code(tmp_path: Path) -> None:
    target = tmp_path / "touched"
    evil = f"__import__('pathlib').Path({str(target)!r}).touch()"
    trace = Trace(policy=evil, model=evil, config={"!!python/object/apply:os.system": [evil], "__reduce__": evil})
    trace.requests[evil] = RequestRecord(evil, 1, 1, 0, 0, 0.0, prompt=evil, client=evil)
    trace.steps.append(StepRecord(0, request_ids=[evil], starts=[0], counts=[1], kinds="P", sampled={evil: 1}))
    path = tmp_path / "evil.jsonl"
    trace.save(path)
    again = Trace.load(path)
    assert again == trace and not target.exists()
    assert again.requests[evil].prompt == evil, "text stays text"


# Renaming


def test_an_id_that_is_used_again_leaves_its_old_name_everywhere() -> None:
    engine, _ = toy_engine(config())
    serve(engine, {"a": prompt(5), "b": prompt(6, 1)}, params(3))
    before = [asdict(step) for step in engine.trace.steps]
    serve(engine, {"a": prompt(7, 2)}, params(2))
    assert list(engine.trace.requests) == ["a#1", "b", "a"] and list(engine.trace.finished) == ["a#1", "b", "a"]
    renamed = json.loads(json.dumps(before).replace('"a"', '"a#1"'))
    assert [json.loads(json.dumps(asdict(step))) for step in engine.trace.steps[: len(before)]] == renamed
    serve(engine, {"a": prompt(7, 3)}, params(2))
    assert list(engine.trace.requests) == ["a#1", "b", "a#2", "a"]
    assert Trace.loads(engine.trace.dumps()) == engine.trace
