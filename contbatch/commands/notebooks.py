"""`contbatch notebooks`: keep notebooks with stored outputs honest, ours and yours."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from contbatch.nbtools import Finding

app = typer.Typer(help="Check notebooks with stored outputs, or run them again and store what came out.")

Paths = Annotated[
    list[Path] | None, typer.Argument(help="Notebooks, or folders of them; without one, the lessons of contbatch.")
]


@app.command()
def check(
    paths: Paths = None,
    skeleton: Annotated[
        bool | None,
        typer.Option(help="Also check the sections of a lesson; by default only for the lessons of contbatch."),
    ] = None,
) -> None:
    """Say what keeps a notebook from being a test: exit status 1 if there is anything."""
    notebooks = _find(paths)
    found = 0
    for path in notebooks:
        findings = _findings(path, _is_lesson(path) if skeleton is None else skeleton)
        for finding in findings:
            typer.echo(f"{path}: {finding}")
        found += len(findings)
    if found:
        typer.echo(f"{found} findings in {len(notebooks)} notebooks")
        raise typer.Exit(1)
    typer.echo(f"{len(notebooks)} notebooks, nothing to mend")


@app.command()
def update(
    paths: Paths = None,
    ignored: Annotated[bool, typer.Option("--ignored", help="Renew also the outputs that tests ignore.")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that one cell may take.")] = 120,
) -> None:
    """Run notebooks again and store what came out, normalised; exit status 1 if one fails."""
    from contbatch.nbtools import NotebookError
    from contbatch.nbtools import update as regenerate

    failed = 0
    for path in _find(paths):
        try:
            changed = regenerate(path, ignored=ignored, timeout=timeout)
        except NotebookError as error:
            failed += 1
            print("contbatch:", " ".join(str(error).split()), file=sys.stderr)
        else:
            typer.echo(f"{path}: {'updated' if changed else 'unchanged'}")
    raise typer.Exit(1 if failed else 0)


def _find(paths: list[Path] | None) -> list[Path]:
    from contbatch.nbtools import NotebookError, find_notebooks, notebook_folder

    places = paths or [notebook_folder()]
    found = find_notebooks(places)
    if not found:
        raise NotebookError(f"no notebooks in {', '.join(map(str, places))}; name a file or a folder")
    return found


def _is_lesson(path: Path) -> bool:
    from contbatch.nbtools import notebook_folder

    return path.resolve().parent == notebook_folder()


def _findings(path: Path, skeleton: bool) -> list[Finding]:
    from contbatch.nbtools import check as guard
    from contbatch.nbtools import check_skeleton, read

    return [*guard(path), *(check_skeleton(read(path)) if skeleton else [])]
