"""One step while a policy decides it: the verbs.

A policy reads what there is (running, waiting, budget, free blocks) and writes its decision with a few verbs. The
verbs enforce the rules: a grant never exceeds the budget or what a request owes, a refused allocation changes
nothing, a victim is not admitted again in the same step. A wrong policy raises `PolicyError`; it cannot lose a
block or a request. This is the whole interface for built-in and for your own policies.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from contbatch.blocks import blocks_needed
from contbatch.budget import UNLIMITED, TokenBudget
from contbatch.config import SchedulerConfig
from contbatch.errors import PolicyError
from contbatch.plan import BlockReason, Grants, IterationPlan
from contbatch.request import RequestStatus, RunningRequest
from contbatch.trace import Blocked
from contbatch.waiting import QueueKey, WaitingQueue

if TYPE_CHECKING:
    from contbatch.scheduler import Scheduler


class Policy(Protocol):
    """What a scheduling policy is: it names its budget and fills in a step."""

    queue_key: QueueKey | None
    """Orders the waiting queue; None is first come, first served."""

    @property
    def name(self) -> str:
        """Shown in traces and messages."""
        ...

    def token_budget(self, config: SchedulerConfig) -> TokenBudget:
        """A fresh budget for one step."""
        ...

    def schedule(self, step: Step) -> None:
        """Decide one step with the verbs of `step`."""
        ...

    def on_finish(self, request: RunningRequest) -> None:
        """A request ended, for whatever reason."""
        ...


class PrefixHit(NamedTuple):
    """Leading blocks of a sequence that the pool already holds."""

    blocks: tuple[int, ...] = ()
    num_tokens: int = 0


NO_HIT = PrefixHit()


@dataclass
class _Undo:
    """What one grant took, so that it can be given back."""

    num_new_blocks: int
    reserved_before: int = 0
    admitted_from: RequestStatus | None = None
    place: int = 0
    """Where an admitted request stood in the queue."""


class Step:
    """One iteration while a policy decides it: what there is, and the verbs to decide with.

    Reads: `running` (in admission order), `waiting` (in queue order), `config`, `budget`, `seats_left`,
    `free_blocks`, `victims`. Verbs: `cached_prefix`, `grant`, `admit`, `take_back`, `preempt`, `skip`.
    """

    def __init__(self, scheduler: Scheduler, budget: TokenBudget) -> None:
        self._scheduler = scheduler
        self._pool = scheduler.pool
        self.config = scheduler.config
        self.budget = budget
        self.grants = Grants()
        self.victims: list[RunningRequest] = []
        """Requests preempted in this step."""
        self._undo: dict[str, _Undo] = {}
        self._cached: dict[str, int] = {}
        self._new_blocks: dict[str, list[int]] = {}
        self._blocked: dict[str, Blocked] = {}
        self._is_over = False

    @property
    def running(self) -> Sequence[RunningRequest]:
        """Running requests in admission order. Preempting changes it: take a copy before a loop that does."""
        return self._scheduler.running

    @property
    def waiting(self) -> WaitingQueue:
        """Waiting requests; `waiting.head` is next."""
        return self._scheduler.waiting

    @property
    def free_blocks(self) -> int:
        """Blocks that could be handed out now."""
        return self._pool.num_free

    @property
    def seats_left(self) -> int:
        """How many more requests may run."""
        return self.config.max_num_seqs - len(self._scheduler.running)

    def was_granted(self, request: RunningRequest) -> bool:
        """True if the request already got tokens in this step."""
        return request.request_id in self._undo

    def tokens_left(self, request: RunningRequest) -> int:
        """Budget left for this request: of the prefill limit if it is prefilling, else of the decode limit."""
        prefilling = request.is_prefilling or request.status is not RequestStatus.RUNNING
        return self.budget.remaining_prefill if prefilling else self.budget.remaining_decode

    def cached_prefix(self, request: RunningRequest) -> PrefixHit:
        """The longest run of cached full blocks that `request` starts with.

        At most `len - 1` tokens, because at least one token must be computed to sample from.
        """
        if not self.config.enable_prefix_caching:
            return NO_HIT
        size = self.config.block_size
        keys = self._scheduler.block_keys(request, (len(request.token_ids) - 1) // size)
        blocks = self._pool.lookup(keys)
        return PrefixHit(tuple(blocks), len(blocks) * size)

    def grant(self, request: RunningRequest, num_tokens: int, hold: int | None = None) -> bool:
        """Give a running request `num_tokens` tokens of this step.

        Args:
            request: a running request that got nothing yet in this step.
            num_tokens: 1 up to what it owes and the budget allows.
            hold: hold blocks for this many tokens of its sequence instead of for the granted ones only.

        Returns:
            False, and nothing changes, if the blocks are not there.

        Raises:
            PolicyError: it is not running, was granted already, or `num_tokens` breaks a limit.
        """
        self._check_request(request)
        if request.status is not RequestStatus.RUNNING:
            raise PolicyError(f"grant to {request!r}, which is not running; admit it first")
        self._check_grant(request, num_tokens, request.owed, hold)
        end = max(request.num_computed_tokens + num_tokens, hold or 0)
        needed = blocks_needed(end, self.config.block_size) - len(request.block_table)
        if needed > 0:
            blocks = self._pool.take(needed)
            if blocks is None:
                return False
            request.block_table += blocks
            self._new_blocks[request.request_id] = blocks
        self._undo[request.request_id] = _Undo(max(needed, 0), request.num_reserved_tokens)
        request.num_reserved_tokens = max(request.num_reserved_tokens, hold or 0)
        self._record_grant(request, num_tokens)
        return True

    def admit(
        self,
        request: RunningRequest,
        num_tokens: int,
        hit: PrefixHit = NO_HIT,
        hold: int | None = None,
        fit: int | None = None,
        spare: int = 0,
    ) -> bool:
        """Let a waiting request run and give it `num_tokens` tokens of this step.

        Args:
            request: a waiting request that was not preempted in this step.
            num_tokens: tokens to compute, after those of `hit`.
            hit: its cached prefix, from `cached_prefix` in this step.
            hold: hold blocks for this many tokens of its sequence instead of for the granted ones only.
            fit: require that this many tokens would fit, without taking the blocks.
            spare: blocks that must stay free on top.

        Returns:
            False, and nothing changes, if the blocks are not there.

        Raises:
            PolicyError: it is not waiting, no seat is free, `hit` is not its cached prefix, or `num_tokens` breaks a
                limit.
        """
        self._check_request(request)
        self._check_admission(request)
        self._check_hit(request, hit)
        self._check_grant(request, num_tokens, request.owed - hit.num_tokens, hold)
        size = self.config.block_size
        held = len(hit.blocks)
        take = blocks_needed(max(hit.num_tokens + num_tokens, hold or 0), size) - held
        must_fit = max(take, blocks_needed(fit or 0, size) - held)
        if must_fit + self._pool.num_unreferenced(hit.blocks) + spare > self._pool.num_free:
            return False
        self._pool.share(hit.blocks)
        table = [*hit.blocks, *(self._pool.take(take) or ())]
        self._move_to_running(request, table, hit)
        request.num_reserved_tokens = hold or 0
        self._record_grant(request, num_tokens)
        return True

    def _move_to_running(self, request: RunningRequest, table: list[int], hit: PrefixHit) -> None:
        scheduler = self._scheduler
        place = scheduler.waiting.remove(request)
        self._undo[request.request_id] = _Undo(len(table), admitted_from=request.status, place=place)
        scheduler.running.append(request)
        request.status = RequestStatus.RUNNING
        request.kv_cache_slot = heapq.heappop(scheduler.free_slots)
        request.block_table += table
        request.num_computed_tokens = hit.num_tokens
        request.num_hashed_blocks = len(hit.blocks)
        request.prefill_end = len(request.token_ids)
        self._new_blocks[request.request_id] = table
        if hit.num_tokens:
            self._cached[request.request_id] = hit.num_tokens

    def take_back(self, request: RunningRequest) -> None:
        """Undo this step's grant to `request`: tokens, new blocks, and its admission if it was admitted now.

        Raises:
            PolicyError: it got nothing in this step, or another request already shares a block planned for it.
        """
        self._check_request(request)
        self._take_back(request)

    def _take_back(self, request: RunningRequest) -> None:
        undo = self._undo.get(request.request_id)
        if undo is None:
            raise PolicyError(f"nothing to take back from {request!r}; it was not granted tokens in this step")
        size = self.config.block_size
        planned = request.block_table[request.num_computed_tokens // size : request.num_hashed_blocks]
        if any(self._pool.ref_count[block] > 1 for block in planned):
            raise PolicyError(f"{request!r} cannot be taken back: a request admitted after it shares its new blocks")
        del self._undo[request.request_id]
        count, kind = self.grants.remove(request)
        self.budget.refund(**{"decode" if kind == "D" else "prefill": count})
        request.num_in_flight = 0
        self._scheduler.forget_blocks(request, request.num_computed_tokens)
        self._new_blocks.pop(request.request_id, None)
        if undo.admitted_from is not None:
            self._send_away(request, undo.admitted_from)
            self._scheduler.waiting.insert(undo.place, request)
            return
        request.num_reserved_tokens = undo.reserved_before
        if undo.num_new_blocks:
            self._pool.release(request.block_table[-undo.num_new_blocks :])
            del request.block_table[-undo.num_new_blocks :]

    def preempt(self, request: RunningRequest, to_back: bool = False) -> None:
        """Send a running request back to the queue; it keeps its tokens and computes them again later.

        Its blocks are released and its tokens of this step go back to the budget.

        Args:
            request: a running request.
            to_back: queue it at the back instead of the front.

        Raises:
            PolicyError: it is not running.
        """
        self._check_request(request)
        if request.status is not RequestStatus.RUNNING:
            raise PolicyError(f"{request!r} is not running; only running requests can be preempted")
        undo = self._undo.get(request.request_id)
        if undo is not None:
            self._take_back(request)
        if undo is not None and undo.admitted_from is not None:
            return
        self._send_away(request, RequestStatus.PREEMPTED)
        request.num_preemptions += 1
        self.victims.append(request)
        if to_back:
            self._scheduler.waiting.push(request)
        else:
            self._scheduler.waiting.insert(0, request)

    def skip(self, request: RunningRequest, reason: BlockReason, needs: int = 0, left: int = 0) -> None:
        """Write down why `request` gets nothing in this step: what it needed and what was left."""
        self._blocked[request.request_id] = Blocked(reason.value, needs, left)

    # Rules

    def _check_request(self, request: RunningRequest) -> None:
        if self._is_over:
            raise PolicyError("this step is over; use the step that `schedule` was called with, and do not keep it")
        if self._scheduler.requests.get(request.request_id) is not request:
            raise PolicyError(f"this scheduler does not know {request!r}; take it from step.running or step.waiting")

    def _check_admission(self, request: RunningRequest) -> None:
        if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            raise PolicyError(f"admit {request!r}, which is not waiting; grant tokens to a running request")
        if request in self.victims:
            raise PolicyError(f"{request!r} was preempted in this step; it cannot be admitted in the same step")
        if self.seats_left < 1:
            raise PolicyError(f"admit {request!r}: all {self.config.max_num_seqs} seats (max_num_seqs) are taken")

    def _check_hit(self, request: RunningRequest, hit: PrefixHit) -> None:
        """A hit may be shorter than what is cached, but not other blocks, nor blocks that were reused meanwhile."""
        if hit == NO_HIT:
            return
        length = len(hit.blocks)
        cached = self.cached_prefix(request).blocks[:length]
        if hit.blocks != cached or hit.num_tokens != length * self.config.block_size:
            raise PolicyError(f"{hit} is not the cached prefix of {request!r}; call cached_prefix just before admit")

    def _check_grant(self, request: RunningRequest, num_tokens: int, owed: int, hold: int | None) -> None:
        if request.request_id in self._undo:
            raise PolicyError(f"{request!r} was already granted tokens in this step")
        if not isinstance(num_tokens, int) or not isinstance(hold, int | None):
            raise PolicyError(f"grant of {num_tokens!r} tokens (hold={hold!r}) to {request!r}; use whole numbers")
        if num_tokens < 1 or num_tokens > owed:
            raise PolicyError(f"grant of {num_tokens} tokens to {request!r}, which owes {owed}; use 1 to {owed}")
        left = self.tokens_left(request)
        if num_tokens > left:
            raise PolicyError(f"grant of {num_tokens} tokens to {request!r} with {left} left in the budget")

    def _record_grant(self, request: RunningRequest, num_tokens: int) -> None:
        if request.is_prefilling:
            self.budget.try_allocate_prefill(num_tokens)
            kind = "R" if request.num_computed_tokens < request.high_water else "P"
        else:
            self.budget.try_allocate_decode(num_tokens)
            kind = "D"
        self.grants.add(request, num_tokens, kind)
        request.num_in_flight = num_tokens
        self._blocked.pop(request.request_id, None)
        self._scheduler.remember_blocks(request, request.num_computed_tokens + num_tokens)

    def _send_away(self, request: RunningRequest, status: RequestStatus) -> None:
        scheduler = self._scheduler
        scheduler.running.remove(request)
        scheduler.release(request)
        request.num_computed_tokens = 0
        request.status = status
        self._cached.pop(request.request_id, None)

    # The end of planning

    def undo(self) -> None:
        """Take back every grant, the last one first, so that shared blocks are given up before they are undone."""
        self._is_over = True
        for request in reversed(list(self.grants.requests)):
            self._take_back(request)

    def to_plan(self) -> IterationPlan:
        """What was decided; the verbs are closed from here on."""
        self._is_over = True
        joined = {
            request_id: undo.admitted_from for request_id, undo in self._undo.items() if undo.admitted_from is not None
        }
        self._explain_head()
        limit = self.budget.max_total_tokens
        decisions: dict[str, Any] = {
            "evicted_requests": tuple(request.request_id for request in self.victims),
            "admitted": tuple(i for i, was in joined.items() if was is RequestStatus.WAITING),
            "resumed": tuple(i for i, was in joined.items() if was is RequestStatus.PREEMPTED),
            "cached": self._cached,
            "new_blocks": {i: blocks for i, blocks in self._new_blocks.items() if blocks},
            "blocked": self._blocked,
            "num_waiting": len(self.waiting),
            "token_budget": limit if limit < UNLIMITED else None,
        }
        return IterationPlan.of(self.grants, **decisions)

    def _explain_head(self) -> None:
        """Give the head of the queue a reason if the policy gave none."""
        if not self.waiting:
            return
        head = self.waiting.head
        if head.request_id in self._blocked:
            return
        if self.seats_left < 1:
            self.skip(head, BlockReason.SEQUENCES, 1, 0)
        elif self.budget.is_exhausted:
            self.skip(head, BlockReason.BUDGET, head.owed, 0)
        else:
            self.skip(head, BlockReason.POLICY, head.owed, self.budget.remaining_prefill)
