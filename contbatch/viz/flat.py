"""The flat batch as a picture: arrays whose entries belong together, and the attention mask they stand for.

The one idea: a token of the flat batch is one column in some arrays and one row in others, and a reader should be
able to take a token and see all of them. `FlatView` works out, for every token, which entry of which array speaks of
it, and says so in a sentence; `arrays` and `mask` paint that with matplotlib, `LinkedArrays` as a widget in which a
token is chosen. Nothing is computed that the arrays do not say, but they are checked against each other: an entry
that disagrees with the rest is marked and named, which is how a wrong position is found by looking.

Left out: batches of thousands of tokens. This is for the few that fit on a screen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from contbatch.batch import FlatBatch
from contbatch.errors import InvalidRequest, TraceError
from contbatch.trace import Trace
from contbatch.viz.player import anywidget, traitlets, widget_view
from contbatch.viz.view import STYLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARK, WRONG = "#F0E442", "#D55E00"
"""Fill of the chosen token's entries, and outline of an entry that disagrees with the others."""
MOST_TOKENS = 64


class Link(NamedTuple):
    """Where one token is found in the arrays of its batch."""

    token: int
    """Its index on the token axis."""
    row: int
    """Its request's index: into cu_seqlens, seq_lens, context_lens, and the row of block_tables."""
    nth: int
    """How many new tokens of the same request come before it."""
    position: int
    """What the batch says."""
    due: int
    """What it must be: tokens in the cache, and new ones of the same request before this one."""
    column: int
    """Column of block_tables with the block that holds this token."""
    block: int
    slot: int
    keys: tuple[int, int]
    """The keys it may look at: from and to (not included), when all sequences are laid end to end."""
    sampled: bool


class Problem(NamedTuple):
    """An entry that disagrees with the other arrays: which array, which entry, and why in words."""

    array: str
    entry: int
    text: str


class FlatView:
    """What there is to see in a flat batch.

    Args:
        flat: the arrays; they are read, never changed.
        block_size: tokens in a cache block.
        texts: what each token stands for, to be shown above its id.

    Raises:
        InvalidRequest: there are no tokens, more than fit on a screen, or the arrays are no flat batch at all.
    """

    def __init__(self, flat: FlatBatch, block_size: int, texts: Sequence[str] | None = None) -> None:
        _check_shapes(flat, texts)
        self.flat, self.block_size = flat, block_size
        self.texts = None if texts is None else tuple(texts)
        self.num_tokens, self.num_requests = len(flat.input_ids), len(flat.request_ids)
        self.owner = np.repeat(np.arange(self.num_requests), np.diff(flat.cu_seqlens))
        self.key_starts = np.concatenate([[0], np.cumsum(flat.seq_lens)])
        self.links = tuple(self._link(token) for token in range(self.num_tokens))
        self.problems = tuple(self._problems())

    def _link(self, token: int) -> Link:
        flat, row = self.flat, int(self.owner[token])
        nth, position = token - int(flat.cu_seqlens[row]), int(flat.positions[token])
        due = int(flat.context_lens[row]) + nth
        column = min(due // self.block_size, flat.block_tables.shape[1] - 1)
        first = int(self.key_starts[row])
        last = first + min(due + 1, int(flat.seq_lens[row]))
        return Link(
            token=token,
            row=row,
            nth=nth,
            position=position,
            due=due,
            column=column,
            block=int(flat.block_tables[row, column]),
            slot=int(flat.slot_mapping[token]),
            keys=(first, last),
            sampled=token in flat.sample_rows,
        )

    def _problems(self) -> Iterator[Problem]:
        for link in self.links:
            name, token = self.flat.request_ids[link.row], link.token
            if link.position != link.due:
                before = f"{self._before(link)}, so it must be {link.due}"
                yield Problem("positions", token, f"positions[{token}] is {link.position}: {before}")
            right = link.block * self.block_size + link.due % self.block_size
            if link.slot != right:
                where = f"its K and V go to {self._place(link)}, so it must be {right}"
                yield Problem("slot_mapping", token, f"slot_mapping[{token}] is {link.slot}: {where}")
            if link.sampled and token + 1 != self.flat.cu_seqlens[link.row + 1]:
                yield Problem("sample_rows", token, f"sample_rows names token {token}, which is not the last of {name}")

    def _before(self, link: Link) -> str:
        context = _count(int(self.flat.context_lens[link.row]), "token")
        return f"{context} of {self.flat.request_ids[link.row]} in the cache and {link.nth} new before it"

    def _place(self, link: Link) -> str:
        return f"block {link.block} = block_tables[{link.row}, {link.column}] at offset {link.due % self.block_size}"

    def sentence(self, token: int) -> str:
        """Everything that the arrays say of one token, in words."""
        flat, link = self.flat, self.links[token]
        row, name = link.row, flat.request_ids[link.row]
        start, end = (int(n) for n in flat.cu_seqlens[row : row + 2])
        said = f" ({self.texts[token]!r})" if self.texts is not None else ""
        kind = "prefill" if flat.is_prefill[row] else "decode"
        should = "" if link.position == link.due else f" (✘ must be {link.due})"
        return " ".join(
            (
                f"Token {token} of {self.num_tokens}: new token {link.nth + 1} of {end - start} of {name} ({kind}),",
                f"because cu_seqlens[{row}] = {start} ≤ {token} < {end} = cu_seqlens[{row + 1}].",
                f"input_ids[{token}] = {flat.input_ids[token]}{said}.",
                f"positions[{token}] = {link.position}{should}: {self._before(link)}.",
                f"slot_mapping[{token}] = {link.slot}: {self._place(link)}.",
                f"It looks at {_count(link.keys[1] - link.keys[0], 'token')} of {name}, itself included;",
                "its logits are sampled." if link.sampled else "nothing is sampled from it.",
            )
        )

    @property
    def num_pairs(self) -> int:
        """Pairs of a token and a key it may look at."""
        return sum(last - first for first, last in (link.keys for link in self.links))

    @property
    def arrays_caption(self) -> str:
        """One sentence with the numbers of the arrays."""
        flat = self.flat
        prefill = int(np.diff(flat.cu_seqlens)[flat.is_prefill].sum())
        text = (
            f"{_count(self.num_tokens, 'token')} of {_count(self.num_requests, 'request')} on one axis: {prefill} "
            f"prefill and {self.num_tokens - prefill} decode, "
            f"{_count(int(flat.context_lens.sum()), 'token')} already in the cache; "
            f"{_count(len(flat.sample_rows), 'row')} sampled; "
        )
        if not self.problems:
            return text + "every array agrees with the others."
        wrong = f"{_count(len(self.problems), 'entry', 'entries')} disagree"
        return f"{text}{wrong}{'s' if len(self.problems) == 1 else ''}, first {self.problems[0].text}."

    @property
    def mask_caption(self) -> str:
        """One sentence with the numbers of the mask."""
        keys = int(self.key_starts[-1])
        pairs = self.num_tokens * keys
        return (
            f"Attention mask: {_count(self.num_tokens, 'token')} by {_count(keys, 'key')}; "
            f"{self.num_pairs:,} of {pairs:,} pairs are allowed ({100 * self.num_pairs / pairs:.0f} %), "
            f"all inside one of {_count(self.num_requests, 'request')}. Solid: may look; pale: its own request, but "
            "later; left of the dashed line: keys from the cache."
        )

    def letter(self, row: int) -> str:
        """P or D: what a request feeds in."""
        return "P" if self.flat.is_prefill[row] else "D"

    def payload(self, title: str) -> dict[str, Any]:
        """All of this as plain JSON data for `flat.js`."""
        flat = self.flat
        return {
            "title": title,
            "caption": self.arrays_caption,
            "maskCaption": self.mask_caption,
            "styles": {letter: STYLES[letter]._asdict() for letter in "PD"},
            "requests": [
                {
                    "id": name,
                    "letter": self.letter(row),
                    "start": int(flat.cu_seqlens[row]),
                    "end": int(flat.cu_seqlens[row + 1]),
                    "context": int(flat.context_lens[row]),
                    "keys": [int(self.key_starts[row]), int(self.key_starts[row + 1])],
                }
                for row, name in enumerate(flat.request_ids)
            ],
            "tokens": [
                {"row": link.row, "column": link.column, "keys": list(link.keys), "said": self.sentence(link.token)}
                for link in self.links
            ],
            "tokenRows": self.token_rows(),
            "requestRows": self.request_rows(),
            "blockTables": flat.block_tables.tolist(),
            "wrong": [[problem.array, problem.entry] for problem in self.problems],
            "problems": self._listed(),
        }

    def _listed(self, most: int = 3) -> list[str]:
        more = len(self.problems) - most
        return [problem.text for problem in self.problems[:most]] + ([f"and {more} more"] if more > 0 else [])

    def token_rows(self) -> list[tuple[str, list[str]]]:
        """The arrays that have one entry per token, as text."""
        flat = self.flat
        sampled = ["yes" if link.sampled else "" for link in self.links]
        said = [] if self.texts is None else [("text", list(self.texts))]
        numbers = [(name, _texts(getattr(flat, name))) for name in ("input_ids", "positions", "slot_mapping")]
        return [*said, *numbers, ("sampled", sampled)]

    def request_rows(self) -> list[tuple[str, list[str]]]:
        """The arrays that have one entry per request (`cu_seqlens` one more), as text."""
        names = ("cu_seqlens", "context_lens", "seq_lens", "sample_rows")
        return [(name, _texts(getattr(self.flat, name))) for name in names]


def _check_shapes(flat: FlatBatch, texts: Sequence[str] | None) -> None:
    tokens, requests = len(flat.input_ids), len(flat.request_ids)
    if not 0 < tokens <= MOST_TOKENS:
        raise InvalidRequest(f"a flat batch of {tokens} tokens cannot be shown; take a step of 1 to {MOST_TOKENS}")
    starts = flat.cu_seqlens.tolist()
    if len(starts) != requests + 1 or starts[0] != 0 or starts[-1] != tokens or sorted(set(starts)) != starts:
        raise InvalidRequest(
            f"cu_seqlens is {starts}; for {requests} requests it has {requests + 1} rising entries from 0 to {tokens}"
        )
    for name, length in (("positions", tokens), ("slot_mapping", tokens), ("seq_lens", requests)):
        if len(getattr(flat, name)) != length:
            raise InvalidRequest(f"{name} has {len(getattr(flat, name))} entries; it needs {length}")
    if texts is not None and len(texts) != tokens:
        raise InvalidRequest(f"{len(texts)} texts for {tokens} tokens; give one for each token")


def _texts(array: np.ndarray[Any, Any]) -> list[str]:
    return [str(value) for value in array.tolist()]


def _count(number: int, noun: str, plural: str = "") -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


# Static figures


def arrays(view: FlatView, token: int | None = None) -> Figure:
    """The arrays as rows of cells on one page; the entries of `token` are marked."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.6), dpi=100, facecolor="white", layout="constrained")
    said = "" if token is None else f" {view.sentence(token)}"
    figure.set_label(view.arrays_caption + said)
    top, bottom = figure.subplots(2, 1, height_ratios=(len(view.token_rows()) + 2, 5))
    _paint_tokens(top, view, token)
    _paint_requests(bottom, view, token)
    return figure


def mask(view: FlatView, token: int | None = None) -> Figure:
    """Who may look at whom: a row per new token, a column per key in the cache or in this step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 2.0 + 0.22 * view.num_tokens), dpi=100, facecolor="white", layout="constrained")
    figure.set_label(view.mask_caption)
    _paint_mask(figure.subplots(), view, token)
    return figure


def padding(trace: Trace) -> Figure:
    """Tokens of each step, and the places that a rectangle (requests x longest) would have for them."""
    from matplotlib.figure import Figure

    steps = [step for step in trace.steps if step.counts]
    if not steps:
        raise TraceError("no step of this run computed a token; run the engine first")
    tokens = [step.num_tokens for step in steps]
    places = [len(step.counts) * max(step.counts) for step in steps]
    empty = [place - token for place, token in zip(places, tokens, strict=True)]
    worst = empty.index(max(empty))
    share = 100 * sum(empty) / sum(places)
    figure = Figure(figsize=(9, 4.2), dpi=100, facecolor="white", layout="constrained")
    figure.set_label(
        f"{sum(tokens):,} tokens in {_count(len(steps), 'step')}; padded to rectangles they would take "
        f"{sum(places):,} places, {share:.0f} % of them empty; most in step {steps[worst].step}: "
        f"{places[worst]} places for {_count(tokens[worst], 'token')}."
    )
    axes, at = figure.subplots(), [step.step for step in steps]
    axes.bar(at, tokens, 0.86, color="#0072B2", edgecolor="black", linewidth=0.7, label="tokens: the flat axis")
    axes.bar(at, empty, 0.86, tokens, color="white", edgecolor="black", linewidth=0.7, hatch="..", label="padding")
    axes.set_xlabel("step", fontsize=14)
    axes.set_ylabel("places", fontsize=14)
    axes.tick_params(labelsize=13)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=2, fontsize=13, frameon=False)
    return figure


def _cell(axes: Axes, x: float, y: float, text: str, *, marked: bool, wrong: bool = False, size: float = 13) -> None:
    from matplotlib.patches import Rectangle

    edge, width = (WRONG, 3.0) if wrong else ("black", 2.4 if marked else 0.8)
    box = Rectangle((x, y), 1, 1, facecolor=MARK if marked else "white", edgecolor=edge, linewidth=width)
    box.set_zorder(3 if marked or wrong else 2)
    axes.add_patch(box)
    weight = "bold" if marked or wrong else "normal"
    axes.text(x + 0.5, y + 0.5, ("✗" if wrong else "") + text, ha="center", va="center", fontsize=size, weight=weight)
    axes.texts[-1].set(zorder=4, parse_math=False)


def _name(axes: Axes, y: float, text: str) -> None:
    axes.text(-0.2, y + 0.5, text, ha="right", va="center", fontsize=14, family="monospace")


def _bare(axes: Axes, width: float, height: float) -> None:
    axes.set(xlim=(-0.16 * width, width + 0.05), ylim=(height + 0.05, -0.05))
    axes.set_axis_off()


def _band(axes: Axes, view: FlatView, row: int, x: float, width: float, y: float) -> None:
    """A request's stretch of an axis: its id and its letter on the colour of its kind."""
    from matplotlib.patches import Rectangle

    style = STYLES[view.letter(row)]
    axes.add_patch(
        Rectangle((x, y), width, 1, facecolor=style.colour, edgecolor="black", hatch=style.hatch * 2, linewidth=1.2)
    )
    label = view.flat.request_ids[row]
    if width > 1.5 or x < 0:  # beside an axis there is room
        label = f"{view.letter(row)} {label}"
    axes.text(x + width / 2, y + 0.5, label, ha="center", va="center", fontsize=13, weight="bold", color=style.ink)
    axes.texts[-1].set(parse_math=False)
    if style.hatch:
        axes.texts[-1].set_bbox({"facecolor": style.colour, "edgecolor": "none", "pad": 1})


def _paint_tokens(axes: Axes, view: FlatView, token: int | None) -> None:
    wrong = {(problem.array, problem.entry) for problem in view.problems}
    size = min(13.0, 300 / view.num_tokens)
    for row in range(view.num_requests):
        start, end = view.flat.cu_seqlens[row : row + 2]
        _band(axes, view, row, start, end - start, 0)
    _name(axes, 0, "request")
    _name(axes, 1, "token")
    for column in range(view.num_tokens):
        axes.text(column + 0.5, 1.5, str(column), ha="center", va="center", fontsize=size, color="#444444")
    for line, (name, texts) in enumerate(view.token_rows(), start=2):
        _name(axes, line, name)
        for column, text in enumerate(texts):
            bad = (name, column) in wrong or (name == "sampled" and ("sample_rows", column) in wrong)
            text = text.strip()
            small = min(size, 4.7 * size / max(1, len(text)))
            _cell(axes, column, line, text, marked=column == token, wrong=bad, size=small)
    _bare(axes, view.num_tokens, len(view.token_rows()) + 2)


def _paint_requests(axes: Axes, view: FlatView, token: int | None) -> None:
    row = None if token is None else view.links[token].row
    left, columns = view.num_requests + 1, view.flat.block_tables.shape[1]
    for line, (name, texts) in enumerate(view.request_rows()):
        y = 1.15 * line + 0.35
        _name(axes, y, name)
        for column, text in enumerate(texts):
            marked = row is not None and (column == row or (name == "cu_seqlens" and column == row + 1))
            _cell(axes, column, y, text, marked=text == str(token) if name == "sample_rows" else marked)
    first, tall = left + 2.2, 4.6 / view.num_requests
    axes.text(first + columns / 2, -0.1, "block_tables", fontsize=14, family="monospace", ha="center", va="center")
    for line, table in enumerate(view.flat.block_tables):
        y = 0.35 + tall * line
        axes.text(first - 0.15, y + tall / 2, view.flat.request_ids[line], ha="right", va="center", fontsize=13)
        axes.texts[-1].set(parse_math=False)
        for column, block in enumerate(table):
            marked = token is not None and (line, column) == (row, view.links[token].column)
            _table_cell(axes, first + column, y, tall, str(block), marked)
    _bare(axes, first + columns, 5.0)
    axes.set_ylim(5.05, -0.5)


def _table_cell(axes: Axes, x: float, y: float, tall: float, text: str, marked: bool) -> None:
    from matplotlib.patches import Rectangle

    box = Rectangle((x, y), 1, tall, facecolor=MARK if marked else "white", edgecolor="black")
    box.set(linewidth=2.4 if marked else 0.8, zorder=3 if marked else 2)
    axes.add_patch(box)
    axes.text(x + 0.5, y + tall / 2, text, ha="center", va="center", fontsize=13, zorder=4)
    axes.texts[-1].set(weight="bold" if marked else "normal")


def _paint_mask(axes: Axes, view: FlatView, token: int | None) -> None:
    from matplotlib.patches import Rectangle

    keys, tokens = int(view.key_starts[-1]), view.num_tokens
    tall = max(1.0, tokens * 0.07)
    for row, name in enumerate(view.flat.request_ids):
        first, last = (int(n) for n in view.key_starts[row : row + 2])
        start, end = (int(n) for n in view.flat.cu_seqlens[row : row + 2])
        axes.add_patch(Rectangle((first, start), last - first, end - start, facecolor="#E8E8E8", edgecolor="none"))
        axes.axvline(last, color="black", linewidth=0.8)
        axes.axhline(end, color="black", linewidth=0.8)
        _band(axes, view, row, -0.09 * keys, 0.085 * keys, start + (end - start) / 2 - 0.5)
        context = int(view.flat.context_lens[row])
        where = f"{name}\n{context} + {end - start}" if last - first > 0.05 * keys else name
        axes.text((first + last) / 2, -0.25 * tall, where, ha="center", va="bottom", fontsize=12)
        axes.texts[-1].set(parse_math=False)
        axes.plot([first + context] * 2, [start, end], color="#D55E00", linewidth=2.2, linestyle=(0, (2, 1)))
    for link in view.links:
        first, last = link.keys
        axes.add_patch(Rectangle((first, link.token + 0.06), last - first, 0.88, facecolor="#333333", edgecolor="none"))
    if token is not None:
        axes.add_patch(Rectangle((0, token), keys, 1, facecolor="none", edgecolor=WRONG, linewidth=2.5))
    axes.add_patch(Rectangle((0, 0), keys, tokens, facecolor="none", edgecolor="black", linewidth=1.5))
    axes.set(xlim=(-0.095 * keys, keys + 0.2), ylim=(tokens + 0.1, -2.6 * tall))
    axes.set_axis_off()


# The widget


class LinkedArrays(anywidget.AnyWidget):
    """The arrays with a token chosen by slider, buttons or pointer; its entry is marked in all of them.

    Args:
        flat, block_size, texts: as in `FlatView`.
        token: the token that is chosen at first.
        title: heading of the widget.
    """

    _esm = Path(__file__).with_name("flat.js")
    payload = traitlets.Dict().tag(sync=True)
    token = traitlets.Int(0).tag(sync=True)

    def __init__(
        self,
        flat: FlatBatch,
        block_size: int,
        texts: Sequence[str] | None = None,
        token: int = 0,
        title: str = "One token in every array",
    ) -> None:
        self.view = FlatView(flat, block_size, texts)
        super().__init__(payload=self.view.payload(title), token=token)

    @traitlets.validate("token")
    def _clamp(self, proposal: Any) -> int:
        return max(0, min(int(proposal["value"]), self.view.num_tokens - 1))

    @property
    def caption(self) -> str:
        """The batch and the chosen token in words; what a strict notebook test compares."""
        return f"{self.view.arrays_caption} {self.view.sentence(self.token)}"

    def __repr__(self) -> str:
        return f"LinkedArrays: {self.caption}"

    def _repr_mimebundle_(self, **kwargs: object) -> dict[str, Any]:  # type: ignore[override]  # as IPython allows
        return {**widget_view(self), **self.picture()}

    def picture(self) -> dict[str, str]:
        """The arrays where nothing moves: an HTML figure with the chosen token marked, and its caption as text."""
        from contbatch.viz import plots

        return plots.figure(arrays(self.view, self.token), self.caption).bundle
