"""Decode steps from persistent buffers: the recorded function, called on a CPU, is the plain model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from contbatch import Engine, SamplingParams, SchedulerConfig
from contbatch.batch import BatchedRequest, FlatBatch, ScheduledBatch
from contbatch.errors import InvalidConfig
from contbatch.models import ModelExecutor
from contbatch.models.attention import PagedCache
from contbatch.models.gpu.buffers import DecodeBuffers
from contbatch.models.gpu.graphs import GraphForward, buckets_up_to
from contbatch.models.runner import PlainForward
from tests.models.tiny import TINY, tiny_model, tokens

BLOCK_SIZE, BLOCKS, SEQS = 4, 60, 6
CPU = torch.device("cpu")


@dataclass
class Running:
    """A sequence, where it lies, and how much of it was computed."""

    slot: int
    table: tuple[int, ...]
    token_ids: tuple[int, ...]
    done: int = 0

    def part(self, count: int) -> BatchedRequest:
        """Feed `count` more tokens."""
        start, self.done = self.done, self.done + count
        ids = self.token_ids[start : self.done]
        blocks = self.table[: -(-self.done // BLOCK_SIZE)]  # a table grows with its sequence
        name = f"{self.slot}-{self.table[0]}"
        if count == 1 and start:
            return BatchedRequest.decode(name, ids[0], start, self.slot, blocks, start)
        return BatchedRequest.prefill(name, ids, self.slot, blocks, start)


class Pair:
    """The same steps through graphs and through the plain model, each with a cache of its own, full of NaN."""

    def __init__(self, buckets: tuple[int, ...] | None = None) -> None:
        self.model = tiny_model().model
        self.plain = PlainForward(self.model)
        self.graphs = GraphForward(self.model, self.plain, SEQS, buckets)
        self.caches = [PagedCache(TINY, BLOCKS, BLOCK_SIZE, CPU, torch.float64) for _ in range(2)]
        for cache in self.caches:
            cache.data.fill_(torch.nan)

    @torch.inference_mode()
    def step(self, parts: Sequence[BatchedRequest]) -> Tensor:
        """Run one step both ways, compare logits and live blocks; gives the graphs' logits."""
        flat = flatten(parts)
        got = self.graphs.forward(flat, self.caches[0])
        want = self.plain.forward(flat, self.caches[1])
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
        live = slice(BLOCK_SIZE, None)
        torch.testing.assert_close(
            self.caches[0].data[:, live], self.caches[1].data[:, live], rtol=0, atol=1e-10, equal_nan=True
        )
        return got


def flatten(parts: Sequence[BatchedRequest]) -> FlatBatch:
    """The arrays of one step."""
    return ScheduledBatch(0, list(parts)).flatten(BLOCK_SIZE)


def sequences(count: int, first_block: int = 1, seed: int = 0) -> list[Running]:
    """`count` sequences of 40 tokens, in interleaved blocks."""
    return [
        Running(slot, tuple(range(first_block + slot, first_block + 10 * count, count)), tokens(40, seed + slot))
        for slot in range(count)
    ]


def test_decode_steps_of_every_size_equal_the_plain_model() -> None:
    pair, running = Pair(), sequences(5)
    pair.step([one.part(3 + one.slot) for one in running])  # contexts 3 to 7: some end with their block
    assert pair.graphs.replays == 0
    steps = [[0], [4, 1], [2, 0, 3], [0, 1, 2, 3], [3, 1, 4, 0, 2], [1], *[[4, 3, 2, 1, 0]] * 9]
    for members in steps:
        pair.step([running[index].part(1) for index in members])
    assert pair.graphs.replays == len(steps)


@pytest.mark.parametrize(
    ("requests", "bucket"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 16), (17, 20), (20, 20), (21, None)]
)
def test_a_batch_takes_the_smallest_bucket_that_holds_it(requests: int, bucket: int | None) -> None:
    pair = Pair()
    assert GraphForward(pair.model, pair.plain, 20).bucket(requests) == bucket


def test_buckets_end_with_the_largest_batch() -> None:
    assert buckets_up_to(1) == (1,)
    assert buckets_up_to(8) == (1, 2, 4, 8)
    assert buckets_up_to(26) == (1, 2, 4, 8, 16, 24, 26)
    for wrong in (0, -1):
        with pytest.raises(InvalidConfig, match="at least 1"):
            buckets_up_to(wrong)


@pytest.mark.parametrize("buckets", [(), (0, 2), (2, SEQS + 1)])
def test_buckets_that_cannot_be_are_refused(buckets: tuple[int, ...]) -> None:
    pair = Pair()
    with pytest.raises(InvalidConfig, match="buckets are"):
        GraphForward(pair.model, pair.plain, SEQS, buckets)


def test_other_steps_go_to_the_eager_model() -> None:
    pair, running = Pair(buckets=(1, 2)), sequences(4)
    pair.step([one.part(5) for one in running])  # prompts
    pair.step([running[0].part(1), running[1].part(2)])  # a chunk among them
    pair.step([one.part(1) for one in running[:3]])  # above the largest bucket
    outside = Running(SEQS, (50, 51), tokens(8))
    pair.step([outside.part(3)])
    pair.step([outside.part(1)])  # a slot that the buffers have no row for
    assert pair.graphs.replays == 0
    pair.step([one.part(1) for one in running[:2]])
    assert pair.graphs.replays == 1


def test_a_step_that_samples_nothing_has_no_logits() -> None:
    pair = Pair()
    part = BatchedRequest.prefill("a", (3,), 0, (1,), is_last_chunk=False)
    assert pair.step([part]).shape == (0, TINY.vocab_size)
    assert pair.graphs.replays == 0


def test_buffers_stay_where_they_are_and_a_step_is_built_once() -> None:
    pair, running = Pair(), sequences(3)
    pair.step([one.part(4) for one in running])
    pair.step([one.part(1) for one in running])
    held = pair.graphs.buffers
    places = [tensor.data_ptr() for tensor in (held.tables, held.tokens, held.lengths, held.rows)]
    built = dict(pair.graphs._steps)
    for _ in range(6):
        pair.step([one.part(1) for one in running])
    assert pair.graphs.buffers is held
    assert [tensor.data_ptr() for tensor in (held.tables, held.tokens, held.lengths, held.rows)] == places
    assert pair.graphs._steps == built


def test_only_cells_that_changed_are_sent() -> None:
    buffers, one = DecodeBuffers(2, 10, BLOCK_SIZE, CPU), sequences(1)[0]
    one.part(6)
    sent = [buffers.update(flatten([one.part(1)])) for _ in range(8)]  # lengths 7 to 14
    assert sent == [2, 0, 1, 0, 0, 0, 1, 0]
    assert buffers.tables[0, :4].tolist() == list(one.table[:4])


def test_a_slot_that_another_request_takes_over_keeps_nothing_of_the_first() -> None:
    pair = Pair()
    first, second = sequences(2), sequences(2, first_block=31, seed=9)
    pair.step([one.part(17) for one in first])
    for _ in range(3):
        pair.step([one.part(1) for one in first])
    pair.step([second[0].part(3)])
    for _ in range(6):  # shorter than what lay in its row before, beside one that goes on
        pair.step([first[1].part(1), second[0].part(1)])


def test_rows_of_padding_write_to_the_null_block_alone() -> None:
    pair, running = Pair(buckets=(6,)), sequences(1)
    pair.step([running[0].part(2)])
    data = pair.caches[0].data
    before = data.clone()
    pair.step([running[0].part(1)])
    changed = (data != before) & ~(data.isnan() & before.isnan())
    assert _slots(changed) == [0, running[0].table[0] * BLOCK_SIZE + 2]


def _slots(changed: Tensor) -> list[int]:
    """Cache slots in which anything changed."""
    return sorted(set(changed.nonzero()[:, 1].tolist()))


def test_recording_writes_to_the_null_block_alone() -> None:
    pair, running = Pair(), sequences(4)
    pair.step([one.part(5) for one in running])
    before = pair.caches[0].data.clone()
    with torch.inference_mode():
        pair.step([one.part(1) for one in running])  # the buffers now name live blocks
        pair.graphs._steps.clear()
        before = pair.caches[0].data.clone()
        pair.graphs.record_all(pair.caches[0])
        for step in pair.graphs._steps.values():
            step()
    assert sorted(pair.graphs._steps) == [1, 2, 4, 6]
    changed = (pair.caches[0].data != before) & ~before.isnan()
    assert set(_slots(changed)) <= {0}


def test_logits_survive_the_next_step() -> None:
    pair, running = Pair(), sequences(2)
    pair.step([one.part(4) for one in running])
    pair.step([one.part(1) for one in running])
    called, static = pair.graphs._steps[2], torch.zeros(2, TINY.vocab_size, dtype=torch.float64)
    pair.graphs._steps[2] = lambda: static.copy_(called())  # as a CUDA graph does: always into the same memory
    first = pair.step([one.part(1) for one in running])
    kept = first.clone()
    pair.step([one.part(1) for one in running])
    assert torch.equal(first, kept)


def test_rows_of_an_earlier_larger_batch_become_padding() -> None:
    buffers, running = DecodeBuffers(4, 10, BLOCK_SIZE, CPU), sequences(3)
    buffers.update(flatten([one.part(1) for one in running]))
    assert buffers.rows.tolist() == [0, 1, 2, buffers.padding_slot]
    buffers.update(flatten([running[2].part(1)]))
    assert buffers.rows.tolist() == [2, *[buffers.padding_slot] * 3]


def test_cells_behind_a_sequence_are_not_sent() -> None:
    buffers, (long, longer) = DecodeBuffers(2, 10, BLOCK_SIZE, CPU), sequences(2)
    for one in (long, longer):
        one.part(20)
    assert buffers.update(flatten([long.part(1), longer.part(1)])) == 12
    short = Running(0, (50,), tokens(4))
    short.part(1)
    assert buffers.update(flatten([short.part(1), longer.part(1)])) == 1  # its row of the batch is padded with zeros


def test_another_cache_is_recorded_anew() -> None:
    pair, running = Pair(), sequences(1)
    pair.step([running[0].part(4)])
    pair.step([running[0].part(1)])
    pair.caches = [PagedCache(TINY, BLOCKS, BLOCK_SIZE, CPU, torch.float64) for _ in range(2)]
    for cache in pair.caches:
        cache.data.fill_(torch.nan)
    again = sequences(1, seed=5)
    pair.step([again[0].part(4)])
    pair.step([again[0].part(1)])


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_buffers_without_a_size_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidConfig, match="use at least 1"):
        DecodeBuffers(*sizes, CPU)


def test_an_engine_generates_the_same_tokens() -> None:
    prompts = [tokens(int(length), seed) for seed, length in enumerate(np.arange(1, 12))]
    results = []
    for graphs in (False, True):
        executor = ModelExecutor(tiny_model(), 40, BLOCK_SIZE, kernels="plain")
        if graphs:
            forward = GraphForward(executor.loaded.model, executor._forward, 256, (1, 2, 4, 8, 16))
            executor._forward = forward
        done = Engine(executor, SchedulerConfig(block_size=BLOCK_SIZE, num_blocks=40)).generate(
            prompts, SamplingParams(max_tokens=12, ignore_eos=True)
        )
        results.append([one.token_ids for one in done])
    assert forward.replays > 10
    assert results[0] == results[1]
