"""Notebook 05: each check accepts the right answer, waits for a stub, and knows the likely mistakes."""

from __future__ import annotations

from itertools import accumulate

import pytest

from contbatch import BatchedRequest, ScheduledBatch, labs
from contbatch.labs import nb05

NUMBERS = ("05.1", "05.2", "05.3", "05.4")


def wrong_answers(number: str, *pairs):
    return [pytest.param(number, wrong, words, id=f"{number} {words[:30]}") for wrong, words in pairs]


@pytest.mark.parametrize("number", NUMBERS)
def test_references_pass_and_stubs_wait(number: str) -> None:
    def stub(*arguments): ...

    exercise = labs.exercise(number)
    result = labs.check(number, exercise.reference)
    assert repr(result).startswith(f"{number} {exercise.title}: PASS {len(exercise.rules)}/{len(exercise.rules)}")
    assert labs.check(number, stub).not_yet
    assert labs.use(number, stub) is exercise.reference


def test_other_right_ways_pass() -> None:
    assert labs.check("05.1", lambda counts: list(accumulate(counts, initial=0))).passed
    assert labs.check("05.1", lambda counts: [sum(counts[:i]) for i in range(len(counts) + 1)]).passed
    assert labs.check("05.3", lambda p, t, b: [b * t[i // b] + i - b * (i // b) for i in p]).passed


@pytest.mark.parametrize(
    ("number", "wrong", "words"),
    [
        *wrong_answers(
            "05.1",
            (lambda counts: list(accumulate(counts)), "the axis begins at 0"),
            (lambda counts: [sum(counts[:i]) for i in range(len(counts))], "the last entry is missing"),
            (lambda counts: [i * max(counts, default=0) for i in range(len(counts) + 1)], "there is no padding"),
            (lambda counts: [0, *(sum(counts[: i + 1]) - 1 for i in range(len(counts)))], "not of it"),
            (lambda counts: sum(counts), "a list with one number more"),
        ),
        *wrong_answers(
            "05.2",
            (lambda n, c: [i for count in n for i in range(count)], "every request starts at 0"),
            (lambda n, c: list(range(sum(n))), "along the whole axis"),
            (lambda n, c: [a + i + 1 for b, a in zip(n, c, strict=True) for i in range(b)], "one too high"),
            (lambda n, c: list(c), "not for each request"),
            (lambda n, c: [list(range(a, a + b)) for b, a in zip(n, c, strict=True)], "one flat list"),
            (lambda n, c: [a + i for b, a in zip(n, c, strict=True) for i in range(a, b)], "right behind its cached"),
        ),
        *wrong_answers(
            "05.3",
            (lambda p, t, b: [t[0] * b + i for i in p], "only the first block"),
            (lambda p, t, b: [t[i // b] for i in p], "the place inside it"),
            (lambda p, t, b: [t[i // b] * b for i in p], "the same slot"),
            (lambda p, t, b: [t[i // b] + i % b for i in p], "block_size slots wide"),
            (lambda p, t, b: [(t[i // b] - 1) * b + i % b for i in p], "used as they are"),
            (lambda p, t, b: [t[i + 1] for i in p], "it raised IndexError"),
        ),
        *wrong_answers(
            "05.4",
            (lambda cu, s: [end - 1 for end in cu[1:]], "sampled too"),
            (lambda cu, s: list(range(cu[-1])), "every token is sampled"),
            (lambda cu, s: [a for a, w in zip(cu, s, strict=False) if w], "the first token of each request"),
            (lambda cu, s: [a for a, w in zip(cu[1:], s, strict=True) if w], "one too far"),
            (lambda cu, s: [i for i, w in enumerate(s) if w], "numbers of requests"),
            (lambda cu, s: len(s), "a list of row numbers"),
        ),
    ],
)
def test_mistakes_are_named(number: str, wrong, words: str) -> None:
    result = labs.check(number, wrong)
    assert not result.passed and not result.not_yet
    assert words in repr(result)


@pytest.mark.parametrize("number", NUMBERS)
def test_no_known_mistake_passes(number: str) -> None:
    """Each known mistake differs from the right answer on the check's own examples."""
    wrongs = {
        "05.1": (nb05._ends_only, nb05._starts_only, nb05._rectangle, nb05._last_tokens),
        "05.2": (nb05._from_zero, nb05._along_the_axis, nb05._one_late, nb05._one_each, nb05._nested),
        "05.3": (nb05._no_table, nb05._block_number, nb05._no_offset, nb05._block_plus_offset, nb05._from_one),
        "05.4": (nb05._every_request, nb05._every_token, nb05._first_token, nb05._behind, nb05._request_rows),
    }
    assert not any(labs.check(number, wrong).passed for wrong in wrongs[number])


def test_the_references_are_what_the_package_builds() -> None:
    """The answers, put together, are the arrays of the real FlatBatch."""
    batch = ScheduledBatch(
        0,
        [
            BatchedRequest.prefill("a", [5, 6, 7], 0, [4, 2], start_position=2, is_last_chunk=True),
            BatchedRequest.prefill("b", [8, 9], 1, [7], is_last_chunk=False),
            BatchedRequest.decode("c", 1, 6, 2, [9, 3], context_len=6),
        ],
    )
    flat = batch.flatten(block_size=4)
    counts, context = [part.num_tokens for part in batch], [part.context_len for part in batch]
    at = nb05.positions(counts, context)
    cu = nb05.starts(counts)
    slots = [s for row, part in enumerate(batch) for s in nb05.slots(at[cu[row] : cu[row + 1]], part.block_table, 4)]
    assert cu == flat.cu_seqlens.tolist()
    assert at == flat.positions.tolist()
    assert slots == flat.slot_mapping.tolist()
    assert nb05.rows_to_sample(cu, [part.sample for part in batch]) == flat.sample_rows.tolist()
