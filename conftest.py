"""The environment that every test runs in, those of the notebooks included.

A notebook's kernel inherits this process's environment, so what makes its output the same
everywhere is set here, before any kernel starts. One thread, because the sums of a matrix product
depend on how it is divided.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FIXED = {
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JUPYTER_PREFER_ENV_PATH": "1",  # the kernel "python3" is this environment's, not the user's
    "JUPYTER_PLATFORM_DIRS": "1",  # says to jupyter_core what it would otherwise warn about
    "HF_HUB_OFFLINE": "1",  # no test asks a network for a model
    "NO_COLOR": "1",
}

os.environ.update(FIXED)
os.environ.pop("MPLBACKEND", None)  # a kernel chooses its own, and only if this is not set


def pytest_configure(config: pytest.Config) -> None:
    """Name nbval's list of replacements by its full path: pytest may be started from any folder."""
    if config.getoption("nbval_sanitize_with", default=None) is None:
        config.option.nbval_sanitize_with = str(Path(__file__).parent / "tests" / "nbval.cfg")
