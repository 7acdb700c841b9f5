"""The project around the package: what is declared in two places says the same in both."""

from __future__ import annotations

import ast
import json
import os
import re
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import contbatch
from contbatch import Workload

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
HEAVY = ("torch", "numpy", "matplotlib", "ipywidgets", "anywidget", "jupyterlab", "rich", "typer")


def _bounds(requirement: str) -> tuple[str, str]:
    """Name and bounds of a requirement, spelt in one way."""
    found = re.fullmatch(r"([A-Za-z0-9_.-]+)\s*([<>=!~].*)?", requirement.strip())
    assert found, requirement
    name = re.sub(r"[-_.]+", "-", found.group(1)).lower()
    return name, (found.group(2) or "").replace(" ", "")


def _declared() -> dict[str, str]:
    project = PYPROJECT["project"]
    return dict(map(_bounds, project["dependencies"] + project["optional-dependencies"]["test"]))


def _in_environment() -> dict[str, str]:
    text = (ROOT / "environment.yml").read_text(encoding="utf-8")
    entries = re.findall(r"^\s*-\s+([^\s:#]+)\s*(?:#.*)?$", text.partition("dependencies:")[2], re.MULTILINE)
    return dict(map(_bounds, (entry for entry in entries if entry not in ("pip", ".") and entry != "-e .")))


def test_environment_yml_agrees_with_pyproject() -> None:
    environment = _in_environment()
    assert environment.pop("python") == PYPROJECT["project"]["requires-python"]
    assert environment == _declared()


def test_every_dependency_has_a_floor_and_those_that_break_us_a_ceiling() -> None:
    for name, bounds in _declared().items():
        assert re.search(r">=|==", bounds), f"{name} has no floor"
    for requirement in PYPROJECT["project"]["dependencies"]:
        assert "<" in requirement, f"{requirement} has no ceiling"


def _imports(path: Path, top_level: bool = False) -> Iterator[str]:
    """Names of the packages that a module imports, anywhere or only when it is loaded itself."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if top_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _modules() -> list[Path]:
    return sorted((ROOT / "contbatch").rglob("*.py"))


def test_every_imported_package_is_declared() -> None:
    # traitlets is part of ipywidgets' interface; triton comes with PyTorch for CUDA and is optional without
    ours = {"contbatch", "traitlets", "triton"}
    declared = {_bounds(line)[0] for line in PYPROJECT["project"]["dependencies"]}
    for path in _modules():
        for name in set(_imports(path)) - set(sys.stdlib_module_names) - ours:
            assert name.replace("_", "-").lower() in declared, f"{path.relative_to(ROOT)} imports {name}"


def test_only_models_load_torch() -> None:
    users = {path.relative_to(ROOT / "contbatch").parts[0] for path in _modules() if "torch" in _imports(path, True)}
    assert users == {"models"}


def _loaded_by(statement: str) -> set[str]:
    script = f"{statement}; import sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("import contbatch", set()),
        ("import contbatch.trace, contbatch.metrics, contbatch.workload", set()),
        ("import contbatch.viz.view, contbatch.viz.export", set()),
        ("import contbatch.cli", {"rich", "typer"}),
    ],
)
def test_importing_is_light(statement: str, allowed: set[str]) -> None:
    assert _loaded_by(statement) & set(HEAVY) <= allowed


def test_version_is_the_same_everywhere() -> None:
    version = contbatch.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\n## {version} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_python_floor_is_the_same_everywhere() -> None:
    floor = PYPROJECT["project"]["requires-python"].removeprefix(">=")
    assert PYPROJECT["tool"]["mypy"]["python_version"] == floor
    assert PYPROJECT["tool"]["ruff"]["target-version"] == "py" + floor.replace(".", "")
    assert f'"{floor}"' in (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    assert f"Python {floor} or newer" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", ["pip install -e . && contbatch demo", 'pip install -e ".[test]" && pytest'])
def test_readme_gives_the_two_commands(command: str) -> None:
    assert f"\n{command}\n" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_names_files_that_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)\)", text):
        if "://" not in target:
            assert (ROOT / target).exists(), f"README.md links to {target}"


def test_ci_does_what_readme_says() -> None:
    script = ROOT / ".ci" / "run"
    text = script.read_text(encoding="utf-8")
    assert script.stat().st_mode & stat.S_IXUSR
    assert "set -euo pipefail" in text
    for command in ('pip install -e ".[test]"', "pytest", "mypy", "ruff check .", "contbatch notebooks check"):
        assert re.search(rf"^{re.escape(command)}", text, re.MULTILINE), f".ci/run does not run {command}"
    assert "bash .ci/run" in (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")


def test_pytest_runs_notebooks_strictly() -> None:
    options: dict[str, Any] = PYPROJECT["tool"]["pytest"]["ini_options"]
    assert "notebooks" in options["testpaths"]
    assert "--nbval" in options["addopts"]
    assert "--nbval-lax" not in options["addopts"]


def test_notebooks_travel_in_the_wheel() -> None:
    wheel = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert "notebooks" in wheel["only-include"]
    assert wheel["sources"] == {"notebooks": "contbatch/_notebooks"}


def test_pre_commit_fetches_nothing() -> None:
    text = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert set(re.findall(r"repo: (\S+)", text)) == {"local"}
    assert set(re.findall(r"language: (\S+)", text)) == {"system"}


def test_tests_run_in_a_fixed_environment() -> None:
    """Set by conftest.py before any kernel starts, whatever the shell says."""
    assert os.environ["PYTHONHASHSEED"] == "0"
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert "MPLBACKEND" not in os.environ


def test_the_recipes_run(capsys: pytest.CaptureFixture[str]) -> None:
    """As they stand; the workload of the first one is read too."""
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    for code in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(code, {})
    assert "kept their promise" in capsys.readouterr().out
    (workload,) = re.findall(r"```json\n(.*?)```", text, re.S)
    assert len(Workload.loads(workload).requests) == 2
