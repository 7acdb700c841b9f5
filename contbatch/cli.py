"""The `contbatch` command.

Each command lives in its own module of `contbatch.commands` and imports what it needs when it runs, so that
`contbatch --help` answers at once. The one rule kept here: whatever a user gets wrong ends in one line that says
what, and exit status 2; only a fault of ours shows a traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from contbatch import __version__
from contbatch.commands import calibrate, demo, doctor, lab, models, notebooks, policies, verify
from contbatch.errors import ContbatchError

USAGE_ERROR = 2

# typer does not export the base of its usage errors; BadParameter is one in every release.
_CommandError: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="contbatch",
    help="Continuous batching for language models: a small engine to read, watch and teach with.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo.demo)
app.command()(lab.lab)
app.command()(doctor.doctor)
app.add_typer(models.app, name="models")
app.command()(verify.verify)
app.command()(policies.policies)
app.command()(calibrate.calibrate)
app.add_typer(notebooks.app, name="notebooks")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"contbatch {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _help_without_command(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments; returns the exit status."""
    try:
        status = app(list(arguments), prog_name="contbatch", standalone_mode=False)
    except _CommandError as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "contbatch"
        return _complain(f"{error.format_message().rstrip('.')}; see {command} --help")
    except ContbatchError as error:
        return _complain(str(error))
    except typer.Abort:
        return _complain("stopped")
    return status if isinstance(status, int) else 0


def _complain(message: str) -> int:
    print("contbatch:", " ".join(message.split()), file=sys.stderr)
    return USAGE_ERROR


def main() -> None:
    """Entry point of the `contbatch` script."""
    sys.exit(run(sys.argv[1:]))
