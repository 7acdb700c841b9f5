"""A whole step through the kernels: the same bits in any company and however it is cut, near the dense reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contbatch import Engine, SamplingParams
from contbatch.errors import InvalidConfig, KernelsMissing
from contbatch.models import ModelExecutor
from contbatch.models.cpu.native import load_kernels
from contbatch.models.runner import choose_forward
from contbatch.prompts import DEMO_PROMPTS
from tests.models.tiny import Sequences, dense_logits, tiny_config, tiny_model, tokens


def kernels_missing() -> str:
    """Why the kernels cannot be had here; empty if they can."""
    try:
        load_kernels(torch.float32)
    except KernelsMissing as error:
        return str(error)
    return ""


pytestmark = pytest.mark.skipif(bool(kernels_missing()), reason=kernels_missing() or "there are kernels")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(
    "changes", [{}, {"num_kv_heads": 1}, {"num_kv_heads": 4, "tied_head": False}, {"head_dim": 20}]
)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_near_the_plain_model_in_64_bits(changes: dict[str, int], bias: bool, qk_norm: bool) -> None:
    """Families, head sizes and heads: a prompt, a chunk and single tokens in one pass, NaN in every unwritten slot."""
    config = tiny_config(**changes, qkv_bias=bias, output_bias=bias, qk_norm=qk_norm)
    texts, plan = [tokens(23, 1), tokens(9, 2)], [{0: 20}, {0: 1, 1: 8}, {1: 1, 0: 2}]
    fast, plain = (Sequences(tiny_model(config, dtype=dtype), 4, texts) for dtype in (torch.float32, torch.float64))
    assert fast.executor.path.startswith("compiled")
    assert plain.executor.path.startswith("plain")
    for counts in plan:
        np.testing.assert_allclose(fast.step(counts), plain.step(counts), rtol=0, atol=2e-4)


def test_bf16_is_as_near_as_the_plain_model_in_bf16() -> None:
    """Against the dense reference of the rounded weights, over a whole text."""
    text = tokens(40, 3)
    model = tiny_model(dtype=torch.bfloat16)
    dense = np.array(dense_logits(model, text))
    errors = {}
    for kernels in ("native", "plain"):
        run = Sequences(model, 4, [text])
        run.executor = ModelExecutor(model, 12, 4, kernels=kernels)
        errors[kernels] = np.mean([np.abs(run.step({0: 1})[0] - dense[n]).mean() for n in range(40)])
    assert errors["native"] <= 1.2 * errors["plain"]


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from([1, 3, 4, 16]), st.sampled_from(DTYPES))
def test_any_cut_and_any_company_give_the_same_bits(data: st.DataObject, block_size: int, dtype: torch.dtype) -> None:
    """Sequences fed in random pieces, in random company and order, against each of them alone and whole."""
    model = tiny_model(dtype=dtype)
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
    texts = [tokens(length, seed) for seed, length in enumerate(lengths)]
    run = Sequences(model, block_size, texts)
    while run.done != lengths:
        left = [index for index, length in enumerate(lengths) if run.done[index] < length]
        chosen = data.draw(st.lists(st.sampled_from(left), min_size=1, unique=True))
        counts = {index: data.draw(st.integers(1, lengths[index] - run.done[index])) for index in chosen}
        logits = run.step(counts)
        for row, index in enumerate(counts):
            alone = Sequences(model, block_size, [texts[index]]).step({0: run.done[index]})
            np.testing.assert_array_equal(logits[row], alone[0])


def test_a_damaged_cache_fails_its_request_alone() -> None:
    """NaN in the keys of one request: its logits are NaN, and the other's are what they were."""
    run, clean = (Sequences(tiny_model(dtype=torch.float32), 4, [tokens(9, 1), tokens(9, 2)]) for _ in range(2))
    run.step({0: 8, 1: 8})
    clean.step({0: 8, 1: 8})
    run.executor.cache.data[0, run.slots(0, 2, 3)] = torch.nan
    dirty, expected = run.step({0: 1, 1: 1}), clean.step({0: 1, 1: 1})
    assert np.isnan(dirty[0]).all()
    np.testing.assert_array_equal(dirty[1], expected[1])


def test_the_embedded_model_writes_the_same_on_both_paths() -> None:
    """Greedy, all demo prompts at once, small budget and pool: with preemption, chunks and shared blocks."""
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "block_size": 8, "num_blocks": 24}
    texts = {}
    for kernels in ("native", "plain"):
        engine = Engine.load("pocket", dtype="float32", kernels=kernels, **limits)
        done = engine.generate(DEMO_PROMPTS, SamplingParams(max_tokens=48))
        texts[kernels] = [answer.token_ids for answer in done]
        assert any(step.preempted for step in engine.trace.steps)
    assert texts["native"] == texts["plain"]


def test_plain_weights_can_be_dropped() -> None:
    """After that another executor shares the packed ones, and a plain one says what to do."""
    model = tiny_model(dtype=torch.float32)
    first = ModelExecutor(model, 4, 4)
    first.drop_plain_weights()
    assert ModelExecutor(model, 4, 4)._forward is first._forward
    with pytest.raises(InvalidConfig, match='load it again with kernels="plain"'):
        ModelExecutor(model, 4, 4, kernels="plain")
    plain = tiny_model(dtype=torch.float64)
    ModelExecutor(plain, 4, 4).drop_plain_weights()
    assert len(plain.model.layers) == 2, "a plain executor needs them"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_formats_run_on_the_plain_path(dtype: torch.dtype) -> None:
    """With the reason; asked for by name, it is an error."""
    model = tiny_model(dtype=dtype)
    assert "use float32 or bfloat16" in choose_forward(model)[1]
    with pytest.raises(KernelsMissing, match=str(dtype)):
        choose_forward(model, "native")
