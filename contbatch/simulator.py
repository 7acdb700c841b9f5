"""Simulation: the same engine, with a cost model in place of a model and a clock that stands still between steps.

A step's time is a sum of five terms: a fixed cost, so much for each prefill token, for each decode row, for each
cached token that attention reads, and for each block that is swapped. The one idea: everything that scheduling
decides is decided by the real scheduler; only the time that a forward pass takes is made up, by a `CostModel` that
was fitted to a recorded run (`contbatch.calibrate`). So a day of traffic is served in minutes, and twice the same.

Made-up tokens are all alike. Only a prompt that another one begins with hits the prefix cache, never a conversation
that goes on with what was generated.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import count
from pathlib import Path

from contbatch.batch import ScheduledBatch
from contbatch.errors import InvalidConfig, TraceError
from contbatch.plan import Grants
from contbatch.request import SamplingParams

VERSION = 1


class VirtualClock:
    """Seconds that go on only when somebody says so: `Engine(clock=clock)`, `drive(wait=clock.advance)`."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def __call__(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        """Let time go on.

        Raises:
            InvalidConfig: `seconds` is below 0, or no number.
        """
        if not 0 <= seconds < math.inf:
            raise InvalidConfig(f"the clock cannot go on by {seconds!r} seconds; use a finite number of at least 0")
        self.seconds += seconds


@dataclass(frozen=True)
class CostModel:
    """What a step costs, in seconds.

    Args:
        per_step: every step, whatever it computes.
        per_prefill_token: each token of a prompt, computed for the first time or again.
        per_decode_row: each decoding request.
        per_cached_token: each token that attention reads from the cache: the sum of the context lengths.
        per_swapped_block: each block copied to or from host memory: its bytes over the bandwidth.

    Raises:
        InvalidConfig: a cost is negative or no number; the message names it.
    """

    per_step: float
    per_prefill_token: float = 0.0
    per_decode_row: float = 0.0
    per_cached_token: float = 0.0
    per_swapped_block: float = 0.0

    def __post_init__(self) -> None:
        for name, cost in asdict(self).items():
            if isinstance(cost, bool) or not isinstance(cost, int | float) or not 0 <= cost <= sys.float_info.max:
                raise InvalidConfig(f"{name} is {cost!r}; use a finite number of seconds of at least 0")

    def seconds(self, prefill_tokens: int, decode_rows: int, cached_tokens: int) -> float:
        """The predicted time of a forward pass; copies of blocks come on top."""
        return (
            self.per_step
            + self.per_prefill_token * prefill_tokens
            + self.per_decode_row * decode_rows
            + self.per_cached_token * cached_tokens
        )

    def save(self, path: str | Path) -> None:
        """Write the costs to a JSON file."""
        text = json.dumps({"contbatch_cost_model": VERSION, **asdict(self)}, indent=2)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """Read the costs that `save` wrote.

        Raises:
            TraceError: it cannot be read, or a cost is unknown, missing or has a value that it cannot have.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise TraceError(f"{path}: cannot be read as a cost model: {error}") from error
        if not isinstance(data, dict) or data.pop("contbatch_cost_model", None) != VERSION:
            raise TraceError(f"{path}: not a cost model; it does not begin with contbatch_cost_model {VERSION}")
        names = [field.name for field in fields(cls)]
        if sorted(data) != sorted(names):
            raise TraceError(f"{path}: holds {', '.join(sorted(data)) or 'nothing'}; expected {', '.join(names)}")
        try:
            return cls(**data)
        except InvalidConfig as error:
            raise TraceError(f"{path}: {error}") from error


class SimulatedExecutor:
    """Takes the time that a cost model says; implements `contbatch.executor.Executor`.

    Args:
        cost: what a step costs.
        clock: the clock of the engine, which every step moves on.
        vocab_size, max_model_len, eos_token_ids: as in `Executor`. No made-up token ends a request.
    """

    def __init__(
        self,
        cost: CostModel,
        clock: VirtualClock,
        vocab_size: int | None = None,
        max_model_len: int | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self.cost = cost
        self.clock = clock
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self._token = next(token for token in count() if token not in self.eos_token_ids)
        if vocab_size is not None and self._token >= vocab_size:
            raise InvalidConfig(f"every token of a vocabulary of {vocab_size} ends a request; leave one that does not")

    def execute(self, batch: ScheduledBatch, sampling: Mapping[str, SamplingParams]) -> Mapping[str, int | Exception]:
        """A token for each request that samples, at the price of the whole batch."""
        del sampling
        grants, token = batch.grants, self._token
        if grants is None:
            stats = batch.stats()
            self.clock.advance(self.cost.seconds(stats.prefill_tokens, stats.decode_requests, stats.cached_tokens))
            return {part.request_id: token for part in batch if part.sample}
        self.clock.advance(self.cost.seconds(*load(grants)))
        rows = zip(grants.requests, grants.starts, grants.counts, strict=True)
        return {r.request_id: token for r, start, tokens in rows if start + tokens == len(r.token_ids)}

    def swap_out(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Copies take time."""
        self.clock.advance(self.cost.per_swapped_block * len(blocks))

    def swap_in(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Copies take time."""
        self.clock.advance(self.cost.per_swapped_block * len(blocks))


def load(grants: Grants) -> tuple[int, int, int]:
    """What a step computes: (prefill tokens, decode rows, cached tokens read)."""
    decode_rows = grants.kinds.count("D")
    return sum(grants.counts) - decode_rows, decode_rows, sum(grants.starts)
