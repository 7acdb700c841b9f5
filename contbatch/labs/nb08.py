"""Checks of notebook 08, preemption."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from contbatch.blocks import blocks_needed
from contbatch.config import SchedulerConfig
from contbatch.engine import Engine
from contbatch.errors import ContbatchError
from contbatch.executor import ScriptedExecutor
from contbatch.labs.exercise import GIVE_VALUE, Exercise, Mistake, Rule, function_exercise
from contbatch.labs.guard import Trouble, limited
from contbatch.labs.result import Fault
from contbatch.policy import Policy
from contbatch.request import RunningRequest, SamplingParams
from contbatch.step import Step
from contbatch.trace import Trace

# 08.1


@dataclass(frozen=True, repr=False)
class Running:
    """A running request in an example: the part of `RunningRequest` that a choice may look at."""

    request_id: str
    index: int
    num_computed_tokens: int
    block_table: list[int] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"Running({self.request_id!r}, {self.index}, {self.num_computed_tokens}, {self.block_table})"


def pick_victim(running: Sequence[Any]) -> Any:
    """The request that came last: those that came before it keep their place."""
    return max(running, key=lambda request: request.index)


def _example(*computed: int, first: int = 0) -> tuple[list[Running]]:
    """Requests in the order in which they came, with so many tokens computed; 4 tokens to a block."""
    running, used = [], 0
    for place, tokens in enumerate(computed, start=first):
        blocks = list(range(used + 1, used + 1 + blocks_needed(tokens, 4)))
        used += len(blocks)
        running.append(Running(f"r{place}", place, tokens, blocks))
    return (running,)


_PICK = function_exercise(
    "08.1",
    "pick the victim",
    pick_victim,
    {
        "a request that runs alone makes room by going itself": [_example(8)],
        "of two, the one that came later goes": [_example(4, 4), _example(8, 4), _example(4, 8)],
        "how much a request holds does not matter": [_example(4, 12, 8), _example(12, 4, 8)],
        "numbers of arrival need not begin at 0": [_example(4, 8, 4, first=5)],
    },
    [
        Mistake(
            "it picks the oldest: whoever waited longest goes first, and nobody may ever get to the end", lambda r: r[0]
        ),
        Mistake(
            "it picks the one with the most blocks: the request with the most to lose goes, however long it waited",
            lambda r: max(r, key=lambda one: len(one.block_table)),
        ),
        Mistake(
            "it picks the one with the least computed: cheap today, but a request that just came back is cheap again",
            lambda r: min(r, key=lambda one: one.num_computed_tokens),
        ),
        Mistake("it returns a place in the list; return the request itself", lambda r: len(r) - 1),
        Mistake("it returns an id; return the request itself", lambda r: r[-1].request_id),
    ],
)


class EvictWith(Policy):
    """First come, first served; when blocks run out, `pick` chooses who goes.

    Args:
        pick: from the running requests, in the order of admission, to the victim.
        chunk: most tokens of one request in a step.
    """

    def __init__(self, pick: Callable[[Sequence[RunningRequest]], RunningRequest], chunk: int = 64) -> None:
        self.pick, self.chunk = pick, chunk

    def schedule(self, step: Step) -> None:
        """Running requests first; the queue only if nobody had to go."""
        for request in list(step.running):
            tokens = min(request.owed, step.tokens_left(request), self.chunk)
            while tokens and request in step.running and not step.grant(request, tokens):
                step.preempt(self.pick(step.running))
        while step.waiting and step.seats_left and not step.victims:
            request = step.waiting.head
            tokens = min(request.owed, step.tokens_left(request), self.chunk)
            if not tokens or not step.admit(request, tokens, fit=len(request.token_ids)):
                break


def _keeps_order(answer: Any) -> Fault | None:
    """In a real run, every victim is the newest of those that ran."""
    engine = _squeezed(EvictWith(lambda running: answer(list(running))))
    wrong = "in a run with 10 blocks, {} is sent away while {}, which came later, stays"
    try:
        with limited():
            for number in range(200):
                if not engine.has_unfinished:
                    break
                before = {request.request_id: request.index for request in engine.scheduler.running}
                engine.step()
                for victim in engine.trace.steps[-1].preempted:
                    newest = max(before, key=lambda name: before[name])
                    if victim != newest:
                        return Fault(wrong.format(victim, newest), "", engine.trace, number)
                    del before[victim]
    except (ContbatchError, Trouble) as error:
        return Fault(f"in a run with 10 blocks: {error}")
    return None


def _squeezed(policy: EvictWith) -> Engine:
    limits = SchedulerConfig(num_blocks=10, block_size=4, max_num_batched_tokens=64, enable_prefix_caching=False)
    engine = Engine(ScriptedExecutor(), limits, policy)
    for number, (prompt, output) in enumerate([(9, 16), (3, 20), (13, 8), (6, 12)]):
        engine.add_request([1000 * number + i for i in range(prompt)], SamplingParams(max_tokens=output))
    return engine


PICK = Exercise(
    _PICK.number,
    _PICK.title,
    pick_victim,
    [*_PICK.rules, Rule("in a run, nobody goes before one that came later", _keeps_order)],
)

# 08.2


def price(prompt: int, generated: int, block_size: int) -> tuple[int, int]:
    """(blocks that a victim frees, tokens to compute, the newest one included, before its next new token)."""
    known = prompt + generated
    return blocks_needed(known - 1, block_size), known


PRICE = function_exercise(
    "08.2",
    "what a preemption costs",
    price,
    {
        "the blocks of the prompt are freed": [(9, 1, 4), (10, 1, 4)],
        "the blocks of the output are freed too": [(8, 5, 4), (8, 6, 4), (3, 30, 16)],
        "the newest token has no block yet: it was sampled, not computed": [(8, 1, 4), (7, 2, 4), (12, 5, 16)],
        "prompt and output must be computed before the next token": [(1, 1, 1), (100, 50, 16)],
    },
    [
        Mistake(
            "the output is forgotten: it was kept as text, but its K and V are gone", lambda p, g, s: (-(-p // s), p)
        ),
        Mistake(
            "the newest token is counted among the computed ones; it takes its place in a block in the next step",
            lambda p, g, s: (-(-(p + g) // s), p + g),
        ),
        Mistake("a block that is only partly full is freed too; round up", lambda p, g, s: ((p + g - 1) // s, p + g)),
        Mistake(
            "the newest token must be computed too before the next one can be sampled",
            lambda p, g, s: (-(-(p + g - 1) // s), p + g - 1),
        ),
        Mistake("the order is (blocks, tokens)", lambda p, g, s: (p + g, -(-(p + g - 1) // s))),
        Mistake("only the output is counted; the prompt's blocks go too", lambda p, g, s: (-(-g // s), g)),
    ],
    (tuple, list),
    "two numbers: blocks freed, tokens to compute",
)

# 08.3

PROMPTS = (11, 7, 10, 23, 5, 11, 8, 11)
"""Prompt lengths of the eight requests of the notebook, in tokens of the embedded model."""
OUTPUTS = (32, 24, 40, 28, 36, 20, 32, 24)
"""Tokens that each of them generates."""
BLOCK_SIZE = 4


def squeeze(num_blocks: int) -> Trace:
    """The eight requests, with made-up tokens, in a pool of so many blocks."""
    limits = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        enable_prefix_caching=False,
    )
    engine = Engine(ScriptedExecutor(), limits)
    for number, (prompt, output) in enumerate(zip(PROMPTS, OUTPUTS, strict=True)):
        engine.add_request([1000 * number + i for i in range(prompt)], SamplingParams(max_tokens=output))
    engine.run()
    return engine.trace


LONGEST = max(blocks_needed(p + o - 1, BLOCK_SIZE) for p, o in zip(PROMPTS, OUTPUTS, strict=True))
"""Blocks of the largest request: a smaller pool could never serve it."""
TOGETHER = sum(blocks_needed(p + o - 1, BLOCK_SIZE) for p, o in zip(PROMPTS, OUTPUTS, strict=True))
"""Blocks of all requests, each at its longest."""
ADMITTED = sum(blocks_needed(p, BLOCK_SIZE) for p in PROMPTS)
"""Blocks that hold all prompts."""


SMALLEST_POOL = 64
"""The smallest pool in which nobody is preempted; found by trying, and tried again by a test."""


def _first_victim(trace: Trace) -> tuple[int, str] | None:
    return next(((step.step, step.preempted[0]) for step in trace.steps if step.preempted), None)


def _roomy(answer: Any) -> Fault | None:
    if isinstance(answer, bool) or not isinstance(answer, int) or answer < 1:
        return Fault(f"the answer is a number of blocks, at least 1; this is {answer!r}")
    if answer < LONGEST:
        return Fault(f"the largest request needs {LONGEST} blocks; with {answer} it is refused")
    trace = squeeze(answer)
    victim = _first_victim(trace)
    if victim is None:
        return None
    hint = " (all prompts fit, and then the outputs grow)" if answer == ADMITTED else ""
    return Fault(f"with {answer} blocks, {victim[1]} is preempted in step {victim[0]}{hint}", "", trace, victim[0])


def _no_roomier(answer: Any) -> Fault | None:
    if not isinstance(answer, int) or answer <= SMALLEST_POOL:
        return None
    if answer == TOGETHER:
        return Fault("that holds every request at its longest, but the short ones have ended by then")
    return Fault(f"nobody is preempted with {answer - 1} blocks either; look for the smallest pool")


POOL = Exercise(
    "08.3",
    "the smallest pool without a preemption",
    SMALLEST_POOL,
    [Rule("nobody is preempted", _roomy), Rule("no smaller pool does that", _no_roomier)],
    GIVE_VALUE,
)

EXERCISES = (PICK, PRICE, POOL)
