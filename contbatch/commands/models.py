"""`contbatch models`: which models have a name, and fetching them."""

from __future__ import annotations

from typing import Annotated

import typer

from contbatch.commands import terminal
from contbatch.commands.bars import model_bars

app = typer.Typer(help="List the models that have a name; fetch one.", invoke_without_command=True)


@app.callback()
def list_them(context: typer.Context) -> None:
    """List the models that have a name; fetch one."""
    if context.invoked_subcommand is not None:
        return
    from rich.table import Table

    from contbatch.models import list_models

    table = Table(show_edge=False)
    for heading in ("name", "here", "from", "what"):
        table.add_column(heading)
    for info in list_models():
        table.add_row(info.name, "yes" if info.present else "no", info.source, info.summary)
    console = terminal()
    console.print(table)
    console.print("\nAlso accepted wherever a model is named: a checkpoint folder (config.json, safetensors,")
    console.print("tokenizer.json), a .gguf file, or a Hub repository written owner/name.")


@app.command()
def fetch(name: Annotated[str, typer.Argument(help="A name from the list, or a Hub repository owner/name.")]) -> None:
    """Download a model, after saying what and how much."""
    from contbatch.models.registry import find_model

    with model_bars(terminal()) as progress:
        path = find_model(name, typer.echo, progress)
    typer.echo(f"{name} is at {path}")
