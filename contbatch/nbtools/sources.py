"""Guards on sources: no call that a strict notebook test cannot follow."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from contbatch.nbtools.cells import Finding, code_cells, name_of

FORBIDDEN_CALLS = {
    "interact": "a strict test sees what it prints as unexpected output",
    "interact_manual": "a strict test sees what it prints as unexpected output",
    "interactive": "a strict test sees what it prints as unexpected output",
    "interactive_output": "a strict test sees what it prints as unexpected output",
    "Output": "a strict test sees what is printed into it as unexpected output",
    "clear_output": "a strict test sees every frame",
    "tqdm": "its text holds a rate that differs on every run",
    "trange": "its text holds a rate that differs on every run",
}


def sources_are_testable(notebook: Any) -> Iterator[Finding]:
    """No cell calls what a strict test cannot follow or relies on a semicolon to hide a result."""
    for cell in code_cells(notebook):
        for name in sorted(_called(cell["source"]) & set(FORBIDDEN_CALLS)):
            yield Finding("source", name_of(cell), f"calls {name}: {FORBIDDEN_CALLS[name]}")
        if _ends_with_semicolon(cell["source"]):
            message = "ends with a semicolon, which hides nothing in a test; assign to _ instead"
            yield Finding("source", name_of(cell), message)


def _called(source: str) -> set[str]:
    tree = _parsed(source)
    if tree is None:
        return set(re.findall(r"\b(\w+)\s*\(", source))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    # a decorator without parentheses is a call too
    decorators = [
        decorator for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for decorator in node.decorator_list
    ]
    return {_last_name(call.func) for call in calls} | {_last_name(d) for d in decorators}


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _ends_with_semicolon(source: str) -> bool:
    lines = [line for line in source.splitlines() if line.split("#")[0].strip()]
    return bool(lines) and lines[-1].split("#")[0].rstrip().endswith(";")


def _parsed(source: str) -> ast.Module | None:
    """The cell's Python, with lines that are IPython's own (% and !) left out."""
    lines = ["pass" if line.lstrip().startswith(("%", "!")) else line for line in source.split("\n")]
    try:
        return ast.parse("\n".join(lines))
    except SyntaxError:
        return None
