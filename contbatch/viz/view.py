"""What a picture of a run shows, worked out once and without drawing anything.

`View(trace)` replays a trace and keeps, for every step, what each request did, who owned which block, how the
token budget was spent, who waited and why, and the same in words. The player, the plots and the HTML page only
paint what is here, so they cannot disagree, and everything can be tested with plain asserts. Nothing is
simulated: what the trace does not say (the place of a request inside the queue, which free blocks the prefix
index still knows) is rebuilt from what it does say, as vLLM v1 would have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

from contbatch.errors import TraceError
from contbatch.trace import RequestRecord, StepRecord, Trace
from contbatch.viz import words
from contbatch.viz.words import Decision, Grant


class Style(NamedTuple):
    """How a state looks everywhere: its name, fill, ink on the fill, and a hatch, never colour alone."""

    name: str
    colour: str
    ink: str
    hatch: str


STYLES = {
    "P": Style("prefill", "#E69F00", "#000000", "/"),
    "R": Style("prefill computed again", "#E69F00", "#000000", "x"),
    "D": Style("decode", "#0072B2", "#FFFFFF", ""),
    "C": Style("taken from the prefix cache", "#009E73", "#000000", "."),
    "W": Style("waiting", "#BBBBBB", "#000000", ""),
    "X": Style("preempted, waits again", "#D55E00", "#000000", "\\"),
    "S": Style("swapped out", "#CC79A7", "#000000", "-"),
    ".": Style("running, got nothing", "#FFFFFF", "#000000", ""),
}
"""Letter -> style. Colours are Okabe and Ito's, which colour-blind readers can tell apart."""

TABLE_HEAD = (
    "request", "prompt tokens", "from cache", "computed again", "preemptions", "known from step",
    "first token in step", "last token in step", "output tokens", "end", "prompt", "text",
)  # fmt: skip
QUEUE_ROWS, PROMPT_CHARS, SHOWN_BLOCKS = 6, 160, 144


class Cell(NamedTuple):
    """One request in one step: its letter, and the tokens it was granted (`tokens` of them, from position `start`)."""

    letter: str
    start: int = 0
    tokens: int = 0
    cached: int = 0


class BudgetUse(NamedTuple):
    """Tokens of one step by kind; `limit` and `unused` are None where the policy has no token budget."""

    prefill: int
    recomputed: int
    decode: int
    limit: int | None

    @property
    def used(self) -> int:
        """Tokens computed in the step."""
        return self.prefill + self.recomputed + self.decode

    @property
    def unused(self) -> int | None:
        """What is left of the budget."""
        return None if self.limit is None else self.limit - self.used


class Waiting(NamedTuple):
    """A request in the queue, and in words why it was not admitted ("" if it was not looked at)."""

    request_id: str
    letter: str
    why: str


class BlockState(NamedTuple):
    """ "owned" (by one request or, through a shared prefix, several), "cached" (free, but known), or "free"."""

    state: str
    owners: tuple[str, ...] = ()


FREE, CACHED = BlockState("free"), BlockState("cached")


@dataclass(frozen=True)
class Frame:
    """Everything that is shown of one step, after it was planned."""

    step: int
    cells: dict[str, Cell]
    budget: BudgetUse
    blocks: dict[int, BlockState]
    queue: tuple[Waiting, ...]
    decisions: tuple[Decision, ...]
    caption: str


@dataclass(slots=True)
class Life:
    """What is known of one request, while the steps are replayed and after."""

    record: RequestRecord
    letter: str = ""
    computed: int = 0
    outputs: int = 0
    table: list[int] = field(default_factory=list)
    cells: dict[int, Cell] = field(default_factory=dict)
    emitted: list[int] = field(default_factory=list)
    lane: list[str] = field(default_factory=list)
    joined: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    cached: int = 0
    recomputed: int = 0
    high_water: int = 0
    """Most tokens that were ever computed: what is computed below it is computed again."""


class View:
    """The pictures of a trace, as data.

    Args:
        trace: a recorded run; it is read, never changed.

    Raises:
        TraceError: a step mentions a request that never arrived.
    """

    def __init__(self, trace: Trace) -> None:
        _check_ids(trace)
        self.trace = trace
        self.num_steps = len(trace.steps)
        self.ids = tuple(trace.requests)
        self.labels = dict(zip(self.ids, short_labels(self.ids), strict=True))
        self.num_blocks = int(trace.config.get("num_blocks", 0))
        self.block_size = int(trace.config.get("block_size", 1))
        self.budgets: list[BudgetUse] = []
        self.pool_use: list[tuple[int, int]] = []
        self.queues: list[tuple[Waiting, ...]] = []
        self.decisions: list[tuple[Decision, ...]] = []
        self.captions: list[str] = []
        self._lives = {record.request_id: Life(record) for record in trace.requests.values()}
        self._owners: dict[int, list[str]] = {}
        self._known: set[int] = set()
        self._runs: dict[int, list[tuple[int, BlockState]]] = {}
        self._order: list[str] = []
        for t, step in enumerate(trace.steps):
            self._replay(t, step)
        self.lanes = {request_id: "".join(life.lane) for request_id, life in self._lives.items()}

    def frame(self, t: int) -> Frame:
        """All that is shown of step `t` (0 is the first).

        Raises:
            TraceError: there is no such step.
        """
        if not 0 <= t < self.num_steps:
            raise TraceError(f"step {t} is not in this run; its steps are 0 to {self.num_steps - 1}")
        cells = {i: life.cells.get(t, Cell(life.lane[t])) for i, life in self._lives.items()}
        return Frame(
            step=t,
            cells=cells,
            budget=self.budgets[t],
            blocks={b: self.block(b, t) for b in range(1, self.num_blocks + 1)},
            queue=self.queues[t],
            decisions=self.decisions[t],
            caption=self.captions[t],
        )

    def block(self, block: int, t: int) -> BlockState:
        """The state of a block after step `t` was planned."""
        state = FREE
        for since, later in self._runs.get(block, ()):
            if since > t:
                break
            state = later
        return state

    def emitted(self, request_id: str) -> tuple[int, ...]:
        """The steps in which a request got a token."""
        return tuple(self._lives[request_id].emitted)

    def cells(self, request_id: str) -> dict[int, Cell]:
        """The steps in which a request computed tokens, with the tokens."""
        return self._lives[request_id].cells

    # The replay: in the order in which a step happens.

    def _replay(self, t: int, step: StepRecord) -> None:
        self._arrivals_and_departures(t, step)
        decisions = words.running(step, self._lives)
        decisions += self._send_away(t, step)
        decisions += self._let_in(t, step)
        self._hand_out_blocks(t, step)
        self._grant(t, step)
        self._look(t, step, decisions)
        self._end(t, step)

    def _arrivals_and_departures(self, t: int, step: StepRecord) -> None:
        for request_id, life in self._lives.items():
            if not life.letter and life.record.arrival_step <= t:
                life.letter = "W"
                self._order.append(request_id)
            finish = self.trace.finished.get(request_id)
            if finish is not None and finish.step <= t and life.letter not in ("", " "):
                self._leave(request_id, t)  # aborted between two steps

    def _send_away(self, t: int, step: StepRecord) -> list[Decision]:
        decisions = []
        for request_id in [*step.preempted, *step.swapped_out]:
            life = self._lives[request_id]
            if life.letter == " ":
                continue  # it was aborted while its step was run again
            swapped = request_id in step.swapped_out
            decisions.append(words.sent_away(request_id, life, swapped, step.reasons.get(request_id)))
            life.letter = decisions[-1].letter
            life.preempted.append(t)
            self._release(request_id, t)
            life.computed = life.computed if swapped else 0
            if request_id in self._order:
                self._order.remove(request_id)
            self._order.insert(0, request_id)
        return decisions

    def _let_in(self, t: int, step: StepRecord) -> list[Decision]:
        decisions = []
        joined = [*step.admitted, *step.resumed, *step.swapped_in]
        order = {request_id: row for row, request_id in enumerate(step.request_ids)}
        for request_id in sorted(joined, key=lambda i: order.get(i, len(order))):
            life = self._lives[request_id]
            grant = _granted(step, request_id)
            if request_id in step.preempted and grant is None:
                continue
            life.letter = "."
            life.joined.append(t)
            if request_id in self._order:
                self._order.remove(request_id)
            back = request_id in step.swapped_in
            cached = step.cached.get(request_id, 0)
            life.computed = life.computed if back else cached
            life.cached += cached
            decisions.append(words.joined(request_id, life, grant, cached, back))
        return decisions

    def _hand_out_blocks(self, t: int, step: StepRecord) -> None:
        for request_id, blocks in step.new_blocks.items():
            if request_id in step.preempted and _granted(step, request_id) is None:
                continue
            hits = step.cached.get(request_id, 0) // self.block_size
            self._known.difference_update(blocks[hits:])
            self._lives[request_id].table.extend(blocks)
            for block in blocks:
                self._owners.setdefault(block, []).append(request_id)
                self._note(block, t)

    def _grant(self, t: int, step: StepRecord) -> None:
        caching = bool(self.trace.config.get("enable_prefix_caching", False))
        for request_id, start, count, kind in zip(step.request_ids, step.starts, step.counts, step.kinds, strict=True):
            life = self._lives[request_id]
            cached = step.cached.get(request_id, 0)
            life.cells[t] = Cell(kind, start, count, cached)
            life.computed = start + count
            life.recomputed += max(0, min(life.computed, life.high_water) - start)
            life.high_water = max(life.high_water, life.computed)
            if caching:
                self._known.update(life.table[: life.computed // self.block_size])
        for request_id in step.sampled:
            self._lives[request_id].outputs += 1
            self._lives[request_id].emitted.append(t)

    def _look(self, t: int, step: StepRecord, decisions: list[Decision]) -> None:
        for life in self._lives.values():
            life.lane.append(life.cells[t].letter if t in life.cells else life.letter or " ")
        by_kind = dict.fromkeys("PRD", 0)
        for count, kind in zip(step.counts, step.kinds, strict=True):
            by_kind[kind] += count
        self.budgets.append(BudgetUse(by_kind["P"], by_kind["R"], by_kind["D"], step.budget))
        self.pool_use.append((self.num_blocks - step.free_blocks, step.cached_blocks))
        waiting = [i for i in self._order if self._lives[i].letter in "WXS"]
        looked_at = [i for i in step.reasons if i in waiting]
        queue = looked_at + [i for i in waiting if i not in step.reasons]
        self.queues.append(tuple(Waiting(i, self._lives[i].letter, _why_waiting(step, i)) for i in queue))
        decisions += words.left_out(step, self._lives, len(queue) - len(looked_at))
        decisions += words.ended(step, self._lives)
        self.decisions.append(tuple(decisions))
        self.captions.append(words.caption(t, step, self.budgets[t], self.num_blocks))

    def _end(self, t: int, step: StepRecord) -> None:
        for request_id in step.finished:
            self._leave(request_id, t + 1)

    def _leave(self, request_id: str, t: int) -> None:
        self._release(request_id, t)
        self._lives[request_id].letter = " "
        if request_id in self._order:
            self._order.remove(request_id)

    def _release(self, request_id: str, t: int) -> None:
        life = self._lives[request_id]
        for block in life.table:
            self._owners[block].remove(request_id)
            self._note(block, t)
        life.table = []

    def _note(self, block: int, t: int) -> None:
        owners = tuple(self._owners[block])
        free = CACHED if block in self._known else FREE
        state = BlockState("owned", owners) if owners else free
        runs = self._runs.setdefault(block, [])
        if runs and runs[-1][0] == t:
            runs.pop()
        runs.append((t, state))

    # What is said of the whole run.

    @property
    def summary(self) -> str:
        """The run in one sentence with its numbers; it names the trace, so other data gives another text."""
        return words.summary(self, self._lives.values())

    def about(self, request_id: str) -> str:
        """The life of one request in a sentence."""
        return words.about(self._lives[request_id], self.trace.finished.get(request_id))

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Headings and one row of text per request."""
        return TABLE_HEAD, [self._row(life) for life in self._lives.values()]

    def _row(self, life: Life) -> tuple[str, ...]:
        record, finish = life.record, self.trace.finished.get(life.record.request_id)
        numbers = (record.num_prompt_tokens, life.cached, life.recomputed, len(life.preempted))
        tokens = [str(life.emitted[0]), str(life.emitted[-1])] if life.emitted else ["none", "none"]
        return (
            record.request_id,
            *map(str, numbers),
            str(record.arrival_step),
            *tokens,
            str(life.outputs),
            finish.reason if finish else "unfinished",
            record.prompt or "",
            (finish.text if finish else None) or "",
        )

    # What the player is given: runs instead of cells, so that 500 steps of 64 requests stay small.

    def payload(self) -> dict[str, Any]:
        """All of this as plain JSON data for `player.js`: lengths of runs, changes, and finished sentences."""
        number = {request_id: n for n, request_id in enumerate(self.ids)}
        touched = max(self._runs, default=0)
        return {
            "steps": self.num_steps,
            "policy": self.trace.policy,
            "summary": self.summary,
            "requests": [self._request(i) for i in self.ids],
            "lanes": [_lane(self.lanes[i], self._lives[i].cells) for i in self.ids],
            "order": _changes([[number[i] for i in step.request_ids] for step in self.trace.steps]),
            "use": [[u.prefill, u.recomputed, u.decode, u.limit] for u in self.budgets],
            "pool": [list(use) for use in self.pool_use],
            "blocks": {
                "total": self.num_blocks,
                "shown": self.num_blocks if self.num_blocks <= SHOWN_BLOCKS else touched,
                "runs": {str(b): self._block_runs(runs, number) for b, runs in sorted(self._runs.items())},
            },
            "queue": _changes([self._queue(queue, number) for queue in self.queues]),
            "captions": self.captions,
            **self._words(),
        }

    def _words(self) -> dict[str, Any]:
        said = {d: n for n, d in enumerate(dict.fromkeys(d for step in self.decisions for d in step))}
        words = [[said[d] for d in decisions] for decisions in self.decisions]
        return {"said": [list(d) for d in said], "words": words}

    def _request(self, request_id: str) -> dict[str, Any]:
        record, finish = self.trace.requests[request_id], self.trace.finished.get(request_id)
        text = (finish.text if finish else None) or ""
        texts = {"prompt": _cut(record.prompt or ""), "text": _cut(text)}
        names = {"id": request_id, "label": self.labels[request_id], "about": self.about(request_id)}
        return {**names, "ended": finish is not None, **texts}

    def _block_runs(self, runs: Iterable[tuple[int, BlockState]], number: dict[str, int]) -> list[Any]:
        codes = {"free": -1, "cached": -2}
        flat: list[Any] = []
        for since, (state, owners) in runs:
            holders = [number[i] for i in owners]
            flat += [since, holders if len(holders) > 1 else holders[0] if holders else codes[state]]
        return flat

    def _queue(self, queue: Sequence[Waiting], number: dict[str, int]) -> list[Any]:
        return [len(queue), *([number[w.request_id], w.letter, w.why] for w in queue[:QUEUE_ROWS])]


def short_labels(ids: Sequence[str]) -> list[str]:
    """Labels of at most three characters: what ids do not share, or else their number in order of arrival."""
    low, high = min(ids, default=""), max(ids, default="")
    same = "".join(a for a, b in takewhile(lambda pair: pair[0] == pair[1], zip(low, high, strict=False)))
    shared = len(same.rstrip("0123456789")) if len(ids) > 1 else 0
    cut = [request_id[shared:] for request_id in ids]
    if all(0 < len(label) <= 3 for label in cut):
        return cut
    return [str(n) for n in range(1, len(ids) + 1)]


def _why_waiting(step: StepRecord, request_id: str) -> str:
    gone = request_id in step.preempted or request_id in step.swapped_out
    return "made room in this step" if gone else words.why(step.reasons.get(request_id))


def _check_ids(trace: Trace) -> None:
    for t, step in enumerate(trace.steps):
        named = {*step.request_ids, *step.sampled, *step.admitted, *step.resumed, *step.preempted}
        named |= {*step.swapped_out, *step.swapped_in, *step.new_blocks, *step.reasons, *step.finished}
        unknown = sorted(named - trace.requests.keys())
        if unknown:
            raise TraceError(f"step {t} mentions {unknown[0]!r}, which never arrived; record the run again")


def _granted(step: StepRecord, request_id: str) -> Grant | None:
    if request_id not in step.request_ids:
        return None
    row = step.request_ids.index(request_id)
    return Grant(step.starts[row], step.counts[row], step.kinds[row])


def _lane(letters: str, cells: dict[int, Cell]) -> list[Any]:
    """[letter, length, tokens, ...]: runs of equal cells; a cell with cached tokens is [tokens, cached]."""
    runs: list[list[Any]] = []
    for t, letter in enumerate(letters):
        cell = cells.get(t, Cell(letter))
        what = [cell.tokens, cell.cached] if cell.cached else cell.tokens
        if runs and runs[-1][0] == letter and runs[-1][2] == what:
            runs[-1][1] += 1
        else:
            runs.append([letter, 1, what])
    return [part for run in runs for part in run]


def _changes(values: Sequence[Any]) -> list[Any]:
    """[step, value, ...] for the steps in which the value is not that of the step before."""
    flat: list[Any] = []
    for t, value in enumerate(values):
        if not t or value != values[t - 1]:
            flat += [t, value]
    return flat


def _cut(text: str) -> str:
    return text if len(text) <= PROMPT_CHARS else text[: PROMPT_CHARS - 1] + "…"
