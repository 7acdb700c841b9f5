"""`contbatch policies`: all policies side by side on one workload."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from contbatch.commands import terminal


def policies(
    workload: Annotated[Path, typer.Argument(help="A workload (JSON).")],
    name: Annotated[str | None, typer.Option(help="Which one, where the file holds several.")] = None,
) -> None:
    """Serve a workload under every policy, with made-up tokens, and compare what it cost."""
    from rich import box
    from rich.table import Table

    from contbatch.compare import compare, table
    from contbatch.policies import POLICIES
    from contbatch.workload import Workload

    heads, *rows = table(compare(Workload.load(workload, name), POLICIES))
    shown = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for place, head in enumerate(heads):
        shown.add_column(head, justify="right" if place else "left")
    for row in rows:
        shown.add_row(*row)
    terminal().print(shown)
