"""Each deliberate fault of the bank is noticed by the test that is named for it: a mutant that lives is a missing test.

The package is copied, one snippet is replaced, and the named test runs in a process that sees the copy. It has to fail
by an assertion or one of our exceptions. As a control, all named tests pass on a copy in which nothing was replaced.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.mutants.bank import BANK, ROOT, Mutant

RUNNER = Path(__file__).with_name("run_one.py")
SECONDS = 120
"""A mutant may loop for ever; a test takes a few seconds at most."""
BY_NAME = {mutant.name: mutant for mutant in BANK}


@dataclass(frozen=True)
class Verdict:
    """What became of some tests on a copy of the package."""

    code: int
    passed: list[str]
    failures: list[tuple[bool, str]]
    shown: str


def copy_package(folder: Path) -> Path:
    """The package's sources, without what the compiler or a model left there."""
    ignored = shutil.ignore_patterns("__pycache__", "*.safetensors")
    return shutil.copytree(ROOT / "contbatch", folder / "contbatch", ignore=ignored)


def run_on_copy(folder: Path, tests: list[str]) -> Verdict:
    """Run tests in a process that sees the package in `folder`."""
    result = folder / "result.json"
    path = os.pathsep.join([str(folder), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-P", str(RUNNER), str(result), *tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS)
    shown = done.stdout + done.stderr
    assert result.exists(), f"the tests could not be started:\n{shown}"
    found = json.loads(result.read_text(encoding="utf-8"))
    assert Path(found["package"]).is_relative_to(folder), f"{found['package']} was tested, not the copy in {folder}"
    return Verdict(found["code"], found["passed"], found["failures"], shown)


def run_mutant(name: str) -> Verdict:
    """The named test, on a copy with the fault."""
    mutant = BY_NAME[name]
    with TemporaryDirectory() as folder:
        file = copy_package(Path(folder)) / mutant.file
        file.write_text(mutant.apply(file.read_text(encoding="utf-8")), encoding="utf-8")
        return run_on_copy(Path(folder), [mutant.caught_by])


@pytest.fixture(scope="module")
def verdict_of(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Verdict]]:
    """Runs the mutants that were asked for side by side, as many as there are processors."""
    ahead = asked_for(request.session)
    if "PYTEST_XDIST_WORKER" in os.environ:
        ahead = []  # this worker will be asked for some of them only
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        verdicts = {name: pool.submit(run_mutant, name) for name in ahead}
        yield lambda name: verdicts[name].result() if name in verdicts else run_mutant(name)
        pool.shutdown(cancel_futures=True)


def asked_for(session: pytest.Session) -> list[str]:
    """The mutants among the tests that were selected."""
    functions = [item for item in session.items if isinstance(item, pytest.Function)]
    ours = [item for item in functions if item.function is test_a_mutant_is_caught_by_its_test]
    return [str(item.callspec.params["name"]) for item in ours]


@pytest.mark.parametrize("name", BY_NAME)
def test_a_mutant_is_caught_by_its_test(name: str, verdict_of: Callable[[str], Verdict]) -> None:
    verdict = verdict_of(name)
    assert verdict.code == 1, f"{BY_NAME[name].caught_by} does not notice it:\n{verdict.shown}"
    assert all(broken_rule for broken_rule, _ in verdict.failures), f"it fails for another reason:\n{verdict.shown}"


def test_without_a_fault_the_named_tests_pass(tmp_path: Path) -> None:
    """The control: it is the fault that they notice, not the copy."""
    copy_package(tmp_path)
    named = {mutant.caught_by for mutant in BANK}
    verdict = run_on_copy(tmp_path, sorted(named))
    assert verdict.code == 0, verdict.shown
    assert named <= {*verdict.passed, *(test.partition("[")[0] for test in verdict.passed)}, "each of them was run"


def test_the_bank_names_each_fault_once() -> None:
    assert len(BY_NAME) == len(BANK) >= 25
    changes = {(mutant.file, mutant.old, mutant.new) for mutant in BANK}
    assert len(changes) == len(BANK)


@pytest.mark.parametrize("text", ["", "token = 1\ntoken = 1\n"])
def test_a_snippet_that_is_not_there_once_is_a_stale_bank(text: str) -> None:
    mutant = Mutant("m", "a fault", "step.py", "token = 1", "token = 2", "tests/test_x.py::test_y")
    with pytest.raises(ValueError, match=r"'m' is stale: .* times in contbatch/step.py"):
        mutant.apply(text)
