"""Every case of `docs/cases.md` has a test that is named after it, or a row that says why not."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
IDS = """
1-9 11 14 18 21 23-24 28 30-34 36-37 39-41 43-47 49-55 57-59 61 66-68 70 72-82 84-90 92-96 99-103
105-107 109-111 114 117-121 124-125 127-130 132-143 145 147 149-154 156-158 162 164-165 167 169-174
177-180 183-186 188 191-201
"""
"""The numbers of the cases about the scheduler, the engine, the model step and the metrics."""


def numbers() -> set[int]:
    """The ids, as numbers."""
    spans = [span.split("-") for span in IDS.split()]
    return {number for span in spans for number in range(int(span[0]), int(span[-1]) + 1)}


def named() -> set[int]:
    """Cases with a test."""
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    names = re.findall(r"def test_\w*", sources)
    return {int(number) for name in names for number in re.findall(r"_b(\d{3})(?!\d)", name)}


def explained() -> set[int]:
    """Cases with a row."""
    rows = [line.split("|")[1] for line in (ROOT / "docs" / "cases.md").read_text().splitlines() if line[:3] == "| B"]
    return {int(number) for row in rows for number in re.findall(r"B(\d{3})", row)}


def test_every_case_has_a_test_or_a_reason() -> None:
    assert numbers() - named() - explained() == set()


def test_rows_are_about_cases() -> None:
    assert {number for number in explained() if number < 202} <= numbers()
