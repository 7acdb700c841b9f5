"""Checks of notebook 06, the token budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from contbatch.config import SchedulerConfig
from contbatch.engine import Engine
from contbatch.executor import ScriptedExecutor
from contbatch.labs.exercise import GIVE_VALUE, Exercise, Mistake, Rule, function_exercise
from contbatch.labs.guard import NotYet, is_stub
from contbatch.labs.result import Fault
from contbatch.plan import BlockReason
from contbatch.policies import StaticBatching, VllmV1
from contbatch.policy import Policy
from contbatch.request import SamplingParams
from contbatch.step import Step
from contbatch.trace import Trace
from contbatch.viz.view import View

# 06.1


def fill_budget(owed: Sequence[int], budget: int) -> list[int]:
    """What each request gets of one step's budget: in order, each as much of what it owes as is left."""
    grants = []
    for tokens in owed:
        grants.append(min(tokens, budget))
        budget -= grants[-1]
    return grants


def _whole_or_nothing(owed: Sequence[int], budget: int) -> list[int]:
    grants = []
    for tokens in owed:
        grants.append(tokens if tokens <= budget else 0)
        budget -= grants[-1]
    return grants


def _only_if_less(owed: Sequence[int], budget: int) -> list[int]:
    grants = []
    for tokens in owed:
        grants.append(tokens if tokens < budget else 0)
        budget -= grants[-1]
    return grants


def _short_list(owed: Sequence[int], budget: int) -> list[int]:
    return [grant for grant in fill_budget(owed, budget) if grant]


def _whole_budget_each(owed: Sequence[int], budget: int) -> list[int]:
    return [min(tokens, budget) for tokens in owed]


def _takes_off_what_is_owed(owed: Sequence[int], budget: int) -> list[int]:
    grants = []
    for tokens in owed:
        grants.append(min(tokens, budget))
        budget -= tokens
    return grants


def _fair_share(owed: Sequence[int], budget: int) -> list[int]:
    return [min(tokens, budget // len(owed)) for tokens in owed]


def _counts_requests(owed: Sequence[int], budget: int) -> list[int]:
    return [tokens if place < budget else 0 for place, tokens in enumerate(owed)]


def _smallest_first(owed: Sequence[int], budget: int) -> list[int]:
    grants = [0] * len(owed)
    for place in sorted(range(len(owed)), key=lambda place: owed[place]):
        grants[place] = min(owed[place], budget)
        budget -= grants[place]
    return grants


FILL = function_exercise(
    "06.1",
    "fill the budget",
    fill_budget,
    {
        "while the budget lasts, everybody gets what is owed": [([1], 4), ([1, 1, 3], 8)],
        "a demand as large as what is left is granted whole": [([4], 4), ([1, 1, 6], 8)],
        "a prompt larger than what is left gets what is left, not nothing": [([9], 4), ([1, 1, 90], 16)],
        "when nothing is left, the rest get 0 and keep their place": [([3], 0), ([4, 1], 4), ([1, 1, 20, 5], 8)],
        "the order decides; nobody overtakes": [([6, 6, 1], 8)],
        "who owes nothing gets nothing": [([0, 2], 4)],
    },
    [
        Mistake(
            "a request that does not fit whole gets 0, so a prompt above the budget waits for ever", _whole_or_nothing
        ),
        Mistake("`<` where `<=` is meant: a demand that fits exactly is refused", _only_if_less),
        Mistake("requests that get nothing are missing from the list; write 0 for them", _short_list),
        Mistake("each request is compared with the whole budget; take off what was given before", _whole_budget_each),
        Mistake("what is owed is taken off, not what was given, so the rest falls below 0", _takes_off_what_is_owed),
        Mistake("the budget is split in equal parts; the first in line may take all it owes", _fair_share),
        Mistake("the budget is counted in requests; it counts tokens", _counts_requests),
        Mistake("the smallest demand is served first; keep the order of the list", _smallest_first),
    ],
    (list, tuple),
    "a list with one number for each request",
)

# 06.2

PROMPTS = (24, 9, 40, 13, 30, 90, 11, 18)
"""Prompt lengths of eight made-up requests; the last four come later."""
OUTPUTS = (24, 16, 30, 20, 12, 24, 28, 16)
LATE = 6
"""Steps that pass before the last four requests come."""


class PrefillFirst(Policy):
    """Prompts first; decoding requests get what is left of the budget. Memory is assumed to be ample."""

    def schedule(self, step: Step) -> None:
        """Unfinished prompts, then the queue, then decodes."""
        for request in [r for r in step.running if r.is_prefilling]:
            step.grant(request, min(request.owed, step.tokens_left(request)))
        while step.waiting and step.seats_left and not step.budget.is_exhausted:
            request = step.waiting.head
            step.admit(request, min(request.owed, step.tokens_left(request)))
        for request in [r for r in step.running if not r.is_prefilling]:
            if step.tokens_left(request) and not step.was_granted(request):
                step.grant(request, 1)


def late_arrivals(policy: Policy | str, budget: int) -> Trace:
    """The eight made-up requests, four at once and four later, under a policy and a budget."""
    limits = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=budget, num_blocks=64)
    engine = Engine(ScriptedExecutor(), limits, policy)
    for number, (prompt, output) in enumerate(zip(PROMPTS, OUTPUTS, strict=True)):
        if number == 4:
            engine.run(LATE)
        engine.add_request([1000 * number + i for i in range(prompt)], SamplingParams(max_tokens=output))
    engine.run()
    return engine.trace


def missed(trace: Trace) -> list[tuple[int, str]]:
    """(step, request) for every time a running request that had its first token got nothing."""
    view = View(trace)
    return [
        (step, request_id)
        for step in range(view.num_steps)
        for request_id in view.ids
        if view.lanes[request_id][step] == "." and step > min(view.emitted(request_id), default=step)
    ]


SMALLEST_BUDGET = sum(PROMPTS[4:]) + 4
"""The four late prompts, all in one step, beside one token for each of the four that decode."""

_NEAR = {
    sum(PROMPTS[4:]): "the four late prompts fill this budget to the last token; the four that decode need room too",
    max(PROMPTS): "the longest prompt fits, but the prompts that came with it take the rest",
    8: "the budget counts tokens, not requests",
}


def _enough(answer: Any) -> Fault | None:
    if isinstance(answer, bool) or not isinstance(answer, int) or answer < 1:
        return Fault(f"the answer is a number of tokens, at least 1; this is {answer!r}")
    trace = late_arrivals(PrefillFirst(), answer)
    misses = missed(trace)
    if not misses:
        return None
    step, request_id = misses[0]
    count = f"{len(misses)} tokens are" if len(misses) > 1 else "1 token is"
    hint = f" ({_NEAR[answer]})" if answer in _NEAR else ""
    words = f"with a budget of {answer}, {count} missed, the first by {request_id} in step {step}{hint}"
    return Fault(words, "", trace, step)


def _no_smaller(answer: Any) -> Fault | None:
    if not isinstance(answer, int) or answer <= SMALLEST_BUDGET:
        return None
    if answer == sum(PROMPTS):
        return Fault("that holds all eight prompts, but they do not come together; look for the smallest")
    return Fault(f"nobody misses a token with {answer - 1} either; look for the smallest")


SMALLEST = Exercise(
    "06.2",
    "the smallest budget without a missed token",
    SMALLEST_BUDGET,
    [Rule("nobody misses a token", _enough), Rule("no smaller budget does that", _no_smaller)],
    GIVE_VALUE,
)

# 06.3

REASONS = tuple(reason.value for reason in BlockReason)
"""The words to choose from."""


def _scene(
    lengths: Sequence[int], policy: Policy, step: int, outputs: int = 6, **limits: int | bool
) -> tuple[Trace, int]:
    """A run of a few made-up requests up to the step that is asked about."""
    settings: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "num_blocks": 64, "block_size": 4}
    engine = Engine(ScriptedExecutor(), SchedulerConfig(**settings | limits), policy)
    for number, length in enumerate(lengths):
        engine.add_request([1000 * number + i for i in range(length)], SamplingParams(max_tokens=outputs))
    engine.run(step + 1)
    return engine.trace, step


def scenes() -> dict[str, tuple[Trace, int]]:
    """Four runs, and for each the last step, in which somebody waits."""
    return {
        "A": _scene([10, 22, 20], VllmV1(), 0),
        "B": _scene([10, 12, 6], VllmV1(), 1, max_num_seqs=2),
        "C": _scene([14, 13, 9], VllmV1(), 1, num_blocks=9),
        "D": _scene([10, 12, 6], StaticBatching(2), 1),
    }


def clue(name: str) -> str:
    """What a step of a scene shows, with its limits; the reason is left to find."""
    trace, step = scenes()[name]
    limit = trace.steps[step].budget
    budget = "no token budget" if limit is None else f"budget {limit}"
    return (
        f"{name}: {trace.policy}, {trace.config['max_num_seqs']} seats, {budget}. "
        f"Next in the queue: a prompt of {_head(trace)} tokens.\n   {View(trace).captions[step]}"
    )


def _head(trace: Trace) -> int:
    return list(trace.requests.values())[-1].num_prompt_tokens


ANSWERS = {"A": "budget", "B": "sequences", "C": "blocks", "D": "policy"}

_CLUES = {
    "A": "count the tokens of the step against the budget, and mind what is left for the next in line",
    "B": "tokens and blocks are left; count the running requests against the seats",
    "C": "seats and tokens are left; count the free blocks, 4 tokens to a block, against the next prompt",
    "D": "seats, tokens and blocks are left; only the rule of the policy stands in the way",
}


def _explain(name: str) -> Rule:
    def look(answer: Any) -> Fault | None:
        if not isinstance(answer, Mapping) or set(answer) != set(ANSWERS):
            return Fault(f"the answer is a dict with the keys {', '.join(ANSWERS)}")
        given = answer[name]
        if is_stub(given):
            raise NotYet
        if given == ANSWERS[name]:
            return None
        if given not in REASONS:
            return Fault(f"{name}: {given!r} is not a reason; choose from {', '.join(REASONS)}")
        return Fault(f"{name}: not {given}; {_CLUES[name]}")

    return Rule(f"{name} is explained", look)


EXPLAIN = Exercise("06.3", "explain a trace", ANSWERS, [_explain(name) for name in ANSWERS], GIVE_VALUE)

EXERCISES = (FILL, SMALLEST, EXPLAIN)
