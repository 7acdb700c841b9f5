"""Chromium for the browser tests: skipped where there is none, but never in CI."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contbatch.commands.doctor import CHROMIUM_REMEDY, find_chromium
from tests.browser.driver import chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A running Chromium, for one module: while it runs, this thread has an event loop that notebooks would meet."""
    if find_chromium() is None:
        stop = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        stop(f"needs Chromium: {CHROMIUM_REMEDY}")
    with chromium() as running:
        yield running


@pytest.fixture
def shots(tmp_path: Path) -> Path:
    """Where screenshots go: CONTBATCH_SHOTS keeps them for a look by eye."""
    folder = Path(os.environ.get("CONTBATCH_SHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
