"""Requests and sampling parameters: what is accepted, what is refused, and what a request owes."""

from __future__ import annotations

import dataclasses
import math

import pytest

from contbatch.errors import ContbatchError, InvalidRequest
from contbatch.request import FinishReason, Priority, Request, RequestStatus, RunningRequest, SamplingParams


def running(prompt: int = 5, outputs: int = 0) -> RunningRequest:
    """A record with `outputs` generated tokens."""
    record = RunningRequest(Request("a", range(prompt)), index=0, max_tokens=9)
    record.token_ids += range(100, 100 + outputs)
    return record


def test_priority_low_number_is_urgent() -> None:
    assert sorted(Priority) == [Priority.CRITICAL, Priority.HIGH, Priority.NORMAL, Priority.LOW]
    assert Priority.CRITICAL < Priority.LOW and Priority.CRITICAL.value == 0


def test_finish_reasons_and_their_names_in_vllm() -> None:
    assert {reason.value: reason.vllm for reason in FinishReason} == {
        "length": "length",
        "stop": "stop",
        "eos": "stop",
        "abort": "abort",
        "error": "error",
    }


def test_statuses() -> None:
    assert {status.value for status in RequestStatus} == {"waiting", "running", "preempted", "swapped", "finished"}


def test_request_and_sampling_are_frozen_and_own_their_tokens() -> None:
    tokens = [1, 2, 3]
    request = Request("a", tokens)
    tokens.append(4)
    assert request.prompt_token_ids == (1, 2, 3), "the caller's list is not the request's"
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.priority = 0  # type: ignore[misc]  # that is the point
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.sampling.max_tokens = 3  # type: ignore[misc]  # that is the point


def test_a_new_request_owes_its_whole_prompt() -> None:
    record = running(5)
    assert record.owed == 5 and record.is_prefilling and record.output_token_ids == []


def test_tokens_in_flight_are_not_owed_twice() -> None:
    record = running(5)
    record.num_in_flight = 3
    assert record.owed == 2
    record.num_computed_tokens, record.num_in_flight = 3, 0
    assert record.owed == 2 and record.is_prefilling


def test_a_decoding_request_owes_one_token() -> None:
    record = running(5, outputs=2)
    record.num_computed_tokens = 6
    assert record.owed == 1 and not record.is_prefilling
    assert record.output_token_ids == [100, 101] and record.num_output_tokens == 2


def test_a_resumed_request_owes_prompt_and_outputs_as_prefill() -> None:
    record = running(5, outputs=3)
    record.prefill_end = len(record.token_ids)
    assert record.owed == 8 and record.is_prefilling
    record.num_computed_tokens = 7
    assert record.owed == 1 and record.is_prefilling, "a last chunk of one token is still prefill"


@pytest.mark.parametrize("value", [0, -1, -100, 1.5, "3", True, math.nan])
def test_b138_max_tokens(value: object) -> None:
    with pytest.raises(InvalidRequest, match="max_tokens is "):
        SamplingParams(max_tokens=value)  # type: ignore[arg-type]  # that is the point
    assert SamplingParams(max_tokens=None).max_tokens is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", -1e-9),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", None),
        ("top_p", 0),
        ("top_p", -0.5),
        ("top_p", 1.001),
        ("top_p", math.nan),
        ("top_p", True),
        ("top_k", -1),
        ("top_k", 2.0),
        ("seed", -1),
        ("seed", 1.5),
        ("seed", "x"),
        ("stop_token_ids", [3, -1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", 3),
        ("stop", 3),
        ("stop", [3]),
        ("stop", ""),
    ],
)
def test_sampling_values_out_of_range_are_named(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=field) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]  # that is the point
    shown = value[-1] if isinstance(value, list) else value
    assert repr(shown)[:20] in str(caught.value)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, ContbatchError)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0),
        ("temperature", 1e-6),
        ("temperature", 2.5),
        ("top_p", 1),
        ("top_p", 1e-9),
        ("top_k", 0),
        ("seed", 0),
        ("max_tokens", 1),
    ],
)
def test_sampling_values_at_the_edge_are_accepted(field: str, value: float) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value  # type: ignore[arg-type]  # one of its fields


def test_b156_stop_in_every_spelling() -> None:
    assert SamplingParams(stop="x").stop_strings == ("x",)
    assert SamplingParams(stop="x") == SamplingParams(stop=["x"]) == SamplingParams(stop=("x",))
    assert SamplingParams(stop=None).stop_strings == SamplingParams(stop=[]).stop_strings == ()
    with pytest.raises(InvalidRequest, match="stop contains ''"):
        SamplingParams(stop=[""])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_token_ids": []}, "'a' has an empty prompt"),
        ({"prompt_token_ids": [1, -2]}, "'a': prompt holds -2"),
        ({"prompt_token_ids": [1, 2.0]}, "'a': prompt holds 2.0"),
        ({"prompt_token_ids": [1, True]}, "'a': prompt holds True"),
        ({"prompt_token_ids": [1, 2**70]}, f"'a': prompt holds {2**70}"),
        ({"prompt_token_ids": "abc"}, "'a': prompt holds 'a'"),
        ({"prompt_token_ids": 5}, "'a': prompt is 5"),
        ({"request_id": ""}, "request_id is ''"),
        ({"request_id": 7}, "request_id is 7"),
        ({"priority": 1.5}, "'a': priority is 1.5"),
        ({"priority": True}, "'a': priority is True"),
        ({"arrival_time": -1.0}, "'a': arrival_time is -1.0"),
        ({"arrival_time": math.nan}, "'a': arrival_time is nan"),
        ({"sampling": {"max_tokens": 3}}, "'a': sampling is {'max_tokens': 3}"),
    ],
)
def test_request_values_out_of_range_are_named(change: dict[str, object], message: str) -> None:
    fields: dict[str, object] = {"request_id": "a", "prompt_token_ids": [1, 2], **change}
    with pytest.raises(InvalidRequest) as caught:
        Request(**fields)  # type: ignore[arg-type]  # that is the point
    assert message in str(caught.value)


def test_any_integer_is_a_priority() -> None:
    assert Request("a", [1], priority=-100).priority == -100
    assert Request("a", [1], priority=Priority.LOW).priority == 3
