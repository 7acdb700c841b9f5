"""docs/policies.md is made by a command and current; `contbatch policies` compares on any workload."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from contbatch import POLICIES, Workload
from contbatch.cli import run
from contbatch.compare import compare

ROOT = Path(__file__).parents[1]
WORKLOADS = ROOT / "tests" / "golden" / "workloads.json"


def test_the_page_is_current() -> None:
    check = [sys.executable, str(ROOT / "benchmarks" / "policies.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("workload", "policy", "steps", "gap", "computed", "preemptions"),
    [
        ("stall", "VllmV1", 60, 1, 2651, 0),
        ("stall", "NanoVllm", 68, 9, 2651, 0),
        ("stall", "SarathiServe", 60, 1, 2651, 0),
        ("stall", "Orca", 260, 1, 2651, 0),
        ("stall", "HfFifo", 60, 1, 2651, 0),
        ("stall", "HfPrefillFirst", 66, 7, 2651, 0),
        ("squeeze", "VllmV1", 233, 106, 2098, 6),
        ("squeeze", "Orca", 960, 1, 1464, 0),
        ("squeeze", "HfFifo", 251, 107, 2456, 8),
        ("squeeze", "HfPrefillFirst", 234, 106, 2104, 6),
    ],
)
def test_what_the_engines_themselves_did(
    workload: str, policy: str, steps: int, gap: int, computed: int, preemptions: int
) -> None:
    """Steps, computed tokens and preemptions (and in "stall" the gap) were recorded from the real schedulers."""
    (found,) = compare(Workload.load(WORKLOADS, workload), [policy])
    assert (found.steps, found.worst_gap, found.computed, found.preemptions) == (steps, gap, computed, preemptions)


def test_a_stall_is_work_of_others() -> None:
    (found,) = compare(Workload.load(WORKLOADS, "stall"), ["NanoVllm"])
    assert found.work_in_gap == 2000 + 8, "the long prompt, and a token of each of the others and of the last decode"


def test_command_compares_all_policies(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["policies", str(WORKLOADS), "--name", "squeeze"]) == 0
    shown = capsys.readouterr().out
    assert all(policy in shown for policy in POLICIES)
    assert run(["policies", str(WORKLOADS), "--name", "other"]) == 2
    assert "the file has stall, squeeze" in capsys.readouterr().err
