"""TokenBudget: never above a limit, never below zero, all or nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contbatch.budget import TokenBudget
from contbatch.errors import InvalidConfig

LIMIT = st.integers(1, 30)
NUMBER = st.integers(1, 20)


def amounts(budget: TokenBudget) -> tuple[int, int, int]:
    """What is allocated."""
    return budget.prefill_tokens, budget.decode_tokens, budget.num_seqs


@given(
    st.builds(TokenBudget, LIMIT, LIMIT, LIMIT, LIMIT),
    st.lists(st.tuples(st.sampled_from(["prefill", "decode", "chunk", "refund"]), NUMBER), max_size=30),
)
def test_no_sequence_of_calls_breaks_a_limit(budget: TokenBudget, calls: list[tuple[str, int]]) -> None:
    granted: list[tuple[str, int]] = []
    for kind, number in calls:
        before = amounts(budget)
        room = {"prefill": budget.remaining_prefill, "decode": budget.remaining_decode}
        if kind == "refund":
            if granted:
                side, count = granted.pop(number % len(granted))
                budget.refund(**{side: count})
        elif kind == "chunk":
            count = budget.allocate_chunk(number)
            assert count == min(number, room["prefill"])
            granted += [("prefill", count)] if count else []
        else:
            allocate = budget.try_allocate_prefill if kind == "prefill" else budget.try_allocate_decode
            fits = number <= room[kind]
            assert allocate(number) is fits
            assert fits or amounts(budget) == before, "a refusal changes nothing"
            granted += [(kind, number)] if fits else []
        sums = {side: sum(n for s, n in granted if s == side) for side in ("prefill", "decode")}
        assert amounts(budget) == (sums["prefill"], sums["decode"], len(granted))
        assert budget.prefill_tokens <= budget.max_prefill_tokens
        assert budget.decode_tokens <= budget.max_decode_tokens
        assert budget.total_tokens <= budget.max_total_tokens
        assert budget.num_seqs <= budget.max_num_seqs
        assert budget.remaining_prefill >= 0 and budget.remaining_decode >= 0
        nothing = budget.remaining_prefill == budget.remaining_decode == 0
        assert budget.is_exhausted is nothing


@pytest.mark.parametrize("field", ["max_prefill_tokens", "max_decode_tokens", "max_total_tokens", "max_num_seqs"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8"])
def test_b003_a_limit_below_one_is_named(field: str, value: Any) -> None:
    limits = {"max_prefill_tokens": 4, "max_decode_tokens": 4, "max_total_tokens": 4, field: value}
    with pytest.raises(InvalidConfig, match=f"{field} is {value!r}"):
        TokenBudget(**limits)


@pytest.mark.parametrize(
    "refund",
    [{"prefill": 5}, {"decode": 2}, {"prefill": -1}, {"decode": -1}, {}, {"prefill": 0, "decode": 0}],
)
def test_only_what_was_granted_can_be_refunded(refund: dict[str, int]) -> None:
    budget = TokenBudget(8, 8, 8)
    budget.try_allocate_prefill(4)
    budget.try_allocate_decode(1)
    before = dataclasses.asdict(budget)
    with pytest.raises(InvalidConfig, match="refund"):
        budget.refund(**refund)
    assert dataclasses.asdict(budget) == before


def test_one_limit_for_everything() -> None:
    budget = TokenBudget.of(8, max_num_seqs=3)
    assert budget.remaining_prefill == budget.remaining_decode == 8
    assert budget.try_allocate_prefill(6) and budget.remaining_decode == 2


def test_the_limit_on_sequences_binds_before_the_tokens_do() -> None:
    budget = TokenBudget.of(100, max_num_seqs=2)
    assert budget.try_allocate_prefill(1) and budget.try_allocate_decode(1)
    assert budget.is_exhausted and not budget.try_allocate_decode(1) and budget.allocate_chunk(5) == 0
