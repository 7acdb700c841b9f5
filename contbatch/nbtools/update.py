"""The regenerator: runs a notebook, normalises it, and writes it back if a result changed.

The kernel is this environment's, with a fixed hash seed and one thread, and starts in the
notebook's own folder. A notebook that fails leaves its file as it was.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contbatch.nbtools.cells import ignores_output
from contbatch.nbtools.files import NotebookError, parse, read_text, to_text
from contbatch.nbtools.normalise import KERNELSPEC, normalise

KERNEL_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NO_COLOR": "1",
}


def update(path: str | Path, *, ignored: bool = False, timeout: float = 120) -> bool:
    """Run a notebook again and store its results; returns whether the file changed.

    Args:
        ignored: renew also the outputs that tests ignore. Without it they stay as they are: they
            differ on every run, and a change in them says nothing.
        timeout: seconds that one cell may take.

    Raises:
        NotebookError: the file is no notebook, or a cell failed; the file is untouched.
    """
    path = Path(path)
    before = read_text(path)
    stored = parse(before, str(path))
    executed = execute(stored, path, timeout)
    if not ignored:
        _keep_ignored(stored, executed)
    after = to_text(normalise(executed))
    if after != before:
        _replace(path, after)
    return after != before


def execute(notebook: Any, path: Path, timeout: float) -> Any:
    """An executed copy of a notebook; `path` is where it lives, and what errors call it.

    Raises:
        NotebookError: a cell failed, or took longer than `timeout` seconds.
    """
    from copy import deepcopy

    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    result = deepcopy(notebook)
    client = NotebookClient(
        result,
        timeout=timeout,
        kernel_name=KERNELSPEC["name"],
        extra_arguments=["--Application.log_level=40"],  # a kernel warns on our terminal of its own transport
        resources={"metadata": {"path": str(path.resolve().parent)}},
    )
    current = _Current()
    client.on_cell_start = current.see
    try:
        client.execute(env=_environment())
    except CellExecutionError as error:
        reason = f"{error.ename}: {error.evalue}"
    except CellTimeoutError:
        reason = f"not done after {timeout:g} s; raise --timeout or make the cell shorter"
    except DeadKernelError:
        reason = "the kernel died"
    else:
        return result
    raise NotebookError(f"{path}: {current} failed: {reason}")


class _Current:
    """Remembers the cell that is being run."""

    def __init__(self) -> None:
        self.text = "the first cell"

    def see(self, cell: Any, cell_index: int) -> None:
        self.text = f"cell {cell.get('id', cell_index)} (number {cell_index + 1})"

    def __str__(self) -> str:
        return self.text


def _environment() -> Mapping[str, str]:
    """The kernel's environment: this one, with what makes a run repeatable."""
    kept = {key: value for key, value in os.environ.items() if key != "MPLBACKEND"}
    return kept | KERNEL_ENVIRONMENT


def _keep_ignored(stored: Any, executed: Any) -> None:
    for old, new in zip(stored["cells"], executed["cells"], strict=True):
        if new["cell_type"] == "code" and ignores_output(new) and old["outputs"]:
            new["outputs"] = old["outputs"]


def _replace(path: Path, text: str) -> None:
    """Write beside the file and move it there, so that an interruption leaves the old one whole."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_bytes(text.encode("utf-8"))
    os.replace(beside, path)
