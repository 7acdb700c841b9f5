"""The normaliser: takes out of an executed notebook what differs from run to run.

It is idempotent and touches neither sources nor ids, so that a notebook that was run again shows a
difference in version control exactly when one of its results changed. What it leaves out: it does
not mend results that differ by themselves (times, addresses); those are for the guards to name.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
LANGUAGE = {"name": "python"}
CELL_METADATA = ("tags", "slideshow", "contbatch", "nbgrader")
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def normalise(notebook: Any) -> Any:
    """A normalised copy.

    The notebook's metadata become the kernelspec python3 and the language, nothing else (no widget
    state, no versions); cells keep the metadata that mean something (`CELL_METADATA`); execution
    counts become 1, 2, 3 …; printed text is one output per stream; of an error only its name and
    text stay; a widget's reference to a kernel that is gone is dropped where there is a picture or
    text beside it.
    """
    from nbformat import from_dict

    result = deepcopy(notebook)
    result["metadata"] = from_dict({"kernelspec": KERNELSPEC, "language_info": LANGUAGE})
    result["nbformat"], result["nbformat_minor"] = 4, 5
    for cell in result["cells"]:
        kept = {key: cell["metadata"][key] for key in CELL_METADATA if key in cell["metadata"]}
        cell["metadata"] = from_dict(kept)
    code_cells = [cell for cell in result["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code_cells, start=1):
        _renumber(cell, number)
        cell["outputs"] = _merge_streams(cell["outputs"])
        for output in cell["outputs"]:
            _clean(output)
    return result


def _renumber(cell: Any, number: int) -> None:
    if cell["execution_count"] is None:
        return
    cell["execution_count"] = number
    for output in cell["outputs"]:
        if "execution_count" in output:
            output["execution_count"] = number


def _merge_streams(outputs: list[Any]) -> list[Any]:
    """Text that was printed in one go can arrive in pieces, and not in the same ones twice."""
    merged: list[Any] = []
    for output in outputs:
        last = merged[-1] if merged else None
        if last is not None and _stream(output) is not None and _stream(output) == _stream(last):
            last["text"] += output["text"]
        else:
            merged.append(output)
    return merged


def _stream(output: Any) -> str | None:
    return output["name"] if output["output_type"] == "stream" else None


def _clean(output: Any) -> None:
    if output["output_type"] == "error":
        output["traceback"] = [f"{output['ename']}: {output['evalue']}"]
    data = output.get("data", {})
    if WIDGET_VIEW in data and len(data) > 1:
        del data[WIDGET_VIEW]
