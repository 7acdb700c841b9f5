"""The skeleton of a lesson: the parts that every lesson of this package has, in this order.

A reader who knows one lesson knows where to look in the next. This check is only for our own
lessons; the guards in `guards` are for everybody's notebooks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from contbatch.nbtools.cells import Finding, code_cells, name_of

SECTIONS = (
    "In one picture",
    "Goals",
    "Prerequisites",
    "Time",
    "Predict first",
    "Exercises",
    "Break it",
    "Quiz",
    "Summary",
    "Sources",
)
MAX_CELL_LINES = 12

_GENERATED_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){0,4}[0-9a-f-]*")


def check_skeleton(notebook: Any) -> list[Finding]:
    """What a lesson lacks: its title, its sections in order, a player, short cells, ids that are names."""
    return [*_title(notebook), *_sections(notebook), *_player(notebook), *_cells(notebook)]


def _title(notebook: Any) -> Iterator[Finding]:
    first = notebook["cells"][0] if notebook["cells"] else None
    if first is None or first["cell_type"] != "markdown" or not first["source"].startswith("# "):
        yield Finding("skeleton", "", "the first cell is not a title (`# …`)")


def _sections(notebook: Any) -> Iterator[Finding]:
    """A section begins with a heading or, for the short ones, with a word in bold."""
    prose = "\n".join(c["source"] for c in notebook["cells"] if c["cell_type"] == "markdown")
    last = -1
    for section in SECTIONS:
        pattern = rf"^(?:#+\s+|\*\*)(?:\d+[.)]?\s+)?{re.escape(section)}\b"
        found = re.search(pattern, prose, re.IGNORECASE | re.MULTILINE)
        if found is None:
            yield Finding("skeleton", "", f'no section "{section}"')
        elif found.start() < last:
            yield Finding("skeleton", "", f'section "{section}" stands too early')
        else:
            last = found.start()


def _player(notebook: Any) -> Iterator[Finding]:
    if not any(re.search(r"\b(?:Player|panel)\(", cell["source"]) for cell in code_cells(notebook)):
        yield Finding("skeleton", "", "no player of a run (`Player(…)` or `panel(…)`)")


def _cells(notebook: Any) -> Iterator[Finding]:
    for cell in code_cells(notebook):
        lines = [line.strip() for line in cell["source"].splitlines()]
        count = sum(1 for line in lines if line and not line.startswith("#"))
        if count > MAX_CELL_LINES:
            message = f"{count} lines of code; at most {MAX_CELL_LINES}: move some to the package"
            yield Finding("long-cell", name_of(cell), message)
    for cell in notebook["cells"]:
        if _GENERATED_ID.fullmatch(cell.get("id", "")):
            yield Finding("cell-id", name_of(cell), "an id made up by a program; give it a name")
