"""What the tests of preemption by swap share: a policy that is told whom to send away, and a toy that counts copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from contbatch import Engine, SchedulerConfig, Trace
from contbatch.policies import VllmV1
from contbatch.request import SamplingParams
from contbatch.step import Step
from contbatch.trace import StepRecord
from tests.toy import Ticks, Toy, assert_alone, assert_empty, config, params, prompt

Decide = Callable[[Step], object]


def swap(host: int = 40, **limits: Any) -> SchedulerConfig:
    """The notation of the cases, with preemption by swap."""
    return replace(config(**limits), preemption_mode="swap", num_host_blocks=host)


class Directed(VllmV1):
    """VllmV1, except in a step that a test decides itself."""

    def __init__(self, order: str = "fcfs") -> None:
        super().__init__(order)
        self.decide: Decide | None = None

    def schedule(self, step: Step) -> None:
        """The test, or VllmV1."""
        decide, self.decide = self.decide, None
        if decide is None:
            super().schedule(step)
        else:
            decide(step)


def send_away(*names: str) -> Decide:
    """Preempt these, in this order, and serve those that are left."""

    def decide(step: Step) -> None:
        for name in names:
            step.preempt(next(request for request in step.running if request.request_id == name))
        step.grant_running()

    return decide


def admit_head(step: Step) -> None:
    """Admit the head of the queue, then serve the others."""
    assert step.admit(step.waiting.head, step.waiting.head.owed)
    step.grant_running()


class Copies(Toy):
    """A toy that writes down the copies it made."""

    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self.out: list[tuple[tuple[int, int], ...]] = []
        self.back: list[tuple[tuple[int, int], ...]] = []

    def swap_out(self, blocks: Sequence[tuple[int, int]]) -> None:
        """To host memory."""
        super().swap_out(blocks)
        self.out.append(tuple(blocks))

    def swap_in(self, blocks: Sequence[tuple[int, int]]) -> None:
        """And back."""
        super().swap_in(blocks)
        self.back.append(tuple(blocks))


def directed(
    limits: SchedulerConfig, prompts: Mapping[str, Sequence[int]], output: int = 20
) -> tuple[Engine, Copies, Directed]:
    """Everybody runs: one step is done."""
    policy, toy = Directed(), Copies(limits.num_blocks, limits.block_size)
    engine = Engine(toy, limits, policy, clock=Ticks())
    for name, tokens in prompts.items():
        engine.add_request(tokens, params(output), request_id=name)
    engine.step()
    return engine, toy, policy


def step(engine: Engine) -> StepRecord:
    """One step; its record."""
    engine.step()
    engine.scheduler.check()
    return engine.trace.steps[-1]


def finish(engine: Engine, toy: Toy, wanted: SamplingParams) -> None:
    """To the end: everybody got the tokens of a run alone, and nothing is held, in host memory neither."""
    while engine.has_unfinished:
        step(engine)
    assert_alone(toy, engine.completions, wanted)
    assert_empty(engine)
    assert engine.scheduler.host.num_used == 0


def swapped(trace: Trace) -> tuple[int, int, int]:
    """How many times somebody was swapped out, was swapped in, and was preempted without room in host memory."""
    counts = [(len(s.swapped_out), len(s.swapped_in), len(s.preempted)) for s in trace.steps]
    out, back, full = zip(*counts, strict=True)
    return sum(out), sum(back), sum(full)


def crowd(count: int = 6, length: int = 6) -> dict[str, list[int]]:
    """Requests that the pools below are too small for."""
    return {f"r{index}": prompt(length + index % 3, index) for index in range(count)}
