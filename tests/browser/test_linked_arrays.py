"""The linked arrays in a real browser: keyboard, buttons and pointer choose the same token, for everybody to read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contbatch import BatchedRequest, ScheduledBatch
from contbatch.viz import flat as flat_module
from contbatch.viz.flat import FlatView
from tests.browser.axe import violations
from tests.browser.driver import window

pytestmark = pytest.mark.browser

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Linked arrays</title>
<style>:root { color-scheme: light dark; }</style></head><body><main><h1>Linked arrays</h1><div id="here"></div></main>
<script type="module">
const state = JSON.parse(STATE);
window.state = state;
const model = {
  get: (name) => state[name], set: (name, value) => { state[name] = value; },
  save_changes: () => {}, on: () => {}, off: () => {},
};
SCRIPT
render({ model, el: document.getElementById("here") });
</script></body></html>"""


def view() -> FlatView:
    """Eight tokens of three requests, one of which carries markup."""
    a = BatchedRequest.prefill("A", [11, 12, 13, 14], 0, block_table=[1])
    b = BatchedRequest.prefill("B", [21, 22, 23], 1, block_table=[5, 2], start_position=2, is_last_chunk=False)
    c = BatchedRequest.decode("<i>C", 31, 6, 2, block_table=[3, 4], context_len=6)
    return FlatView(ScheduledBatch(0, [a, b, c]).flatten(4), 4, [*"abcdefg", "<b>bold"])


@pytest.fixture(params=[False, True], ids=["light", "dark"])
def opened(browser: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A page with the widget and a model in place of the kernel."""
    script = Path(flat_module.__file__).with_name("flat.js").read_text(encoding="utf-8")
    state = json.dumps({"payload": view().payload("Linked"), "token": 1}).replace("<", "\\u003c")
    page = PAGE.replace("STATE", json.dumps(state)).replace("SCRIPT", script.replace("export default { render };", ""))
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    with window(browser, dark=request.param) as here:
        here.page.goto((tmp_path / "page.html").as_uri())
        here.page.wait_for_selector(".cf[data-token='1']")
        yield here
        here.assert_clean()


def marked(page: Any) -> list[str]:
    """The text of every marked cell, in reading order."""
    found: list[str] = page.evaluate("[...document.querySelectorAll('.cf-on')].map((cell) => cell.textContent)")
    return found


def token(page: Any, number: int) -> None:
    page.wait_for_selector(f".cf[data-token='{number}']", timeout=5000)


def test_keys_buttons_and_list_choose_the_token(opened: Any) -> None:
    page = opened.page
    page.get_by_role("slider", name="Token").focus()
    for key, number in (("ArrowRight", 2), ("End", 7), ("ArrowLeft", 6), ("Home", 0)):
        page.keyboard.press(key)
        token(page, number)
    assert page.get_by_role("button", name="Back").is_disabled()
    page.get_by_role("button", name="Next").click()
    token(page, 1)
    page.get_by_role("combobox").select_option(label="P B")
    token(page, 4)
    assert page.evaluate("state.token") == 4


def test_everything_that_speaks_of_the_token_is_marked(opened: Any) -> None:
    """Token 6: its column, both ends in cu_seqlens, its request's entries, its block; and the sentence."""
    page = opened.page
    page.get_by_role("slider", name="Token").fill("6")
    token(page, 6)
    assert marked(page) == ["6", "g", "23", "4", "8", "", "P B", "4", "7", "2", "5", "2"]
    assert page.get_by_role("status").text_content() == view().sentence(6)
    assert "Token 6 looks at 5 of them" in page.locator("canvas").get_attribute("aria-label")


def test_pointing_shows_and_clicking_chooses(opened: Any) -> None:
    page = opened.page
    cell = page.get_by_role("cell", name="31", exact=True)
    cell.hover()
    token(page, 7)
    page.mouse.move(5, 5)
    token(page, 1)
    cell.click()
    page.mouse.move(5, 5)
    token(page, 7)
    assert page.evaluate("state.token") == 7
    assert page.evaluate("document.querySelector('.cf b, .cf i')") is None


def test_it_is_accessible(opened: Any, shots: Path, request: pytest.FixtureRequest) -> None:
    assert violations(opened.page, ".cf") == []
    opened.page.screenshot(path=shots / f"{request.node.name}.png", full_page=True)
