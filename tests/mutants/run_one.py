"""Run some tests against whichever contbatch is first on the path, and write down what became of them.

A process of its own for each mutant: `python run_one.py RESULT TEST...`. A test that fails because a rule is broken
is told apart from one that fails because the code does not even run: the first ends with an assertion or with one of
our own exceptions, the second with a NameError or the like somewhere among its causes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import contbatch
from contbatch.errors import ContbatchError

RULE_BROKEN = (AssertionError, ContbatchError, pytest.fail.Exception)
CODE_BROKEN = (AttributeError, ImportError, NameError, SyntaxError, TypeError)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def breaks_a_rule(error: BaseException) -> bool:
    """True if this exception says that a rule is broken, and not that the code does not run."""
    return isinstance(error, RULE_BROKEN) and not any(isinstance(cause, CODE_BROKEN) for cause in _causes(error))


class Witness:
    """A plugin that counts the tests that passed and keeps the exceptions of the others."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failures: list[tuple[bool, str]] = []
        """For each: whether a rule was broken, and the exception."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed.append(report.nodeid)

    def pytest_exception_interact(
        self, call: pytest.CallInfo[object], report: pytest.CollectReport | pytest.TestReport
    ) -> None:
        assert call.excinfo is not None
        in_test = getattr(report, "when", "collect") == "call"
        self.failures.append((in_test and breaks_a_rule(call.excinfo.value), call.excinfo.exconly()))


def main(result: str, tests: list[str]) -> None:
    """Run `tests` and write what happened to `result`."""
    witness = Witness()
    root = Path(__file__).parents[2]
    options = ["-c", str(root / "pyproject.toml"), "--rootdir", str(root), "--import-mode=importlib"]
    options += ["-o", "addopts=", "-o", "pythonpath=", "-p", "no:cacheprovider"]
    options += ["-q", "--tb=short", "-W", "ignore::pytest.PytestConfigWarning"]  # settings of plugins not loaded here
    code = pytest.main([*options, *tests], plugins=[witness])
    found = {"package": contbatch.__file__, "code": int(code), "passed": witness.passed, "failures": witness.failures}
    Path(result).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
