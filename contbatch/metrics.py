"""Metrics of a run: how long requests waited, how fast they were served, how well the limits were used.

Everything is computed from a `Trace` and nothing else. The one idea: a request's life is a few moments on one clock
(it arrives, starts, gets each token, ends), and every latency is the difference of two of them. The same formulas
run on two clocks: seconds, and steps, where a token of step k comes at time k + 1. Lessons and tests show steps,
because those are the same on every machine. Time spent preempted counts, since nothing is subtracted. A value that
does not exist is None, shown as n/a. Refused requests are in no trace, so they are not here. The words are those of
vLLM's serving benchmark: time to first token (TTFT), time per output token (TPOT), inter-token latency (ITL), end to
end (E2E).
"""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise

from contbatch.errors import InvalidConfig, TraceError
from contbatch.trace import FinishRecord, RequestRecord, StepRecord, Trace

COMPLETED = ("length", "stop", "eos")
"""Finish reasons of a request that ended by itself."""


def percentile(values: Iterable[float], percent: float) -> float | None:
    """The value below which `percent` % of the values lie; None if there are none.

    Between neighbours in sorted order it is interpolated linearly (NumPy's default): the 50th of 1, 2, 10, 20 is 6.
    """
    if not 0 <= percent <= 100:
        raise InvalidConfig(f"percent is {percent!r}; use a number from 0 to 100")
    ordered = sorted(values)
    if not ordered:
        return None
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    value = ordered[below] + (ordered[above] - ordered[below]) * (place - below)
    return min(value, ordered[above])


@dataclass(frozen=True)
class Distribution:
    """Some values in short; all but `count` are None where there are no values."""

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Distribution:
        """Of the values that exist: None is left out, not counted as 0."""
        known = [value for value in values if value is not None]
        p50, p90, p99 = (percentile(known, percent) for percent in (50, 90, 99))
        return cls(len(known), _ratio(sum(known), len(known)), p50, p90, p99, max(known, default=None))


@dataclass(frozen=True)
class Timeline:
    """One request's life on one clock (seconds or steps).

    Args:
        arrival: when it became known.
        start: when the first step began that computed anything for it; None if none did.
        tokens: when each of its output tokens came.
        end: when it ended; None while it has not.
    """

    arrival: float
    start: float | None
    tokens: tuple[float, ...]
    end: float | None

    @property
    def queue_time(self) -> float | None:
        """From arrival to the first computation."""
        return None if self.start is None else self.start - self.arrival

    @property
    def ttft(self) -> float | None:
        """Time to first token, from arrival."""
        return self.tokens[0] - self.arrival if self.tokens else None

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first: n tokens have n - 1 gaps. None for a single token."""
        return _ratio(self.tokens[-1] - self.tokens[0], len(self.tokens) - 1) if self.tokens else None

    @property
    def itl(self) -> tuple[float, ...]:
        """Inter-token latencies: the gaps between neighbouring tokens."""
        return tuple(later - earlier for earlier, later in pairwise(self.tokens))

    @property
    def longest_gap(self) -> float | None:
        """The longest wait between two tokens, which a reader sees as a stall."""
        return max(self.itl, default=None)

    @property
    def e2e(self) -> float | None:
        """End to end: from arrival to the end, whatever the end was."""
        return None if self.end is None else self.end - self.arrival


@dataclass(frozen=True)
class RequestMetrics:
    """One request.

    Args:
        finish_reason: None while it is unfinished.
        num_prompt_tokens, num_output_tokens: a generated end-of-sequence token counts as output.
        num_preemptions: how often it lost its blocks.
        cached_tokens: prompt tokens found in the prefix cache when it was first admitted.
        recovered_tokens: tokens found there when it came back after a preemption, mostly its own earlier work.
        prefill_tokens, decode_tokens: tokens computed for the first time.
        recomputed_tokens: tokens computed again, below the furthest position it had reached.
        steps, seconds: when things happened. The repr leaves seconds out and so is the same on every machine.
    """

    request_id: str
    finish_reason: str | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
    cached_tokens: int
    recovered_tokens: int
    prefill_tokens: int
    decode_tokens: int
    recomputed_tokens: int
    steps: Timeline
    seconds: Timeline = field(repr=False)

    @property
    def completed(self) -> bool:
        """True if it ended by itself: not unfinished, aborted or failed."""
        return self.finish_reason in COMPLETED


@dataclass(frozen=True)
class Service:
    """How a run served its requests, on one clock.

    Args:
        duration: from the first arrival to the end of the last step.
        output_throughput: output tokens of completed requests per second (or step); None if no time passed.
        total_throughput: the same with their prompt tokens.
        peak_throughput: highest rate at which tokens came in any of the equal parts, each at most a second (or a
            step) long, that the run is cut into. So it is never below the mean.
        queue_time, ttft, tpot, itl: of every request that has them; `itl` of all gaps together.
        e2e: of completed requests.
    """

    duration: float
    output_throughput: float | None
    total_throughput: float | None
    peak_throughput: float | None
    queue_time: Distribution
    ttft: Distribution
    tpot: Distribution
    itl: Distribution
    e2e: Distribution


@dataclass(frozen=True, repr=False)
class Metrics:
    """A run in numbers. It prints itself in steps, without seconds, so that its text is the same everywhere.

    Args:
        policy: name of the scheduling policy.
        num_steps: steps recorded.
        requests: in order of arrival.
        completed, aborted, failed, unfinished: how many requests ended how.
        output_tokens: of completed requests.
        emitted_tokens: of all requests, those of aborted, failed and unfinished ones too.
        prefill_tokens, decode_tokens, recomputed_tokens: as in `RequestMetrics`; together all that was computed.
        preemptions: of all requests.
        budget_utilisation: tokens computed per token of budget; None for a policy without a token budget.
        cache_utilisation, peak_cache_utilisation: share of the blocks in use after planning, mean over the steps
            and highest; None if the trace does not say how many blocks there are.
        prefix_hit_rate: share of the prompt tokens of admitted requests that came from the prefix cache. What a
            request finds again after a preemption does not count.
        steps, seconds: latencies and throughput on either clock.
    """

    policy: str
    num_steps: int
    requests: dict[str, RequestMetrics]
    completed: int
    aborted: int
    failed: int
    unfinished: int
    output_tokens: int
    emitted_tokens: int
    prefill_tokens: int
    decode_tokens: int
    recomputed_tokens: int
    preemptions: int
    budget_utilisation: float | None
    cache_utilisation: float | None
    peak_cache_utilisation: float | None
    prefix_hit_rate: float | None
    steps: Service
    seconds: Service

    @property
    def computed_tokens(self) -> int:
        """All tokens computed: prefill, decode and recomputed."""
        return self.prefill_tokens + self.decode_tokens + self.recomputed_tokens

    def table(self, steps: bool = False) -> list[list[str]]:
        """A row of texts per request, after a row of headings; times in steps, or in seconds."""
        unit = "steps" if steps else "s"
        times = [f"{name} ({unit})" for name in ("queue", "TTFT", "TPOT", "longest gap", "E2E")]
        rows = [["request", "prompt", "output", *times, "preempted", "cached", "recomputed", "finish"]]
        for r in self.requests.values():
            line = r.steps if steps else r.seconds
            moments = (line.queue_time, line.ttft, line.tpot, line.longest_gap, line.e2e)
            before, after = (r.num_prompt_tokens, r.num_output_tokens), (r.num_preemptions, r.cached_tokens)
            row = [*map(str, before), *(_show(value, steps) for value in moments), *map(str, after)]
            rows.append([r.request_id, *row, str(r.recomputed_tokens), r.finish_reason or "unfinished"])
        return rows

    def totals(self, steps: bool = False) -> list[list[str]]:
        """Rows of two texts, name and value, for the whole run; times in steps, or in seconds."""
        service, unit, each = (self.steps, "steps", "step") if steps else (self.seconds, "s", "s")
        ended = f"{self.completed} completed, {self.aborted} aborted, {self.failed} failed"
        kinds = f"{self.prefill_tokens} prefill, {self.decode_tokens} decode, {self.recomputed_tokens} computed again"
        used = f"mean {_percent(self.cache_utilisation)}, peak {_percent(self.peak_cache_utilisation)}"
        return [
            ["requests", ended + (f", {self.unfinished} unfinished" if self.unfinished else "")],
            ["steps", str(self.num_steps)],
            ["output tokens", f"{self.output_tokens}, {_show(service.output_throughput, steps)} per {each}"],
            ["tokens computed", f"{self.computed_tokens}: {kinds}"],
            ["preemptions", str(self.preemptions)],
            ["token budget used", _percent(self.budget_utilisation)],
            ["blocks used", used],
            ["prefix cache hits", _percent(self.prefix_hit_rate)],
            [f"queue time ({unit})", _spread(service.queue_time, steps)],
            [f"TTFT ({unit})", _spread(service.ttft, steps)],
            [f"TPOT ({unit})", _spread(service.tpot, steps)],
            [f"ITL ({unit})", _spread(service.itl, steps)],
            [f"E2E ({unit})", _spread(service.e2e, steps)],
        ]

    def text(self, steps: bool = False) -> str:
        """Both tables as plain text."""
        return f"{_columns(self.table(steps))}\n\n{_columns(self.totals(steps))}"

    def __repr__(self) -> str:
        return self.text(steps=True)

    def _repr_html_(self) -> str:
        heads, *rows = self.table(steps=True)
        head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in heads)
        requests = f"<table><thead><tr>{head}</tr></thead><tbody>{_html(rows)}</tbody></table>"
        return f"{requests}<table><tbody>{_html(self.totals(steps=True))}</tbody></table>"


@dataclass(frozen=True)
class Slo:
    """A service level objective: the longest times allowed, None for no limit; in seconds, or in steps."""

    ttft: float | None = None
    tpot: float | None = None
    longest_gap: float | None = None
    e2e: float | None = None

    def __post_init__(self) -> None:
        for name, limit in self._limits():
            if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 0:
                raise InvalidConfig(f"{name} is {limit!r}; use a number of at least 0, or None for no limit")

    def met_by(self, times: Timeline) -> bool:
        """True if no time exceeds its limit; a gap that does not exist (a single token) exceeds nothing."""
        values = [(getattr(times, name), limit) for name, limit in self._limits()]
        return all(value is None or value <= limit for value, limit in values)

    def _limits(self) -> list[tuple[str, float]]:
        limits = [(item.name, getattr(self, item.name)) for item in fields(self)]
        return [(name, limit) for name, limit in limits if limit is not None]


def within(metrics: Metrics, slo: Slo, steps: bool = False) -> list[str]:
    """Ids of the completed requests that meet `slo`, in order of arrival."""
    requests = metrics.requests.values()
    return [r.request_id for r in requests if r.completed and slo.met_by(r.steps if steps else r.seconds)]


def goodput(metrics: Metrics, slo: Slo, steps: bool = False) -> float | None:
    """Requests per second (or step) that completed and met `slo`; None if no time passed. From DistServe (2024)."""
    service = metrics.steps if steps else metrics.seconds
    return _ratio(len(within(metrics, slo, steps)), service.duration)


def summarise(trace: Trace) -> Metrics:
    """The metrics of a run, finished or not.

    Raises:
        TraceError: a step speaks of a request that the trace does not have.
    """
    lives = {name: _Life(record) for name, record in trace.requests.items()}
    for index, step in enumerate(trace.steps):
        try:
            _replay(index, step, lives)
        except KeyError as error:
            raise TraceError(f"step {index} speaks of {error}, which never arrived; record the run again") from error
    requests = [life.metrics(trace.finished.get(name)) for name, life in lives.items()]
    reasons = Counter(r.finish_reason for r in requests)
    budgeted = [step for step in trace.steps if step.budget is not None]
    pool, blocks_used = _blocks_used(trace)
    admitted_tokens = sum(r.num_prompt_tokens for r in requests if r.steps.start is not None)
    return Metrics(
        policy=trace.policy,
        num_steps=len(trace.steps),
        requests={r.request_id: r for r in requests},
        completed=sum(reasons[reason] for reason in COMPLETED),
        aborted=reasons["abort"],
        failed=reasons["error"],
        unfinished=reasons[None],
        output_tokens=sum(r.num_output_tokens for r in requests if r.completed),
        emitted_tokens=sum(r.num_output_tokens for r in requests),
        prefill_tokens=sum(r.prefill_tokens for r in requests),
        decode_tokens=sum(r.decode_tokens for r in requests),
        recomputed_tokens=sum(r.recomputed_tokens for r in requests),
        preemptions=sum(r.num_preemptions for r in requests),
        budget_utilisation=_ratio(sum(s.num_tokens for s in budgeted), sum(s.budget or 0 for s in budgeted)),
        cache_utilisation=_ratio(sum(blocks_used), pool * len(blocks_used)),
        peak_cache_utilisation=_ratio(max(blocks_used, default=0), pool if blocks_used else 0),
        prefix_hit_rate=_ratio(sum(r.cached_tokens for r in requests), admitted_tokens),
        steps=_service(requests, [r.steps for r in requests], len(trace.steps)),
        seconds=_service(requests, [r.seconds for r in requests], trace.steps[-1].end if trace.steps else 0.0),
    )


@dataclass
class _Life:
    """What is counted of one request while the trace is replayed."""

    record: RequestRecord
    start: tuple[int, float] | None = None
    token_steps: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    preemptions: int = 0
    cached: int = 0
    recovered: int = 0
    computed: Counter[str] = field(default_factory=Counter)
    high_water: int = 0

    def compute(self, start: int, count: int, kind: str) -> None:
        """Count tokens below the high-water mark as computed again, those above it as new."""
        again = max(0, min(start + count, self.high_water) - start)
        self.computed["R"] += again
        self.computed["D" if kind == "D" else "P"] += count - again
        self.high_water = max(self.high_water, start + count)

    def metrics(self, finish: FinishRecord | None) -> RequestMetrics:
        record, (step, time) = self.record, self.start or (None, None)
        return RequestMetrics(
            request_id=record.request_id,
            finish_reason=finish.reason if finish else None,
            num_prompt_tokens=record.num_prompt_tokens,
            num_output_tokens=len(self.token_steps),
            num_preemptions=self.preemptions,
            cached_tokens=self.cached,
            recovered_tokens=self.recovered,
            prefill_tokens=self.computed["P"],
            decode_tokens=self.computed["D"],
            recomputed_tokens=self.computed["R"],
            steps=Timeline(record.arrival_step, step, tuple(self.token_steps), finish.step if finish else None),
            seconds=Timeline(record.arrival_time, time, tuple(self.token_times), finish.time if finish else None),
        )


def _replay(index: int, step: StepRecord, lives: dict[str, _Life]) -> None:
    for name, start, count, kind in zip(step.request_ids, step.starts, step.counts, step.kinds, strict=True):
        lives[name].start = lives[name].start or (index, step.start)
        lives[name].compute(start, count, kind)
    for name in step.sampled:
        lives[name].token_steps.append(index + 1)
        lives[name].token_times.append(step.end)
    for name in {*step.preempted, *step.swapped_out}:
        lives[name].preemptions += 1
    for name, count in step.cached.items():
        if name in step.resumed:
            lives[name].recovered += count
        else:
            lives[name].cached += count


def _blocks_used(trace: Trace) -> tuple[int, list[int]]:
    """Size of the pool and blocks in use in each step; 0 and none if the trace does not say the size."""
    pool = trace.config.get("num_blocks")
    if not isinstance(pool, int) or pool < 1:
        return 0, []
    return pool, [pool - step.free_blocks for step in trace.steps]


def _service(requests: Sequence[RequestMetrics], times: Sequence[Timeline], end: float) -> Service:
    duration = max(0, end - min((line.arrival for line in times), default=end))
    output = sum(r.num_output_tokens for r in requests if r.completed)
    prompts = sum(r.num_prompt_tokens for r in requests if r.completed)
    return Service(
        duration=duration,
        output_throughput=_ratio(output, duration),
        total_throughput=_ratio(output + prompts, duration),
        peak_throughput=_peak([token for line in times for token in line.tokens], end - duration, duration),
        queue_time=Distribution.of(line.queue_time for line in times),
        ttft=Distribution.of(line.ttft for line in times),
        tpot=Distribution.of(line.tpot for line in times),
        itl=Distribution.of(gap for line in times for gap in line.itl),
        e2e=Distribution.of(line.e2e for r, line in zip(requests, times, strict=True) if r.completed),
    )


def _peak(moments: Sequence[float], start: float, duration: float) -> float | None:
    """Parts of exactly one second would show a rate below the mean for a run that is shorter than that."""
    if duration <= 0:
        return None
    parts = math.ceil(duration)
    counts = Counter(min(parts, max(1, math.ceil((moment - start) * parts / duration))) for moment in moments)
    return max(counts.values(), default=0) * parts / duration


# Numbers as text


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _show(value: float | None, steps: bool) -> str:
    if value is None:
        return "n/a"
    return f"{value:.2f}".removesuffix(".00") if steps else f"{value:.3f}"


def _percent(share: float | None) -> str:
    return "n/a" if share is None else f"{100 * share:.1f} %"


def _spread(values: Distribution, steps: bool) -> str:
    points = {"mean": values.mean, "p50": values.p50, "p90": values.p90, "p99": values.p99}
    return ", ".join(f"{name} {_show(value, steps)}" for name, value in points.items()) if values.count else "n/a"


def _columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows as lines of text: the columns between the first and the last are numbers and stand to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    middle = [[cell.rjust(width) for cell, width in zip(row, widths, strict=True)][1:-1] for row in rows]
    lines = [[row[0].ljust(widths[0]), *cells, row[-1]] for row, cells in zip(rows, middle, strict=True)]
    return "\n".join("  ".join(line) for line in lines)


def _html(rows: Sequence[Sequence[str]]) -> str:
    cells = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    return "".join(f"<tr>{row}</tr>" for row in cells)
