"""A toy model that reads its whole history back through block tables, and what the tests of the core share.

The toy is a two-layer "transformer" in exact integers: attention is a hash over every cached value it reads, in
the order of positions. Layer 1 caches a value made of a token and its position, layer 2 one made of everything
that layer 1 holds up to there, and the next token is a hash of all that layer 2 holds. As in a real forward pass
all tokens of a batch write a layer before any of them reads it. So one wrong block, one token that nobody
computed, one wrong position or one token fed twice changes the tokens that come out. What a single request gets
without any cache is computed by `Toy.next_token`, which knows nothing of batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from contbatch.batch import ScheduledBatch
from contbatch.config import SchedulerConfig
from contbatch.engine import Completion, Engine, TokenEvent
from contbatch.plan import IterationPlan
from contbatch.policy import Policy
from contbatch.request import FinishReason, Request, RunningRequest, SamplingParams
from contbatch.scheduler import Output, Scheduler
from contbatch.step import Step
from contbatch.waiting import QueueKey

Verb = Callable[[], object]
Words = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ODD = np.uint64(0xBF58476D1CE4E5B9)
_NEVER_WRITTEN = np.uint64(0xDEADBEEF)


def _mix(values: Words) -> Words:
    """A one-to-one scramble of 64-bit words (the finaliser of splitmix64, less one round)."""
    values = (values ^ (values >> np.uint64(30))) * _ODD
    return values ^ (values >> np.uint64(27))


def _attend(values: Words) -> Words:
    """What each position gets from itself and all positions before it: order matters, so does every value."""
    places = np.arange(1, len(values) + 1, dtype=np.uint64) * _GOLDEN
    return np.cumsum(_mix(values ^ places), dtype=np.uint64)


def _embed(tokens: Words, positions: Words) -> Words:
    return _mix(tokens * _GOLDEN + _mix(positions + _ODD))


class Toy:
    """An executor with a paged cache of two layers.

    Args:
        num_blocks, block_size: as in the scheduler's configuration.
        vocab_size, eos_token_ids, max_model_len: as in `Executor`.
        before: called with each batch before anything is computed; it may raise.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int = 251,
        eos_token_ids: Sequence[int] = (),
        max_model_len: int | None = None,
        before: Callable[[ScheduledBatch], None] | None = None,
    ) -> None:
        self.vocab_size: int | None = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.before = before
        self.cache = np.full((2, (num_blocks + 1) * block_size), _NEVER_WRITTEN)
        self.host: dict[int, Words] = {}
        """What was copied to each block of host memory."""
        self.num_copied = 0
        self.batches: list[ScheduledBatch] = []
        """Every batch that was computed."""
        self.num_tokens = 0

    def execute(self, batch: ScheduledBatch, sampling: Mapping[str, SamplingParams]) -> Mapping[str, int | Exception]:
        """One mixed forward pass."""
        if self.before is not None:
            self.before(batch)
        self.batches.append(batch)
        flat = batch.flatten(self.block_size)
        self.num_tokens += flat.num_tokens
        self.cache[0, flat.slot_mapping] = _embed(flat.input_ids.astype(np.uint64), flat.positions.astype(np.uint64))
        histories: list[NDArray[np.int64]] = []
        for row, length in enumerate(flat.seq_lens):
            block, offset = np.divmod(np.arange(length), self.block_size)
            histories.append(flat.block_tables[row, block] * self.block_size + offset)
        for row, history in enumerate(histories):
            new = flat.slot_mapping[flat.cu_seqlens[row] : flat.cu_seqlens[row + 1]]
            self.cache[1, new] = _attend(self.cache[0, history])[flat.context_lens[row] :]
        tokens: dict[str, int | Exception] = {}
        for part, history in zip(batch, histories, strict=True):
            if part.sample:
                word = int(_attend(self.cache[1, history])[-1])
                tokens[part.request_id] = self._choose(word, len(history), sampling[part.request_id])
        return tokens

    def swap_out(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Copy blocks to host memory."""
        for block, host in blocks:
            self.host[host] = self._block(block).copy()
            self.num_copied += 1

    def swap_in(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Copy blocks back."""
        for host, block in blocks:
            self._block(block)[:] = self.host[host]

    def _block(self, block: int) -> Words:
        return self.cache[:, block * self.block_size : (block + 1) * self.block_size]

    def _choose(self, word: int, position: int, params: SamplingParams) -> int:
        """Greedy, or a draw that depends on the seed and the position only."""
        assert self.vocab_size is not None
        if params.temperature > 0:
            assert params.seed is not None, "an executor always gets a seed"
            word = hash((word, params.seed, position))
        return word % self.vocab_size

    def next_token(self, tokens: Sequence[int], params: SamplingParams | None = None) -> int:
        """The token after `tokens`, computed without a cache or a batch."""
        positions = np.arange(len(tokens), dtype=np.uint64)
        first = _embed(np.array(tokens, dtype=np.uint64), positions)
        return self._choose(int(_attend(_attend(first))[-1]), len(tokens), params or SamplingParams())

    def alone(self, prompt: Sequence[int], params: SamplingParams, max_tokens: int | None = None) -> tuple[int, ...]:
        """The tokens that a request gets with nobody else there (token rules only, no stop strings)."""
        tokens = list(prompt)
        limit = max_tokens or params.max_tokens
        assert limit is not None
        while len(tokens) - len(prompt) < limit:
            token = self.next_token(tokens, params)
            tokens.append(token)
            if token in params.stop_token_ids or (token in self.eos_token_ids and not params.ignore_eos):
                break
        return tuple(tokens[len(prompt) :])


def config(
    *,
    pool: int = 64,
    bs: int = 4,
    budget: int = 64,
    seqs: int = 8,
    mml: int = 256,
    chunked: bool = True,
    prefix: bool = True,
    watermark: float = 0.0,
    long_cap: int = 0,
) -> SchedulerConfig:
    """The notation of the cases: E(pool, bs, budget, seqs, mml, ...)."""
    return SchedulerConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_model_len=mml,
        block_size=bs,
        num_blocks=pool,
        enable_chunked_prefill=chunked,
        enable_prefix_caching=prefix,
        watermark=watermark,
        long_prefill_token_threshold=long_cap,
    )


class Ticks:
    """A clock that moves on by one second each time it is read."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        self.time += 1.0
        return self.time


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8."""

    def encode(self, text: str) -> list[int]:
        """One token a byte."""
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        """Bytes that are not whole characters show as U+FFFD."""
        return bytes(token_ids).decode(errors="replace")


class Pieces:
    """A tokenizer whose token n is the n-th of some pieces of text."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces

    def encode(self, text: str) -> list[int]:
        """Greedy from the left, longest piece first."""
        ids: list[int] = []
        while text:
            found = max((piece for piece in self.pieces if piece and text.startswith(piece)), key=len)
            ids.append(self.pieces.index(found))
            text = text[len(found) :]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The pieces, joined."""
        return "".join(self.pieces[token] for token in token_ids)


def prompt(length: int, start: int = 0) -> list[int]:
    """A prompt whose tokens depend on `start`: different starts give prompts without a common prefix."""
    return [(start * 37 + position * 11 + 1) % 251 for position in range(length)]


def toy_engine(
    limits: SchedulerConfig,
    policy: Policy | str = "VllmV1",
    *,
    eos: Sequence[int] = (),
    before: Callable[[ScheduledBatch], None] | None = None,
    tokenizer: Bytes | Pieces | None = None,
) -> tuple[Engine, Toy]:
    """An engine with a toy model, whose clock counts."""
    toy = Toy(limits.num_blocks, limits.block_size, eos_token_ids=eos, before=before)
    return Engine(toy, limits, policy, tokenizer, clock=Ticks()), toy


def params(max_tokens: int | None = 16, **others: object) -> SamplingParams:
    """Greedy sampling parameters."""
    return SamplingParams(max_tokens=max_tokens, **others)  # type: ignore[arg-type]  # passed on as they are


def serve(
    engine: Engine, prompts: Mapping[str, Sequence[int]], sampling: SamplingParams | Mapping[str, SamplingParams]
) -> dict[str, Completion]:
    """Serve prompts together, checking the scheduler's rules after every step; returns the completions by id."""
    for name, tokens in prompts.items():
        engine.add_request(tokens, sampling[name] if isinstance(sampling, Mapping) else sampling, request_id=name)
    while engine.has_unfinished:
        engine.step()
        engine.scheduler.check()
    assert_empty(engine)
    return {name: engine.completions[name] for name in prompts}


def assert_alone(
    toy: Toy, done: Mapping[str, Completion], sampling: Mapping[str, SamplingParams] | SamplingParams
) -> None:
    """Batched equals alone, token for token."""
    for name, completion in done.items():
        wanted = sampling[name] if isinstance(sampling, Mapping) else sampling
        assert completion.error is None
        assert completion.token_ids == toy.alone(completion.prompt_token_ids, wanted), name


def assert_empty(engine: Engine) -> None:
    """Nothing is held by anybody: every block, seat and per-request entry is back."""
    engine.scheduler.check()
    pool = engine.scheduler.pool
    assert pool.num_free == pool.num_blocks and not any(pool.ref_count)
    assert not engine.scheduler.running and not len(engine.scheduler.waiting) and not engine.scheduler.requests
    assert not engine._clients and not engine._sampling


class Bench:
    """A scheduler driven by hand: `step` plans, lets somebody look, and commits made-up tokens."""

    def __init__(
        self, limits: SchedulerConfig, policy: Policy, eos: Sequence[int] = (), vocab: int | None = None
    ) -> None:
        self.scheduler = Scheduler(limits, policy, frozenset(eos), vocab)
        self.plans: list[IterationPlan] = []

    def add(
        self,
        name: str,
        length: int | Sequence[int],
        max_tokens: int | None = 8,
        priority: int = 0,
        arrival: float | None = None,
    ) -> RunningRequest:
        """Queue a request; a length stands for a prompt that shares no prefix with that of another name."""
        tokens = [sum(map(ord, name)) * 1000 + place for place in range(length)] if isinstance(length, int) else length
        time = float(len(self.scheduler.requests)) if arrival is None else arrival
        return self.scheduler.add(Request(name, tokens, params(max_tokens), priority, time))

    def plan(self) -> IterationPlan:
        """Plan one step and check the rules on it."""
        plan = self.scheduler.plan()
        self.scheduler.check()
        self.plans.append(plan)
        return plan

    def commit(self, plan: IterationPlan, token: int = 7) -> list[Output]:
        """Commit a plan with the same token for everybody."""
        outputs = self.scheduler.commit(plan, dict.fromkeys(granted(plan), token))
        self.scheduler.check()
        return outputs

    def step(self, token: int = 7) -> dict[str, int]:
        """Plan and commit; returns who got how many tokens, in the order of granting."""
        plan = self.plan()
        grants = granted(plan)
        self.commit(plan, token)
        return grants

    def steps(self, count: int) -> list[dict[str, int]]:
        """Several steps."""
        return [self.step() for _ in range(count)]

    def until(self, condition: Callable[[], bool], limit: int = 200) -> None:
        """Step until a condition holds."""
        while not condition():
            assert len(self.plans) < limit, "it never came to that"
            self.step()

    def drain(self, limit: int = 500) -> list[dict[str, int]]:
        """Step until everybody has finished."""
        done: list[dict[str, int]] = []
        while self.scheduler.has_unfinished:
            assert len(done) < limit, "no end in sight"
            done.append(self.step())
        return done

    def __getitem__(self, name: str) -> RunningRequest:
        return self.scheduler.requests[name]

    @property
    def running(self) -> list[str]:
        """Ids of the running requests, in admission order."""
        return [request.request_id for request in self.scheduler.running]

    @property
    def waiting(self) -> list[str]:
        """Ids of the waiting requests, in queue order."""
        return [request.request_id for request in self.scheduler.waiting]


def each(*verbs: Verb) -> None:
    """Call some verbs one after the other."""
    for verb in verbs:
        verb()


def granted(plan: IterationPlan) -> dict[str, int]:
    """Who got how many tokens, in the order of granting."""
    assert plan.grants is not None
    return {request.request_id: count for request, count in zip(plan.grants.requests, plan.grants.counts, strict=True)}


class Scripted(Policy):
    """A policy whose step is any function, with the budget and the queue of VllmV1."""

    def __init__(self, schedule: Callable[[Step], object], name: str = "Scripted") -> None:
        self.queue_key: QueueKey | None = None
        self._name = name
        self._schedule = schedule
        self.finished: list[str] = []

    @property
    def name(self) -> str:
        """As given."""
        return self._name

    def schedule(self, step: Step) -> None:
        """Whatever the test wants."""
        self._schedule(step)

    def on_finish(self, request: RunningRequest) -> None:
        """Written down."""
        self.finished.append(request.request_id)


def terminal(events: Sequence[TokenEvent]) -> list[tuple[str, FinishReason]]:
    """The finish events among some events."""
    return [(event.request_id, event.finish_reason) for event in events if event.finish_reason is not None]
