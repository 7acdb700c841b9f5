"""FlatBatch: the arrays of one mixed forward pass, by hand and for random batches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contbatch.batch import BatchedRequest, ScheduledBatch
from contbatch.errors import InvalidRequest


def mixed() -> ScheduledBatch:
    """A last chunk, a chunk that is not the last, and a decode; block size 4."""
    return ScheduledBatch(
        1,
        [
            BatchedRequest.prefill("a", [10, 11, 12], 2, [5, 3], start_position=4),
            BatchedRequest.prefill("b", [20, 21], 0, [9], is_last_chunk=False),
            BatchedRequest.decode("c", 30, 8, 1, [7, 1, 4], 8),
        ],
    )


def test_the_arrays_by_hand() -> None:
    flat = mixed().flatten(block_size=4)
    assert flat.request_ids == ("a", "b", "c")
    assert flat.input_ids.tolist() == [10, 11, 12, 20, 21, 30]
    assert flat.positions.tolist() == [4, 5, 6, 0, 1, 8]
    assert flat.slot_mapping.tolist() == [3 * 4 + 0, 3 * 4 + 1, 3 * 4 + 2, 9 * 4 + 0, 9 * 4 + 1, 4 * 4 + 0]
    assert flat.cu_seqlens.tolist() == [0, 3, 5, 6]
    assert flat.context_lens.tolist() == [4, 0, 8]
    assert flat.seq_lens.tolist() == [7, 2, 9]
    assert flat.block_tables.tolist() == [[5, 3, 0], [9, 0, 0], [7, 1, 4]]
    assert flat.kv_cache_slots.tolist() == [2, 0, 1]
    assert flat.is_prefill.tolist() == [True, True, False]
    assert flat.sample_rows.tolist() == [2, 5], "no logits for the chunk that is not the last"
    assert flat.sample_request_ids == ("a", "c")
    assert flat.num_tokens == 6


def test_the_types_of_the_arrays() -> None:
    for batch in (mixed(), ScheduledBatch(0)):
        flat = batch.flatten(4)
        for name in ("input_ids", "positions", "slot_mapping", "cu_seqlens", "seq_lens", "context_lens", "sample_rows"):
            assert getattr(flat, name).dtype == np.int64, name
        assert flat.block_tables.dtype == flat.kv_cache_slots.dtype == np.int64
        assert flat.is_prefill.dtype == np.bool_


def test_an_empty_batch_has_empty_arrays() -> None:
    flat = ScheduledBatch(0).flatten(4)
    assert flat.cu_seqlens.tolist() == [0] and flat.num_tokens == 0
    assert flat.block_tables.shape == (0, 0) and flat.sample_rows.shape == (0,)


def test_b172_chunks_of_a_prompt_cover_its_positions_once() -> None:
    tokens = list(range(10))
    table = [1, 2, 3]
    seen = []
    for start in (0, 4, 8):
        part = BatchedRequest.prefill("a", tokens[start : start + 4], 0, table, start, start == 8)
        flat = ScheduledBatch(0, [part]).flatten(4)
        seen.append(flat.positions.tolist())
        assert len(flat.sample_rows) == (start == 8)
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_b188_two_prefills_that_start_at_different_places() -> None:
    first = BatchedRequest.prefill("a", range(12), 0, [2, 4, 6])
    second = BatchedRequest.prefill("b", range(8), 1, [1, 3, 5, 7, 8], start_position=12)
    slots = ScheduledBatch(0, [first, second]).flatten(4).slot_mapping.tolist()
    assert slots == [block * 4 + place for block in (2, 4, 6, 7, 8) for place in range(4)]


def test_b177_padding_points_at_the_null_block_only() -> None:
    flat = mixed().flatten(4)
    padding = [flat.block_tables[row, -(-length // 4) :] for row, length in enumerate(flat.seq_lens)]
    assert all((part == 0).all() for part in padding)
    assert (flat.slot_mapping >= 4).all(), "no token is ever written to block 0"


def test_a_table_that_is_too_short_is_refused() -> None:
    part = BatchedRequest.prefill("a", range(5), 0, [1])
    with pytest.raises(InvalidRequest, match="'a': 1 blocks of 4 do not hold 5 tokens"):
        ScheduledBatch(0, [part]).flatten(4)


@st.composite
def batches(draw: st.DrawFn) -> tuple[ScheduledBatch, int]:
    """A batch of random parts with disjoint block tables, as a scheduler without shared prefixes would make it."""
    size = draw(st.sampled_from([1, 2, 4, 16]))
    parts: list[BatchedRequest] = []
    next_block = 1
    for index in range(draw(st.integers(0, 8))):
        context = draw(st.integers(0, 40))
        is_prefill = draw(st.booleans())
        count = draw(st.integers(1, 20)) if is_prefill else 1
        spare = draw(st.integers(0, 2))
        blocks = list(range(next_block, next_block + -(-(context + count) // size) + spare))
        next_block += len(blocks)
        table = draw(st.permutations(blocks))
        tokens = draw(st.lists(st.integers(0, 1000), min_size=count, max_size=count))
        if is_prefill:
            parts.append(BatchedRequest.prefill(f"r{index}", tokens, index, table, context, draw(st.booleans())))
        else:
            parts.append(BatchedRequest.decode(f"r{index}", tokens[0], context, index, table, context))
    return ScheduledBatch(0, parts), size


@given(batches())
def test_rules_of_the_arrays(case: tuple[ScheduledBatch, int]) -> None:
    batch, size = case
    flat = batch.flatten(size)
    assert flat.num_tokens == batch.total_tokens == len(flat.positions) == len(flat.slot_mapping)
    assert len(set(flat.slot_mapping.tolist())) == flat.num_tokens, "no two tokens are written to one place"
    assert (np.diff(flat.cu_seqlens) >= 1).all() and flat.cu_seqlens[-1] == flat.num_tokens
    for row, part in enumerate(batch):
        tokens = slice(flat.cu_seqlens[row], flat.cu_seqlens[row + 1])
        assert flat.input_ids[tokens].tolist() == list(part.token_ids)
        assert flat.positions[tokens].tolist() == list(range(part.context_len, part.seq_len))
        for position, slot in zip(flat.positions[tokens], flat.slot_mapping[tokens], strict=True):
            assert divmod(int(slot), size) == (part.block_table[position // size], position % size)
        assert flat.block_tables[row, : len(part.block_table)].tolist() == list(part.block_table)
        assert not flat.block_tables[row, len(part.block_table) :].any()
    ends = [int(flat.cu_seqlens[row + 1]) - 1 for row, part in enumerate(batch) if part.sample]
    assert flat.sample_rows.tolist() == ends, "the last token of each part that samples"
    assert list(flat.sample_request_ids) == [part.request_id for part in batch if part.sample]


@given(batches())
def test_counts_agree_with_the_parts(case: tuple[ScheduledBatch, int]) -> None:
    batch, size = case
    stats, flat = batch.stats(), batch.flatten(size)
    prefills, decodes = batch.split_by_type()
    assert stats.total_requests == len(prefills) + len(decodes) == len(batch)
    assert stats.prefill_tokens + stats.decode_tokens == stats.total_tokens == flat.num_tokens
    assert stats.max_seq_len == max(flat.seq_lens.tolist(), default=0)
    assert stats.cached_tokens == flat.context_lens.sum()
    merged = ScheduledBatch.merge_prefill_decode(prefills, decodes, 0)
    assert sorted(merged.request_ids) == sorted(batch.request_ids)
    rectangle = batch.collect_input_ids(pad_id=-1)
    assert len({len(row) for row in rectangle}) <= 1
    assert [token for row in rectangle for token in row if token != -1] == flat.input_ids.tolist()
