"""One forward pass as data: what each request feeds in, the batch of them, and the flat arrays.

Continuous batching lays the new tokens of all requests end to end on **one token axis**, whether a request feeds
a whole prompt, a chunk of one, or a single decode token. No padding, one forward pass. `BatchedRequest` is one
request's part, `ScheduledBatch` the list of parts, and `FlatBatch` the arrays a model needs to keep the requests
apart. Everything here is derived from the parts, so that nothing can drift.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

from contbatch.errors import InvalidRequest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from contbatch.plan import Grants

    IntArray = NDArray[np.int64]


UNKNOWN_TOKEN = -1
"""Stands for a token that a launched step samples and that nobody knows yet. As the only token of a decode part: the
executor takes it from its own buffer, at row `kv_cache_slot`, where the step before wrote it."""


@dataclass(frozen=True)
class BatchedRequest:
    """The tokens that one request feeds into one forward pass, and where they go.

    Args:
        request_id: whose tokens these are.
        token_ids: the new tokens, at least one; `(UNKNOWN_TOKEN,)` where the step before this one samples it.
        position_offset: position of the first of them in the sequence.
        kv_cache_slot: the request's row in the executor's per-request buffers.
        block_table: ids of the cache blocks that hold the sequence, in order.
        is_prefill: True for (a chunk of) a prompt, False for a decode token.
        context_len: tokens already in the cache; always equal to `position_offset`.
        sample: whether the last token's logits are needed (False for a chunk that is not the last).

    Raises:
        InvalidRequest: no tokens, or position and context disagree.
    """

    request_id: str
    token_ids: tuple[int, ...]
    position_offset: int
    kv_cache_slot: int
    block_table: tuple[int, ...]
    is_prefill: bool
    context_len: int
    sample: bool = True

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise InvalidRequest(f"request {self.request_id!r} has no tokens in this batch; give at least one")
        if self.position_offset < 0 or self.position_offset != self.context_len:
            raise InvalidRequest(
                f"request {self.request_id!r}: position {self.position_offset} and context {self.context_len} "
                "disagree; the first new token goes right behind the tokens in the cache"
            )

    @classmethod
    def prefill(
        cls,
        request_id: str,
        token_ids: Sequence[int],
        kv_cache_slot: int,
        block_table: Sequence[int],
        start_position: int = 0,
        is_last_chunk: bool = True,
    ) -> BatchedRequest:
        """(A chunk of) a prompt that starts at `start_position`; only the last chunk yields a token."""
        return cls(
            request_id,
            tuple(token_ids),
            start_position,
            kv_cache_slot,
            tuple(block_table),
            True,
            start_position,
            is_last_chunk,
        )

    @classmethod
    def decode(
        cls,
        request_id: str,
        token_id: int,
        position: int,
        kv_cache_slot: int,
        block_table: Sequence[int],
        context_len: int,
    ) -> BatchedRequest:
        """The newest token of a sequence, fed in to get the next one."""
        return cls(request_id, (token_id,), position, kv_cache_slot, tuple(block_table), False, context_len)

    @property
    def num_tokens(self) -> int:
        """New tokens in this batch."""
        return len(self.token_ids)

    @property
    def seq_len(self) -> int:
        """Length of the sequence after this step: context plus new tokens."""
        return self.context_len + len(self.token_ids)


@dataclass(frozen=True)
class BatchStats:
    """Counts of one batch; all zero for an empty one but its id."""

    batch_id: int
    total_requests: int
    prefill_requests: int
    decode_requests: int
    total_tokens: int
    prefill_tokens: int
    decode_tokens: int
    max_seq_len: int
    cached_tokens: int
    """Tokens that attention reads from the cache: the sum of the context lengths."""
    budget_use: float | None
    """Tokens of the batch over the token budget, or None where no budget was given."""


@dataclass
class ScheduledBatch:
    """The parts of one forward pass, in order; behaves like a sequence of `BatchedRequest`."""

    batch_id: int
    requests: list[BatchedRequest] = field(default_factory=list)
    evicted_requests: tuple[str, ...] = ()
    swap_out_requests: tuple[str, ...] = ()
    swap_in_requests: tuple[str, ...] = ()
    grants: Grants | None = field(default=None, init=False, repr=False, compare=False)
    """What a plan granted, in columns and in the order of granting, where a plan made this batch."""

    def __post_init__(self) -> None:
        parts, self.requests = self.requests, []
        self._ids: set[str] = set()
        for part in parts:
            self.add(part)

    def add(self, request: BatchedRequest) -> None:
        """Append one part. A request may appear once in a batch."""
        if request.request_id in self._ids:
            raise InvalidRequest(
                f"request {request.request_id!r} is already in batch {self.batch_id}; a request appears once"
            )
        self._ids.add(request.request_id)
        self.requests.append(request)

    @classmethod
    def merge_prefill_decode(
        cls, prefill: Sequence[BatchedRequest], decode: Sequence[BatchedRequest], batch_id: int
    ) -> ScheduledBatch:
        """One batch: all prefills in order, then all decodes in order."""
        for part in prefill:
            if not part.is_prefill:
                raise InvalidRequest(f"request {part.request_id!r} is a decode in the list of prefills")
        for part in decode:
            if part.is_prefill:
                raise InvalidRequest(f"request {part.request_id!r} is a prefill in the list of decodes")
        return cls(batch_id, [*prefill, *decode])

    def split_by_type(self) -> tuple[list[BatchedRequest], list[BatchedRequest]]:
        """(prefills, decodes), each in batch order."""
        prefills = [part for part in self.requests if part.is_prefill]
        decodes = [part for part in self.requests if not part.is_prefill]
        return prefills, decodes

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[BatchedRequest]:
        return iter(self.requests)

    def __getitem__(self, index: int) -> BatchedRequest:
        return self.requests[index]

    @property
    def is_empty(self) -> bool:
        """True for a batch without requests."""
        return not self.requests

    @property
    def request_ids(self) -> list[str]:
        """Ids in batch order."""
        return [part.request_id for part in self.requests]

    @property
    def total_tokens(self) -> int:
        """New tokens of all requests: the length of the token axis."""
        return sum(part.num_tokens for part in self.requests)

    @property
    def has_prefill(self) -> bool:
        """True if any part is (a chunk of) a prompt."""
        return any(part.is_prefill for part in self.requests)

    @property
    def has_decode(self) -> bool:
        """True if any part is a decode token."""
        return any(not part.is_prefill for part in self.requests)

    @property
    def max_seq_len(self) -> int:
        """The longest sequence after this step; 0 for an empty batch."""
        return max((part.seq_len for part in self.requests), default=0)

    def collect_input_ids(self, pad_id: int = 0) -> list[list[int]]:
        """New tokens as a rectangle [requests, longest], padded at the end: what a static batch would compute."""
        width = max((part.num_tokens for part in self.requests), default=0)
        return [[*part.token_ids, *[pad_id] * (width - part.num_tokens)] for part in self.requests]

    def collect_positions(self) -> list[int]:
        """Position of each request's first new token."""
        return [part.position_offset for part in self.requests]

    def collect_kv_slots(self) -> list[int]:
        """The `kv_cache_slot` of each request."""
        return [part.kv_cache_slot for part in self.requests]

    def stats(self, token_budget: int | None = None) -> BatchStats:
        """Counts of this batch, and its share of `token_budget` if one is given."""
        prefills, decodes = self.split_by_type()
        total = self.total_tokens
        return BatchStats(
            batch_id=self.batch_id,
            total_requests=len(self),
            prefill_requests=len(prefills),
            decode_requests=len(decodes),
            total_tokens=total,
            prefill_tokens=sum(part.num_tokens for part in prefills),
            decode_tokens=sum(part.num_tokens for part in decodes),
            max_seq_len=self.max_seq_len,
            cached_tokens=sum(part.context_len for part in self.requests),
            budget_use=total / token_budget if token_budget else None,
        )

    def flatten(self, block_size: int) -> FlatBatch:
        """The arrays of one mixed forward pass over paged memory with `block_size` tokens a block."""
        return FlatBatch.build(self.requests, block_size)


@dataclass(frozen=True, eq=False)
class FlatBatch:
    """The arrays that one mixed forward pass needs; T tokens of B requests, S of which are sampled.

    All arrays are int64, `is_prefill` is bool. The names are vLLM's where it has them.
    """

    request_ids: tuple[str, ...]
    input_ids: IntArray
    """[T] token ids, request after request."""
    positions: IntArray
    """[T] position of each token in its own sequence."""
    slot_mapping: IntArray
    """[T] where each token's K and V go: block id x block size + offset in the block."""
    cu_seqlens: IntArray
    """[B + 1] where each request's tokens begin on the token axis; the last entry is T."""
    seq_lens: IntArray
    """[B] sequence length after this step."""
    context_lens: IntArray
    """[B] tokens that were in the cache before this step."""
    block_tables: IntArray
    """[B, most blocks] block ids, padded with 0, the null block that no request owns."""
    kv_cache_slots: IntArray
    """[B] row of each request in persistent per-request buffers."""
    is_prefill: NDArray[np.bool_]
    """[B] True where the request feeds (a chunk of) a prompt."""
    sample_rows: IntArray
    """[S] indices on the token axis whose logits are needed."""
    sample_request_ids: tuple[str, ...]

    @classmethod
    def build(cls, parts: Sequence[BatchedRequest], block_size: int) -> FlatBatch:
        """Lay the parts end to end.

        Raises:
            InvalidRequest: a block table is too short for its sequence.
        """
        import numpy as np

        for part in parts:
            if len(part.block_table) * block_size < part.seq_len:
                raise InvalidRequest(
                    f"request {part.request_id!r}: {len(part.block_table)} blocks of {block_size} do not hold "
                    f"{part.seq_len} tokens; allocate before the step"
                )
        lengths = np.array([part.num_tokens for part in parts], dtype=np.int64)
        context = np.array([part.context_len for part in parts], dtype=np.int64)
        cu_seqlens = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
        row = np.repeat(np.arange(len(parts)), lengths)
        positions = np.arange(cu_seqlens[-1]) - cu_seqlens[row] + context[row]
        tables = np.zeros((len(parts), max((len(p.block_table) for p in parts), default=0)), np.int64)
        for index, part in enumerate(parts):
            tables[index, : len(part.block_table)] = part.block_table
        sampled = [index for index, part in enumerate(parts) if part.sample]
        return cls(
            request_ids=tuple(part.request_id for part in parts),
            input_ids=np.fromiter(chain.from_iterable(part.token_ids for part in parts), np.int64, cu_seqlens[-1]),
            positions=positions,
            slot_mapping=tables[row, positions // block_size] * block_size + positions % block_size,
            cu_seqlens=cu_seqlens,
            seq_lens=context + lengths,
            context_lens=context,
            block_tables=tables,
            kv_cache_slots=np.array([part.kv_cache_slot for part in parts], dtype=np.int64),
            is_prefill=np.array([part.is_prefill for part in parts], dtype=np.bool_),
            sample_rows=cu_seqlens[1:][sampled] - 1,
            sample_request_ids=tuple(parts[index].request_id for index in sampled),
        )

    @cached_property
    def num_tokens(self) -> int:
        """T, the length of the token axis."""
        return len(self.input_ids)
