"""Pictures of a run: a view-model without a drawing in it, and what paints it.

`View` says what is to be seen. `Player` is the moving picture for notebooks, `panel` puts knobs above it, `to_html`
makes the same a page of its own, and `plots` draws still figures. Each is imported when it is first asked for,
so that reading a trace costs neither matplotlib nor ipywidgets.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contbatch.viz import plots
    from contbatch.viz.export import to_html
    from contbatch.viz.panels import panel
    from contbatch.viz.player import Player
    from contbatch.viz.plots import figure
    from contbatch.viz.view import View

__all__ = ["Player", "View", "figure", "panel", "plots", "to_html"]

_HOMES = {"Player": "player", "View": "view", "figure": "plots", "panel": "panels", "to_html": "export"}


def __getattr__(name: str) -> Any:
    if name == "plots":
        return import_module("contbatch.viz.plots")
    if name not in _HOMES:
        raise AttributeError(f"module 'contbatch.viz' has no attribute {name!r}")
    return getattr(import_module(f"contbatch.viz.{_HOMES[name]}"), name)
