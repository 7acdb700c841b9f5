"""Building the kernels: once a machine, and what happens where it cannot be done."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from contbatch.errors import KernelsMissing, UnknownName
from contbatch.models.cpu import native
from contbatch.models.runner import choose_forward
from tests.models.tiny import tiny_model

CACHES = (native.load_kernels, native._library, native.built_path)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing is built, and nothing is remembered before or after."""
    monkeypatch.setenv("CONTBATCH_CACHE", str(tmp_path / "cache"))
    for cache in CACHES:
        cache.cache_clear()
    yield
    for cache in CACHES:
        cache.cache_clear()


def compiler_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """A program in the place of the compiler that writes a line to `calls` and then runs `script`."""
    path = tmp_path / "compiler"
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo 1.0 && exit\necho called >> {tmp_path}/calls\n{script}\n')
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return tmp_path / "calls"


def test_without_a_compiler_the_plain_path_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It says so, and asked for by name it is an error with the remedy."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    model = tiny_model(dtype=torch.float32)
    assert "no C++ compiler was found" in choose_forward(model)[1]
    with pytest.raises(KernelsMissing, match=r"install one: g\+\+"):
        choose_forward(model, "native")


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The plain path runs, a warning is given once, and the compiler is not tried again in this process."""
    calls = compiler_that(tmp_path, monkeypatch, "echo 'kernels.cpp:1: error: of no use' >&2; exit 1")
    model = tiny_model(dtype=torch.float32)
    with pytest.warns(RuntimeWarning, match="of no use") as warnings:
        paths = [choose_forward(model)[1] for _ in range(3)]
    assert len(warnings) == 1
    assert all("of no use" in path for path in paths)
    assert calls.read_text().splitlines() == ["called"]


def test_a_compiler_that_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is stopped."""
    compiler_that(tmp_path, monkeypatch, "exec sleep 60")
    monkeypatch.setattr(native, "SECONDS", 0.2)
    with pytest.raises(KernelsMissing, match="within"):
        native.load_kernels(torch.float32)


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error names the setting that moves it."""
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(KernelsMissing, match="set CONTBATCH_CACHE"):
        native.load_kernels(torch.float32)


def test_a_damaged_library_is_built_again(tmp_path: Path) -> None:
    """A cut file in the place of the library does not stop or crash a process that finds it."""
    native.load_kernels(torch.float32)
    path = native.built_path()
    whole = path.read_bytes()
    cut = tmp_path / "cut.so"
    cut.write_bytes(whole[: len(whole) // 2])
    cut.replace(path)  # the file that this process has mapped stays whole
    script = (
        "import torch; from contbatch.models.cpu.native import load_kernels; print(load_kernels(torch.float32).lanes)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("4", "8", "16")


def test_the_next_process_does_not_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A library that is there is loaded; another source or option has another name."""
    real = native.compiler()
    calls = compiler_that(tmp_path, monkeypatch, f'exec {real} "$@"')
    name = native.built_path().name
    for _ in range(2):
        for cache in CACHES:
            cache.cache_clear()
        native.load_kernels(torch.float32)
    assert calls.read_text().splitlines() == ["called"]
    other = tmp_path / "kernels.cpp"
    other.write_text(native.SOURCE.read_text() + "\n")
    monkeypatch.setattr(native, "SOURCE", other)
    native.built_path.cache_clear()
    assert native.built_path().name != name


def test_an_unknown_way_is_refused() -> None:
    """With the ways that there are."""
    with pytest.raises(UnknownName, match="auto, native, plain"):
        choose_forward(tiny_model(dtype=torch.float32), "fast")
