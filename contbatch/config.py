"""The limits that a scheduler works under, checked before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

from contbatch.budget import at_least_one
from contbatch.errors import InvalidConfig
from contbatch.request import PreemptionMode


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
        preemption_mode: "recompute" or "swap".
        num_host_blocks: blocks in host memory that preemption by swap may fill.
        max_num_queued_reqs: most requests in the queue; one more is refused. None for no limit.
        max_num_queued_tokens: most tokens of queued requests together. None for no limit.

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
    preemption_mode: PreemptionMode | str = PreemptionMode.RECOMPUTE
    num_host_blocks: int = 0
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "block_size",
            "num_blocks",
        ):
            at_least_one(name, getattr(self, name))
        for name in ("enable_chunked_prefill", "enable_prefix_caching", "scheduler_reserve_full_isl"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidConfig(f"{name} is {getattr(self, name)!r}; use True or False")
        for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
            if getattr(self, name) is not None:
                at_least_one(name, getattr(self, name))
        for name in ("long_prefill_token_threshold", "num_host_blocks"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InvalidConfig(f"{name} is {value!r}; use an integer of at least 0, where 0 turns it off")
        try:
            object.__setattr__(self, "preemption_mode", PreemptionMode(self.preemption_mode))
        except ValueError:
            modes = " or ".join(repr(mode.value) for mode in PreemptionMode)
            raise InvalidConfig(f"preemption_mode is {self.preemption_mode!r}; use {modes}") from None
        if not isinstance(self.watermark, int | float) or not 0 <= self.watermark < 1:
            raise InvalidConfig(f"watermark is {self.watermark!r}; use a share of the pool in [0, 1)")

    @property
    def watermark_blocks(self) -> int:
        """Blocks that an admission must leave free while others run."""
        return int(self.watermark * self.num_blocks)
