"""Every lesson in a real JupyterLab: it runs, asks nobody, and its player answers to the keyboard."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contbatch.nbtools import find_notebooks, notebook_folder
from tests.browser.axe import violations
from tests.browser.driver import LabServer, NotebookPage, window

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

NOTEBOOKS = find_notebooks([notebook_folder()])


@pytest.fixture(scope="module")
def lab(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabServer]:
    """A JupyterLab on a copy of the lessons, so that nothing in the repository can change."""
    folder = tmp_path_factory.mktemp("lessons")
    for path in NOTEBOOKS:
        shutil.copy(path, folder)
    with LabServer(folder) as server:
        yield server


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_lesson_in_jupyterlab(browser: Any, lab: LabServer, path: Path, shots: Path) -> None:
    with window(browser) as opened:
        notebook = NotebookPage(opened, lab, path.name)
        notebook.open()
        notebook.run_all()
        assert notebook.errors() == []
        _press_a_key(opened.page)
        for dark in (False, True):
            notebook.set_dark(dark)
            notebook.screenshot(shots / f"{path.stem}-{'dark' if dark else 'light'}.png")
            for widget in (".cb", ".cf"):  # the player, and the linked arrays of the flat batch
                if opened.page.locator(widget).count():
                    assert violations(opened.page, widget) == []
        opened.assert_clean()
        notebook.close()


def _press_a_key(page: Any) -> None:
    """The first player is there and one key press moves it, and only it: JupyterLab's own cursor stays."""
    player = page.locator(".cb[data-frame]").first
    player.wait_for()
    player.scroll_into_view_if_needed()
    cell = "window.jupyterapp.shell.currentWidget.content.activeCellIndex"
    player.get_by_role("slider", name="Step").focus()
    active, before = page.evaluate(f"() => {cell}"), int(player.get_attribute("data-frame"))
    page.keyboard.press("ArrowRight")
    page.wait_for_function(
        "([node, frame]) => Number(node.dataset.frame) === frame", arg=[player.element_handle(), before + 1]
    )
    assert page.evaluate(f"() => {cell}") == active
