"""The solutions that the notebooks print pass their own checks, and the notebooks store unsolved exercises."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from contbatch import labs

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
SOLUTIONS = [
    ("06_token_budget", "06.1", "fill_budget"),
    ("08_preemption", "08.1", "pick_victim"),
    ("08_preemption", "08.2", "price"),
]


def _cells(name: str, kind: str) -> list[str]:
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    return [cell.source for cell in notebook.cells if cell.cell_type == kind]


@pytest.mark.parametrize(("name", "number", "function"), SOLUTIONS)
def test_a_printed_solution_passes(name: str, number: str, function: str) -> None:
    prose = "\n".join(_cells(name, "markdown"))
    blocks = [code for code in re.findall(r"```python\n(.*?)```", prose, re.DOTALL) if f"def {function}(" in code]
    assert len(blocks) == 1
    names: dict[str, object] = {}
    exec(blocks[0], names)
    assert labs.check(number, names[function]).passed


@pytest.mark.parametrize(("name", "number", "function"), SOLUTIONS)
def test_a_stored_stub_is_not_yet(name: str, number: str, function: str) -> None:
    cell = next(code for code in _cells(name, "code") if f"def {function}(" in code)
    names: dict[str, object] = {"labs": labs}
    exec(cell, names)
    assert labs.check(number, names[function]).not_yet


@pytest.mark.parametrize("value", [labs.exercise("06.2").reference, labs.exercise("08.3").reference])
def test_a_printed_number_is_ours(value: int) -> None:
    prose = "\n".join(_cells("06_token_budget", "markdown") + _cells("08_preemption", "markdown"))
    assert f"**{value}**" in prose
