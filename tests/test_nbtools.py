"""The guards, the normaliser and the regenerator: each guard finds its fault, and only its fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from contbatch.nbtools import (
    NotebookError,
    check,
    check_skeleton,
    find_notebooks,
    normalise,
    notebook_folder,
    read,
    to_text,
    update,
)
from contbatch.nbtools.guards import MAX_FILE_BYTES, MAX_OUTPUT_BYTES
from contbatch.nbtools.normalise import KERNELSPEC, WIDGET_VIEW
from contbatch.nbtools.skeleton import MAX_CELL_LINES, SECTIONS

FIGURE = '<figure role="img" aria-label="A run."><img alt="A run." src="data:image/png;base64,AAAA"></figure>'


def code(source: str, cell_id: str, *outputs: Any, count: int = 1, **metadata: Any) -> Any:
    """A code cell that was run."""
    return new_code_cell(source, id=cell_id, execution_count=count, outputs=list(outputs), metadata=metadata)


def stream(text: str, name: str = "stdout") -> Any:
    return new_output("stream", name=name, text=text)


def result(count: int = 1, **data: str) -> Any:
    kinds = {key.replace("_", "/"): value for key, value in data.items()}
    return new_output("execute_result", data=kinds, execution_count=count)


def clean() -> Any:
    """A notebook that no guard objects to: text, a printed line, a figure, an error that is meant."""
    error = new_output("error", ename="ValueError", evalue="no", traceback=["ValueError: no"])
    return new_notebook(
        metadata={"kernelspec": dict(KERNELSPEC), "language_info": {"name": "python"}},
        cells=[
            new_markdown_cell("# Title\n\n![a picture of a run](run.png)", id="title"),
            code("print(3)", "print", stream("3\n"), count=1),
            code("figure", "figure", result(2, text_html=FIGURE, text_plain="A run."), count=2),
            code("raise ValueError('no')", "error", error, count=3, tags=["raises-exception"]),
        ],
    )


def rules(notebook: Any, folder: Path, text: str | None = None) -> list[str]:
    path = folder / "notebook.ipynb"
    path.write_text(to_text(notebook) if text is None else text, encoding="utf-8")
    return [finding.rule for finding in check(path)]


def test_a_clean_notebook_passes(tmp_path: Path) -> None:
    assert rules(clean(), tmp_path) == []


def _set(cell: int, **values: Any) -> Callable[[Any], None]:
    def break_it(notebook: Any) -> None:
        for key, value in values.items():
            notebook.cells[cell][key] = value

    return break_it


def _output(*outputs: Any) -> Callable[[Any], None]:
    return _set(1, outputs=list(outputs))


def _source(source: str) -> Callable[[Any], None]:
    return _set(1, source=source)


def _tag(tag: str) -> Callable[[Any], None]:
    return _set(1, metadata=nbformat.from_dict({"tags": [tag]}))


def _kernelspec(notebook: Any) -> None:
    notebook.metadata.kernelspec.name = "python312"


def _widget_state(notebook: Any) -> None:
    notebook.metadata["widgets"] = nbformat.from_dict({"state": {}})


FAULTS: dict[str, tuple[Callable[[Any], None], str]] = {
    "not executed": (_set(1, execution_count=None), "executed"),
    "executed out of order": (_set(1, execution_count=7), "executed"),
    "empty code cell": (_source(" \n"), "empty-cell"),
    "error that is not meant": (_set(3, metadata=nbformat.from_dict({})), "error"),
    "error that did not come": (_set(3, outputs=[]), "error"),
    "ignored by tag": (_tag("nbval-ignore-output"), "ignore-reason"),
    "ignored by comment": (_source("# NBVAL_IGNORE_OUTPUT\nprint(3)"), "ignore-reason"),
    "skipped": (_source("# NBVAL_SKIP\nprint(3)"), "ignore-reason"),
    "other kernel": (_kernelspec, "kernelspec"),
    "widget state": (_widget_state, "widget-state"),
    "widget view": (_output(result(text_plain="w", **{WIDGET_VIEW.replace("/", "_", 1): "x"})), "widget-state"),
    "two cells with one id": (_set(1, id="title"), "cell-id"),
    "large output": (_output(stream("x" * MAX_OUTPUT_BYTES)), "size"),
    "address": (_output(stream("<Engine at 0x7f2a1c0d5e10>\n")), "address"),
    "path": (_output(stream("/home/ada/notebooks/run.json\n")), "path"),
    "windows path": (_output(stream("C:\\Users\\ada\n")), "path"),
    "date": (_output(stream("2026-11-30\n")), "date"),
    "time of day": (_output(stream("at 12:30:05\n")), "date"),
    "timing": (_output(stream("took 12.5 ms\n")), "timing"),
    "timing in html": (_output(result(text_html="<b>0.31 s</b>", text_plain="a b")), "timing"),
    "path in an error": (
        _set(3, outputs=[new_output("error", ename="E", evalue="no /tmp/x", traceback=["E: no /tmp/x"])]),
        "path",
    ),
    "html picture without alt": (_output(result(text_html="<img src='x.png'>", text_plain="a b")), "alt-text"),
    "html picture with an empty alt": (_output(result(text_html="<img alt='' src='x'>", text_plain="a")), "alt-text"),
    "svg without label": (_output(result(text_html="<svg></svg>", text_plain="a b")), "alt-text"),
    "png with a bare repr": (_output(result(image_png="AAAA", text_plain="<Figure size 640x480>")), "alt-text"),
    "picture stored twice": (_output(result(image_png="AAAA", text_html=FIGURE, text_plain="A run.")), "alt-text"),
    "markdown picture without text": (_set(0, source="# Title\n\n![](run.png)"), "alt-text"),
    "interact": (_source("from ipywidgets import interact\n\ninteract(print, x=3)"), "source"),
    "interact as a decorator": (_source("@interact\ndef draw(x=3):\n    print(x)"), "source"),
    "Output": (_source("out = widgets.Output()"), "source"),
    "tqdm": (_source("%time 1\nfor _ in tqdm(range(3)):\n    pass"), "source"),
    "semicolon": (_source("plt.plot(x);"), "source"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_guard_finds_its_fault(fault: str, tmp_path: Path) -> None:
    break_it, rule = FAULTS[fault]
    notebook = clean()
    break_it(notebook)
    assert set(rules(notebook, tmp_path)) - {"normalised"} == {rule}


@pytest.mark.parametrize(
    "break_it",
    [
        _set(
            1, metadata=nbformat.from_dict({"contbatch": {"timing_reason": "virtual clock"}}), outputs=[stream("5 ms")]
        ),
        _set(
            1,
            metadata=nbformat.from_dict(
                {"tags": ["nbval-ignore-output"], "contbatch": {"ignore_reason": "measures this machine"}}
            ),
            outputs=[stream("5 ms on 2026-11-30")],
        ),
        _output(result(image_png="AAAA", text_plain="Step 3: 12 of 16 tokens.")),
        _output(stream("8 steps, 0x10 blocks, 10:16, a/b, 3 msgs, 2 s-curves\n")),
        _source("text = 'interact(); tqdm()'  # Output()"),
        _source("x = 1  # nothing hidden;"),
    ],
    ids=[
        "virtual time",
        "ignored with a reason",
        "png with a caption",
        "harmless text",
        "names in a string",
        "comment",
    ],
)
def test_guards_leave_alone_what_is_right(break_it: Callable[[Any], None], tmp_path: Path) -> None:
    notebook = clean()
    break_it(notebook)
    assert rules(notebook, tmp_path) == []


def test_a_large_file_is_found(tmp_path: Path) -> None:
    notebook = clean()
    notebook.cells[0].source += "x" * MAX_FILE_BYTES
    assert rules(notebook, tmp_path) == ["size"]


def test_missing_ids_are_found_not_repaired(tmp_path: Path) -> None:
    notebook = clean()
    del notebook.cells[0]["id"]
    assert rules(notebook, tmp_path) == ["cell-id"]


def test_an_ignored_output_may_not_name_a_path(tmp_path: Path) -> None:
    notebook = clean()
    metadata = {"tags": ["nbval-ignore-output"], "contbatch": {"ignore_reason": "measures this machine"}}
    _set(1, metadata=nbformat.from_dict(metadata), outputs=[stream("/home/ada/x")])(notebook)
    assert rules(notebook, tmp_path) == ["path"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"nbformat": 3, "worksheets": []}', '{"nbformat": 4}'])
def test_what_is_no_notebook_is_said_in_one_line(text: str, tmp_path: Path) -> None:
    with pytest.raises(NotebookError, match=r"notebook\.ipynb") as raised:
        rules(None, tmp_path, text)
    assert "\n" not in str(raised.value)


# The normaliser


def messy() -> Any:
    """As JupyterLab leaves it."""
    notebook = clean()
    notebook.metadata["widgets"] = nbformat.from_dict({"state": {"a": 1}})
    notebook.metadata.language_info["version"] = "3.11.7"
    notebook.cells[1].metadata = nbformat.from_dict({"execution": {"iopub.status.busy": "now"}, "tags": ["keep"]})
    notebook.cells[1].execution_count = 41
    notebook.cells[1].outputs = [stream("a"), stream("b\n"), stream("oh\n", "stderr"), stream("c\n")]
    view = nbformat.from_dict({"model_id": "7f", "version_major": 2, "version_minor": 0})
    notebook.cells[2].outputs[0]["data"][WIDGET_VIEW] = view
    notebook.cells[2].outputs[0]["execution_count"] = 42
    notebook.cells[3].outputs[0]["traceback"] = ["\x1b[31mFile /home/ada/x.py\x1b[0m", "ValueError: no"]
    return notebook


def test_normalised_is_what_the_guards_want(tmp_path: Path) -> None:
    notebook = normalise(messy())
    assert rules(notebook, tmp_path) == []
    assert [cell.id for cell in notebook.cells] == [cell.id for cell in clean().cells]
    assert notebook.cells[1].metadata == {"tags": ["keep"]}
    assert [(o.name, o.text) for o in notebook.cells[1].outputs] == [
        ("stdout", "ab\n"),
        ("stderr", "oh\n"),
        ("stdout", "c\n"),
    ]
    assert notebook.cells[2].outputs[0].execution_count == 2
    assert set(notebook.cells[2].outputs[0].data) == {"text/html", "text/plain"}
    assert notebook.cells[3].outputs[0].traceback == ["ValueError: no"]


def test_normalising_twice_changes_nothing() -> None:
    once = normalise(messy())
    assert to_text(normalise(once)) == to_text(once)


def test_normalising_leaves_its_argument_alone() -> None:
    notebook = messy()
    before = deepcopy(notebook)
    normalise(notebook)
    assert notebook == before


def test_a_notebook_that_is_not_normalised_is_found(tmp_path: Path) -> None:
    text = json.dumps(json.loads(to_text(clean())), indent=4)
    assert rules(None, tmp_path, text) == ["normalised"]


# The regenerator, with a real kernel


def unrun(*cells: Any) -> Any:
    return new_notebook(metadata={"kernelspec": dict(KERNELSPEC)}, cells=list(cells))


def write(notebook: Any, folder: Path) -> Path:
    path = folder / "notebook.ipynb"
    nbformat.write(notebook, path)
    return path


def test_a_second_update_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "beside.txt").write_text("beside")
    path = write(
        unrun(
            new_code_cell("print({'b', 'a', 'c'}, hash('text'))", id="hashes"),
            new_code_cell("print(open('beside.txt').read())", id="folder"),
            new_code_cell("import ipywidgets\nipywidgets.IntSlider(3, description='tokens')", id="widget"),
            new_code_cell("1 / 0", id="error", metadata={"tags": ["raises-exception"]}),
        ),
        tmp_path,
    )
    assert update(path) is True
    first = path.read_bytes()
    assert update(path) is False
    assert path.read_bytes() == first
    assert [finding.rule for finding in check(path)] == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["beside.txt", "notebook.ipynb"]


def test_ignored_outputs_stay_unless_they_are_asked_for(tmp_path: Path) -> None:
    ignored = {"tags": ["nbval-ignore-output"], "contbatch": {"ignore_reason": "random"}}
    path = write(unrun(new_code_cell("import os\nos.urandom(8).hex()", id="random", metadata=ignored)), tmp_path)
    update(path)
    first = read(path).cells[0].outputs
    assert first, "an ignored cell without an output gets one"
    update(path)
    assert read(path).cells[0].outputs == first
    update(path, ignored=True)
    assert read(path).cells[0].outputs != first


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("missing", "NameError: name 'missing'"),
        ("import os\nos._exit(3)", "kernel died"),
        ("while True:\n    pass", "2 s"),
    ],
    ids=["error", "dead kernel", "too slow"],
)
def test_a_notebook_that_fails_stays_as_it_was(source: str, said: str, tmp_path: Path) -> None:
    path = write(unrun(new_code_cell("3", id="good"), new_code_cell(source, id="bad")), tmp_path)
    before = path.read_bytes()
    with pytest.raises(NotebookError, match="cell bad") as raised:
        update(path, timeout=2)
    assert said in str(raised.value)
    assert path.read_bytes() == before


# Finding notebooks, and our own lessons


def test_folders_are_searched_but_not_hidden_ones(tmp_path: Path) -> None:
    for name in ("b/two.ipynb", "one.ipynb", ".ipynb_checkpoints/one-checkpoint.ipynb", "note.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert find_notebooks([tmp_path, tmp_path / "one.ipynb"]) == [tmp_path / "b/two.ipynb", tmp_path / "one.ipynb"]
    for wrong in (tmp_path / "note.txt", tmp_path / "none"):
        with pytest.raises(NotebookError, match=str(wrong.name)):
            find_notebooks([wrong])


def lesson() -> Any:
    cells = [new_markdown_cell("# Lesson", id="title")]
    for name in SECTIONS:
        cells.append(new_markdown_cell(f"## {name}", id=name.lower().replace(" ", "-")))
    return new_notebook(cells=[*cells, code("Player(engine.trace)", "code")])


def test_skeleton_of_a_lesson() -> None:
    assert check_skeleton(lesson()) == []


@pytest.mark.parametrize("section", SECTIONS)
def test_a_missing_section_is_named(section: str) -> None:
    notebook = lesson()
    notebook.cells = [cell for cell in notebook.cells if cell.source != f"## {section}"]
    assert [section in finding.message for finding in check_skeleton(notebook)] == [True]


def test_skeleton_wants_order_short_cells_and_names_as_ids() -> None:
    notebook = lesson()
    notebook.cells[1], notebook.cells[-2] = notebook.cells[-2], notebook.cells[1]
    notebook.cells[-1].source = "\n".join(["Player(x)"] * (MAX_CELL_LINES + 1))
    notebook.cells[3].id = "0a1b2c3d"
    found = {finding.rule for finding in check_skeleton(notebook)}
    assert found == {"skeleton", "long-cell", "cell-id"}


def test_a_lesson_has_a_player() -> None:
    notebook = lesson()
    notebook.cells[-1].source = "engine.run()"
    assert ["player" in finding.message for finding in check_skeleton(notebook)] == [True]


@pytest.mark.parametrize("path", find_notebooks([notebook_folder()]), ids=lambda path: path.stem)
def test_our_lessons_pass_every_guard(path: Path) -> None:
    assert check(path) == []
    assert check_skeleton(read(path)) == []
