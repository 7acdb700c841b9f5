"""What a scheduling policy is: subclass `Policy` and write `schedule`.

A policy decides one step at a time, with the verbs of `contbatch.step.Step`. Everything else has a default that
suits most: requests wait in order of arrival, one token budget bounds a step, the newest running request goes when
blocks run out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from contbatch.budget import UNLIMITED, TokenBudget
from contbatch.config import SchedulerConfig
from contbatch.request import RunningRequest
from contbatch.waiting import QueueKey

if TYPE_CHECKING:
    from contbatch.step import Step


class Policy:
    """A scheduling policy: subclass it and write `schedule`.

    A complete one, first come, first served with prompts cut to what is left of the budget:

        class Simple(Policy):
            def schedule(self, step):
                self.grant_or_preempt(step)  # everybody who runs; the newest goes when blocks run out
                while step.waiting and step.seats_left and not step.victims:
                    request = step.waiting.head
                    num_tokens = min(request.owed, step.tokens_left(request))
                    if not num_tokens or not step.admit(request, num_tokens):
                        break  # no tokens or no blocks left

    To order the queue, give `queue_key` a function, or write it as a method: `def queue_key(self, request)` returns a
    number, or a tuple of numbers, and the smallest is first. A request's key may not change while it waits.
    """

    queue_key: QueueKey | None = None
    """Orders the waiting queue, smallest first; None is first come, first served."""

    @property
    def name(self) -> str:
        """Shown in traces and messages: the class name."""
        return type(self).__name__

    def token_budget(self, config: SchedulerConfig) -> TokenBudget:
        """A fresh budget for one step: here max_num_batched_tokens for prefill and decode together."""
        return TokenBudget.of(config.max_num_batched_tokens)

    def schedule(self, step: Step) -> None:
        """Decide one step with the verbs of `step`."""
        raise NotImplementedError(f"{self.name} does not say how to schedule a step; write schedule(self, step)")

    def victim(self, step: Step) -> RunningRequest:
        """Who is preempted when blocks run out: here the newest running request."""
        return step.running[-1]

    def grant_or_preempt(self, step: Step, decodes: bool | None = None, at_most: int = UNLIMITED) -> None:
        """`step.grant_running`, preempting the `victim` as often as blocks run out.

        A victim may have got tokens in this step already, or be the very request that needs the block. It goes to the
        front of the queue.
        """
        while step.grant_running(decodes, at_most) is not None:
            step.preempt(self.victim(step))

    def on_add(self, request: RunningRequest) -> None:
        """A request joined the queue for the first time."""

    def on_finish(self, request: RunningRequest) -> None:
        """A request ended, for whatever reason."""
