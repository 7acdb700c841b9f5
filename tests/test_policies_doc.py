"""docs/policies.md is made by a command and current; `contbatch policies` compares on any workload."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from contbatch import POLICIES, SchedulerConfig, Workload
from contbatch.cli import run
from contbatch.compare import compare
from contbatch.errors import RequestTooLarge
from contbatch.workload import WorkloadRequest

ROOT = Path(__file__).parents[1]
WORKLOADS = ROOT / "tests" / "golden" / "workloads.json"


def test_the_page_is_current() -> None:
    check = [sys.executable, str(ROOT / "benchmarks" / "policies.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def writer(tmp_path: Path) -> Any:
    """benchmarks/policies.py with a page and pictures of its own."""
    module = runpy.run_path(str(ROOT / "benchmarks" / "policies.py"), run_name="writer")
    scope = module["stale"].__globals__
    scope["PAGE"], scope["PICTURES"] = tmp_path / "policies.md", tmp_path / "policies"
    scope["PICTURES"].mkdir()
    for name in POLICIES:
        (scope["PICTURES"] / f"{name}.png").touch()
    scope["PAGE"].write_text("60 steps", encoding="utf-8")
    return SimpleNamespace(**scope)


def test_an_old_page_or_a_missing_picture_is_noticed(writer: Any) -> None:
    assert writer.stale("60 steps") == []
    assert writer.stale("61 steps") == ["policies.md"]
    (writer.PICTURES / "Orca.png").unlink()
    (writer.PICTURES / "Gone.png").touch()
    assert writer.stale("60 steps") == ["Gone.png", "Orca.png"]


def test_a_recording_without_a_policy_of_ours_is_left_out(writer: Any, tmp_path: Path) -> None:
    recording = json.loads((ROOT / "tests" / "golden" / "orca.json").read_text(encoding="utf-8"))
    (tmp_path / "known.json").write_text(json.dumps(recording), encoding="utf-8")
    (tmp_path / "later.json").write_text(json.dumps(recording | {"policy": "Later"}), encoding="utf-8")
    writer.stale.__globals__["GOLDEN"] = tmp_path
    assert {policy: found.file for policy, found in writer.replay().items()} == {"Orca": "known.json"}


def test_pictures_are_small_and_every_policy_has_picture_and_evidence() -> None:
    text = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    for name in POLICIES:
        _, _, section = text.partition(f"\n### {name}\n")
        section = section.partition("\n### ")[0]
        assert "**Evidence:**" in section
        (caption, picture) = re.findall(r"!\[(.+)\]\((.+)\)", section)[0]
        assert f"under {name};" in caption and f"\n*{caption}*\n" in section
        assert (ROOT / "docs" / picture).stat().st_size < 120_000


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


def test_nano_vllm_with_its_prefix_cache_computes_what_was_recorded() -> None:
    workload = Workload.load(WORKLOADS, "squeeze")
    assert workload.config
    (found,) = compare(workload, ["NanoVllm"], replace(workload.config, enable_prefix_caching=True))
    assert (found.steps, found.computed, found.preemptions) == (233, 1992, 6)


def test_sarathi_without_the_faults_of_the_original() -> None:
    """The original took 480 steps, 5,551 tokens and 31 preemptions."""
    (found,) = compare(Workload.load(WORKLOADS, "squeeze"), ["SarathiServe"])
    assert (found.steps, found.computed, found.preemptions) == (233, 2098, 6)


@pytest.mark.parametrize(("policy", "recorded", "last_step"), [("NanoVllm", 2000, 8), ("HfPrefillFirst", 1536, 223)])
def test_a_stall_is_work_of_others(policy: str, recorded: int, last_step: int) -> None:
    """Recorded is what was computed while a decode got nothing; the step in which it goes on counts here, too."""
    (found,) = compare(Workload.load(WORKLOADS, "stall"), [policy])
    assert found.work_in_gap == recorded + last_step
    idle = [step for step in found.trace.steps if "d0" not in step.request_ids and step.step < 60]
    assert sum(step.num_tokens for step in idle) == recorded


def test_work_of_others_is_that_of_the_longest_gap() -> None:
    """In squeeze a shorter gap of HfFifo has more work in it (677 tokens)."""
    (found,) = compare(Workload.load(WORKLOADS, "squeeze"), ["HfFifo"])
    assert (found.worst_gap, found.work_in_gap) == (107, 651)


def test_a_starved_request_of_fifo_waits_as_recorded() -> None:
    (found,) = compare(Workload.load(WORKLOADS, "squeeze"), ["HfFifo"])
    served = [step.step for step in found.trace.steps if "t7" in step.request_ids]
    assert served[1] - served[0] == 33
    assert all("t7" not in step.preempted for step in found.trace.steps[: served[1]])


def test_a_request_that_outgrows_the_pool_is_refused() -> None:
    config = SchedulerConfig(block_size=16, num_blocks=3, max_model_len=128)
    workload = Workload("too large", 0, (WorkloadRequest("r0", tuple(range(40)), 60),))
    for policy in POLICIES:
        with pytest.raises(RequestTooLarge):
            compare(workload, [policy], config)


def test_command_compares_all_policies(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["policies", str(WORKLOADS), "--name", "squeeze"]) == 0
    shown = capsys.readouterr().out
    assert all(policy in shown for policy in POLICIES)
    assert run(["policies", str(WORKLOADS), "--name", "other"]) == 2
    assert "the file has stall, squeeze" in capsys.readouterr().err
