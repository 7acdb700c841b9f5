"""Policies side by side on one workload: what each costs, in steps and tokens.

Tokens are made up, so nothing here depends on a machine: a comparison is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from contbatch.config import SchedulerConfig
from contbatch.engine import Engine
from contbatch.executor import ScriptedExecutor
from contbatch.metrics import RequestMetrics, summarise
from contbatch.policies import policy_by_name
from contbatch.policy import Policy
from contbatch.trace import Trace
from contbatch.workload import Workload, drive


@dataclass(frozen=True)
class Comparison:
    """One policy on one workload.

    Args:
        policy: its name.
        steps: from the first request to the last token.
        worst_gap: most steps between two neighbouring tokens of a request, time preempted included.
        work_in_gap: most tokens computed for others between two neighbouring tokens of a request.
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
        return self.computed / self.ideal - 1


def compare(
    workload: Workload, policies: Iterable[str | Policy], config: SchedulerConfig | None = None
) -> list[Comparison]:
    """Serve a workload under each policy.

    Args:
        workload: what arrives.
        policies: names, or policies that have not been used.
        config: limits; None takes those of the workload, or the defaults.
    """
    return [_run(workload, policy, config or workload.config or SchedulerConfig()) for policy in policies]


def _run(workload: Workload, policy: str | Policy, config: SchedulerConfig) -> Comparison:
    policy = policy_by_name(policy) if isinstance(policy, str) else policy
    trace = drive(Engine(ScriptedExecutor(), config, policy), workload)
    metrics = summarise(trace)
    requests = list(metrics.requests.values())
    return Comparison(
        policy.name,
        metrics.num_steps,
        int(max((r.steps.longest_gap or 0 for r in requests), default=0)),
        max((_work_of_others(trace, r) for r in requests), default=0),
        metrics.computed_tokens,
        sum(r.num_prompt_tokens + r.num_output_tokens - 1 for r in requests),
        metrics.preemptions,
        trace,
    )


def _work_of_others(trace: Trace, request: RequestMetrics) -> int:
    """Most tokens computed for others between two tokens of `request`."""
    most = 0
    for earlier, later in pairwise(int(moment) for moment in request.steps.tokens):
        steps = trace.steps[earlier:later]  # a token of step k comes at time k + 1
        own = sum(
            step.counts[step.request_ids.index(r)] for step in steps if (r := request.request_id) in step.request_ids
        )
        most = max(most, sum(step.num_tokens for step in steps) - own)
    return most


def table(comparisons: Iterable[Comparison]) -> list[list[str]]:
    """A row of texts per policy, after a row of headings."""
    heads = [
        "policy",
        "steps",
        "worst gap (steps)",
        "work of others in a gap (tokens)",
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
