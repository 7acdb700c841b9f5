"""What the tests of the cases share: ways to drive an engine, and to read a run from its trace alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from contbatch.engine import Engine, TokenEvent
from contbatch.policies import POLICIES, VllmV1
from contbatch.request import FinishReason
from contbatch.step import Step
from contbatch.trace import StepRecord, Trace
from tests.toy import config, params, prompt, terminal, toy_engine

ALL = list(POLICIES)
"""Every named policy."""
BUDGETED = [name for name in ALL if POLICIES[name]().token_budget(config(budget=16)).max_total_tokens == 16]
"""Those that keep to max_num_batched_tokens."""


class Events:
    """A callback that keeps all events of the requests it is given to."""

    def __init__(self) -> None:
        self.all: list[TokenEvent] = []

    def __call__(self, event: TokenEvent) -> None:
        self.all.append(event)

    def of(self, name: str) -> list[TokenEvent]:
        """Those of one request."""
        return [event for event in self.all if event.request_id == name]

    def ends(self) -> list[tuple[str, FinishReason]]:
        """The finish events."""
        return terminal(self.all)


class Forced(VllmV1):
    """VllmV1, except that it first preempts whom a test names in `victims`."""

    def __init__(self, order: str = "fcfs") -> None:
        super().__init__(order)
        self.victims: set[str] = set()

    def schedule(self, step: Step) -> None:
        """The named ones go; the others are served."""
        for request in [request for request in step.running if request.request_id in self.victims]:
            step.preempt(request)
        self.victims = set()
        super().schedule(step)


def drive(engine: Engine, limit: int = 600) -> list[TokenEvent]:
    """Step to the end, with the rules checked after every step; no step may be idle."""
    events: list[TokenEvent] = []
    for _ in range(limit):
        if not engine.has_unfinished:
            return events
        events += engine.step()
        engine.scheduler.check()
        assert engine.trace.steps[-1].num_tokens, "a step that computes nothing while somebody is unfinished"
    raise AssertionError(f"not at an end after {limit} steps")


def grants(record: StepRecord) -> dict[str, int]:
    """Who got how many tokens in a step, in the order of granting."""
    return dict(zip(record.request_ids, record.counts, strict=True))


def preemptions(trace: Trace) -> int:
    """How often anybody was sent back to the queue."""
    return sum(len(step.preempted) for step in trace.steps)


def first_step(trace: Trace, name: str) -> int:
    """The step in which a request first computed something."""
    return next(step.step for step in trace.steps if name in step.request_ids)


def block_tables(trace: Trace) -> Iterator[tuple[StepRecord, Mapping[str, list[int]]]]:
    """Each step with the block tables after it was planned, told by the trace alone."""
    tables: dict[str, list[int]] = {}
    for record in trace.steps:
        for name in list(tables):
            if name in (*record.preempted, *record.swapped_out) or (
                name in trace.finished and trace.finished[name].step <= record.step
            ):
                del tables[name]
        for name, blocks in record.new_blocks.items():
            tables.setdefault(name, []).extend(blocks)
        yield record, {name: list(table) for name, table in tables.items()}


def crowded(policy: str) -> Engine:
    """A pool of 10 blocks in which R holds 5, the head of the queue needs 8 and the next one needs 2."""
    engine, _ = toy_engine(config(pool=10, bs=4), policy)
    engine.add_request(prompt(17), params(3), request_id="R")
    engine.step()
    assert engine.scheduler.pool.num_used == 5
    engine.add_request(prompt(32, 1), params(3), request_id="head")
    engine.add_request(prompt(8, 2), params(3), request_id="next")
    return engine
