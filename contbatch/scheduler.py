"""The scheduler: who computes how many tokens in the next step, and what happens to them afterwards.

`plan` lets a policy fill in one `Step` and returns an `IterationPlan`; `commit` takes the sampled tokens once the
forward pass succeeded; `rollback` undoes a plan whose forward pass did not. Between `plan` and `commit` the
granted tokens are in flight: blocks are held for them, but they do not count as computed.

The policy decides, the verbs of `Step` enforce the rules: a grant never exceeds the budget or what a request
owes, a refused allocation changes nothing, a victim is not admitted again in the same step. So a wrong policy
raises `PolicyError`; it cannot lose a block or a request. Swapping to host memory is not here yet.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from contbatch.blocks import NO_PARENT, BlockKey, BlockPool, block_hash, blocks_needed
from contbatch.budget import TokenBudget, at_least_one
from contbatch.errors import (
    ContbatchError,
    DuplicateRequest,
    IntegrityError,
    InvalidConfig,
    InvalidRequest,
    PolicyError,
    RequestTooLarge,
    SchedulerStalled,
)
from contbatch.plan import BlockReason, Grants, IterationPlan
from contbatch.request import FinishReason, Request, RequestStatus, RunningRequest
from contbatch.trace import Blocked
from contbatch.waiting import QueueKey, WaitingQueue

IDLE_LIMIT = 16
"""Steps in a row that may compute nothing while requests are unfinished."""
THRASH_LIMIT = 8
"""Pools full of tokens that may be computed again before any request gets further than it ever was."""


@dataclass(frozen=True)
class SchedulerConfig:
    """The limits that a scheduler works under. Names are vLLM's.

    Args:
        max_num_seqs: most requests running at once.
        max_num_batched_tokens: the token budget of one step.
        max_model_len: longest sequence, prompt and output together.
        block_size: tokens in a KV cache block.
        num_blocks: usable blocks in the pool (the null block comes on top).
        enable_chunked_prefill: whether a prompt may be computed over several steps.
        enable_prefix_caching: whether full blocks are found again by content.
        watermark: share of the pool that an admission must leave free while others run; in [0, 1).
        long_prefill_token_threshold: most prefill tokens of one request in a step while it is not alone; 0 is off.
        scheduler_reserve_full_isl: admit only if the whole known sequence would fit now.

    Raises:
        InvalidConfig: names the field, its value and what to use.
    """

    max_num_seqs: int = 16
    max_num_batched_tokens: int = 256
    max_model_len: int = 1024
    block_size: int = 16
    num_blocks: int = 512
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    watermark: float = 0.0
    long_prefill_token_threshold: int = 0
    scheduler_reserve_full_isl: bool = True

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "block_size",
            "num_blocks",
        ):
            at_least_one(name, getattr(self, name))
        threshold = self.long_prefill_token_threshold
        if isinstance(threshold, bool) or not isinstance(threshold, int) or threshold < 0:
            raise InvalidConfig(
                f"long_prefill_token_threshold is {threshold!r}; use an integer of at least 0, where 0 turns it off"
            )
        if not isinstance(self.watermark, int | float) or not 0 <= self.watermark < 1:
            raise InvalidConfig(f"watermark is {self.watermark!r}; use a share of the pool in [0, 1)")

    @property
    def watermark_blocks(self) -> int:
        """Blocks that an admission must leave free while others run."""
        return int(self.watermark * self.num_blocks)


class PrefixHit(NamedTuple):
    """Leading blocks of a sequence that the pool already holds."""

    blocks: tuple[int, ...] = ()
    num_tokens: int = 0


NO_HIT = PrefixHit()


class Policy(Protocol):
    """What a scheduling policy is: it names its budget and fills in a step."""

    name: str
    queue_key: QueueKey | None
    """Orders the waiting queue; None is first come, first served."""

    def token_budget(self, config: SchedulerConfig) -> TokenBudget:
        """A fresh budget for one step."""
        ...

    def schedule(self, step: Step) -> None:
        """Decide one step with the verbs of `step`."""
        ...

    def on_finish(self, request: RunningRequest) -> None:
        """A request ended, for whatever reason."""
        ...


class Output(NamedTuple):
    """What one committed step did for one request."""

    request: RunningRequest
    token_id: int | None
    finish_reason: FinishReason | None
    error: Exception | None = None


class Scheduler:
    """Keeps the waiting and the running requests and their blocks.

    Args:
        config: the limits.
        policy: decides each step.
        eos_token_ids: end-of-sequence tokens of the model.
        vocab_size: token ids must be below this; None accepts any.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        policy: Policy,
        eos_token_ids: frozenset[int] = frozenset(),
        vocab_size: int | None = None,
    ) -> None:
        self.config = config
        self.policy = policy
        self.eos_token_ids = eos_token_ids
        self.vocab_size = vocab_size
        self.pool = BlockPool(config.num_blocks, config.block_size)
        self.waiting = WaitingQueue(policy.queue_key)
        self.running: list[RunningRequest] = []
        self.requests: dict[str, RunningRequest] = {}
        self._free_slots = list(range(config.max_num_seqs))
        self._num_added = 0
        self._planned: Step | None = None
        self._to_abort: set[str] = set()
        self._idle_steps = 0
        self._tokens_without_progress = 0

    @property
    def has_unfinished(self) -> bool:
        """True while any request is waiting or running."""
        return bool(self.requests)

    # Requests come and go

    def add(self, request: Request) -> RunningRequest:
        """Queue a request.

        Raises:
            DuplicateRequest: the id belongs to an unfinished request.
            InvalidRequest: a token id outside the vocabulary.
            RequestTooLarge: it could never finish under these limits; the message says which and what to change.
        """
        if request.request_id in self.requests:
            raise DuplicateRequest(
                f"request id {request.request_id!r} is in use by an unfinished request; use another id"
            )
        self._check_vocabulary(request)
        max_tokens = self._fitting_max_tokens(request)
        record = RunningRequest(request, self._num_added, max_tokens)
        self._num_added += 1
        self.requests[request.request_id] = record
        self.waiting.push(record)
        return record

    def _check_vocabulary(self, request: Request) -> None:
        largest = max(request.prompt_token_ids)
        if self.vocab_size is not None and largest >= self.vocab_size:
            raise InvalidRequest(
                f"request {request.request_id!r}: token id {largest} is outside the vocabulary; "
                f"use ids from 0 to {self.vocab_size - 1}"
            )

    def _fitting_max_tokens(self, request: Request) -> int:
        """The most tokens this request can generate; raises RequestTooLarge if that can never be done."""
        config, name = self.config, f"request {request.request_id!r}"
        prompt = len(request.prompt_token_ids)
        if prompt >= config.max_model_len:
            raise RequestTooLarge(
                f"{name}: a prompt of {prompt} tokens leaves no room for output within max_model_len="
                f"{config.max_model_len}; shorten the prompt or raise max_model_len"
            )
        if not config.enable_chunked_prefill and prompt > config.max_num_batched_tokens:
            raise RequestTooLarge(
                f"{name}: a prompt of {prompt} tokens exceeds max_num_batched_tokens="
                f"{config.max_num_batched_tokens} and chunked prefill is off; raise the budget or turn it on"
            )
        room = config.max_model_len - prompt
        capacity = config.num_blocks * config.block_size
        asked = request.sampling.max_tokens
        max_tokens = min(room, max(1, capacity + 1 - prompt)) if asked is None else min(asked, room)
        if prompt + max_tokens - 1 > capacity:
            raise RequestTooLarge(
                f"{name}: {prompt} prompt tokens and max_tokens={max_tokens} need "
                f"{blocks_needed(prompt + max_tokens - 1, config.block_size)} blocks, the whole pool has "
                f"num_blocks={config.num_blocks}; lower max_tokens or raise num_blocks"
            )
        return max_tokens

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state it is; False if no unfinished request has this id.

        A request with tokens in flight ends when its step is committed, without the token of that step.
        """
        request = self.requests.get(request_id)
        if request is None:
            return False
        if request.num_in_flight:
            self._to_abort.add(request_id)
        else:
            self.finish(request, FinishReason.ABORT)
        return True

    def finish(self, request: RunningRequest, reason: FinishReason) -> None:
        """End a request and return everything it holds."""
        del reason
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._release(request)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        del self.requests[request.request_id]
        self._to_abort.discard(request.request_id)
        self.policy.on_finish(request)

    def _release(self, request: RunningRequest) -> None:
        """Return a request's blocks and its slot."""
        self.pool.release(request.block_table)
        request.block_table.clear()
        request.num_hashed_blocks = 0
        heapq.heappush(self._free_slots, request.kv_cache_slot)
        request.kv_cache_slot = -1

    # One step

    def plan(self) -> IterationPlan:
        """Let the policy decide the next step.

        Raises:
            PolicyError: the policy broke a rule or raised; its grants are undone.
            SchedulerStalled: nothing has moved for too long; names a request and the reason.
        """
        if self._planned is not None:
            raise PolicyError("the last plan is neither committed nor rolled back; do one of them first")
        self._watch_thrashing()
        step = Step(self, self.policy.token_budget(self.config))
        try:
            self.policy.schedule(step)
        except Exception as error:
            step.undo()
            if isinstance(error, ContbatchError):
                raise
            raise PolicyError(f"policy {self.policy.name} raised {error!r}; its grants were undone") from error
        plan = step.to_plan()
        self._watch_idle(plan)
        self._planned = step
        return plan

    def commit(self, plan: IterationPlan, sampled: Mapping[str, int | Exception]) -> list[Output]:
        """Count the granted tokens as computed and append the sampled ones.

        Args:
            plan: the plan that was executed.
            sampled: a token for every request that has no tokens left to compute, or the exception that its
                sampling raised.

        Returns:
            one entry for each request that got a token or ended.
        """
        self._take_planned(plan)
        grants = plan.grants or Grants()
        outputs: list[Output] = []
        for request, count in zip(grants.requests, grants.counts, strict=True):
            request.num_in_flight = 0
            computed = request.num_computed_tokens = request.num_computed_tokens + count
            if computed > request.high_water:
                request.high_water = computed
                self._tokens_without_progress = 0
            else:
                self._tokens_without_progress += count
            if request.request_id in self._to_abort:
                self.finish(request, FinishReason.ABORT)
                outputs.append(Output(request, None, FinishReason.ABORT))
            elif computed == len(request.token_ids):
                outputs.append(self._append(request, sampled.get(request.request_id)))
        return outputs

    def rollback(self, plan: IterationPlan) -> None:
        """Undo a plan whose forward pass failed: grants and admissions go back; its preemptions stand."""
        self._take_planned(plan).undo()
        for request_id in sorted(self._to_abort):
            self.abort(request_id)

    def _take_planned(self, plan: IterationPlan) -> Step:
        step = self._planned
        if step is None or step.grants is not plan.grants:
            raise PolicyError("this plan is not the one that is in flight; commit each plan once")
        self._planned = None
        return step

    def _append(self, request: RunningRequest, token: int | Exception | None) -> Output:
        """Append a sampled token and see whether the request ends with it."""
        error = self._token_error(token)
        if error is not None or not isinstance(token, int):
            self.pool_forget_from(request, 0)
            self.finish(request, FinishReason.ERROR)
            return Output(request, None, FinishReason.ERROR, error)
        request.token_ids.append(token)
        reason = self._stop_reason(request, token)
        if reason is not None:
            self.finish(request, reason)
        return Output(request, token, reason)

    def _token_error(self, token: int | Exception | None) -> Exception | None:
        if isinstance(token, Exception):
            return token
        if token is None:
            return InvalidRequest("the executor returned no token for a request that was due one")
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            return InvalidRequest(f"the executor returned {token!r}, which is not a token id")
        if self.vocab_size is not None and token >= self.vocab_size:
            return InvalidRequest(f"the executor returned {token}, outside the vocabulary of {self.vocab_size}")
        return None

    def _stop_reason(self, request: RunningRequest, token: int) -> FinishReason | None:
        """The order of vLLM: end of sequence, stop token ids, then length."""
        sampling = request.request.sampling
        if token in self.eos_token_ids and not sampling.ignore_eos:
            return FinishReason.EOS
        if token in sampling.stop_token_ids:
            return FinishReason.STOP
        if request.num_output_tokens >= request.max_tokens:
            return FinishReason.LENGTH
        return None

    # Liveness

    def _watch_idle(self, plan: IterationPlan) -> None:
        self._idle_steps = 0 if plan.has_work or not self.requests else self._idle_steps + 1
        if self._idle_steps > IDLE_LIMIT:
            raise SchedulerStalled(
                f"{self._idle_steps} steps in a row computed nothing while {len(self.requests)} requests are "
                f"unfinished; {self._diagnosis(plan)}"
            )

    def _watch_thrashing(self) -> None:
        limit = THRASH_LIMIT * self.config.num_blocks * self.config.block_size
        if self._tokens_without_progress > limit:
            raise SchedulerStalled(
                f"{self._tokens_without_progress} tokens were computed again and no request got further than "
                f"before; {self._diagnosis(None)}"
            )

    def _diagnosis(self, plan: IterationPlan | None) -> str:
        request = next(iter(self.requests.values()))
        blocked = plan.blocked.get(request.request_id) if plan else None
        why = f"blocked by {blocked.reason}" if blocked else f"preempted {request.num_preemptions} times"
        return (
            f"{request!r} is {why}, with {self.pool.num_free} of {self.pool.num_blocks} blocks free under policy "
            f"{self.policy.name}; give the pool more blocks or let the policy grant what a request owes"
        )

    # Prefix index

    def _keys(self, request: RunningRequest, count: int) -> Iterator[BlockKey]:
        """Keys of the first `count` full blocks of a sequence."""
        size = self.config.block_size
        hashes = request.block_hashes
        for index in range(count):
            parent = hashes[index - 1] if index else NO_PARENT
            tokens = tuple(request.token_ids[index * size : (index + 1) * size])
            if index == len(hashes):
                hashes.append(block_hash(parent, tokens))
            yield BlockKey(hashes[index], parent, tokens)

    def pool_remember_until(self, request: RunningRequest, num_tokens: int) -> None:
        """Enter the full blocks within the first `num_tokens` tokens into the prefix index."""
        full = num_tokens // self.config.block_size
        if full <= request.num_hashed_blocks or not self.config.enable_prefix_caching:
            return
        for index, key in enumerate(self._keys(request, full)):
            if index >= request.num_hashed_blocks:
                self.pool.remember(request.block_table[index], key)
        request.num_hashed_blocks = full

    def pool_forget_from(self, request: RunningRequest, num_tokens: int) -> None:
        """Take the blocks that are not full within the first `num_tokens` tokens out of the index again.

        Blocks that other requests hold too stay: those requests computed or checked them.
        """
        keep = num_tokens // self.config.block_size
        for block in request.block_table[keep : request.num_hashed_blocks]:
            if self.pool.ref_count[block] == 1:
                self.pool.forget(block)
        request.num_hashed_blocks = min(keep, request.num_hashed_blocks)

    def check(self) -> None:
        """Prove the rules about blocks, slots and membership for every live request.

        Raises:
            IntegrityError: names what is wrong.
        """
        self.pool.check([request.block_table for request in self.requests.values()])
        members = [*self.waiting, *self.running]
        if sorted(map(id, members)) != sorted(map(id, self.requests.values())):
            raise IntegrityError("a request is lost, or is in two queues at once")
        slots = [request.kv_cache_slot for request in self.running]
        if sorted([*slots, *self._free_slots]) != list(range(self.config.max_num_seqs)):
            raise IntegrityError(f"slots are lost or shared: {slots} in use, {sorted(self._free_slots)} free")
        for request in self.requests.values():
            self._check_request(request)

    def _check_request(self, request: RunningRequest) -> None:
        if request.status is not RequestStatus.RUNNING:
            if request.block_table or request.num_computed_tokens or request.num_in_flight:
                raise IntegrityError(f"{request!r} is not running and must hold nothing")
            return
        planned = request.num_computed_tokens + request.num_in_flight
        if len(request.block_table) < blocks_needed(planned, self.config.block_size):
            raise IntegrityError(f"{request!r}: its block table does not cover its {planned} tokens")
        if planned > len(request.token_ids):
            raise IntegrityError(f"{request!r}: {planned} tokens are computed or in flight, more than are known")


@dataclass
class _Undo:
    """What one grant took, so that it can be given back."""

    num_new_blocks: int
    admitted_from: RequestStatus | None = None


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
        keys = self._scheduler._keys(request, (len(request.token_ids) - 1) // size)
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
        if request.status is not RequestStatus.RUNNING:
            raise PolicyError(f"grant to {request!r}, which is not running; admit it first")
        self._check_grant(request, num_tokens, request.owed)
        end = max(request.num_computed_tokens + num_tokens, hold or 0)
        needed = blocks_needed(end, self.config.block_size) - len(request.block_table)
        if needed > 0:
            blocks = self._pool.take(needed)
            if blocks is None:
                return False
            request.block_table += blocks
            self._new_blocks[request.request_id] = blocks
        self._undo[request.request_id] = _Undo(max(needed, 0))
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
            PolicyError: it is not waiting, no seat is free, or `num_tokens` breaks a limit.
        """
        self._check_admission(request)
        self._check_grant(request, num_tokens, request.owed - hit.num_tokens)
        size = self.config.block_size
        held = len(hit.blocks)
        take = blocks_needed(max(hit.num_tokens + num_tokens, hold or 0), size) - held
        must_fit = max(take, blocks_needed(fit or 0, size) - held)
        if must_fit + self._pool.num_unreferenced(hit.blocks) + spare > self._pool.num_free:
            return False
        self._pool.share(hit.blocks)
        table = [*hit.blocks, *(self._pool.take(take) or ())]
        self._move_to_running(request, table, hit)
        self._record_grant(request, num_tokens)
        return True

    def _move_to_running(self, request: RunningRequest, table: list[int], hit: PrefixHit) -> None:
        scheduler = self._scheduler
        self._undo[request.request_id] = _Undo(len(table), admitted_from=request.status)
        scheduler.waiting.remove(request)
        scheduler.running.append(request)
        request.status = RequestStatus.RUNNING
        request.kv_cache_slot = heapq.heappop(scheduler._free_slots)
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
        self._scheduler.pool_forget_from(request, request.num_computed_tokens)
        self._new_blocks.pop(request.request_id, None)
        if undo.admitted_from is not None:
            self._send_away(request, undo.admitted_from)
            self._scheduler.waiting.push_front(request)
        elif undo.num_new_blocks:
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
        if request.status is not RequestStatus.RUNNING:
            raise PolicyError(f"{request!r} is not running; only running requests can be preempted")
        undo = self._undo.get(request.request_id)
        if undo is not None:
            self.take_back(request)
        if undo is not None and undo.admitted_from is not None:
            return
        self._send_away(request, RequestStatus.PREEMPTED)
        request.num_preemptions += 1
        self.victims.append(request)
        queue = self._scheduler.waiting
        (queue.push if to_back else queue.push_front)(request)

    def skip(self, request: RunningRequest, reason: BlockReason, needs: int = 0, left: int = 0) -> None:
        """Write down why `request` gets nothing in this step: what it needed and what was left."""
        self._blocked[request.request_id] = Blocked(reason.value, needs, left)

    # Rules

    def _check_admission(self, request: RunningRequest) -> None:
        if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            raise PolicyError(f"admit {request!r}, which is not waiting; grant tokens to a running request")
        if self._scheduler.requests.get(request.request_id) is not request:
            raise PolicyError(f"admit {request!r}, which this scheduler does not know; admit from step.waiting")
        if request in self.victims:
            raise PolicyError(f"{request!r} was preempted in this step; it cannot be admitted in the same step")
        if self.seats_left < 1:
            raise PolicyError(f"admit {request!r}: all {self.config.max_num_seqs} seats (max_num_seqs) are taken")

    def _check_grant(self, request: RunningRequest, num_tokens: int, owed: int) -> None:
        if request.request_id in self._undo:
            raise PolicyError(f"{request!r} was already granted tokens in this step")
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
        self._scheduler.pool_remember_until(request, request.num_computed_tokens + num_tokens)

    def _send_away(self, request: RunningRequest, status: RequestStatus) -> None:
        scheduler = self._scheduler
        scheduler.running.remove(request)
        scheduler._release(request)
        request.num_computed_tokens = 0
        request.status = status
        self._cached.pop(request.request_id, None)

    # The end of planning

    def undo(self) -> None:
        """Take back every grant, the last one first, so that shared blocks are given up before they are undone."""
        for request in reversed(list(self.grants.requests)):
            self.take_back(request)

    def to_plan(self) -> IterationPlan:
        """What was decided."""
        joined = {
            request_id: undo.admitted_from for request_id, undo in self._undo.items() if undo.admitted_from is not None
        }
        self._explain_head()
        decisions: dict[str, Any] = {
            "evicted_requests": tuple(request.request_id for request in self.victims),
            "admitted": tuple(i for i, was in joined.items() if was is RequestStatus.WAITING),
            "resumed": tuple(i for i, was in joined.items() if was is RequestStatus.PREEMPTED),
            "cached": self._cached,
            "new_blocks": {i: blocks for i, blocks in self._new_blocks.items() if blocks},
            "blocked": self._blocked,
            "num_waiting": len(self.waiting),
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
