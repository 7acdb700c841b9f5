"""Paged memory: a pool of fixed-size blocks, shared by reference count, found again by content.

A KV cache block holds `block_size` tokens of one sequence. The pool hands out block **ids**; the tensors belong
to the executor. Three ideas live here:

- *Reference counts.* A block may be in several block tables (a shared prefix); it is free when in none.
- *The prefix index.* A full block is known by a hash of its tokens chained with the hash of the block before it,
  so equal hashes mean equal prefixes from position 0. A hit is checked against the tokens too.
- *Lazy eviction.* A freed block keeps its place in the index until it is handed out again. Blocks that nobody
  can find again are reused first, the others least recently used first (the order of vLLM v1).

Ids run from 1 to `num_blocks`. Block 0 is the null block: no request owns it, and padded rows may point to it.
A pool of blocks in host memory works alike; see `contbatch.swap`.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import NamedTuple

from contbatch.budget import at_least_one
from contbatch.errors import IntegrityError

NO_PARENT = b""
"""The parent hash of a sequence's first block."""


class BlockKey(NamedTuple):
    """What a full block is known by."""

    hash: bytes
    parent: bytes
    token_ids: tuple[int, ...]


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of a full block, chained with the hash of the block before it (`NO_PARENT` for the first)."""
    return sha256(parent + array("Q", token_ids).tobytes()).digest()


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens.

    Raises:
        InvalidConfig: a size below 1.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._check_num_blocks(num_blocks)
        at_least_one("block_size", block_size)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.ref_count = [0] * (num_blocks + 1)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self._index: dict[bytes, dict[int, None]] = {}
        self._keys: dict[int, BlockKey] = {}
        self._num_cached = 0

    def _check_num_blocks(self, num_blocks: int) -> None:
        at_least_one("num_blocks", num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that no table holds; those the prefix index still knows are among them."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that at least one table holds."""
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Free blocks that the prefix index still knows."""
        return self._num_cached

    @property
    def free_list(self) -> tuple[int, ...]:
        """Free block ids, the next one to be handed out first."""
        return tuple(self._free)

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` nobody holds: taking them costs as many free blocks."""
        return sum(self.ref_count[block] == 0 for block in blocks)

    def take(self, count: int) -> list[int] | None:
        """Hand out `count` blocks with one reference each, or None (and nothing changes) if there are too few."""
        if count > len(self._free):
            return None
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            if block in self._keys:
                self.forget(block)
            self.ref_count[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Add one reference to each block, taking it out of the free list if it was there."""
        for block in blocks:
            if self.ref_count[block] == 0:
                del self._free[block]
                self._num_cached -= 1
            self.ref_count[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each block of a table (in table order).

        Blocks that become free go to the free list tail first, so that a prefix outlives what follows it:
        unknown ones to the front, known ones to the back.

        Raises:
            IntegrityError: a block is released that nobody holds, or is named twice; nothing changes.
        """
        if len(set(blocks)) < len(blocks) or not all(self.ref_count[block] > 0 for block in blocks):
            twice = next(block for block in blocks if not self.ref_count[block] or blocks.count(block) > 1)
            raise IntegrityError(f"block {twice} is freed twice; it is in no block table, or twice in this one")
        unknown: list[int] = []
        for block in reversed(blocks):
            self.ref_count[block] -= 1
            if self.ref_count[block]:
                continue
            if block in self._keys:
                self._free[block] = None
                self._num_cached += 1
            else:
                unknown.append(block)
        for block in reversed(unknown):
            self._free[block] = None
            self._free.move_to_end(block, last=False)

    def lookup(self, keys: Iterable[BlockKey]) -> list[int]:
        """Blocks that hold the longest run of `keys` from the start. Changes nothing, not even the LRU order."""
        found: list[int] = []
        for key in keys:
            block = next(iter(self._index.get(key.hash, ())), None)
            if block is None or self._keys[block] != key:
                break
            found.append(block)
        return found

    def remember(self, block: int, key: BlockKey) -> None:
        """Enter a full block that somebody holds into the prefix index."""
        self._keys[block] = key
        self._index.setdefault(key.hash, {})[block] = None

    def key(self, block: int) -> BlockKey | None:
        """What the prefix index knows a block by, if it does."""
        return self._keys.get(block)

    def forget(self, block: int) -> None:
        """Take a block out of the prefix index."""
        key = self._keys.pop(block)
        self._num_cached -= self.ref_count[block] == 0
        holders = self._index[key.hash]
        del holders[block]
        if not holders:
            del self._index[key.hash]

    def forget_free(self, key: BlockKey) -> None:
        """Take the blocks with this content out of the index, as far as nobody holds them."""
        for block in [block for block in self._index.get(key.hash, ()) if not self.ref_count[block]]:
            self.forget(block)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Prove the block rule: free + used = total, and each reference count = the tables that hold the block.

        Args:
            tables: the block tables of all live requests.

        Raises:
            IntegrityError: names the block and both numbers.
        """
        held: Counter[int] = Counter()
        for table in tables:
            if len(set(table)) != len(table):
                raise IntegrityError(f"a block table holds a block twice: {list(table)}")
            held.update(table)
        for block in range(1, self.num_blocks + 1):
            if held[block] != self.ref_count[block]:
                raise IntegrityError(
                    f"block {block} has reference count {self.ref_count[block]} but is in {held[block]} tables"
                )
            if (block in self._free) != (held[block] == 0):
                raise IntegrityError(
                    f"block {block} is in {held[block]} tables and its place in the free list is wrong"
                )
        if 0 in held or 0 in self._free or self.ref_count[0]:
            raise IntegrityError("block 0 is the null block and belongs to nobody")
        strangers = {*held, *self._free} - set(range(1, self.num_blocks + 1))
        if strangers:
            raise IntegrityError(f"blocks {sorted(strangers)} do not exist; ids run from 1 to {self.num_blocks}")
        self._check_index()

    def _check_index(self) -> None:
        indexed = sorted((block, name) for name, blocks in self._index.items() for block in blocks)
        if indexed != sorted((block, key.hash) for block, key in self._keys.items()) or not all(self._index.values()):
            raise IntegrityError("the prefix index and the blocks' own keys disagree")
        for block, key in self._keys.items():
            if key.hash != block_hash(key.parent, key.token_ids):
                raise IntegrityError(f"block {block} is known by a hash that is not that of its tokens")
        if self._num_cached != sum(block in self._keys for block in self._free):
            raise IntegrityError(f"{self._num_cached} cached blocks are counted, which is not what the free list holds")
