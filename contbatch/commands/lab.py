"""`contbatch lab`: the lessons in JupyterLab.

In a clone the lessons are opened where they are. In an installation they belong to the installation, so they are
copied first, into the working folder unless another one is named. A notebook of yours is never replaced unless you
say so: it may hold your answers.
"""

from __future__ import annotations

import filecmp
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from contbatch.errors import InvalidConfig

DEFAULT_FOLDER = Path("contbatch-notebooks")


def lab(
    folder: Annotated[Path | None, typer.Argument(help="Copy the notebooks there first.")] = None,
    options: Annotated[
        list[str] | None, typer.Argument(help="Options for JupyterLab, after --, such as: -- --no-browser")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace notebooks that you have changed.")] = False,
    start: Annotated[bool, typer.Option(help="Start JupyterLab afterwards.")] = True,
) -> None:
    """Copy the notebooks to a folder, if asked, and open them in JupyterLab."""
    from contbatch.nbtools.files import notebook_folder

    source = notebook_folder()
    if not any(source.glob("*.ipynb")):
        raise InvalidConfig(f"there are no notebooks in {source}; install contbatch again")
    if folder is None and source.name == "_notebooks":
        folder = DEFAULT_FOLDER
    if folder is not None:
        copy_notebooks(source, folder, overwrite)
    if start:
        raise typer.Exit(_start(folder or source, options or []))


def copy_notebooks(source: Path, folder: Path, overwrite: bool) -> None:
    """Copy what is not there yet, and say of each file that is kept.

    Raises:
        InvalidConfig: the folder cannot be made or written.
    """
    new: list[str] = []
    kept: list[str] = []
    try:
        for relative in _files(source):
            target = folder / relative
            if target.exists() and filecmp.cmp(source / relative, target, shallow=False):
                continue
            if target.exists() and not overwrite:
                kept.append(str(relative))
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / relative, target)
            new.append(str(relative))
    except OSError as error:
        raise InvalidConfig(f"cannot copy the notebooks to {folder}: {error.strerror}; choose another place") from error
    _say(folder, new, kept)


def _files(source: Path) -> Iterator[Path]:
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        if path.is_file() and not any(part.startswith((".", "__")) for part in relative.parts):
            yield relative


def _say(folder: Path, new: list[str], kept: list[str]) -> None:
    typer.echo(f"{folder}: {len(new)} files copied" if new else f"{folder}: nothing new to copy")
    for name in kept:
        typer.echo(f"kept yours: {name} (it differs from ours; --overwrite replaces it)")


def _start(folder: Path, options: list[str]) -> int:
    """Run JupyterLab until it ends. Ctrl-C goes to JupyterLab, which asks before it stops."""
    typer.echo(f"starting JupyterLab in {folder}; press Ctrl-C twice to stop it")
    process = subprocess.Popen([sys.executable, "-m", "jupyterlab", *options, str(folder)])
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return process.wait()
    finally:
        signal.signal(signal.SIGINT, before)
