"""Drives a real JupyterLab in a real Chromium, for tests and for a look by eye.

    python -m tests.browser.driver notebooks/06_token_budget.ipynb --shot look.png --dark

Three pieces: a `LabServer` that shares nothing with the user's Jupyter, a `Window` whose gate stops and records every
request to another machine, and a `NotebookPage` that opens a notebook and runs it. Nothing here sleeps: JupyterLab's
own commands say when they are done. Known sources of flakiness are switched off in the server's settings, so that
a red test means something.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from playwright.sync_api import Browser, Page, Route, sync_playwright

from contbatch.commands.doctor import find_chromium

CHROMIUM_OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--force-color-profile=srgb",
    "--font-render-hinting=none",
)
LAB_SETTINGS: dict[str, dict[str, Any]] = {
    "@jupyterlab/apputils-extension/notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": True,
    },
    # without this, cells that are off screen are not in the page
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none", "recordTiming": False},
    "@jupyterlab/docmanager-extension/plugin": {"autosave": False},
}
HERE = re.compile(r"^(https?|wss?)://(127\.0\.0\.1|localhost)[:/]|^(data|blob|file|about):")
START_SECONDS = 60
CELL_SECONDS = 120


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless Chromium of the system with a fresh profile."""
    path = find_chromium()
    assert path is not None, "there is no Chromium; see `contbatch doctor`"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(CHROMIUM_OPTIONS))
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Window:
    """A page, and what went wrong in it."""

    page: Page
    blocked: list[str] = field(default_factory=list)
    """Requests to other machines. They were stopped."""
    errors: list[str] = field(default_factory=list)
    """Exceptions that no script caught."""

    def gate(self, route: Route) -> None:
        """Let through what stays on this machine; stop and record the rest."""
        if HERE.match(route.request.url):
            route.continue_()
        else:
            self.blocked.append(route.request.url)
            route.abort()

    def assert_clean(self) -> None:
        """Nothing was asked of another machine and no script failed."""
        assert not self.blocked, f"asked other machines: {self.blocked}"
        assert not self.errors, f"script errors: {self.errors}"


@contextmanager
def window(browser: Browser, *, dark: bool = False, width: int = 1400, height: int = 1000) -> Iterator[Window]:
    """A window with the gate in place. `dark` is what the page is told that the reader prefers."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light")
    opened = Window(context.new_page())
    context.route("**/*", opened.gate)
    opened.page.on("pageerror", lambda error: opened.errors.append(str(error)))
    try:
        yield opened
    finally:
        context.close()


class LabServer:
    """A JupyterLab with folders, port and token of its own.

    Args:
        root: the folder it shows.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.token = secrets.token_hex(16)
        self.port = 0

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> LabServer:
        self._home = Path(tempfile.mkdtemp(prefix="lab-"))
        self._write_settings()
        self.port = _free_port()
        with (self._home / "log").open("w") as log:
            self._process = subprocess.Popen(
                self._command(), env=self._environment(), stdout=log, stderr=log, start_new_session=True
            )
        try:
            self._wait_until_up()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _write_settings(self) -> None:
        for name, settings in LAB_SETTINGS.items():
            path = self._home / "settings" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(settings))

    def _command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1"),
            *(f"--port={self.port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={self.token}"),
            *(f"--ServerApp.root_dir={self.root}", "--expose-app-in-browser"),
            "--LabApp.extension_manager=readonly",
        ]

    def _environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if key != "MPLBACKEND"}
        folders = {
            "JUPYTER_CONFIG_DIR": "config",
            "JUPYTER_DATA_DIR": "data",
            "JUPYTER_RUNTIME_DIR": "runtime",
            "JUPYTERLAB_SETTINGS_DIR": "settings",
            "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
            "IPYTHONDIR": "ipython",
        }
        own = {variable: str(self._home / folder) for variable, folder in folders.items()}
        return kept | own | {"JUPYTER_PREFER_ENV_PATH": "1", "PYTHONHASHSEED": "0"}

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"JupyterLab did not start:\n{(self._home / 'log').read_text()[-3000:]}")
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/api?token={self.token}", timeout=1) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def _stop(self) -> None:
        """End the server and the kernels that it started: all are in its process group."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, sign)
                self._process.wait(10)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        shutil.rmtree(self._home, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class NotebookPage:
    """One notebook in JupyterLab.

    Args:
        window: where to show it.
        lab: the server.
        path: the notebook, relative to the server's root.
    """

    CURRENT = "window.jupyterapp.shell.currentWidget"

    def __init__(self, window: Window, lab: LabServer, path: str) -> None:
        self.window, self.page, self.lab, self.path = window, window.page, lab, path

    def open(self) -> None:
        """Show it alone (no file browser, no restored tabs) and wait for its kernel."""
        self.page.goto(f"{self.lab.url}/doc/tree/{self.path}?token={self.lab.token}&reset")
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", state="attached")
        ready = f"{self.CURRENT}?.context?.isReady && {self._kernel_idle('?.')}"
        self.page.wait_for_function(f"() => {ready}", timeout=1000 * START_SECONDS)

    def run_all(self) -> None:
        """Run every cell; the command's own promise says when the last one is done."""
        self.page.set_default_timeout(1000 * CELL_SECONDS)
        self.command("notebook:run-all-cells")
        self.page.wait_for_function(f"() => {self._kernel_idle('.')}")
        self.page.set_default_timeout(30_000)

    def _kernel_idle(self, dot: str) -> str:
        return f"{self.CURRENT}{dot}sessionContext{dot}session{dot}kernel{dot}status === 'idle'"

    def command(self, name: str, arguments: dict[str, Any] | None = None) -> None:
        """Run a command of JupyterLab and wait for it."""
        script = "([name, args]) => window.jupyterapp.commands.execute(name, args).then(() => true)"
        self.page.evaluate(script, [name, arguments or {}])

    def set_dark(self, dark: bool) -> None:
        """Choose JupyterLab's dark or light theme."""
        theme = "JupyterLab Dark" if dark else "JupyterLab Light"
        self.command("apputils:change-theme", {"theme": theme})
        self.page.wait_for_selector(f"body[data-jp-theme-light='{str(not dark).lower()}']", state="attached")

    def errors(self) -> list[str]:
        """Errors among the outputs, read from the notebook itself; those that a cell is tagged for do not count."""
        cells = self.page.evaluate(f"() => {self.CURRENT}.content.model.toJSON().cells")
        return [
            f"cell {cell['id']}: {output['ename']}: {output['evalue']}"
            for cell in cells
            if "raises-exception" not in cell["metadata"].get("tags", [])
            for output in cell.get("outputs", [])
            if output["output_type"] == "error"
        ]

    def screenshot(self, path: Path) -> None:
        """The whole notebook, not only what fits on the screen."""
        height = self.page.evaluate(
            "() => Math.ceil(document.querySelector('.jp-WindowedPanel-outer').scrollHeight) + 120"
        )
        before = self.page.viewport_size or {"width": 1400, "height": 1000}
        self.page.set_viewport_size({"width": before["width"], "height": min(height, 16_000)})
        self.page.screenshot(path=path, animations="disabled")
        self.page.set_viewport_size(before)

    def close(self) -> None:
        """Shut its kernel down."""
        self.page.evaluate(f"() => {self.CURRENT}.sessionContext.shutdown().then(() => true)")


def main() -> None:
    """Open a notebook or an HTML page, run it, report, and take a picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--shot", type=Path, default=Path("look.png"))
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--width", type=int, default=1400)
    options = parser.parse_args()
    with chromium() as browser, window(browser, dark=options.dark, width=options.width) as opened:
        if options.file.suffix == ".ipynb":
            _look_at_notebook(opened, options.file.resolve(), options.shot, options.dark)
        else:
            opened.page.goto(options.file.resolve().as_uri())
            opened.page.screenshot(path=options.shot, full_page=True, animations="disabled")
        print("script errors:", opened.errors, "| asked other machines:", opened.blocked)


def _look_at_notebook(opened: Window, path: Path, shot: Path, dark: bool) -> None:
    with LabServer(path.parent) as lab:
        notebook = NotebookPage(opened, lab, path.name)
        start = time.monotonic()
        notebook.open()
        ready = time.monotonic()
        notebook.run_all()
        print(f"opened in {ready - start:.1f} s, run in {time.monotonic() - ready:.1f} s")
        print("cell errors:", notebook.errors())
        notebook.set_dark(dark)
        notebook.screenshot(shot)
        notebook.close()


if __name__ == "__main__":
    main()
