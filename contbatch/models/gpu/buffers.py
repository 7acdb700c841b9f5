"""What the device keeps of every running request: its block table, its newest token, its length.

The one idea: a request owns one row of these buffers, its `kv_cache_slot`, for as long as it runs. From one decode
step to the next only a token and a length change in it, and once in `block_size` steps a block is added. So a step
sends the cells that differ from what the device has (a copy of it lies in host memory to compare with), and the
tensors stay where they are: a captured graph reads the same addresses in every replay.

The last row belongs to no request. Its table is null blocks and its length 0; the rows with which a batch is filled up
to the size of a graph point there, so that they write to the null block and read nothing.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from contbatch.batch import FlatBatch
from contbatch.errors import InvalidConfig


class DecodeBuffers:
    """Persistent per-request tensors on `device`.

    Args:
        num_slots: requests that run at once; valid `kv_cache_slot`s are below it.
        max_blocks: blocks of the longest sequence.
        block_size: tokens a block.

    Raises:
        InvalidConfig: a size below 1.
    """

    def __init__(self, num_slots: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        for name, value in (("num_slots", num_slots), ("max_blocks", max_blocks), ("block_size", block_size)):
            if value < 1:
                raise InvalidConfig(f"{name} is {value}; use at least 1")
        self.num_slots, self.max_blocks, self.block_size = num_slots, max_blocks, block_size
        self.tables = torch.zeros(num_slots + 1, max_blocks, dtype=torch.int64, device=device)
        """[num_slots + 1, max_blocks] block ids."""
        self.tokens = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        """[num_slots + 1] the token to feed next."""
        self.lengths = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        """[num_slots + 1] tokens in the cache before this step, which is the position of that token."""
        self.rows = torch.full((num_slots,), num_slots, dtype=torch.int64, device=device)
        """[num_slots] the slot of each row of this step's batch; those behind the batch are the row of no request."""
        self._tables = np.zeros((num_slots + 1, max_blocks), np.int64)

    @property
    def padding_slot(self) -> int:
        """The row that belongs to no request."""
        return self.num_slots

    def fits(self, flat: FlatBatch) -> bool:
        """True for a batch of decode tokens alone, one for each request, whose tables and slots have room here."""
        return bool(
            0 < len(flat.seq_lens) <= self.num_slots
            and flat.num_tokens == len(flat.seq_lens) == len(flat.sample_rows)
            and flat.kv_cache_slots.max() < self.num_slots
            and flat.seq_lens.max() <= self.max_blocks * self.block_size
        )

    def update(self, flat: FlatBatch) -> int:
        """Make the buffers those of this step; the batch must fit.

        Returns:
            How many cells of block tables were sent.
        """
        slots, count, device = flat.kv_cache_slots, len(flat.seq_lens), self.tokens.device
        width = min(flat.block_tables.shape[1], self.max_blocks)
        used = np.arange(width) * self.block_size < flat.seq_lens[:, None]  # what lies behind is never read
        wanted = flat.block_tables[:, :width]
        batch_row, column = np.nonzero(used & (self._tables[slots, :width] != wanted))
        if len(column):
            slot, block = slots[batch_row], wanted[batch_row, column]
            self._tables[slot, column] = block
            where, place, value = torch.from_numpy(np.stack((slot, column, block))).to(device)
            self.tables[where, place] = value
        step = torch.from_numpy(np.stack((slots, flat.input_ids, flat.context_lens))).to(device)
        self.rows.fill_(self.padding_slot)
        self.rows[:count] = step[0]
        self.tokens[step[0]] = step[1]
        self.lengths[step[0]] = step[2]
        return len(column)

    def clear_rows(self) -> None:
        """A step of no request: every row is padding."""
        self.rows.fill_(self.padding_slot)


def decode_inputs(buffers: DecodeBuffers, bucket: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What a step of `bucket` rows feeds, with operations on the device alone, of fixed shapes.

    Returns:
        For each row its slot in the buffers, token, position, the cache slot its key and value go to, and the tokens
        that it looks at (0 for padding).
    """
    rows = buffers.rows[:bucket]
    positions = buffers.lengths[rows]
    blocks = buffers.tables[rows, positions // buffers.block_size]
    cache_slots = blocks * buffers.block_size + positions % buffers.block_size
    seen = torch.where(rows == buffers.padding_slot, 0, positions + 1)
    return rows, buffers.tokens[rows], positions, cache_slots, seen
