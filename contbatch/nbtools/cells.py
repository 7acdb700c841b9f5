"""Words that the guards share: what a finding is, and how to walk through a notebook's cells."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

IGNORE_TAGS = {"nbval-ignore-output", "nbval-skip"}
IGNORE_COMMENTS = {"NBVAL_IGNORE_OUTPUT", "NBVAL_SKIP", "PYTEST_VALIDATE_IGNORE_OUTPUT"}


class Finding(NamedTuple):
    """One thing that is wrong: the rule, the cell ("" for the whole file), and what to do."""

    rule: str
    cell: str
    message: str

    def __str__(self) -> str:
        where = f"cell {self.cell}: " if self.cell else ""
        return f"{where}{self.message} [{self.rule}]"


def ignores_output(cell: Any) -> bool:
    """Whether a notebook test leaves the outputs of this cell alone."""
    if IGNORE_TAGS & set(cell["metadata"].get("tags", [])):
        return True
    return bool(IGNORE_COMMENTS & set(_comments(cell["source"])))


def code_cells(notebook: Any) -> list[Any]:
    """The code cells in order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def name_of(cell: Any) -> str:
    """How a finding calls a cell."""
    return str(cell.get("id") or "without id")


def _comments(source: str) -> Iterator[str]:
    for line in source.splitlines():
        if line.strip().startswith("#"):
            yield line.strip().lstrip("#").strip()


def outputs(notebook: Any) -> Iterator[tuple[Any, Any]]:
    """Every stored output with its cell."""
    for cell in code_cells(notebook):
        for output in cell["outputs"]:
            yield cell, output
