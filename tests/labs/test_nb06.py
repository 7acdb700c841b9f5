"""Notebook 06: each check accepts the right answer, waits for a stub, and knows the likely mistakes."""

from __future__ import annotations

import pytest

from contbatch import labs
from contbatch.labs import nb06


def grants(rule):
    """A function like ours with another rule for one grant: rule(owed, left, budget, place)."""

    def fill_budget(owed, budget):
        left, result = budget, []
        for place, tokens in enumerate(owed):
            result.append(rule(tokens, left, budget, place))
            left -= result[-1]
        return result

    return fill_budget


def smallest_first(owed, budget):
    result = dict.fromkeys(range(len(owed)), 0)
    for tokens, place in sorted((tokens, place) for place, tokens in enumerate(owed)):
        result[place] = min(tokens, budget - sum(result.values()))
    return list(result.values())


def test_fill_budget_reference_and_stub() -> None:
    def stub(owed, budget):
        """Write me."""

    assert repr(labs.check("06.1", nb06.fill_budget)) == "06.1 fill the budget: PASS 6/6"
    assert repr(labs.check("06.1", stub)) == "06.1 fill the budget: NOT YET - write the function first"
    assert labs.use("06.1", stub) is nb06.fill_budget
    mine = grants(lambda tokens, left, budget, place: min(tokens, left))
    assert labs.use("06.1", mine) is mine


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (grants(lambda tokens, left, budget, place: tokens if tokens <= left else 0), "waits for ever"),
        (grants(lambda tokens, left, budget, place: tokens if tokens < left else 0), "fits exactly"),
        (grants(lambda tokens, left, budget, place: min(tokens, budget)), "the whole budget"),
        (grants(lambda tokens, left, budget, place: tokens if place < budget else 0), "counts tokens"),
        (lambda owed, budget: [min(n, budget // len(owed)) for n in owed], "equal parts"),
        (lambda owed, budget: [g for g in nb06.fill_budget(owed, budget) if g], "write 0"),
        (smallest_first, "keep the order of the list"),
        (lambda owed, budget: [0 for _ in owed], "while the budget lasts"),
        (lambda owed, budget: [owed.pop(0) for _ in range(len(owed))], "changed what it was given"),
        (lambda owed, budget: budget, "a list with one number for each request"),
    ],
)
def test_fill_budget_mistakes_are_named(wrong, words: str) -> None:
    result = labs.check("06.1", wrong)
    assert not result.passed and not result.not_yet
    assert words in repr(result)


def test_fill_budget_forgetting_that_a_grant_is_smaller_than_what_is_owed() -> None:
    def wrong(owed, budget):
        result = []
        for tokens in owed:
            result.append(min(tokens, budget))
            budget -= tokens
        return result

    assert "falls below 0" in repr(labs.check("06.1", wrong))


def test_smallest_budget_is_the_smallest() -> None:
    answer = nb06.SMALLEST_BUDGET
    assert labs.check("06.2", answer).passed
    assert not nb06.missed(nb06.late_arrivals(nb06.PrefillFirst(), answer))
    assert all(nb06.missed(nb06.late_arrivals(nb06.PrefillFirst(), b)) for b in range(1, answer))
    assert labs.use("06.2", ...) == answer


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (149, "need room too"),
        (90, "the prompts that came with it"),
        (8, "counts tokens, not requests"),
        (235, "do not come together"),
        (160, "nobody misses a token with 159 either"),
        (0, "at least 1"),
        ("153", "at least 1"),
        (True, "at least 1"),
    ],
)
def test_smallest_budget_mistakes_are_named(wrong, words: str) -> None:
    assert words in repr(labs.check("06.2", wrong))


def test_the_run_opens_at_the_first_missed_token() -> None:
    result = labs.check("06.2", 64)
    step, request_id = nb06.missed(nb06.late_arrivals(nb06.PrefillFirst(), 64))[0]
    assert result.fault.step == step and request_id in repr(result)
    assert result.player.t == step


def test_decodes_first_misses_no_token_with_any_budget() -> None:
    assert not any(nb06.missed(nb06.late_arrivals("VllmV1", budget)) for budget in (1, 4, 16, 64))


def test_each_scene_shows_the_reason_that_we_say() -> None:
    for name, (trace, step) in nb06.scenes().items():
        waiting = list(trace.requests)[-1]
        assert trace.steps[step].reasons[waiting].reason == nb06.ANSWERS[name]
        assert nb06.clue(name).startswith(f"{name}: ")
        assert nb06.ANSWERS[name] not in nb06.clue(name).split("Step")[1].replace("blocks in use", "")


def test_explain_a_trace() -> None:
    right = nb06.ANSWERS
    assert labs.check("06.3", dict(right)).passed
    assert labs.check("06.3", dict.fromkeys(right, ...)).not_yet
    assert labs.check("06.3", {**right, "C": ...}).not_yet
    assert "count the running requests" in repr(labs.check("06.3", {**right, "B": "budget"}))
    assert "count the free blocks" in repr(labs.check("06.3", {**right, "C": "sequences"}))
    assert "rule of the policy" in repr(labs.check("06.3", {**right, "D": "budget"}))
    assert "'memory' is not a reason" in repr(labs.check("06.3", {**right, "A": "memory"}))
    assert "a dict with the keys A, B, C, D" in repr(labs.check("06.3", ["budget"]))
