"""One step while a policy decides it: the verbs.

A policy reads what there is (running, waiting, budget, free blocks) and writes its decision with a few verbs. The
verbs enforce the rules: a grant never exceeds the budget or what a request owes, a refused allocation changes
nothing, a victim is not admitted again in the same step. A wrong policy raises `PolicyError`; it cannot lose a
block or a request. This is the whole interface for built-in and for your own policies.

Most grants of most steps are decodes. `grant_running` gives them their token in one short loop, without a call for
each; only prompts go the long way.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from contbatch.blocks import blocks_needed
from contbatch.budget import UNLIMITED, TokenBudget
from contbatch.errors import PolicyError
from contbatch.plan import BlockReason, Grants, IterationPlan
from contbatch.request import PreemptionMode, RequestStatus, RunningRequest
from contbatch.trace import Blocked
from contbatch.waiting import QueueView

if TYPE_CHECKING:
    from contbatch.scheduler import Scheduler

QUEUED = (RequestStatus.WAITING, RequestStatus.PREEMPTED, RequestStatus.SWAPPED)


class PrefixHit(NamedTuple):
    """Leading blocks of a sequence that the pool already holds."""

    blocks: tuple[int, ...] = ()
    num_tokens: int = 0


NO_HIT = PrefixHit()


@dataclass(slots=True)
class _Undo:
    """What was there before a grant took more than tokens, so that it can be given back."""

    num_new_blocks: int
    num_hashed_blocks: int
    num_reserved_tokens: int = 0
    admitted_from: RequestStatus | None = None
    place: int = 0
    """Where an admitted request stood in the queue."""
    num_computed_tokens: int = 0
    """What an admitted request had in host memory."""


class Step:
    """One iteration while a policy decides it: what there is, and the verbs to decide with.

    To read:

    - `running`: running requests in admission order, as they are now.
    - `waiting`: the queue. `waiting.head` is next, `len(waiting)` how many; it can be looped over.
    - `victims`: requests preempted in this step. They cannot be admitted in it.
    - `seats_left`, `free_blocks`: how many more requests may run, how many blocks can be handed out.
    - `budget`: what is left of the tokens of this step: `remaining_prefill`, `remaining_decode`, `is_exhausted`; or
      `tokens_left(request)` for whichever of the two concerns a request.
    - `config`: the limits, a `SchedulerConfig`.
    - `was_granted(request)`, `grants`: who got tokens in this step; `len(grants)`: how many requests did.
      `freed_by(requests)`: the blocks that preempting them would free.

    To decide with: `grant` and `grant_running` (tokens for those who run), `admit` (a waiting request starts to run),
    `preempt` (a running one goes back to the queue), `take_back` (undo a grant), `skip` (say why somebody gets
    nothing; who was refused for blocks, and the head of the queue, get a reason anyway). `cached_prefix` asks the
    prefix cache. A verb that returns False has changed nothing: blocks are missing. A verb that breaks a rule raises
    `PolicyError`. The verbs do not look at `watermark`, `long_prefill_token_threshold` or `enable_chunked_prefill`: a
    policy that wants to keep them does so itself.

    A request in here is read and never written. The most useful of its fields: `owed` (tokens that it could be granted
    now: the rest of its prompt, or 1 while it decodes), `is_prefilling`, `token_ids` (prompt and output so far),
    `num_prompt_tokens`, `num_output_tokens`, `max_tokens`, `num_computed_tokens` (in the cache), `block_table`,
    `num_preemptions`, `index` (order of arrival), `arrival_step`, and `request` (what was asked: `priority`, `client`,
    `arrival_time`).
    """

    def __init__(self, scheduler: Scheduler, budget: TokenBudget) -> None:
        self._scheduler = scheduler
        self._pool = scheduler.pool
        self.config = scheduler.config
        self.budget = budget
        self.waiting = QueueView(scheduler.waiting)
        self._grants = Grants()
        self.victims: list[RunningRequest] = []
        """Requests preempted in this step."""
        self.swapped_in: list[RunningRequest] = []
        """Requests that came back from host memory in this step."""
        self.swap_outs: list[tuple[int, int]] = []
        """Copies to host memory: (block, host block)."""
        self.swap_ins: dict[str, list[tuple[int, int]]] = {}
        """Copies back for each request: (host block, block)."""
        self._undo: dict[str, _Undo] = {}
        self._cached: dict[str, int] = {}
        self._new_blocks: dict[str, list[int]] = {}
        self._blocked: dict[str, Blocked] = {}
        self._is_over = False

    @property
    def running(self) -> tuple[RunningRequest, ...]:
        """Running requests as they are now, in admission order."""
        return tuple(self._scheduler.running)

    @property
    def grants(self) -> list[tuple[RunningRequest, int, str]]:
        """What was granted so far in this step: (request, tokens, kind), kind D for a decode, P or R for a prefill."""
        granted = self._grants
        return list(zip(granted.requests, granted.counts, granted.kinds, strict=True))

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
        return request.num_in_flight > 0

    def tokens_left(self, request: RunningRequest) -> int:
        """Budget left for this request: of the prefill limit if it is (or will be) prefilling, else of the decode
        limit."""
        return self.budget.remaining_prefill if request.is_prefilling else self.budget.remaining_decode

    def freed_by(self, requests: Sequence[RunningRequest]) -> int:
        """Blocks that would become free if these running requests were preempted."""
        held = Counter(block for request in requests for block in request.block_table)
        return sum(self._pool.ref_count[block] == count for block, count in held.items())

    def cached_prefix(self, request: RunningRequest) -> PrefixHit:
        """The longest run of cached full blocks that a waiting request starts with.

        At most `len - 1` tokens, because at least one token must be computed to sample from. A request that was
        swapped out brings back what it had and owes only the rest, so it gets no hit.
        """
        if not self.config.enable_prefix_caching or request.num_computed_tokens:
            return NO_HIT
        size = self.config.block_size
        keys = self._scheduler.block_keys(request, (len(request.token_ids) - 1) // size)
        blocks = self._pool.lookup(keys)
        return PrefixHit(tuple(blocks), len(blocks) * size)

    # Verbs

    def grant(self, request: RunningRequest, num_tokens: int, hold: int | None = None) -> bool:
        """Give a running request `num_tokens` tokens of this step.

        Args:
            request: a running request that got nothing yet in this step.
            num_tokens: 1 up to what it owes and the budget allows.
            hold: hold blocks for the first so many tokens of its sequence, not just for those computed and granted.

        Returns:
            False, and nothing changes, if the blocks are not there.

        Raises:
            PolicyError: it is not running, was granted already, or `num_tokens` breaks a limit.
        """
        self._check_request(request)
        if request.status is not RequestStatus.RUNNING:
            fix = "it has to wait for another step" if request in self.victims else "admit it first"
            raise PolicyError(f"grant to {request!r}, which is not running; {fix}")
        self._check_grant(request, num_tokens, request.owed, hold)
        return self._grant(request, num_tokens, hold or 0)

    def _grant(self, request: RunningRequest, num_tokens: int, hold: int = 0) -> bool:
        table = request.block_table
        end = max(request.num_computed_tokens + num_tokens, hold)
        needed = max(0, blocks_needed(end, self.config.block_size) - len(table))
        if needed:
            blocks = self._pool.take(needed)
            if blocks is None:
                return False
            table += blocks
            self._new_blocks[request.request_id] = blocks
        self._undo[request.request_id] = _Undo(needed, request.num_hashed_blocks, request.num_reserved_tokens)
        request.num_reserved_tokens = max(request.num_reserved_tokens, hold)
        self._record_grant(request, num_tokens)
        return True

    def grant_running(self, decodes: bool | None = None, at_most: int = UNLIMITED) -> RunningRequest | None:
        """Give running requests, in admission order, what they owe, as far as the budget goes.

        Those that were granted already are passed over, so after making room it is simply called again. Those for
        which no budget is left are noted as skipped.

        Args:
            decodes: True for the decoding requests only, False for the prefilling ones only, None for all.
            at_most: most tokens for one request.

        Returns:
            the first request whose blocks are not there, for which nothing changes; None when all were looked at.
        """
        self._check_open()
        config, grants, fast = self.config, self._grants, 0
        size, caches = config.block_size, config.enable_prefix_caching
        left = self.budget.decodes_left
        for request in self._scheduler.running:
            if request.num_in_flight:
                continue
            start = request.num_computed_tokens
            is_decode = start >= request.prefill_end
            if decodes is not None and is_decode is not decodes:
                continue
            if is_decode and fast < left:  # it owes one token, its newest
                offset = start % size
                if not offset and not self._take_block(request, start):
                    self.budget.count_decodes(fast)
                    return request
                request.num_in_flight = 1
                grants.requests.append(request)
                grants.starts.append(start)
                grants.counts.append(1)
                grants.kinds.append("D")
                fast += 1
                if caches and offset == size - 1:
                    self._scheduler.remember_blocks(request, start + 1)
                continue
            self.budget.count_decodes(fast)
            num_tokens = min(request.owed, at_most, self.tokens_left(request))
            if not num_tokens:
                self.skip(request, BlockReason.BUDGET, request.owed, 0)
            elif not self._grant(request, num_tokens):
                return request
            fast, left = 0, self.budget.decodes_left
        self.budget.count_decodes(fast)
        return None

    def _take_block(self, request: RunningRequest, start: int) -> bool:
        """Have a block for the token at `start`, the first of its block; False if there is none left."""
        if len(request.block_table) * self.config.block_size > start:
            return True
        blocks = self._pool.take(1)
        if blocks is None:
            return False
        request.block_table += blocks
        self._new_blocks[request.request_id] = blocks
        self._undo[request.request_id] = _Undo(1, request.num_hashed_blocks, request.num_reserved_tokens)
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

        If it was swapped out, its blocks come back from host memory in this step, and it goes on where it was.

        Args:
            request: a waiting request that was not preempted in this step.
            num_tokens: tokens to compute, after those of `hit`; 1 up to what it owes and the budget allows.
            hit: its cached prefix, from `cached_prefix` in this step.
            hold: hold blocks for the first so many tokens of its sequence (those of `hit` included), not just for the
                granted ones.
            fit: require that the first so many tokens would fit, without taking the blocks for them.
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
        for name, value in (("fit", fit or 0), ("spare", spare)):
            if not isinstance(value, int) or value < 0:
                raise PolicyError(f"admit {request!r} with {name}={value!r}; use a whole number of at least 0")
        shared = self._still_here(request) if request.host_table else hit.blocks
        start = request.num_computed_tokens + hit.num_tokens
        size = self.config.block_size
        take = blocks_needed(max(start + num_tokens, hold or 0), size) - len(shared)
        must_fit = max(take, blocks_needed(fit or 0, size) - len(shared))
        needed = must_fit + self._pool.num_unreferenced(shared) + spare
        if needed > self._pool.num_free:
            self.skip(request, BlockReason.BLOCKS, needed, self._pool.num_free)
            return False
        self._pool.share(shared)
        table = [*shared, *(self._pool.take(take) or ())]
        self._move_to_running(request, table, start, len(shared))
        if request.host_table:
            self.swapped_in.append(request)
            moved = list(zip(request.host_table, table, strict=False))[len(shared) :]
            self.swap_ins[request.request_id] = moved
        elif start:
            self._cached[request.request_id] = start
        request.num_reserved_tokens = hold or 0
        self._record_grant(request, num_tokens)
        return True

    def _still_here(self, request: RunningRequest) -> tuple[int, ...]:
        """Leading blocks of a swapped-out request that the prefix index still knows: they need no copy."""
        if not self.config.enable_prefix_caching:
            return ()
        full = request.num_computed_tokens // self.config.block_size
        return tuple(self._pool.lookup(self._scheduler.block_keys(request, full)))

    def _move_to_running(self, request: RunningRequest, table: list[int], start: int, num_hashed: int) -> None:
        scheduler = self._scheduler
        undo = _Undo(
            len(table),
            num_hashed,
            admitted_from=request.status,
            place=scheduler.waiting.remove(request),
            num_computed_tokens=request.num_computed_tokens,
        )
        self._undo[request.request_id] = undo
        scheduler.running.append(request)
        request.status = RequestStatus.RUNNING
        request.kv_cache_slot = heapq.heappop(scheduler.free_slots)
        request.block_table += table
        request.num_computed_tokens = start
        request.num_hashed_blocks = num_hashed
        if not request.host_table:
            request.prefill_end = len(request.token_ids)
        if table:
            self._new_blocks[request.request_id] = table

    def take_back(self, request: RunningRequest) -> None:
        """Undo this step's grant to `request`: tokens, new blocks, and its admission if it was admitted now.

        Raises:
            PolicyError: it got nothing in this step, or another request already shares a block planned for it.
        """
        self._check_request(request)
        self._take_back(request)

    def _take_back(self, request: RunningRequest) -> None:
        if not request.num_in_flight:
            raise PolicyError(f"nothing to take back from {request!r}; it was not granted tokens in this step")
        undo = self._undo.pop(request.request_id, None) or self._plain_undo(request)
        planned = request.block_table[undo.num_hashed_blocks : request.num_hashed_blocks]
        if any(self._pool.ref_count[block] > 1 for block in planned):
            self._undo[request.request_id] = undo
            raise PolicyError(f"{request!r} cannot be taken back: a request admitted after it shares its new blocks")
        count, kind = self._grants.remove(request)
        self.budget.refund(**{"decode" if kind == "D" else "prefill": count})
        request.num_in_flight = 0
        self._scheduler.forget_blocks(request, undo.num_hashed_blocks)
        self._new_blocks.pop(request.request_id, None)
        if undo.admitted_from is not None:
            return self._back_to_queue(request, undo)
        request.num_reserved_tokens = undo.num_reserved_tokens
        if undo.num_new_blocks:
            self._pool.release(request.block_table[-undo.num_new_blocks :])
            del request.block_table[-undo.num_new_blocks :]

    def _plain_undo(self, request: RunningRequest) -> _Undo:
        """Of a decode that took no block: it may have filled one."""
        known = min(request.num_hashed_blocks, request.num_computed_tokens // self.config.block_size)
        return _Undo(0, known, request.num_reserved_tokens)

    def _back_to_queue(self, request: RunningRequest, undo: _Undo) -> None:
        """An admission of this step is undone."""
        assert undo.admitted_from is not None
        self._send_away(request, undo.admitted_from)
        request.num_computed_tokens = undo.num_computed_tokens
        self._cached.pop(request.request_id, None)
        if request in self.swapped_in:
            self.swapped_in.remove(request)
            del self.swap_ins[request.request_id]
        self._scheduler.waiting.insert(undo.place, request)

    def preempt(self, request: RunningRequest, to_back: bool = False) -> None:
        """Send a running request back to the queue. It keeps its tokens.

        Its blocks are released and its tokens of this step go back to the budget. What it had in the cache is copied
        to host memory if the configuration says so and there is room, else it will be computed again.

        Args:
            request: a running request.
            to_back: queue it at the back instead of the front, where the queue has no order of its own (`queue_key`).

        Raises:
            PolicyError: it is not running.
        """
        self._check_request(request)
        if request.status is not RequestStatus.RUNNING:
            raise PolicyError(f"{request!r} is not running; only running requests can be preempted")
        if request.num_in_flight:
            self._take_back(request)
        if request.status is not RequestStatus.RUNNING:
            return  # it was admitted in this step
        swapped = self.config.preemption_mode is PreemptionMode.SWAP and self._swap_out(request)
        self._send_away(request, RequestStatus.SWAPPED if swapped else RequestStatus.PREEMPTED)
        request.num_preemptions += 1
        self.victims.append(request)
        if to_back:
            self._scheduler.waiting.push(request)
        else:
            self._scheduler.waiting.insert(0, request)

    def _swap_out(self, request: RunningRequest) -> bool:
        """Find room in host memory for what `request` has computed; False if there is not enough."""
        host, size = self._scheduler.host, self.config.block_size
        full = request.num_computed_tokens // size if self.config.enable_prefix_caching else 0
        count = blocks_needed(request.num_computed_tokens, size)
        stored = host.store(list(self._scheduler.block_keys(request, full)), count)
        if stored is None:
            self.skip(request, BlockReason.HOST_BLOCKS, count, host.num_free)
            return False
        request.host_table = stored.blocks
        moves = list(zip(request.block_table, stored.blocks, strict=False))
        self.swap_outs += moves[stored.num_known :]
        return True

    def skip(self, request: RunningRequest, reason: BlockReason, needs: int = 0, left: int = 0) -> None:
        """Write down why `request` gets nothing in this step: what it needed and what was left (whole numbers)."""
        if not isinstance(needs, int) or not isinstance(left, int) or not isinstance(reason, BlockReason):
            raise PolicyError(f"skip with {reason!r}, {needs!r}, {left!r}; use a BlockReason and whole numbers")
        self._blocked[request.request_id] = Blocked(reason.value, needs, left)

    # Rules

    def _check_open(self) -> None:
        if self._is_over:
            raise PolicyError("this step is over; use the step that `schedule` was called with, and do not keep it")

    def _check_request(self, request: RunningRequest) -> None:
        self._check_open()
        if not isinstance(request, RunningRequest):
            raise PolicyError(f"{request!r} is no request; take one from step.running or step.waiting")
        if self._scheduler.requests.get(request.request_id) is not request:
            raise PolicyError(f"this scheduler does not know {request!r}; take it from step.running or step.waiting")

    def _check_admission(self, request: RunningRequest) -> None:
        if request.status not in QUEUED:
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
        if request.num_in_flight:
            raise PolicyError(f"{request!r} was already granted tokens in this step; take_back them to change that")
        if not isinstance(num_tokens, int) or not isinstance(hold, int | None) or (hold is not None and hold < 1):
            raise PolicyError(
                f"grant of {num_tokens!r} tokens (hold={hold!r}) to {request!r}; use whole numbers above 0"
            )
        if num_tokens < 1 or num_tokens > owed:
            raise PolicyError(f"grant of {num_tokens} tokens to {request!r}, which owes {owed}; use 1 to {owed}")
        left = self.tokens_left(request)
        if num_tokens > left:
            raise PolicyError(
                f"grant of {num_tokens} tokens to {request!r} with {left} left in the budget; ask step.tokens_left"
            )

    def _record_grant(self, request: RunningRequest, num_tokens: int) -> None:
        if request.is_prefilling:
            self.budget.try_allocate_prefill(num_tokens)
            kind = "R" if request.num_computed_tokens < request.high_water else "P"
        else:
            self.budget.try_allocate_decode(num_tokens)
            kind = "D"
        self._grants.add(request, num_tokens, kind)
        request.num_in_flight = num_tokens
        if self._blocked:
            self._blocked.pop(request.request_id, None)
        self._scheduler.remember_blocks(request, request.num_computed_tokens + num_tokens)

    def _send_away(self, request: RunningRequest, status: RequestStatus) -> None:
        scheduler = self._scheduler
        scheduler.running.remove(request)
        scheduler.release(request)
        request.status = status
        if status is not RequestStatus.SWAPPED:
            request.num_computed_tokens = 0

    # The end of planning

    def undo(self) -> None:
        """Take back every grant, the last one first, so that shared blocks are given up before they are undone.

        Preemptions stand, but no block was copied: victims that were swapped out will be computed again.
        """
        self._is_over = True
        for request in reversed(list(self._grants.requests)):
            self._take_back(request)
        host = self._scheduler.host
        for _, block in self.swap_outs:
            if host.key(block) is not None:
                host.forget(block)
        for request in self.victims:
            if request.status is RequestStatus.SWAPPED:
                self._scheduler.leave_host(request)
                request.status, request.num_computed_tokens = RequestStatus.PREEMPTED, 0

    def forget_undo(self, request: RunningRequest) -> RequestStatus | None:
        """Its grant is not to be undone; returns what it was admitted from, if it was admitted in this step."""
        undo = self._undo.pop(request.request_id, None)
        return undo.admitted_from if undo is not None else None

    def made(self, plan: IterationPlan) -> bool:
        """True if `plan` came from this step."""
        return plan.grants is self._grants

    def to_plan(self) -> IterationPlan:
        """What was decided; the verbs are closed from here on."""
        self._is_over = True
        if self.waiting:
            self._explain_head()
        limit = self.budget.max_total_tokens
        decisions: dict[str, object] = {
            "new_blocks": dict(self._new_blocks),
            "cached": dict(self._cached),
            "blocked": self._blocked,
            "num_waiting": len(self.waiting),
            "token_budget": limit if limit < UNLIMITED else None,
        }
        if self._undo:
            joined = {name: undo.admitted_from for name, undo in self._undo.items()}
            decisions["admitted"] = tuple(name for name, was in joined.items() if was is RequestStatus.WAITING)
            decisions["resumed"] = tuple(name for name, was in joined.items() if was is RequestStatus.PREEMPTED)
        if self.victims:
            is_swapped = {request.request_id: request.status is RequestStatus.SWAPPED for request in self.victims}
            decisions["evicted_requests"] = tuple(name for name, swapped in is_swapped.items() if not swapped)
            decisions["swap_out_requests"] = tuple(name for name, swapped in is_swapped.items() if swapped)
            decisions["swap_out_blocks"] = tuple(self.swap_outs)
        if self.swapped_in:
            decisions["swap_in_requests"] = tuple(request.request_id for request in self.swapped_in)
            decisions["swap_in_blocks"] = tuple(pair for pairs in self.swap_ins.values() for pair in pairs)
        return IterationPlan.of(self._grants, decisions)

    def _explain_head(self) -> None:
        """Give the head of the queue a reason if the policy gave none."""
        head = self.waiting.head
        if head.request_id in self._blocked:
            return
        if self.seats_left < 1:
            self.skip(head, BlockReason.SEQUENCES, 1, 0)
        elif self.budget.is_exhausted:
            self.skip(head, BlockReason.BUDGET, head.owed, 0)
        else:
            self.skip(head, BlockReason.POLICY, head.owed, self.budget.remaining_prefill)
