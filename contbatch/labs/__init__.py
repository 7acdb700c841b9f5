"""Instant checks for the exercises of the notebooks.

    result = labs.check("06.1", fill_budget)   # one line: PASS, NOT YET, or what is wrong and where
    fill_budget = labs.use("06.1", fill_budget)  # yours if it passes, else ours, so that the notebook goes on

The exercises of notebook NN are in `contbatch.labs.nbNN`, which is loaded when one of them is asked for. Our own
answers are there too: reading them spoils the fun, not the check.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from contbatch.errors import UnknownName
from contbatch.labs.exercise import Exercise, Mistake, Rule, function_exercise, value_exercise
from contbatch.labs.result import Fault, Result

__all__ = [
    "Exercise",
    "Fault",
    "Mistake",
    "Result",
    "Rule",
    "check",
    "exercise",
    "function_exercise",
    "use",
    "value_exercise",
]


def check(number: str, answer: Any) -> Result:
    """Check an answer. Never raises because of the answer.

    Args:
        number: of the exercise, such as "06.1".
        answer: the function or value that was asked for.

    Raises:
        UnknownName: there is no such exercise.
    """
    return exercise(number).check(answer)


def use(number: str, answer: Any) -> Any:
    """The answer if it passes its check, else our own, so that a notebook runs on while exercises are open.

    Raises:
        UnknownName: there is no such exercise.
    """
    asked = exercise(number)
    return answer if asked.check(answer).passed else asked.reference


def exercise(number: str) -> Exercise:
    """The exercise of this number.

    Raises:
        UnknownName: there is none; lists those of the same notebook.
    """
    notebook = str(number).partition(".")[0]
    module = f"{__name__}.nb{notebook}"
    if not notebook.isdigit() or find_spec(module) is None:
        raise UnknownName(f'no exercise is called {number!r}; numbers look like "06.1"')
    exercises: dict[str, Exercise] = {entry.number: entry for entry in import_module(module).EXERCISES}
    if number not in exercises:
        raise UnknownName(f"no exercise is called {number!r}; there are {', '.join(exercises)}")
    return exercises[number]
