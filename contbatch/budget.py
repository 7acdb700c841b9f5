"""The token budget of one iteration.

One forward pass takes only so many tokens before the step gets slow. `TokenBudget` counts what a step has
given away, under three token limits (prefill, decode, both together) and a limit on sequences. It knows
nothing of requests or blocks: it is the jar that the scheduler pours from.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from contbatch.errors import InvalidConfig

UNLIMITED = 1 << 60
"""A limit that never binds, for policies that declare no token budget."""


@dataclass
class TokenBudget:
    """Limits of one iteration and what is already allocated.

    Args:
        max_prefill_tokens: most prefill tokens in a step.
        max_decode_tokens: most decode tokens in a step.
        max_total_tokens: most tokens in a step.
        max_num_seqs: most sequences in a step.

    Raises:
        InvalidConfig: for a limit below 1.
    """

    max_prefill_tokens: int
    max_decode_tokens: int
    max_total_tokens: int
    max_num_seqs: int = UNLIMITED
    prefill_tokens: int = field(default=0, init=False)
    decode_tokens: int = field(default=0, init=False)
    num_seqs: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        limits = ("max_prefill_tokens", "max_decode_tokens", "max_total_tokens", "max_num_seqs")
        for name in limits:
            at_least_one(name, getattr(self, name))

    @classmethod
    def of(cls, max_total_tokens: int, max_num_seqs: int = UNLIMITED) -> TokenBudget:
        """A budget with one limit for prefill and decode together, as in vLLM."""
        return cls(max_total_tokens, max_total_tokens, max_total_tokens, max_num_seqs)

    @property
    def total_tokens(self) -> int:
        """Tokens allocated so far in this iteration."""
        return self.prefill_tokens + self.decode_tokens

    @property
    def remaining_prefill(self) -> int:
        """Prefill tokens that can still be allocated."""
        return self._remaining(self.max_prefill_tokens - self.prefill_tokens)

    @property
    def remaining_decode(self) -> int:
        """Decode tokens that can still be allocated."""
        return self._remaining(self.max_decode_tokens - self.decode_tokens)

    @property
    def decodes_left(self) -> int:
        """Sequences that can still get one decode token each."""
        return min(self.remaining_decode, self.max_num_seqs - self.num_seqs)

    def _remaining(self, own: int) -> int:
        if self.num_seqs >= self.max_num_seqs:
            return 0
        return max(0, min(own, self.max_total_tokens - self.total_tokens))

    @property
    def is_exhausted(self) -> bool:
        """True when neither a prefill nor a decode token can be allocated."""
        return self.remaining_prefill == 0 and self.remaining_decode == 0

    def reset(self) -> None:
        """Start a new iteration."""
        self.prefill_tokens = self.decode_tokens = self.num_seqs = 0

    def try_allocate_prefill(self, num_tokens: int) -> bool:
        """Allocate `num_tokens` prefill tokens for one sequence: all, or False and nothing changes."""
        at_least_one("num_tokens", num_tokens)
        if num_tokens > self.remaining_prefill:
            return False
        self.prefill_tokens += num_tokens
        self.num_seqs += 1
        return True

    def try_allocate_decode(self, num_tokens: int = 1) -> bool:
        """Allocate `num_tokens` decode tokens for one sequence: all, or False and nothing changes."""
        at_least_one("num_tokens", num_tokens)
        if num_tokens > self.remaining_decode:
            return False
        self.decode_tokens += num_tokens
        self.num_seqs += 1
        return True

    def count_decodes(self, num_seqs: int) -> None:
        """Allocate one decode token for each of at most `decodes_left` sequences."""
        self.decode_tokens += num_seqs
        self.num_seqs += num_seqs

    def allocate_chunk(self, num_tokens: int) -> int:
        """Allocate up to `num_tokens` prefill tokens for one sequence; returns how many (0 if nothing is left)."""
        at_least_one("num_tokens", num_tokens)
        chunk = min(num_tokens, self.remaining_prefill)
        if chunk:
            self.try_allocate_prefill(chunk)
        return chunk

    def refund(self, *, prefill: int = 0, decode: int = 0) -> None:
        """Return the tokens of one sequence whose grant was taken back in this iteration."""
        granted = 0 <= prefill <= self.prefill_tokens and 0 <= decode <= self.decode_tokens
        if not granted or prefill + decode < 1:
            raise InvalidConfig(
                f"refund of {prefill} prefill and {decode} decode tokens, but only {self.prefill_tokens} and "
                f"{self.decode_tokens} are allocated; refund what was granted, once"
            )
        self.prefill_tokens -= prefill
        self.decode_tokens -= decode
        self.num_seqs -= 1


def at_least_one(name: str, value: object) -> None:
    """Raise InvalidConfig unless `value` is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidConfig(f"{name} is {value!r}; use an integer of at least 1")
