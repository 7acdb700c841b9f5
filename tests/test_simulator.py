"""The simulator: a cost model, a clock that stands still between steps, and the same engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contbatch import CostModel, Engine, SamplingParams, SchedulerConfig, ScriptedExecutor, SimulatedExecutor
from contbatch.batch import BatchedRequest, ScheduledBatch
from contbatch.errors import InvalidConfig, TraceError
from contbatch.metrics import summarise
from contbatch.simulator import VirtualClock
from contbatch.workload import Workload, drive, mixed, poisson

COST = CostModel(
    per_step=1.0, per_prefill_token=0.01, per_decode_row=0.1, per_cached_token=0.001, per_swapped_block=0.25
)
TIGHT = SchedulerConfig(num_blocks=12, block_size=4, max_num_seqs=6, max_num_batched_tokens=16)


def simulated(config: SchedulerConfig, cost: CostModel = COST) -> tuple[Engine, VirtualClock]:
    clock = VirtualClock()
    return Engine(SimulatedExecutor(cost, clock), config, clock=clock), clock


def traffic(seconds: bool = False) -> Workload:
    return poisson(mixed(20, prompt=(2, 12), output=(2, 20), seed=3), rate=0.5, seconds=seconds)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_every_step_takes_the_time_that_the_cost_model_says(mode: str) -> None:
    engine, clock = simulated(replace(TIGHT, preemption_mode=mode, num_host_blocks=40))
    trace = drive(engine, traffic(), wait=clock.advance)
    swapped = 0.0
    for step in trace.steps:
        decodes = step.kinds.count("D")
        compute = 1.0 + 0.01 * (step.num_tokens - decodes) + 0.1 * decodes + 0.001 * sum(step.starts)
        moved = step.duration - compute
        assert moved == pytest.approx(0.25 * round(moved / 0.25), abs=1e-9)
        assert bool(step.swapped_out or step.swapped_in) or moved == pytest.approx(0, abs=1e-9)
        swapped += moved
    assert (swapped > 1) is (mode == "swap") and summarise(trace).preemptions > 5


def test_decisions_are_those_of_the_engine_without_a_cost_model() -> None:
    engine, clock = simulated(replace(TIGHT, enable_prefix_caching=False))
    other = Engine(ScriptedExecutor(lambda *_: 0), engine.config)
    assert drive(engine, traffic(), wait=clock.advance).digest() == drive(other, traffic()).digest()


def test_two_simulations_are_equal_to_the_microsecond() -> None:
    runs = []
    for _ in range(2):
        engine, clock = simulated(TIGHT)
        runs.append(drive(engine, traffic(seconds=True), wait=clock.advance).dumps())
    assert runs[0] == runs[1]


def test_arrivals_in_seconds_wait_on_the_virtual_clock() -> None:
    engine, clock = simulated(TIGHT)
    workload = traffic(seconds=True)
    drive(engine, workload, wait=clock.advance)
    assert clock.seconds >= max(request.arrival_time or 0.0 for request in workload.requests)
    assert all(times.seconds.ttft is not None for times in summarise(engine.trace).requests.values())


def test_a_batch_made_by_hand_costs_the_same_as_a_planned_one() -> None:
    clock = VirtualClock()
    batch = ScheduledBatch(
        0, [BatchedRequest.prefill("a", [1, 2, 3], 0, [1]), BatchedRequest.decode("b", 5, 9, 1, [2, 3, 4], 9)]
    )
    assert SimulatedExecutor(COST, clock).execute(batch, {}) == {"a": 0, "b": 0}
    assert clock.seconds == pytest.approx(1.0 + 0.03 + 0.1 + 0.009)


def test_a_chunk_that_is_not_the_last_gets_no_token() -> None:
    """A planned batch, counted in columns, samples for the same requests as its parts say."""
    engine, clock = simulated(TIGHT)
    answers = []

    class Watched(SimulatedExecutor):
        def execute(self, batch: ScheduledBatch, sampling: Mapping[str, SamplingParams]) -> Mapping[str, Any]:
            tokens = super().execute(batch, sampling)
            assert set(tokens) == {part.request_id for part in batch if part.sample}
            answers.append(len(tokens) < len(batch))
            return tokens

    engine.executor = Watched(COST, clock)
    engine.add_request(range(40), SamplingParams(max_tokens=2))
    engine.run()
    assert answers == [True, True, False, False]


def test_made_up_tokens_end_no_request() -> None:
    clock = VirtualClock()
    engine = Engine(SimulatedExecutor(COST, clock, vocab_size=4, eos_token_ids=[0, 1]), TIGHT, clock=clock)
    engine.add_request([3, 3], SamplingParams(max_tokens=5))
    assert [done.token_ids for done in engine.run()] == [(2,) * 5]
    with pytest.raises(InvalidConfig, match="vocabulary of 2"):
        SimulatedExecutor(COST, clock, vocab_size=2, eos_token_ids=[0, 1])


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf"), 10**400, "1", None, True])
@pytest.mark.parametrize("name", CostModel.__dataclass_fields__)
def test_costs_are_finite_and_not_negative(name: str, cost: Any) -> None:
    with pytest.raises(InvalidConfig, match=f"{name} is "):
        replace(COST, **{name: cost})


@pytest.mark.parametrize("seconds", [-0.1, float("nan"), float("inf")])
def test_the_clock_never_goes_back(seconds: float) -> None:
    clock = VirtualClock()
    with pytest.raises(InvalidConfig, match="cannot go on by"):
        clock.advance(seconds)
    assert clock() == 0.0


def test_a_cost_model_survives_a_file(tmp_path: Path) -> None:
    COST.save(tmp_path / "cost.json")
    assert CostModel.load(tmp_path / "cost.json") == COST


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"per_step": -1.0}, "per_step is -1.0"),
        ({"per_step": "fast"}, "per_step is 'fast'"),
        ({"per_coffee": 1.0}, "expected per_step"),
        ({"per_step": None}, "per_step is None"),
        ({"contbatch_cost_model": 2}, "not a cost model"),
    ],
)
def test_a_wrong_cost_file_says_what_is_wrong(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "cost.json"
    COST.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(TraceError, match=message) as caught:
        CostModel.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["", "[1]", '{"per_step": 1}', '{"contbatch_cost_model": 1, "per_step": NaN}'])
def test_a_file_that_is_no_cost_model_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(TraceError):
        CostModel.load(path)


def test_a_long_run_is_written_as_it_goes(tmp_path: Path) -> None:
    """Nothing of finished requests stays, and the file is the trace that would have been kept."""
    kept, clock = simulated(TIGHT)
    drive(kept, traffic(), wait=clock.advance)
    clock = VirtualClock()
    engine = Engine(SimulatedExecutor(COST, clock), TIGHT, clock=clock, record_to=tmp_path / "run.jsonl")
    drive(engine, traffic(), wait=clock.advance)
    assert not engine.completions and not engine.trace.steps and len(engine.trace.requests) <= 1
    engine.close()
    written = type(kept.trace).load(tmp_path / "run.jsonl")
    assert written.digest() == kept.trace.digest() == engine.trace.digest()
    assert written == kept.trace
