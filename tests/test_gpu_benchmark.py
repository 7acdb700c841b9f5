"""`benchmarks/gpu.py`, which is meant for a machine with a GPU: every section runs, at tiny sizes, on the CPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def benchmark() -> Any:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("benchmarks_gpu", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(500)
def test_every_section_runs_and_ours_equals_transformers(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, str(SCRIPT), "--cpu-check", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text(encoding="utf-8"))
    sections = report["sections"]
    names = ["kernels", "correctness", "decode", "prefill", "serve", "transformers"]
    assert {name: one["status"] for name, one in sections.items()} == dict.fromkeys(names, "ok")
    results = {name: one["result"] for name, one in sections.items()}
    assert max(gap for name, gap in results["kernels"]["greatest_difference"].items() if "float32" in name) < 1e-5
    correct = results["correctness"]
    assert correct["equal_requests_eager"] == correct["equal_requests_graphs"] == correct["requests"] == 3
    assert sorted(results["decode"]["batches"]) == ["1", "3"]
    assert all(one["equal_greedy_tokens"] for one in results["decode"]["batches"].values())
    assert len(results["prefill"]) == 3
    assert results["serve"]["graphs"]["digests"] == results["serve"]["eager"]["digests"]
    assert report["comparison"]["equal_requests"] == report["sizes"]["requests"] == 5
    assert {"device", "versions", "date", "command"} <= set(report)


def test_budgets_end_in_under_8_minutes(benchmark: Any) -> None:
    assert sum(seconds for _, seconds in benchmark.SECTIONS.values()) >= benchmark.TOTAL_SECONDS
    assert benchmark.TOTAL_SECONDS < 480
    assert (benchmark.SMOLLM2.num_layers, benchmark.SMOLLM2.hidden_size) == (30, 576)


def _section_that(tmp_path: Path, does: str) -> str:
    """A script that stands for the benchmark, whose section does this."""
    script = tmp_path / "other.py"
    script.write_text(f"import pathlib, sys, time\nout = pathlib.Path(sys.argv[4])\n{does}\n", encoding="utf-8")
    return str(script)


@pytest.mark.parametrize(
    ("does", "status", "result"),
    [
        ("out.write_text('{\"a\": 1}'); raise ValueError('lost')", "failed with 1: ", {"a": 1}),
        ("raise ValueError('lost')", "failed with 1: ", None),
        ("out.write_text('{\"a\": 1}'); time.sleep(200)", "stopped after 10 s", {"a": 1}),
        ("pass", "failed: it left no result", None),
        ("out.write_text('{\"a\": 1}')", "ok", {"a": 1}),
    ],
)
def test_a_section_that_fails_is_recorded_with_what_it_left(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, status: str, result: object
) -> None:
    monkeypatch.setattr(benchmark, "__file__", _section_that(tmp_path, does))
    got = benchmark.run_section("any", False, 10.0 if "sleep" in does else 100.0)
    assert got["status"].startswith(status)
    assert got["result"] == result
    assert ("lost" in got["status"]) == ("lost" in does)
