"""Notebook 08: each check accepts the right answer, waits for a stub, and knows the likely mistakes."""

from __future__ import annotations

import pytest

from contbatch import labs
from contbatch.labs import nb08


def test_pick_victim_reference_and_stub() -> None:
    def stub(running): ...

    assert labs.check("08.1", nb08.pick_victim).passed
    assert labs.check("08.1", lambda running: running[-1]).passed
    assert labs.check("08.1", stub).not_yet
    assert labs.use("08.1", stub) is nb08.pick_victim


def the_second(running):
    return running[min(1, len(running) - 1)]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda running: running[0], "picks the oldest"),
        (lambda running: max(running, key=lambda r: len(r.block_table)), "most blocks"),
        (lambda running: min(running, key=lambda r: r.num_computed_tokens), "least computed"),
        (lambda running: len(running) - 1, "return the request itself"),
        (lambda running: running[-1].request_id, "return the request itself"),
        (the_second, "how much a request holds does not matter"),
        (lambda running: running.pop(), "changed what it was given"),
        (lambda running: running[-2], "raised IndexError"),
    ],
)
def test_pick_victim_mistakes_are_named(wrong, words: str) -> None:
    result = labs.check("08.1", wrong)
    assert not result.passed
    assert words in repr(result)


def test_a_choice_that_is_wrong_only_in_a_run_opens_the_run() -> None:
    def forgets_after_a_while(running):
        known = [r for r in running if r.num_computed_tokens < 14 or len(running) == 1]
        return (known or running)[-1]

    result = labs.check("08.1", forgets_after_a_while)
    assert not result.passed
    assert "in a run with 10 blocks" in repr(result)
    assert result.player.t == result.fault.step
    assert result.fault.trace.steps[result.fault.step].preempted


def test_a_choice_that_loops_in_a_run_is_stopped() -> None:
    def loops(running):
        while not isinstance(running[0], nb08.Running):
            pass
        return running[-1]

    assert "still running after" in repr(labs.check("08.1", loops))


def test_price_is_what_the_engine_does() -> None:
    """Stop a run right before its first preemption, and compare with the victim's fate."""
    engine = nb08._squeezed(nb08.EvictWith(nb08.pick_victim))
    while not engine.trace.steps or not engine.trace.steps[-1].preempted:
        known = {r.request_id: (r.num_prompt_tokens, r.num_output_tokens) for r in engine.scheduler.running}
        held = {r.request_id: len(r.block_table) for r in engine.scheduler.running}
        engine.step()
    victim = engine.trace.steps[-1].preempted[0]
    blocks, tokens = nb08.price(*known[victim], 4)
    assert blocks == held[victim]
    engine.run()
    back = next(step for step in engine.trace.steps if victim in step.resumed)
    assert back.counts[back.request_ids.index(victim)] == tokens


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda p, g, s: (-(-p // s), p), "the output is forgotten"),
        (lambda p, g, s: (-(-(p + g) // s), p + g), "takes its place in a block in the next step"),
        (lambda p, g, s: ((p + g - 1) // s, p + g), "round up"),
        (lambda p, g, s: (-(-(p + g - 1) // s), p + g - 1), "must be computed too"),
        (lambda p, g, s: (p + g, -(-(p + g - 1) // s)), "the order is"),
        (lambda p, g, s: p + g, "two numbers"),
        (lambda p, g, s: (3, 10), "the blocks of the prompt are freed"),
    ],
)
def test_price_mistakes_are_named(wrong, words: str) -> None:
    assert labs.check("08.2", nb08.price).passed
    assert words in repr(labs.check("08.2", wrong))


def test_the_smallest_pool_is_the_smallest() -> None:
    assert labs.check("08.3", nb08.SMALLEST_POOL).passed
    assert labs.check("08.3", ...).not_yet
    preempted = [b for b in range(nb08.LONGEST, nb08.TOGETHER) if nb08._first_victim(nb08.squeeze(b))]
    assert preempted == list(range(nb08.LONGEST, nb08.SMALLEST_POOL))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (nb08.TOGETHER, "the short ones have ended by then"),
        (nb08.ADMITTED, "and then the outputs grow"),
        (nb08.LONGEST - 1, "is refused"),
        (nb08.SMALLEST_POOL - 1, "is preempted in step"),
        (nb08.SMALLEST_POOL + 1, f"nobody is preempted with {nb08.SMALLEST_POOL} blocks either"),
        (-1, "at least 1"),
        (str(nb08.SMALLEST_POOL), "at least 1"),
    ],
)
def test_pool_mistakes_are_named(wrong, words: str) -> None:
    assert words in repr(labs.check("08.3", wrong))


def test_the_eight_requests_are_those_of_the_notebook() -> None:
    from contbatch.models import load_model
    from contbatch.prompts import DEMO_PROMPTS

    tokenizer = load_model("pocket").tokenizer
    assert tuple(len(tokenizer.encode(prompt)) for prompt in DEMO_PROMPTS) == nb08.PROMPTS
