"""The paged, mixed forward pass computes what the dense textbook computes, however the work is cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contbatch.batch import BatchedRequest, ScheduledBatch
from contbatch.errors import ContbatchError, InvalidConfig
from contbatch.models import ModelExecutor, RopeScaling
from contbatch.request import SamplingParams
from tests.models.tiny import Floats, Sequences, dense_logits, tiny_config, tiny_model, tokens


def assert_equal(logits: Floats, expected: Sequence[Floats]) -> None:
    """Equal but for rounding in 64 bits."""
    np.testing.assert_allclose(logits, np.array(expected), rtol=0, atol=1e-9)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tied_head", [True, False])
def test_mixed_steps_equal_the_dense_reference(block_size: int, num_kv_heads: int, tied_head: bool) -> None:
    """A whole prompt, a chunk, single decode tokens: in one pass, in a cache that is NaN wherever nobody wrote."""
    model = tiny_model(tiny_config(num_kv_heads=num_kv_heads, tied_head=tied_head))
    texts = [tokens(23, 1), tokens(9, 2), tokens(30, 3)]
    dense = [dense_logits(model, text) for text in texts]
    run = Sequences(model, block_size, texts)
    plan = [{0: 20, 2: 1}, {0: 1, 1: 5, 2: 17}, {2: 1, 1: 3, 0: 1}, {0: 1, 1: 1, 2: 11}]
    for counts in plan:
        logits = run.step(counts)
        expected = [dense[index][run.done[index] - 1] for index in counts]
        assert_equal(logits, expected)
    assert run.done == [23, 9, 30]


@pytest.mark.parametrize(
    "changes",
    [
        {"qkv_bias": True},
        {"qkv_bias": True, "output_bias": True},
        {"qk_norm": True},
        {"qkv_bias": True, "output_bias": True, "qk_norm": True},
        {"rope_scaling": RopeScaling("linear", 3.0)},
    ],
    ids=str,
)
def test_each_switch_of_a_family(changes: dict[str, Any]) -> None:
    """Biases, norms of queries and keys, and stretched positions, in 64 bits."""
    model = tiny_model(tiny_config(**changes))
    text = tokens(26)
    dense = dense_logits(model, text)
    run = Sequences(model, 4, [text])
    for count in (13, 12, 1):
        assert_equal(run.step({0: count}), [dense[run.done[0] - 1]])
    plain = dense_logits(tiny_model(), text)
    assert np.abs(dense - plain).max() > 1e-2, "the switch changes nothing"


@settings(max_examples=40)
@given(st.data(), st.sampled_from([1, 3, 4, 16]))
def test_any_cut_gives_the_same_logits(data: st.DataObject, block_size: int) -> None:
    """Chunked = whole, mixed = separate: sequences are fed in random pieces, in random company and order."""
    model = tiny_model()
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
    texts = [tokens(length, seed) for seed, length in enumerate(lengths)]
    dense = [dense_logits(model, text) for text in texts]
    run = Sequences(model, block_size, texts)
    while run.done != lengths:
        left = [index for index, length in enumerate(lengths) if run.done[index] < length]
        chosen = data.draw(st.lists(st.sampled_from(left), min_size=1, unique=True))
        counts = {index: data.draw(st.integers(1, lengths[index] - run.done[index])) for index in chosen}
        logits = run.step(counts)
        assert_equal(logits, [dense[index][run.done[index] - 1] for index in chosen])


def test_only_mapped_slots_are_written() -> None:
    """A step writes the slots of its own new tokens, in every layer, and nothing else: not the null block either."""
    run = Sequences(tiny_model(), 4, [tokens(10, 1), tokens(7, 2)])
    for counts, written in [({0: 6, 1: 1}, [(0, 0, 6), (1, 0, 1)]), ({0: 1, 1: 6}, [(0, 6, 7), (1, 1, 7)])]:
        before = run.executor.cache.data.clone()
        run.step(counts)
        changed = ~torch.isclose(run.executor.cache.data, before, rtol=0, atol=0, equal_nan=True)
        slots = sorted(slot for piece in written for slot in run.slots(*piece))
        for layer in changed:
            assert layer.flatten(1).any(dim=1).nonzero().flatten().tolist() == slots
    assert run.executor.cache.data[:, :4].isnan().all(), "the null block was written"


def test_a_request_may_read_a_block_that_another_fills_in_the_same_step() -> None:
    """Keys and values of the whole step are written before attention reads: prefix hits within one step work."""
    text = tokens(12, 4)
    run = Sequences(tiny_model(), 4, [text])
    first = BatchedRequest.prefill("first", text[:9], 0, run.tables[0])
    executor = run.executor
    spare = ({1, 2, 3, 4, 5} - set(run.tables[0])).pop()
    second = BatchedRequest.prefill("second", text[8:10], 1, (*run.tables[0][:2], spare), start_position=8)
    logits = executor.forward(ScheduledBatch(0, [second, first]).flatten(4)).numpy()
    dense = dense_logits(tiny_model(), text)
    assert_equal(logits, [dense[9], dense[8]])


def test_only_rows_to_sample_get_logits() -> None:
    """A chunk that is not the last yields no token and no row of logits."""
    executor = ModelExecutor(tiny_model(), 8, 4)
    batch = ScheduledBatch(
        0,
        [
            BatchedRequest.prefill("chunk", tokens(5), 0, (1, 2), is_last_chunk=False),
            BatchedRequest.prefill("whole", tokens(6), 1, (3, 4)),
        ],
    )
    assert executor.forward(batch.flatten(4)).shape == (1, 61)
    assert set(executor.execute(batch, {"whole": SamplingParams(), "chunk": SamplingParams()})) == {"whole"}
    only_chunk = ScheduledBatch(1, [batch[0]])
    assert executor.execute(only_chunk, {}) == {}


def test_rope_theta_of_the_config_is_used() -> None:
    """Two models that differ in `rope_theta` alone differ in their logits, and both equal the reference."""
    text = tokens(12)
    results = []
    for theta in (500.0, 10_000.0):
        model = tiny_model(tiny_config(rope_theta=theta))
        logits = Sequences(model, 4, [text]).step({0: 12})
        assert_equal(logits, [dense_logits(model, text)[-1]])
        results.append(logits)
    assert np.abs(results[0] - results[1]).max() > 1e-3


def test_long_positions_are_right() -> None:
    """No table of rotary positions ends at 2,048: a chunk and a decode token behind it equal the reference."""
    text = tokens(2060)
    model = tiny_model(tiny_config(num_layers=1))
    dense = dense_logits(model, text)
    run = Sequences(model, 16, [text])
    for count, position in [(2040, 2039), (19, 2058), (1, 2059)]:
        assert_equal(run.step({0: count}), [dense[position]])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.5), (torch.float16, 0.05)])
def test_other_number_formats_are_near(dtype: torch.dtype, tolerance: float) -> None:
    """The same pass in fewer bits: as near as the format allows, prompts, chunks and decode tokens alike."""
    text = tokens(30)
    model = tiny_model(dtype=dtype)
    dense = dense_logits(model, text)
    run = Sequences(model, 4, [text])
    for count in (12, 17, 1):
        np.testing.assert_allclose(run.step({0: count})[0], dense[run.done[0] - 1], rtol=0.05, atol=tolerance)


def test_sampled_tokens_are_the_same_alone_and_in_a_mixed_batch() -> None:
    """The draw depends on the request's seed and its own position, not on the rows before it."""
    texts = [tokens(9, 1), tokens(6, 2), tokens(7, 3)]
    warm = SamplingParams(temperature=1.5, seed=11)
    for kept in ([0, 1, 2], [2, 1, 0]):
        for number in range(8):
            executor = ModelExecutor(tiny_model(seed=number), 9, 4)
            parts = [
                BatchedRequest.prefill(str(i), texts[i], i, range(1 + 3 * i, 4 + 3 * i), is_last_chunk=i != 0)
                for i in kept
            ]
            together = dict(executor.execute(ScheduledBatch(0, parts), dict.fromkeys("012", warm)))
            assert set(together) == {"1", "2"}
            for part in parts:
                if part.sample:
                    alone = executor.execute(ScheduledBatch(0, [part]), {part.request_id: warm})
                    assert alone[part.request_id] == together[part.request_id]


def test_a_damaged_row_fails_alone() -> None:
    """NaN in one request's cache ends that request; its neighbour gets the token it always gets."""
    texts = [tokens(6, 1), tokens(6, 2)]
    run = Sequences(tiny_model(), 4, texts)
    run.step({0: 5, 1: 5})
    run.executor.cache.data[:, run.slots(0, 2, 3)] = torch.nan
    parts = [BatchedRequest.decode(str(i), texts[i][5], 5, i, run.tables[i], 5) for i in (0, 1)]
    answers = run.executor.execute(ScheduledBatch(0, parts), {"0": SamplingParams(), "1": SamplingParams()})
    assert isinstance(answers["0"], ContbatchError) and "'0'" in str(answers["0"])
    assert answers["1"] == dense_logits(tiny_model(), texts[1])[-1].argmax()


def test_the_executor_knows_the_model_limits() -> None:
    """The engine refuses bad requests with these numbers."""
    executor = ModelExecutor(tiny_model(), 3, 4)
    assert (executor.vocab_size, executor.max_model_len, executor.eos_token_ids) == (61, 4096, frozenset({2, 5}))
    assert executor.cache.data.shape == (2, 16, 2, 2, 8)


@pytest.mark.parametrize(("num_blocks", "block_size", "name"), [(0, 4, "num_blocks"), (4, 0, "block_size")])
def test_sizes_below_one_are_refused(num_blocks: int, block_size: int, name: str) -> None:
    """Bad input: pool or block size of 0."""
    with pytest.raises(InvalidConfig, match=f"{name} is 0"):
        ModelExecutor(tiny_model(), num_blocks, block_size)


def test_a_cache_that_does_not_fit_says_how_big_it_is() -> None:
    """Ask for more memory than any machine has."""
    with pytest.raises(InvalidConfig, match=r"GB on cpu.*set num_blocks to at most \d+"):
        ModelExecutor(tiny_model(), 10**15, 16)
