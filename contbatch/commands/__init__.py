"""The commands of `contbatch`, one module each. What they share: where they write to."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def terminal() -> Console:
    """The terminal, or the pipe that stands in for it, in which no line is cut off."""
    from rich.console import Console

    console = Console(highlight=False, emoji=False, markup=False)
    if not console.is_terminal:
        console.width = max(console.width, 140)
    return console
