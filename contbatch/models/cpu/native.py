"""Build `kernels.cpp` for this processor on first use, keep the result, and load it.

The one idea: the compiler knows the processor (`-march=native`), so one source of plain vectors becomes AVX-512, AVX2
or whatever is there. What was built is kept in the cache folder under a name made of all that went into it: source,
compiler, options and processor. So the next process loads it in a millisecond, and another machine that shares the
folder builds its own. Without a compiler, or where it fails, `KernelsMissing` says why, and the caller falls back.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from ctypes import c_float, c_long, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from contbatch.errors import KernelsMissing
from contbatch.models.registry import cache_folder

SOURCE = Path(__file__).with_name("kernels.cpp")
OPTIONS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fno-math-errno", "-fPIC", "-shared")
SECONDS = 120
"""A compiler that has not finished by then is stopped."""

_ARGUMENTS: dict[str, list[Any]] = {
    "product": [c_void_p] * 4 + [c_long] * 4,
    "rms_norm": [c_void_p, c_void_p, c_float, c_void_p, c_long, c_long],
    "rope_and_store": [c_void_p] * 5 + [c_float] + [c_void_p] * 2 + [c_long] * 4,
    "attention": [c_void_p] * 4 + [c_long] * 5 + [c_void_p, c_long],
}

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""Number formats that the kernels exist for."""


def at(tensor: Tensor) -> Tensor:
    """The same tensor, which ctypes takes for its address from now on. Its memory must stay where it is."""
    tensor._as_parameter_ = tensor.data_ptr()  # type: ignore[attr-defined]
    return tensor


class Kernels:
    """The functions of one number format, as `kernels.cpp` documents them; pointers and sizes go in unchecked."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.lanes: int = library.lanes()
        library.made_for.restype = ctypes.c_char_p
        self.made_for: str = library.made_for().decode()
        """What of the processor they use."""
        self.product, self.rms_norm, self.rope_and_store, self.attention = (
            self._function(library, name, dtype) for name in _ARGUMENTS
        )

    @staticmethod
    def _function(library: ctypes.CDLL, name: str, dtype: torch.dtype) -> ctypes._NamedFuncPointer:
        function = library[f"{name}_{DTYPES[dtype]}"]
        function.argtypes, function.restype = _ARGUMENTS[name], None
        return function


@functools.cache
def load_kernels(dtype: torch.dtype) -> Kernels:
    """The kernels for `dtype`, built first if need be.

    Raises:
        KernelsMissing: no such format, no compiler, or it failed; the message says what to do.
    """
    if dtype not in DTYPES:
        raise KernelsMissing(f"there are no kernels for {dtype}; use float32 or bfloat16")
    library = _library()
    if isinstance(library, KernelsMissing):
        raise KernelsMissing(str(library))
    return Kernels(library, dtype)


@functools.cache
def _library() -> ctypes.CDLL | KernelsMissing:
    """The library, or why there is none: neither is tried twice in a process."""
    try:
        path = built_path()
    except KernelsMissing as error:
        return error  # no compiler: `contbatch doctor` tells, nobody is warned
    try:
        if not _is_whole(path):
            build(path)
        return ctypes.CDLL(str(path))
    except KernelsMissing as error:
        warnings.warn(f"{error}; the plain PyTorch path runs instead", RuntimeWarning, stacklevel=2)
        return error
    except OSError as error:
        return KernelsMissing(f"{path} cannot be loaded: {error}; remove it, and it is built again")


def _is_whole(path: Path) -> bool:
    """True if the file is what was built: loading a damaged one could end the process."""
    try:
        return _digest(path) == path.with_suffix(".sha256").read_text()
    except OSError:
        return False


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def compiler() -> str:
    """The C++ compiler: CXX, or the first of the usual ones on the path."""
    names = [os.environ.get("CXX"), "g++", "clang++", "c++"]
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is None:
        raise KernelsMissing("no C++ compiler was found (g++, clang++, or the one named by CXX); install one: g++")
    return found


@functools.cache
def built_path() -> Path:
    """Where the library of this source, compiler and processor is, or will be."""
    command = compiler()
    about = subprocess.run([command, "--version"], capture_output=True, text=True, check=False).stdout
    parts = (SOURCE.read_text(), command, about, " ".join(OPTIONS), _processor(), *_openmp())
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return cache_folder() / "kernels" / f"{name}.so"


def build(path: Path, options: Sequence[str] = ()) -> None:
    """Compile beside the target and move it there at once, so that no process meets a half file.

    Args:
        options: for the compiler, after `OPTIONS`: another processor, for instance.

    Raises:
        KernelsMissing: there is no compiler, or it failed.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            target = Path(folder) / path.name
            command = [compiler(), *OPTIONS, *options, str(SOURCE), *_openmp(), "-o", str(target)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
            if done.returncode:
                raise KernelsMissing(f"{command[0]} could not compile {SOURCE.name}: {_first_error(done.stderr)}")
            digest = target.with_suffix(".sha256")
            digest.write_text(_digest(target))
            target.replace(path)
            digest.replace(path.with_suffix(".sha256"))
    except subprocess.TimeoutExpired as error:
        raise KernelsMissing(f"{error.cmd[0]} did not compile {SOURCE.name} within {SECONDS} s") from error
    except OSError as error:
        raise KernelsMissing(f"the kernels cannot be written to {path.parent}: {error}; set CONTBATCH_CACHE") from error


def _first_error(output: str) -> str:
    lines = [line for line in output.splitlines() if "error" in line] or output.splitlines() or ["it said nothing"]
    return lines[0]


def _openmp() -> list[str]:
    """PyTorch's own OpenMP library: two of them in a process would keep two sets of threads."""
    folder = Path(torch.__file__).parent
    found = [*folder.glob("lib/libgomp*.so*"), *folder.parent.glob("torch.libs/libgomp*.so*")]
    return [str(found[0])] if found else []


def _processor() -> str:
    """What this processor can do, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
