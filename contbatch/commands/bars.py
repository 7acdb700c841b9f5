"""Progress bars for models that are fetched and loaded; only on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from contbatch.models.stored import Progress


@contextmanager
def model_bars(console: Console, quiet: bool = False) -> Iterator[Progress]:
    """A function to pass as `progress`, which draws a bar for each kind of work; they go away at the end."""
    from rich.progress import BarColumn, TaskID, TextColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[count]}"))
    tasks: dict[str, TaskID] = {}
    with Bars(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bars:

        def progress(what: str, done: int, of: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(f"{what} the model", total=of, count="")
            bars.update(tasks[what], completed=done, total=of, count=counted(what, done, of))

        yield progress


def counted(what: str, done: int, of: int) -> str:
    """How much is done: bytes of a download, tensors of a model that is loaded."""
    return f"{done / 1e6:.0f} of {of / 1e6:.0f} MB" if what == "downloading" else f"{done} of {of} tensors"
