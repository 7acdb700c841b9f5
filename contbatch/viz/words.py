"""The same run in words: what was decided and why, one caption a step, one for the whole run.

A caption is at once what is read under a picture, its alternative text, its plain text in a notebook, and so what a
strict notebook test compares. Therefore it carries the numbers, and no time and nothing else that differs between
two machines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from contbatch.trace import Blocked, FinishRecord, StepRecord

if TYPE_CHECKING:
    from contbatch.viz.view import BudgetUse, Life, View


class Decision(NamedTuple):
    """One thing that the scheduler decided, and why; `letter` says which kind ("" for the end of a request)."""

    letter: str
    text: str


class Grant(NamedTuple):
    """Tokens that a request was given in a step."""

    start: int
    tokens: int
    kind: str


def why(blocked: Blocked | None) -> str:
    """Why a request got nothing; "" for None."""
    if blocked is None:
        return ""
    return {
        "budget": f"needs {counted(blocked.needs, 'token')}, {blocked.left} left in the budget",
        "blocks": f"needs {counted(blocked.needs, 'block')}, {blocked.left} free",
        "sequences": f"needs a place among the running, {blocked.left} left",
    }.get(blocked.reason, "held back by the policy")


def running(step: StepRecord, lives: Mapping[str, Life]) -> list[Decision]:
    """What those that ran already were given."""
    rows = list(zip(step.request_ids, step.starts, step.counts, step.kinds, strict=True))
    decoding = [request_id for request_id, _, _, kind in rows if kind == "D"]
    decisions = []
    if decoding:
        each = "s 1 token" if len(decoding) == 1 else " 1 token each"
        decisions.append(Decision("D", f"{listed(decoding)} decode{each}."))
    new = {*step.admitted, *step.resumed}
    for request_id, start, tokens, kind in rows:
        if kind != "D" and request_id not in new:
            work = _work(lives[request_id], Grant(start, tokens, kind))
            decisions.append(Decision(kind, f"{request_id} goes on: {work}."))
    return decisions


def sent_away(request_id: str, life: Life, swapped: bool, blocked: Blocked | None = None) -> Decision:
    """A request that makes room for others; call it before its blocks are taken from it."""
    blocks = counted(len(life.table), "block")
    if swapped:
        return Decision("S", f"{request_id} is swapped out: its {blocks} move to host memory.")
    lost, kept = counted(life.computed, "token"), counted(life.outputs, "output token")
    full = ""
    if blocked is not None and blocked.reason == "host blocks":
        full = f"; host memory is too full for it ({counted(blocked.needs, 'block')} needed, {blocked.left} free)"
    return Decision(
        "X", f"{request_id} is preempted and gives back {blocks}: {lost} must be computed again, {kept} stay{full}."
    )


def joined(request_id: str, life: Life, grant: Grant | None, cached: int, swapped: bool) -> Decision:
    """A request that runs from this step on."""
    if swapped:
        return Decision("S", f"{request_id} is swapped in from host memory.")
    verb = "comes back" if life.preempted else "joins"
    if grant is None:
        return Decision(".", f"{request_id} {verb} and gets nothing yet.")
    taken = f"{counted(cached, 'token')} from the prefix cache, " if cached else ""
    return Decision(grant.kind, f"{request_id} {verb}: {taken}{_work(life, grant)}.")


def left_out(step: StepRecord, lives: Mapping[str, Life], not_looked_at: int) -> list[Decision]:
    """Who got nothing, and why."""
    decisions = []
    for request_id, blocked in step.reasons.items():
        if request_id not in step.preempted and request_id not in step.swapped_out:
            letter = lives[request_id].letter
            place = "stays in the queue" if letter in "WXS" else "runs but gets nothing"
            decisions.append(Decision(letter, f"{request_id} {place}: {why(blocked)}."))
    if not_looked_at:
        rest = "1 more waits" if not_looked_at == 1 else f"{not_looked_at} more wait"
        decisions.append(Decision("W", f"{rest}; the scheduler did not look that far."))
    return decisions


def ended(step: StepRecord, lives: Mapping[str, Life]) -> list[Decision]:
    """Who finished."""
    return [
        Decision("", f"{i} ends: {reason}, {counted(lives[i].outputs, 'output token')}.")
        for i, reason in step.finished.items()
    ]


def caption(t: int, step: StepRecord, use: BudgetUse, num_blocks: int) -> str:
    """A step in a sentence."""
    kinds = (("prefill", use.prefill), ("computed again", use.recomputed), ("decode", use.decode))
    split = ", ".join(f"{name} {tokens}" for name, tokens in kinds if tokens) or "nobody computed"
    total = counted(use.used, "token") if use.limit is None else f"{use.used} of {use.limit} tokens"
    parts = [f"Step {t}: {total} ({split})", f"{step.num_running} running, {step.num_waiting} waiting"]
    if num_blocks:
        parts.append(f"{num_blocks - step.free_blocks} of {num_blocks} blocks in use")
    moves = (
        ("preempted", step.preempted),
        ("swapped out", step.swapped_out),
        ("swapped in", step.swapped_in),
        ("finished", list(step.finished)),
    )
    return "; ".join([*parts, *(f"{verb}: {listed(ids)}" for verb, ids in moves if ids)]) + "."


def summary(view: View, lives: Iterable[Life]) -> str:
    """The whole run in a sentence; it names the trace, so other data gives another text."""
    trace, lives = view.trace, list(lives)
    prompts = counted(sum(life.record.num_prompt_tokens for life in lives), "prompt token")
    cached, again = sum(life.cached for life in lives), sum(life.recomputed for life in lives)
    outputs = counted(sum(life.outputs for life in lives), "output token")
    size = f"{counted(len(lives), 'request')} in {counted(view.num_steps, 'step')}"
    parts = [
        f"{size} under {trace.policy or 'no named policy'}",
        f"{prompts} ({cached} taken from the cache, {again} computed again) and {outputs}",
    ]
    limits = [use.limit for use in view.budgets if use.limit is not None]
    if limits:
        share = 100 * sum(use.used for use in view.budgets) / sum(limits)
        span = dict.fromkeys((str(min(limits)), str(max(limits))))
        parts.append(f"budget {' to '.join(span)} tokens a step, {share:.0f} % used")
    gone = [len(step.preempted) + len(step.swapped_out) for step in trace.steps]
    parts.append(counted(sum(gone), "preemption"))
    if view.num_blocks:
        peak = max((used for used, _ in view.pool_use), default=0)
        parts.append(f"at most {peak} of {view.num_blocks} blocks in use")
    return "; ".join(parts) + f" (trace {trace.digest()})."


def about(life: Life, finish: FinishRecord | None) -> str:
    """The life of one request in a sentence."""
    record = life.record
    parts = [
        f"{record.request_id}: {counted(record.num_prompt_tokens, 'prompt token')}, at most {record.max_tokens} new",
        f"priority {record.priority}",
        f"known from step {record.arrival_step}",
    ]
    if life.joined:
        parts.append(f"joined in step {life.joined[0]}")
    if life.cached:
        parts.append(f"{life.cached} tokens from the prefix cache")
    if life.preempted:
        parts.append("sent away in step " + listed([str(t) for t in life.preempted]))
    if life.emitted:
        parts.append(f"first token in step {life.emitted[0]}")
    if finish is not None:
        outputs = counted(life.outputs, "output token")
        parts.append(f"ended after {counted(finish.step, 'step')}: {finish.reason}, {outputs}")
    return "; ".join(parts) + "."


def counted(number: int, noun: str) -> str:
    """1 token, 2 tokens."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(names: Sequence[str], limit: int = 5) -> str:
    """a, b and c; the rest is counted."""
    shown = list(names[:limit])
    if len(names) > limit:
        shown.append(f"{len(names) - limit} more")
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def _work(life: Life, grant: Grant) -> str:
    known, end = life.record.num_prompt_tokens + life.outputs, grant.start + grant.tokens
    again = " again" if grant.kind == "R" else ""
    done = f"all {known} are done" if end >= known else f"{end} of {known} are done"
    return f"{counted(grant.tokens, 'token')} computed{again}, {done}"
