"""Requests: what a client asked for, and where the engine is with it.

Two objects, because they have two lives. `Request` is frozen: it is what was asked. `RunningRequest` is the
scheduler's working record of it. The one idea behind the working record is that a request *owes*
`len(token_ids) - num_computed_tokens` tokens of computation. A new prompt owes all of it, a chunked prompt the
rest of it, a decoding request exactly one token, a preempted request everything again. No phase is stored.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum, StrEnum
from typing import Any

from contbatch.errors import InvalidRequest

MAX_TOKEN_ID = 2**31 - 1
"""The largest token id that the arrays of a batch and the block hashes have room for."""


LARGEST = 1e15
"""Times are below this many seconds, 30 million years."""


class Priority(IntEnum):
    """Urgency of a request. As in vLLM, the lower number is the more urgent one; any integer is accepted."""

    CRITICAL = 0
    HIGH = 1
    NORMAL = 2
    LOW = 3


class PreemptionMode(StrEnum):
    """What becomes of the cache of a preempted request."""

    RECOMPUTE = "recompute"
    """It is dropped and computed again."""
    SWAP = "swap"
    """It is copied to host memory and back; where there is no room, it is dropped and computed again."""


class FinishReason(Enum):
    """Why a request ended. `vllm` gives the string that vLLM's API shows for it."""

    LENGTH = "length"
    STOP = "stop"
    EOS = "eos"
    ABORT = "abort"
    ERROR = "error"

    @property
    def vllm(self) -> str:
        """The finish reason in vLLM's words: an end-of-sequence token is a "stop" there."""
        return "stop" if self is FinishReason.EOS else self.value


class RequestStatus(Enum):
    """Where a request is now."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    SWAPPED = "swapped"
    FINISHED = "finished"


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    Args:
        max_tokens: most tokens to generate; None means up to the model length and the block pool.
        temperature: 0 is greedy (ties go to the lowest token id); above 0 samples.
        top_k: sample among the k most likely tokens; 0 turns it off.
        top_p: sample among the fewest tokens whose probabilities add up to this; in (0, 1].
        seed: makes sampling repeatable. A draw depends on the seed and the position only, so a request gets the
            same tokens alone, in a batch and after a preemption. None lets the engine draw a seed.
        stop: one string or several; the text ends before the first one that appears.
        stop_token_ids: token ids that end the request.
        ignore_eos: go on after the model's end-of-sequence token. Explicit `stop_token_ids` still stop.

    Raises:
        InvalidRequest: for a value out of range; the message names it.
    """

    max_tokens: int | None = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", _tuple("stop_token_ids", self.stop_token_ids))
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, least=1, fix="or None for as many as fit")
        _integer("top_k", self.top_k, least=0, fix="where 0 turns it off")
        if self.seed is not None:
            _integer("seed", self.seed, least=0, fix="or None")
        _number("temperature", self.temperature)
        if self.temperature < 0:
            raise InvalidRequest(f"temperature is {self.temperature}; use 0 (greedy) or more")
        _number("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise InvalidRequest(f"top_p is {self.top_p}; use a number above 0 and up to 1")
        for text in self.stop_strings:
            if not isinstance(text, str) or not text:
                raise InvalidRequest(f"stop contains {text!r}; every stop string needs at least one character")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, least=0, fix="token ids")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, always as a tuple."""
        return tuple(self.stop or ())


def _tuple(name: str, value: object) -> tuple[Any, ...]:
    if not isinstance(value, Iterable):
        raise InvalidRequest(f"{name} is {value!r}; use a list")
    return tuple(value)


def _integer(name: str, value: object, *, least: int, fix: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidRequest(f"{name} is {value!r}; use an integer of at least {least}, {fix}")


def _number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise InvalidRequest(f"{name} is {value!r}; use a finite number")


@dataclass(frozen=True)
class Request:
    """What a client asked for.

    Args:
        request_id: any non-empty string, unique among unfinished requests.
        prompt_token_ids: the prompt, at least one token.
        sampling: how to sample and when to stop.
        priority: lower is more urgent; only priority policies look at it.
        arrival_time: seconds on the engine's clock.
        prompt: the prompt as text, for display only.
        client: who asks; only fair-share policies look at it.
        deadline: seconds on the engine's clock after which nobody wants the answer any more; None for no limit.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = Priority.NORMAL
    arrival_time: float = 0.0
    prompt: str | None = None
    client: str = ""
    deadline: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.request_id, str) or not self.request_id:
            raise InvalidRequest(f"request_id is {self.request_id!r}; use a string that is not empty")
        name = f"request {self.request_id!r}"
        object.__setattr__(self, "prompt_token_ids", _tuple(f"{name}: prompt", self.prompt_token_ids))
        if not self.prompt_token_ids:
            raise InvalidRequest(f"{name} has an empty prompt; give it at least one token")
        for token in self.prompt_token_ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= MAX_TOKEN_ID:
                raise InvalidRequest(f"{name}: prompt holds {token!r}; token ids are integers from 0 to {MAX_TOKEN_ID}")
        if not isinstance(self.sampling, SamplingParams):
            raise InvalidRequest(f"{name}: sampling is {self.sampling!r}; use SamplingParams(...)")
        if isinstance(self.priority, bool) or not isinstance(self.priority, int) or abs(self.priority) >= 2**53:
            shown = repr(self.priority) if not isinstance(self.priority, int) or abs(self.priority) < 2**64 else "huge"
            raise InvalidRequest(
                f"{name}: priority is {shown}; use an integer of at most 53 bits, lower is more urgent"
            )
        if not isinstance(self.client, str):
            raise InvalidRequest(f"{name}: client is {self.client!r}; use a string")
        _number(f"{name}: arrival_time", self.arrival_time)
        if not 0 <= self.arrival_time < LARGEST:
            raise InvalidRequest(f"{name}: arrival_time is {self.arrival_time}; use 0 or more seconds (below 1e15)")
        if self.deadline is not None:
            _number(f"{name}: deadline", self.deadline)


@dataclass(eq=False, slots=True)
class RunningRequest:
    """The scheduler's record of one unfinished request: what is known, what is computed, what is held.

    Args:
        request: what was asked.
        index: position in the order of arrival; breaks every tie.
        max_tokens: most output tokens, after `None` and the model length were taken into account.
        arrival_step: steps that had been planned when it came.
        end_token_ids: tokens that end it.
    """

    request: Request
    index: int
    max_tokens: int
    arrival_step: int = 0
    end_token_ids: frozenset[int] = frozenset()
    request_id: str = field(init=False)
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    max_total_tokens: int = field(init=False)
    """Prompt and output together, when it ends by length."""
    num_computed_tokens: int = 0
    """Tokens whose K and V are in the cache (while it is swapped out: in host memory)."""
    num_in_flight: int = 0
    """Tokens granted by a plan that is not committed yet."""
    prefill_end: int = field(init=False)
    """Tokens below this position are prefill; fixed at each (re)admission that computes them again."""
    high_water: int = 0
    """Most tokens that were ever computed; prefill below it after a preemption is recomputation."""
    num_reserved_tokens: int = 0
    """Tokens that its policy holds blocks for ahead of need (0: as many blocks as its tokens take)."""
    block_table: list[int] = field(default_factory=list)
    host_table: list[int] = field(default_factory=list)
    """Blocks in host memory while it is swapped out, and until the step that brings it back is committed."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Chained hashes of this request's full blocks, as far as they were needed."""
    num_hashed_blocks: int = 0
    """Leading blocks of the table that are in the prefix index."""
    kv_cache_slot: int = -1
    """Row in the executor's per-request buffers while running, else -1."""
    status: RequestStatus = RequestStatus.WAITING
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.request_id = self.request.request_id
        self.token_ids = list(self.request.prompt_token_ids)
        self.num_prompt_tokens = self.prefill_end = len(self.token_ids)
        self.max_total_tokens = self.num_prompt_tokens + self.max_tokens

    def __repr__(self) -> str:
        return (
            f"<{self.request_id} {self.status.value}: {self.num_computed_tokens} of "
            f"{len(self.token_ids)} tokens computed, {len(self.block_table)} blocks>"
        )

    @property
    def owed(self) -> int:
        """Tokens that still have to be computed before the next one can be sampled."""
        return len(self.token_ids) - self.num_computed_tokens - self.num_in_flight

    @property
    def is_prefilling(self) -> bool:
        """True while part of the prompt (after a preemption: of everything known) is not computed."""
        return self.num_computed_tokens < self.prefill_end

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        """How many tokens were generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens
