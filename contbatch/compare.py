"""Policies side by side on one workload: what each costs, in steps and tokens.

Tokens are made up, so nothing here depends on a machine: a comparison is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from contbatch.config import SchedulerConfig
from contbatch.engine import Engine
from contbatch.errors import InvalidConfig
from contbatch.executor import ScriptedExecutor
from contbatch.metrics import RequestMetrics, summarise
from contbatch.policies import policy_by_name
from contbatch.policy import Policy
from contbatch.trace import StepRecord, Trace
from contbatch.workload import Workload, drive


@dataclass(frozen=True)
class Comparison:
    """One policy on one workload.

    Args:
        policy: its name.
        steps: from the first request to the last token.
        worst_gap: most steps between two neighbouring tokens of a request, time preempted included.
        work_in_gap: tokens computed for others in that gap, up to the step that ends it; of equal gaps the most.
        computed: tokens computed.
        ideal: tokens that have to be computed once: prompts and outputs without the last token of each.
        preemptions: how often a request lost its blocks.
        trace: the run.
    """

    policy: str
    steps: int
    worst_gap: int
    work_in_gap: int
    computed: int
    ideal: int
    preemptions: int
    trace: Trace

    @property
    def excess(self) -> float:
        """Share of tokens computed beyond the ideal."""
        return self.computed / self.ideal - 1 if self.ideal else 0.0


def compare(
    workload: Workload, policies: Iterable[str | Policy], config: SchedulerConfig | None = None
) -> list[Comparison]:
    """Serve a workload under each policy.

    Args:
        workload: what arrives.
        policies: names, or policies that have not been used.
        config: limits; None takes those of the workload, or the defaults.

    Raises:
        InvalidConfig: requests arrive by the second.
    """
    return [_run(workload, policy, config or workload.config or SchedulerConfig()) for policy in policies]


def _run(workload: Workload, policy: str | Policy, config: SchedulerConfig) -> Comparison:
    if any(request.arrival_time is not None for request in workload.requests):
        raise InvalidConfig("the workload arrives by the second, and a comparison counts steps; give arrival_step")
    policy = policy_by_name(policy) if isinstance(policy, str) else policy
    trace = drive(Engine(ScriptedExecutor(), config, policy), workload)
    metrics = summarise(trace)
    requests = list(metrics.requests.values())
    worst_gap, work_in_gap = _worst_gap(trace, requests)
    return Comparison(
        policy.name,
        metrics.num_steps,
        worst_gap,
        work_in_gap,
        metrics.computed_tokens,
        sum(r.num_prompt_tokens + r.num_output_tokens - 1 for r in requests),
        metrics.preemptions,
        trace,
    )


def _worst_gap(trace: Trace, requests: Iterable[RequestMetrics]) -> tuple[int, int]:
    """The longest gap between two tokens of a request, in steps, and the work of others in it."""
    gaps = [
        (request.request_id, int(earlier), int(later))
        for request in requests
        for earlier, later in pairwise(request.steps.tokens)
    ]
    longest = max((later - earlier for _, earlier, later in gaps), default=0)
    # A token of step k comes at time k + 1, so these are the steps after that of the earlier token.
    work = [_work_of_others(trace.steps[a:b], request_id) for request_id, a, b in gaps if b - a == longest]
    return longest, max(work, default=0)


def _work_of_others(steps: Iterable[StepRecord], request_id: str) -> int:
    return sum(
        count
        for step in steps
        for other, count in zip(step.request_ids, step.counts, strict=True)
        if other != request_id
    )


def table(comparisons: Iterable[Comparison]) -> list[list[str]]:
    """A row of texts per policy, after a row of headings."""
    heads = [
        "policy",
        "steps",
        "worst gap (steps)",
        "work of others in it (tokens)",
        "tokens computed",
        "preemptions",
    ]
    rows = [
        [
            c.policy,
            str(c.steps),
            str(c.worst_gap),
            f"{c.work_in_gap:,}",
            f"{c.computed:,} ({c.excess:+.0%})",
            str(c.preemptions),
        ]
        for c in comparisons
    ]
    return [heads, *rows]
