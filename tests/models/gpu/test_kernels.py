"""The GPU's attention kernels, in Triton's interpreter, are the plain attention.

Triton reads TRITON_INTERPRET when it is imported, so the cases run in a process of their own (grid.py), once, and no
other test sees them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contbatch.errors import KernelsMissing
from contbatch.models.gpu.forward import TritonForward, cut
from tests.models.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[3]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def printed(script: str, **variables: str) -> dict[str, Any]:
    """The object that a script beside this file prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **variables}
    command = [sys.executable, str(Path(__file__).with_name(script))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What grid.py printed."""
    return printed("grid.py", TRITON_INTERPRET="1")


@needs_triton
def test_float32_kernels_equal_the_plain_attention_in_64_bits(found: dict[str, Any]) -> None:
    assert len(found["float32"]) == 2 * 4 * 3 * 3 + 3
    assert {name: gap for name, gap in found["float32"].items() if gap > 1e-5} == {}


@needs_triton
def test_half_precision_differs_by_its_rounding_only(found: dict[str, Any]) -> None:
    assert found["float16"] < 2e-3


@needs_triton
def test_a_row_of_length_0_is_0_and_rows_not_named_are_left_alone(found: dict[str, Any]) -> None:
    assert found["padded"] == {"empty": True, "full": True, "untouched": True}


@needs_triton
def test_a_model_with_the_kernels_gives_the_plain_models_logits(found: dict[str, Any]) -> None:
    assert set(found["forward"]) == {"prompts", "mixed", "decode"}
    assert max(found["forward"].values()) < 1e-4


@needs_triton
def test_without_a_gpu_the_kernels_are_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(KernelsMissing, match="for a CUDA device, and the model is on cpu"):
        TritonForward(tiny_model().model)


@needs_triton
def test_the_compiler_accepts_the_kernels_and_they_fit_into_shared_memory(tmp_path: Path) -> None:
    taken = printed("compile.py", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert len(taken) == 2 * 3
    assert max(taken.values()) < 99 * 1024  # what the smallest GPUs since compute capability 8.6 have


def test_chunks_are_cut_into_tiles_and_single_tokens_are_not() -> None:
    assert cut(np.array([5, 1, 4, 9]), 4).tolist() == [[0, 0], [0, 4], [2, 0], [3, 0], [3, 4], [3, 8]]
    assert cut(np.array([1, 1]), 4).shape == (0, 2)
