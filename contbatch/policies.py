"""Scheduling policies: who gets tokens in a step, in a few lines each.

Every policy is written with the verbs of `Step` and decides nothing that the verbs do not allow. A policy named
after an engine decides exactly as that engine does; its docstring says on how many recorded steps that was
checked. First come, first served unless it says otherwise.
"""

from __future__ import annotations

import difflib
from collections import Counter, deque
from collections.abc import Callable, Iterable
from fractions import Fraction

from contbatch.blocks import blocks_needed
from contbatch.budget import UNLIMITED, TokenBudget, at_least_one
from contbatch.config import SchedulerConfig
from contbatch.errors import InvalidConfig, UnknownName
from contbatch.plan import BlockReason
from contbatch.policy import Policy
from contbatch.request import RequestStatus, RunningRequest
from contbatch.step import Step


class VllmV1(Policy):
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

    def victim(self, step: Step) -> RunningRequest:
        """The newest, or the least urgent one."""
        return max(step.running, key=_urgency) if self.by_priority else step.running[-1]

    def schedule(self, step: Step) -> None:
        """Running first; waiting only if nobody had to go."""
        alone = len(step.running) + len(step.waiting) <= 1
        cap = step.config.long_prefill_token_threshold
        most = UNLIMITED if alone or not cap else cap
        self.grant_or_preempt(step, at_most=most)
        fit_whole = step.config.scheduler_reserve_full_isl
        if not step.victims:
            _admit_in_order(step, fit_whole=fit_whole, spare=step.config.watermark_blocks, at_most=most)


class StaticBatching(Policy):
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
            return self.grant_or_preempt(step)
        seats = min(self.batch_size or step.config.max_num_seqs, step.config.max_num_seqs)
        _admit_in_order(step, seats=seats)


class PrefillDecodeBudget(Policy):
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
        self.grant_or_preempt(step, decodes=True)
        self.grant_or_preempt(step, decodes=False)
        if not step.victims:
            _admit_in_order(step, fit_whole=True)


class SarathiServe(Policy):
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
        self.watermark = _share("watermark", watermark)

    def schedule(self, step: Step) -> None:
        """Decodes, ongoing prefills, then the queue."""
        self.grant_or_preempt(step, decodes=True)
        self.grant_or_preempt(step, decodes=False)
        if not step.victims:
            _admit_in_order(step, hold_whole=True, spare=int(self.watermark * step.config.num_blocks))


class NanoVllm(Policy):
    """The scheduler of nano-vllm (commit bb823b3): a step is all prefill or all decode, and prefill goes first.

    Whole prompts while they fit in the budget; only the first prompt of a step may be cut. A prompt takes the blocks
    of all of it at once. Equal to the recorded decisions of `tests/golden/nano_vllm.json`: 20 runs, 1,151 steps.
    Differs on purpose: `max_num_seqs` caps the running set (there it caps a step), and blocks planned in a step can
    be shared in the same step.
    """

    def schedule(self, step: Step) -> None:
        """Prefill what is possible; decode only if there was nothing to prefill."""
        self.grant_or_preempt(step, decodes=False)
        self._admit_whole_prompts(step)
        if not step.grants or step.grants[0][2] == "D":
            self.grant_or_preempt(step, decodes=True)

    def _admit_whole_prompts(self, step: Step) -> None:
        while step.waiting and step.seats_left and (left := step.tokens_left(step.waiting.head)):
            request = step.waiting.head
            hit = step.cached_prefix(request)
            num_tokens = request.owed - hit.num_tokens
            if step.grants and (step.grants[0][2] == "D") is request.is_prefilling:
                return  # it was swapped out while it decoded, and this is a step of prefills; or the other way round
            if num_tokens > left and step.grants:
                return step.skip(request, BlockReason.BUDGET, num_tokens, left)
            if not step.admit(request, min(num_tokens, left), hit, hold=len(request.token_ids)):
                return


class Orca(Policy):
    """Iteration-level scheduling as in Orca (OSDI 2022): everybody gets one iteration, memory is reserved up front.

    Whole prompts, no token budget, and never a preemption: each request reserves the blocks of the longest sequence
    that it could become. Equal to the recorded decisions of `tests/golden/orca.json` (the Orca scheduler of
    Sarathi-Serve, commit 96f9911): 20 runs, 1,084 steps.

    Args:
        reserve: "max_model_len", as recorded, or "max_tokens" (prompt and its own max_tokens), as in the paper.
    """

    def __init__(self, reserve: str = "max_model_len") -> None:
        if reserve not in ("max_model_len", "max_tokens"):
            raise InvalidConfig(f'reserve is {reserve!r}; use "max_model_len" or "max_tokens"')
        self.reserve = reserve

    def token_budget(self, config: SchedulerConfig) -> TokenBudget:
        """None is declared."""
        return TokenBudget.of(UNLIMITED)

    def schedule(self, step: Step) -> None:
        """Everybody who runs, then everybody who can be reserved for."""
        step.grant_running()
        while step.waiting and step.seats_left:
            request = step.waiting.head
            hit = step.cached_prefix(request)
            reserved = self.reserved_tokens(request, step.config)
            if not step.admit(request, request.owed - hit.num_tokens, hit, hold=reserved):
                return

    def reserved_tokens(self, request: RunningRequest, config: SchedulerConfig) -> int:
        """Tokens to hold blocks for; never more than the whole pool."""
        longest = config.max_model_len if self.reserve == "max_model_len" else request.max_total_tokens - 1
        return min(longest, config.num_blocks * config.block_size)


class PeakMemory(Policy):
    """Admit a request only if the cache will hold everybody at the worst moment to come: the idea of LightLLM.

    If nobody stops early, the requests end in the order of the tokens they have left, and just before each end the
    cache holds what the remaining ones hold by then. The largest of these sums is the peak. So memory is neither
    reserved for what is long gone nor overrun, and preemption is left for what the prediction rounds away. By
    reading only: there are no recorded decisions.
    """

    def schedule(self, step: Step) -> None:
        """Decodes, ongoing prefills, then whoever fits in the future."""
        self.grant_or_preempt(step, decodes=True)
        self.grant_or_preempt(step, decodes=False)
        while step.waiting and step.seats_left and not step.victims and (left := step.tokens_left(step.waiting.head)):
            request = step.waiting.head
            peak = self.peak_blocks([*step.running, request], step.config.block_size)
            if step.running and peak > step.config.num_blocks:
                return step.skip(request, BlockReason.BLOCKS, peak, step.config.num_blocks)
            hit = step.cached_prefix(request)
            num_tokens = min(request.owed - hit.num_tokens, left)
            if not step.admit(request, num_tokens, hit, fit=len(request.token_ids)):
                return

    @staticmethod
    def peak_blocks(requests: Iterable[RunningRequest], block_size: int) -> int:
        """Most blocks that these requests will hold at once."""
        ends = sorted(((r.max_total_tokens - len(r.token_ids), len(r.token_ids)) for r in requests), reverse=True)
        peak = held = 0
        for alive, (left, length) in enumerate(ends, start=1):
            held += blocks_needed(length, block_size)
            peak = max(peak, held + alive * blocks_needed(left - 1, block_size))
        return peak


class ShortestJobFirst(Policy):
    """Waiting requests in the order of the work they still need; running ones are never reordered.

    The work is the tokens owed and those that may still be generated. Without aging a long request can wait for
    ever; with it, a request that arrives more than `size / aging` steps later never goes first.

    Args:
        length: how many tokens a request will generate, if something better than its max_tokens is known.
        aging: tokens that each step of waiting counts for.
    """

    def __init__(self, length: Callable[[RunningRequest], int] | None = None, aging: float = 0.0) -> None:
        self.length, self.aging = length, _at_least_zero("aging", aging)
        self.queue_key = self._work

    def _work(self, request: RunningRequest) -> tuple[float, ...]:
        """Everybody ages alike, so the order of two requests is that of their work at the arrival of the first."""
        output = self.length(request) if self.length else request.max_tokens
        work = request.owed + max(0, output - request.num_output_tokens)
        return (work + self.aging * request.arrival_step,)

    def schedule(self, step: Step) -> None:
        """Running first; waiting only if nobody had to go."""
        self.grant_or_preempt(step)
        if not step.victims:
            _admit_in_order(step, fit_whole=True, spare=step.config.watermark_blocks)


class AgedPriority(Policy):
    """Urgent requests first and at once, but waiting makes urgent.

    The effective priority is `priority - aging * steps since arrival`, lower is more urgent. A waiting request
    preempts running ones that are strictly less urgent, if that makes the room it needs. No wait is without bound:
    a request of priority q that arrives `(p - q) / aging` steps or more after one of priority p never goes before
    it, so with the default of 0.1 LOW is overtaken by what arrives in the next 30 steps, and by nothing later.

    Args:
        aging: by how much a step of waiting lowers the number; above 0.
    """

    def __init__(self, aging: float = 0.1) -> None:
        self.aging = _at_least_zero("aging", aging)
        if not self.aging:
            raise InvalidConfig('aging is 0, with which waits have no bound; use more, or VllmV1(order="priority")')
        self._ratio = Fraction(self.aging).limit_denominator(10**6)
        self.queue_key = self._urgency

    def _urgency(self, request: RunningRequest) -> tuple[float, ...]:
        """Everybody ages alike, so the order of two requests never changes. Whole numbers: nothing is rounded."""
        steps, each = self._ratio.numerator, self._ratio.denominator
        return (request.request.priority * each + steps * request.arrival_step,)

    def victim(self, step: Step) -> RunningRequest:
        """The least urgent one; of several the newest."""
        return max(step.running, key=lambda request: (self._urgency(request), request.index))

    def schedule(self, step: Step) -> None:
        """Serve those who run, make room for the most urgent one that waits, then admit."""
        self.grant_or_preempt(step)
        if step.waiting and step.waiting.head not in step.victims:
            self._make_room(step, step.waiting.head)
        _admit_in_order(step, fit_whole=True, spare=step.config.watermark_blocks)

    def _make_room(self, step: Step, head: RunningRequest) -> None:
        """Preempt less urgent requests, the least urgent first, if `head` gets to run in this step by it."""
        needed = blocks_needed(len(head.token_ids), step.config.block_size)
        granted = {request: num_tokens for request, num_tokens, _ in step.grants}
        less_urgent = [r for r in step.running if self._urgency(r) > self._urgency(head)]
        less_urgent.sort(key=lambda request: (self._urgency(request), request.index), reverse=True)
        for count in range(len(less_urgent) + 1):
            victims = less_urgent[:count]
            spare = step.config.watermark_blocks if len(step.running) > count else 0
            enough = step.free_blocks + step.freed_by(victims) >= needed + spare
            tokens = step.tokens_left(head) + sum(granted.get(request, 0) for request in victims)
            if enough and tokens and step.seats_left + count > 0:
                for request in victims:
                    step.preempt(request)
                return


class FairShare(Policy):
    """The client that got the least service is next: the virtual token counter of Sheng et al. (OSDI 2024).

    "Fairness in Serving Large Language Models", arXiv:2401.00588. Every client has a counter of the tokens computed
    for it. A client that was idle starts at the least of the active ones, so that idleness earns no credit. Requests
    of one client stay in order. Choosing takes one pass over the queue in each step with a seat to give.

    Args:
        weight: how much a decode token counts; a prefill token counts 1.
    """

    def __init__(self, weight: float = 2.0) -> None:
        self.weight = _at_least_zero("weight", weight)
        self.service: dict[str, float] = {}
        """Tokens computed for each client, weighted."""
        self._unfinished: Counter[str] = Counter()
        self._granted: dict[RunningRequest, tuple[int, float]] = {}

    def on_add(self, request: RunningRequest) -> None:
        """A client that comes back from being idle is lifted to the least of the active ones."""
        self._charge()
        client = request.request.client
        if not self._unfinished[client]:
            active = [self.service[other] for other, count in self._unfinished.items() if count]
            self.service[client] = max(self.service.get(client, 0.0), min(active, default=0.0))
        self._unfinished[client] += 1

    def on_finish(self, request: RunningRequest) -> None:
        """One less to serve."""
        self._charge()
        self._unfinished[request.request.client] -= 1

    def schedule(self, step: Step) -> None:
        """Running first; then the next request of the client with the least service, again and again."""
        self._charge()
        self.grant_or_preempt(step)
        if not step.victims and step.seats_left and not step.budget.is_exhausted:
            self._admit_fairly(step)
        self._granted = {r: (r.num_computed_tokens + n, self._cost(n, kind)) for r, n, kind in step.grants}

    def _cost(self, num_tokens: int, kind: str) -> float:
        return num_tokens * (self.weight if kind == "D" else 1.0)

    def _charge(self) -> None:
        """Count what the last step granted and what was computed of it: a step that was given up costs nothing."""
        for request, (end, cost) in list(self._granted.items()):
            if request.num_computed_tokens >= end:
                self.service[request.request.client] += cost
                del self._granted[request]

    def _admit_fairly(self, step: Step) -> None:
        service = dict(self.service)
        for request, num_tokens, kind in step.grants:
            service[request.request.client] += self._cost(num_tokens, kind)
        queues: dict[str, deque[RunningRequest]] = {}
        for request in step.waiting:
            queues.setdefault(request.request.client, deque()).append(request)
        while queues and step.seats_left and not step.budget.is_exhausted:
            client = min(queues, key=lambda name: (service[name], queues[name][0].index))
            request = queues[client].popleft()
            if not _admit(step, request, fit_whole=True, spare=step.config.watermark_blocks):
                return
            service[client] += step.grants[-1][1]
            if not queues[client]:
                del queues[client]


class HfFifo(Policy):
    """The "fifo" scheduler of continuous batching in transformers (5.20.2).

    Decodes, then ongoing prefills, then the queue. Who does not fit is skipped, and later ones may overtake. Beside
    the token budget there is one for cache reads: a step reads at most as many cached tokens as the pool holds.
    Requests that found no block are sent to the back of the queue, the last ones first, until the others fit; then
    nobody new is admitted until some request finishes. Equal to the recorded decisions of
    `tests/golden/hf_fifo.json`: 20 runs, 921 steps.

    Args:
        safety_margin: while less than this share of the pool is free, only decodes join a batch; None is the
            engine's default.
    """

    default_margin = 0.15

    def __init__(self, safety_margin: float | None = None) -> None:
        margin = self.default_margin if safety_margin is None else safety_margin
        self.safety_margin = _share("safety_margin", margin)
        self._admits = True

    def on_finish(self, request: RunningRequest) -> None:
        """There is room again."""
        self._admits = True

    def candidates(self, step: Step) -> list[RunningRequest]:
        """Everybody in the order in which they are looked at."""
        running = sorted(step.running, key=lambda request: request.is_prefilling)
        return [*running, *(step.waiting if self._admits or not running else ())]

    def schedule(self, step: Step) -> None:
        """Serve whom there is room for; then make some, at once if nobody was served."""
        starved = self._serve(step)
        while self._offload(step, starved) and not step.grants:
            starved = self._serve(step)

    def _serve(self, step: Step) -> dict[RunningRequest, int]:
        """Grant in order, skipping who does not fit; returns the running ones with the blocks that they miss."""
        config, starved = step.config, dict[RunningRequest, int]()
        has_margin = step.free_blocks >= self.safety_margin * config.num_blocks
        reads_left = config.num_blocks * config.block_size
        for request in self.candidates(step):
            is_new = request.status is not RequestStatus.RUNNING
            if not has_margin and step.grants and request.is_prefilling:
                break
            num_tokens = min(request.owed, step.tokens_left(request))
            if not num_tokens or reads_left <= 0 or (is_new and not step.seats_left):
                break
            reads, held = request.num_computed_tokens, len(request.block_table)
            if reads_left < reads:
                step.skip(request, BlockReason.BUDGET, reads, reads_left)
            elif _admit(step, request) if is_new else step.grant(request, num_tokens):
                reads_left -= reads
            elif not is_new:
                missing = blocks_needed(reads + num_tokens, config.block_size) - held
                step.skip(request, BlockReason.BLOCKS, missing, step.free_blocks)
                starved[request] = missing
        return starved

    def _offload(self, step: Step, starved: dict[RunningRequest, int]) -> bool:
        """Send the newest of the starved ones to the back of the queue, as many as the others need."""
        victims: list[RunningRequest] = []
        while starved and len(step.running) - len(victims) > 1:
            if sum(starved.values()) <= step.free_blocks + step.freed_by(victims):
                break
            victims.append(starved.popitem()[0])
        for request in reversed(victims):
            step.preempt(request, to_back=True)
        self._admits = self._admits and not victims
        return bool(victims)


class HfPrefillFirst(HfFifo):
    """The "prefill_first" scheduler of continuous batching in transformers (5.20.2).

    As `HfFifo`, but ongoing prefills go before decodes. Equal to the recorded decisions of
    `tests/golden/hf_prefill_first.json`: 20 runs, 908 steps.
    """

    default_margin = 0.0

    def candidates(self, step: Step) -> list[RunningRequest]:
        """Everybody in the order in which they are looked at."""
        running = sorted(step.running, key=lambda request: not request.is_prefilling)
        return [*running, *(step.waiting if self._admits or not running else ())]


POLICIES: dict[str, Callable[[], Policy]] = {
    "VllmV1": VllmV1,
    "StaticBatching": StaticBatching,
    "PrefillDecodeBudget": PrefillDecodeBudget,
    "SarathiServe": SarathiServe,
    "NanoVllm": NanoVllm,
    "HfFifo": HfFifo,
    "HfPrefillFirst": HfPrefillFirst,
    "Orca": Orca,
    "PeakMemory": PeakMemory,
    "ShortestJobFirst": ShortestJobFirst,
    "AgedPriority": AgedPriority,
    "FairShare": FairShare,
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


def _share(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise InvalidConfig(f"{name} is {value!r}; use a share of the pool in [0, 1)")
    return value


def _at_least_zero(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise InvalidConfig(f"{name} is {value!r}; use a number of at least 0")
    return value


def _admit_in_order(
    step: Step,
    seats: int | None = None,
    fit_whole: bool = False,
    hold_whole: bool = False,
    spare: int = 0,
    at_most: int = UNLIMITED,
) -> None:
    """Admit from the head of the queue while there are seats, tokens and blocks; nobody overtakes."""
    seats = step.config.max_num_seqs if seats is None else seats
    while step.waiting and len(step.running) < seats and step.tokens_left(step.waiting.head):
        head = step.waiting.head
        if head in step.victims or not _admit(step, head, fit_whole, hold_whole, spare, at_most):
            return


def _admit(
    step: Step,
    request: RunningRequest,
    fit_whole: bool = False,
    hold_whole: bool = False,
    spare: int = 0,
    at_most: int = UNLIMITED,
) -> bool:
    """Admit one request with as many of its tokens as the budget allows, or write down why not.

    Args:
        fit_whole: only if all its tokens would fit in the pool now.
        hold_whole: take the blocks of all its tokens now.
        spare: blocks that must stay free while others run.
        at_most: most tokens for it.
    """
    hit = step.cached_prefix(request)
    left = step.tokens_left(request)
    num_tokens = min(request.owed - hit.num_tokens, at_most)
    if _waits_to_be_whole(step, num_tokens, left):
        step.skip(request, BlockReason.BUDGET, num_tokens, left)
        return False
    whole = len(request.token_ids)
    fit, hold = (whole if wanted else None for wanted in (fit_whole, hold_whole))
    return step.admit(request, min(num_tokens, left), hit, hold, fit, spare if step.running else 0)


def _waits_to_be_whole(step: Step, num_tokens: int, left: int) -> bool:
    """With chunked prefill off: True if a prompt does not fit in what is left of this step but would in another one.

    A preempted request whose tokens have outgrown the whole budget is chunked all the same: it could never resume.
    """
    whole = min(step.budget.max_prefill_tokens, step.budget.max_total_tokens)
    return left < num_tokens <= whole and not step.config.enable_chunked_prefill
