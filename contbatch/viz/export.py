"""A run as one HTML file that needs nothing: no kernel, no server, no network.

The page holds the same `player.js` as the notebook widget, the trace as JSON, and a model of a few lines in place
of the kernel. A table of the requests stands below, so the page also says what happened where scripts are off.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from contbatch.trace import Trace
from contbatch.viz.view import STYLES, View

SCRIPT = Path(__file__).with_name("player.js")

_CSS = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 8px 16px 48px; max-width: 1500px; }
h1 { font-size: 26px; margin: 12px; } section.run { margin: 12px; } h2 { font-size: 20px; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: 4px 0; } th, td { border-bottom: 1px solid #8888; padding: 4px 10px; }
th, td { text-align: right; vertical-align: top; } thead th { vertical-align: bottom; }
th:first-child, .text.text { text-align: left; } .text { min-width: 260px; white-space: pre-wrap; }
"""

_SHIM = """
const state = { ...JSON.parse(document.getElementById("run").textContent), t: 0, speed: 2, follow: "", future: true };
const heard = {};
const model = {
  get: (name) => state[name],
  set: (name, value) => { state[name] = value; },
  save_changes: () => {},
  on: (event, act) => { (heard[event] ??= []).push(act); },
  off: (event, act) => { heard[event] = (heard[event] ?? []).filter((other) => other !== act); },
};
window.contbatch = {
  get t() { return state.t; },
  set t(t) { state.t = t; (heard["change:t"] ?? []).forEach((act) => act()); },
};
render({ model, el: document.getElementById("player") });
"""


def player_data(views: Sequence[View], labels: Sequence[str], title: str) -> dict[str, Any]:
    """What `player.js` is given: one run, or two on one slider, and how each state looks."""
    return {
        "title": title,
        "labels": list(labels),
        "styles": {letter: style._asdict() for letter, style in STYLES.items()},
        "runs": [view.payload() for view in views],
    }


def names(views: Sequence[View], labels: Sequence[str] | None) -> list[str]:
    """Names of the runs: the given ones, else the policies; nothing where one run needs no name."""
    if labels:
        return [str(label) for label in labels][: len(views)]
    if len(views) == 1:
        return [""]
    return [f"{letter}: {view.trace.policy}" for letter, view in zip("AB", views, strict=False)]


def to_html(
    trace: Trace,
    path: str | Path | None = None,
    compare: Trace | None = None,
    title: str = "A run, step by step",
    labels: Sequence[str] | None = None,
) -> str:
    """One self-contained HTML page of a run.

    Args:
        trace: the run.
        path: where to write the page; None only returns it.
        compare: a second run, shown below the first on the same slider.
        title: heading of the page.
        labels: names of the two runs; by default their policies.

    Returns:
        The page.
    """
    views = [View(run) for run in (trace, compare) if run is not None]
    called = names(views, labels)
    data = {"payload": player_data(views, called, "")}
    tables = "".join(_table(view, name) for view, name in zip(views, called, strict=True))
    script = SCRIPT.read_text(encoding="utf-8").replace("export default { render };", _SHIM)
    page = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:">
<title>{escape(title)}</title>
<style>{_CSS}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
<div id="player"></div>
<noscript><p class="wide">The moving picture needs JavaScript; what happened is told below.</p></noscript>
{tables}
</main>
<script type="application/json" id="run">{_json_in_html(data)}</script>
<script type="module">{script}</script>
</body>
</html>
"""
    if path is not None:
        Path(path).write_text(page, encoding="utf-8")
    return page


def _json_in_html(data: Any) -> str:
    """JSON that cannot end the script element it stands in, whatever a prompt says."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _table(view: View, name: str) -> str:
    head, rows = _without_empty_texts(*view.table())
    heading = f"Requests of {name}" if name else "Requests"
    cells = "".join(f'<th scope="col"{_kind(name)}>{escape(name)}</th>' for name in head)
    body = "".join(f"<tr>{_row(head, row)}</tr>\n" for row in rows)
    return f"""<section class="run">
<h2>{escape(heading)}</h2>
<noscript><p>{escape(view.summary)}</p></noscript>
<div class="wide" tabindex="0" role="region" aria-label="{escape(heading)}">
<table><thead><tr>{cells}</tr></thead>
<tbody>
{body}</tbody></table></div>
</section>
"""


def _row(head: Sequence[str], row: Sequence[str]) -> str:
    cells = [f"<td{_kind(name)}>{escape(cell)}</td>" for name, cell in zip(head[1:], row[1:], strict=True)]
    return f'<th scope="row">{escape(row[0])}</th>' + "".join(cells)


def _kind(name: str) -> str:
    return ' class="text"' if name in ("prompt", "text") else ""


def _without_empty_texts(head: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    keep = [n for n, name in enumerate(head) if not _kind(name) or any(row[n] for row in rows)]
    return [head[n] for n in keep], [[row[n] for n in keep] for row in rows]
