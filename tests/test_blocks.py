"""The block pool: reference counts, LRU reuse, the prefix index, and an integrity check that notices damage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from contbatch import blocks as blocks_module
from contbatch.blocks import NO_PARENT, BlockKey, BlockPool, block_hash, blocks_needed
from contbatch.errors import IntegrityError, InvalidConfig
from tests.toy import assert_alone, config, params, prompt, serve, toy_engine


def keys(tokens: Sequence[int], size: int = 4) -> list[BlockKey]:
    """The keys of the full blocks of a sequence."""
    found: list[BlockKey] = []
    parent = NO_PARENT
    for start in range(0, len(tokens) - size + 1, size):
        chunk = tuple(tokens[start : start + size])
        found.append(BlockKey(block_hash(parent, chunk), parent, chunk))
        parent = found[-1].hash
    return found


def hold(pool: BlockPool, tokens: Sequence[int]) -> list[int]:
    """Take blocks for `tokens` and enter the full ones into the index."""
    table = pool.take(blocks_needed(len(tokens), pool.block_size))
    assert table is not None
    for block, key in zip(table, keys(tokens, pool.block_size), strict=False):
        pool.remember(block, key)
    return table


def state(pool: BlockPool) -> dict[str, Any]:
    """Everything a pool knows, in an order that shows."""
    return {
        "free": pool.free_list,
        "refs": list(pool.ref_count),
        "index": {name: list(holders) for name, holders in pool._index.items()},
        "keys": dict(pool._keys),
        "cached": pool.num_cached,
    }


# Sizes


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_needed(tokens: int, blocks: int) -> None:
    assert blocks_needed(tokens, 4) == blocks


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_b003_sizes_below_one_are_named(value: Any) -> None:
    with pytest.raises(InvalidConfig, match=f"num_blocks is {value!r}"):
        BlockPool(value, 4)
    with pytest.raises(InvalidConfig, match=f"block_size is {value!r}"):
        BlockPool(4, value)


def test_a_new_pool_is_all_free_and_block_0_is_nobodys() -> None:
    pool = BlockPool(5, 4)
    assert pool.free_list == (1, 2, 3, 4, 5)
    assert (pool.num_free, pool.num_used, pool.num_cached) == (5, 0, 0)
    assert pool.take(5) == [1, 2, 3, 4, 5]


# Reference counts


def test_a_shared_block_is_free_when_in_no_table() -> None:
    pool = BlockPool(4, 4)
    table = hold(pool, range(8))
    pool.share(table)
    pool.check([table, table[:]])
    pool.release(table)
    assert pool.num_free == 2 and pool.num_used == 2
    pool.check([table])
    pool.release(table)
    assert pool.num_free == 4 and not any(pool.ref_count)
    pool.check([])


def test_sharing_a_free_block_takes_it_out_of_the_free_list() -> None:
    pool = BlockPool(4, 4)
    table = hold(pool, range(8))
    pool.release(table)
    assert pool.num_cached == 2 and pool.num_unreferenced(table) == 2
    pool.share(table[:1])
    assert pool.num_unreferenced(table) == 1 and table[0] not in pool.free_list and pool.num_cached == 1
    pool.check([table[:1]])


def test_b087_a_refusal_changes_nothing() -> None:
    pool = BlockPool(4, 4)
    pool.release(hold(pool, range(8)))
    held = pool.take(2)
    before = state(pool)
    assert pool.take(3) is None
    assert state(pool) == before
    assert held == [3, 4], "blocks that nobody can find again go first"


def test_double_free_is_an_error_and_changes_nothing() -> None:
    pool = BlockPool(4, 4)
    table = pool.take(2)
    assert table is not None
    pool.release(table)
    for again in (table, [3], [0]):
        before = state(pool)
        with pytest.raises(IntegrityError, match="freed twice"):
            pool.release(again)
        assert state(pool) == before
    held = pool.take(3)
    assert held is not None
    before = state(pool)
    with pytest.raises(IntegrityError, match=f"block {held[0]} is freed twice"):
        pool.release([*held, held[0]])
    assert state(pool) == before, "a table that names a block twice releases nothing"
    pool.check([held])


@pytest.mark.parametrize("length", [4, 5, 8, 9])
def test_b086_a_preempted_sequence_gives_back_exactly_its_blocks(length: int) -> None:
    pool = BlockPool(8, 4)
    table = hold(pool, range(length))
    free = pool.num_free
    pool.release(table)
    assert pool.num_free - free == {4: 1, 5: 2, 8: 2, 9: 3}[length]


# The order of reuse


def test_unknown_blocks_are_reused_first_and_known_ones_least_recently_used_first() -> None:
    pool = BlockPool(6, 4)
    old, young = hold(pool, range(100, 108)), hold(pool, range(200, 209))
    pool.release(old)
    pool.release(young)
    tail = young[2]
    assert pool.free_list == (tail, 6, old[1], old[0], young[1], young[0]), "tail first, so that a prefix lives longer"
    assert pool.take(3) == [tail, 6, old[1]]
    assert pool.lookup(keys(range(100, 108))) == [old[0]], "the prefix outlived what followed it"


def test_unknown_blocks_keep_their_tail_first_order_as_a_group() -> None:
    pool = BlockPool(6, 4)
    first, second = pool.take(3), pool.take(2)
    assert first == [1, 2, 3] and second == [4, 5]
    pool.release(first)
    pool.release(second)
    assert pool.free_list == (5, 4, 3, 2, 1, 6)


def test_a_hit_makes_a_block_recently_used_and_a_lookup_does_not() -> None:
    pool = BlockPool(2, 4)
    first, second = hold(pool, range(100, 104)), hold(pool, range(200, 204))
    pool.release(first)
    pool.release(second)
    before = state(pool)
    assert pool.lookup(keys(range(100, 104))) == first
    assert state(pool) == before
    pool.share(first)
    pool.release(first)
    assert pool.free_list == (*second, *first)


def test_reuse_drops_the_content_from_the_index() -> None:
    pool = BlockPool(2, 4)
    pool.release(hold(pool, range(8)))
    assert pool.num_cached == 2
    assert pool.take(2) is not None
    assert pool.lookup(keys(range(8))) == [] and pool.num_cached == 0 and not pool._index and not pool._keys


# The prefix index


def test_a_lookup_is_the_longest_run_from_the_start() -> None:
    pool = BlockPool(8, 4)
    table = hold(pool, range(12))
    assert pool.lookup(keys(range(12))) == table
    assert pool.lookup(keys([*range(8), 99, 99, 99, 99])) == table[:2]
    assert pool.lookup(keys([99, *range(1, 12)])) == []
    pool.forget(table[1])
    assert pool.lookup(keys(range(12))) == table[:1], "a gap ends the run"


def test_b120_a_block_is_known_by_all_that_comes_before_it() -> None:
    pool = BlockPool(8, 4)
    first, second, shared = [1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]
    hold(pool, first + shared)
    assert pool.lookup(keys(second + shared)) == []
    assert keys(second + shared)[1].hash != keys(first + shared)[1].hash, "the hash itself is chained"
    hold(pool, second)
    assert len(pool.lookup(keys(second + shared))) == 1, "the block after another parent is another block"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([65] * 4, [321] * 4),
        ([0] * 4, [65536] * 4),
        ([1, 23, 1, 23], [12, 3, 12, 3]),
        ([1, 2, 3, 4], [4, 3, 2, 1]),
        ([0, 0, 0, 1], [0, 0, 1, 0]),
    ],
)
def test_b118_different_tokens_have_different_hashes(one: list[int], other: list[int]) -> None:
    assert block_hash(NO_PARENT, one) != block_hash(NO_PARENT, other)
    assert block_hash(block_hash(NO_PARENT, one), other) != block_hash(block_hash(NO_PARENT, other), one)


def test_two_blocks_with_one_content_are_both_known() -> None:
    pool = BlockPool(4, 4)
    first, second = hold(pool, range(4)), hold(pool, range(4))
    assert pool.lookup(keys(range(4))) == first
    pool.release(first)
    pool.take(3)
    assert pool.lookup(keys(range(4))) == second, "one copy was reused, the other is still found"
    pool.check([second, [1, 3, 4]])


@pytest.fixture
def constant_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block hashes to the same value."""

    def constant(parent: bytes, token_ids: Sequence[int]) -> bytes:
        return b"same"

    monkeypatch.setattr(blocks_module, "block_hash", constant)
    monkeypatch.setattr("contbatch.scheduler.block_hash", constant)


@pytest.mark.usefixtures("constant_hash")
def test_b119_a_hash_collision_gives_no_wrong_hit() -> None:
    prompts = {f"r{start}": prompt(13, start) for start in range(3)}
    engine, toy = toy_engine(config(seqs=1, pool=16))
    assert_alone(toy, serve(engine, prompts, params(6)), params(6))
    assert all(not step.cached for step in engine.trace.steps)


@pytest.mark.usefixtures("constant_hash")
def test_b119_same_tokens_after_another_prefix_are_no_hit_under_collision() -> None:
    tail = prompt(9, 5)
    prompts = {"a": prompt(4) + tail, "b": prompt(4, 1) + tail, "c": prompt(4) + prompt(4, 2) + tail}
    engine, toy = toy_engine(config(seqs=1, pool=32))
    assert_alone(toy, serve(engine, prompts, params(6)), params(6))


# Damage


def _double_a_reference(pool: BlockPool) -> None:
    pool.ref_count[1] += 1


def _free_a_held_block(pool: BlockPool) -> None:
    pool._free[1] = None


def _lose_a_free_block(pool: BlockPool) -> None:
    del pool._free[6]


def _drop_a_reference(pool: BlockPool) -> None:
    pool.ref_count[2] = 0


def _free_the_null_block(pool: BlockPool) -> None:
    pool._free[0] = None


def _reference_the_null_block(pool: BlockPool) -> None:
    pool.ref_count[0] = 1


def _miscount_cached(pool: BlockPool) -> None:
    pool._num_cached += 1


def _forget_half(pool: BlockPool) -> None:
    del pool._keys[1]


def _forget_other_half(pool: BlockPool) -> None:
    del pool._index[next(iter(pool._index))]


def _two_keys_for_a_block(pool: BlockPool) -> None:
    pool._index[b"other"] = {1: None}


def _empty_index_entry(pool: BlockPool) -> None:
    pool._index[b"other"] = {}


def _wrong_content(pool: BlockPool) -> None:
    pool._keys[1] = pool._keys[1]._replace(hash=b"other")


def _more_blocks_than_there_are(pool: BlockPool) -> None:
    pool._free[99] = None


@pytest.mark.parametrize(
    "damage",
    [
        _double_a_reference,
        _free_a_held_block,
        _lose_a_free_block,
        _drop_a_reference,
        _free_the_null_block,
        _reference_the_null_block,
        _miscount_cached,
        _forget_half,
        _forget_other_half,
        _two_keys_for_a_block,
        _empty_index_entry,
        _wrong_content,
        _more_blocks_than_there_are,
    ],
)
def test_b095_check_notices_damage_in_every_field(damage: Callable[[BlockPool], None]) -> None:
    pool = BlockPool(6, 4)
    table = hold(pool, range(8))
    pool.release(hold(pool, range(50, 54)))
    pool.check([table])
    damage(pool)
    with pytest.raises(IntegrityError):
        pool.check([table])


@pytest.mark.parametrize(
    "tables",
    [[[1]], [[1, 2], [2]], [[1, 2, 2]], [[1, 2, 0]], [[1, 2], [3]], [], [[1, 2, 99]]],
)
def test_b095_check_notices_tables_that_do_not_fit_the_counts(tables: list[list[int]]) -> None:
    pool = BlockPool(6, 4)
    pool.take(2)
    pool.check([[1, 2]])
    with pytest.raises(IntegrityError):
        pool.check(tables)


# Any order of calls


class AnyOrder(RuleBasedStateMachine):
    """Takes, shares, releases, remembers and forgets in any order; a plain model beside it says what must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8, 2)
        self.tables: list[list[int]] = []
        self.content: dict[int, BlockKey] = {}

    @rule(count=st.integers(0, 9))
    def take(self, count: int) -> None:
        """Refused exactly when there are too few."""
        before = state(self.pool)
        free = self.pool.free_list
        table = self.pool.take(count)
        if count > len(free):
            assert table is None and state(self.pool) == before
            return
        assert table == list(free[:count])
        for block in table:
            self.content.pop(block, None)
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """One reference each."""
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=2, max_size=6))
    def remember(self, data: st.DataObject, tokens: list[int]) -> None:
        """Full blocks of a table that are not known yet."""
        table = data.draw(st.sampled_from(self.tables))
        for block, key in zip(table, keys(tokens, 2), strict=False):
            if block in self.content:
                break
            self.pool.remember(block, key)
            self.content[block] = key

    @rule(tokens=st.lists(st.integers(0, 1), min_size=2, max_size=6))
    def hit(self, tokens: list[int]) -> None:
        """What is found holds the very tokens asked for."""
        wanted = keys(tokens, 2)
        before = state(self.pool)
        found = self.pool.lookup(wanted)
        assert state(self.pool) == before
        assert [self.content[block] for block in found] == wanted[: len(found)]
        if len(found) < len(wanted):
            assert wanted[len(found)] not in self.content.values(), "nothing that is known is missed"
        self.pool.share(found)
        self.tables.append(found)

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """A held block leaves the index."""
        held = [block for block in sorted(self.content) if self.pool.ref_count[block]]
        if held:
            block = data.draw(st.sampled_from(held))
            self.pool.forget(block)
            del self.content[block]

    @invariant()
    def rules_hold(self) -> None:
        """Free + used = total; counts are what the tables say; the index is what the model says."""
        self.pool.check(self.tables)
        assert self.pool.num_free + self.pool.num_used == 8
        assert self.pool._keys == self.content
        assert self.pool.num_cached == sum(block in self.content for block in self.pool.free_list)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=30)
