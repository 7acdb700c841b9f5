"""How fast the simulator serves requests that nobody computes.

    python benchmarks/simulation.py                                        # 10,000 requests under SarathiServe
    python benchmarks/simulation.py --requests 1000000 --short --record    # a long run, recorded to a file as it goes

Prompts of about 200 tokens and outputs of about 100 (with --short 20 and 10): 1,000 of them wait all the time, 128 run
together, and every decision is made by the real scheduler. microsoft/vidur with a stub in place of its predictor serves
486 requests a second of this kind on this kind of machine. Exit status 1 if 10,000 requests are served less than 6
times as fast.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from contbatch import CostModel, Engine, SamplingParams, SchedulerConfig, SimulatedExecutor
from contbatch.simulator import VirtualClock

VIDUR = 486
"""Requests a second of microsoft/vidur, stub predictor, measured on this kind of machine."""
LIMIT = 6
COST = CostModel(
    per_step=4e-3, per_prefill_token=5e-5, per_decode_row=2e-4, per_cached_token=1e-6, per_swapped_block=1e-4
)
CONFIG = SchedulerConfig(
    max_num_seqs=128, max_num_batched_tokens=512, num_blocks=4096, block_size=16, enable_prefix_caching=False
)
RUNS = 3
QUEUED = 1000
"""Requests that wait at once: those of a long run are made when there is room."""


def requests(count: int, short: bool) -> Iterator[tuple[list[int], SamplingParams]]:
    """Prompts and outputs around their mean, the same in every run."""
    prompt, output = (20, 10) if short else (200, 100)
    sampling = [SamplingParams(max_tokens=output // 2 + tokens, ignore_eos=True) for tokens in range(output + 1)]
    for number in range(count):
        length = prompt // 2 + number * 7919 % (prompt + 1)
        yield [number % 1000] * length, sampling[number * 104729 % (output + 1)]


def serve(count: int, short: bool, record_to: Path | None) -> float:
    """Seconds on the wall for all of them."""
    clock = VirtualClock()
    engine = Engine(SimulatedExecutor(COST, clock), CONFIG, "SarathiServe", clock=clock, record_to=record_to)
    arriving = requests(count, short)
    start = time.perf_counter()
    while True:
        while len(engine.scheduler.waiting) < QUEUED and (request := next(arriving, None)):
            engine.add_request(*request)
        if not engine.has_unfinished:
            break
        engine.step()
    engine.close()
    return time.perf_counter() - start


def main(
    count: Annotated[int, typer.Option("--requests", help="How many.")] = 10_000,
    short: Annotated[bool, typer.Option("--short", help="Prompts of about 20 tokens, outputs of about 10.")] = False,
    record: Annotated[bool, typer.Option("--record", help="Write the trace to a file as the run goes.")] = False,
    out: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl" if record else None
        times = [serve(count, short, path) for _ in range(1 if record else RUNS)]
        size = path.stat().st_size if path else 0
    speed = count / statistics.median(times)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{count:,} requests: {speed:,.0f} requests/s ({speed / VIDUR:.1f} times {VIDUR}), at most {memory:,.0f} MB")
    if record:
        print(f"the trace is a file of {size / 1e6:,.0f} MB")
    if out is not None:
        figures = {"requests": count, "requests_per_s": round(speed), "peak_mb": round(memory), "trace_mb": size / 1e6}
        out.write_text(json.dumps(figures) + "\n", encoding="utf-8")
    if not short and not record and speed < LIMIT * VIDUR:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
