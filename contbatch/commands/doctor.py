"""`contbatch doctor`: what is installed, what is not, and how to mend it.

Each check is a function that returns findings. What a finding says about versions is read from the package's own
metadata, so that it cannot disagree with what pip was told. Exit status 1 if something needed is missing; what only
a developer needs is noted, not needed.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import typer

from contbatch.commands import terminal

if TYPE_CHECKING:
    from packaging.requirements import Requirement

Verdict = Literal["ok", "note", "bad"]
SIGNS: dict[Verdict, tuple[str, str]] = {"ok": ("ok", "green"), "note": ("note", "yellow"), "bad": ("MISSING", "red")}
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROMIUM_REMEDY = "apt-get install chromium, or set CHROMIUM to the path of one"


class Finding(NamedTuple):
    """One line of the report."""

    verdict: Verdict
    subject: str
    found: str
    remedy: str = ""


def doctor() -> None:
    """Say what is installed, which devices there are, and what is wrong and how to mend it."""
    findings = list(examine())
    _show(findings)
    raise typer.Exit(1 if any(finding.verdict == "bad" for finding in findings) else 0)


def examine() -> Iterator[Finding]:
    """All checks, in the order in which the report shows them."""
    yield _python()
    yield from _packages()
    yield from _torch()
    yield from _models()
    yield _notebooks()
    yield _kernel()
    yield _chromium()


def _python() -> Finding:
    return Finding("ok", "Python", f"{platform.python_version()} at {sys.executable}")


def _packages() -> Iterator[Finding]:
    from packaging.requirements import Requirement

    for line in _declared():
        requirement = Requirement(line)
        optional = requirement.marker is not None and "extra" in str(requirement.marker)
        finding = _package(requirement)
        if not optional:
            yield finding
        elif finding.verdict != "ok":
            remedy = 'only to run the tests: pip install -e ".[test]"'
            yield finding._replace(verdict="note", remedy=remedy)


def _declared() -> list[str]:
    try:
        return metadata.requires("contbatch") or []
    except metadata.PackageNotFoundError:  # the folder was only put on the path
        return []


def _package(requirement: Requirement) -> Finding:
    """One package against the bounds that this package declares."""
    bounds = str(requirement.specifier)
    remedy = f"pip install '{requirement.name}{bounds}'"
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return Finding("bad", requirement.name, "not installed", remedy)
    if requirement.specifier.contains(version, prereleases=True):
        return Finding("ok", requirement.name, version)
    floors = [s for s in requirement.specifier if s.operator in (">=", "==")]
    if all(floor.contains(version, prereleases=True) for floor in floors):
        return Finding("note", requirement.name, f"{version}, newer than what was tested ({bounds})", remedy)
    return Finding("bad", requirement.name, f"{version}, needed is {bounds}", remedy)


def _torch() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return
    try:
        import torch

        from contbatch.models import available_devices
    except Exception as error:  # a broken installation can raise anything while it is imported
        remedy = "install it again: pip install --force-reinstall 'torch>=2.6,<2.14'"
        yield Finding("bad", "PyTorch", f"cannot be imported: {error}", remedy)
        return
    yield Finding("ok", "devices", ", ".join(_device(name, torch) for name in available_devices()))
    yield Finding("ok", "threads", f"{torch.get_num_threads()} for PyTorch, {os.cpu_count()} cores in this machine")
    yield _kernels()


def _kernels() -> Finding:
    """How a model on the CPU is computed. Builds the kernels if need be: the next start is then a quick one."""
    import torch

    from contbatch.errors import KernelsMissing
    from contbatch.models.cpu.native import compiler, load_kernels

    try:
        kernels = load_kernels(torch.float32)
    except KernelsMissing as error:
        remedy = "only to be faster: apt-get install g++, or set CXX to a C++ compiler"
        return Finding("note", "CPU kernels", f"plain PyTorch runs: {error}", remedy)
    return Finding("ok", "CPU kernels", f"compiled for {kernels.made_for}, with {compiler()}")


def _device(name: str, torch: object) -> str:
    if not name.startswith("cuda:"):
        return name
    index = int(name.partition(":")[2])
    return f"{name} ({torch.cuda.get_device_name(index)})"  # type: ignore[attr-defined]  # torch comes as an object


def _models() -> Iterator[Finding]:
    try:
        from contbatch.models import list_models
    except Exception:  # told about under PyTorch
        return
    for info in list_models():
        if info.present:
            yield Finding("ok", f"model {info.name}", str(info.path))
        elif info.source == "included":
            remedy = "install contbatch again, the model is part of it"
            yield Finding("bad", f"model {info.name}", "not there", remedy)
        else:
            yield Finding(
                "note", f"model {info.name}", "not fetched", f"if you want it: contbatch models fetch {info.name}"
            )


def _notebooks() -> Finding:
    from contbatch.nbtools.files import notebook_folder

    folder = notebook_folder()
    count = len(list(folder.glob("*.ipynb")))
    if not count:
        return Finding("bad", "notebooks", f"none in {folder}", "install contbatch again, they are part of it")
    return Finding("ok", "notebooks", f"{count} in {folder}")


def _kernel() -> Finding:
    """The kernel named python3 must run in this environment, or the lessons do not find contbatch."""
    remedy = f"{sys.executable} -m ipykernel install --sys-prefix"
    try:
        from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel
    except ImportError:
        return Finding("bad", "Jupyter kernel", "jupyter_client is not installed", "pip install jupyterlab ipykernel")
    try:
        command = KernelSpecManager().get_kernel_spec("python3").argv[0]
    except NoSuchKernel:
        return Finding("bad", "Jupyter kernel", "there is none called python3", remedy)
    if Path(command).is_absolute() and Path(command) != Path(sys.executable):
        return Finding("bad", "Jupyter kernel", f"python3 starts {command}, another environment", remedy)
    return Finding("ok", "Jupyter kernel", "python3 runs in this environment")


def find_chromium() -> str | None:
    """The Chromium that the browser tests would use: CHROMIUM, or the first of the usual names on the path."""
    names = [name for name in (os.environ.get("CHROMIUM"), *CHROMIUMS) if name]
    return next((found for name in names if (found := shutil.which(name))), None)


def _chromium() -> Finding:
    found = find_chromium()
    if found is None:
        return Finding("note", "Chromium", "not found", f"only for the browser tests: {CHROMIUM_REMEDY}")
    return Finding("ok", "Chromium", found)


def _show(findings: list[Finding]) -> None:
    from rich.text import Text

    console = terminal()
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        sign, colour = SIGNS[finding.verdict]
        line = Text.assemble((f"{sign:<7} ", colour), f"{finding.subject:<{width}}  {finding.found}")
        console.print(line, soft_wrap=True)
        if finding.remedy:
            console.print(f"{'':<8}{'':<{width}}  → {finding.remedy}", soft_wrap=True)
    wrong = sum(finding.verdict == "bad" for finding in findings)
    console.print("All that is needed is there." if not wrong else f"To mend: {wrong}, with the command below each.")
