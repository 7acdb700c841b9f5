"""Notebook files: finding, reading and writing them.

Reading does not repair, as `nbformat.read` would (cell ids, for one): a guard has to see what is
really in the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from contbatch.errors import ContbatchError


class NotebookError(ContbatchError, ValueError):
    """A notebook that cannot be found, read or run."""


def notebook_folder() -> Path:
    """The lessons of this package: inside an installation, or beside the package in a clone."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "_notebooks"
    return installed if installed.is_dir() else package.parent / "notebooks"


def find_notebooks(paths: Iterable[str | Path]) -> list[Path]:
    """The notebooks that the paths name: files as they are, folders with all that is below them.

    Raises:
        NotebookError: a path does not exist, or is a file of another kind.
    """
    return list(dict.fromkeys(found for path in paths for found in _below(Path(path))))


def _below(path: Path) -> Iterator[Path]:
    if path.is_dir():
        everything = sorted(path.rglob("*.ipynb"))
        yield from (p for p in everything if not _is_hidden(p.relative_to(path)))
    elif not path.exists():
        raise NotebookError(f"{path}: no such file or folder")
    elif path.suffix != ".ipynb":
        raise NotebookError(f"{path}: not a notebook; give a file that ends in .ipynb or a folder")
    else:
        yield path


def _is_hidden(relative: Path) -> bool:
    """Whether a path leads through a folder such as .ipynb_checkpoints."""
    return any(part.startswith(".") for part in relative.parts)


def read(path: str | Path) -> Any:
    """A notebook of format 4 as nbformat's nested dictionaries, not repaired.

    Raises:
        NotebookError: the file cannot be read, is no JSON, or is not a notebook of format 4.
    """
    return parse(read_text(path), str(path))


def read_text(path: str | Path) -> str:
    """The text of a file, exactly as it is stored.

    Raises:
        NotebookError: the file cannot be read.
    """
    try:
        return Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise NotebookError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise NotebookError(f"{path}: not UTF-8 text (byte {error.start})") from error


def parse(text: str, name: str) -> Any:
    """A notebook from its text; `name` is what errors call it. See `read`."""
    from nbformat import v4

    try:
        raw = json.loads(text)
    except json.JSONDecodeError as error:
        raise NotebookError(f"{name}: not JSON (line {error.lineno}: {error.msg})") from error
    if not isinstance(raw, dict) or raw.get("nbformat") != 4:
        raise NotebookError(f"{name}: not a notebook of format 4; open it in JupyterLab and save it")
    if problem := _invalid(raw):
        raise NotebookError(f"{name}: not a valid notebook: {problem}")
    return v4.reads(text)


def _invalid(raw: dict[str, Any]) -> str:
    """What the notebook schema has against it; missing cell ids are a guard's matter."""
    from nbformat.validator import iter_validate

    for error in iter_validate(raw, relax_add_props=True):
        message = str(error).strip().splitlines()[0]
        if "'id' is a required property" not in message:
            return message
    return ""


def to_text(notebook: Any) -> str:
    """The one way in which a notebook is written: sorted keys, an indent of one, a last newline."""
    from nbformat import v4

    text: str = v4.writes(notebook)
    return text + "\n"
