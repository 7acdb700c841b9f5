"""What reaches a notebook or a file: captions, mime bundles, pages; the same bytes for the same run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import ipywidgets
import pytest

from contbatch.errors import InvalidConfig
from contbatch.trace import Trace
from contbatch.viz import Player, figure, panel, plots, to_html
from contbatch.viz.view import View
from tests.viz.runs import MARKUP, engine_run, hand_trace

WIDGET = "application/vnd.jupyter.widget-view+json"
FIGURES = {
    "overview": plots.overview,
    "timeline": plots.timeline,
    "budget": plots.budget,
    "blocks": plots.blocks,
    "gaps": plots.gaps,
    "compare": lambda trace: plots.compare(trace, hand_trace(), what="budget"),
}


class Tags(HTMLParser):
    """The start tags and the texts of a page, as a browser would read them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


# Figures


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_the_same_bytes_for_the_same_run(name: str) -> None:
    first, again = (figure(FIGURES[name](engine_run())) for _ in range(2))
    assert first.png == again.png and first.caption == again.caption
    assert b"Software" not in first.png


@pytest.mark.parametrize("name", FIGURES)
def test_figures_say_what_they_show(name: str) -> None:
    bundle = figure(FIGURES[name](hand_trace()))._repr_mimebundle_()
    caption = bundle["text/plain"]
    assert re.search(r"\d", caption) and caption.endswith(".")
    tags = dict(Tags(bundle["text/html"]).tags)
    assert tags["figure"]["role"] == "img" and tags["figure"]["aria-label"] == caption
    assert tags["img"]["alt"] == caption and (tags["img"]["src"] or "").startswith("data:image/png;base64,")
    assert caption in Tags(bundle["text/html"]).texts


def test_figures_are_readable_from_the_last_row() -> None:
    fig = plots.overview(engine_run())
    assert tuple(fig.get_size_inches()) == (9, 5) and fig.dpi == 100 and fig.get_facecolor() == (1, 1, 1, 1)
    sizes = [text.get_fontsize() for ax in fig.axes for text in (*ax.texts, ax.xaxis.label, *ax.get_xticklabels())]
    assert sizes and min(sizes) >= 13


def test_figures_leave_pyplot_alone() -> None:
    code = (
        "import sys; from tests.viz.runs import hand_trace; from contbatch.viz import figure, plots;"
        "figure(plots.overview(hand_trace())); print('matplotlib.pyplot' in sys.modules)"
    )
    assert _python(code).strip() == "False"


def test_gaps_name_the_longest_wait() -> None:
    assert plots.gaps(hand_trace()).get_label() == (
        "10 tokens of 3 requests; the longest gap is 2 steps, of b after step 2."
    )


def test_blocks_caption_is_counted() -> None:
    assert plots.blocks(hand_trace()).get_label() == (
        "At most 4 of 4 blocks are in use (first in step 1); at most 2 free ones are still cached."
    )


def test_a_figure_without_words_is_refused() -> None:
    fig = plots.budget(hand_trace())
    fig.set_label("")
    with pytest.raises(InvalidConfig, match="caption"):
        figure(fig)
    assert figure(fig, "9 steps.").caption == "9 steps."
    with pytest.raises(InvalidConfig, match="what='pie'"):
        plots.compare(hand_trace(), hand_trace(), what="pie")


# The player


def test_player_is_a_widget_one_picture_and_a_caption() -> None:
    player = Player(hand_trace(), title="Three requests")
    bundle = player._repr_mimebundle_()
    assert set(bundle) == {WIDGET, "text/html", "text/plain"}
    assert bundle[WIDGET]["model_id"] == player.model_id
    assert bundle["text/plain"] == player.caption == f"Three requests: {View(hand_trace()).summary}"
    assert bundle["text/html"].count("<img") == 1
    assert repr(player) == f"Player: {player.caption}"


def test_player_says_the_same_for_the_same_run_and_something_else_for_another() -> None:
    first, again, other = (Player(run) for run in (engine_run(), engine_run(), engine_run(seed=1)))
    assert {**first._repr_mimebundle_(), WIDGET: 0} == {**again._repr_mimebundle_(), WIDGET: 0}
    assert first.caption != other.caption


def test_only_small_traits_are_sent_back_and_t_stays_inside_the_run() -> None:
    player, seen = Player(hand_trace(), t=4, follow="b"), []
    player.observe(lambda change: seen.append(change["new"]), "t")
    player.t = 5
    player.t = 99
    player.t = -3
    assert seen == [5, 8, 0] and player.follow == "b"
    player.t = 7
    player.show(Trace())
    assert player.t == 0 and "0 requests" in player.caption
    assert Player().caption == "There is no run to show."


def test_player_links_to_ordinary_widgets() -> None:
    player, slider = Player(hand_trace()), ipywidgets.IntSlider(max=8)
    ipywidgets.link((slider, "value"), (player, "t"))
    slider.value = 6
    assert player.t == 6
    ipywidgets.jslink((slider, "value"), (player, "t"))


def test_two_runs_share_a_player() -> None:
    player = Player(hand_trace(), compare=engine_run(), labels=("small", "large"))
    assert [run["steps"] for run in player.payload["runs"]] == [9, player.num_steps]
    assert player.caption.startswith("small: 3 requests") and " large: 8 requests" in player.caption
    assert player.payload["labels"] == ["small", "large"]
    assert Player(hand_trace(), hand_trace()).payload["labels"] == ["A: VllmV1", "B: VllmV1"]
    assert "small" in player._repr_mimebundle_()["text/html"]


@pytest.mark.parametrize("missing", ["anywidget", "traitlets", "ipywidgets", "matplotlib"])
def test_a_missing_package_is_named_with_the_way_to_get_it(missing: str) -> None:
    module = "plots" if missing == "matplotlib" else "panels"
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from contbatch.errors import MissingDependency\n"
        f"try: import contbatch.viz.{module}\n"
        "except MissingDependency as error: print(error)"
    )
    said = _python(code)
    assert missing in said and "pip install" in said


def test_the_view_model_and_the_page_need_neither_widgets_nor_matplotlib() -> None:
    code = (
        "import sys; from tests.viz.runs import hand_trace; from contbatch.viz import to_html; to_html(hand_trace());"
        "print(sorted({'numpy', 'torch', 'matplotlib', 'ipywidgets', 'anywidget'} & set(sys.modules)))"
    )
    assert _python(code).strip() == "[]"


# Panels


def _run_with(budget: int, policy: str = "VllmV1") -> Trace:
    if budget == 12:
        raise InvalidConfig(f"budget <b>{budget}</b> is not for today")
    return engine_run(max_num_batched_tokens=budget, policy=policy)


def test_a_knob_makes_the_run_again() -> None:
    shown = panel(_run_with, budget=(8, 32, 4, 16), policy=["VllmV1", "StaticBatching"])
    before = shown.player.caption
    shown.knobs["budget"].value = 8
    assert shown.player.caption != before and "budget 8 tokens a step" in shown.player.caption
    shown.knobs["policy"].value = "StaticBatching"
    assert "under StaticBatching" in shown.caption


def test_an_error_is_words_in_the_panel_and_the_picture_stays() -> None:
    shown = panel(_run_with, budget=(8, 32, 4, 16))
    before = shown.player.caption
    shown.knobs["budget"].value = 12
    assert shown.player.caption == before
    assert 'role="alert"' in shown.message.value and "&lt;b&gt;12&lt;/b&gt;" in shown.message.value
    assert "still that of budget = 16" in shown.message.value
    assert shown.caption == "No run with budget = 12: budget <b>12</b> is not for today"
    shown.knobs["budget"].value = 20
    assert shown.message.value == "" and "budget 20" in shown.caption


def test_a_panel_that_never_had_a_run_still_shows_its_knobs() -> None:
    shown = panel(_run_with, budget=[12, 16])
    bundle = shown._repr_mimebundle_()
    assert WIDGET in bundle and "not for today" in bundle["text/plain"] and "text/html" not in bundle
    shown.knobs["budget"].value = 16
    assert "text/html" in shown._repr_mimebundle_()


def test_panel_text_is_deterministic() -> None:
    first, again = (panel(_run_with, budget=(8, 32)) for _ in range(2))
    assert {**first._repr_mimebundle_(), WIDGET: 0} == {**again._repr_mimebundle_(), WIDGET: 0}
    assert first._repr_mimebundle_()["text/plain"].startswith("budget = 8: 8 requests in ")


def test_knobs_take_the_form_of_their_values() -> None:
    own = ipywidgets.BoundedIntText(value=8, description="mine")

    def make(**values: Any) -> Trace:
        return hand_trace()

    shown = panel(make, a_b=(1, 9), size=[1, 2, 4])
    assert isinstance(shown.knobs["a_b"], ipywidgets.IntSlider) and shown.knobs["a_b"].description == "a b"
    assert isinstance(shown.knobs["size"], ipywidgets.SelectionSlider)
    assert panel(make, own=own).knobs["own"] is own
    for bad in ({}, dict.fromkeys("abcd", (1, 2))):
        with pytest.raises(InvalidConfig, match="1 to 3"):
            panel(make, **bad)
    for spec in ((9, 1), (1, 9, 0), (1, 9, 1, 20), [], "x", (1.5, 2.5), (1,)):
        with pytest.raises(InvalidConfig, match="knob a="):
            panel(make, a=spec)


def test_a_panel_can_compare() -> None:
    shown = panel(lambda budget: (hand_trace(), _run_with(budget)), labels=("hand", "engine"), budget=[8, 16])
    assert shown.caption.startswith("budget = 8: hand: 3 requests")


# The page


def test_page_needs_nothing_from_anywhere() -> None:
    page = to_html(hand_trace(), title="A <run>")
    for tag, attributes in Tags(page).tags:
        assert not {"src", "href", "action"} & attributes.keys(), tag
    assert "default-src 'none'" in page and "import " not in page.split('<script type="module">')[1]
    assert "<title>A &lt;run&gt;</title>" in page


def test_prompt_with_markup_is_text_in_the_page() -> None:
    page = to_html(hand_trace())
    parsed = Tags(page)
    assert [tag for tag, _ in parsed.tags].count("script") == 2 and "img" not in dict(parsed.tags)
    assert parsed.texts.count(MARKUP) == 2, "prompt and answer, in the table"
    data = json.loads(parsed.texts[parsed.texts.index(next(t for t in parsed.texts if t.startswith('{"payload"')))])
    assert data["payload"]["runs"][0]["requests"][1]["prompt"] == MARKUP


def test_page_tells_what_happened_without_scripts() -> None:
    texts = " ".join(Tags(to_html(hand_trace(), compare=engine_run(), labels=("one", "two"))).texts)
    assert View(hand_trace()).summary in texts and View(engine_run()).summary in texts
    assert "Requests of one" in texts and "Requests of two" in texts and "computed again" in texts


def test_page_is_written_and_is_the_same_each_time(tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    assert to_html(hand_trace(), path) == to_html(hand_trace()) == path.read_text(encoding="utf-8")


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
