"""How far a download is, without its downloader's help: the bytes that have arrived in a folder.

The one idea: pip and the Hub's client each show bars of their own, which cannot be had by a library that must stay
silent. Both write into a folder that we name, and the total was announced, so the folder's size says it all. Left out:
what either client keeps in a cache of its own; a download from there is over before the first look.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from contbatch.models.stored import Progress

_SECONDS = 0.2


@contextmanager
def watched(folder: Path, total: int, progress: Progress | None) -> Iterator[None]:
    """Call `progress("downloading", bytes, total)` five times a second in another thread, and once at the end."""
    if progress is None:
        yield
        return
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_SECONDS):
            progress("downloading", min(folder_bytes(folder), total), total)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
    progress("downloading", total, total)


def folder_bytes(folder: Path) -> int:
    """Size of all files in a folder, of those that are still there when they are looked at."""
    size = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                size += os.stat(os.path.join(where, name)).st_size
            except OSError:
                continue
    return size
