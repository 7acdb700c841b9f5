"""Replaying recordings: do we decide, and generate, what another engine did?

Two kinds of file, both described in `tests/golden/README.md`. One holds the decisions of an engine,
step by step: they are replayed with our policy of that name and made-up tokens, and everything that
is recorded is compared (tokens granted, victims, finished requests, free blocks, block ids). The
other holds the tokens that a model generated: they are generated again, many requests at once.

A recording is data: nothing in it is run. What is left out: after the first difference in a run the
two schedules have parted, so the rest of that run counts as not equal without being looked at.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from contbatch.config import SchedulerConfig
from contbatch.errors import ContbatchError, TraceError
from contbatch.policies import POLICIES, policy_by_name
from contbatch.policy import Policy
from contbatch.request import Request, SamplingParams
from contbatch.scheduler import Scheduler

MADE_UP_TOKEN = 7
"""What the fake model of a recording emits; no prompt in a recording holds it."""
LIMITS = {field.name for field in fields(SchedulerConfig)}
POLICY_OPTIONS = {"policy": "order"}
"""Keys of a recorded configuration that belong to the policy, where our name for them differs."""
TOKENS_BATCH = 16
"""Requests that run at once when recorded tokens are generated again."""


@dataclass(frozen=True)
class Report:
    """What a replay found.

    Args:
        path: the recording.
        subject: the policy or the model that was replayed.
        unit: what `units` counts: "steps" of decisions or "tokens" of a model.
        cases, equal_cases: runs (or requests) in the recording, and how many are equal to the end.
        units, equal_units: steps (or tokens) in the recording, and how many came out equal.
        first_difference: where and what, in one line; "" if there is none.
    """

    path: str
    subject: str
    unit: str
    cases: int
    equal_cases: int
    units: int
    equal_units: int
    first_difference: str

    @property
    def equal(self) -> bool:
        """True if nothing differs."""
        return not self.first_difference

    def __str__(self) -> str:
        things = "runs" if self.unit == "steps" else "requests"
        return (
            f"{self.subject}: {self.equal_cases} of {self.cases} {things} equal, "
            f"{self.equal_units:,} of {self.units:,} {self.unit}"
        )


class _Outcome(NamedTuple):
    """One case: recorded units, equal ones, and the first difference."""

    units: int
    equal: int
    difference: str


def verify(path: str | Path, model: str | None = None, device: str = "cpu") -> Report:
    """Replay a recording.

    Args:
        path: a JSON file of recorded decisions, or of recorded tokens.
        model: for recorded tokens, the model to use; None takes the one that the file names.
        device: for recorded tokens, where to run the model.

    Raises:
        TraceError: the file cannot be read, is cut, or is of another kind.
        UnknownName: there is no policy or model of the recorded name.
    """
    recording = _load(Path(path))
    if "cases" in recording:
        return _verify_decisions(str(path), recording)
    return _verify_tokens(str(path), recording, model, device)


def _load(path: Path) -> dict[str, Any]:
    try:
        recording = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise TraceError(f"{path}: nested too deeply for a recording") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not UTF-8 text; a recording is a JSON file") from error
    except json.JSONDecodeError as error:
        raise TraceError(
            f"{path}: not JSON (line {error.lineno}: {error.msg}); the file is cut or of another kind"
        ) from error
    if not isinstance(recording, dict) or not {"cases", "requests"} & set(recording):
        raise TraceError(f'{path}: not a recording; it has neither "cases" nor "requests"')
    return recording


def _report(path: str, subject: str, unit: str, outcomes: Sequence[_Outcome]) -> Report:
    differences = [outcome.difference for outcome in outcomes if outcome.difference]
    return Report(
        path,
        subject,
        unit,
        cases=len(outcomes),
        equal_cases=len(outcomes) - len(differences),
        units=sum(outcome.units for outcome in outcomes),
        equal_units=sum(outcome.equal for outcome in outcomes),
        first_difference=differences[0] if differences else "",
    )


# Decisions


@dataclass(frozen=True)
class _Decision:
    """What is recorded of one step, and what we decided in it."""

    scheduled: Mapping[str, int]
    preempted: frozenset[str]
    finished: frozenset[str]
    free_blocks: int
    blocks: Mapping[str, Sequence[int]] | None


_NOTHING = _Decision({}, frozenset(), frozenset(), -1, None)


@dataclass(frozen=True)
class _Case:
    """One recorded run."""

    name: str
    config: SchedulerConfig
    options: dict[str, Any]
    requests: list[tuple[int, Request]]
    """Arrival step and request, in the order of the file."""
    steps: dict[int, _Decision]


def _verify_decisions(path: str, recording: dict[str, Any]) -> Report:
    try:
        policy = str(recording["policy"])
        policy_by_name(policy)
        cases = [_read_case(raw) for raw in recording["cases"]]
    except ContbatchError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise TraceError(f"{path}: not recorded decisions: {_missing(error)}") from error
    return _report(path, policy, "steps", [_replay(case, policy) for case in cases])


def _missing(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _read_case(raw: dict[str, Any]) -> _Case:
    limits = {key: value for key, value in raw["config"].items() if key in LIMITS}
    limits["num_blocks"] -= 1  # vLLM counts the null block, in every recording
    limits.setdefault("enable_prefix_caching", False)
    options = {key: value for key, value in raw["config"].items() if key not in LIMITS}
    return _Case(
        str(raw["case"]),
        SchedulerConfig(**limits),
        {POLICY_OPTIONS.get(key, key): value for key, value in options.items()},
        [_read_request(r, position) for position, r in enumerate(raw["requests"])],
        {_step_number(step["step"]): _read_decision(step) for step in raw["steps"]},
    )


def _read_request(raw: dict[str, Any], position: int) -> tuple[int, Request]:
    sampling = SamplingParams(max_tokens=raw["max_tokens"], ignore_eos=True)
    request = Request(str(raw["id"]), tuple(raw["prompt"]), sampling, raw.get("priority", 0), float(position))
    return _step_number(raw["arrival_step"]), request


def _step_number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"step {value!r} is not an integer of at least 0")
    return value


def _read_decision(raw: dict[str, Any]) -> _Decision:
    return _Decision(
        dict(raw["scheduled"]),
        frozenset(raw["preempted"]),
        frozenset(raw["finished"]),
        int(raw["free_blocks"]),
        {key: list(table) for key, table in raw["blocks"].items()} if "blocks" in raw else None,
    )


def _replay(case: _Case, policy: str) -> _Outcome:
    """Run one case until the first difference."""
    equal = 0
    try:
        for number, decided in _decide(case, _policy(policy, case.options)):
            difference = _difference(case.steps.get(number, _NOTHING), decided)
            if difference:
                where = f"case {case.name}, step {number}: {difference}"
                return _Outcome(len(case.steps), equal, where)
            equal += 1
    except ContbatchError as error:
        return _Outcome(len(case.steps), equal, f"case {case.name}: {error}")
    return _Outcome(len(case.steps), equal, "")


def _policy(name: str, options: dict[str, Any]) -> Policy:
    make: Any = POLICIES[name]
    try:
        policy: Policy = make(**options)
    except TypeError as error:
        raise TraceError(f"policy {name} cannot be set up as recorded: {error}") from error
    return policy


def _decide(case: _Case, policy: Policy) -> Iterator[tuple[int, _Decision]]:
    """Our decisions, step by step, in the steps that are recorded or in which there is work."""
    scheduler = Scheduler(case.config, policy)
    arrivals = sorted(case.requests, key=lambda arrival: arrival[0])  # ties keep list order
    moments = sorted({*case.steps, *(step for step, _ in arrivals)})
    number, last = 0, max(case.steps, default=-1)
    while number <= last:
        while arrivals and arrivals[0][0] <= number:
            scheduler.add(arrivals.pop(0)[1])
        decided = _decide_step(scheduler) if scheduler.has_unfinished else _NOTHING
        if decided is not _NOTHING or number in case.steps:
            yield number, decided
        number += 1
        if not scheduler.has_unfinished:  # nothing happens before the next arrival or the next recorded step
            number = next((moment for moment in moments if moment >= number), last + 1)


def _decide_step(scheduler: Scheduler) -> _Decision:
    plan = scheduler.plan()
    if not plan.has_work and not plan.evicted_requests:
        scheduler.commit(plan, {})
        return _NOTHING
    grants = plan.grants
    assert grants is not None
    scheduled = {r.request_id: n for r, n in zip(grants.requests, grants.counts, strict=True)}
    blocks = {r.request_id: list(r.block_table) for r in grants.requests}
    free = scheduler.pool.num_free
    outputs = scheduler.commit(plan, dict.fromkeys(scheduled, MADE_UP_TOKEN))
    finished = frozenset(o.request.request_id for o in outputs if o.finish_reason is not None)
    return _Decision(scheduled, frozenset(plan.evicted_requests), finished, free, blocks)


def _difference(recorded: _Decision, decided: _Decision) -> str:
    """What differs first, in words; "" if the two are equal in all that was recorded."""
    for name in ("scheduled", "preempted", "finished", "free_blocks"):
        theirs, ours = getattr(recorded, name), getattr(decided, name)
        if theirs != ours:
            return f"{name} recorded {_show(theirs)}, decided {_show(ours)}"
    for request_id, theirs in (recorded.blocks or {}).items():
        ours = (decided.blocks or {}).get(request_id)
        if ours != theirs:
            return f"blocks of {request_id} recorded {theirs}, decided {ours}"
    return ""


def _show(value: object) -> object:
    return sorted(value) if isinstance(value, frozenset) else value


# Tokens


class _Recorded(NamedTuple):
    request_id: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]


def _verify_tokens(path: str, recording: dict[str, Any], model: str | None, device: str) -> Report:
    try:
        named = str(recording["model"])
        requests = [
            _Recorded(str(raw["id"]), tuple(raw["prompt"]), tuple(raw["output"])) for raw in recording["requests"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{path}: not recorded tokens: {_missing(error)}") from error
    name = model or _known_model(named)
    generated = _generate(name, device, requests)
    outcomes = [_compare(r, tokens) for r, tokens in zip(requests, generated, strict=True)]
    return _report(path, name, "tokens", outcomes)


def _known_model(named: str) -> str:
    """The model that a recording speaks of: the one whose name its description begins with."""
    from contbatch.models import list_models

    described = named.casefold()
    known = [info.name for info in list_models()]
    return next((name for name in known if described.startswith(name.casefold())), named)


def _generate(model: str, device: str, requests: list[_Recorded]) -> list[tuple[int, ...]]:
    from contbatch.engine import Engine

    longest = max((len(r.prompt) + len(r.output) for r in requests), default=1)
    block_size = 16
    engine = Engine.load(
        model,
        device=device,
        dtype="float32",
        max_num_seqs=TOKENS_BATCH,
        max_num_batched_tokens=512,
        max_model_len=longest + 1,
        block_size=block_size,
        num_blocks=TOKENS_BATCH * (longest // block_size + 1),
    )
    sampling = [SamplingParams(max_tokens=len(r.output), ignore_eos=True) for r in requests]
    done = engine.generate([r.prompt for r in requests], sampling)
    return [completion.token_ids for completion in done]


def _compare(recorded: _Recorded, generated: tuple[int, ...]) -> _Outcome:
    pairs = zip(recorded.output, generated, strict=False)
    equal = next(
        (index for index, (theirs, ours) in enumerate(pairs) if theirs != ours),
        min(len(recorded.output), len(generated)),
    )
    if recorded.output == generated:
        return _Outcome(len(recorded.output), equal, "")
    theirs = recorded.output[equal] if equal < len(recorded.output) else "nothing"
    ours = generated[equal] if equal < len(generated) else "nothing"
    where = f"request {recorded.request_id}, token {equal}: recorded {theirs}, generated {ours}"
    return _Outcome(len(recorded.output), equal, where)
