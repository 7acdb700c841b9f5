"""`contbatch calibrate`: fit the simulator's cost model to a recorded run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from contbatch.commands import terminal

if TYPE_CHECKING:
    from contbatch.trace import Trace


def calibrate(
    trace: Annotated[Path | None, typer.Argument(help="A recorded trace; without one, a run is made now.")] = None,
    model: Annotated[str, typer.Option(help="Without a trace: the model to run.")] = "pocket",
    device: Annotated[str, typer.Option(help="Without a trace: cpu, cuda or mps.")] = "cpu",
    repeats: Annotated[int, typer.Option(min=1, help="Without a trace: how often each step is measured.")] = 5,
    out: Annotated[Path, typer.Option(help="Where to write the cost model.")] = Path("cost.json"),
) -> None:
    """Fit a cost model to a real run, and say how well it predicts steps that it has not seen."""
    from contbatch.calibrate import calibrate as fit
    from contbatch.calibrate import lines
    from contbatch.commands.demo import check_target

    check_target(out)
    calibration = fit(_run(trace, model, device, repeats))
    calibration.cost.save(out)
    console = terminal()
    from rich.table import Table

    table = Table(title="Cost model", title_justify="left", box=None, show_header=False)
    for row in lines(calibration):
        table.add_row(*row)
    console.print(table)
    console.print(f"Written to {out}", soft_wrap=True)


def _run(trace: Path | None, model: str, device: str, repeats: int) -> Trace:
    from contbatch.calibrate import varied_run
    from contbatch.trace import Trace

    return Trace.load(trace) if trace is not None else varied_run(model, device, repeats=repeats)
