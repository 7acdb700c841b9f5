"""Still figures of a run, in matplotlib, painted from the same view-model as the player.

Every function takes a trace and returns a `Figure` that nobody else knows of (no pyplot, no global state), 9 x 5 inches
at 100 dots an inch, opaque white, with type that can be read from the last row. Its label is its caption:
`figure(fig)` shows both, as an HTML figure whose alternative text is the caption.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from itertools import groupby, pairwise
from typing import Any

from contbatch.errors import InvalidConfig, MissingDependency
from contbatch.trace import Trace
from contbatch.viz.view import STYLES, View

try:
    from matplotlib import style
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.patheffects import withStroke
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise MissingDependency("still figures need matplotlib, which is not installed; pip install matplotlib") from error

_LOOK: dict[str, Any] = {
    "font.size": 13,
    "hatch.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "legend.columnspacing": 1.2,
}
_INK, _ROOM = "#222222", 770  # pixels that a timeline has for its steps


class Shown:
    """A figure with its caption, ready to be shown; see `figure`."""

    def __init__(self, png: bytes, caption: str) -> None:
        self.png, self.caption = png, caption

    @property
    def bundle(self) -> dict[str, str]:
        """The mime bundle: the picture as HTML with alternative text, the caption as plain text."""
        said, data = escape(self.caption), base64.b64encode(self.png).decode()
        html = (
            f'<figure role="img" aria-label="{said}" style="margin:0">'
            f'<img alt="{said}" src="data:image/png;base64,{data}" style="max-width:100%">'
            f'<figcaption style="font-size:16px;max-width:900px">{said}</figcaption></figure>'
        )
        return {"text/html": html, "text/plain": self.caption}

    def __repr__(self) -> str:
        return self.caption

    def _repr_mimebundle_(self, **kwargs: object) -> dict[str, str]:
        return self.bundle


def figure(fig: Figure, caption: str | None = None) -> Shown:
    """Show a figure with a caption that is also its alternative text and its text/plain.

    Args:
        fig: any matplotlib figure.
        caption: one sentence with the numbers; None takes the one that the function which drew it left there.

    Raises:
        InvalidConfig: there is no caption; a picture without words is lost on some readers.
    """
    caption = caption or str(fig.get_label() or "")
    if not caption:
        raise InvalidConfig("a figure without a caption; say in one sentence, with numbers, what it shows")
    out = io.BytesIO()
    with style.context(["default", _LOOK]):
        fig.savefig(out, format="png", dpi=100, facecolor="white", metadata={"Software": None})
    return Shown(out.getvalue(), caption)


def overview(trace: Trace) -> Figure:
    """Lanes above, tokens per step below: the whole run in one picture."""
    view = View(trace)
    with _figure(view.summary, rows=(3, 1)) as (fig, (above, below)):
        _timeline(above, view)
        _budget(below, view)
        below.set_ylabel("tokens")
        _share_steps([above, below], view.num_steps)
        _legend(fig, _letters(view))
    return fig


def timeline(trace: Trace) -> Figure:
    """One lane a request, one cell a step."""
    view = View(trace)
    with _figure(view.summary) as (fig, (ax,)):
        _timeline(ax, view)
        _legend(fig, _letters(view))
    return fig


def budget(trace: Trace) -> Figure:
    """Tokens computed in each step, by kind, under the limit."""
    view = View(trace)
    used = sum(use.used for use in view.budgets)
    full = sum(use.unused == 0 for use in view.budgets)
    kinds = ", ".join(
        f"{STYLES[letter].name} {sum(use[row] or 0 for use in view.budgets)}" for row, letter in enumerate("PRD")
    )
    caption = f"{used} tokens in {view.num_steps} steps ({kinds}); the budget was full in {full} steps."
    with _figure(caption) as (fig, (ax,)):
        _budget(ax, view)
        ax.set_ylabel("tokens in the step")
        _legend(fig, "PRD", limit=True)
    return fig


def blocks(trace: Trace) -> Figure:
    """Blocks of the pool over time: in use, free but still cached, free."""
    view = View(trace)
    used = [use for use, _ in view.pool_use]
    cached = [use + free for use, free in view.pool_use]
    peak = max(used, default=0)
    first = used.index(peak) if used else 0
    caption = f"At most {peak} of {view.num_blocks} blocks are in use (first in step {first})"
    caption += f"; at most {max((c for _, c in view.pool_use), default=0)} free ones are still cached."
    with _figure(caption) as (fig, (ax,)):
        edges = [t - 0.5 for t in range(view.num_steps + 1)]
        for low, high, letter, name in (
            ([0] * len(used), used, "D", "in use"),
            (used, cached, "C", "C free, still cached"),
        ):
            look = STYLES[letter]
            ax.fill_between(
                edges,
                [*low, *low[-1:]],
                [*high, *high[-1:]],
                step="post",
                facecolor=look.colour,
                edgecolor=_INK,
                hatch=look.hatch * 2,
                linewidth=0.8,
                label=name,
            )
        ax.axhline(view.num_blocks, color=_INK, linestyle="--", linewidth=2, label=f"pool {view.num_blocks}")
        ax.set_ylabel("blocks")
        _share_steps([ax], view.num_steps)
        fig.legend(loc="outside upper center", ncols=3)
    return fig


def gaps(trace: Trace) -> Figure:
    """When each request got its tokens; a gap of more than one step is drawn as a line: somebody waited."""
    view = View(trace)
    longest = (0, "", 0)
    with _figure("") as (fig, (ax,)):
        for row, request_id in enumerate(view.ids):
            steps = view.emitted(request_id)
            ax.plot(steps, [row] * len(steps), "|", color=STYLES["D"].colour, markersize=11, markeredgewidth=2.5)
            for before, after in pairwise(steps):
                longest = max(longest, (after - before, request_id, before))
                if after - before > 1:
                    ax.plot([before, after], [row, row], color=STYLES["X"].colour, linewidth=3, zorder=1)
        _lanes(ax, view)
        tokens = sum(len(view.emitted(i)) for i in view.ids)
        said = f"{tokens} tokens of {len(view.ids)} requests; "
        if longest[0] > 1:
            said += f"the longest gap is {longest[0]} steps, of {longest[1]} after step {longest[2]}."
        else:
            said += "nobody waited between two tokens."
        fig.set_label(said)
        fig.legend(
            handles=[
                ax.plot([], [], "|", color=STYLES["D"].colour, markeredgewidth=2.5, label="a token")[0],
                ax.plot([], [], color=STYLES["X"].colour, linewidth=3, label="a gap of more than a step")[0],
            ],
            loc="outside upper center",
            ncols=2,
        )
    return fig


def compare(a: Trace, b: Trace, labels: Sequence[str] = ("A", "B"), what: str = "timeline") -> Figure:
    """Two runs on the same axis of steps, one above the other.

    Args:
        a, b: the runs.
        labels: their names.
        what: "timeline" or "budget".

    Raises:
        InvalidConfig: another word.
    """
    draw: Callable[[Axes, View], None] | None = {"timeline": _timeline, "budget": _budget}.get(what)
    if draw is None:
        raise InvalidConfig(f'what={what!r}; compare draws "timeline" or "budget"')
    views = [View(a), View(b)]
    caption = " ".join(f"{name}: {view.summary}" for name, view in zip(labels, views, strict=True))
    with _figure(caption, rows=(1, 1)) as (fig, axes):
        for ax, view, name in zip(axes, views, labels, strict=True):
            draw(ax, view)
            ax.set_title(name, fontsize=13, fontweight="bold", loc="left")
        _share_steps(axes, max(view.num_steps for view in views))
        _legend(fig, [c for c in STYLES if any(c in _letters(view) for view in views)])
    return fig


@contextmanager
def _figure(caption: str, rows: Sequence[int] = (1,)) -> Iterator[tuple[Figure, list[Axes]]]:
    with style.context(["default", _LOOK]):
        fig = Figure(figsize=(9, 5), dpi=100, facecolor="white", layout="constrained")
        fig.set_label(caption)
        yield fig, list(fig.subplots(len(rows), 1, squeeze=False, height_ratios=list(rows))[:, 0])


def _timeline(ax: Axes, view: View) -> None:
    steps = max(1, view.num_steps)
    high = ax.bbox.height / max(1, len(view.ids))
    for row, request_id in enumerate(view.ids):
        t = 0
        for letter, cells in groupby(view.lanes[request_id]):
            length = len(list(cells))
            if letter != " ":
                _box(ax, letter, t, length, row - 0.4, 0.8, outlined=high > 5)
            t += length
        for t, cell in view.cells(request_id).items():
            if cell.cached:
                _box(ax, "C", t, 1, row - 0.4, 0.4, outlined=high > 5)
        t = 0
        for letter, cells in groupby(view.lanes[request_id]):
            length = len(list(cells))
            if letter != " " and high > 15 and length * _ROOM / steps > 15:
                _letter(ax, letter, t - 0.5 + length / 2, row)
            t += length
    _lanes(ax, view)


def _box(ax: Axes, letter: str, t: int, length: int, y: float, tall: float, outlined: bool) -> None:
    look = STYLES[letter]
    ax.broken_barh(
        [(t - 0.5, length)],
        (y, tall),
        facecolors="#E4E4E4" if letter == "W" else look.colour,
        edgecolor=_INK,
        linewidth=0.7 if outlined else 0,
        hatch=look.hatch * 2 if outlined else None,
    )


def _letter(ax: Axes, letter: str, x: float, row: int) -> None:
    look = STYLES[letter]
    halo = [withStroke(linewidth=3, foreground=look.colour)] if look.hatch else []
    ax.text(x, row, letter, color=look.ink, ha="center", va="center_baseline", path_effects=halo)


def _lanes(ax: Axes, view: View) -> None:
    every = -(-len(view.ids) // 16)
    rows = range(0, len(view.ids), every)
    ax.set_yticks(list(rows), [_short(view.ids[row]) for row in rows])
    ax.set_ylim(len(view.ids) - 0.4, -0.6)
    _share_steps([ax], view.num_steps)


def _budget(ax: Axes, view: View) -> None:
    steps = range(view.num_steps)
    floor = [0] * view.num_steps
    outlined = view.num_steps <= 120
    for letter, row in (("D", 2), ("R", 1), ("P", 0)):
        tokens = [use[row] or 0 for use in view.budgets]
        look = STYLES[letter]
        ax.bar(
            steps,
            tokens,
            width=0.9 if outlined else 1.0,
            bottom=floor,
            color=look.colour,
            edgecolor=_INK if outlined else "none",
            linewidth=0.6,
            hatch=look.hatch * 2,
        )
        floor = [a + b for a, b in zip(floor, tokens, strict=True)]
    limits = [use.limit for use in view.budgets if use.limit is not None]
    if len(limits) == view.num_steps:
        ax.step(steps, limits, where="mid", color=_INK, linestyle="--", linewidth=2)
    ax.set_ylim(0, 1.08 * max([1, *limits, *floor]))
    _share_steps([ax], view.num_steps)


def _share_steps(axes: Sequence[Axes], num_steps: int) -> None:
    for ax in axes:
        ax.set_xlim(-0.6, num_steps - 0.4)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_xlabel("step" if ax is axes[-1] else "")


def _letters(view: View) -> list[str]:
    used = {letter for lane in view.lanes.values() for letter in lane}
    cached = any(cell.cached for i in view.ids for cell in view.cells(i).values())
    return [letter for letter in STYLES if letter in used or (letter == "C" and cached)]


def _legend(fig: Figure, letters: Sequence[str], limit: bool = False) -> None:
    handles: list[Any] = [
        Patch(
            facecolor="#E4E4E4" if letter == "W" else STYLES[letter].colour,
            edgecolor=_INK,
            hatch=STYLES[letter].hatch * 2,
            label=f"{letter} {STYLES[letter].name}",
        )
        for letter in letters
    ]
    if limit:
        handles.append(Line2D([], [], color=_INK, linestyle="--", linewidth=2, label="budget"))
    fig.legend(handles=handles, loc="outside upper center", ncols=min(3, len(handles)))


def _short(request_id: str) -> str:
    return request_id if len(request_id) <= 12 else request_id[:11] + "…"
