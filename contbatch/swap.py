"""Host memory: where preemption by swap keeps the blocks of its victims.

A victim's computed blocks are copied out of the device's cache and later back into other blocks of it; nothing is
computed again. The pool is bounded: where there is no room, the victim falls back to recomputation. It is a
`BlockPool` with one more operation, so it shares by content too: a full block that is here already, because
another victim began with the same tokens or because this one was here before, is not copied a second time.

The pool hands out block ids; the memory belongs to the executor. A victim's blocks stay until the step that brings
them back is committed, so no step copies out to and in from the same host block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from contbatch.blocks import BlockKey, BlockPool


class HostTable(NamedTuple):
    """Where a sequence lies in host memory: its blocks, of which the first `num_known` were there before."""

    blocks: list[int]
    num_known: int


class HostPool(BlockPool):
    """`num_blocks` blocks of `block_size` tokens in host memory; there may be none."""

    def _check_num_blocks(self, num_blocks: int) -> None:
        """The configuration has checked it; 0 is a pool in which nothing fits."""

    def store(self, keys: Sequence[BlockKey], count: int) -> HostTable | None:
        """Room for `count` blocks of a sequence, or None (and nothing changes) if there is too little.

        Args:
            keys: of its full blocks; those that are known here are shared.
            count: all of its blocks.
        """
        known = self.lookup(keys)
        if count - len(known) + self.num_unreferenced(known) > self.num_free:
            return None
        self.share(known)
        blocks = [*known, *(self.take(count - len(known)) or ())]
        for block, key in list(zip(blocks, keys, strict=False))[len(known) :]:
            self.remember(block, key)
        return HostTable(blocks, len(known))
