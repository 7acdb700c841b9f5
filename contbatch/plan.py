"""The decision of one iteration, as data.

A plan says who computes which tokens in this step, who joined, who was sent back, and why each request that was
looked at got nothing. It is immutable. Its tasks are built only when somebody asks for them: the scheduler keeps
what it granted in columns, since an object per request and step would cost more than the decision itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import NamedTuple, overload

from contbatch.batch import BatchedRequest, ScheduledBatch
from contbatch.errors import PolicyError
from contbatch.request import RunningRequest
from contbatch.trace import Blocked


class BlockReason(Enum):
    """Why a request that the policy looked at got no tokens in a step."""

    BUDGET = "budget"
    BLOCKS = "blocks"
    SEQUENCES = "sequences"
    HOST_BLOCKS = "host blocks"
    """A victim found no room in host memory; it will be computed again."""
    POLICY = "policy"


class PrefillTask(NamedTuple):
    """Compute (a chunk of) a prompt that starts at `start_position`."""

    request_id: str
    tokens: tuple[int, ...]
    start_position: int
    kv_cache_slot: int
    block_table: tuple[int, ...]
    is_last_chunk: bool = True

    def to_batched(self) -> BatchedRequest:
        """This task as a part of a forward pass."""
        return BatchedRequest.prefill(
            self.request_id,
            self.tokens,
            self.kv_cache_slot,
            self.block_table,
            self.start_position,
            self.is_last_chunk,
        )


class DecodeTask(NamedTuple):
    """Feed the newest token in to get the next one."""

    request_id: str
    input_token: int
    position: int
    kv_cache_slot: int
    block_table: tuple[int, ...]
    context_len: int

    def to_batched(self) -> BatchedRequest:
        """This task as a part of a forward pass."""
        return BatchedRequest.decode(
            self.request_id,
            self.input_token,
            self.position,
            self.kv_cache_slot,
            self.block_table,
            self.context_len,
        )


@dataclass(slots=True, eq=False)
class Grants:
    """What a step granted, in columns and in the order of granting."""

    requests: list[RunningRequest] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: RunningRequest, count: int, kind: str) -> None:
        """Append one grant; the tokens start where the computed ones end."""
        self.requests.append(request)
        self.starts.append(request.num_computed_tokens)
        self.counts.append(count)
        self.kinds.append(kind)

    def remove(self, request: RunningRequest) -> tuple[int, str]:
        """Take one grant out again; returns its token count and kind."""
        index = self.requests.index(request)
        del self.requests[index], self.starts[index]
        return self.counts.pop(index), self.kinds.pop(index)


class _PrefillTasks(Sequence[PrefillTask]):
    """The prefill tasks of some grants, built when asked for; ask before the step is committed."""

    def __init__(self, grants: Grants) -> None:
        self._grants = grants

    @cached_property
    def _rows(self) -> list[int]:
        return [row for row, kind in enumerate(self._grants.kinds) if kind != "D"]

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> PrefillTask: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PrefillTask]: ...
    def __getitem__(self, index: int | slice) -> PrefillTask | Sequence[PrefillTask]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        return self._build(self._rows[index])

    def _build(self, row: int) -> PrefillTask:
        request, start = self._grants.requests[row], self._grants.starts[row]
        end = start + self._grants.counts[row]
        return PrefillTask(
            request.request_id,
            tuple(request.token_ids[start:end]),
            start,
            request.kv_cache_slot,
            tuple(request.block_table),
            end == request.prefill_end,
        )


class _DecodeTasks(Sequence[DecodeTask]):
    """The decode tasks of some grants, built when asked for; ask before the step is committed."""

    def __init__(self, grants: Grants) -> None:
        self._grants = grants

    @cached_property
    def _rows(self) -> list[int]:
        return [row for row, kind in enumerate(self._grants.kinds) if kind == "D"]

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> DecodeTask: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[DecodeTask]: ...
    def __getitem__(self, index: int | slice) -> DecodeTask | Sequence[DecodeTask]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        return self._build(self._rows[index])

    def _build(self, row: int) -> DecodeTask:
        request, start = self._grants.requests[row], self._grants.starts[row]
        return DecodeTask(
            request.request_id,
            request.token_ids[start],
            start,
            request.kv_cache_slot,
            tuple(request.block_table),
            start,
        )


@dataclass(frozen=True, eq=False)
class IterationPlan:
    """The decision of one step.

    Args:
        prefill_tasks, decode_tasks: the work of the step.
        evicted_requests: preempted in this step; they hold nothing and have no task.
        swap_out_requests: preempted in this step, and moved to host memory.
        swap_in_requests: joined the running set again, from host memory.
        swap_out_blocks: copies to make before the forward pass, first: (block, host block).
        swap_in_blocks: copies to make before the forward pass, then: (host block, block).
        admitted, resumed: joined the running set for the first time, or again after a preemption.
        cached: tokens that a joining request took from the prefix cache.
        new_blocks: block ids appended to each request's table.
        blocked: for each request that was looked at and got nothing, the reason.
        num_waiting: requests left in the queue.
        token_budget: most tokens that the policy allowed in this step; None where it declared no limit.
        grants: the same tasks in columns, where a scheduler made the plan.

    Raises:
        PolicyError: a request appears in two tasks, or has a task and is evicted.
    """

    prefill_tasks: Sequence[PrefillTask] = ()
    decode_tasks: Sequence[DecodeTask] = ()
    evicted_requests: tuple[str, ...] = ()
    swap_out_requests: tuple[str, ...] = ()
    swap_in_requests: tuple[str, ...] = ()
    swap_out_blocks: tuple[tuple[int, int], ...] = ()
    swap_in_blocks: tuple[tuple[int, int], ...] = ()
    admitted: tuple[str, ...] = ()
    resumed: tuple[str, ...] = ()
    cached: Mapping[str, int] = field(default_factory=dict)
    new_blocks: Mapping[str, list[int]] = field(default_factory=dict)
    blocked: Mapping[str, Blocked] = field(default_factory=dict)
    num_waiting: int = 0
    token_budget: int | None = None
    grants: Grants | None = None

    def __post_init__(self) -> None:
        if self.grants is None:
            self._check_ids([task.request_id for task in self._tasks()])

    @classmethod
    def empty(cls) -> IterationPlan:
        """A plan in which nothing happens."""
        return cls()

    @classmethod
    def of(cls, grants: Grants, decisions: Mapping[str, object]) -> IterationPlan:
        """A scheduler's plan: tasks are views on `grants`. Its fields are set without `__init__`, which costs a third
        of a small step."""
        plan = object.__new__(cls)
        tasks = {"prefill_tasks": _PrefillTasks(grants), "decode_tasks": _DecodeTasks(grants)}
        plan.__dict__.update(decisions, grants=grants, **tasks)
        return plan

    def _tasks(self) -> Iterator[PrefillTask | DecodeTask]:
        yield from self.prefill_tasks
        yield from self.decode_tasks

    def _check_ids(self, ids: list[str]) -> None:
        gone = {*self.evicted_requests, *self.swap_out_requests}
        for request_id in ids:
            if request_id in gone or ids.count(request_id) > 1:
                raise PolicyError(
                    f"request {request_id!r} appears twice in one plan; it has one task, or it is sent away"
                )

    @property
    def has_work(self) -> bool:
        """True if the step computes tokens or moves cache blocks."""
        moves = self.swap_out_requests or self.swap_in_requests
        return bool(self.total_requests or moves)

    @property
    def total_requests(self) -> int:
        """Requests that compute tokens in this step."""
        if self.grants is not None:
            return len(self.grants.requests)
        return len(self.prefill_tasks) + len(self.decode_tasks)

    @property
    def total_tokens(self) -> int:
        """Tokens computed in this step."""
        if self.grants is not None:
            return sum(self.grants.counts)
        return sum(len(task.tokens) for task in self.prefill_tasks) + len(self.decode_tasks)

    def to_scheduled_batch(self, batch_id: int) -> ScheduledBatch:
        """The forward pass of this plan: prefills first, then decodes. Call it before the step is committed."""
        return PlannedBatch(batch_id, self)


class PlannedBatch(ScheduledBatch):
    """The batch of a plan. Its parts are built when somebody looks at them; who only counts reads `grants`."""

    def __init__(self, batch_id: int, plan: IterationPlan) -> None:
        self.batch_id = batch_id
        self.grants = plan.grants
        self.evicted_requests = plan.evicted_requests
        self.swap_out_requests = plan.swap_out_requests
        self.swap_in_requests = plan.swap_in_requests
        self._plan = plan

    @cached_property
    def requests(self) -> list[BatchedRequest]:  # type: ignore[override]  # a list all the same, made late
        """The parts, in order."""
        return [task.to_batched() for task in self._plan._tasks()]

    @cached_property
    def _ids(self) -> set[str]:  # type: ignore[override]  # see above
        return {part.request_id for part in self.requests}
