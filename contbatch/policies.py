"""Scheduling policies: who gets tokens in a step, in a few lines each.

Every policy is written with the verbs of `Step` and decides nothing that the verbs do not allow. A policy named
after an engine decides exactly as that engine does; its docstring says on how many recorded steps that was
checked.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable

from contbatch.budget import UNLIMITED, TokenBudget, at_least_one
from contbatch.config import SchedulerConfig
from contbatch.errors import InvalidConfig, UnknownName
from contbatch.plan import BlockReason
from contbatch.request import RunningRequest
from contbatch.step import Policy, Step
from contbatch.waiting import QueueKey


class FirstComeFirstServed:
    """What the policies here share: queue in order of arrival, one budget of max_num_batched_tokens."""

    queue_key: QueueKey | None = None

    @property
    def name(self) -> str:
        """The class name."""
        return type(self).__name__

    def token_budget(self, config: SchedulerConfig) -> TokenBudget:
        """One limit for prefill and decode together."""
        return TokenBudget.of(config.max_num_batched_tokens)

    def on_finish(self, request: RunningRequest) -> None:
        """Nothing to remember."""


class VllmV1(FirstComeFirstServed):
    """The scheduler of vLLM v1 (0.33.0): running requests first, in admission order, then waiting ones.

    One token budget for prefill and decode. When blocks run out the newest running request (with
    `order="priority"` the least urgent one) is preempted and goes to the front of the queue; in such a step nobody
    is admitted. Equal to the recorded decisions of `tests/golden/vllm_v1.json`: 42 runs, 4,067 steps, block ids
    included. Differs on purpose: blocks planned for a victim in the same step leave the prefix index again.

    Args:
        order: "fcfs" or "priority" (lower number first, then arrival).
    """

    def __init__(self, order: str = "fcfs") -> None:
        if order not in ("fcfs", "priority"):
            raise InvalidConfig(f'order is {order!r}; use "fcfs" or "priority"')
        self.by_priority = order == "priority"
        self.queue_key = _urgency if self.by_priority else None

    def schedule(self, step: Step) -> None:
        """Running first; waiting only if nobody had to go."""
        self._grant_running(step)
        if not step.victims:
            self._admit_waiting(step)

    def _grant_running(self, step: Step) -> None:
        index = 0
        while index < len(step.running) and not step.budget.is_exhausted:
            request = step.running[index]
            num_tokens = min(_capped(step, request.owed), step.tokens_left(request))
            while not step.grant(request, num_tokens):
                victim = max(step.running, key=_urgency) if self.by_priority else step.running[-1]
                index -= step.running.index(victim) < index
                step.preempt(victim)
                if victim is request:
                    break
            else:
                index += 1

    def _admit_waiting(self, step: Step) -> None:
        config = step.config
        while step.waiting and step.seats_left and not step.budget.is_exhausted:
            request = step.waiting.head
            hit = step.cached_prefix(request)
            left = step.tokens_left(request)
            num_tokens = _capped(step, request.owed - hit.num_tokens)
            if _waits_to_be_whole(step, num_tokens, left):
                return step.skip(request, BlockReason.BUDGET, num_tokens, left)
            fit = len(request.token_ids) if config.scheduler_reserve_full_isl else None
            spare = config.watermark_blocks if step.running else 0
            if not step.admit(request, min(num_tokens, left), hit, fit=fit, spare=spare):
                return step.skip(request, BlockReason.BLOCKS, *_blocks_short(step, request, hit.num_tokens))


class StaticBatching(FirstComeFirstServed):
    """The baseline: admit a batch, run it until its last member has finished, only then admit the next.

    Whole prompts in one step and no token budget. Seats of finished members stay empty.

    Args:
        batch_size: most requests in a batch; None means max_num_seqs.
    """

    def __init__(self, batch_size: int | None = None) -> None:
        if batch_size is not None:
            at_least_one("batch_size", batch_size)
        self.batch_size = batch_size

    def token_budget(self, config: SchedulerConfig) -> TokenBudget:
        """None is declared."""
        return TokenBudget.of(UNLIMITED)

    def schedule(self, step: Step) -> None:
        """Decode the batch; when it is empty, fill a new one."""
        if step.running:
            return _grant_in_order(step)
        size = min(self.batch_size or step.config.max_num_seqs, step.config.max_num_seqs)
        while step.waiting and len(step.running) < size:
            request = step.waiting.head
            hit = step.cached_prefix(request)
            if not step.admit(request, request.owed - hit.num_tokens, hit):
                return step.skip(request, BlockReason.BLOCKS, *_blocks_short(step, request, hit.num_tokens))


class PrefillDecodeBudget(FirstComeFirstServed):
    """Separate limits for prefill and decode tokens: the order of the layer that this package grew from.

    Decodes first in admission order, then chunks of running and of preempted prompts, then new requests first
    come, first served, each cut to what is left of the budget. Nobody behind a request that does not fit is
    admitted. When blocks run out the newest running request is preempted.

    Args:
        max_prefill: prefill tokens in a step; None means max_num_batched_tokens.
        max_decode: decode tokens in a step; None means max_num_seqs.
        max_total: tokens in a step; None means max_num_batched_tokens.
    """

    def __init__(
        self,
        max_prefill: int | None = None,
        max_decode: int | None = None,
        max_total: int | None = None,
    ) -> None:
        for name, limit in (
            ("max_prefill", max_prefill),
            ("max_decode", max_decode),
            ("max_total", max_total),
        ):
            if limit is not None:
                at_least_one(name, limit)
        self.max_prefill, self.max_decode, self.max_total = max_prefill, max_decode, max_total

    def token_budget(self, config: SchedulerConfig) -> TokenBudget:
        """Three limits."""
        total = self.max_total or config.max_num_batched_tokens
        return TokenBudget(self.max_prefill or total, self.max_decode or config.max_num_seqs, total)

    def schedule(self, step: Step) -> None:
        """Decodes, ongoing prefills, then the queue."""
        _grant_in_order(step, decodes=True)
        _grant_in_order(step, decodes=False)
        while step.waiting and step.seats_left and step.budget.remaining_prefill and not step.victims:
            request = step.waiting.head
            hit = step.cached_prefix(request)
            num_tokens, left = request.owed - hit.num_tokens, step.budget.remaining_prefill
            if _waits_to_be_whole(step, num_tokens, left):
                return step.skip(request, BlockReason.BUDGET, num_tokens, left)
            if not step.admit(request, min(num_tokens, left), hit, fit=len(request.token_ids)):
                return step.skip(request, BlockReason.BLOCKS, *_blocks_short(step, request, hit.num_tokens))


class SarathiServe(FirstComeFirstServed):
    """The stall-free scheduler of Sarathi-Serve (commit 96f9911): no decode ever waits for a prompt.

    Decodes first, then prompts that are half computed, then new ones cut to what is left of the budget. A new
    prompt takes the blocks of all of it at once, and must leave a share of the pool free while others run. Equal to
    the recorded decisions of `tests/golden/sarathi_serve.json`: 26 runs, 1,242 steps without preemption. Differs on
    purpose when blocks run out: a decode needs a block only at a block boundary, a victim's progress is reset at
    once, and `max_tokens` goes on counting.

    Args:
        watermark: share of the pool that an admission must leave free.
    """

    def __init__(self, watermark: float = 0.01) -> None:
        if not isinstance(watermark, int | float) or not 0 <= watermark < 1:
            raise InvalidConfig(f"watermark is {watermark!r}; use a share of the pool in [0, 1)")
        self.watermark = watermark

    def schedule(self, step: Step) -> None:
        """Decodes, ongoing prefills, then the queue."""
        _grant_in_order(step, decodes=True)
        _grant_in_order(step, decodes=False)
        spare = int(self.watermark * step.config.num_blocks)
        while step.waiting and step.seats_left and step.budget.remaining_prefill and not step.victims:
            request = step.waiting.head
            hit = step.cached_prefix(request)
            num_tokens = min(request.owed - hit.num_tokens, step.budget.remaining_prefill)
            whole = len(request.token_ids)
            if not step.admit(request, num_tokens, hit, hold=whole, spare=spare if step.running else 0):
                return step.skip(request, BlockReason.BLOCKS, *_blocks_short(step, request, hit.num_tokens))


class NanoVllm(FirstComeFirstServed):
    """The scheduler of nano-vllm (commit bb823b3): a step is all prefill or all decode, and prefill goes first.

    Whole prompts while they fit in the budget; only the first prompt of a step may be cut. A prompt takes the blocks
    of all of it at once. Equal to the recorded decisions of `tests/golden/nano_vllm.json`: 20 runs, 1,151 steps.
    Differs on purpose: `max_num_seqs` caps the running set (there it caps a step), and blocks planned in a step can
    be shared in the same step.
    """

    def schedule(self, step: Step) -> None:
        """Prefill what is possible; decode only if there was nothing to prefill."""
        _grant_in_order(step, decodes=False)
        self._admit_whole_prompts(step)
        if not step.grants.requests:
            _grant_in_order(step, decodes=True)

    def _admit_whole_prompts(self, step: Step) -> None:
        while step.waiting and step.seats_left and step.budget.remaining_prefill:
            request = step.waiting.head
            hit = step.cached_prefix(request)
            num_tokens, left = request.owed - hit.num_tokens, step.budget.remaining_prefill
            if num_tokens > left and step.grants.requests:
                return step.skip(request, BlockReason.BUDGET, num_tokens, left)
            if not step.admit(request, min(num_tokens, left), hit, hold=len(request.token_ids)):
                return step.skip(request, BlockReason.BLOCKS, *_blocks_short(step, request, hit.num_tokens))


POLICIES: dict[str, Callable[[], Policy]] = {
    "VllmV1": VllmV1,
    "StaticBatching": StaticBatching,
    "PrefillDecodeBudget": PrefillDecodeBudget,
    "SarathiServe": SarathiServe,
    "NanoVllm": NanoVllm,
}


def policy_by_name(name: str) -> Policy:
    """A policy with its default settings.

    Raises:
        UnknownName: lists the names there are.
    """
    if name not in POLICIES:
        near = difflib.get_close_matches(name, POLICIES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UnknownName(f"no policy is called {name!r}; there are {', '.join(POLICIES)}{hint}")
    return POLICIES[name]()


def _urgency(request: RunningRequest) -> tuple[float, ...]:
    return (request.request.priority, request.request.arrival_time, request.index)


def _capped(step: Step, num_tokens: int) -> int:
    """Limit a long prefill to the threshold while it is not alone."""
    threshold = step.config.long_prefill_token_threshold
    alone = len(step.running) + len(step.waiting) <= 1
    return num_tokens if alone or not threshold else min(num_tokens, threshold)


def _waits_to_be_whole(step: Step, num_tokens: int, left: int) -> bool:
    """With chunked prefill off: True if a prompt does not fit in what is left of this step but would in another one.

    A preempted request whose tokens have outgrown the whole budget is chunked all the same: it could never resume.
    """
    whole = min(step.budget.max_prefill_tokens, step.budget.max_total_tokens)
    return left < num_tokens <= whole and not step.config.enable_chunked_prefill


def _blocks_short(step: Step, request: RunningRequest, cached: int) -> tuple[int, int]:
    """(blocks needed for the rest of the sequence, blocks free)."""
    size = step.config.block_size
    return -(-(len(request.token_ids) - cached) // size), step.free_blocks


def _grant_in_order(step: Step, decodes: bool | None = None) -> None:
    """Give running requests what they owe, in admission order; the newest one goes when blocks run out.

    `decodes` picks the decoding (True) or the prefilling (False) ones.
    """
    for request in list(step.running):
        if request not in step.running or decodes is request.is_prefilling:
            continue
        num_tokens = min(request.owed, step.tokens_left(request))
        if not num_tokens:
            step.skip(request, BlockReason.BUDGET, request.owed, 0)
        while num_tokens and not step.grant(request, num_tokens):
            victim = step.running[-1]
            step.preempt(victim)
            if victim is request:
                break
