"""What one step of scheduling costs: plan, commit and trace record, in decode steady state.

Nothing is computed: tokens are made up beforehand, so all that is timed is the scheduler and the record of its
decision. Each size is measured on a scheduler of its own, over steps in which requests begin and fill their blocks
in turn, as in steady traffic; the figure is the median step of the median run.

    python benchmarks/scheduling.py [--json FILE]

Exit status 1 if a figure is over its limit. Limits are those that the package sets itself; vLLM 0.33.0's own
`schedule` and `update_from_output` take 370, 680 and 2,700 us at 16, 64 and 256 running requests on this kind of
machine.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from contbatch import Engine, SamplingParams, SchedulerConfig, ScriptedExecutor, VllmV1

LIMITS = {16: 30, 64: 100, 256: 350, 4096: 6500}
"""Running requests: most microseconds a step."""
WAITING = 100_000
WAITING_LIMIT = 0.05
"""Most that so many waiting requests may add to a step."""
RUNS = 3


def steady(running: int, waiting: int = 0) -> Engine:
    """An engine whose requests all decode, at different places in their blocks."""
    config = SchedulerConfig(max_num_seqs=running, max_num_batched_tokens=max(512, running), num_blocks=running * 40)
    engine = Engine(ScriptedExecutor(), config, VllmV1())
    for number in range(running):
        length = 4 + number % config.block_size
        engine.add_request([(number * 7 + place) % 1000 for place in range(length)], SamplingParams(max_tokens=500))
    while any(request.is_prefilling for request in engine.scheduler.running) or len(engine.scheduler.running) < running:
        engine.step()
    for _ in range(waiting):
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=40))
    return engine


def step_cost(engine: Engine, steps: int = 96) -> float:
    """Median microseconds of plan, commit and record."""
    scheduler, times = engine.scheduler, []
    gc.collect()
    for _ in range(steps):
        sampled = {request.request_id: 5 for request in scheduler.running}
        start = time.perf_counter()
        plan = scheduler.plan()
        record = engine.record(plan, start)
        scheduler.commit(plan, sampled)
        record.sampled = sampled
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def measure(running: int, waiting: int = 0) -> float:
    """Microseconds a step, the median of some runs."""
    return statistics.median(step_cost(steady(running, waiting)) for _ in range(RUNS))


def main(out: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None) -> None:
    """Measure and print."""
    figures = {running: round(measure(running), 1) for running in LIMITS}
    pairs = [(step_cost(steady(256)), step_cost(steady(256, WAITING))) for _ in range(2 * RUNS + 1)]
    added = statistics.median(with_queue / without - 1 for without, with_queue in pairs)
    for running, cost in figures.items():
        print(
            f"{running:>5} running: {cost:>7,.0f} us a step, {cost / running:.2f} us each (limit {LIMITS[running]:,})"
        )
    print(f"{WAITING:,} waiting add {added:+.1%} to a step with 256 running (limit {WAITING_LIMIT:.0%})")
    if out is not None:
        out.write_text(json.dumps({"us_per_step": figures, "added_by_queue": round(added, 4)}) + "\n", encoding="utf-8")
    if added > WAITING_LIMIT or any(figures[running] > limit for running, limit in LIMITS.items()):
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
