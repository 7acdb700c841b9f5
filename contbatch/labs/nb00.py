"""Checks of notebook 00: reading a recorded run."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from contbatch.config import SchedulerConfig
from contbatch.engine import Engine
from contbatch.executor import ScriptedExecutor
from contbatch.labs.exercise import Exercise, Mistake, Rule
from contbatch.labs.guard import Trouble, ask, same
from contbatch.labs.result import Fault
from contbatch.request import SamplingParams
from contbatch.trace import StepRecord, Trace


def small_run(prompts: tuple[int, ...] = (5, 3, 9, 2), outputs: int = 4, seats: int = 2, budget: int = 6) -> Trace:
    """A run with made-up tokens in which prompts are cut, requests wait, and steps are mixed."""
    limits = SchedulerConfig(max_num_seqs=seats, max_num_batched_tokens=budget, num_blocks=32, block_size=4)
    engine = Engine(ScriptedExecutor(), limits)
    for number, length in enumerate(prompts):
        engine.add_request([100 * number + i for i in range(length)], SamplingParams(max_tokens=outputs))
    engine.run()
    return engine.trace


def _ask(answer: object, example: str, *arguments: object) -> object:
    """What an answer answers; a run is too long to be an example, so `example` says which it was."""
    if not callable(answer):
        raise Trouble(f"this is not a function but {answer!r}; pass its name without brackets")
    try:
        return ask(answer, *arguments)
    except Trouble as trouble:
        raise Trouble(trouble.words, example) from None


# The self-check

_NEEDED = {
    "torch": "PyTorch, which computes",
    "numpy": "NumPy, which holds the arrays",
    "matplotlib": "Matplotlib, which draws the figures",
    "ipywidgets": "ipywidgets, the knobs",
    "anywidget": "anywidget, the player",
    "tokenizers": "tokenizers, text to numbers and back",
    "safetensors": "safetensors, the model's file",
}


def self_check() -> str:
    """What the notebooks need, a line each: "ok", or what to do; the last line says how many are to mend."""
    lines = [_line("Python 3.11 or newer", sys.version_info >= (3, 11), "install a newer Python")]
    for package, words in _NEEDED.items():
        lines.append(_line(words, find_spec(package) is not None, f"pip install {package}"))
    lines.append(_line("the pocket model", _computes(), "install contbatch again, the model is part of it"))
    wrong = sum(not line.endswith(": ok") for line in lines)
    verdict = f"To mend: {wrong}. `contbatch doctor` says more." if wrong else "Everything that you need is here."
    return "\n".join([*lines, verdict])


def _line(words: str, good: bool, remedy: str) -> str:
    return f"{words}: {'ok' if good else f'NOT OK - {remedy}'}"


def _computes() -> bool:
    """Whether the embedded model can be loaded and generates a token."""
    try:
        [answer] = Engine.load("pocket").generate(["Once"], SamplingParams(max_tokens=1))
    except Exception:  # a damaged installation can raise anything; the remedy is the same
        return False
    return len(answer.token_ids) == 1


# 00.1


def tokens_in(step: StepRecord) -> int:
    """Tokens that were computed in a step."""
    return sum(step.counts)


def _explain_tokens(step: StepRecord, got: object) -> str:
    if got == len(step.counts):
        return "that is how many requests took part; each may have computed several tokens"
    if got == len(step.sampled):
        return "that is how many tokens came out; the question is how many went in"
    if got == step.budget:
        return "that is the limit of the step, not what it used"
    return "add up what each request computed: step.counts"


def _tokens_of(prompts: tuple[int, ...], budget: int) -> Rule:
    def look(answer: object) -> Fault | None:
        trace = small_run(prompts, budget=budget)
        for step in trace.steps:
            got = _ask(answer, f"a step with counts {step.counts}", step)
            if not same(got, tokens_in(step)):
                example = f"for counts {step.counts} it returned {got!r}, not {tokens_in(step)}"
                return Fault(_explain_tokens(step, got), example, trace, step.step)
        return None

    words = "right in every step of a run with one request" if len(prompts) == 1 else "right when requests share a step"
    return Rule(words, look)


TOKENS = Exercise("00.1", "tokens in a step", tokens_in, [_tokens_of((9,), 6), _tokens_of((5, 3, 9, 2), 6)])

# 00.2


def steps_waited(trace: Trace, request_id: str) -> int:
    """Steps that went by after a request arrived and before it got its first tokens."""
    first = next(step.step for step in trace.steps if request_id in step.request_ids)
    return first - trace.requests[request_id].arrival_step


def _first_step(trace: Trace, request_id: str) -> int:
    return next(step.step for step in trace.steps if request_id in step.request_ids)


def _to_first_output(trace: Trace, request_id: str) -> int:
    first = next(step.step for step in trace.steps if request_id in step.sampled)
    return first - trace.requests[request_id].arrival_step


def _counts_its_own(trace: Trace, request_id: str) -> int:
    return steps_waited(trace, request_id) + 1


def _all_without(trace: Trace, request_id: str) -> int:
    return sum(request_id not in step.request_ids for step in trace.steps)


WAITED_MISTAKES = (
    Mistake("the wait begins when the request arrives (arrival_step), not at step 0", _first_step),
    Mistake(
        "that waits for the first token that comes out; the wait ends with the first tokens computed", _to_first_output
    ),
    Mistake("one too many: the step in which it is served is no step of waiting", _counts_its_own),
    Mistake("steps after its end are counted too; stop at the first step that serves it", _all_without),
)


def late_run() -> Trace:
    """A run in which the last request comes after three steps."""
    limits = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=6, num_blocks=32, block_size=4)
    engine = Engine(ScriptedExecutor(), limits)
    for number, length in enumerate((5, 3, 7)):
        if number == 2:
            engine.run(3)
        engine.add_request([100 * number + i for i in range(length)], SamplingParams(max_tokens=6))
    engine.run()
    return engine.trace


def _waited_in(words: str, trace: Trace, ids: tuple[str, ...]) -> Rule:
    def look(answer: object) -> Fault | None:
        for request_id in ids:
            got = _ask(answer, f"request {request_id} of a run with {len(trace.requests)}", trace, request_id)
            right = steps_waited(trace, request_id)
            if not same(got, right):
                example = f"for {request_id} it returned {got!r}, not {right}"
                return Fault(_which_mistake(answer, words), example, trace, _first_step(trace, request_id))
        return None

    return Rule(words, look)


def _which_mistake(answer: object, words: str) -> str:
    runs = (small_run(), late_run())
    for mistake in WAITED_MISTAKES:
        if all(ask(answer, run, i) == mistake.function(run, i) for run in runs for i in run.requests):
            return mistake.words
    return words


WAITED = Exercise(
    "00.2",
    "how long a request waited",
    steps_waited,
    [
        _waited_in("a request that is served at once waited 0 steps", small_run(), ("r0",)),
        _waited_in("a request waits until a step computes tokens of it", small_run(), ("r1", "r2", "r3")),
        _waited_in("a request that comes later waits from its arrival on", late_run(), ("r0", "r1", "r2")),
    ],
)

EXERCISES = (TOKENS, WAITED)
