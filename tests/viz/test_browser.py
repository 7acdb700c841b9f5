"""The player in a real browser: the exported page, driven by keyboard and buttons."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from contbatch.trace import Trace
from contbatch.viz import View, to_html
from tests.viz.runs import MARKUP, engine_run, hand_trace, large_run

pytestmark = pytest.mark.browser

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
HOW_TO_GET_IT = (
    "no Chromium found: install it (Debian and Ubuntu: apt install chromium) or set CHROMIUM to its path, and run again"
)
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip(HOW_TO_GET_IT)
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright (it is in the test extra)")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Open a run as a page from a file; whatever the page asks of other hosts or complains about fails the test."""
    asked: list[str] = []
    errors: list[str] = []
    contexts = []

    def open_(trace: Trace, compare: Trace | None = None, width: int = 1400, **options: Any) -> Any:
        path = tmp_path / "run.html"
        to_html(trace, path, compare=compare, title="A run")
        context = browser.new_context(viewport={"width": width, "height": 1000}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.goto(path.as_uri())
        if options.get("java_script_enabled", True):
            page.wait_for_selector(".cb[data-frame]")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert [url for url in asked if not url.startswith("file://")] == []
    assert errors == []


def _at(page: Any, t: int) -> None:
    page.wait_for_selector(f'.cb[data-frame="{t}"]', timeout=5000)


def _until(page: Any, expression: str) -> None:
    """Wait for an expression; Playwright's own wait needs eval, which the page forbids."""
    for _ in range(100):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never true: {expression}")


def _axe(page: Any) -> list[Any]:
    axe = pytest.importorskip("axe_playwright_python", reason="pip install axe-playwright-python (test extra)")
    page.evaluate(Path(axe.__file__).with_name("axe.min.js").read_text(encoding="utf-8"))
    found = page.evaluate("async () => (await axe.run()).violations.map((v) => [v.id, v.nodes.map((n) => n.html)])")
    return list(found)


def test_buttons_move_the_step(open_page: Open) -> None:
    page = open_page(hand_trace())
    button = lambda name: page.get_by_role("button", name=name, exact=True)  # noqa: E731  # reads like the page
    assert button("Back").is_disabled() and button("First step").is_disabled()
    for name, t in (("Next", 1), ("Next", 2), ("Back", 1), ("Last step", 8), ("First step", 0)):
        button(name).click()
        _at(page, t)
    assert page.evaluate("contbatch.t") == 0


def test_keys_move_the_step_and_go_no_further(open_page: Open) -> None:
    page = open_page(engine_run())
    page.evaluate("window.leaked = []; addEventListener('keydown', (e) => leaked.push(e.key))")
    page.get_by_role("slider", name="Step").focus()
    last = View(engine_run()).num_steps - 1
    keys = (
        ("ArrowRight", 1),
        ("ArrowUp", 2),
        ("ArrowLeft", 1),
        ("PageUp", 11),
        ("PageDown", 1),
        ("End", last),
        ("Home", 0),
    )
    for key, t in keys:
        page.keyboard.press(key)
        _at(page, t)
    page.get_by_role("button", name="Next", exact=True).focus()
    page.keyboard.press("ArrowRight")
    _at(page, 1)
    page.keyboard.press("Space")
    _at(page, 2)
    assert page.evaluate("leaked") == []


def test_space_plays_and_stops(open_page: Open) -> None:
    page = open_page(engine_run())
    page.get_by_label("Speed").select_option("30")
    page.get_by_role("slider", name="Step").focus()
    page.keyboard.press("Space")
    _until(page, "Number(document.querySelector('.cb').dataset.frame) > 5")
    assert page.get_by_role("status").count() == 0, "a playing picture is not read aloud"
    page.keyboard.press("Space")
    page.get_by_role("button", name="Play", exact=True).wait_for()
    assert page.get_by_role("status").inner_text().startswith(f"Step {page.evaluate('contbatch.t')}: ")


def test_every_frame_has_its_caption_as_name(open_page: Open) -> None:
    page, view = open_page(hand_trace()), View(hand_trace())
    for t in range(view.num_steps):
        page.evaluate(f"contbatch.t = {t}")
        _at(page, t)
        caption = view.frame(t).caption
        assert page.get_by_role("status").inner_text() == caption
        assert page.locator(".cb-lanes canvas").get_attribute("aria-label") == caption
        assert page.locator(".cb").get_attribute("aria-label").endswith(caption)
        words = page.locator(".cb-words li span:last-child").all_inner_texts()
        assert words == [decision.text for decision in view.frame(t).decisions]


def test_budget_blocks_and_queue_are_told_in_text(open_page: Open) -> None:
    page = open_page(hand_trace())
    page.evaluate("contbatch.t = 3")
    _at(page, 3)
    assert page.get_by_role("img", name="Token budget: 1 of 8 tokens used").count() == 1
    assert page.get_by_role("img", name="KV blocks: 3 of 4 used · 1 cached").count() == 1
    assert page.locator(".cb-queue li").all_inner_texts() == ["X\nb: made room in this step", "W\nc"]


def test_the_picture_changes_with_the_step(open_page: Open) -> None:
    page = open_page(hand_trace())
    shot = "[...document.querySelectorAll('.cb canvas')].map((c) => c.toDataURL()).join()"
    pictures = set()
    for t in range(9):
        page.evaluate(f"contbatch.t = {t}")
        _at(page, t)
        pictures.add(page.evaluate(shot))
    assert len(pictures) == 9


def test_two_runs_are_locked_to_one_slider(open_page: Open) -> None:
    short, long = hand_trace(), engine_run()
    page = open_page(short, compare=long)
    frames = "[...document.querySelectorAll('.cb-lanes canvas')].map((c) => Number(c.dataset.frame))"
    assert page.get_by_role("slider").count() == 1
    for t in (3, 8, len(long.steps) - 1):
        page.get_by_role("slider", name="Step").fill(str(t))
        _at(page, t)
        assert page.evaluate(frames) == [min(t, 8), t]
    text = page.get_by_role("status").inner_text()
    assert "A: VllmV1: the run ended; its last step: Step 8: " in text and "B: VllmV1: Step " in text


SPY = """() => {
  const write = CanvasRenderingContext2D.prototype.fillText;
  window.written = [];
  CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
    window.written.push(text);
    return write.call(this, text, ...rest);
  };
}"""


def done_at_the_end(page: Any) -> int:
    """How many requests the picture of the last step calls done."""
    page.get_by_role("slider", name="Step").focus()
    page.keyboard.press("Home")
    page.wait_for_selector(".cb[data-frame='0']")
    page.evaluate(SPY)
    page.keyboard.press("End")
    page.wait_for_selector(".cb:not([data-frame='0'])")
    return int(page.evaluate("() => window.written.filter((text) => text === 'done').length"))


def test_every_request_of_a_shorter_run_is_done_once_that_run_is_over(open_page: Open) -> None:
    short, long = engine_run(), engine_run(num_blocks=12, max_num_seqs=2)
    assert len(short.steps) < len(long.steps)
    alone, both = done_at_the_end(open_page(long)), done_at_the_end(open_page(long, compare=short))
    assert both - alone == len(short.finished)


def test_a_request_that_never_ended_is_not_called_done(open_page: Open) -> None:
    whole = engine_run(num_blocks=12, max_num_seqs=2)
    cut = Trace(whole.policy, whole.model, whole.config, whole.requests, whole.steps[:3])
    assert done_at_the_end(open_page(whole, compare=cut)) == done_at_the_end(open_page(whole))


def test_a_click_follows_a_request(open_page: Open) -> None:
    page = open_page(hand_trace())
    lanes = page.locator(".cb-lanes canvas")
    lanes.click(position={"x": 30, "y": 30 + 26 + 13})
    page.get_by_text("b: 5 prompt tokens").wait_for()
    assert page.get_by_label("Follow").input_value() == "b"
    lanes.click(position={"x": 30, "y": 30 + 26 + 13})
    _until(page, "document.querySelector('.cb-follow').hidden")
    page.locator(".cb-side canvas").nth(1).click(position={"x": 10, "y": 10})
    page.get_by_text("a: 6 prompt tokens").wait_for()


def test_markup_in_a_prompt_is_shown_as_text(open_page: Open) -> None:
    page = open_page(hand_trace())
    page.get_by_label("Follow").select_option("b")
    page.get_by_text(f"Prompt: “{MARKUP}”").wait_for()
    assert page.evaluate("window.hacked") is None and page.locator("img[onerror]").count() == 0
    assert page.locator("td", has_text=MARKUP).count() == 2


@pytest.mark.parametrize(("scheme", "width"), [("light", 1400), ("dark", 900)])
def test_axe_finds_nothing(open_page: Open, scheme: str, width: int) -> None:
    page = open_page(engine_run(), compare=hand_trace(), width=width, color_scheme=scheme)
    page.evaluate("contbatch.t = 6")
    _at(page, 6)
    assert _axe(page) == []
    page = open_page(large_run(), width=width, color_scheme=scheme)
    page.evaluate("contbatch.t = 60")
    _at(page, 60)
    page.get_by_label("Follow").select_option("r3")
    assert _axe(page) == []


def test_the_page_follows_the_colour_scheme(open_page: Open) -> None:
    ink = "getComputedStyle(document.querySelector('.cb')).color"
    page = open_page(hand_trace(), color_scheme="dark")
    assert page.evaluate(ink) == "rgb(255, 255, 255)"
    page.emulate_media(color_scheme="light")
    assert page.evaluate(ink) == "rgb(0, 0, 0)"


def test_nothing_overflows_between_900_and_1400(open_page: Open) -> None:
    for width in (900, 1150, 1400):
        page = open_page(large_run(), compare=hand_trace(), width=width)
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_text_is_never_below_16_pixels(open_page: Open) -> None:
    page = open_page(engine_run(), compare=hand_trace())
    sizes = page.evaluate(
        "[...document.querySelectorAll('.cb *')].map((e) => parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(sizes) >= 16


def test_reduced_motion_is_slow_and_never_starts_by_itself(open_page: Open) -> None:
    page = open_page(engine_run(), reduced_motion="reduce")
    page.get_by_label("Speed").select_option("30")
    page.wait_for_timeout(300)
    assert page.locator(".cb").get_attribute("data-frame") == "0"
    page.get_by_role("button", name="Play", exact=True).click()
    page.wait_for_timeout(2000)
    assert 1 <= int(page.locator(".cb").get_attribute("data-frame")) <= 5


def test_a_run_without_steps_says_so(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "empty.html"
    to_html(Trace(), path)
    page = browser.new_page()
    page.goto(path.as_uri())
    page.get_by_text("There is no step to show.").wait_for()
    page.close()


def test_page_is_readable_without_scripts(open_page: Open) -> None:
    page = open_page(hand_trace(), java_script_enabled=False)
    assert View(hand_trace()).summary in page.inner_text("main")
    assert re.search(r"needs JavaScript", page.inner_text("main"))


def test_hidden_future_shows_only_what_happened(open_page: Open) -> None:
    page = open_page(hand_trace())
    shot = "document.querySelector('.cb-lanes canvas').toDataURL()"
    with_future = page.evaluate(shot)
    page.get_by_label("Later steps").uncheck()
    _until(page, f"{shot} !== {with_future!r}")
