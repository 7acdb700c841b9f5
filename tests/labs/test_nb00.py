"""Notebook 00: each check accepts the right answer, waits for a stub, and knows the likely mistakes."""

from __future__ import annotations

import pytest

from contbatch import labs
from contbatch.labs import nb00


def stub(*arguments):
    """Write me."""
    raise NotImplementedError


def test_references_pass_and_stubs_wait() -> None:
    assert repr(labs.check("00.1", nb00.tokens_in)) == "00.1 tokens in a step: PASS 2/2"
    assert repr(labs.check("00.2", nb00.steps_waited)) == "00.2 how long a request waited: PASS 3/3"
    for number in ("00.1", "00.2"):
        assert "NOT YET - write the function first" in repr(labs.check(number, stub))
        assert labs.use(number, stub) is labs.exercise(number).reference


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda step: len(step.counts), "how many requests took part"),
        (lambda step: len(step.sampled), "how many tokens came out"),
        (lambda step: step.budget, "the limit of the step"),
        (lambda step: step.counts[0], "add up"),
        (lambda step: step.counts, "add up"),
        (lambda step: step.num_token, "it raised AttributeError"),
        (3, "not a function"),
    ],
)
def test_tokens_in_mistakes_are_named(wrong, words: str) -> None:
    result = labs.check("00.1", wrong)
    assert not result.passed and not result.not_yet
    assert words in repr(result) and len(repr(result)) < 300


def counting(trace, request_id):
    arrival = trace.requests[request_id].arrival_step
    for waited, step in enumerate(trace.steps[arrival:]):
        if request_id in step.request_ids:
            return waited


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda t, i: min(s.step for s in t.steps if i in s.request_ids), "not at step 0"),
        (lambda t, i: min(s.step for s in t.steps if i in s.sampled) - t.requests[i].arrival_step, "comes out"),
        (lambda t, i: counting(t, i) + 1, "one too many"),
        (lambda t, i: len([s for s in t.steps if i not in s.request_ids]), "after its end"),
        (lambda t, i: 0, "until a step computes tokens of it"),
        (lambda t, i: t.steps.pop(), "changed what it was given"),
        (lambda t, i: None if i == "r0" else 0, "returned None"),
        (lambda t, i: t.steps[999].step, "it raised IndexError"),
    ],
)
def test_steps_waited_mistakes_are_named(wrong, words: str) -> None:
    result = labs.check("00.2", wrong)
    assert not result.passed and not result.not_yet
    assert words in repr(result) and len(repr(result)) < 300


def test_another_right_way_passes() -> None:
    assert labs.check("00.2", counting).passed


def test_a_fault_opens_the_run_at_its_step() -> None:
    result = labs.check("00.1", lambda step: len(step.counts))
    assert result.fault is not None and result.player is not None
    assert result.player.t == result.fault.step


def test_the_runs_show_what_is_asked_for() -> None:
    """A check that runs on nothing would pass everything."""
    small, late = nb00.small_run(), nb00.late_run()
    assert any("P" in step.kinds and "D" in step.kinds for step in small.steps)
    assert {nb00.steps_waited(small, i) for i in small.requests} > {0}
    assert late.requests["r2"].arrival_step == 3 and nb00.steps_waited(late, "r2") > 0
