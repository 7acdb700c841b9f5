"""The books of a step whose tokens are not known yet, so that the next step can be planned already.

The one idea: a launched step is *assumed* to succeed. Its tokens count as computed, and each request that samples in
it gets `UNKNOWN_TOKEN` as its newest token. So it owes one token, like any other that decodes, and policies and verbs
plan the next step as always. Who reaches its last token by that has ended: what it held is handed out again.

`settle` then puts the real tokens in the places kept for them and finds the ends that only a token can tell: a request
that ends leaves at once, and what a later step computes for it is thrown away. `withdraw` is for a step that failed.

A block or a row that is handed out again may still be written by a step that was launched before. That is safe because
launched steps run one after the other: whoever gets it writes it in a later step. Copies to and from host memory do
not wait their turn, so the loop waits for everything that was launched before it lets them be made.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from contbatch.batch import UNKNOWN_TOKEN
from contbatch.budget import UNLIMITED, TokenBudget
from contbatch.plan import Grants, IterationPlan
from contbatch.request import FinishReason, RequestStatus, RunningRequest
from contbatch.scheduler import Output, Scheduler


class Ahead:
    """One launched step: first its plan is in flight, then it is assumed, then settled or withdrawn.

    Args:
        scheduler: made the plan last.
        plan: what was launched.
    """

    def __init__(self, scheduler: Scheduler, plan: IterationPlan) -> None:
        self._scheduler = scheduler
        self.plan = plan
        self._grants = plan.grants or Grants()
        self._fresh = scheduler.fresh_blocks
        self._ended: dict[RunningRequest, None] = {}
        """Those whose last token by length is sampled in this step."""
        self.is_assumed = False

    @property
    def is_void(self) -> bool:
        """True if everybody whose tokens it computes has ended meanwhile."""
        requests = self._grants.requests
        return bool(requests) and all(request.status is RequestStatus.FINISHED for request in requests)

    def assume(self) -> None:
        """Count its tokens as computed, and keep a place for those that it samples."""
        scheduler, grants = self._scheduler, self._grants
        self._step = scheduler.take_planned(self.plan)
        self.is_assumed = True
        for request, start, count in zip(grants.requests, grants.starts, grants.counts, strict=True):
            if request.status is RequestStatus.FINISHED:
                continue
            request.num_in_flight = 0
            end = request.num_computed_tokens = start + count
            if end == len(request.token_ids):
                request.token_ids.append(UNKNOWN_TOKEN)
                if end + 1 >= request.max_total_tokens:
                    self._ended[request] = None
                    scheduler.finish(request, FinishReason.LENGTH)

    def settle(self, sampled: Mapping[str, int | Exception]) -> list[Output]:
        """The step succeeded: put the tokens where places were kept for them.

        Returns:
            one entry for each request that got a token or ended. Nothing for those that had ended before.
        """
        scheduler, grants, outputs = self._scheduler, self._grants, list[Output]()
        for request in self._step.swapped_in:
            scheduler.leave_host(request)
        plain, get = partial(tuple.__new__, Output), sampled.get
        num_ids, ended = scheduler.num_token_ids, self._ended
        for request, start, count in zip(grants.requests, grants.starts, grants.counts, strict=True):
            if request.status is RequestStatus.FINISHED and request not in ended:
                continue
            end = start + count
            scheduler.note_progress(request, end, count)
            if request.token_ids[end] != UNKNOWN_TOKEN:
                continue  # a chunk that is not the last
            token = get(request.request_id)
            if type(token) is not int or not 0 <= token < num_ids:
                outputs.append(self._fail(request, end, token))
                continue
            request.token_ids[end] = token
            if request in ended:
                outputs.append(Output(request, token, scheduler.finish_reason(request, token)))
            elif token in request.end_token_ids:
                scheduler.let_go(request)
                outputs.append(scheduler.end(request, token))
            else:
                if request.num_in_flight:  # a block that this token fills can be known now
                    scheduler.remember_blocks(request, end + request.num_in_flight)
                outputs.append(plain((request, token, None, None)))
        return outputs

    def _fail(self, request: RunningRequest, end: int, token: object) -> Output:
        """What its executor gave is no token: the request ends, and no block that it computed is trusted."""
        scheduler = self._scheduler
        if request not in self._ended:
            scheduler.let_go(request)
            scheduler.forget_blocks(request, 0)
            scheduler.finish(request, FinishReason.ERROR)
        del request.token_ids[end:]
        for key in scheduler.block_keys(request, end // scheduler.config.block_size):
            scheduler.pool.forget_free(key)  # it may have been preempted, or have ended by length
        return Output(request, None, FinishReason.ERROR, scheduler.token_error(token))

    def withdraw(self) -> list[str]:
        """The step failed, or nobody wants it: undo it. Later steps must have been withdrawn before.

        Returns:
            who was sent back to the queue by it, and stays there.
        """
        if not self.is_assumed:
            self._step = self._scheduler.take_planned(self.plan)
        grants, step = self._grants, self._step
        rows = list(zip(grants.requests, grants.starts, grants.counts, strict=True))
        for request, start, count in rows:
            if self.is_assumed:
                self._drop_place(request)
            if request in self._ended:
                self._revive(request)
            if request.status is RequestStatus.RUNNING:
                request.num_computed_tokens, request.num_in_flight = start, count
                continue
            grants.remove(request)
            undo = step.forget_undo(request)
            if undo is not None and request.status is RequestStatus.PREEMPTED:
                request.status = undo  # it was admitted in this step: that never happened
                request.num_preemptions -= 1
        step.budget = TokenBudget.of(UNLIMITED)  # the policy may have used its own for a later step
        step.budget.prefill_tokens = step.budget.decode_tokens = sum(grants.counts)
        step.undo()
        self._forget_fresh()
        sent_away = [request for request in (*step.victims, *self._ended) if request.status is RequestStatus.PREEMPTED]
        return [request.request_id for request in sent_away]

    def _drop_place(self, request: RunningRequest) -> None:
        if request.token_ids[-1] == UNKNOWN_TOKEN:
            request.token_ids.pop()
            if request.status in (RequestStatus.PREEMPTED, RequestStatus.SWAPPED):
                self._scheduler.waiting.num_tokens -= 1

    def _revive(self, request: RunningRequest) -> None:
        """It had ended by length, and what it held may be gone: it is computed again."""
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        self._scheduler.revive(request)

    def _forget_fresh(self) -> None:
        """Blocks that were planned in it and given back since then were never computed."""
        pool = self._scheduler.pool
        for block in self._fresh:
            if pool.key(block) is not None and not pool.ref_count[block]:
                pool.forget(block)
