"""The one-file HTML page of a run, opened from the disk in Chromium."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contbatch import Engine, SamplingParams, SchedulerConfig, ScriptedExecutor
from contbatch.trace import Trace
from contbatch.viz.export import to_html
from tests.browser.axe import violations
from tests.browser.driver import window

pytestmark = pytest.mark.browser

HOSTILE = "</script><script>window.fooled = true</script><img src=x onerror='window.fooled = true'>"


class _Letters:
    """A tokenizer of characters, so that a prompt of text can be used without a model."""

    eos_token_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: Any) -> str:
        return "".join(chr(token) for token in token_ids)


def run() -> Trace:
    """Eight requests, one with markup in its prompt, in a pool so small that some are preempted."""
    config = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=32, block_size=4, num_blocks=40)
    engine = Engine(ScriptedExecutor(lambda _, position: 97 + position % 26), config, tokenizer=_Letters())
    for number in range(8):
        prompt = HOSTILE if number == 3 else f"Request number {number}."
        engine.add_request(prompt, SamplingParams(max_tokens=20))
    engine.run()
    assert any(step.preempted for step in engine.trace.steps)
    return engine.trace


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "run.html"
    to_html(run(), path, title="A run & <b>its</b> page")
    return path


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_page_is_accessible_and_asks_nobody(browser: Any, page_file: Path, shots: Path, dark: bool) -> None:
    with window(browser, dark=dark) as opened:
        opened.page.goto(page_file.as_uri())
        opened.page.wait_for_selector(".cb[data-frame='0']")
        assert violations(opened.page) == []
        opened.page.screenshot(path=shots / f"page-{'dark' if dark else 'light'}.png", full_page=True)
        opened.assert_clean()


def test_keyboard_moves_the_player(browser: Any, page_file: Path) -> None:
    with window(browser) as opened:
        opened.page.goto(page_file.as_uri())
        player = opened.page.locator(".cb")
        slider = opened.page.get_by_role("slider", name="Step")
        slider.focus()
        for key, frame in (("ArrowRight", "1"), ("ArrowRight", "2"), ("ArrowLeft", "1"), ("Home", "0")):
            opened.page.keyboard.press(key)
            opened.page.wait_for_selector(f".cb[data-frame='{frame}']")
        opened.page.keyboard.press("End")
        last = int(slider.get_attribute("max") or 0)
        opened.page.wait_for_selector(f".cb[data-frame='{last}']")
        assert last > 10
        assert "step" in (player.get_attribute("aria-label") or "").lower()


def test_markup_in_a_prompt_is_shown_as_text(browser: Any, page_file: Path) -> None:
    with window(browser) as opened:
        opened.page.goto(page_file.as_uri())
        opened.page.wait_for_selector(".cb[data-frame='0']")
        assert opened.page.evaluate("() => window.fooled") is None
        assert opened.page.locator("img[src=x]").count() == 0
        assert "</script><script>" in opened.page.locator("body").inner_text()
        assert opened.page.title() == "A run & <b>its</b> page"
        opened.assert_clean()


def test_page_tells_the_run_without_scripts(browser: Any, page_file: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(page_file.as_uri())
    assert page.locator("tbody tr").count() == 8
    context.close()


def test_gate_stops_and_records_requests_to_other_machines(browser: Any) -> None:
    """The driver's own promise: without it, `assert_clean` would say nothing."""
    with window(browser) as opened:
        opened.page.set_content("<img src='https://example.invalid/x.png'><script>throw new Error('boom')</script>")
        opened.page.wait_for_load_state()
        assert opened.blocked == ["https://example.invalid/x.png"]
        with pytest.raises(AssertionError):
            opened.assert_clean()
        assert any("boom" in error for error in opened.errors)
