"""A few knobs above a player: move one, and the run is made again.

At most three knobs, because a picture should answer one question. A knob that the engine cannot run with is answered
in words inside the panel, and the picture stays that of the last run that worked and says so. Nothing is printed and
no Output widget is used, so that a strict notebook test sees the same as a person.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from contbatch.errors import InvalidConfig
from contbatch.trace import Trace
from contbatch.viz.player import Player, widget_view

import ipywidgets as widgets  # isort: skip  # player has reported it by now if it is missing

Made = Trace | tuple[Trace, Trace]


class Panel(widgets.VBox):  # type: ignore[misc]  # ipywidgets publishes no types
    """Knobs, a line of words and a player; see `panel`."""

    def __init__(self, make_trace: Callable[..., Made], knobs: dict[str, Any], player: Player) -> None:
        self.make_trace, self.knobs, self.player = make_trace, knobs, player
        self.shown: dict[str, Any] = {}
        self.message = widgets.HTML()
        row = widgets.HBox(list(knobs.values()), layout=widgets.Layout(flex_flow="row wrap"))
        super().__init__([row, self.message, player])
        self.add_class("contbatch-panel")
        for knob in knobs.values():
            knob.observe(lambda change: self.run(), "value")
        self.run()

    @property
    def values(self) -> dict[str, Any]:
        """What the knobs say now."""
        return {name: knob.value for name, knob in self.knobs.items()}

    def run(self) -> None:
        """Make the run for the values of the knobs and show it, or say in the panel why there is none."""
        values = self.values
        try:
            made = self.make_trace(**values)
            self.player.show(*(made if isinstance(made, tuple) else (made,)))
        except Exception as error:  # a knob is moved in front of a class: any failure becomes a sentence
            self.say(f"No run with {_say(values)}: {error}", f"The picture is still that of {_say(self.shown)}.")
        else:
            self.shown = values
            self.say()

    def say(self, error: str = "", then: str = "") -> None:
        """Show an error in the panel; "" clears it."""
        self.error = error
        then = then if self.shown else ""
        self.message.value = (
            f'<p role="alert" style="font-size:16px;border:2px solid #D55E00;padding:6px 10px;margin:4px 0">'
            f"{escape(error)}<br>{escape(then)}</p>"
            if error
            else ""
        )

    @property
    def caption(self) -> str:
        """The knobs and the run in a sentence."""
        return self.error or f"{_say(self.values)}: {self.player.caption}"

    def __repr__(self) -> str:
        return f"Panel: {self.caption}"

    def _repr_mimebundle_(self, **kwargs: object) -> dict[str, Any]:
        return {**widget_view(self), **self.player.picture(), "text/plain": self.caption}


def panel(
    make_trace: Callable[..., Made],
    *,
    title: str = "",
    labels: Sequence[str] | None = None,
    **knobs: Any,
) -> Panel:
    """A player with knobs.

    Args:
        make_trace: from the values of the knobs, by name, to a trace or a pair of traces to compare.
        title, labels: as in `Player`.
        **knobs: at most three. (low, high), (low, high, step) or (low, high, step, start) is a slider of whole
            numbers, a list is a choice (a slider if all are numbers), and any ipywidget is used as it is.

    Raises:
        InvalidConfig: more than three knobs, or a knob that is none of these.
    """
    if not 1 <= len(knobs) <= 3:
        raise InvalidConfig(f"{len(knobs)} knobs; a panel has 1 to 3, so that one picture answers one question")
    made = {name: _knob(name, spec) for name, spec in knobs.items()}
    return Panel(make_trace, made, Player(None, labels=labels, title=title))


def _knob(name: str, spec: Any) -> Any:
    look = {"description": name.replace("_", " "), "style": {"description_width": "initial"}}
    if isinstance(spec, widgets.Widget):
        return spec
    if isinstance(spec, tuple) and 2 <= len(spec) <= 4 and all(isinstance(v, int) for v in spec):
        low, high = spec[:2]
        step, start = spec[2] if len(spec) > 2 else 1, spec[3] if len(spec) > 3 else low
        if low <= start <= high and step > 0:
            return widgets.IntSlider(start, low, high, step, continuous_update=False, **look)
    if isinstance(spec, list) and spec:
        numbers = all(isinstance(v, int | float) for v in spec)
        if numbers:
            return widgets.SelectionSlider(options=spec, value=spec[0], continuous_update=False, **look)
        return widgets.Dropdown(options=spec, value=spec[0], **look)
    raise InvalidConfig(
        f"knob {name}={spec!r}: give (low, high[, step[, start]]) in whole numbers, a list of choices, or a widget"
    )


def _say(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in values.items())
