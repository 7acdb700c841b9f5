"""`contbatch verify`: replay recordings and say what is equal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from contbatch.errors import ContbatchError


def verify(
    files: Annotated[list[str], typer.Argument(help="Recorded decisions or recorded tokens (JSON).")],
    model: Annotated[
        str | None, typer.Option(help="For recorded tokens: the model to use instead of the named one.")
    ] = None,
    device: Annotated[str, typer.Option(help="For recorded tokens: cpu, cuda or mps.")] = "cpu",
) -> None:
    """Replay recorded decisions, or recorded tokens of a model; exit status 1 if any differs.

    A recording that cannot be replayed (cut, of another kind, of a policy that does not exist) gives exit status 2.
    """
    raise typer.Exit(max([_verify(path, model, device) for path in files], default=0))


def _verify(path: str, model: str | None, device: str) -> int:
    from contbatch.verify import verify as replay

    try:
        report = replay(path, model, device)
    except ContbatchError as error:
        message = str(error) if path in str(error) else f"{path}: {error}"
        print("contbatch:", " ".join(message.split()), file=sys.stderr)
        return 2
    typer.echo(f"{path}: {report}")
    if not report.equal:
        typer.echo(f"  first difference: {report.first_difference}")
    return 0 if report.equal else 1
