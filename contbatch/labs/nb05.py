"""Checks of notebook 05, the arrays of the flat batch."""

from __future__ import annotations

from collections.abc import Sequence

from contbatch.labs.exercise import Mistake, function_exercise

# 05.1


def starts(counts: Sequence[int]) -> list[int]:
    """Where each request's tokens begin on the token axis (cu_seqlens); the last entry is where all end."""
    found = [0]
    for count in counts:
        found.append(found[-1] + count)
    return found


def _ends_only(counts: Sequence[int]) -> list[int]:
    return starts(counts)[1:]


def _starts_only(counts: Sequence[int]) -> list[int]:
    return starts(counts)[:-1]


def _rectangle(counts: Sequence[int]) -> list[int]:
    width = max(counts, default=0)
    return [width * row for row in range(len(counts) + 1)]


def _last_tokens(counts: Sequence[int]) -> list[int]:
    return [0, *(end - 1 for end in starts(counts)[1:])]


STARTS = function_exercise(
    "05.1",
    "where each request begins",
    starts,
    {
        "one request begins at 0 and ends at its count": [([1],), ([3],)],
        "each request begins where the one before it ends": [([3, 1],), ([2, 4, 3],)],
        "a chunk and many decode tokens are no special case": [([8, 6, 1, 1],), ([1, 1, 1, 1],)],
        "no request at all: the axis begins and ends at 0": [([],)],
    },
    [
        Mistake("the first entry is missing: the axis begins at 0", _ends_only),
        Mistake("the last entry is missing: it says where the last request ends", _starts_only),
        Mistake("each request gets as many places as the longest; on a flat axis there is no padding", _rectangle),
        Mistake("an entry is where a request ends, the index behind its last token, not of it", _last_tokens),
    ],
    (list, tuple),
    "a list with one number more than there are requests",
)

# 05.2


def positions(counts: Sequence[int], context_lens: Sequence[int]) -> list[int]:
    """Position of each new token in its own sequence: it goes on behind the tokens in the cache."""
    found: list[int] = []
    for count, context in zip(counts, context_lens, strict=True):
        found += range(context, context + count)
    return found


def _from_zero(counts: Sequence[int], context_lens: Sequence[int]) -> list[int]:
    return positions(counts, [0] * len(counts))


def _along_the_axis(counts: Sequence[int], context_lens: Sequence[int]) -> list[int]:
    return list(range(sum(counts)))


def _one_late(counts: Sequence[int], context_lens: Sequence[int]) -> list[int]:
    return [position + 1 for position in positions(counts, context_lens)]


def _one_each(counts: Sequence[int], context_lens: Sequence[int]) -> list[int]:
    return list(context_lens)


def _nested(counts: Sequence[int], context_lens: Sequence[int]) -> list[list[int]]:
    return [list(range(c, c + n)) for n, c in zip(counts, context_lens, strict=True)]


POSITIONS = function_exercise(
    "05.2",
    "the position of each token",
    positions,
    {
        "a new prompt counts from 0": [([1], [0]), ([3], [0])],
        "a decode token stands right behind its cached tokens": [([1], [5])],
        "a later chunk of a prompt goes on where the earlier one ended": [([2], [4])],
        "each request counts for itself": [([2, 3], [0, 0]), ([1, 1], [7, 2])],
        "prefill, chunk and decode together": [([2, 3, 1], [4, 0, 6]), ([8, 6, 1, 1], [2, 0, 20, 10])],
    },
    [
        Mistake("every request starts at 0; add the tokens that are already in the cache", _from_zero),
        Mistake("positions run along the whole axis; each request counts for itself", _along_the_axis),
        Mistake("one too high: with 5 tokens in the cache (positions 0 to 4) the next position is 5", _one_late),
        Mistake("there is one position for each new token, not for each request", _one_each),
        Mistake("the lists of the requests must be laid end to end: one flat list of numbers", _nested),
    ],
    (list, tuple),
    "a list with one number for each new token",
)

# 05.3


def slots(positions: Sequence[int], block_table: Sequence[int], block_size: int) -> list[int]:
    """Where the K and V of each token of one request go in the cache."""
    return [block_table[position // block_size] * block_size + position % block_size for position in positions]


def _no_table(positions: Sequence[int], block_table: Sequence[int], block_size: int) -> list[int]:
    return [block_table[0] * block_size + position for position in positions]


def _block_number(positions: Sequence[int], block_table: Sequence[int], block_size: int) -> list[int]:
    return [block_table[position // block_size] for position in positions]


def _no_offset(positions: Sequence[int], block_table: Sequence[int], block_size: int) -> list[int]:
    return [block_table[position // block_size] * block_size for position in positions]


def _block_plus_offset(positions: Sequence[int], block_table: Sequence[int], block_size: int) -> list[int]:
    return [block_table[position // block_size] + position % block_size for position in positions]


def _from_one(positions: Sequence[int], block_table: Sequence[int], block_size: int) -> list[int]:
    return [(block_table[p // block_size] - 1) * block_size + p % block_size for p in positions]


SLOTS = function_exercise(
    "05.3",
    "the slot of each token",
    slots,
    {
        "a position in the first block": [([0], [3], 4), ([1, 2], [5], 4)],
        "the block table says which block comes next": [([4], [3, 9], 4), ([3, 4], [7, 2], 4)],
        "any block size": [([0, 1, 2, 3], [6, 4], 2), ([17], [9, 8], 16)],
        "a chunk that begins in the middle of a block": [([2, 3, 4, 5, 6], [9, 11], 4)],
    },
    [
        Mistake("only the first block is looked up; the next positions live in other blocks of the table", _no_table),
        Mistake("that is the block; the slot also needs the place inside it", _block_number),
        Mistake("every token of a block gets the same slot; add the offset in the block", _no_offset),
        Mistake("a block is block_size slots wide: multiply its id before adding the offset", _block_plus_offset),
        Mistake("block ids are used as they are: block 0 exists, it only belongs to nobody", _from_one),
    ],
    (list, tuple),
    "a list with one number for each position",
)

# 05.4


def rows_to_sample(cu_seqlens: Sequence[int], sample: Sequence[bool]) -> list[int]:
    """Indices on the token axis whose logits are needed: the last token of each request that samples."""
    return [end - 1 for end, wanted in zip(cu_seqlens[1:], sample, strict=True) if wanted]


def _every_request(cu_seqlens: Sequence[int], sample: Sequence[bool]) -> list[int]:
    return [end - 1 for end in cu_seqlens[1:]]


def _every_token(cu_seqlens: Sequence[int], sample: Sequence[bool]) -> list[int]:
    return list(range(cu_seqlens[-1]))


def _first_token(cu_seqlens: Sequence[int], sample: Sequence[bool]) -> list[int]:
    return [start for start, wanted in zip(cu_seqlens, sample, strict=False) if wanted]


def _behind(cu_seqlens: Sequence[int], sample: Sequence[bool]) -> list[int]:
    return [end for end, wanted in zip(cu_seqlens[1:], sample, strict=True) if wanted]


def _request_rows(cu_seqlens: Sequence[int], sample: Sequence[bool]) -> list[int]:
    return [row for row, wanted in enumerate(sample) if wanted]


ROWS = function_exercise(
    "05.4",
    "which rows to sample",
    rows_to_sample,
    {
        "a decode token is its request's last and only one": [([0, 1], [True]), ([0, 1, 2], [True, True])],
        "of a prompt only the last token is sampled": [([0, 3], [True]), ([0, 2, 6], [True, True])],
        "a chunk that is not the last gives no token": [([0, 4], [False]), ([0, 3, 5], [False, True])],
        "prefill, chunk and decode together": [([0, 8, 14, 15, 16], [True, False, True, True])],
    },
    [
        Mistake("a chunk in the middle of a prompt is sampled too; its next token is already known", _every_request),
        Mistake("every token is sampled; only the last one of a request has a next token to find", _every_token),
        Mistake("that is the first token of each request; the last one has seen the whole sequence", _first_token),
        Mistake("one too far: cu_seqlens says where a request ends, its last token is one before", _behind),
        Mistake("these are numbers of requests; the answer is rows on the token axis", _request_rows),
    ],
    (list, tuple),
    "a list of row numbers",
)

EXERCISES = (STARTS, POSITIONS, SLOTS, ROWS)
