"""Cases of the prefix cache, the model step, sampling and metrics that no other test names."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from contbatch import Engine, SamplingParams, SchedulerConfig, summarise
from contbatch.errors import ContbatchError, InvalidRequest, RequestTooLarge
from contbatch.models import ModelExecutor
from contbatch.models.device import find_dtype
from contbatch.models.sampler import draw, sample
from contbatch.request import FinishReason
from tests.models.tiny import Sequences, dense_logits, tiny_config, tiny_model, tokens
from tests.toy import Bytes, assert_alone, config, params, prompt, serve, toy_engine
from tests.virtual import TimedExecutor, VirtualClock

# Prefix cache


def test_b109_a_prompt_that_was_seen_computes_at_least_one_token() -> None:
    engine, toy = toy_engine(config(bs=16))
    first = serve(engine, {"a": prompt(32)}, params(3))
    steps = engine.trace.num_steps
    second = serve(engine, {"b": prompt(32)}, params(3))
    assert engine.trace.steps[steps].cached == {"b": 16} and engine.trace.steps[steps].counts == [16]
    assert first["a"].token_ids == second["b"].token_ids
    assert_alone(toy, second, params(3))


# Parameters


def test_b132_max_tokens_0_is_refused_and_the_engine_goes_on() -> None:
    engine, toy = toy_engine(config())
    with pytest.raises(InvalidRequest, match="max_tokens is 0"):
        engine.add_request(prompt(5), SamplingParams(max_tokens=0))
    assert_alone(toy, serve(engine, {"a": prompt(5)}, params(2)), params(2))


# Sampling


def test_b169_tiny_temperatures_neither_warn_nor_give_nan() -> None:
    logits = torch.tensor([[3.0, 3.0, -1e4, 2.9]] * 3, dtype=torch.float32)
    temperatures = {"greedy": 0.0, "tiny": 1e-6, "warm": 1.0}
    sampling = {name: SamplingParams(temperature=value, seed=1) for name, value in temperatures.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen = sample(logits, list(sampling), [4, 4, 4], sampling)
    assert chosen["greedy"] == 0 and chosen["tiny"] in (0, 1) and chosen["warm"] in (0, 1, 3)
    with pytest.raises(InvalidRequest, match="temperature is -1"):
        SamplingParams(temperature=-1)


def test_b170_top_k_and_top_p_draw_allowed_ids_only_in_16_bits() -> None:
    row = torch.linspace(-4, 4, 50, dtype=torch.float16).to(torch.float64).numpy()
    best = int(row.argmax())
    for restricted in (
        SamplingParams(temperature=1, top_k=1, seed=5),
        SamplingParams(temperature=1, top_p=0.1, seed=5),
    ):
        assert {draw(row, restricted, position) for position in range(20_000)} == {best}


# Model step


def test_b173_a_prefill_of_6_and_a_decode_fill_7_slots_in_each_layer() -> None:
    run = Sequences(tiny_model(), 4, [tokens(7)])
    run.step({0: 6})
    run.step({0: 1})
    slots = run.executor.cache.data.reshape(run.executor.cache.data.shape[0], -1, 2 * 2 * 8)
    assert [int((~layer.isnan()).all(dim=1).sum()) for layer in slots] == [7, 7]


def test_b174_layers_get_equal_positions_and_a_batch_equals_solo_runs() -> None:
    model = tiny_model()
    seen: list[torch.Tensor] = []
    model.model.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[1].clone()))
    texts = [tokens(3, 1), tokens(8, 2)]
    logits = Sequences(model, 4, texts).step({0: 3, 1: 8})
    assert [positions.tolist() for positions in seen] == [[*range(3), *range(8)]], "one array for all layers"
    np.testing.assert_allclose(logits, [dense_logits(model, text)[-1] for text in texts], atol=1e-9)


@pytest.mark.parametrize("lengths", [(1, 6), (3, 3), (3, 5), (3, 50)])
def test_b178_b179_b180_company_and_what_lies_in_unused_slots_change_nothing(lengths: tuple[int, int]) -> None:
    """The cache is NaN wherever nobody wrote (keys and values), so padding that mattered would show."""
    model = tiny_model()
    texts = [tokens(length, seed) for seed, length in enumerate(lengths)]
    logits = Sequences(model, 4, texts).step(dict(enumerate(lengths)))
    assert np.isfinite(logits).all()
    np.testing.assert_allclose(logits, [dense_logits(model, text)[-1] for text in texts], atol=1e-9)


def test_b183_rope_theta_is_that_of_the_config_and_far_positions_differ() -> None:
    text = tokens(40)
    near, far = (Sequences(tiny_model(tiny_config(rope_theta=theta)), 16, [text]).step({0: 40}) for theta in (1e4, 5e5))
    assert np.abs(near - far).max() > 1e-3
    model = tiny_model()
    long = tokens(2100, 3)
    executor = Sequences(model, 16, [long, long[:-1]])
    logits = executor.step({0: 2100, 1: 2099})
    assert np.isfinite(logits).all() and np.abs(logits[0] - logits[1]).max() > 1e-6


def test_b184_number_formats_on_a_cpu() -> None:
    assert find_dtype("auto", torch.device("cpu")) is torch.float32
    model = tiny_model(dtype=torch.float16)
    engine = Engine(ModelExecutor(model, 64, 4), SchedulerConfig(num_blocks=64, block_size=4))
    (done,) = engine.generate([list(tokens(5))], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(done.token_ids) == 3 or isinstance(done.error, ContbatchError)


# Metrics


def timed(**limits: Any) -> Engine:
    clock = VirtualClock()
    return Engine(TimedExecutor(clock, (1.0,)), SchedulerConfig(**limits), clock=clock)


def test_b191_a_single_token_has_no_time_per_output_token() -> None:
    engine = timed()
    for name, length in (("one", 1), ("five", 5)):
        engine.add_request([1, 2], params(length), request_id=name)
    engine.run()
    metrics = summarise(engine.trace)
    one, five = (metrics.requests[name].seconds for name in ("one", "five"))
    assert one.tpot is None and five.tpot is not None
    assert five.e2e is not None and five.ttft is not None and five.tpot == pytest.approx((five.e2e - five.ttft) / 4)
    assert metrics.seconds.tpot.count == 1 and metrics.seconds.tpot.mean == five.tpot
    alone = timed()
    alone.add_request([1, 2], params(1))
    alone.run()
    assert summarise(alone.trace).seconds.tpot.mean is None and "n/a" in summarise(alone.trace).text()


def test_b192_tpot_divides_by_gaps() -> None:
    clock = VirtualClock()
    engine = Engine(TimedExecutor(clock, (10.0, 1.0, 1.0)), clock=clock)
    engine.add_request([1, 2], params(3), request_id="a")
    engine.run()
    times = summarise(engine.trace).requests["a"].seconds
    assert (times.tokens, times.ttft, times.tpot) == ((10.0, 11.0, 12.0), 10.0, 1.0)


def test_b193_tokens_are_counted_and_not_pieces_of_text() -> None:
    """Also where text is held back for a stop string, or a character is not whole yet."""
    engine, _ = toy_engine(config(), tokenizer=Bytes())
    sampling = {"a": params(9), "b": params(7, stop="\u010f never"), "c": params(1)}
    done = serve(engine, {name: prompt(4, index) for index, name in enumerate(sampling)}, sampling)
    for name, request in summarise(engine.trace).requests.items():
        assert request.num_output_tokens == len(done[name].token_ids) == len(request.steps.tokens)


@pytest.mark.parametrize("seed", range(5))
def test_b194_the_peak_is_never_below_the_mean(seed: int) -> None:
    engine = timed(max_num_seqs=3)
    for index in range(8):
        engine.add_request([index + 1] * (1 + seed), params(1 + (index * (seed + 3)) % 7))
    engine.run()
    seconds = summarise(engine.trace).seconds
    assert seconds.peak_throughput is not None and seconds.output_throughput is not None
    assert seconds.peak_throughput >= seconds.output_throughput > 0


def test_b195_only_completed_requests_count_as_output() -> None:
    engine = timed(max_model_len=64)
    for name in ("a", "b", "c", "gone"):
        engine.add_request([1, 2, 3], params(5), request_id=name)
    with pytest.raises(RequestTooLarge):
        engine.add_request([1] * 64, params(5))
    engine.step()
    engine.abort("gone")
    engine.run()
    metrics = summarise(engine.trace)
    assert (metrics.completed, metrics.aborted, metrics.failed, metrics.unfinished) == (3, 1, 0, 0)
    assert metrics.output_tokens == 15 and metrics.emitted_tokens == 16 and len(metrics.requests) == 4


def test_b196_an_end_of_sequence_token_ends_the_count() -> None:
    """A generated end-of-sequence token counts as output: 5 of 100."""
    clock = VirtualClock()
    executor = TimedExecutor(clock, (1.0,), script={"a": [10, 11, 12, 13, 2]}, eos_token_ids=[2])
    engine = Engine(executor, clock=clock)
    engine.add_request([1], params(100), request_id="a")
    (done,) = engine.run()
    assert summarise(engine.trace).requests["a"].num_output_tokens == 5 and done.finish_reason is FinishReason.EOS


def test_b197_what_a_victim_finds_again_is_no_prefix_hit() -> None:
    engine, _ = toy_engine(config(pool=8, bs=4, budget=24, seqs=4))
    serve(engine, {f"r{index}": prompt(7, index) for index in range(4)}, params(14))
    metrics = summarise(engine.trace)
    assert metrics.preemptions > 0 and metrics.prefix_hit_rate == 0
    assert sum(request.recovered_tokens for request in metrics.requests.values()) > 0, "counted apart"


def test_b198_who_was_aborted_before_a_first_token_has_no_ttft() -> None:
    engine = timed(max_num_seqs=18)
    for index in range(20):
        engine.add_request([index + 1, 2], params(3), request_id=f"r{index}")
    engine.step()
    engine.abort("r18")
    engine.abort("r19")
    engine.run()
    assert summarise(engine.trace).seconds.ttft.count == 18
    assert not math.isnan(summarise(engine.trace).seconds.ttft.mean or math.nan)
