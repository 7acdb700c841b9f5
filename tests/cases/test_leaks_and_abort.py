"""Cases: blocks that leak or are given away twice, and requests that are aborted.

Each test restates one line of a list of faults that were found in other engines; its id is in the name. Free blocks
that the prefix index still knows ("cached") are counted among the free ones here.
"""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import pytest

from contbatch.batch import ScheduledBatch
from contbatch.blocks import BlockKey, BlockPool, block_hash
from contbatch.engine import Engine, TokenEvent
from contbatch.errors import IntegrityError
from contbatch.executor import ScriptedExecutor
from contbatch.metrics import summarise
from contbatch.request import FinishReason, RunningRequest, SamplingParams
from tests.cases.common import ALL, Events, Forced, block_tables, drive, grants, preemptions
from tests.toy import Ticks, Toy, assert_alone, assert_empty, config, params, prompt, serve, toy_engine


def random_traffic(engine: Engine, seed: int, after_step: Callable[[], None] = lambda: None) -> None:
    """30 requests with shared prefixes, every fourth of them aborted at some time."""
    draw = random.Random(seed)
    bs = engine.config.block_size
    names = []
    for index in range(30):
        tokens = [*prompt(bs * draw.randint(0, 1), index % 3), *prompt(draw.randint(1, 7), index)]
        names.append(engine.add_request(tokens, params(draw.randint(1, 8))))
        if index % 4 == 3:
            engine.abort(draw.choice(names[-4:]))
        engine.step()
        after_step()
    while engine.has_unfinished:
        engine.step()
        after_step()


# Leaks, double free, accounting


@pytest.mark.parametrize("policy", ALL)
@pytest.mark.parametrize("bs", [1, 4, 16])
def test_b081_after_random_traffic_every_block_is_back(bs: int, policy: str) -> None:
    engine, toy = toy_engine(config(pool=64 // bs, bs=bs, budget=24, seqs=5, mml=48), policy)
    random_traffic(engine, seed=bs)
    assert_empty(engine)
    reasons = Counter(done.finish_reason for done in engine.completions.values())
    assert reasons[FinishReason.ABORT] >= 3 and sum(reasons.values()) == 30
    for done in engine.completions.values():
        assert done.token_ids == toy.alone(done.prompt_token_ids, params(8))[: len(done.token_ids)]


@pytest.mark.parametrize("policy", ALL)
@pytest.mark.parametrize("prefix", [True, False])
def test_b082_each_block_is_in_one_state_after_every_step(policy: str, prefix: bool) -> None:
    """Policies that mix prefill and decode in a step, and those that do not."""
    engine, _ = toy_engine(config(pool=16, bs=4, budget=12, seqs=4, mml=48, prefix=prefix), policy)
    pool = engine.scheduler.pool

    def each_block_in_one_state() -> None:
        engine.scheduler.check()
        held = Counter(block for request in engine.scheduler.running for block in request.block_table)
        assert Counter(dict(enumerate(pool.ref_count))) == held
        assert sorted([*pool.free_list, *held]) == list(range(1, 17))
        known = sum(pool.key(block) is not None for block in pool.free_list)
        assert pool.num_cached == known and (prefix or not known)
        assert (pool.num_free - known) + known + pool.num_used == 16

    random_traffic(engine, seed=82, after_step=each_block_in_one_state)
    for step, tables in block_tables(engine.trace):
        held = {block for table in tables.values() for block in table}
        assert len(held) + step.free_blocks == 16, "the trace alone says the same"


@pytest.mark.parametrize("policy", ALL)
def test_b084_fifty_different_prompts_one_after_another(policy: str) -> None:
    engine, toy = toy_engine(config(pool=8, bs=4, mml=32), policy)
    for index in range(50):
        done = engine.generate([prompt(12, index)], params(3))[0]
        assert done.token_ids == toy.alone(prompt(12, index), params(3))
        assert engine.scheduler.pool.num_used == 0
    for index, cached in ((49, 8), (0, 0)):
        name = engine.generate([prompt(12, index)], params(3))[0].request_id
        assert summarise(engine.trace).requests[name].cached_tokens == cached, "the first one was evicted"


@pytest.mark.parametrize("policy", ["VllmV1", "PrefillDecodeBudget", "SarathiServe", "NanoVllm", "StaticBatching"])
def test_b085_the_blocks_of_a_live_request_are_not_given_away(policy: str) -> None:
    engine, toy = toy_engine(config(pool=6, bs=4), policy)
    shared = prompt(12)
    serve(engine, {"first": [*shared, 1]}, params(1))
    engine.add_request([*shared, 2], params(4), request_id="A")
    engine.step()
    assert len(engine.scheduler.requests["A"].block_table) == 4 and engine.trace.steps[-1].cached == {"A": 12}
    engine.add_request(prompt(13, 5), params(4), request_id="B")
    drive(engine)
    for _, tables in block_tables(engine.trace):
        assert not set(tables.get("A", ())) & set(tables.get("B", ()))
    assert_alone(toy, {name: engine.completions[name] for name in "AB"}, params(4))


@pytest.mark.parametrize(("length", "blocks"), [(4, 1), (5, 2), (8, 2), (9, 3)])
@pytest.mark.parametrize("prefix", [True, False])
def test_b086_a_preempted_request_gives_back_exactly_its_blocks(length: int, blocks: int, prefix: bool) -> None:
    policy = Forced()
    engine, toy = toy_engine(config(pool=12, bs=4, prefix=prefix), policy)
    for index, name in enumerate("ab"):
        engine.add_request(prompt(length, index), params(4), request_id=name)
    engine.step()
    assert engine.scheduler.pool.num_free == 12 - 2 * blocks
    engine.scheduler.policy, policy.victims = policy, {"a", "b"}
    engine.step()
    assert engine.scheduler.pool.num_free == 12
    engine.scheduler.check()
    drive(engine)
    assert_alone(toy, engine.completions, params(4))


def test_b087_a_refused_allocation_changes_nothing() -> None:
    pool = BlockPool(5, 4)
    table = pool.take(5) or []
    tokens = [(1, 2, 3, 4), (5, 6, 7, 8)]
    parent = b""
    for block, chunk in zip(table, tokens, strict=False):
        key = BlockKey(block_hash(parent, chunk), parent, chunk)
        pool.remember(block, key)
        parent = key.hash
    pool.release(table[1:3])

    def state() -> tuple[object, ...]:
        known = [pool.key(block) for block in range(6)]
        return pool.free_list, list(pool.ref_count), pool.num_cached, pool.num_free, known

    before = state()
    assert pool.num_free == 2 and pool.take(3) is None and state() == before
    assert pool.take(2) is not None and pool.num_free == 0


def test_b087_a_request_that_is_not_admitted_touches_no_block() -> None:
    engine, toy = toy_engine(config(pool=6, bs=4))
    serve(engine, {"old": [*prompt(8, 1), 1]}, params(1))
    engine.add_request(prompt(13), params(4), request_id="A")
    engine.step()
    assert engine.scheduler.pool.num_free == 2
    engine.add_request([*prompt(8, 1), *prompt(5, 2)], params(2), request_id="B")
    pool = engine.scheduler.pool
    before = pool.free_list, list(pool.ref_count), pool.num_cached, [pool.key(block) for block in range(7)]
    engine.step()
    assert "B" in engine.trace.steps[-1].reasons, "2 of its 4 blocks are cached, but those are the 2 free ones"
    after = pool.free_list, list(pool.ref_count), pool.num_cached, [pool.key(block) for block in range(7)]
    assert before == after
    drive(engine)
    assert_alone(toy, {"B": engine.completions["B"]}, params(2))


def test_b089_after_a_hundred_requests_nothing_is_kept_of_them() -> None:
    gc.collect()
    known = sum(isinstance(item, RunningRequest) for item in gc.get_objects())
    engine = Engine(ScriptedExecutor(), config())
    for index in range(100):
        if index % 2:
            list(engine.stream(prompt(4, index), params(2)))
        else:
            engine.add_request(prompt(4, index), params(2), on_event=Events())
    engine.run()
    assert_empty(engine)
    assert len(engine.completions) == 50, "what a stream gave out is not kept a second time"
    gc.collect()
    left = sum(isinstance(item, RunningRequest) for item in gc.get_objects()) - known
    assert left <= engine.config.max_num_seqs, "at most those of the last plan"


def test_b090_blocks_follow_the_chunks() -> None:
    engine, _ = toy_engine(config(prefix=False, budget=4, bs=4))
    serve(engine, {"a": prompt(18)}, params(1))
    assert [step.counts for step in engine.trace.steps] == [[4], [4], [4], [4], [2]]
    assert [len(tables["a"]) for _, tables in block_tables(engine.trace)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("policy", ["VllmV1", "PrefillDecodeBudget", "SarathiServe", "NanoVllm"])
def test_b092_aborting_between_chunks_gives_everything_back(policy: str) -> None:
    engine, toy = toy_engine(config(budget=4, bs=4, pool=20), policy)
    names = [engine.add_request(prompt(20, index), params(2)) for index in range(3)]
    for name in names:
        for _ in range(2):
            engine.step()
            assert grants(engine.trace.steps[-1]) == {name: 4}
        assert engine.scheduler.requests[name].is_prefilling
        engine.abort(name)
        assert engine.scheduler.pool.num_free == 20
    assert_alone(toy, serve(engine, {"next": prompt(12, 9)}, params(3)), params(3))


def test_b093_a_hit_is_not_evicted_for_somebody_else() -> None:
    engine, toy = toy_engine(config(pool=6, bs=4))
    shared = prompt(8)
    serve(engine, {"X": [*shared, 7]}, params(1))
    engine.add_request([*shared, 9], params(5), request_id="B")
    engine.step()
    table = engine.scheduler.requests["B"].block_table[:2]
    assert engine.trace.steps[-1].cached == {"B": 8}
    engine.add_request(prompt(15, 3), params(2), request_id="C")
    while "B" in engine.scheduler.requests:
        assert engine.scheduler.requests["B"].block_table[:2] == table
        assert [engine.scheduler.pool.ref_count[block] for block in table] == [1, 1]
        engine.step()
        engine.scheduler.check()
    drive(engine)
    assert_alone(toy, {"B": engine.completions["B"]}, params(5))
    assert_alone(toy, {"C": engine.completions["C"]}, params(2))


@pytest.mark.parametrize("policy", ALL)
@pytest.mark.parametrize("prefix", [True, False])
def test_b094_equal_prompts_in_one_step_hold_no_free_block(policy: str, prefix: bool) -> None:
    engine, toy = toy_engine(config(bs=4, prefix=prefix), policy)
    for name in "ab":
        engine.add_request(prompt(9), params(5), request_id=name)
    while engine.has_unfinished:
        engine.step()
        held = {block for request in engine.scheduler.running for block in request.block_table}
        assert not held & set(engine.scheduler.pool.free_list)
        engine.scheduler.check()
    assert_alone(toy, engine.completions, params(5))


def _count_once_more(engine: Engine) -> None:
    engine.scheduler.pool.ref_count[engine.scheduler.requests["a"].block_table[0]] += 1


def _count_nobody(engine: Engine) -> None:
    engine.scheduler.pool.ref_count[engine.scheduler.requests["a"].block_table[1]] = 0


def _one_block_in_two_places(engine: Engine) -> None:
    engine.scheduler.requests["a"].block_table[1] = engine.scheduler.requests["b"].block_table[1]


def _one_block_twice_in_a_table(engine: Engine) -> None:
    table = engine.scheduler.requests["a"].block_table
    table[1] = table[0]


@pytest.mark.parametrize(
    "damage", [_count_once_more, _count_nobody, _one_block_in_two_places, _one_block_twice_in_a_table]
)
def test_b095_damage_is_noticed(damage: Callable[[Engine], None]) -> None:
    engine, _ = toy_engine(config())
    for index, name in enumerate("ab"):
        engine.add_request(prompt(7, index), params(4), request_id=name)
    engine.step()
    engine.scheduler.check()
    damage(engine)
    with pytest.raises(IntegrityError):
        engine.scheduler.check()


def test_b096_references_in_random_order_add_up() -> None:
    """The prefix index is flat, not a tree; what is counted in it are references to blocks."""
    draw = random.Random(96)
    pool = BlockPool(6, 4)
    tables = [pool.take(2) or []]
    for _ in range(200):
        if tables and draw.random() < 0.5:
            pool.release(tables.pop(draw.randrange(len(tables))))
        elif tables and draw.random() < 0.5:
            tables.append(list(draw.choice(tables)))
            pool.share(tables[-1])
        else:
            taken = pool.take(2)
            tables += [taken] if taken else []
        assert Counter(dict(enumerate(pool.ref_count))) == Counter(block for table in tables for block in table)
        pool.check(tables)


# Abort and disconnect


def test_b099_a_request_aborted_while_waiting_is_in_no_step() -> None:
    """Its time in the queue is its whole time (E2E): queue time proper ends with the first computation."""
    engine, toy = toy_engine(config(seqs=1))
    engine.add_request(prompt(4), params(5), request_id="A")
    engine.add_request(prompt(4, 1), params(5), request_id="B")
    engine.run(max_steps=2)
    engine.abort("B")
    drive(engine)
    for step in engine.trace.steps:
        assert "B" not in [*step.request_ids, *step.admitted, *step.sampled, *step.finished, *step.new_blocks]
    aborted = summarise(engine.trace).requests["B"]
    assert aborted.finish_reason == "abort" and aborted.steps.e2e == 2
    assert aborted.steps.queue_time is None and aborted.steps.ttft is None
    assert_alone(toy, {"A": engine.completions["A"]}, params(5))


def test_b100_closing_a_stream_computes_no_further_token() -> None:
    engine, toy = toy_engine(config())
    stream = engine.stream(prompt(4), params(200))
    assert [next(stream).token_id for _ in range(3)] == list(toy.alone(prompt(4), params(3)))
    computed = toy.num_tokens
    stream.close()
    assert toy.num_tokens == computed and engine.scheduler.pool.num_used == 0
    assert engine.step() == [] and toy.num_tokens == computed
    assert engine.trace.finished[stream.request_id].reason == "abort"
    assert_empty(engine)


def test_b101_aborting_what_is_not_there_changes_nothing() -> None:
    engine, toy = toy_engine(config())
    events = Events()
    engine.add_request(prompt(4), params(1), request_id="ended", on_event=events)
    engine.add_request(prompt(4, 1), params(9), request_id="gone", on_event=events)
    engine.add_request(prompt(4, 2), params(3), request_id="live", on_event=events)
    engine.step()
    assert engine.abort("gone")
    before = engine.trace.digest(), len(events.all), engine.scheduler.pool.num_free
    for name in ("nope", "ended", "gone", "gone", ""):
        assert not engine.abort(name)
    assert before == (engine.trace.digest(), len(events.all), engine.scheduler.pool.num_free)
    drive(engine)
    assert sorted(events.ends(), key=lambda end: end[0]) == [
        ("ended", FinishReason.LENGTH),
        ("gone", FinishReason.ABORT),
        ("live", FinishReason.LENGTH),
    ]
    assert_alone(toy, {"live": engine.completions["live"]}, params(3))


class Hooks(Toy):
    """A toy with a hook before and one behind its forward pass."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.hooks: dict[str, Callable[[], object]] = {}

    def execute(self, batch: ScheduledBatch, sampling: Mapping[str, SamplingParams]) -> Mapping[str, int | Exception]:
        """Hook, forward pass, hook."""
        self.hooks.get("before", bool)()
        tokens = super().execute(batch, sampling)
        self.hooks.get("behind", bool)()
        return tokens


@pytest.mark.parametrize("hook", ["before", "behind"])
@pytest.mark.parametrize("name", ["nope", "ended", "a"])
def test_b101_an_abort_from_inside_a_step_lets_the_step_complete(hook: str, name: str) -> None:
    toy = Hooks(64, 4)
    engine = Engine(toy, config(), clock=Ticks())
    engine.add_request(prompt(4, 3), params(1), request_id="ended")
    drive(engine)
    for index, known in enumerate("ab"):
        engine.add_request(prompt(4, index), params(3), request_id=known)
    toy.hooks[hook] = lambda: (engine.abort(name), engine.abort(name))
    engine.step()
    toy.hooks.clear()
    assert engine.trace.steps[-1].counts == [4, 4] and "b" in engine.trace.steps[-1].sampled
    drive(engine)
    assert_alone(toy, {"b": engine.completions["b"]}, params(3))
    assert (engine.completions["a"].finish_reason is FinishReason.ABORT) == (name == "a")


@pytest.mark.parametrize("hook", ["before", "behind"])
def test_b102_an_abort_in_the_step_of_the_last_token_is_an_abort(hook: str) -> None:
    toy = Hooks(64, 4)
    engine = Engine(toy, config(), clock=Ticks())
    engine.add_request(prompt(4), params(4), request_id="a")
    engine.run(max_steps=3)
    toy.hooks[hook] = lambda: engine.abort("a")
    (done,) = engine.run()
    assert done.finish_reason is FinishReason.ABORT and done.token_ids == toy.alone(prompt(4), params(3))
    metrics = summarise(engine.trace)
    assert (metrics.aborted, metrics.completed) == (1, 0)
    assert_empty(engine)


@pytest.mark.parametrize("place", ["callback", "before", "behind"])
@pytest.mark.parametrize("order", ["AB", "BA"])
def test_b103_an_abort_of_one_leaves_the_other_alone(place: str, order: str) -> None:
    toy = Hooks(64, 4)
    engine = Engine(toy, config(), clock=Ticks())

    def callback(_: TokenEvent) -> None:
        toy.hooks.get("callback", bool)()

    for name in order:
        engine.add_request(prompt(6, ord(name)), params(6), request_id=name, on_event=callback)
    engine.run(max_steps=2)
    toy.hooks[place] = lambda: engine.abort("A")
    engine.step()
    toy.hooks.clear()
    assert engine.trace.steps[-1].finished == {"A": "abort"}
    held = engine.scheduler.requests["B"].block_table
    assert engine.scheduler.pool.num_used == len(held), "A's blocks are free after the step"
    drive(engine)
    assert_alone(toy, {"B": engine.completions["B"]}, params(6))
    assert_empty(engine)


HOOKS = ["after add", "after schedule", "after execute", "after update", "in a callback", "while preempted"]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("at", [0, 1, 3])
def test_b105_an_abort_at_any_hook_is_one_event_within_a_step(hook: str, at: int) -> None:
    """`at` is the step: the first one, the second chunk of its prompt, or a decode."""
    toy, policy, events = Hooks(12, 4), Forced(), Events()
    engine = Engine(toy, config(pool=12, bs=4, budget=6), policy, clock=Ticks())
    other: list[TokenEvent] = []

    def abort() -> None:
        if len(engine.trace.steps) >= at:
            engine.abort("victim")

    def tell(event: TokenEvent) -> None:
        other.append(event)
        if hook == "in a callback":
            abort()

    engine.add_request(prompt(3, 1), params(12), request_id="other", on_event=tell)
    engine.add_request(prompt(8), params(12), request_id="victim", on_event=events)
    if hook in ("after schedule", "after execute"):
        toy.hooks["before" if hook == "after schedule" else "behind"] = abort
    while engine.has_unfinished:
        if hook == "after add" and at == len(engine.trace.steps):
            abort()
        if hook == "while preempted" and at + 1 == len(engine.trace.steps):
            policy.victims = {"victim"}
        engine.step()
        engine.scheduler.check()
        if hook == "while preempted" and "victim" in engine.trace.steps[-1].preempted:
            abort()
        if hook == "after update":
            abort()
        assert events.ends() or len(engine.trace.steps) < at + 2, "within one step"
    assert events.ends() == [("victim", FinishReason.ABORT)]
    got = [event.token_id for event in events.all if event.token_id is not None]
    assert tuple(got) == engine.completions["victim"].token_ids == toy.alone(prompt(8), params(12))[: len(got)]
    assert_alone(toy, {"other": engine.completions["other"]}, params(12))
    assert_empty(engine)


def test_b106_three_hundred_streams_closed_early() -> None:
    engine, toy = toy_engine(config(pool=16, bs=4, seqs=4))
    work = []
    for first in range(0, 300, 4):
        streams = [engine.stream(prompt(4, first + index), params(12)) for index in range(4)]
        before = len(engine.trace.steps), toy.num_tokens
        for stream in streams:
            assert [next(stream).token_id is not None for _ in range(2)] == [True, True]
            stream.close()
        work.append((len(engine.trace.steps) - before[0], toy.num_tokens - before[1]))
        assert engine.scheduler.pool.num_used == 0 and not engine.scheduler.running
    assert set(work) == {(2, 4 * 5)}, "the same work for each, first to last"
    assert_empty(engine)


def five_live(events: Events) -> Engine:
    """Two running, one preempted and two waiting requests."""
    policy = Forced()
    engine, _ = toy_engine(config(seqs=3), policy)
    for index in range(5):
        engine.add_request(prompt(6, index), params(12), request_id=f"r{index}", on_event=events)
    engine.step()
    policy.victims = {"r1"}
    engine.step()
    return engine


def test_b107_abort_all_ends_everybody_once() -> None:
    events = Events()
    engine = five_live(events)
    states = Counter(request.status.value for request in engine.scheduler.requests.values())
    assert states == {"running": 2, "waiting": 2, "preempted": 1} and preemptions(engine.trace) == 1
    assert engine.abort_all() == 5 and engine.abort_all() == 0
    assert sorted(events.ends()) == [(f"r{index}", FinishReason.ABORT) for index in range(5)]
    assert summarise(engine.trace).aborted == 5 and not engine.has_unfinished
    assert_empty(engine)


@pytest.mark.parametrize("order", [range(5), range(4, -1, -1), (2, 0, 4, 1, 3)])
def test_b107_they_may_end_in_any_order(order: Sequence[int]) -> None:
    events = Events()
    engine = five_live(events)
    for index in order:
        assert engine.abort(f"r{index}")
        engine.scheduler.check()
    assert events.ends() == [(f"r{index}", FinishReason.ABORT) for index in order]
    assert_empty(engine)
