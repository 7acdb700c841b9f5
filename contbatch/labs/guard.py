"""Runs an answer so that nothing it does can stop the notebook.

An answer may raise, run for ever, edit what it was given, print, or call `exit`. Each becomes a `Trouble` with a
kind sentence. Endless loops are found by counting lines, not by a clock, so that a slow machine gives the same
verdict as a fast one. Lines inside this package do not count. An endless loop inside a C function (`sum` of an
endless iterator) is not found.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from copy import deepcopy
from dis import get_instructions
from pathlib import Path
from types import FrameType
from typing import Any

MAX_LINES = 100_000
"""Lines that an answer may run in one call; our own answers need fewer than a thousand."""

_PACKAGE = str(Path(__file__).parent.parent)


class NotYet(Exception):
    """The answer is still the empty one."""


class Trouble(Exception):
    """What an answer did instead of answering, in words."""

    def __init__(self, words: str, example: str = "") -> None:
        super().__init__(words)
        self.words, self.example = words, example


class _TooManyLines(BaseException):
    """Not an Exception, so that an `except Exception` in the answer does not swallow it."""


@contextmanager
def limited(max_lines: int = MAX_LINES) -> Iterator[None]:
    """Run a block under a limit of lines, and with its prints thrown away.

    Raises:
        Trouble: too many lines, or a call of `exit`.
    """
    left = max_lines

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        left -= 1
        if left < 0:
            raise _TooManyLines
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    except _TooManyLines:
        raise Trouble(f"still running after {max_lines:,} lines; look for a loop that never ends") from None
    except RecursionError:
        raise Trouble("the function calls itself without end") from None
    except SystemExit:
        raise Trouble("it called exit(); return the answer instead") from None
    finally:
        sys.settrace(before)


def ask(function: Any, *arguments: Any) -> Any:
    """What `function` answers. It works on copies, and must leave them as they were.

    Raises:
        NotYet: it raised NotImplementedError, or answered `...`.
        Trouble: there was no usable answer; says why, with the call as example.
    """
    given = deepcopy(arguments)
    example = call_text(function, arguments)
    try:
        with limited():
            answer = function(*given)
    except NotImplementedError:
        raise NotYet from None
    except Trouble as trouble:
        raise Trouble(trouble.words, example) from None
    except Exception as error:  # an answer may raise anything
        raise Trouble(f"it raised {type(error).__name__}: {error}", example) from None
    if answer is ...:
        raise NotYet
    if answer is None:
        raise Trouble("it returned None; does every path end with `return`?", example)
    if not same(given, arguments):
        raise Trouble("it changed what it was given; work on a copy of it", example)
    return answer


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, in type too for True and 1, and without trusting a strange `==`."""
    if isinstance(one, bool) is not isinstance(other, bool):
        return False
    try:
        return bool(one == other)
    except Exception:  # arrays and the like have no single truth value
        return repr(one) == repr(other)


def call_text(function: Any, arguments: tuple[Any, ...]) -> str:
    """A call as code, for messages."""
    name = getattr(function, "__name__", "answer")
    return f"{name}({', '.join(map(repr, arguments))})"


_EMPTY_BODY = {"RESUME", "LOAD_CONST", "RETURN_VALUE", "RETURN_CONST", "NOP", "CACHE", "LOAD_COMMON_CONSTANT"}


def is_stub(answer: Any) -> bool:
    """Whether nothing was written yet: `...`, None, or a function whose body is `...`, `pass` or `return None`."""
    if answer is ... or answer is None:
        return True
    code = getattr(answer, "__code__", None)
    if code is None or any(
        constant not in (None, ...) and not _is_docstring(code, constant) for constant in code.co_consts
    ):
        return False
    return all(instruction.opname in _EMPTY_BODY for instruction in get_instructions(code))


def _is_docstring(code: Any, constant: Any) -> bool:
    return isinstance(constant, str) and code.co_consts[0] == constant
