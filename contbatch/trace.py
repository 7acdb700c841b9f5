"""The record of a run: everything that was decided, as data.

A trace is what tests compare, metrics are computed from, and pictures are drawn from; nothing else looks inside
the engine. It holds one `StepRecord` per iteration, in columns (parallel lists), because an object per request
and step would cost more than the scheduling itself. On disk it is JSON lines: a header, then requests, steps and
finishes in the order they happened. Loading a trace runs no code from it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from contbatch.errors import TraceError

VERSION = 1


class Blocked(NamedTuple):
    """Why a request that the policy looked at got nothing: the reason, what it needed, what was left."""

    reason: str
    needs: int
    left: int


@dataclass(slots=True)
class RequestRecord:
    """A request as it arrived. `arrival_step` k: it was known before step k was planned."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    priority: int
    arrival_step: int
    arrival_time: float
    prompt: str | None = None
    client: str = ""


@dataclass(slots=True)
class FinishRecord:
    """How a request ended; `step` is the number of steps that had been recorded by then."""

    reason: str
    step: int
    time: float
    num_output_tokens: int
    text: str | None = None


@dataclass(slots=True)
class StepRecord:
    """One iteration. Times are seconds on the engine's clock, real or virtual.

    `request_ids`, `starts`, `counts` and `kinds` are parallel: who was granted tokens, from which position, how
    many, and what they were: P prefill, R prefill that is computed again after a preemption, D decode.
    """

    step: int
    start: float = 0.0
    end: float = 0.0
    request_ids: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    kinds: str = ""
    sampled: dict[str, int] = field(default_factory=dict)
    admitted: list[str] = field(default_factory=list)
    resumed: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    swapped_out: list[str] = field(default_factory=list)
    swapped_in: list[str] = field(default_factory=list)
    cached: dict[str, int] = field(default_factory=dict)
    """Tokens that a request admitted or resumed in this step took from the prefix cache (only above 0)."""
    new_blocks: dict[str, list[int]] = field(default_factory=dict)
    """Block ids appended to each request's table. All its blocks go back when it is preempted or finishes."""
    reasons: dict[str, Blocked] = field(default_factory=dict)
    num_waiting: int = 0
    num_running: int = 0
    budget: int | None = None
    free_blocks: int = 0
    """Free after planning, before finished requests are freed; cached blocks that nobody holds are free too."""
    cached_blocks: int = 0
    """How many of the free blocks the prefix index still knows."""
    finished: dict[str, str] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(self.counts)

    @property
    def decode_tokens(self) -> int:
        """Tokens of decoding requests."""
        return sum(n for n, kind in zip(self.counts, self.kinds, strict=True) if kind == "D")

    @property
    def prefill_tokens(self) -> int:
        """Prefill tokens, computed for the first time or again."""
        return self.num_tokens - self.decode_tokens

    def drop(self, gone: Collection[str]) -> None:
        """Leave out requests that had ended before this step was committed."""
        if not gone:
            return
        rows = [row for row, name in enumerate(self.request_ids) if name not in gone]
        self.starts = [self.starts[row] for row in rows]
        self.counts = [self.counts[row] for row in rows]
        self.kinds = "".join(self.kinds[row] for row in rows)
        for name in _LISTS:
            setattr(self, name, [key for key in getattr(self, name) if key not in gone])
        for name in _MAPS:
            setattr(self, name, {key: value for key, value in getattr(self, name).items() if key not in gone})

    def rename(self, old: str, new: str) -> None:
        """Call a request by another id in this step."""
        for name in _LISTS:
            setattr(self, name, [new if key == old else key for key in getattr(self, name)])
        for name in _MAPS:
            setattr(self, name, {new if k == old else k: v for k, v in getattr(self, name).items()})

    @property
    def duration(self) -> float:
        """Seconds from the start of planning to the end of the commit."""
        return self.end - self.start


@dataclass
class Trace:
    """A recorded run.

    Args:
        policy: name of the scheduling policy.
        model: name of the model, or "" where tokens were made up.
        config: the scheduler's configuration as plain data.
    """

    policy: str = ""
    model: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    requests: dict[str, RequestRecord] = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)
    finished: dict[str, FinishRecord] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        """Steps recorded so far."""
        return len(self.steps)

    def add_step(self, record: StepRecord) -> None:
        """Append a step."""
        self.steps.append(record)

    def settle(self) -> None:
        """The last step is complete: nothing in it will change any more."""

    def close(self) -> None:
        """The run is over."""

    def __repr__(self) -> str:
        return f"Trace({self.policy}, {len(self.requests)} requests, {len(self.steps)} steps, digest={self.digest()})"

    def digest(self) -> str:
        """Twelve hex digits over everything that was decided; times and texts are left out."""
        digest = hashlib.sha256()
        for line in self._lines():
            digest.update(_decided(line).encode())
        return digest.hexdigest()[:12]

    def rename(self, old: str, new: str) -> None:
        """Call a request by another id everywhere (an id that is used again frees its old name)."""
        lived = self.requests[old].arrival_step, self.finished[old].step if old in self.finished else len(self.steps)
        self.requests = {new if key == old else key: value for key, value in self.requests.items()}
        self.requests[new].request_id = new
        self.finished = {new if key == old else key: value for key, value in self.finished.items()}
        for step in self.steps[slice(*lived)]:
            step.rename(old, new)

    def dumps(self) -> str:
        """The trace as JSON lines."""
        return "".join(json.dumps(line) + "\n" for line in self._lines())

    def save(self, path: str | Path) -> None:
        """Write the trace to a file of JSON lines."""
        Path(path).write_text(self.dumps(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a trace file.

        Raises:
            TraceError: the file is not a trace, is cut, or is of another version.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TraceError(f"{path}: cannot be read as a trace: {error}") from error
        return cls.loads(text, name=str(path))

    @classmethod
    def loads(cls, text: str, name: str = "trace") -> Trace:
        """Read a trace from JSON lines; see `load`."""
        lines = text.splitlines()
        if not lines or not text.endswith("\n"):
            raise TraceError(f"{name}: the file is empty or its last line is cut; record the run again")
        trace = _header(_parse(name, 1, lines[0]), name)
        for number, line in enumerate(lines[1:], start=2):
            trace._read(_parse(name, number, line), f"{name}, line {number}")
        trace._check_complete(name)
        return trace

    def _lines(self) -> Iterator[dict[str, Any]]:
        """Header, requests before the step they were known in, steps, finishes after their step; last the end."""
        yield self._header_line()
        requests = iter(self.requests.values())
        finishes = iter(self.finished.items())
        request, finish = next(requests, None), next(finishes, None)
        for count in range(len(self.steps) + 1):
            while request is not None and request.arrival_step <= count:
                yield {"type": "request", **_plain(request)}
                request = next(requests, None)
            while finish is not None and finish[1].step <= count:
                yield {"type": "finish", "request_id": finish[0], **_plain(finish[1])}
                finish = next(finishes, None)
            if count < len(self.steps):
                yield {"type": "step", **_plain(self.steps[count])}
        if request is not None:  # known before a step that is not recorded yet
            yield from ({"type": "request", **_plain(late)} for late in (request, *requests))
        yield {"type": "end", "num_steps": len(self.steps)}

    def _header_line(self) -> dict[str, Any]:
        return {"contbatch_trace": VERSION, "policy": self.policy, "model": self.model, "config": self.config}

    def _read(self, line: dict[str, Any], where: str) -> None:
        kind = line.pop("type", None)
        try:
            if self._ended:
                raise TraceError("a line after the end line")
            if kind == "request":
                request = _record(RequestRecord, line)
                if request.request_id in self.requests:
                    raise TraceError(f"request {request.request_id!r} arrives twice")
                self.requests[request.request_id] = request
            elif kind == "finish":
                request_id = line.pop("request_id")
                self.finished[request_id] = _record(FinishRecord, line)
            elif kind == "step":
                self.steps.append(_step(line, len(self.steps)))
            elif kind == "end":
                if line["num_steps"] != len(self.steps):
                    raise TraceError(f"{line['num_steps']} steps were written, {len(self.steps)} are here")
            else:
                raise TraceError(f"unknown kind of line {kind!r}")
        except (TypeError, KeyError, ValueError) as error:
            raise TraceError(f"{where}: not a line of a trace: {error}") from error
        self._ended = kind == "end"

    _ended: bool = field(default=False, init=False, repr=False, compare=False)

    def _check_complete(self, name: str) -> None:
        if not self._ended:
            raise TraceError(f"{name}: the trace stops before its end line; it was cut, record it again")
        mentioned = {i for step in self.steps for key in _IDS for i in getattr(step, key)} | set(self.finished)
        unknown = mentioned - set(self.requests)
        if unknown:
            raise TraceError(f"{name}: steps mention {sorted(map(str, unknown))[:3]}, which never arrived")


class TraceFile(Trace):
    """A trace that is written as the run goes on and forgets what it has written, so that a run may be of any length.

    `Trace.load` reads the file when it is closed. Request ids must not be used again: what is forgotten cannot be
    renamed.

    Args:
        path: the file, which is overwritten.
        policy, model, config: as in `Trace`.
    """

    def __init__(
        self, path: str | Path, policy: str = "", model: str = "", config: dict[str, Any] | None = None
    ) -> None:
        super().__init__(policy, model, config or {})
        self._num_steps = 0
        try:
            self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  # open until `close`
        except OSError as error:
            raise TraceError(f"{path}: cannot be written: {error.strerror}; choose another place") from error
        self._digest = hashlib.sha256()
        self._write(self._header_line())

    @property
    def num_steps(self) -> int:
        """Steps recorded so far, written ones too."""
        return self._num_steps

    def add_step(self, record: StepRecord) -> None:
        """Append a step."""
        super().add_step(record)
        self._num_steps += 1

    def settle(self) -> None:
        """Write the last step, and the requests and finishes before it."""
        number = self._num_steps - 1
        self._write_before(number)
        self._write({"type": "step", **_plain(self.steps.pop())})

    def _write_before(self, number: int) -> None:
        """Write what was known, and what had finished, before step `number`."""
        for name in [name for name, request in self.requests.items() if request.arrival_step <= number]:
            self._write({"type": "request", **_plain(self.requests.pop(name))})
        for name in [name for name, finish in self.finished.items() if finish.step <= number]:
            self._write({"type": "finish", "request_id": name, **_plain(self.finished.pop(name))})

    def _write(self, line: dict[str, Any]) -> None:
        """One line; what counts in the digest is encoded once for both."""
        decided = _decided(line)
        self._digest.update(decided.encode())
        others = {key: line[key] for key in _NOT_IN_DIGEST if key in line}
        self._file.write((f"{json.dumps(others)[:-1]}, {decided[1:]}" if others else decided) + "\n")

    def close(self) -> None:
        """Write the rest and the end line."""
        if self._file.closed:
            return
        self._write_before(self._num_steps)
        self._write({"type": "end", "num_steps": self._num_steps})
        self._file.close()

    def digest(self) -> str:
        """As in `Trace`, of what is written so far."""
        return self._digest.hexdigest()[:12]


_NOT_IN_DIGEST = ("start", "end", "time", "arrival_time", "text", "prompt", "model")


def _decided(line: dict[str, Any]) -> str:
    """A line without times and texts."""
    return json.dumps({k: v for k, v in line.items() if k not in _NOT_IN_DIGEST}, sort_keys=True)


def _plain(record: RequestRecord | FinishRecord | StepRecord) -> dict[str, Any]:
    """The fields of a record, not copied."""
    return {name: getattr(record, name) for name in type(record).__dataclass_fields__}


def _parse(name: str, number: int, line: str) -> dict[str, Any]:
    try:
        parsed = json.loads(line, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{name}, line {number}: not JSON ({error}); the file is damaged") from error
    if not isinstance(parsed, dict):
        raise TraceError(f"{name}, line {number}: expected an object, found {type(parsed).__name__}")
    return parsed


def _finite(number: str) -> float:
    value = float(number)
    return value if abs(value) < float("inf") else _refuse(number)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def _header(line: dict[str, Any], name: str) -> Trace:
    version = line.get("contbatch_trace")
    if version != VERSION:
        found = "no version" if version is None else f"version {version!r}"
        raise TraceError(f"{name}: {found} in the first line; this package reads trace version {VERSION}")
    config = line.get("config", {})
    if not isinstance(config, dict):
        raise TraceError(f"{name}: config is {type(config).__name__}; expected an object")
    return Trace(str(line.get("policy", "")), str(line.get("model", "")), config)


_LISTS = {f.name for f in fields(StepRecord) if str(f.type) == "list[str]"}
_MAPS = {f.name for f in fields(StepRecord) if str(f.type).startswith("dict")}
_IDS = _LISTS | _MAPS
"""Fields of a step that name requests."""

Record = TypeVar("Record")


_HINTS: dict[type, dict[str, Any]] = {kind: get_type_hints(kind) for kind in (RequestRecord, FinishRecord, StepRecord)}


def _record(kind: type[Record], line: dict[str, Any]) -> Record:
    """A record from a line, if every field has the type that it declares."""
    hints = _HINTS[kind]
    for key, value in line.items():
        if key in hints and not _fits(value, hints[key]):
            raise TraceError(f"{key} is {str(value)[:40]!r}, which is not of type {hints[key]}")
    return kind(**line)


def _fits(value: object, hint: Any) -> bool:
    args = get_args(hint)
    if hint is Blocked:
        return isinstance(value, list) and [type(item) for item in value] == [str, int, int]
    if get_origin(hint) is list:
        return isinstance(value, list) and all(_fits(item, args[0]) for item in value)
    if get_origin(hint) is dict:
        return isinstance(value, dict) and all(_fits(item, args[1]) for item in value.values())
    if args:
        return any(_fits(value, option) for option in args)
    return type(value) is hint or (hint is float and type(value) is int)


def _step(line: dict[str, Any], expected: int) -> StepRecord:
    step = _record(StepRecord, line)
    if not set(step.kinds) <= set("PRD"):
        raise TraceError(f"kinds is {step.kinds!r}; expected letters P, R and D")
    if step.step != expected:
        raise TraceError(f"step {step.step} where step {expected} was expected")
    columns = {len(step.request_ids), len(step.starts), len(step.counts), len(step.kinds)}
    if len(columns) != 1:
        raise TraceError("request_ids, starts, counts and kinds differ in length")
    step.reasons = {key: Blocked(*value) for key, value in step.reasons.items()}
    return step
