"""The times that this package promises, measured: `python benchmarks/limits.py`.

Limits are not tests. A test must be red for a wrong program and not for a busy machine, so the times stand here, with
their limits beside them, and CI runs this once at the end. Exit status 1 if one is over.

    python benchmarks/limits.py --json limits.json     # the numbers, and what they were measured on
    python benchmarks/limits.py import player          # only these
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contbatch.trace import Trace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the browser driver is shared with the tests

IMPORT_SECONDS = 0.15
DEMO_SECONDS = 20.0
NOTEBOOK_SECONDS = 60.0
PLAYER_MILLISECONDS = 16.0

PLAYER_STEPS = 500
PLAYER_REQUESTS = 64
PLAYER_PRESSES = 80


@dataclass(frozen=True)
class Measured:
    """One time beside its limit."""

    what: str
    value: float
    limit: float
    unit: str
    note: str = ""

    @property
    def within(self) -> bool:
        """True if the limit is kept."""
        return self.value <= self.limit


def measure_import() -> Iterator[Measured]:
    """`import contbatch` in a fresh interpreter; the best of seven, since everything else is the machine's noise."""
    script = "import time; t = time.perf_counter(); import contbatch; print(time.perf_counter() - t)"
    runs = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True) for _ in range(7)
    ]
    yield Measured("import contbatch", min(float(run.stdout) for run in runs), IMPORT_SECONDS, "s", "best of 7")


def measure_demo() -> Iterator[Measured]:
    """`contbatch demo` as a user starts it."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "contbatch", "demo"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        yield Measured("contbatch demo", time.perf_counter() - start, DEMO_SECONDS, "s", "start to page")


def measure_notebooks() -> Iterator[Measured]:
    """Each lesson from the start of its kernel to its last cell."""
    from contbatch.nbtools import execute, find_notebooks, notebook_folder, read

    for path in find_notebooks([notebook_folder()]):
        start = time.perf_counter()
        execute(read(path), path, timeout=2 * NOTEBOOK_SECONDS)
        yield Measured(path.name, time.perf_counter() - start, NOTEBOOK_SECONDS, "s", "kernel start to last cell")


def measure_player() -> Iterator[Measured]:
    """What one step costs the page of a long run. A picture waits for the display's next frame, up to 16.7 ms: that
    wait is the display's, so it is shown but not limited."""
    from contbatch.viz.export import to_html
    from tests.browser.driver import chromium, window

    with tempfile.TemporaryDirectory() as folder, chromium() as browser, window(browser) as opened:
        path = Path(folder) / "run.html"
        to_html(_long_trace(), path)
        page = opened.page
        page.goto(path.as_uri())
        page.wait_for_selector(".cb[data-frame='0']")
        page.get_by_role("slider", name="Step").focus()
        page.evaluate(_WATCH)
        for press in range(PLAYER_PRESSES):
            page.keyboard.press("PageDown" if press % 8 == 7 else "ArrowRight")
            page.wait_for_function(f"() => window.shown.length === {press + 1}")
        waits, paints = (sorted(times) for times in zip(*page.evaluate("() => window.shown"), strict=True))
    middle = len(paints) // 2
    note = f"painting, median of {len(paints)}; {waits[middle]:.1f} ms from the key, the wait for a frame included"
    yield Measured("player step", paints[middle], PLAYER_MILLISECONDS, "ms", note)


_WATCH = """() => {
  window.shown = [];
  let pressed = 0;
  const player = document.querySelector(".cb[data-frame]");
  addEventListener("keydown", (event) => { pressed = event.timeStamp; }, true);
  new MutationObserver(() => window.shown.push([performance.now() - pressed, Number(player.dataset.paintMs)]))
    .observe(player, { attributes: true, attributeFilter: ["data-frame"] });
}"""


def _long_trace() -> Trace:
    """A run of 500 steps with 64 requests that share a pool too small for all of them."""
    from contbatch import Engine, SamplingParams, SchedulerConfig, ScriptedExecutor

    config = SchedulerConfig(max_num_seqs=PLAYER_REQUESTS, max_num_batched_tokens=128, num_blocks=400)
    engine = Engine(ScriptedExecutor(), config)
    for number in range(PLAYER_REQUESTS):
        prompt = [1000 + number] * (10 + 7 * number % 190)
        engine.add_request(prompt, SamplingParams(max_tokens=100 + 11 * number % 300))
    engine.run(max_steps=PLAYER_STEPS)
    assert len(engine.trace.steps) == PLAYER_STEPS, f"the run has {len(engine.trace.steps)} steps"
    return engine.trace


MEASUREMENTS: dict[str, Callable[[], Iterator[Measured]]] = {
    "import": measure_import,
    "demo": measure_demo,
    "notebooks": measure_notebooks,
    "player": measure_player,
}


def main() -> int:
    """Measure, print, and say whether all limits are kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help=f"some of: {', '.join(MEASUREMENTS)}; all by default")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    if unknown := set(options.only) - set(MEASUREMENTS):
        parser.error(f"no measurement is called {', '.join(sorted(unknown))}; there are {', '.join(MEASUREMENTS)}")
    results: list[Measured] = []
    for name in options.only or MEASUREMENTS:
        for result in MEASUREMENTS[name]():
            results.append(result)
            print(_line(result), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(_report(results), indent=1) + "\n")
    over = [result.what for result in results if not result.within]
    print(f"over the limit: {', '.join(over)}" if over else f"all {len(results)} within their limits")
    return 1 if over else 0


def _line(result: Measured) -> str:
    verdict = "ok" if result.within else "OVER"
    return f"{verdict:<5}{result.what:<40}{result.value:>9.3f} {result.unit:<3} of {result.limit:g}  ({result.note})"


def _report(results: list[Measured]) -> dict[str, object]:
    machine = {
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }
    return {"machine": machine, "results": [{**asdict(r), "within": r.within} for r in results]}


if __name__ == "__main__":
    sys.exit(main())
