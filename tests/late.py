"""A toy whose launched steps stay pending: nothing is computed before somebody waits for it.

It keeps what the contract of `contbatch.overlap.Launcher` says: steps run in the order in which they were launched, an
unknown token is read from the last-token buffer at the request's row, and a copy to or from host memory finds nothing
on its way (it asserts that the engine waited).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from contbatch.batch import UNKNOWN_TOKEN, BatchedRequest, ScheduledBatch
from contbatch.config import SchedulerConfig
from contbatch.engine import Engine
from contbatch.policy import Policy
from contbatch.request import SamplingParams
from tests.toy import Bytes, Pieces, Ticks, Toy


class LateHandle:
    """One launched step of a `LateToy`."""

    def __init__(self, toy: LateToy, batch: ScheduledBatch, sampling: Mapping[str, SamplingParams]) -> None:
        self.toy, self.number = toy, batch.batch_id
        self.parts, self.sampling = list(batch), dict(sampling)
        self.outcome: Mapping[str, int | Exception] | Exception | None = None

    def result(self) -> Mapping[str, int | Exception]:
        """Run everything up to here."""
        while self.outcome is None:
            first = self.toy.pending.popleft()
            try:
                first.outcome = self.toy.compute(first)
            except Exception as error:
                first.outcome = error
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class LateToy(Toy):
    """A toy that launches.

    Args:
        rows: rows of the last-token buffer, max_num_seqs.
        on_launch: called at each launch; it may raise.
        change: may change what a step sampled before anybody sees it.
    """

    def __init__(self, *arguments: Any, rows: int, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self.last = [UNKNOWN_TOKEN] * rows
        self.pending: deque[LateHandle] = deque()
        self.on_launch: Callable[[ScheduledBatch], None] = lambda batch: None
        self.change: Callable[[dict[str, int | Exception]], None] = lambda sampled: None
        self.num_ahead = self.num_unknown = self.num_launched = 0
        """Steps launched while another was pending, unknown tokens fed, steps launched."""

    def launch(self, batch: ScheduledBatch, sampling: Mapping[str, SamplingParams]) -> LateHandle:
        """Put it behind what is pending."""
        self.on_launch(batch)
        self.num_launched += 1
        self.num_ahead += bool(self.pending)
        assert len(self.pending) <= 1, "one step ahead, not more"
        handle = LateHandle(self, batch, sampling)
        self.pending.append(handle)
        return handle

    def compute(self, handle: LateHandle) -> Mapping[str, int | Exception]:
        """One forward pass, with the unknown tokens looked up."""
        parts = [self._known(part) for part in handle.parts]
        sampled = dict(self.execute(ScheduledBatch(handle.number, parts), handle.sampling))
        for part in parts:
            if part.sample:
                token = sampled[part.request_id]
                assert isinstance(token, int)
                self.last[part.kv_cache_slot] = token
        self.change(sampled)
        return sampled

    def _known(self, part: BatchedRequest) -> BatchedRequest:
        if UNKNOWN_TOKEN not in part.token_ids:
            return part
        assert part.token_ids == (UNKNOWN_TOKEN,) and not part.is_prefill, "only a decode may not know its token"
        self.num_unknown += 1
        return replace(part, token_ids=(self.last[part.kv_cache_slot],))

    def swap_out(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Copy blocks to host memory."""
        assert not any(handle.outcome is None for handle in self.pending), "copies do not wait their turn"
        super().swap_out(blocks)

    def swap_in(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Copy blocks back."""
        assert not any(handle.outcome is None for handle in self.pending), "copies do not wait their turn"
        super().swap_in(blocks)


def late_engine(
    limits: SchedulerConfig,
    policy: Policy | str = "VllmV1",
    *,
    overlap: bool = True,
    eos: Sequence[int] = (),
    tokenizer: Bytes | Pieces | None = None,
    before: Callable[[ScheduledBatch], None] | None = None,
) -> tuple[Engine, LateToy]:
    """An engine that plans ahead (or not), with a toy whose steps stay pending."""
    toy = LateToy(limits.num_blocks, limits.block_size, rows=limits.max_num_seqs, eos_token_ids=eos, before=before)
    return Engine(toy, limits, policy, tokenizer, clock=Ticks(), overlap=overlap), toy
