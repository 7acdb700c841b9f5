"""Calibration: a cost model that made the step times of a trace is found again from them."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from contbatch import CostModel, Engine, SchedulerConfig, SimulatedExecutor, Trace
from contbatch.calibrate import TERMS, calibrate, lines, shortest, varied_run
from contbatch.cli import run
from contbatch.errors import InvalidConfig, TraceError
from contbatch.simulator import VirtualClock
from contbatch.workload import drive, mixed, poisson

COST = CostModel(
    per_step=3e-3, per_prefill_token=5e-5, per_decode_row=2e-4, per_cached_token=2e-6, per_swapped_block=4e-4
)
LIMITS = SchedulerConfig(
    num_blocks=30, block_size=8, max_num_seqs=10, max_num_batched_tokens=48, preemption_mode="swap", num_host_blocks=99
)


def run_of(cost: CostModel, config: SchedulerConfig = LIMITS, requests: int = 60) -> Trace:
    clock = VirtualClock()
    engine = Engine(SimulatedExecutor(cost, clock), replace(config, enable_prefix_caching=False), clock=clock)
    workload = poisson(mixed(requests, prompt=(4, 80), output=(4, 60), seed=5), rate=0.2)
    return drive(engine, workload, wait=clock.advance)


def noisy(trace: Trace, noise: float, stalls: int = 0, seed: int = 1) -> Trace:
    """The same steps, measured on a machine with other things to do."""
    draw = random.Random(seed)
    for step in trace.steps:
        step.end = step.start + step.duration * draw.uniform(1 - noise, 1 + noise)
    for step in draw.sample(trace.steps, stalls):
        step.end += 0.5
    return trace


def test_exact_times_give_the_costs_back() -> None:
    found = calibrate(run_of(COST))
    assert found.unseen == found.inseparable == () and found.p90_error < 1e-6
    for name in TERMS:
        assert getattr(found.cost, name) == pytest.approx(getattr(COST, name), rel=1e-5), name


def test_noise_and_stalls_change_the_costs_a_little() -> None:
    found = calibrate(noisy(run_of(COST, requests=150), noise=0.1, stalls=40))
    assert found.num_left_out >= 25, "a stall of half a second is no cost of a step"
    for name in TERMS:
        assert getattr(found.cost, name) == pytest.approx(getattr(COST, name), rel=0.3), name
    assert found.median_error < 0.1


def test_noise_that_only_slows_down_does_not_make_the_fit_too_low() -> None:
    """A step that happened to take long counts as much as one that did not, so that totals are right."""
    trace, draw = run_of(COST, requests=150), random.Random(3)
    for step in trace.steps:
        step.end += step.duration * draw.expovariate(3)
    found = calibrate(trace)
    assert found.predicted_seconds == pytest.approx(found.measured_seconds, rel=0.06)


def test_the_shortest_time_of_each_step_counts() -> None:
    runs = [noisy(run_of(COST), noise=0.5, seed=seed) for seed in range(3)]
    expected = [min(times) for times in zip(*([step.duration for step in run.steps] for run in runs), strict=True)]
    assert [step.duration for step in shortest(runs).steps] == pytest.approx(expected, abs=1e-12)


def test_costs_are_never_negative() -> None:
    free = CostModel(per_step=2e-3, per_decode_row=1e-4)
    for seed in range(5):
        cost = calibrate(noisy(run_of(free), noise=0.2, seed=seed)).cost
        assert all(getattr(cost, name) >= 0 for name in TERMS)
        assert cost.per_step == pytest.approx(2e-3, rel=0.2)


def test_work_that_never_happened_is_named() -> None:
    found = calibrate(run_of(COST, replace(LIMITS, preemption_mode="recompute")))
    assert found.unseen == ("per_swapped_block",) and found.cost.per_swapped_block == 0
    assert any("no such work" in value for _, value in lines(found))


def test_work_of_the_judging_steps_alone_is_not_seen() -> None:
    """One prompt, which is sometimes among the steps kept aside: then nothing is known of its price, and it is said."""
    trace = run_of(COST, requests=1)
    found = [calibrate(trace, seed=seed) for seed in range(12)]
    assert {"per_prefill_token" in one.unseen for one in found} == {True, False}
    for one in found:
        assert ("per_prefill_token" in one.unseen) is (one.cost.per_prefill_token == 0)


def test_costs_that_cannot_be_told_apart_are_named() -> None:
    """One request alone: each step decodes one row, so nobody knows what the step costs and what the row."""
    found = calibrate(run_of(COST, requests=1))
    assert {"per_step", "per_decode_row"} <= set(found.inseparable) and "per_cached_token" not in found.inseparable
    assert found.cost.per_step + found.cost.per_decode_row == pytest.approx(COST.per_step + COST.per_decode_row)
    assert any("only in sum" in value for _, value in lines(found))


def test_the_steps_that_judge_had_no_part_in_the_fit() -> None:
    trace = run_of(COST)
    found = calibrate(trace, held_out=0.5)
    assert found.num_held_out == len(trace.steps) // 2
    assert found.num_fitted + found.num_left_out + found.num_held_out == len(trace.steps)
    assert found.predicted_seconds == pytest.approx(found.measured_seconds)


def test_a_short_trace_is_refused() -> None:
    with pytest.raises(TraceError, match="0 steps of the trace took time"):
        calibrate(Trace())


@pytest.mark.parametrize("share", [0.0, 1.0, -0.25, 2.0, float("nan")])
def test_some_steps_are_fitted_and_some_judge(share: float) -> None:
    with pytest.raises(InvalidConfig, match="held_out is"):
        calibrate(run_of(COST), held_out=share)


def test_steps_without_a_time_are_not_used() -> None:
    trace = run_of(COST)
    trace.steps[3].end = float("inf")
    trace.steps[4].end = trace.steps[4].start - 1
    found = calibrate(trace)
    assert found.num_fitted + found.num_left_out + found.num_held_out == len(trace.steps) - 2
    assert found.p90_error < 1e-6


def test_a_real_run_is_varied() -> None:
    """What is recorded for calibration has work of every kind, and tells all costs apart."""
    found = calibrate(varied_run(requests=24, repeats=2))
    assert found.unseen == found.inseparable == () and found.cost.per_step > 0


def test_command_fits_a_file_and_writes_the_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_of(COST).save(tmp_path / "run.jsonl")
    assert run(["calibrate", str(tmp_path / "run.jsonl"), "--out", str(tmp_path / "cost.json")]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"per_step\s+3,000\.00 us", shown) and "predicted" in shown and "measured" in shown
    assert CostModel.load(tmp_path / "cost.json").per_decode_row == pytest.approx(2e-4, rel=1e-4)


@pytest.mark.parametrize("size", [0, -8, 2.5, "8", None, True])
def test_command_refuses_a_trace_with_a_wrong_block_size(
    tmp_path: Path, size: object, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = run_of(COST)
    trace.config["block_size"] = size
    trace.save(tmp_path / "run.jsonl")
    assert run(["calibrate", str(tmp_path / "run.jsonl"), "--out", str(tmp_path / "cost.json")]) == 2
    assert capsys.readouterr().err.startswith(f"contbatch: block_size of the trace is {size!r}")


@pytest.mark.parametrize("text", ["", "no trace\n", '{"contbatch_trace": 1}\n'])
def test_command_refuses_what_is_no_trace(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    assert run(["calibrate", str(path), "--out", str(tmp_path / "cost.json")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1 and not (tmp_path / "cost.json").exists()
