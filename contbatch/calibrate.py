"""Calibration: the cost model that explains the step times of a recorded run.

Times of steps are measured on a machine that does other things too. So the fit is a least-squares fit of *relative*
errors (a step of 2 ms counts as much as one of 200 ms), costs are never negative, and steps that took far longer than
everything else says they should (the first ones, or those in which the machine was busy elsewhere) are left out and
counted. How good it is is said by steps that had no part in the fit. A run made for the purpose is made several times,
and the shortest time of each step counts: other work of the machine can only make a step longer.

A cost that the run says nothing about is named, not guessed. Left out: costs that are no sum of these terms, such as
the work that grows with the square of a prompt.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from contbatch.blocks import blocks_needed
from contbatch.errors import InvalidConfig, TraceError
from contbatch.metrics import percentile
from contbatch.simulator import CostModel
from contbatch.trace import StepRecord, Trace

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Flags = NDArray[np.bool_]

TERMS = tuple(field.name for field in fields(CostModel))
FEWEST_STEPS = 20
SHORTEST = 1e-9
"""Seconds: a shorter step was not measured."""
ROUNDS = 8
"""Times that the fit is repeated, with what the last one expects and without its outliers."""
OUTLIER = 4.0
"""A step is left out of the fit if its error is so many times the median error."""
INSEPARABLE = 0.01
"""A cost is known only in sum with others if they explain all but this share of the work that it prices."""


@dataclass(frozen=True)
class Calibration:
    """A fitted cost model, and how well it predicts steps that it has not seen.

    Args:
        cost: the fitted costs.
        unseen: costs that the fitted steps say nothing about, because they had no such work; they are 0.
        inseparable: costs whose work always came in the same proportion, so that only their sum is known.
        num_fitted, num_left_out, num_held_out: steps used for the fit, steps left out as outliers, steps kept aside.
        median_error, p90_error: absolute relative error of the predicted time of the steps kept aside.
        predicted_seconds, measured_seconds: their times, added up.
    """

    cost: CostModel
    unseen: tuple[str, ...]
    inseparable: tuple[str, ...]
    num_fitted: int
    num_left_out: int
    num_held_out: int
    median_error: float
    p90_error: float
    predicted_seconds: float
    measured_seconds: float


def calibrate(trace: Trace, held_out: float = 0.25, seed: int = 0) -> Calibration:
    """Fit a cost model to a run that was recorded on a real clock.

    Args:
        trace: the run. If it swapped with the prefix cache on, every block of a swapped request counts as copied,
            shared ones too, so that a copy seems cheaper than it is.
        held_out: share of the steps that is kept aside to judge the fit, between 0 and 1.
        seed: chooses them.

    Raises:
        TraceError: too few steps took any time, or the trace does not say how large its blocks are.
        InvalidConfig: `held_out` is no share.
    """
    import numpy as np

    if not 0 < held_out < 1:
        raise InvalidConfig(f"held_out is {held_out!r}; use a share above 0 and below 1")
    rows = [(features, seconds) for features, seconds in _measured(trace) if SHORTEST < seconds < math.inf]
    if len(rows) < FEWEST_STEPS:
        raise TraceError(f"{len(rows)} steps of the trace took time; record a run of at least {FEWEST_STEPS} steps")
    random.Random(seed).shuffle(rows)
    cut = max(1, int(len(rows) * held_out))
    work = np.array([features for features, _ in rows], dtype=float)
    times = np.array([seconds for _, seconds in rows])
    costs, used = _robust_fit(work[cut:], times[cut:])
    fitted = work[cut:][used]
    predicted = work[:cut] @ costs
    errors = np.abs(predicted / times[:cut] - 1).tolist()
    return Calibration(
        CostModel(*costs.tolist()),
        tuple(name for name, column in zip(TERMS, fitted.T, strict=True) if not column.any()),
        tuple(TERMS[column] for column in _inseparable(fitted)),
        len(fitted),
        len(rows) - cut - len(fitted),
        cut,
        percentile(errors, 50) or 0.0,
        percentile(errors, 90) or 0.0,
        float(predicted.sum()),
        float(times[:cut].sum()),
    )


def _measured(trace: Trace) -> list[tuple[tuple[int, ...], float]]:
    """For each step the amounts of work that the terms price, and the seconds that it took."""
    block_size = trace.config.get("block_size", 16)
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise TraceError(f"block_size of the trace is {block_size!r}; record the run again")
    computed: dict[str, int] = {}
    before = 0.0
    """End of the step before: one that was planned ahead began earlier, and worked from then on."""
    rows: list[tuple[tuple[int, ...], float]] = []
    for step in trace.steps:
        moved = sum(blocks_needed(computed.get(name, 0), block_size) for name in (*step.swapped_out, *step.swapped_in))
        seconds = step.end - max(step.start, before)
        rows.append(((1, *_work(step), moved), seconds))
        before = step.end
        ends = zip(step.request_ids, step.starts, step.counts, strict=True)
        computed.update((name, start + tokens) for name, start, tokens in ends)
    return rows


def _work(step: StepRecord) -> tuple[int, int, int]:
    """(prefill tokens, decode rows, cached tokens read)."""
    return step.prefill_tokens, step.kinds.count("D"), sum(step.starts)


def _robust_fit(work: Floats, times: Floats) -> tuple[Floats, Flags]:
    """Costs, and which steps were used in the end.

    Errors are relative to what the last round expected. Relative to the measured times, a step that happened to take
    long would count less than one that did not, and every prediction would be too low.
    """
    import numpy as np

    used, expected = np.ones(len(times), dtype=bool), times
    for _ in range(ROUNDS):
        costs = _nonnegative(work[used] / expected[used, None], times[used] / expected[used])
        expected = np.maximum(work @ costs, times.min())
        errors = np.abs(times / expected - 1)
        used = errors <= OUTLIER * max(float(np.median(errors)), 1e-6)
    return _nonnegative(work[used] / expected[used, None], times[used] / expected[used]), used


def _nonnegative(rows: Floats, values: Floats) -> Floats:
    """The costs x >= 0 for which rows @ x is nearest to `values`: drop the most negative one until none is."""
    import numpy as np

    scale = np.abs(rows).max(axis=0)
    active = [column for column in range(rows.shape[1]) if scale[column] > 0]
    costs = np.zeros(rows.shape[1])
    while active:
        fitted = np.linalg.lstsq(rows[:, active] / scale[active], values, rcond=None)[0] / scale[active]
        if fitted.min() >= 0:
            costs[active] = fitted
            break
        active.pop(int(fitted.argmin()))
    return costs


def _inseparable(work: Floats) -> list[int]:
    """Columns that are, as good as, a sum of multiples of the others."""
    import numpy as np

    lengths = np.linalg.norm(work, axis=0)
    columns = np.flatnonzero(lengths).tolist()
    found = []
    for column in columns:
        others = [other for other in columns if other != column]
        unit, rest = work[:, column] / lengths[column], work[:, others] / lengths[others]
        explained = rest @ np.linalg.lstsq(rest, unit, rcond=None)[0]
        if np.linalg.norm(unit - explained) < INSEPARABLE:
            found.append(column)
    return found


def varied_run(
    model: str = "pocket", device: str = "cpu", requests: int = 96, seed: int = 0, repeats: int = 5
) -> Trace:
    """A real run made to be calibrated with: prompts and outputs of all lengths, few and many at once, and swapping.

    Args:
        model, device: as in `Engine.load`.
        requests: how many are served.
        seed: draws their lengths.
        repeats: how often they are served; the shortest time of each step counts.
    """
    from contbatch.engine import Engine
    from contbatch.request import SamplingParams
    from contbatch.workload import drive, log_uniform, poisson

    loaded = Engine.load(
        model,
        device=device,
        max_num_seqs=12,
        max_num_batched_tokens=128,
        num_blocks=40,
        block_size=8,
        enable_prefix_caching=False,
        preemption_mode="swap",
        num_host_blocks=64,
    )
    longest = min(160, loaded.config.max_model_len - 65)
    vocabulary = loaded.executor.vocab_size or 1000
    workload = log_uniform(requests, prompt=(4, longest), output=(4, 64), seed=seed, vocab_size=vocabulary)
    workload = poisson(workload, rate=0.25)

    def serve() -> Trace:
        about = loaded.trace.model
        engine = Engine(loaded.executor, loaded.config, tokenizer=loaded.tokenizer, model_name=about)
        return drive(engine, workload, SamplingParams(ignore_eos=True))

    return shortest([serve() for _ in range(repeats)])


def shortest(runs: Sequence[Trace]) -> Trace:
    """The first of some runs that took the same decisions, each step with the shortest time that it took in any."""
    for step, *others in zip(*(run.steps for run in runs), strict=True):
        step.end = step.start + min([step.duration, *(other.duration for other in others)])
    return runs[0]


def lines(calibration: Calibration) -> Sequence[tuple[str, str]]:
    """The result as rows of two texts."""
    notes = dict.fromkeys(calibration.unseen, " (no such work in this run)")
    notes |= dict.fromkeys(calibration.inseparable, " (known only in sum with the others marked so)")
    costs = [(name, f"{getattr(calibration.cost, name) * 1e6:,.2f} us{notes.get(name, '')}") for name in TERMS]
    return [
        *costs,
        ("steps fitted", f"{calibration.num_fitted} ({calibration.num_left_out} more were outliers)"),
        ("steps kept aside", str(calibration.num_held_out)),
        ("error there", f"median {calibration.median_error:.1%}, 90th percentile {calibration.p90_error:.1%}"),
        (
            "their time",
            f"predicted {calibration.predicted_seconds:.3f} s, measured {calibration.measured_seconds:.3f} s",
        ),
    ]
