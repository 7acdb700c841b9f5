"""Accessibility: what axe-core finds in a page or in a part of it."""

from __future__ import annotations

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page


def violations(page: Page, part: str | None = None) -> list[str]:
    """One line for each violated rule, with the first element it was found in."""
    results = Axe().run(page, context=part)
    return [f"{v['id']}: {v['help']} ({v['nodes'][0]['html'][:200]})" for v in results.response["violations"]]
