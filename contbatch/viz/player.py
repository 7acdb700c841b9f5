"""The player as a notebook widget: one anywidget that is given the whole run.

Scrubbing happens in the browser (`player.js`); of all that happens there only the step number, the request that is
followed and the speed come back to Python, when a hand lets go. Where no widget can run (a stored notebook, a
printed page) the same object is one static picture with its caption, and in plain text it is the caption alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from contbatch.errors import MissingDependency
from contbatch.trace import Trace
from contbatch.viz.export import SCRIPT, names, player_data
from contbatch.viz.view import View

try:
    import anywidget
    import traitlets
except ImportError as error:
    raise MissingDependency(
        f"the player needs {error.name}, which is not installed; pip install anywidget ipywidgets, "
        "or write a page with contbatch.viz.to_html, which needs neither"
    ) from error


__all__ = ["Player", "anywidget", "traitlets", "widget_view"]


class Player(anywidget.AnyWidget):
    """A run that can be played, stepped and scrubbed.

    `t` (the step), `follow` (a request id or ""), `speed` (steps a second) and `future` (whether steps after `t` are
    shown, pale) can be set, observed and linked like those of any ipywidget.

    Args:
        trace: the run; None shows an empty player until `show` is called.
        compare: a second run, locked to the same slider.
        labels: names of the runs; two by default get the names of their policies.
        title: heading of the player.
        t, follow, speed, future: as above.
    """

    _esm = SCRIPT
    payload = traitlets.Dict().tag(sync=True)
    t = traitlets.Int(0).tag(sync=True)
    follow = traitlets.Unicode("").tag(sync=True)
    speed = traitlets.Float(2.0, min=0.1, max=60.0).tag(sync=True)
    future = traitlets.Bool(True).tag(sync=True)

    def __init__(
        self,
        trace: Trace | None = None,
        compare: Trace | None = None,
        labels: Sequence[str] | None = None,
        title: str = "",
        *,
        t: int = 0,
        follow: str = "",
        speed: float = 2.0,
        future: bool = True,
    ) -> None:
        self.title, self.labels = title, labels
        self.views: list[View] = []
        super().__init__(follow=follow, speed=speed, future=future)
        self.show(trace, compare)
        self.t = t

    def show(self, trace: Trace | None, compare: Trace | None = None) -> None:
        """Swap the run; the step number stays where it was, if the new run has it."""
        views = [View(run) for run in (trace, compare) if run is not None]
        self.views, self._names = views, names(views, self.labels)
        with self.hold_sync():
            self.payload = player_data(views, self._names, self.title)
            self.t = self._within(self.t)

    @property
    def num_steps(self) -> int:
        """Steps on the slider: those of the longer run."""
        return max((view.num_steps for view in self.views), default=0)

    @property
    def caption(self) -> str:
        """The run (or both) in a sentence with its numbers; what a strict notebook test compares."""
        said = [view.summary for view in self.views]
        if len(said) == 2:
            said = [f"{name}: {text}" for name, text in zip(self._names, said, strict=True)]
        return " ".join([*([f"{self.title}:"] if self.title else []), *said]) or "There is no run to show."

    @traitlets.validate("t")
    def _clamped(self, proposal: Any) -> int:
        return self._within(proposal["value"])

    def _within(self, t: int) -> int:
        return max(0, min(int(t), self.num_steps - 1))

    def __repr__(self) -> str:
        return f"Player: {self.caption}"

    def _repr_mimebundle_(self, **kwargs: object) -> dict[str, Any]:  # type: ignore[override]  # as IPython allows
        return {**widget_view(self), **self.picture()}

    def picture(self) -> dict[str, str]:
        """The player where nothing moves: an HTML figure of the whole run, and its caption as text."""
        from contbatch.viz import plots

        if not self.num_steps:
            return {"text/plain": self.caption}
        first, *second = [view.trace for view in self.views]
        drawn = plots.compare(first, second[0], self._names) if second else plots.overview(first)
        return plots.figure(drawn, self.caption).bundle


def widget_view(widget: Any) -> dict[str, Any]:
    """The part of a mime bundle that a notebook shows as the living widget."""
    view = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
    return {"application/vnd.jupyter.widget-view+json": view}
