"""Workloads: which requests arrive when, as data that is the same on every machine.

A `Workload` is a frozen list of requests. Generators draw one from a seed, `poisson` and `bursty` spread one over
time, `save` and `Workload.load` keep one as JSON, and `drive` plays one into an engine. The one idea: arrivals are
counted in steps, a clock that every machine shares, or else in seconds of the engine's own clock. Only
`random.Random.random` is used, whose sequence Python promises to keep; logarithms are rounded so far that their
last bit, which may differ between machines, does not show. Loading a file runs no code from it.

Left out: answers that depend on earlier answers (a closed loop of users). A workload does not react to the engine.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from contbatch.config import SchedulerConfig
from contbatch.engine import Engine
from contbatch.errors import ContbatchError, InvalidConfig, TraceError
from contbatch.request import MAX_TOKEN_ID, Priority, SamplingParams
from contbatch.trace import Trace

VERSION = 1
VOCAB_SIZE = 1000
"""Token ids of generated prompts are below this."""
LARGEST = 1e9
"""Largest rate, and latest arrival in seconds (30 years)."""
LONGEST_PROMPT = 1_000_000
"""Most tokens that a file may ask for with `prompt_len`."""

Range = tuple[int, int]
"""Smallest and largest value, both possible."""


@dataclass(frozen=True)
class WorkloadRequest:
    """One request of a workload.

    Args:
        request_id: unique within the workload.
        prompt: text, or token ids.
        max_tokens: most tokens to generate; None for as many as fit.
        arrival_step: it is added before this step of the run.
        arrival_time: seconds after the start of the run, instead of a step.
        priority, client: as in `Engine.add_request`.

    Raises:
        InvalidConfig: names the field and its value.
    """

    request_id: str
    prompt: str | tuple[int, ...]
    max_tokens: int | None = 16
    arrival_step: int = 0
    arrival_time: float | None = None
    priority: int = Priority.NORMAL
    client: str = ""

    def __post_init__(self) -> None:
        _check("request_id", self.request_id, isinstance(self.request_id, str) and self.request_id, "a name")
        if isinstance(self.prompt, list):
            object.__setattr__(self, "prompt", tuple(self.prompt))
        tokens = isinstance(self.prompt, tuple) and all(_is_integer(token, 0) for token in self.prompt)
        prompt_ok = (tokens or isinstance(self.prompt, str)) and self.prompt
        _check("prompt", self.prompt, prompt_ok, "text or token ids of at least 0, not empty")
        _check("max_tokens", self.max_tokens, self.max_tokens is None or _is_integer(self.max_tokens, 1), _ONE_OR_NONE)
        _check("arrival_step", self.arrival_step, _is_integer(self.arrival_step, 0), "an integer of at least 0")
        if self.arrival_time is not None:
            _check("arrival_time", self.arrival_time, _is_number(self.arrival_time), "seconds from 0 to 1e9")
            _check("arrival_step", self.arrival_step, self.arrival_step == 0, "0 beside an arrival_time, or no time")
        _check("priority", self.priority, _is_integer(self.priority, None), "an integer, lower is more urgent")
        _check("client", self.client, isinstance(self.client, str), "text")


_ONE_OR_NONE = "an integer of at least 1, or None for as many as fit"


@dataclass(frozen=True)
class Workload:
    """Requests and when they arrive.

    Args:
        name: for titles and file names.
        seed: what it was drawn from.
        requests: all with arrival steps, or all with arrival times; equal arrivals keep this order.
        config: the limits it is meant to be run with, if it says.

    Raises:
        InvalidConfig: an id is there twice, or steps and times are mixed.
    """

    name: str
    seed: int
    requests: tuple[WorkloadRequest, ...]
    config: SchedulerConfig | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "requests", tuple(self.requests))
        _check("name", self.name, isinstance(self.name, str), "text")
        _check("seed", self.seed, _is_integer(self.seed, 0), "an integer of at least 0")
        seen: set[str] = set()
        for request in self.requests:
            _check("request_id", request.request_id, request.request_id not in seen, "each id once")
            seen.add(request.request_id)
        timed = {request.arrival_time is not None for request in self.requests}
        _check("requests", self.name, len(timed) < 2, "arrival steps for all of them, or arrival times for all")

    def __repr__(self) -> str:
        return f"Workload({self.name}, {len(self.requests)} requests, seed={self.seed})"

    def dumps(self) -> str:
        """The workload as JSON, a line per request."""
        head: dict[str, Any] = {"contbatch_workload": VERSION, "name": self.name, "seed": self.seed}
        if self.config is not None:
            head["config"] = asdict(self.config)
        lines = ",\n".join(json.dumps(_request_to_json(request)) for request in self.requests)
        return f'{json.dumps(head)[:-1]},\n"requests": [\n{lines}\n]}}\n'

    def save(self, path: str | Path) -> None:
        """Write the workload to a JSON file."""
        Path(path).write_text(self.dumps(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path, name: str | None = None) -> Workload:
        """Read a workload that `save` wrote, or one of a file of recorded workloads.

        Args:
            path: a JSON file. A file of several (`{"workloads": [...]}`, see `tests/golden/README.md`) counts the
                null block in its `num_blocks`; here that block comes on top, so one is subtracted.
            name: which one, where the file has several.

        Raises:
            TraceError: it cannot be read, or a field is unknown, missing, or has a value that it cannot have.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TraceError(f"{path}: cannot be read as a workload: {error}") from error
        return cls.loads(text, name, source=str(path))

    @classmethod
    def loads(cls, text: str, name: str | None = None, source: str = "workload") -> Workload:
        """Read a workload from JSON text; see `load`."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{source}: not JSON ({error}); the file is cut or of another kind") from error
        several = isinstance(data, dict) and "workloads" in data
        if several:
            data = _choose(data, name, source)
        try:
            return _workload_from_json(data, 1 if several else 0)
        except ContbatchError as error:
            raise TraceError(f"{source}: {error}") from error


# Playing a workload into an engine


def drive(
    engine: Engine,
    workload: Workload,
    sampling: SamplingParams | None = None,
    wait: Callable[[float], None] = time.sleep,
) -> Trace:
    """Serve a workload to its end; returns the engine's trace.

    Steps and seconds count from this call. A request is added before the step of its `arrival_step`; where nothing
    is there to do until then, no step is run. One with an `arrival_time` is added before the first step that begins
    no earlier, and its latencies count from its arrival time, also if a long step made it late.

    Args:
        engine: what it still has to do is served too.
        workload: what arrives.
        sampling: for every request, except `max_tokens`.
        wait: lets the engine's clock go on by some seconds; a virtual clock needs its own.

    Raises:
        InvalidRequest: the engine refused a request; those before it stay in the engine.
        InvalidConfig: `wait` did not move the engine's clock.
    """
    sampling = sampling or SamplingParams()
    arrivals = deque(sorted(workload.requests, key=lambda r: (r.arrival_time or 0.0, r.arrival_step)))
    origin, step = engine.now(), 0
    while arrivals or engine.has_unfinished:
        if not engine.has_unfinished:
            step = max(step, arrivals[0].arrival_step)
            _wait_until(engine, origin + (arrivals[0].arrival_time or 0.0), wait)
        while arrivals and arrivals[0].arrival_step <= step and _has_come(engine, origin, arrivals[0]):
            _add(engine, arrivals.popleft(), sampling, origin)
        engine.step()
        step += 1
    return engine.trace


CLOCK_TOLERANCE = 1e-6
"""Seconds that an arrival may come early, so that the rounding of a clock does not matter."""


def _has_come(engine: Engine, origin: float, request: WorkloadRequest) -> bool:
    return origin + (request.arrival_time or 0.0) <= engine.now() + CLOCK_TOLERANCE


def _wait_until(engine: Engine, moment: float, wait: Callable[[float], None]) -> None:
    while (now := engine.now()) + CLOCK_TOLERANCE < moment:
        wait(moment - now)
        if engine.now() <= now:
            raise InvalidConfig(
                f"wait({moment - now:.6f}) did not move the engine's clock, which stands at {now:.6f} s; "
                f"pass a wait that lets this clock go on"
            )


def _add(engine: Engine, request: WorkloadRequest, sampling: SamplingParams, origin: float) -> None:
    came = None if request.arrival_time is None else min(engine.now(), origin + request.arrival_time)
    engine.add_request(
        request.prompt,
        replace(sampling, max_tokens=request.max_tokens),
        request_id=request.request_id,
        priority=request.priority,
        client=request.client,
        arrival_time=came,
    )


# Drawing workloads from a seed


class _Draw:
    """Seeded draws that need nothing of `random` but its `random()`."""

    def __init__(self, seed: int | str, vocab_size: int = VOCAB_SIZE) -> None:
        self._random = random.Random(seed)
        self._vocab_size = vocab_size

    def uniform(self, low: int, high: int) -> int:
        return low + int(self._random.random() * (high - low + 1))

    def log_uniform(self, low: int, high: int) -> int:
        return min(high, int(round(low * ((high + 1) / low) ** self._random.random(), 6)))

    def gap(self, rate: float) -> float:
        return -math.log(1.0 - self._random.random()) / rate

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.uniform(0, self._vocab_size - 1) for _ in range(count))


def mixed(
    n: int, prompt: Range = (1, 200), output: Range = (1, 64), seed: int = 0, vocab_size: int = VOCAB_SIZE
) -> Workload:
    """`n` requests at step 0, lengths drawn evenly between the smallest and the largest."""
    draw = _checked(n, seed, vocab_size, prompt=prompt, output=output)
    return _workload("mixed", seed, ((draw.tokens(draw.uniform(*prompt)), draw.uniform(*output)) for _ in range(n)))


def log_uniform(
    n: int, prompt: Range = (1, 200), output: Range = (1, 64), seed: int = 0, vocab_size: int = VOCAB_SIZE
) -> Workload:
    """`n` requests at step 0, lengths even on a logarithmic scale: many short ones, a few long, as in real traffic."""
    draw = _checked(n, seed, vocab_size, prompt=prompt, output=output)
    lengths = ((draw.log_uniform(*prompt), draw.log_uniform(*output)) for _ in range(n))
    return _workload("log-uniform", seed, ((draw.tokens(length), most) for length, most in lengths))


def shared_prefix(
    n: int,
    prefix: int = 64,
    question: Range = (4, 40),
    output: Range = (8, 64),
    groups: int = 1,
    seed: int = 0,
    vocab_size: int = VOCAB_SIZE,
) -> Workload:
    """`n` chats at step 0 that begin with one of `groups` system prompts of `prefix` tokens, in turn."""
    draw = _checked(
        n, seed, vocab_size, prefix=(prefix, prefix), question=question, output=output, groups=(groups,) * 2
    )
    systems = [draw.tokens(prefix) for _ in range(groups)]
    prompts = (systems[i % groups] + draw.tokens(draw.uniform(*question)) for i in range(n))
    return _workload("shared-prefix", seed, ((prompt, draw.uniform(*output)) for prompt in prompts))


def long_document(
    chats: int = 8,
    prompt: int = 20,
    output: int = 60,
    document: int = 2000,
    answer: int = 20,
    arrival_step: int = 10,
    seed: int = 0,
    vocab_size: int = VOCAB_SIZE,
) -> Workload:
    """Chats that are being answered when a long document arrives, as the last request: does it stall them?"""
    sizes = {"prompt": prompt, "output": output, "document": document, "answer": answer}
    draw = _checked(chats, seed, vocab_size, **{name: (size, size) for name, size in sizes.items()})
    short = [(draw.tokens(prompt), output) for _ in range(chats)]
    workload = _workload("long-document", seed, [*short, (draw.tokens(document), answer)])
    last = replace(workload.requests[-1], request_id="document", arrival_step=arrival_step)
    return replace(workload, requests=(*workload.requests[:-1], last))


def poisson(workload: Workload, rate: float, seconds: bool = False) -> Workload:
    """The same requests, arriving at random: on average `rate` per step, or per second; seeded by the workload."""
    _check("rate", rate, _is_number(rate) and rate >= 1 / LARGEST, "a number from 1e-9 to 1e9")
    draw, moment, moments = _Draw(f"arrivals {workload.seed}"), 0.0, []
    for _ in workload.requests:
        moment += draw.gap(rate)
        moments.append(round(moment, 6))
    return _arriving(workload, "poisson", moments, seconds)


def bursty(workload: Workload, size: int, every: float, seconds: bool = False) -> Workload:
    """The same requests, `size` at once, a burst `every` so many steps, or seconds."""
    _check("size", size, _is_integer(size, 1), "an integer of at least 1")
    _check("every", every, _is_number(every), "a number from 0 to 1e9")
    return _arriving(workload, "bursty", [i // size * every for i in range(len(workload.requests))], seconds)


def _arriving(workload: Workload, how: str, moments: list[float], seconds: bool) -> Workload:
    requests = []
    for request, moment in zip(workload.requests, moments, strict=True):
        step, when = (0, float(moment)) if seconds else (int(moment), None)
        requests.append(replace(request, arrival_step=step, arrival_time=when))
    return replace(workload, name=f"{workload.name}-{how}", requests=tuple(requests))


def _workload(name: str, seed: int, requests: Iterable[tuple[tuple[int, ...], int]]) -> Workload:
    numbered = (WorkloadRequest(f"r{i}", prompt, most) for i, (prompt, most) in enumerate(requests))
    return Workload(name, seed, tuple(numbered))


def _checked(n: int, seed: int, vocab_size: int, **ranges: Range) -> _Draw:
    _check("n", n, _is_integer(n, 0), "an integer of at least 0")
    _check("seed", seed, _is_integer(seed, 0), "an integer of at least 0")
    is_size = _is_integer(vocab_size, 1) and vocab_size <= MAX_TOKEN_ID + 1
    _check("vocab_size", vocab_size, is_size, "an integer from 1 to 2**31")
    for name, span in ranges.items():
        _check(name, span, isinstance(span, tuple | list) and len(span) == 2, "a pair: the smallest and the largest")
        low, high = span
        is_range = _is_integer(low, 1) and _is_integer(high, low)
        _check(name, low if low == high else (low, high), is_range, "at least 1, and the smallest first")
    return _Draw(seed, vocab_size)


# JSON


def _choose(data: Mapping[str, Any], name: str | None, source: str) -> Any:
    """One workload of a file of several."""
    items = data["workloads"]
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise TraceError(f"{source}: workloads is not a list of objects")
    names = [item.get("name") for item in items]
    if name is None and len(items) == 1:
        return items[0]
    if name not in names:
        raise TraceError(f"{source}: name is {name!r}; the file has {', '.join(map(str, names))}")
    return items[names.index(name)]


def _workload_from_json(data: Any, null_blocks: int) -> Workload:
    fields = _object("workload", data, {"contbatch_workload", "name", "seed", "requests", "config", "note"})
    _check("contbatch_workload", fields.get("contbatch_workload"), fields.get("contbatch_workload", 1) == VERSION, "1")
    requests, seed, limits = fields.get("requests"), fields.get("seed", 0), fields.get("config")
    _check("requests", requests, isinstance(requests, list), "a list of requests")
    _check("seed", seed, _is_integer(seed, 0), "an integer of at least 0")
    config = None
    if limits is not None:
        config = SchedulerConfig(**_object("config", limits, set(SchedulerConfig.__dataclass_fields__)))
        config = replace(config, num_blocks=config.num_blocks - null_blocks)
    return Workload(fields.get("name", ""), seed, tuple(_requests_from_json(requests or [], _Draw(seed))), config)


def _requests_from_json(items: list[Any], draw: _Draw) -> Iterator[WorkloadRequest]:
    for number, item in enumerate(items):
        try:
            yield _request_from_json(item, draw)
        except InvalidConfig as error:
            raise InvalidConfig(f"requests[{number}]: {error}") from error


_JSON_NAMES = {"id": "request_id"} | {
    name: name for name in WorkloadRequest.__dataclass_fields__ if name != "request_id"
}


def _request_from_json(item: Any, draw: _Draw) -> WorkloadRequest:
    fields = dict(_object("request", item, {*_JSON_NAMES, "prompt_len"}))
    if "prompt_len" in fields:
        length = fields.pop("prompt_len")
        _check("prompt", fields.get("prompt"), "prompt" not in fields, "prompt or prompt_len, not both")
        _check("prompt_len", length, _is_integer(length, 1) and length <= LONGEST_PROMPT, f"1 to {LONGEST_PROMPT}")
        fields["prompt"] = draw.tokens(length)
    for name in ("id", "prompt", "max_tokens"):
        _check(name, "missing", name in fields, "a value in every request")
    return WorkloadRequest(**{_JSON_NAMES[name]: value for name, value in fields.items()})


def _request_to_json(request: WorkloadRequest) -> dict[str, Any]:
    values = {name: getattr(request, field) for name, field in _JSON_NAMES.items()}
    unused = "arrival_time" if request.arrival_time is None else "arrival_step"
    return {name: value for name, value in values.items() if name != unused}


def _object(what: str, data: Any, known: set[str]) -> dict[str, Any]:
    _check(what, data, isinstance(data, dict), "a JSON object")
    for name in data:
        _check(name, data[name], name in known, f"only the fields {', '.join(sorted(known))}")
    return dict(data)


def _check(name: str, value: object, good: object, use: str) -> None:
    if not good:
        shown = repr(value)
        raise InvalidConfig(f"{name} is {shown if len(shown) <= 80 else shown[:77] + '...'}; use {use}")


def _is_integer(value: object, least: int | None) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LARGEST
