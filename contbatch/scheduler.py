"""The scheduler: who computes how many tokens in the next step, and what happens to them afterwards.

`plan` lets a policy fill in one `Step` and returns an `IterationPlan`; `commit` takes the sampled tokens once the
forward pass succeeded; `rollback` undoes a plan whose forward pass did not. Between `plan` and `commit` the
granted tokens are in flight: blocks are held for them, but they do not count as computed.

The policy decides, with the verbs of `contbatch.step`, which enforce the rules. The scheduler knows block ids only,
of the device and of host memory; the executor owns what is in them and copies it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple, TypeVar

from contbatch.batch import UNKNOWN_TOKEN
from contbatch.blocks import NO_PARENT, BlockKey, BlockPool, block_hash, blocks_needed
from contbatch.budget import TokenBudget
from contbatch.config import SchedulerConfig
from contbatch.errors import (
    ContbatchError,
    DuplicateRequest,
    IntegrityError,
    InvalidConfig,
    InvalidRequest,
    PolicyError,
    QueueFull,
    RequestTooLarge,
    SchedulerStalled,
)
from contbatch.plan import Grants, IterationPlan
from contbatch.policy import Policy
from contbatch.request import MAX_TOKEN_ID, FinishReason, Request, RequestStatus, RunningRequest, SamplingParams
from contbatch.step import Step
from contbatch.swap import HostPool
from contbatch.waiting import WaitingQueue

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")

IDLE_LIMIT = 16
"""Steps in a row that may compute nothing while requests are unfinished."""
THRASH_LIMIT = 8
"""Pools full of tokens that may be computed again before any request gets further than it ever was."""


class Output(NamedTuple):
    """What one committed step did for one request."""

    request: RunningRequest
    token_id: int | None
    finish_reason: FinishReason | None = None
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
        if isinstance(policy, type):
            raise InvalidConfig(f"policy is the class {policy.__name__}; pass an instance, {policy.__name__}()")
        self.config = config
        self.policy = policy
        self.eos_token_ids = frozenset(eos_token_ids)
        self.vocab_size = vocab_size
        self.num_token_ids = MAX_TOKEN_ID + 1 if vocab_size is None else vocab_size
        self.pool = BlockPool(config.num_blocks, config.block_size)
        self.host = HostPool(config.num_host_blocks, config.block_size)
        self.waiting = WaitingQueue(policy.queue_key)
        self.running: list[RunningRequest] = []
        self.requests: dict[str, RunningRequest] = {}
        self.free_slots = list(range(config.max_num_seqs))
        self._num_added = 0
        self._num_planned = 0
        self._planned: Step | None = None
        self.fresh_blocks: list[int] = []
        """Blocks that entered the prefix index with the last plan."""
        self._to_abort: set[str] = set()
        self._idle_steps = 0
        self._tokens_without_progress = 0
        self._policy_fault: BaseException | None = None

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
        self._check_queue(request)
        end_tokens = self._end_tokens(request.sampling)
        record = RunningRequest(request, self._num_added, max_tokens, self._num_planned, end_tokens)
        self._num_added += 1
        self.requests[request.request_id] = record
        self.waiting.push(record)
        self._greet(record)
        return record

    def _end_tokens(self, sampling: SamplingParams) -> frozenset[int]:
        eos = frozenset[int]() if sampling.ignore_eos else self.eos_token_ids
        return eos.union(sampling.stop_token_ids)

    def _greet(self, record: RunningRequest) -> None:
        """Tell the policy of a new request; if it cannot cope with it, the request is not accepted."""
        fault: BaseException | None
        fault, self.waiting.fault = self.waiting.fault, None
        try:
            if fault is None:
                self.policy.on_add(record)
        except BaseException as error:
            fault = error
        if fault is None:
            return
        if self.requests.get(record.request_id) is record:
            self.waiting.remove(record)
            del self.requests[record.request_id]
        if not isinstance(fault, Exception):
            raise fault
        raise PolicyError(
            f"policy {self.policy.name} raised {fault!r} for request {record.request_id!r}, which was not added"
        ) from fault

    def _check_queue(self, request: Request) -> None:
        config, queued = self.config, len(self.waiting)
        if config.max_num_queued_reqs is not None and queued >= config.max_num_queued_reqs:
            raise QueueFull(
                f"request {request.request_id!r}: {queued} requests are queued, max_num_queued_reqs="
                f"{config.max_num_queued_reqs}; send it again later"
            )
        tokens = self.waiting.num_tokens + len(request.prompt_token_ids)
        if config.max_num_queued_tokens is not None and queued and tokens > config.max_num_queued_tokens:
            raise QueueFull(
                f"request {request.request_id!r}: with its prompt {tokens} tokens would be queued, "
                f"max_num_queued_tokens={config.max_num_queued_tokens}; send it again later"
            )

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
        budget = self._budget()
        whole = min(budget.max_prefill_tokens, budget.max_total_tokens)
        if not config.enable_chunked_prefill and prompt > whole:
            raise RequestTooLarge(
                f"{name}: a prompt of {prompt} tokens exceeds the {whole} prefill tokens of a step under policy "
                f"{self.policy.name} (max_num_batched_tokens={config.max_num_batched_tokens}) and chunked prefill is "
                "off; raise the budget or turn it on"
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
        """End a request and return everything it holds.

        Raises:
            InvalidRequest: it has ended already, or its tokens are in flight (`abort` waits for them).
        """
        del reason
        if self.requests.get(request.request_id) is not request or request.num_in_flight:
            raise InvalidRequest(f"{request!r} has ended or is being computed; abort it instead")
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self.release(request)
        else:
            self.waiting.remove(request)
        self.leave_host(request)
        request.status = RequestStatus.FINISHED
        del self.requests[request.request_id]
        self._to_abort.discard(request.request_id)
        self._tokens_without_progress = 0
        try:
            self.policy.on_finish(request)
        except BaseException as error:  # the request has ended all the same; it is reported afterwards
            self._policy_fault = error

    def let_go(self, request: RunningRequest) -> None:
        """Its step was launched and runs to its end; what it computes for this request will be thrown away."""
        request.num_in_flight = 0

    def revive(self, request: RunningRequest) -> None:
        """A request that ended in a step that failed is back, first in the queue."""
        self.requests[request.request_id] = request
        self.waiting.insert(0, request)
        try:
            self.policy.on_add(request)
        except BaseException as error:  # as in `finish`
            self._policy_fault = error

    def release(self, request: RunningRequest) -> None:
        """Return a request's blocks and its slot."""
        self.pool.release(request.block_table)
        request.block_table.clear()
        request.num_hashed_blocks = request.num_reserved_tokens = 0
        heapq.heappush(self.free_slots, request.kv_cache_slot)
        request.kv_cache_slot = -1

    def leave_host(self, request: RunningRequest) -> None:
        """Return a request's blocks in host memory."""
        self.host.release(request.host_table)
        request.host_table = []

    # One step

    def plan(self) -> IterationPlan:
        """Let the policy decide the next step.

        Raises:
            PolicyError: the policy broke a rule or raised; its grants are undone.
            SchedulerStalled: nothing has moved for too long; names a request and the reason.
        """
        if self._planned is not None:
            raise PolicyError("the last plan is neither committed nor rolled back; do one of them first")
        self.report_policy_fault()
        self._watch_thrashing()
        budget = self._budget()
        budget.reset()
        self.fresh_blocks = []
        step = Step(self, budget)
        try:
            self._ask_policy(self.policy.schedule, step)
            plan = step.to_plan()
            self._watch_idle(plan)
        except BaseException:  # an interrupt from the keyboard must not leave half a step behind either
            step.undo()
            raise
        self._num_planned += 1
        self._planned = step
        return plan

    def _budget(self) -> TokenBudget:
        budget: object = self._ask_policy(self.policy.token_budget, self.config)
        if not isinstance(budget, TokenBudget):
            raise PolicyError(f"token_budget of policy {self.policy.name} gave {budget!r}; return a TokenBudget")
        return budget

    def _ask_policy(self, hook: Callable[[Asked], Answer], argument: Asked) -> Answer:
        try:
            return hook(argument)
        except ContbatchError:
            raise
        except Exception as error:
            raise PolicyError(f"policy {self.policy.name} raised {error!r}; its grants were undone") from error

    def commit(self, plan: IterationPlan, sampled: Mapping[str, int | Exception]) -> list[Output]:
        """Count the granted tokens as computed and append the sampled ones.

        Args:
            plan: the plan that was executed.
            sampled: a token for every request that has no tokens left to compute, or the exception that its
                sampling raised.

        Returns:
            one entry for each request that got a token or ended.
        """
        step = self.take_planned(plan)
        grants = plan.grants or Grants()
        for request in step.swapped_in:
            self.leave_host(request)
        outputs: list[Output] = []
        plain = partial(tuple.__new__, Output)  # half the cost of calling Output
        num_ids, to_abort, get = self.num_token_ids, self._to_abort, sampled.get
        for request, count in zip(grants.requests, grants.counts, strict=True):
            request.num_in_flight = 0
            computed = request.num_computed_tokens = request.num_computed_tokens + count
            if computed > request.high_water:
                request.high_water = computed
                self._tokens_without_progress = 0
            else:
                self._tokens_without_progress += count
            tokens, name = request.token_ids, request.request_id
            if to_abort and name in to_abort:
                self.finish(request, FinishReason.ABORT)
                outputs.append(Output(request, None, FinishReason.ABORT))
            elif computed == len(tokens):
                token = get(name)
                if type(token) is not int or not 0 <= token < num_ids:
                    outputs.append(self._fail(request, token))
                    continue
                tokens.append(token)
                if token in request.end_token_ids or computed + 1 >= request.max_total_tokens:
                    outputs.append(self.end(request, token))
                else:
                    outputs.append(plain((request, token, None, None)))
        return outputs

    def note_progress(self, request: RunningRequest, end: int, count: int) -> None:
        """Count tokens that were computed up to `end`: did the request get further than it ever was?"""
        if end > request.high_water:
            request.high_water = end
            self._tokens_without_progress = 0
        else:
            self._tokens_without_progress += count

    def rollback(self, plan: IterationPlan) -> list[Output]:
        """Undo a plan whose forward pass failed: grants and admissions go back; its preemptions stand.

        Returns:
            one entry for each request that was to be aborted when the step was over.
        """
        self.take_planned(plan).undo()
        aborted = [request for request in self.requests.values() if request.request_id in self._to_abort]
        for request in aborted:
            self.finish(request, FinishReason.ABORT)
        return [Output(request, None, FinishReason.ABORT) for request in aborted]

    def take_planned(self, plan: IterationPlan) -> Step:
        step = self._planned
        if step is None or plan.grants is None or not step.made(plan):
            raise PolicyError("this plan is not the one that is in flight; commit each plan once")
        self._planned = None
        return step

    def _fail(self, request: RunningRequest, token: object) -> Output:
        """What its executor gave is no token: the request ends, and its last blocks are not trusted."""
        self.forget_blocks(request, 0)
        self.finish(request, FinishReason.ERROR)
        return Output(request, None, FinishReason.ERROR, self.token_error(token))

    def end(self, request: RunningRequest, token: int) -> Output:
        reason = self.finish_reason(request, token)
        self.finish(request, reason)
        return Output(request, token, reason)

    def token_error(self, token: object) -> Exception:
        if isinstance(token, Exception):
            return token
        if token is None:
            return InvalidRequest("the executor returned no token for a request that was due one")
        if isinstance(token, int) and not isinstance(token, bool) and token > 0 and self.vocab_size is not None:
            return InvalidRequest(f"the executor returned {token}, outside the vocabulary of {self.vocab_size}")
        return InvalidRequest(f"the executor returned {token!r}, which is not a token id")

    def finish_reason(self, request: RunningRequest, token: int) -> FinishReason:
        """The order of vLLM: end of sequence, stop token ids, then length."""
        sampling = request.request.sampling
        if token in self.eos_token_ids and not sampling.ignore_eos:
            return FinishReason.EOS
        return FinishReason.STOP if token in sampling.stop_token_ids else FinishReason.LENGTH

    # Liveness

    def report_policy_fault(self) -> None:
        """Raise what the policy raised where its exception had to wait: in `on_finish` or in its queue key.

        Raises:
            PolicyError: once for each fault; the request concerned was handled all the same.
        """
        fault, self._policy_fault = self._policy_fault or self.waiting.fault, None
        if fault is not None:
            self.waiting.fault = None
            if not isinstance(fault, Exception):
                raise fault
            raise PolicyError(f"policy {self.policy.name} raised {fault!r} in on_finish or queue_key") from fault

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
        why = f"is blocked by {blocked.reason}" if blocked else "gets no tokens"
        missing = blocks_needed(len(request.token_ids), self.config.block_size) - len(request.block_table)
        fits = missing <= self.pool.num_free
        fix = "let the policy grant what a request owes" if fits else "raise num_blocks or lower max_num_seqs"
        return (
            f"{request!r} {why} and was preempted {request.num_preemptions} times, with {self.pool.num_free} of "
            f"{self.pool.num_blocks} blocks free under policy {self.policy.name}; {fix}"
        )

    # Prefix index

    def block_key(self, request: RunningRequest, index: int) -> BlockKey:
        """Key of a full block of a sequence; the hashes of those before it are known already."""
        size, hashes = self.config.block_size, request.block_hashes
        parent = hashes[index - 1] if index else NO_PARENT
        tokens = tuple(request.token_ids[index * size : (index + 1) * size])
        if index == len(hashes):
            hashes.append(block_hash(parent, tokens))
        return BlockKey(hashes[index], parent, tokens)

    def block_keys(self, request: RunningRequest, count: int) -> Iterator[BlockKey]:
        """Keys of the first `count` full blocks of a sequence."""
        return (self.block_key(request, index) for index in range(count))

    def remember_blocks(self, request: RunningRequest, num_tokens: int) -> None:
        """Enter the full blocks within the first `num_tokens` tokens into the prefix index."""
        full = num_tokens // self.config.block_size
        if full <= request.num_hashed_blocks or not self.config.enable_prefix_caching:
            return
        if request.token_ids[full * self.config.block_size - 1] == UNKNOWN_TOKEN:
            full -= 1  # its content is known, and entered, when the token is
        self.fresh_blocks += request.block_table[request.num_hashed_blocks : full]
        for index in range(request.num_hashed_blocks, full):
            self.pool.remember(request.block_table[index], self.block_key(request, index))
        request.num_hashed_blocks = full

    def forget_blocks(self, request: RunningRequest, keep: int) -> None:
        """Take all but the first `keep` blocks out of the index again.

        Blocks that other requests hold too stay: those requests computed or checked them.
        """
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
        self.host.check([request.host_table for request in self.requests.values()])
        members = [*self.waiting, *self.running]
        if sorted(map(id, members)) != sorted(map(id, self.requests.values())):
            raise IntegrityError("a request is lost, or is in two queues at once")
        slots = [request.kv_cache_slot for request in self.running]
        if sorted([*slots, *self.free_slots]) != list(range(self.config.max_num_seqs)):
            raise IntegrityError(f"slots are lost or shared: {slots} in use, {sorted(self.free_slots)} free")
        for request in self.requests.values():
            self._check_request(request)

    def _check_request(self, request: RunningRequest) -> None:
        if request.status is not RequestStatus.RUNNING:
            kept = blocks_needed(request.num_computed_tokens, self.config.block_size)
            if request.block_table or request.num_in_flight or len(request.host_table) != kept:
                raise IntegrityError(f"{request!r} is not running and must hold nothing but {kept} host blocks")
            if (request.status is RequestStatus.SWAPPED) != (kept > 0):
                raise IntegrityError(f"{request!r} has {kept} blocks of computed tokens, which its status denies")
            return
        planned = request.num_computed_tokens + request.num_in_flight
        covered = blocks_needed(max(planned, request.num_reserved_tokens), self.config.block_size)
        if len(request.block_table) != covered:
            raise IntegrityError(f"{request!r}: its {planned} tokens (and what is reserved) take {covered} blocks")
        known = list(self.block_keys(request, request.num_hashed_blocks))
        if [self.pool.key(block) for block in request.block_table[: len(known)]] != known:
            raise IntegrityError(f"{request!r}: the prefix index does not know its first {len(known)} blocks")
        if any(self.pool.ref_count[block] > 1 for block in request.block_table[len(known) :]):
            raise IntegrityError(f"{request!r}: a block that is not full is shared")
        if planned > len(request.token_ids):
            raise IntegrityError(f"{request!r}: {planned} tokens are computed or in flight, more than are known")
