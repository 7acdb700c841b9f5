"""Guards on stored outputs: nothing that differs by itself, and a text for every picture."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from contbatch.nbtools.cells import Finding, ignores_output, name_of, outputs

NOISE: dict[str, tuple[re.Pattern[str], str]] = {
    "address": (re.compile(r"\b0x[0-9a-fA-F]{6,}\b"), "give the object a __repr__"),
    "path": (
        re.compile(
            r"(?<![\w./:])/(?:home|Users|root|tmp|usr|opt|var|mnt|private|work|content)/[\w.~-]"
            r"|\b[A-Z]:\\[\w]"
        ),
        "show a name without its folder",
    ),
    "date": (
        re.compile(r"\b(?:19|20)\d\d-[01]\d-[0-3]\d\b|\b[0-2]?\d:[0-5]\d:[0-5]\d\b"),
        "leave it out",
    ),
    "timing": (
        re.compile(r"\b\d+(?:\.\d+)?\s?(?:ns|µs|us|ms|secs?|seconds?)\b|\b\d+\.\d+\s?s\b"),
        "show a ratio, a verdict, or steps",
    ),
}


def no_noise(notebook: Any) -> Iterator[Finding]:
    """No text output names a memory address, an absolute path, a date, or a measured time.

    A time on a virtual clock is a result: the cell says so with metadata
    {"contbatch": {"timing_reason": "…"}}. Output that is ignored may hold times and dates.
    """
    for cell, output in outputs(notebook):
        skipped = _noise_allowed(cell)
        for text in _texts(output):
            for rule, (pattern, remedy) in NOISE.items():
                found = pattern.search(text)
                if found and rule not in skipped:
                    message = f"{rule} in an output ({found.group()!r}); {remedy}"
                    yield Finding(rule, name_of(cell), message)


def _noise_allowed(cell: Any) -> set[str]:
    if ignores_output(cell):
        return {"timing", "date"}
    reason = cell["metadata"].get("contbatch", {}).get("timing_reason", "")
    return {"timing"} if str(reason).strip() else set()


_BASE64 = re.compile(r"data:[\w/+.-]+;base64,[A-Za-z0-9+/=\s]+")


def _texts(output: Any) -> Iterator[str]:
    """The parts of an output that a person reads and a test compares."""
    if output["output_type"] == "stream":
        yield output["text"]
    elif output["output_type"] == "error":
        yield output["evalue"]
    for kind, value in output.get("data", {}).items():
        if kind.startswith("text/") or kind == "image/svg+xml":
            yield _BASE64.sub("", value)


_IMG = re.compile(r"<img\b[^>]*>", re.IGNORECASE | re.DOTALL)
_ALT = re.compile(r"""\balt\s*=\s*(?:"[^"]*\w[^"]*"|'[^']*\w[^']*')""", re.IGNORECASE)
_SVG = re.compile(r"<svg\b[^>]*>", re.IGNORECASE | re.DOTALL)
_LABEL = re.compile(r"""\baria-label(?:ledby)?\s*=\s*["'][^"']*\w""", re.IGNORECASE)
_HIDDEN = re.compile(r"""\baria-hidden\s*=\s*["']?true""", re.IGNORECASE)
_MARKDOWN_IMAGE = re.compile(r"!\[([^\]]*)\]\(")


def pictures_have_text(notebook: Any) -> Iterator[Finding]:
    """Every picture has a text for those who do not see it, and is stored once."""
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            yield from _markdown_pictures(cell)
    for cell, output in outputs(notebook):
        data = output.get("data", {})
        yield from _markup_pictures(cell, data.get("text/html", ""))
        bitmaps = [kind for kind in data if kind in ("image/png", "image/jpeg")]
        for kind in bitmaps:
            if not _described(output, kind):
                message = f"{kind} without a text; show it with contbatch.viz.plots.figure"
                yield Finding("alt-text", name_of(cell), message)
        if bitmaps and "data:image/" in data.get("text/html", ""):
            yield Finding("alt-text", name_of(cell), "the same picture as HTML and as bitmap")


def _markdown_pictures(cell: Any) -> Iterator[Finding]:
    yield from _markup_pictures(cell, cell["source"])
    for found in _MARKDOWN_IMAGE.finditer(cell["source"]):
        if not found.group(1).strip():
            yield Finding("alt-text", name_of(cell), "a picture without text in the brackets ![…]")


def _markup_pictures(cell: Any, markup: str) -> Iterator[Finding]:
    for tag in _IMG.findall(markup):
        if not _ALT.search(tag):
            yield Finding("alt-text", name_of(cell), 'an <img> without alt="…"')
    figure_label = _LABEL.search(markup)
    for tag in _SVG.findall(markup):
        if not (_LABEL.search(tag) or _HIDDEN.search(tag) or figure_label):
            yield Finding("alt-text", name_of(cell), 'an <svg> without aria-label="…"')


def _described(output: Any, kind: str) -> bool:
    """A bitmap's text: its own alt, or the caption that stands beside it as text/plain."""
    details = output.get("metadata", {}).get(kind, {})
    alt = details.get("alt", "") if isinstance(details, dict) else ""
    caption = output["data"].get("text/plain", "").strip()
    return bool(alt.strip()) or (" " in caption and not caption.startswith("<"))
