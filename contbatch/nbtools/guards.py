"""The guards: what a stored notebook must be for a green test to mean something.

A notebook test compares stored outputs with new ones. So the outputs have to be there (a notebook
without them passes every comparison), have to come from one run in order, must not depend on the
machine or the hour, and must not be exempt from the comparison without a reason. The other guards
are about readers: a picture has a text, a file stays small, no cell depends on a widget that a
test or a printed page cannot show.

Each guard is a function from a notebook to findings. It looks at the file only; nothing runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from contbatch.nbtools.cells import Finding, code_cells, ignores_output, name_of, outputs
from contbatch.nbtools.files import parse, read_text, to_text
from contbatch.nbtools.normalise import KERNELSPEC, WIDGET_VIEW, normalise
from contbatch.nbtools.outputs import no_noise, pictures_have_text
from contbatch.nbtools.sources import sources_are_testable

MAX_FILE_BYTES = 1_500_000
MAX_OUTPUT_BYTES = 250_000
RAISES = {"raises-exception", "nbval-raises-exception"}


def check(path: str | Path) -> list[Finding]:
    """Everything that the guards find in a notebook file.

    Raises:
        NotebookError: the file is not a notebook at all.
    """
    text = read_text(path)
    notebook = parse(text, str(path))
    findings = [finding for guard in GUARDS for finding in guard(notebook)]
    findings.extend(_file_size(text))
    findings.extend(_not_normalised(notebook, text))
    return findings


def executed_in_order(notebook: Any) -> Iterator[Finding]:
    """Every code cell was run, the first as 1, the next as 2, …"""
    for number, cell in enumerate(code_cells(notebook), start=1):
        if not cell["source"].strip():
            yield Finding("empty-cell", name_of(cell), "empty code cell; delete it")
        elif cell["execution_count"] is None:
            message = "not executed, so no test compares it; run `contbatch notebooks update`"
            yield Finding("executed", name_of(cell), message)
        elif cell["execution_count"] != number:
            message = f"execution count {cell['execution_count']}, expected {number}; run all cells"
            yield Finding("executed", name_of(cell), message)


def errors_are_meant(notebook: Any) -> Iterator[Finding]:
    """A stored error belongs to a cell that says so, and such a cell has one."""
    for cell in code_cells(notebook):
        raised = [o for o in cell["outputs"] if o["output_type"] == "error"]
        tags = set(cell["metadata"].get("tags", []))
        if raised and not RAISES & tags:
            message = f"stored error {raised[0]['ename']}; mend it or tag the cell raises-exception"
            yield Finding("error", name_of(cell), message)
        if RAISES & tags and not raised:
            message = "tagged raises-exception but nothing was raised; take the tag off"
            yield Finding("error", name_of(cell), message)


def ignored_with_reason(notebook: Any) -> Iterator[Finding]:
    """Output that no test compares needs a reason in the cell's metadata."""
    for cell in code_cells(notebook):
        reason = cell["metadata"].get("contbatch", {}).get("ignore_reason", "")
        if ignores_output(cell) and not str(reason).strip():
            message = 'ignored output without metadata {"contbatch": {"ignore_reason": "…"}}'
            yield Finding("ignore-reason", name_of(cell), message)


def kernelspec(notebook: Any) -> Iterator[Finding]:
    """The kernel is called python3 and nothing else, so that the notebook opens everywhere."""
    found = notebook["metadata"].get("kernelspec")
    if found != KERNELSPEC:
        yield Finding("kernelspec", "", f"kernelspec {json.dumps(found)}, expected python3")


def no_widget_state(notebook: Any) -> Iterator[Finding]:
    """Widgets live in a kernel; what is stored of them is stale, and some viewers refuse it."""
    if "widgets" in notebook["metadata"]:
        yield Finding("widget-state", "", "stored widget state; run `contbatch notebooks update`")
    for cell, output in outputs(notebook):
        if WIDGET_VIEW in output.get("data", {}):
            yield Finding("widget-state", name_of(cell), "stored reference to a live widget")


def unique_ids(notebook: Any) -> Iterator[Finding]:
    """Every cell has an id, and no two have the same."""
    seen: set[str] = set()
    for position, cell in enumerate(notebook["cells"], start=1):
        cell_id = cell.get("id")
        if not cell_id:
            yield Finding("cell-id", "", f"cell number {position} has no id")
        elif cell_id in seen:
            yield Finding("cell-id", cell_id, "two cells have this id")
        else:
            seen.add(cell_id)


def output_size(notebook: Any) -> Iterator[Finding]:
    """One output is small enough to be looked at in a difference."""
    for cell, output in outputs(notebook):
        size = len(json.dumps(output, ensure_ascii=False).encode())
        if size > MAX_OUTPUT_BYTES:
            message = f"an output of {size:,} bytes; at most {MAX_OUTPUT_BYTES:,}"
            yield Finding("size", name_of(cell), message)


def _file_size(text: str) -> Iterator[Finding]:
    size = len(text.encode())
    if size > MAX_FILE_BYTES:
        yield Finding("size", "", f"{size:,} bytes; at most {MAX_FILE_BYTES:,}")


def _not_normalised(notebook: Any, text: str) -> Iterator[Finding]:
    if to_text(normalise(notebook)) != text:
        message = "not normalised; run `contbatch notebooks update`"
        yield Finding("normalised", "", message)


GUARDS: tuple[Callable[[Any], Iterator[Finding]], ...] = (
    executed_in_order,
    errors_are_meant,
    ignored_with_reason,
    kernelspec,
    no_widget_state,
    unique_ids,
    output_size,
    no_noise,
    pictures_have_text,
    sources_are_testable,
)
